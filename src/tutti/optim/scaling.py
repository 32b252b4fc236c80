"""Applies a learning-rate factor to an optimizer for one update, so that schedulers never see it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from tutti.errors import PlanError


def initial_learning_rate(optimizer: Optimizer) -> float:
    """The rate of the first parameter group as the optimizer was made: `factor`'s `optimizer_lr`.

    Schedulers keep it as "initial_lr" when they change "lr". Ask before a checkpoint is loaded.
    """
    group = optimizer.param_groups[0]
    rate = group.get("initial_lr", group.get("lr"))
    if rate is None:
        raise PlanError(
            f"{type(optimizer).__name__} has no learning rate ('lr') in its parameter groups, so a learning-"
            "rate rule cannot scale it; remove lr_rule from the Job or use an optimizer with lr"
        )
    return float(rate)


@contextmanager
def scaled_learning_rate(optimizer: Optimizer, factor: float) -> Iterator[None]:
    """Inside, every parameter group's rate is multiplied by `factor`; afterwards it is exactly what it was.

    Wrap `optimizer.step()` in it; step schedulers outside. A rate kept as a tensor (capturable optimizers) is
    changed in place, since captured graphs hold on to it, and once only if groups share it.
    """
    groups = [group for group in optimizer.param_groups if "lr" in group]
    rates: list[Any] = [group["lr"] for group in groups]
    tensors = {id(rate): rate for rate in rates if isinstance(rate, Tensor)}
    kept = {key: rate.detach().clone() for key, rate in tensors.items()}
    for rate in tensors.values():
        rate.detach().mul_(factor)
    for group, rate in zip(groups, rates, strict=True):
        if id(rate) not in tensors:
            group["lr"] = rate * factor
    try:
        yield
    finally:
        for key, rate in tensors.items():
            rate.detach().copy_(kept[key])
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate

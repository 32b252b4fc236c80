"""Learning-rate rules: the rate of each step from the global batch size, with warm-up. Does not import torch.

The rate is a closed form of the step's number, so a resumed run needs no state. The rule multiplies the rate of the
user's scheduler (`learning_rate_factor`), so a decay written for one batch size stays as written. The factor applies
during one update only (`scaled_learning_rate`), so schedulers never see it.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from tutti.errors import PlanError

if TYPE_CHECKING:
    from torch.optim import Optimizer

Scale = Literal["none", "linear", "sqrt", "adascale"]
Warmup = Literal["none", "constant", "gradual"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LRRule:
    """A base rate stated for one batch size, and how it scales with the global batch size.

    `base_lr` was found good at `base_batch_size`. With k = global_batch_size / base_batch_size, `scale` sets the
    target:

    - "linear": k * base_lr (Goyal et al. 2017, arXiv 1706.02677, section 2.1).
    - "sqrt": sqrt(k) * base_lr, which keeps the covariance of an update (Krizhevsky 2014, arXiv 1404.5997, section 5).
    - "none": base_lr.
    - "adascale": base_lr times the gain of each step, measured from the gradient noise scale (Johnson et al. 2020,
      arXiv 2007.05105).

    "adascale" also advances a scheduler that counts steps by the gain, so that it counts steps of the base batch. It
    takes no warm-up. It is the only rule with measured rates: they differ a little between numbers of ranks, because
    the noise is estimated from the parts that ranks compute.

    Attributes:
        base_lr: the base rate; None: the optimizer's own rate.
        base_batch_size: batch size at which `base_lr` holds, in the unit of the Job's global batch size. Needed unless
            `scale` is "none".
        scale: how the target depends on the batch size.
        warmup: "constant" holds `warmup_start_lr` and then jumps to the target; "gradual" rises to the target by equal
            amounts per step (Goyal et al., section 2.2).
        warmup_steps: length of the warm-up in steps. A warm-up needs either this or `warmup_epochs`.
        warmup_epochs: length of the warm-up in epochs; fractions are allowed.
        warmup_start_lr: rate at the start of the warm-up. Default: the smaller of base_lr and the target under "linear"
            and "sqrt"; 0 under "none", where "constant" needs it stated.

    Examples:
        A rate of 0.1 that holds for 256 samples, on a global batch of 1024 samples, after five epochs of warm-up:

        >>> rule = LRRule(base_lr=0.1, base_batch_size=256, scale="linear", warmup="gradual", warmup_epochs=5)
        >>> [learning_rate(rule, 0.1, step, global_batch_size=1024, steps_per_epoch=100) for step in (0, 250, 500)]
        [0.1, 0.25, 0.4]
    """

    base_lr: float | None = None
    base_batch_size: int | None = None
    scale: Scale = "linear"
    warmup: Warmup = "none"
    warmup_steps: int | None = None
    warmup_epochs: float | None = None
    warmup_start_lr: float | None = None

    def __post_init__(self) -> None:
        _one_of("scale", self.scale, get_args(Scale))
        _one_of("warmup", self.warmup, get_args(Warmup))
        _number("base_lr", self.base_lr, above_zero=True)
        _number("warmup_start_lr", self.warmup_start_lr, above_zero=False)
        _number("warmup_epochs", self.warmup_epochs, above_zero=True)
        _count("warmup_steps", self.warmup_steps)
        _count("base_batch_size", self.base_batch_size)
        if self.scale != "none" and self.base_batch_size is None:
            raise PlanError(
                f"LRRule.base_batch_size is missing; the {self.scale} rule needs the batch size at which "
                "base_lr holds: give it"
            )
        if self.scale == "adascale" and self.warmup != "none":
            raise PlanError("LRRule.scale = 'adascale' starts at base_lr without a warm-up; leave warmup at 'none'")
        given = [name for name in ("warmup_steps", "warmup_epochs") if getattr(self, name) is not None]
        if self.warmup == "none":
            given += ["warmup_start_lr"] if self.warmup_start_lr is not None else []
            if given:
                raise PlanError(
                    f"LRRule.{given[0]} is given, but warmup = 'none'; set warmup to 'constant' or 'gradual'"
                )
        elif len(given) != 1:
            problem = "both are given" if given else "neither is given"
            raise PlanError(f"LRRule.warmup = {self.warmup!r} needs warmup_steps or warmup_epochs; {problem}: give one")
        if self.warmup == "constant" and self.scale == "none" and self.warmup_start_lr is None:
            raise PlanError(
                "LRRule.warmup = 'constant' with scale = 'none' has no rate to hold; give warmup_start_lr, "
                "or use warmup = 'gradual'"
            )


def learning_rate(
    rule: LRRule,
    optimizer_lr: float,
    step: int,
    *,
    global_batch_size: int,
    steps_per_epoch: int | None,
    gain: float = 1.0,
) -> float:
    """Return the rate of one step, without the user's scheduler.

    Args:
        rule: the rule.
        optimizer_lr: the optimizer's own rate, used where the rule has no base_lr.
        step: number of the step; 0 is the first update.
        global_batch_size: the Job's global batch size. An epoch's short last batch does not change it.
        steps_per_epoch: steps in an epoch; None where unknown.
        gain: AdaScale's gain of this step.

    Raises:
        PlanError: if the warm-up is in epochs and the length of an epoch is unknown.
    """
    base = optimizer_lr if rule.base_lr is None else rule.base_lr
    target = base * (gain if rule.scale == "adascale" else _scale(rule, global_batch_size))
    steps = warmup_length(rule, steps_per_epoch)
    if step >= steps:
        return target
    start = _start(rule, base, target)
    if rule.warmup == "constant":
        return start
    rate = start + (target - start) * (step / steps)
    return min(max(rate, min(start, target)), max(start, target))  # rounding must not pass either end


def learning_rate_factor(
    rule: LRRule,
    optimizer_lr: float,
    step: int,
    *,
    global_batch_size: int,
    steps_per_epoch: int | None,
    gain: float = 1.0,
) -> float:
    """Return the factor for the scheduled rate of every parameter group in one step.

    Args:
        rule: the rule.
        optimizer_lr: the rate with which the optimizer was made, before any scheduler; the same throughout a run.
        step: number of the step; 0 is the first update.
        global_batch_size: the Job's global batch size.
        steps_per_epoch: steps in an epoch; None where unknown.
        gain: AdaScale's gain of this step.

    Raises:
        PlanError: if `optimizer_lr` is not above 0, or as for `learning_rate`.
    """
    if not optimizer_lr > 0:
        raise PlanError(
            f"the optimizer's learning rate is {optimizer_lr}, which a learning-rate rule cannot scale; "
            "make the optimizer with a rate above 0"
        )
    rate = learning_rate(
        rule, optimizer_lr, step, global_batch_size=global_batch_size, steps_per_epoch=steps_per_epoch, gain=gain
    )
    return rate / optimizer_lr


def warmup_length(rule: LRRule, steps_per_epoch: int | None) -> int:
    """Return the length of the warm-up in steps, which is the first step that uses the target rate."""
    if rule.warmup_steps is not None:
        return rule.warmup_steps
    if rule.warmup_epochs is None:
        return 0
    if steps_per_epoch is None:
        raise PlanError(
            f"LRRule.warmup_epochs = {rule.warmup_epochs}, but the length of an epoch is unknown (the data "
            "set has no len()); give warmup_steps instead"
        )
    return max(1, round(rule.warmup_epochs * steps_per_epoch))


def _scale(rule: LRRule, global_batch_size: int) -> float:
    if rule.scale == "none" or rule.base_batch_size is None:
        return 1.0
    ratio = global_batch_size / rule.base_batch_size
    return ratio if rule.scale == "linear" else math.sqrt(ratio)


def _start(rule: LRRule, base: float, target: float) -> float:
    if rule.warmup_start_lr is not None:
        return rule.warmup_start_lr
    return 0.0 if rule.scale == "none" else min(base, target)


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise PlanError(f"LRRule.{name} = {value!r}; use one of {', '.join(map(repr, allowed))}")


def _number(name: str, value: object, *, above_zero: bool) -> None:
    if value is None:
        return
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (above_zero and value == 0):  # type: ignore[operator]
        raise PlanError(
            f"LRRule.{name} = {value!r}; give a finite number {'above 0' if above_zero else 'of 0 or more'}"
        )


def _count(name: str, value: object) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise PlanError(f"LRRule.{name} = {value!r}; give a whole number of 1 or more")


def initial_learning_rate(optimizer: "Optimizer") -> float:
    """Return the rate with which the first parameter group was made: the `optimizer_lr` of `learning_rate_factor`.

    Schedulers store it as "initial_lr" when they change "lr". Call this before a checkpoint is loaded.
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
def scaled_learning_rate(optimizer: "Optimizer", factor: float) -> Iterator[None]:
    """Multiply every parameter group's rate by `factor` inside this context, and restore it exactly afterwards.

    Wrap `optimizer.step()` in it, and step schedulers outside. A rate stored as a tensor (capturable optimizers) is
    changed in place, because captured graphs refer to it, and only once if groups share it.
    """
    from torch import Tensor

    groups = [group for group in optimizer.param_groups if "lr" in group]
    rates: list[Any] = [group["lr"] for group in groups]
    tensors = {id(rate): rate for rate in rates if isinstance(rate, Tensor)}
    saved = {key: rate.detach().clone() for key, rate in tensors.items()}
    for rate in tensors.values():
        rate.detach().mul_(factor)
    for group, rate in zip(groups, rates, strict=True):
        if id(rate) not in tensors:
            group["lr"] = rate * factor
    try:
        yield
    finally:
        for key, rate in tensors.items():
            rate.detach().copy_(saved[key])
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate

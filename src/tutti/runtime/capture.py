"""Stops a script at `Job.prepare` and takes what it was given: how describe and plan see a model without training.

One slot for the whole process, because the script is the user's and cannot be handed a parameter.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from tutti.spec.loading import Loading
from tutti.spec.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """What a script handed to `prepare`, and the plan its Job implies on one device.

    `samples(n)` gives the collated batch of the first n samples in data order, as (args, kwargs, target):
    `model(*args, **kwargs)` is the forward call and `loss(output, target)` the loss (already summed over samples
    or whatever the user's loss averages over; a 0-d tensor). `loading()` measures what a sample costs to load.
    """

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    loss: Callable[[Any, Any], Any]
    samples: Callable[[int], tuple[tuple[Any, ...], dict[str, Any], Any]]
    dataset: Any
    dataset_samples: int | None
    tokens_per_sample: int
    loading: Callable[[], Loading | None]
    plan: Plan


class CaptureDone(BaseException):
    """Raised out of the script to stop it; a BaseException so that the script's own handlers let it through."""

    def __init__(self, captured: Captured) -> None:
        super().__init__("script stopped at prepare")
        self.captured = captured


_capturing = False


@contextmanager
def capturing() -> Iterator[None]:
    """While open, `Job.prepare` raises `CaptureDone` instead of preparing."""
    global _capturing
    _capturing = True
    try:
        yield
    finally:
        _capturing = False


def is_capturing() -> bool:
    return _capturing

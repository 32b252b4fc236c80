"""Stops a script at `Job.prepare` and takes what it was given: how describe and plan see a model without training.

One slot for the whole process, because the script is the user's and cannot be handed a parameter.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
from torch import nn
from torch.optim import Optimizer

from tutti.config.model import Loading
from tutti.config.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedScript:
    """What a script handed to `prepare`, and the plan its Job implies on one device.

    `samples(n)` gives the collated batch of the first n samples in data order, as (args, kwargs, target):
    `model(*args, **kwargs)` is the forward call and `loss(output, target)` the loss (already summed over samples
    or whatever the user's loss averages over; a 0-d tensor). `loading()` measures what a sample costs to load.
    `script_nbytes`: by how much the script had made its process larger: libraries of its own, data in memory.
    """

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    loss: Callable[[Any, Any], Any]
    samples: Callable[[int], tuple[tuple[Any, ...], dict[str, Any], Any]]
    dataset: Any
    dataset_samples: int | None
    tokens_per_sample: int
    loading: Callable[[], Loading | None]
    script_nbytes: float
    plan: Plan


class CaptureDone(BaseException):
    """Raised out of the script to stop it; a BaseException so that the script's own handlers let it through."""

    def __init__(self, captured: CapturedScript) -> None:
        super().__init__("script stopped at prepare")
        self.captured = captured


_initial_nbytes: int | None = None
"""What the process held when capturing began; None while nothing is captured."""


@contextmanager
def capturing() -> Iterator[None]:
    """While open, `Job.prepare` raises `CaptureDone` instead of preparing. What every rank loads, whatever its script,
    is to be loaded before."""
    global _initial_nbytes
    _initial_nbytes = _resident_nbytes()
    try:
        yield
    finally:
        _initial_nbytes = None


def is_capturing() -> bool:
    return _initial_nbytes is not None


def script_growth_nbytes() -> float:
    """By how much the process has grown since capturing began. Modules that were loaded before are not in it: of
    scripts that are captured one after the other in a process, the first has them all."""
    return float(max(0, _resident_nbytes() - (_initial_nbytes or 0)))


def _resident_nbytes() -> int:
    return int(psutil.Process().memory_info().rss)

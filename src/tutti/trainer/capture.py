"""Capturing: stop a script at `Job.prepare` and take its arguments, to describe and plan it without training.

The state is one module-level variable, because the user's script cannot be handed a parameter.
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
    """The arguments that a script passed to `prepare`, and the plan that its Job implies on one device.

    Attributes:
        loss: loss(output, target) -> 0-d tensor, reduced over samples as the user's loss does.
        samples: samples(n) -> (args, kwargs, target) of the batch of the first n samples, collated, in data order;
            `model(*args, **kwargs)` is the forward call.
        dataset_samples: number of samples; None if unknown.
        tokens_per_sample: mean tokens per sample; 0 if unknown.
        loading: measures the cost of loading a sample; None if that cannot be measured.
        script_nbytes: growth of the process's memory while the script ran: its libraries, and its data in memory.
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
    """Raised out of the script to stop it. A BaseException, so that the script's own handlers let it through."""

    def __init__(self, captured: CapturedScript) -> None:
        super().__init__("script stopped at prepare")
        self.captured = captured


_initial_nbytes: int | None = None
"""Resident memory of the process when capturing began; None while no script is captured."""


@contextmanager
def capturing() -> Iterator[None]:
    """Inside, `Job.prepare` raises `CaptureDone` instead of preparing.

    Modules that every rank loads, whatever its script, should be imported before, so that `script_nbytes` leaves them
    out.
    """
    global _initial_nbytes
    _initial_nbytes = _resident_nbytes()
    try:
        yield
    finally:
        _initial_nbytes = None


def is_capturing() -> bool:
    return _initial_nbytes is not None


def script_growth_nbytes() -> float:
    """Return by how many bytes the process has grown since capturing began.

    Modules that were loaded before do not count. If a process captures several scripts in turn, modules that they share
    count for the first script only.
    """
    return float(max(0, _resident_nbytes() - (_initial_nbytes or 0)))


def _resident_nbytes() -> int:
    return int(psutil.Process().memory_info().rss)

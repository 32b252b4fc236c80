"""Capturing: stop a script at `Job.prepare` and take its arguments, to describe and plan it without training.

A script that computes its own losses is followed through its first step, which shows them. The state is one
module-level variable, because the user's script cannot be handed a parameter.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import CellType, FunctionType
from typing import Any, NoReturn

import psutil
from torch import nn
from torch.optim import Optimizer

from tutti.config.model import Loading
from tutti.config.plan import Plan
from tutti.data.samples import DataSource
from tutti.data.share_loader import first_samples
from tutti.parallel.data.replicate import LossFunction

TRACED_SAMPLES = 4
"""Samples in the traced batch. Half of it is traced too, to separate costs per sample from costs per pass."""

MOST_LOSSES = 100
"""Losses of one step. A script that has more may never ask for a second batch."""


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
        losses: the (function, batch) pairs of the calls of `forward_backward` in the script's first step; empty if it
            makes none.
        failed: why the script did not complete its first step; empty if it did, or was not followed.
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
    losses: tuple[tuple[LossFunction, Any], ...] = ()
    failed: str = ""


class CaptureDone(BaseException):
    """Raised out of the script to stop it. A BaseException, so that the script's own handlers let it through."""


@dataclass(slots=True, kw_only=True)
class Capture:
    """Capturing in progress.

    Attributes:
        initial_nbytes: resident memory of the process when capturing began.
        follow: whether the script goes on after `prepare`, through its first step.
        captured: what the script gave to `prepare`, once it has called it.
    """

    initial_nbytes: int
    follow: bool
    captured: CapturedScript | None = None


class FollowedScript:
    """A script in its first step: losses are noted, nothing is computed. Anything else that needs a Run ends it.

    Args:
        capture: takes the losses.
        source: the training data.
        seed: seed of the Job.
        step_loss: computes the loss of `prepare`, as `Job.step` does.
    """

    def __init__(self, capture: Capture, source: DataSource, seed: int, step_loss: LossFunction) -> None:
        self.capture = capture
        self.source = source
        self.seed = seed
        self.step_loss = step_loss
        self.losses: list[tuple[LossFunction, Any]] = []
        self.has_batch = self.has_own = False

    def __len__(self) -> int:
        """Return the number of steps in an epoch; 1 if it is unknown."""
        assert self.capture.captured is not None
        return max(1, (self.source.samples or 0) // self.capture.captured.plan.batch.global_batch_size)

    def __iter__(self) -> Iterator[Any]:
        if self.has_batch:
            self.end()
        self.has_batch = True
        yield first_samples(self.source, self.seed, TRACED_SAMPLES)
        self.end()

    def epochs(self) -> Iterator[int]:
        yield 0
        self.end()

    def step(self, batch: Any) -> float:
        return self.forward_backward(self.step_loss, batch)

    def forward_backward(self, function: LossFunction, batch: Any) -> float:
        """Note a loss, and return 1.0 for it, which scripts may divide by."""
        if len(self.losses) == MOST_LOSSES:
            self.end()
        self.losses.append((as_it_is_now(function), batch))
        self.has_own = self.has_own or function is not self.step_loss
        if self.has_own:
            assert self.capture.captured is not None
            self.capture.captured = replace(self.capture.captured, losses=tuple(self.losses))
        return 1.0

    def end(self) -> NoReturn:
        raise CaptureDone


def as_it_is_now(function: LossFunction) -> LossFunction:
    """Return a copy of a Python function that sees the variables around it as they are now, not as they will be."""
    if not isinstance(function, FunctionType):
        return function
    cells = tuple(CellType(cell.cell_contents) if _is_set(cell) else cell for cell in function.__closure__ or ())
    copied = FunctionType(
        function.__code__, dict(function.__globals__), function.__name__, function.__defaults__, cells or None
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__qualname__ = function.__qualname__
    return copied


def _is_set(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


_capture: Capture | None = None


@contextmanager
def capturing(*, follow: bool = False) -> Iterator[Capture]:
    """Inside, `Job.prepare` keeps its arguments and ends the block instead of preparing.

    Modules that every rank loads, whatever its script, should be imported before, so that `script_nbytes` leaves them
    out.

    Args:
        follow: whether scripts go on after `prepare`, through their first step.
    """
    global _capture
    _capture = Capture(initial_nbytes=_resident_nbytes(), follow=follow)
    try:
        with suppress(CaptureDone):
            yield _capture
    finally:
        _capture = None


def is_capturing() -> bool:
    return _capture is not None


def end_prepare(captured: CapturedScript, source: DataSource, seed: int, step_loss: LossFunction) -> FollowedScript:
    """Keep what a script gave to `prepare`, and return what follows it; without following, stop it here.

    Raises:
        CaptureDone: the script is not followed.
    """
    assert _capture is not None
    _capture.captured = captured
    if not _capture.follow:
        raise CaptureDone
    return FollowedScript(_capture, source, seed, step_loss)


def script_growth_nbytes() -> float:
    """Return by how many bytes the process has grown since capturing began.

    Modules that were loaded before do not count. If a process captures several scripts in turn, modules that they share
    count for the first script only.
    """
    return float(max(0, _resident_nbytes() - (_capture.initial_nbytes if _capture else 0)))


def _resident_nbytes() -> int:
    return int(psutil.Process().memory_info().rss)

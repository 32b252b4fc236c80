"""Learning-rate schedulers, each of which belongs to the optimizer that it was built with."""

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch.optim import Optimizer

from tutti.errors import CheckpointError, ScriptError

Clock = Literal["step", "epoch"]

Kind = Literal["plain", "metric", "counted"]
"""What a scheduler's `step` takes: nothing, a metric (ReduceLROnPlateau), or the number of the epoch (timm's)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundScheduler:
    """A scheduler of the user's.

    Attributes:
        optimizer: the optimizer whose rates it sets.
    """

    scheduler: Any
    optimizer: Optimizer
    kind: Kind


class Schedules:
    """The schedulers of a run: when each advances, and what of them a checkpoint saves.

    Args:
        schedulers: the user's schedulers.
        optimizers: the optimizers that were passed to prepare.
        clock: what schedulers without a metric count.

    Raises:
        ScriptError: a scheduler belongs to no optimizer of the run, or cannot be advanced or saved.
    """

    def __init__(self, schedulers: Iterable[Any], optimizers: Sequence[Optimizer], clock: Clock) -> None:
        self.clock = clock
        self.bound = [_bind(scheduler, optimizers) for scheduler in schedulers]
        self._told = False
        self._total = self._samples = 0.0
        self._unread: list[tuple[float, int]] = []

    @property
    def names(self) -> str | None:
        """The schedulers' classes, for reports; None without any."""
        return " + ".join(type(entry.scheduler).__name__ for entry in self.bound) or None

    @property
    def follows_metric(self) -> bool:
        """Whether a scheduler waits for a metric."""
        return any(entry.kind == "metric" for entry in self.bound)

    def updated(self, optimizer: Optimizer, steps: int, updates: int) -> None:
        """Advance the schedulers of an optimizer that has made an update.

        Args:
            optimizer: the optimizer.
            steps: how many steps a scheduler that counts steps advances.
            updates: updates that the optimizer has made.
        """
        for entry in self.bound:
            if entry.optimizer is not optimizer:
                continue
            if entry.kind == "counted":
                entry.scheduler.step_update(updates)
            elif entry.kind == "plain" and self.clock == "step":
                for _ in range(steps):
                    entry.scheduler.step()

    def resumed(self, optimizers: Iterable[Optimizer]) -> None:
        """Let torch know that optimizers have made updates in the run that a checkpoint continues.

        torch warns where a scheduler advances before its optimizer's first step, and sees only this process' steps:
        an epoch whose last update the checkpoint has may end before the next one.
        """
        for entry in self.bound:
            if any(entry.optimizer is optimizer for optimizer in optimizers):
                entry.optimizer._opt_called = True  # type: ignore[attr-defined]

    def trained(self, loss: float, samples: int) -> None:
        """Add the loss of an update to the epoch's mean training loss."""
        if not self.follows_metric:
            return
        self._unread.append((loss, samples))
        self._read(but=1)  # an accelerator may still compute the last one

    def _read(self, but: int = 0) -> None:
        """Add the losses that were given, but the last ones."""
        while len(self._unread) > but:
            loss, samples = self._unread.pop(0)
            if math.isfinite(loss):
                self._total += loss * samples
                self._samples += samples

    def undoing(self) -> Callable[[], None]:
        """Return what sets schedulers, and the rates that they have set, back to what they are now."""
        groups = [
            (group, {name: value for name, value in group.items() if name != "params"})
            for optimizer in {id(entry.optimizer): entry.optimizer for entry in self.bound}.values()
            for group in optimizer.param_groups
        ]
        states = [(entry.scheduler, copy.deepcopy(entry.scheduler.state_dict())) for entry in self.bound]

        def undo() -> None:
            for scheduler, state in states:
                scheduler.load_state_dict(state)
            for group, values in groups:
                group.update(values)

        return undo

    def measured(self, metric: float) -> None:
        """Advance the schedulers that follow a metric.

        Raises:
            ScriptError: no scheduler does.
        """
        if not self.follows_metric:
            raise ScriptError(
                "schedule was called, but no scheduler of the run follows a metric; pass ReduceLROnPlateau to prepare "
                "(update and epochs advance the others)"
            )
        self._told = True
        for entry in self.bound:
            if entry.kind == "metric":
                entry.scheduler.step(metric)

    def epoch_ended(self, epochs: int) -> None:
        """Advance what counts epochs, and what follows a metric if `measured` was not called in this epoch.

        Args:
            epochs: epochs that have ended.

        Raises:
            ScriptError: a scheduler waits for a metric to grow, and was given none.
        """
        self._read()
        for entry in self.bound:
            if entry.kind == "counted":
                entry.scheduler.step(epochs)
            elif entry.kind == "plain" and self.clock == "epoch":
                entry.scheduler.step()
            elif entry.kind == "metric" and not self._told and self._samples:
                if getattr(entry.scheduler, "mode", "min") != "min":
                    raise ScriptError(
                        f"{type(entry.scheduler).__name__}(mode={entry.scheduler.mode!r}) got no metric in this epoch; "
                        "call job.schedule(metric) once an epoch, or use mode='min' to follow the training loss"
                    )
                entry.scheduler.step(self._total / self._samples)
        self._told, self._total, self._samples = False, 0.0, 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` restores."""
        self._read()
        return {
            "schedulers": [entry.scheduler.state_dict() for entry in self.bound],
            "epoch": [self._told, self._total, self._samples],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the schedulers' states; those of a checkpoint without schedulers leave them as they are.

        Raises:
            CheckpointError: the checkpoint was made with another number of schedulers.
        """
        saved = state["schedulers"]
        if not saved or not self.bound:
            return
        if len(saved) != len(self.bound):
            raise CheckpointError(
                f"the checkpoint holds {len(saved)} schedulers, prepare got {len(self.bound)}; pass the same schedulers"
            )
        for entry, scheduler_state in zip(self.bound, saved, strict=True):
            entry.scheduler.load_state_dict(scheduler_state)
        self._told, self._total, self._samples = state["epoch"]


def make_schedules(scheduler: Any, optimizers: Sequence[Optimizer], clock: Clock) -> Schedules:
    """Return the schedules of a run.

    Args:
        scheduler: the user's scheduler, a list of them, or None.
        optimizers: the optimizers that were passed to prepare.
        clock: whether schedulers count steps or epochs.

    Raises:
        ScriptError: as for `Schedules`.
    """
    schedulers = scheduler if isinstance(scheduler, list | tuple) else [] if scheduler is None else [scheduler]
    return Schedules(schedulers, optimizers, clock)


def _bind(scheduler: Any, optimizers: Sequence[Optimizer]) -> BoundScheduler:
    """Find out what a scheduler belongs to and what its `step` takes."""
    name = type(scheduler).__name__
    if not all(callable(getattr(scheduler, method, None)) for method in ("step", "state_dict", "load_state_dict")):
        raise ScriptError(
            f"prepare got {name} as scheduler, which lacks step, state_dict or load_state_dict; pass a scheduler of "
            "torch.optim.lr_scheduler, or a list of them"
        )
    optimizer = getattr(scheduler, "optimizer", None)
    if optimizer is None and len(optimizers) == 1:
        optimizer = optimizers[0]
    if optimizer is None or not any(optimizer is known for known in optimizers):
        raise ScriptError(
            f"the scheduler {name} belongs to no optimizer that was passed to prepare; build it with one of them "
            "(a scheduler advances with the updates of its attribute `optimizer`)"
        )
    return BoundScheduler(scheduler=scheduler, optimizer=optimizer, kind=_kind(scheduler, name))


def _kind(scheduler: Any, name: str) -> Kind:
    needed = required_arguments(scheduler.step)
    if not needed:
        return "plain"
    if needed[0] in ("metrics", "metric") and len(needed) == 1:
        return "metric"
    if needed == ["epoch"] and callable(getattr(scheduler, "step_update", None)):
        return "counted"
    raise ScriptError(
        f"{name}.step needs {', '.join(needed)}, which tutti does not know; pass a scheduler whose step takes no "
        "argument, or leave it out of prepare and call its step yourself after job.update"
    )


def required_arguments(function: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments that a call of `function` cannot leave out; none if that is unknown."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and (parameter.kind in positional or parameter.kind is parameter.KEYWORD_ONLY)
    ]

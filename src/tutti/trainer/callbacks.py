"""Callbacks of a Job: functions of the user around training, epochs, steps and evaluations, and early stopping.

`JobCallbacks` calls them, on every rank. Their state is rank 0's and is saved in checkpoints.
"""

import math
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from tutti.comm.world import World
from tutti.errors import RankMismatchError, ScriptError, TuttiError

EVENTS = (
    "on_train_start",
    "on_epoch_start",
    "on_step_end",
    "on_evaluate_end",
    "on_log",
    "on_epoch_end",
    "on_train_end",
)
_PACKAGE = str(Path(__file__).parent.parent)


class Callback:
    """What a Job calls while it trains. Every method is optional and is called on every rank, except `on_log`.

    Methods may call those of the Job. State that `state_dict` returns is saved in checkpoints, from rank 0, and is
    given to `load_state_dict` on every rank of a resumed run.

    Attributes:
        stop_reason: a sentence that ends `job.epochs` after the epoch; empty to go on. Rank 0's counts.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from torch.utils.data import TensorDataset
        >>> from tutti import Callback, Job
        >>> class Announce(Callback):
        ...     def on_epoch_end(self, job, epoch):
        ...         job.print(f"epoch {epoch} has ended")
        >>> job = Job(global_batch_size=4, folder="runs/callback", callbacks=[Announce()])
        >>> model = nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> data = TensorDataset(torch.ones(8, 3), torch.ones(8, 1))
        >>> model, optimizer, loader = job.prepare(model, optimizer, data, nn.MSELoss())
        >>> for epoch in job.epochs(2):
        ...     for batch in loader:
        ...         loss = job.step(batch)
        epoch 0 has ended
        epoch 1 has ended
    """

    stop_reason: str = ""

    def on_train_start(self, job: Any) -> None:
        """Training begins: `job.epochs` is about to yield its first epoch, or the first update is made."""

    def on_epoch_start(self, job: Any, epoch: int) -> None:
        """`job.epochs` is about to yield an epoch."""

    def on_step_end(self, job: Any, step: int, loss: float) -> None:
        """An update is made.

        Args:
            job: the Job.
            step: number of updates made so far.
            loss: global mean loss, as `job.step` returns it.
        """

    def on_evaluate_end(self, job: Any, values: dict[str, float]) -> None:
        """`job.evaluate` is about to return `values`."""

    def on_log(self, job: Any, values: dict[str, float]) -> None:
        """On rank 0: numbers from `job.evaluate` and `job.log`, by the names that loggers see ("test/loss")."""

    def on_epoch_end(self, job: Any, epoch: int) -> None:
        """All batches of an epoch are trained, or the script has left its loader."""

    def on_train_end(self, job: Any) -> None:
        """`job.epochs` has ended; the last checkpoint is written."""


class EarlyStopping(Callback):
    """Ends `job.epochs` after the epoch in which a value has not improved for `patience` evaluations.

    The count is saved in checkpoints. A resumed run that had stopped trains on only with more patience.

    Args:
        metric: name of the value: a keyword of `job.log`, or a result of `job.evaluate`, alone ("accuracy") or with the
            name of the evaluation ("val_accuracy", "val/accuracy").
        patience: evaluations without an improvement that end the training.
        mode: whether a lower ("min") or a higher ("max") value is better.
        min_delta: difference from the best value that counts as an improvement.

    Raises:
        ScriptError: an argument is not valid.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from torch.utils.data import TensorDataset
        >>> from tutti import EarlyStopping, Job
        >>> job = Job(global_batch_size=8, folder="runs/early", callbacks=[EarlyStopping("val_loss", patience=2)])
        >>> model = nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # the loss never improves
        >>> data = TensorDataset(torch.ones(8, 3), torch.ones(8, 1))
        >>> model, optimizer, loader = job.prepare(model, optimizer, data, nn.MSELoss())
        >>> for epoch in job.epochs(100):
        ...     for batch in loader:
        ...         loss = job.step(batch)
        ...     values = job.evaluate(data, name="val")
        >>> epoch
        2
    """

    def __init__(
        self, metric: str, patience: int = 3, mode: Literal["min", "max"] = "min", min_delta: float = 0.0
    ) -> None:
        if mode not in ("min", "max"):
            raise ScriptError(f"EarlyStopping(mode={mode!r}); use 'min' or 'max'")
        if patience < 1:
            raise ScriptError(f"EarlyStopping(patience={patience}); give a number of evaluations of 1 or more")
        if not min_delta >= 0:
            raise ScriptError(f"EarlyStopping(min_delta={min_delta}); give 0 or more")
        self.metric, self.patience, self.mode, self.min_delta = metric, patience, mode, min_delta
        self.best: float | None = None
        self.without_improvement = 0
        self._name: str | None = None
        self._others: dict[str, None] = {}

    @property
    def stop_reason(self) -> str:  # type: ignore[override]
        if self.without_improvement < self.patience:
            return ""
        times = "1 evaluation" if self.patience == 1 else f"{self.patience} evaluations"
        return f"{self.metric} did not improve for {times}"

    @property
    def watched(self) -> str | None:
        """Name of the value that is watched, such as "val/loss"; None until it was given."""
        return self._name

    def on_log(self, job: Any, values: dict[str, float]) -> None:
        """Compare the watched value with the best one."""
        name = self._watched(values)
        if name is None:
            self._others |= dict.fromkeys(values)
            return
        value, best = values[name], self.best
        gain = 0.0 if best is None else best - value if self.mode == "min" else value - best
        if not math.isnan(value) and (best is None or gain > self.min_delta):
            self.best, self.without_improvement = value, 0
        else:
            self.without_improvement += 1

    def on_epoch_end(self, job: Any, epoch: int) -> None:
        """Say so where values were given, but not the watched one."""
        if job.is_main and self._name is None and self._others:
            job.print(
                f"tutti: warning: EarlyStopping watches {self.metric!r}, which job.evaluate and job.log have not "
                f"given so far; they gave {', '.join(self._others)}",
                file=sys.stderr,
            )
            self._others = {}

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "without_improvement": self.without_improvement, "name": self._name}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self.without_improvement = state["best"], state["without_improvement"]
        self._name = state["name"]

    def _watched(self, values: Mapping[str, float]) -> str | None:
        """Return which of these names is the watched one; None if none is.

        Raises:
            ScriptError: several evaluations give a value of this name.
        """
        full = next((name for name in values if self.metric in (name, name.replace("/", "_", 1))), None)
        name = full or next((name for name in values if name.partition("/")[2] == self.metric), None)
        if name is not None and self._name not in (None, name):
            raise ScriptError(
                f"EarlyStopping watches {self.metric!r}, which both {self._name} and {name} are; write "
                f"{name.replace('/', '_', 1)!r} or {str(self._name).replace('/', '_', 1)!r}"
            )
        self._name = name or self._name
        return name


@dataclass(slots=True)
class JobCallbacks:
    """The callbacks of a Job, in the order in which they are called.

    Attributes:
        callbacks: objects with some of the methods of `Callback`.
        started: whether `on_train_start` was called, and `on_train_end` was not.
    """

    callbacks: tuple[Any, ...] = ()
    started: bool = False
    _losses: list[float] = field(default_factory=list)
    _used: bool = False

    @classmethod
    def of(cls, callbacks: Sequence[Any]) -> "JobCallbacks":
        """Check the callbacks that a script gives.

        Raises:
            ScriptError: an object is no callback, or one of its methods is misspelt.
        """
        for callback in callbacks:
            name = type(callback).__name__
            methods = [method for method in dir(callback) if method.startswith("on_")]
            if isinstance(callback, type) or not methods:
                what = callback.__name__ if isinstance(callback, type) else name
                raise ScriptError(f"callbacks holds {what}, which is no callback; pass an object with on_... methods")
            for method in methods:
                near = get_close_matches(method, EVENTS, n=1)
                if method not in EVENTS and near and callable(getattr(callback, method)):
                    raise ScriptError(f"callback {name} has {method}, which is never called; did you mean {near[0]}?")
        return cls(callbacks=tuple(callbacks))

    def check_same(self, everyone: Sequence[Sequence[str]]) -> None:
        """Check the names of all ranks' callbacks, which must be equal.

        Raises:
            RankMismatchError: on every rank.
        """
        for rank, names in enumerate(everyone):
            if list(names) != list(everyone[0]):
                raise RankMismatchError(
                    f"callbacks differ between ranks: rank 0 has {', '.join(everyone[0]) or 'none'}, rank {rank} has "
                    f"{', '.join(names) or 'none'}; pass the same ones on every rank"
                )

    def __bool__(self) -> bool:
        return bool(self.callbacks)

    @property
    def names(self) -> list[str]:
        return [type(callback).__name__ for callback in self.callbacks]

    def call(self, event: str, job: Any, *arguments: Any) -> None:
        """Call one method of every callback that has it.

        Raises:
            ScriptError: a callback failed; names it and the line.
        """
        for callback in self.callbacks:
            method = getattr(callback, event, None)
            if method is None:
                continue
            try:
                method(job, *arguments)
            except TuttiError:
                raise
            except Exception as error:
                raise ScriptError(
                    f"callback {type(callback).__name__} failed in {event}{_line_of(error)}: "
                    f"{type(error).__name__}: {error}"
                ) from error

    def start(self, job: Any) -> None:
        """Call `on_train_start` unless training has started."""
        if not self.started:
            self.started = True
            self.call("on_train_start", job)

    def end(self, job: Any) -> None:
        """Call `on_train_end` if training has started."""
        if self.started:
            self.started = False
            self.call("on_train_end", job)

    def computed(self, loss: float) -> None:
        """Note the loss of a call of `forward_backward`; losses of several calls before an update add up."""
        self._losses = [loss] if self._used else [*self._losses, loss]
        self._used = False

    def updated(self, job: Any, step: int) -> None:
        """Call `on_step_end`."""
        self._used = True
        if self.callbacks:
            self.start(job)
            self.call("on_step_end", job, step, sum(self._losses))

    def logged(self, job: Any, values: Mapping[str, Any]) -> None:
        """Call `on_log` with those of the values that are numbers, on rank 0."""
        if self.callbacks and job.is_main:
            self.call("on_log", job, numbers(values))

    def stop_reason(self, world: World) -> str:
        """Return why rank 0's callbacks end the training; empty if they do not. Collective."""
        if not self.callbacks:
            return ""
        reasons = (str(getattr(callback, "stop_reason", "") or "") for callback in self.callbacks)
        return world.broadcast(next(filter(None, reasons), ""))

    @property
    def watched(self) -> str | None:
        """Name of the value by which an EarlyStopping of this rank has ended the training; None if none has."""
        ended = (callback for callback in self.callbacks if getattr(callback, "stop_reason", ""))
        return next((name for callback in ended if (name := getattr(callback, "watched", None))), None)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every callback that has one, by a name that does not depend on the others."""
        return {name: callback.state_dict() for name, callback in self._stateful().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of the callbacks that the checkpoint knows; others begin anew."""
        for name, callback in self._stateful().items():
            if name in state:
                callback.load_state_dict(state[name])

    def _stateful(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for callback in self.callbacks:
            if hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict"):
                name = ":".join(filter(None, (type(callback).__name__, str(getattr(callback, "metric", "") or ""))))
                count = sum(known.partition("#")[0] == name for known in found)
                found[f"{name}#{count}" if count else name] = callback
        return found


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that are numbers, as floats; a tensor of one element counts as one."""
    found = {}
    for name, value in values.items():
        if hasattr(value, "item") and getattr(value, "numel", lambda: 1)() == 1:
            value = value.item()
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[name] = float(value)
    return found


def _line_of(error: BaseException) -> str:
    """Return " (file:line)" of the user's innermost line, which raised the error or led to it; "" if unknown."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_PACKAGE)]
    own = [frame for frame in frames if not frame.filename.startswith((sys.prefix, sys.base_prefix, "<"))]
    return f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""

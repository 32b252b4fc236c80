"""Callbacks of a Job: functions of the user around training, epochs, steps and evaluations, and early stopping.

`JobCallbacks` calls them, on every rank. Their state is rank 0's and is saved in checkpoints.
"""

import inspect
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal

from tutti.comm.world import World
from tutti.errors import RankMismatchError, ScriptError, TuttiError
from tutti.trainer.deferred_results import sum_of

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

_ARGUMENTS = {"on_epoch_start": ("epoch",), "on_epoch_end": ("epoch",), "on_step_end": ("step", "loss"),
              "on_evaluate_end": ("values",), "on_log": ("values",)}  # fmt: skip
"""What a method gets besides the Job."""

_NAMES_ELSEWHERE = {
    **dict.fromkeys(("on_train_begin", "on_fit_start", "on_init_end"), "on_train_start"),
    **dict.fromkeys(("on_epoch_begin", "on_train_epoch_start"), "on_epoch_start"),
    **dict.fromkeys(
        ("on_step_begin", "on_step_start", "on_substep_end", "on_batch_end", "on_train_batch_end", "on_after_step"),
        "on_step_end",
    ),
    **dict.fromkeys(
        (
            "on_evaluate", "on_eval_end", "on_predict", "on_predict_end", "on_prediction_step", "on_test_end",
            "on_test_epoch_end", "on_validation_end", "on_validation_epoch_end",
        ),
        "on_evaluate_end",
    ),
    "on_fit_end": "on_train_end",
    "on_train_epoch_end": "on_epoch_end",
    "on_save_checkpoint": "state_dict",
    "on_load_checkpoint": "load_state_dict",
}  # fmt: skip
"""Methods of callbacks of Hugging Face, Lightning and Keras -> the method of ours that comes nearest."""


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
        if not isinstance(metric, str) or not metric:
            raise ScriptError(f"EarlyStopping(metric={metric!r}); give the name of a value, such as 'val_loss'")
        if mode not in ("min", "max"):
            raise ScriptError(f"EarlyStopping(mode={mode!r}); use 'min' or 'max'")
        if not is_number(patience, Integral) or patience < 1:
            raise ScriptError(f"EarlyStopping(patience={patience!r}); give a whole number of evaluations of 1 or more")
        if not is_number(min_delta) or not min_delta >= 0:
            raise ScriptError(f"EarlyStopping(min_delta={min_delta!r}); give a number of 0 or more")
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
    def of(cls, callbacks: Any) -> "JobCallbacks":
        """Check the callbacks that a script gives: several, one, or None.

        Raises:
            ScriptError: an object is no callback, or one of its methods is never called, or takes other arguments.
        """
        given = objects_of(callbacks, _is_callback)
        for callback in given:
            if not _is_callback(callback):
                raise ScriptError(
                    f"callbacks holds {name_of(callback)}, which is no callback; pass an object with on_... methods"
                )
            _check_methods(callback)
        return cls(callbacks=given)

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
            if method is not None and not _is_of_a_framework(callback, event):
                _called(callback, event, method, job, *arguments)

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
            self.call("on_step_end", job, step, sum_of(self._losses))

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
        """Return the state of every callback that has one, by a name that does not depend on the others.

        Raises:
            ScriptError: a callback failed; names it and the line.
        """
        return {
            name: _called(callback, "state_dict", callback.state_dict) for name, callback in self._stateful().items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of the callbacks that the checkpoint knows; others begin anew.

        Raises:
            ScriptError: a callback failed; names it and the line.
        """
        for name, callback in self._stateful().items():
            if name in state:
                _called(callback, "load_state_dict", callback.load_state_dict, state[name])

    def _stateful(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for callback in self.callbacks:
            if hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict"):
                name = ":".join(filter(None, (type(callback).__name__, str(getattr(callback, "metric", "") or ""))))
                count = sum(known.partition("#")[0] == name for known in found)
                found[f"{name}#{count}" if count else name] = callback
        return found


def objects_of(given: Any, is_one: Callable[[Any], bool]) -> tuple[Any, ...]:
    """Return what a script gives where several objects of a kind are meant: a collection, one object, or None."""
    if given is None:
        return ()
    single = isinstance(given, str | type) or is_one(given) or not isinstance(given, Iterable)
    return (given,) if single else tuple(given)


def name_of(given: Any) -> str:
    """Return the name of a class or function, or that of an object's class."""
    return str(getattr(given, "__name__", type(given).__name__))


def is_number(value: Any, kind: type = Real) -> bool:
    """Whether a value is a number of a kind; True and False are none."""
    return isinstance(value, kind) and not isinstance(value, bool)


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that are numbers, as floats; True and False are 1 and 0."""
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}


def _is_callback(given: Any) -> bool:
    return not isinstance(given, type) and any(name.startswith("on_") for name in dir(given))


def _check_methods(callback: Any) -> None:
    """Check that methods named on_... are called, with the arguments that they take.

    Methods that the callback inherits from another framework's base class, which defines all of that framework's
    events, are not the user's: they are not judged, and those that cannot take our arguments are not called.

    Raises:
        ScriptError: a method is never called, or takes other arguments.
    """
    name, bases = type(callback).__name__, [None, *type(callback).__mro__]
    methods = [method for method in dir(callback) if method.startswith("on_")]
    for method in sorted(methods, key=lambda method: bases.index(_definer(callback, method))):
        function = getattr(callback, method)
        if not callable(function):
            continue
        if _is_of_a_framework(callback, method):
            _check_not_hidden(callback, method)
        elif method in EVENTS:
            given = ("job", *_ARGUMENTS.get(method, ()))
            if not _takes(function, len(given)):
                raise ScriptError(
                    f"callback {name} has {method}{inspect.signature(function)}, which is called as "
                    f"{method}({', '.join(given)}); let it take these arguments"
                )
        else:
            _refuse_unknown(callback, method)


def _refuse_unknown(callback: Any, method: str) -> None:
    """Refuse a method that is never called, and name the one that is meant."""
    near = get_close_matches(method, EVENTS, n=1)
    known = _NAMES_ELSEWHERE.get(method) or next(iter(near), None)
    if known is None and _definer(callback, method) is None:
        return  # a function that the object keeps, perhaps to call it itself
    remedy = f"did you mean {known}?" if known else f"the methods are {', '.join(EVENTS)}"
    raise ScriptError(
        f"callback {type(callback).__name__} has {method}, which is never called; {remedy}"
        + ("" if known else " (if your own code calls it, give it a name without on_)")
    )


def _check_not_hidden(callback: Any, method: str) -> None:
    """Check that a method of another framework's base class hides none that a callback of ours needs."""
    first, *others = (base for base in type(callback).__mro__ if method in vars(base))
    ours = next((base for base in others if issubclass(base, Callback) and base is not Callback), None)
    if ours is not None:
        raise ScriptError(
            f"callback {type(callback).__name__} inherits {method} from {first.__name__}, which hides that of "
            f"{ours.__name__}; name {ours.__name__} first among its base classes"
        )


def _is_of_a_framework(callback: Any, method: str) -> bool:
    """Whether a method comes from a base class of another installed package, and is no method of ours.

    The packages' own objects are judged like the user's: their methods would not do what they are for.
    """
    definer = _definer(callback, method)
    if definer is None or issubclass(definer, Callback):
        return False
    package = definer.__module__.partition(".")[0]
    file = getattr(sys.modules.get(definer.__module__), "__file__", None) or ""
    if package == type(callback).__module__.partition(".")[0] or not _INSTALLED.intersection(Path(file).parts):
        return False
    return method not in EVENTS or not _takes(getattr(callback, method), 1 + len(_ARGUMENTS.get(method, ())))


_INSTALLED = frozenset({"site-packages", "dist-packages"})


def _definer(callback: Any, method: str) -> type | None:
    """Return the class that defines a method; None if the object itself keeps it."""
    if method in getattr(callback, "__dict__", {}):
        return None
    return next((base for base in type(callback).__mro__ if method in vars(base)), None)


def _takes(function: Callable[..., Any], count: int) -> bool:
    """Whether a function can be called with so many arguments; True where that is unknown."""
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:
        pass
    return True


def _called(callback: Any, method: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a method of a callback returns.

    Raises:
        ScriptError: it failed; names the callback, the method and the line.
    """
    try:
        return function(*arguments)
    except TuttiError:
        raise
    except Exception as error:
        raise ScriptError(
            f"callback {type(callback).__name__} failed in {method}{_line_of(error)}: {type(error).__name__}: {error}"
        ) from error


def _line_of(error: BaseException) -> str:
    """Return " (file:line)" of the user's innermost line, which raised the error or led to it; "" if unknown."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_PACKAGE)]
    own = [frame for frame in frames if not frame.filename.startswith((sys.prefix, sys.base_prefix, "<"))]
    return f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""

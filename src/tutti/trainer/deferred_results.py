"""Results of a step that an accelerator still computes: the host reads them a step later, and waits for nothing.

A number that a script gets is read when somebody looks at it. Whether an update is made is decided on the device.
"""

import math
import numbers
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tutti.trainer.step_message import StepMessage


class HostCopy:
    """A copy of a device's numbers that arrives on the host while the host goes on.

    Args:
        numbers: a vector of float64 on the device.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._values: list[float] | None = None
        self._event: torch.Event | None = None
        if numbers.device.type == "cpu":
            self._host = numbers.clone()
            return
        self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        self._host.copy_(numbers, non_blocking=True)
        self._event = torch.Event(numbers.device)
        self._event.record()

    @property
    def ready(self) -> bool:
        """Whether `read` need not wait."""
        return self._values is not None or self._event is None or self._event.query()

    def read(self) -> list[float]:
        """Return the numbers; waits for the device's work up to them, but not for what came later."""
        if self._values is None:
            if self._event is not None and not self._event.query():
                self._event.synchronize()
            self._values = self._host.tolist()
        return self._values


class DeferredNumber:
    """A float that is read from the device when somebody looks: `float(loss)`, a comparison, arithmetic, a format.

    Args:
        read: returns the value; called once.
    """

    __slots__ = ("__weakref__", "_read", "_value")

    def __init__(self, read: Callable[[], float]) -> None:
        self._read: Callable[[], float] | None = read
        self._value = math.nan

    def __float__(self) -> float:
        if self._read is not None:
            self._value, self._read = float(self._read()), None
        return self._value

    def item(self) -> float:
        """Return the value, as a tensor's `item` does."""
        return float(self)

    def __int__(self) -> int:
        return int(float(self))

    def __bool__(self) -> bool:
        return bool(float(self))

    def __hash__(self) -> int:
        return hash(float(self))

    def __repr__(self) -> str:
        return repr(float(self))

    def __format__(self, specification: str) -> str:
        return format(float(self), specification)

    def __round__(self, digits: int | None = None) -> Any:
        return round(float(self), digits)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        import numpy as np

        return np.asarray(float(self), dtype=dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return float, (float(self),)


def _unary(function: Callable[[float], Any]) -> Callable[[DeferredNumber], Any]:
    return lambda self: function(float(self))


def _binary(function: Callable[[Any, Any], Any]) -> Callable[[DeferredNumber, Any], Any]:
    return lambda self, other: function(float(self), float(other) if isinstance(other, DeferredNumber) else other)


def _reflected(function: Callable[[Any, Any], Any]) -> Callable[[DeferredNumber, Any], Any]:
    return lambda self, other: function(other, float(self))


for _name in ("neg", "pos", "abs"):
    setattr(DeferredNumber, f"__{_name}__", _unary(getattr(operator, _name)))
for _name in ("trunc", "floor", "ceil"):
    setattr(DeferredNumber, f"__{_name}__", _unary(getattr(math, _name)))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(DeferredNumber, f"__{_name}__", _binary(getattr(operator, _name)))
    setattr(DeferredNumber, f"__r{_name}__", _reflected(getattr(operator, _name)))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(DeferredNumber, f"__{_name}__", _binary(getattr(operator, _name)))
numbers.Real.register(DeferredNumber)


def sum_of(values: Sequence[Any]) -> Any:
    """Return the sum of numbers, of which some may be deferred; it is deferred too, then."""
    if len(values) == 1:
        return values[0]
    if any(isinstance(value, DeferredNumber) for value in values):
        return DeferredNumber(lambda: sum(map(float, values)))
    return sum(values)


@dataclass(slots=True, kw_only=True, eq=False)
class DeviceOutcome:
    """How forward and backward of one global batch ended, as the device knows it.

    Attributes:
        lost: 0-d float32: 1 where the loss is not finite on a rank, or has nothing to average over.
        skip: 0-d float32: 1 where the update is skipped: `lost`, or a gradient is not finite on any rank.
        totals: the all-reduced totals; then `lost` and `skip`; then whether a gradient of this rank is not finite, the
            position of the first such one in `names`, and whether it has a NaN.
        names: the parameters with a gradient on this rank.
        message: what this rank has said of itself in the totals.
        settled: parameters whose gradients are right also where `skip` is 1: those that earlier calls have left.
    """

    lost: Tensor
    skip: Tensor
    totals: HostCopy
    names: Sequence[str]
    message: StepMessage
    settled: frozenset[Tensor] = frozenset()

    @property
    def step(self) -> int:
        """Number of the step, from 1."""
        return self.message.place.step


@dataclass(slots=True, kw_only=True, eq=False)
class PendingUpdate:
    """An update that the device makes or skips, until the host has read which.

    Attributes:
        outcomes: of the calls of `forward_backward` whose gradients it uses.
        numbers: gradient norm, whether gradients overflowed, and loss scale; None where there are none.
        done: what the host knows of the update, which `write` is given once it knows the rest.
        write: writes the step's row.
        undo: puts back what follows updates on the host, for an update that was skipped.
        restore: puts back the running statistics from before the step.
        counted: step, samples and tokens before it.
    """

    outcomes: Sequence[DeviceOutcome]
    numbers: HostCopy | None
    done: Any
    write: Callable[[Any], None]
    undo: Callable[[], None]
    restore: Callable[[], None]
    counted: tuple[int, int, int]

    @property
    def ready(self) -> bool:
        """Whether reading it need not wait."""
        return all(outcome.totals.ready for outcome in self.outcomes) and (self.numbers is None or self.numbers.ready)

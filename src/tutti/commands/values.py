"""Checks and conversions of the arguments of `tutti.plan`, `tutti.run` and the others, which take texts and values."""

from collections.abc import Collection, Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import TypeVar

from tutti.config.compression import Compression, parse_compression
from tutti.config.option_syntax import BYTES, SECONDS, parse_quantity
from tutti.config.plan import SyncPlan
from tutti.config.sync_notation import parse_sync
from tutti.errors import SpecError

StrPath = str | PathLike[str]

Value = TypeVar("Value")


def path_of(value: StrPath | None) -> Path | None:
    """Return a path, or None for None."""
    return None if value is None else Path(value)


def path_or(kind: type[Value], value: "StrPath | Value | None") -> "Path | Value | None":
    """Return a path for a text or path; a value of `kind`, and None, as they are."""
    return value if value is None or isinstance(value, kind) else Path(fspath(value))  # type: ignore[arg-type]


def texts_of(arguments: "tuple[object, ...] | list[object] | Collection[object]") -> tuple[str, ...]:
    """Return a script's arguments as texts.

    Raises:
        SpecError: one text was given where a list is meant.
    """
    if isinstance(arguments, str):
        raise SpecError(f"arguments={arguments!r} is one text; give a list, such as {arguments.split()!r}")
    return tuple(map(str, arguments))


def whole(name: str, value: int | None, least: int = 1) -> int | None:
    """Return the whole number, or None.

    Raises:
        SpecError: it is not a whole number of at least `least`.
    """
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= least):
        return value
    raise SpecError(f"{name}={value!r}: give a whole number of {least} or more")


def positive(name: str, value: float | None) -> float | None:
    """Return the number, or None.

    Raises:
        SpecError: it is not a number above 0.
    """
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool) and value > 0):
        return value
    raise SpecError(f"{name}={value!r}: give a number above 0")


def seconds_above_0(name: str, value: float) -> float:
    """Return a time limit in seconds.

    Raises:
        SpecError: it is not a number above 0.
    """
    if positive(name, value) is None:
        raise SpecError(f"{name}=None: give a number of seconds above 0")
    return value


def one_of(name: str, value: Value, allowed: Collection[Value]) -> Value:
    """Return the value.

    Raises:
        SpecError: it is not among those that are allowed.
    """
    if value in allowed:
        return value
    raise SpecError(f"{name}={value!r}: give one of {', '.join(map(repr, allowed))}")


def size_of(name: str, value: "str | float | None") -> float | None:
    """Return bytes; a text such as "60gb" has a unit. Raises SpecError if it is not understood."""
    return _quantity(name, value, BYTES, "60gb")


def duration_of(name: str, value: "str | float | None") -> float | None:
    """Return seconds; a text such as "12h" has a unit. Raises SpecError if it is not understood."""
    return _quantity(name, value, SECONDS, "12h")


def _quantity(name: str, value: "str | float | None", units: dict[str, float], example: str) -> float | None:
    number = parse_quantity(value, units) if isinstance(value, str) else value
    if value is not None and (number is None or number <= 0):
        raise SpecError(f"{name}={value!r} is not understood; write it like {example!r}")
    return number


def compression_of(value: "str | Compression | None") -> Compression | None:
    """Return the codec of a text such as "top-k,density=0.01"."""
    return parse_compression(value) if isinstance(value, str) else value


def sync_of(value: "str | SyncPlan | None") -> SyncPlan | None:
    """Return the mode of a text such as "local:8"."""
    return parse_sync(value) if isinstance(value, str) else value


def mesh_text(value: "str | Mapping[str, int] | None") -> str | None:
    """Return a mesh as text, such as "replicate=2,split=2"."""
    return ",".join(f"{axis}={degree}" for axis, degree in value.items()) if isinstance(value, Mapping) else value

"""Checks and conversions of the arguments of `tutti.plan`, `tutti.run` and the others, which take texts and values."""

from collections.abc import Collection, Iterable, Mapping, Set
from os import PathLike
from pathlib import Path
from reprlib import repr as short
from typing import TypeVar

from tutti.config.compression import Compression, parse_compression
from tutti.config.option_syntax import BYTES, SECONDS, parse_quantity
from tutti.config.plan import SyncPlan
from tutti.config.run_folder import is_store_address
from tutti.config.sync_notation import parse_sync
from tutti.errors import SpecError

StrPath = str | PathLike[str]

Value = TypeVar("Value")


def path_of(name: str, value: StrPath | None) -> Path | None:
    """Return a path, or None for None.

    Raises:
        SpecError: it is no path.
    """
    return None if value is None else needed_path(name, value)


def needed_path(name: str, value: object, others: str = "") -> Path:
    """Return a path.

    Args:
        name: name of the argument.
        value: a text or a path.
        others: what may be given instead, for the message.

    Raises:
        SpecError: it is no path, but an address or another value.
    """
    if is_store_address(value):
        raise SpecError(
            f"{name}={value} is an address, and a path on this machine is needed; copy what it names to a folder here "
            f"first, and name that (of a store of checkpoints, `tutti checkpoint list {value}` shows what is in it)"
        )
    if isinstance(value, str | PathLike):
        return Path(value)
    raise SpecError(f"{name}={short(value)}: give a path{others}")


def paths_of(name: str, values: "StrPath | Iterable[StrPath]") -> tuple[Path, ...]:
    """Return one or several paths.

    Raises:
        SpecError: one of them is no path.
    """
    several = [values] if isinstance(values, str | PathLike) or not isinstance(values, Iterable) else values
    return tuple(needed_path(name, value) for value in several)


def path_or(name: str, kind: type[Value], value: "StrPath | Value | None") -> "Path | Value | None":
    """Return a path for a text or path; a value of `kind`, and None, as they are.

    Raises:
        SpecError: it is none of these.
    """
    if value is None or isinstance(value, kind):
        return value
    return needed_path(name, value, f" or a {kind.__name__}")


def texts_of(values: object, name: str = "arguments", example: str = "['--epochs', 3]") -> tuple[str, ...]:
    """Return a script's arguments, or another list, as texts.

    Raises:
        SpecError: it is no list.
    """
    if isinstance(values, str):
        raise SpecError(f"{name}={values!r} is one text; give a list, such as {values.split()!r}")
    if not isinstance(values, Iterable) or isinstance(values, bytes | Mapping | Set):
        raise SpecError(f"{name}={short(values)}: give a list, such as {example}")
    return tuple(map(str, values))


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
    plain = isinstance(number, int | float) and not isinstance(number, bool)
    if value is not None and not (plain and number > 0):  # type: ignore[operator]  # `plain` says so
        raise SpecError(f"{name}={value!r} is not understood; write it like {example!r}")
    return number


def compression_of(value: "str | Compression | None") -> Compression | None:
    """Return the codec of a text such as "top-k,density=0.01". Raises SpecError for a value of another kind."""
    if value is None or isinstance(value, Compression):
        return value
    if isinstance(value, str):
        return parse_compression(value)
    raise SpecError(f"compress={short(value)}: give a text, such as 'top-k,density=0.01', or a Compression")


def sync_of(value: "str | SyncPlan | None") -> SyncPlan | None:
    """Return the mode of a text such as "local:8". Raises SpecError for a value of another kind."""
    if value is None or isinstance(value, SyncPlan):
        return value
    if isinstance(value, str):
        return parse_sync(value)
    raise SpecError(f"sync={short(value)}: give a text, such as 'local:8', or a SyncPlan")


def sharding_of(value: str | None) -> str | None:
    """Return the settings of the shard axis as text, after a check.

    Raises:
        TuttiError: a setting or its value is unknown.
    """
    from tutti.config.shard_engine import check_sharding

    return None if value is None else check_sharding(value)


def mesh_text(value: "str | Mapping[str, int] | None") -> str | None:
    """Return a mesh as text, such as "replicate=2,split=2".

    Raises:
        SpecError: it is neither a text nor a dict.
    """
    if isinstance(value, Mapping):
        return ",".join(f"{axis}={degree}" for axis, degree in value.items())
    if value is None or isinstance(value, str):
        return value
    raise SpecError(f"mesh={short(value)}: give a dict, such as {{'shard': 2}}, or a text, such as 'shard=2'")

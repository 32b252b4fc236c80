"""Quantities as people write them: 80 GB, 12h, 100 Gbit/s, 5 us, 312 TFLOP/s. Numbers alone are in the base unit."""

import math
import re
from collections.abc import Callable
from typing import Any

from tutti.errors import SpecError

_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
_BINARY = {f"{letter}i": 2.0 ** (10 * power) for power, letter in enumerate("kmgt", start=1)}


def _prefixed(*units: tuple[str, float]) -> dict[str, float]:
    return {prefix + unit: factor * size for unit, size in units for prefix, factor in (_PREFIXES | _BINARY).items()}


BYTES = {"": 1.0} | _prefixed(("b", 1.0))
SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0, "d": 86400.0}
BYTES_PER_S = {"": 1.0} | _prefixed(
    ("byte/s", 1.0), ("bit/s", 1 / 8), ("bit", 1 / 8), ("bits", 1 / 8), ("bits/s", 1 / 8)
)
FLOPS_PER_S = {"": 1.0} | _prefixed(("flop/s", 1.0), ("flops", 1.0))


def quantity(text: str, units: dict[str, float]) -> float | None:
    """The number that a text says in the base unit of `units`; None where it is not understood."""
    found = re.fullmatch(r"([0-9.]+(?:[eE][+-]?\d+)?)\s*([A-Za-z/]*)", text.strip())
    if found is None:
        return None
    unit = found.group(2)
    if "bit/s" in units:  # only here does a capital tell bytes from bits
        unit = re.sub(r"B(?=/s$)", "byte", unit)
    try:
        number = float(found.group(1))
    except ValueError:
        return None
    size = units.get(unit.lower())
    return None if size is None else number * size


def reader(units: dict[str, float], example: str, *, whole: bool = False) -> Callable[[Any], Any]:
    """What turns a text of a file into its number; `whole`: and a float without a fraction into an integer.

    Other values are left as they are. Raises SpecError for a text that is not understood, and for what is not finite.
    """

    def read(value: Any) -> Any:
        if isinstance(value, str):
            found = quantity(value, units)
            if found is None:
                raise SpecError(f"{value!r} is not understood; write a number, or a text such as {example!r}")
            value = found
        if isinstance(value, float) and not math.isfinite(value):
            raise SpecError(f"{value} is not finite; write a number, or a text such as {example!r}")
        if whole and isinstance(value, float) and value == int(value):
            return int(value)
        return value

    return read

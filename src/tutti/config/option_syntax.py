"""The syntax of values on the command line and in files: bucket sizes, and numbers with units."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tutti.config.plan import Plan
from tutti.errors import PlanError, SpecError


def with_bucket_size(plan: Plan, text: str | None) -> Plan:
    """Set a plan's bucket size from the text of an option.

    Args:
        plan: the plan to change.
        text: a size in MiB such as "8", "auto" for sizes that are measured, or None for no change.

    Raises:
        PlanError: the text is neither.
    """
    if text is None:
        return plan
    if text.strip() == "auto":
        return replace(plan, sync=replace(plan.sync, bucket_sizes="measured"))
    try:
        size = float(text)
    except ValueError:
        size = math.nan
    if not 0 < size * 2**20 < math.inf or int(size * 2**20) < 1:
        raise PlanError(f"bucket-mb = {text!r}; give a size in MiB above 0, or auto")
    return replace(plan, sync=replace(plan.sync, bucket_nbytes=int(size * 2**20), bucket_sizes="stated"))


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


def parse_quantity(text: str, units: dict[str, float]) -> float | None:
    """Convert a text such as "80 GB" to the base unit of `units`; return None where the text is not understood."""
    match = re.fullmatch(r"([0-9.]+(?:[eE][+-]?\d+)?)\s*([A-Za-z/]*)", text.strip())
    if match is None:
        return None
    unit = match.group(2)
    if "bit/s" in units:  # only for data rates does the capital letter distinguish bytes from bits
        unit = re.sub(r"B(?=/s$)", "byte", unit)
    try:
        number = float(match.group(1))
    except ValueError:
        return None
    size = units.get(unit.lower())
    return None if size is None else number * size


def quantity_validator(units: dict[str, float], example: str, *, whole: bool = False) -> Callable[[Any], Any]:
    """Make a converter from the text of a file to a number, for use as a pydantic validator.

    Args:
        units: factor of each unit, by its lower-case name.
        example: a valid text, shown in errors.
        whole: whether a float without a fraction becomes an integer.

    Returns:
        A function that converts texts and passes other values through. It raises SpecError for a text that is not
        understood and for a number that is not finite.
    """

    def read(value: Any) -> Any:
        if isinstance(value, str):
            number = parse_quantity(value, units)
            if number is None:
                raise SpecError(f"{value!r} is not understood; write a number, or a text such as {example!r}")
            value = number
        if isinstance(value, float) and not math.isfinite(value):
            raise SpecError(f"{value} is not finite; write a number, or a text such as {example!r}")
        if whole and isinstance(value, float) and value == int(value):
            return int(value)
        return value

    return read

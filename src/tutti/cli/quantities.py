"""Quantities as people write them on the command line: 60gb, 12h."""

import re
from typing import Any

import click

_BYTES = {"": 1.0, "b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2.0**10, "mib": 2.0**20,
          "gib": 2.0**30, "tib": 2.0**40}  # fmt: skip
_SECONDS = {"": 1.0, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


class Quantity(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions of click only
    """A number with a unit of a table; the value is in the table's base unit."""

    def __init__(self, name: str, units: dict[str, float], example: str) -> None:
        self.name, self._units, self._example = name, units, example

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number; fails with an example for what is not understood."""
        if isinstance(value, float):
            return value
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", str(value).strip().lower())
        if found is None or found.group(2) not in self._units or float(found.group(1)) <= 0:
            self.fail(f"{value!r} is not understood; write it like {self._example}", param, ctx)
        return float(found.group(1)) * self._units[found.group(2)]


SIZE = Quantity("size", _BYTES, "60gb")
DURATION = Quantity("duration", _SECONDS, "12h")

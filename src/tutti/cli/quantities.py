"""Quantities as people write them on the command line: 60gb, 12h."""

from typing import Any

import click

from tutti.config.option_syntax import BYTES, SECONDS, parse_quantity


class Quantity(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions of click only
    """A number with a unit of a table; the value is in the table's base unit."""

    def __init__(self, name: str, units: dict[str, float], example: str) -> None:
        self.name, self._units, self._example = name, units, example

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number; fails with an example for what is not understood."""
        if isinstance(value, float):
            return value
        found = parse_quantity(str(value), self._units)
        if found is None or found <= 0:
            self.fail(f"{value!r} is not understood; write it like {self._example}", param, ctx)
        return found


SIZE = Quantity("size", BYTES, "60gb")
DURATION = Quantity("duration", SECONDS, "12h")

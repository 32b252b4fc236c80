"""The console on which tutti says things: what it prints of others cannot control the terminal."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from tutti.config.safe_text import plain_text


class PlainConsole(Console):
    """A console of rich that prints no escape sequence but its own.

    Names of scripts, modules and run folders, and messages of other ranks, may contain any character.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield what is printed; see `rich.console.Console.render`."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=plain_text(segment.text))


def results_console(**options: Any) -> PlainConsole:
    """Return the console for results that people read: as wide as COLUMNS or the terminal, or 80 columns.

    Args:
        options: further arguments of rich's Console.
    """
    return PlainConsole(highlight=False, **options)

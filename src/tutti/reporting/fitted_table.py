"""A table for terminals of any width: where its columns do not fit, each row is a block of lines."""

from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.style import StyleType
from rich.table import Column, Table
from rich.text import Text

READABLE = 14
"""The least width of a column whose text wraps, where the text is longer."""


class FittedTable(Table):
    """A table of rich that fits terminals of any width. Columns with `no_wrap` are never shortened.

    Where the columns do not fit, there are no borders, and the cells of some columns stand below their row; where that
    does not fit either, each row is a block with a line for each cell.
    """

    below: tuple[str, ...] = ()
    """Headers of the columns whose cells may stand below their row."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render in the form that fits."""
        if not self.columns or self._needed(console, options) <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        if self.title:
            yield Text(str(self.title), style="bold")
        widths = self._narrow_widths(console, options)
        for block in self._blocks() if widths is None else self._narrow_rows(widths):
            yield from console.render(block, options)
        if self.caption:
            yield Text(str(self.caption), style="dim")

    def _narrow_widths(self, console: Console, options: ConsoleOptions) -> dict[int, int] | None:
        """Return the width of each column that stays in its row, by index; None if they do not fit."""
        stay = [at for at, column in enumerate(self.columns) if _one_line(column) not in self.below]
        least = {at: _width(self.columns[at], console, options) for at in stay}
        free = options.max_width - sum(least.values()) - 2 * len(stay)
        if free < 0 or len(stay) < 2:
            return None
        for at in stay:  # columns whose text wraps take what is left, in order
            wanted = _longest(self.columns[at], console, options) - least[at]
            least[at] += min(wanted, free)
            free -= min(wanted, free)
        return least

    def _narrow_rows(self, widths: dict[int, int]) -> Iterator[RenderableType]:
        cells = [list(column.cells) for column in self.columns]
        yield self._narrow_row(widths, [column.header for column in self.columns], "dim")
        for at, row in enumerate(self.rows):
            yield self._narrow_row(widths, [values[at] for values in cells], row.style)
            for index, values in enumerate(cells):
                if index not in widths and str(values[at]):
                    yield Padding(_styled(values[at], "dim"), (0, 0, 0, 4))

    def _narrow_row(self, widths: dict[int, int], cells: list[RenderableType], style: StyleType | None) -> Table:
        line = Table.grid(padding=(0, 2, 0, 0))
        for at, width in widths.items():
            column = self.columns[at]
            line.add_column(justify=column.justify, width=width, overflow="fold", no_wrap=column.no_wrap)
        line.add_row(*(cells[at] for at in widths), style=style or "")
        return line

    def _needed(self, console: Console, options: ConsoleOptions) -> int:
        """Return the columns of the terminal that the table takes at least."""
        _, right, _, left = self.padding
        edges = len(self.columns) + 1 if self.box else 0
        padding = len(self.columns) * (left + right) - (0 if self.pad_edge else left + right)
        return edges + padding + sum(_width(column, console, options) for column in self.columns)

    def _blocks(self) -> Iterator[RenderableType]:
        cells = [list(column.cells) for column in self.columns]
        for at, row in enumerate(self.rows):
            yield _styled(cells[0][at], row.style or "bold")
            block = Table.grid(padding=(0, 2, 0, 0))
            block.add_column(no_wrap=True, style="dim")
            block.add_column(overflow="fold")
            for column, values in zip(self.columns[1:], cells[1:], strict=True):
                if str(values[at]):
                    block.add_row(f"  {_one_line(column)}", values[at])
            yield block
        yield Text("")


def _styled(cell: RenderableType, style: StyleType) -> RenderableType:
    return Text.from_markup(cell, style=style) if isinstance(cell, str) else cell


def _one_line(column: Column) -> str:
    return str(column.header).replace("-\n", "").replace("\n", " ")


def _measures(column: Column, console: Console, options: ConsoleOptions) -> list[Measurement]:
    wide = options.update(width=10_000)
    return [Measurement.get(console, wide, cell) for cell in (column.header, *column.cells)]


def _longest(column: Column, console: Console, options: ConsoleOptions) -> int:
    return max(measure.maximum for measure in _measures(column, console, options))


def _width(column: Column, console: Console, options: ConsoleOptions) -> int:
    """Return the least width at which a column can be read."""
    most = _longest(column, console, options)
    if column.no_wrap:
        return most
    word = max(measure.minimum for measure in _measures(column, console, options))
    return min(most, READABLE if column.overflow == "fold" else max(READABLE, word))

"""Shared parts of the figures: the page's style and colours, empty figures, and conversion to inline SVG.

Colours are CSS variables, text stays text, and nothing is loaded from elsewhere.
"""

import io
import re
import textwrap
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, ParamSpec

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tutti.config.prediction import Phase
from tutti.reporting.measurements import PHASES

# Placeholder colours that figures use for nothing else; `inline` replaces them by the page's light or dark variables.
INK, MUTED, GRID, PAPER = "#010101", "#020202", "#030303", "#040404"
SERIES = tuple(f"#0500{i:02x}" for i in range(8))
PHASE_COLOURS: dict[Phase, str] = {phase: f"#0600{i:02x}" for i, phase in enumerate(PHASES)}
_VARIABLES = {
    INK: "--ink",
    MUTED: "--muted",
    GRID: "--grid",
    PAPER: "--card",
    **{colour: f"--series-{i}" for i, colour in enumerate(SERIES)},
    **{colour: f"--phase-{i}" for i, colour in enumerate(PHASE_COLOURS.values())},
}
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "tutti",
    "font.size": 12,
    "axes.titlesize": 11,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "hatch.linewidth": 1.4,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "legend.fontsize": 12,
    "axes.unicode_minus": True,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A figure of the page.

    Attributes:
        note: line below the title.
        alt_text: the figure's content as text, for readers who cannot see it.
        wide: whether it spans the full width of the page.
        narrow: the figure for screens as narrow as a telephone's.
    """

    title: str
    note: str
    svg: str
    alt_text: str
    wide: bool = False
    narrow: str = ""


P = ParamSpec("P")


NARROW = 4.6
"""Width of figures for narrow screens, in units of 72 page pixels: a telephone's 390 less the margins."""

NAME_LETTERS = 16
"""Letters in a line of a row's name on narrow screens."""

_narrow: ContextVar[bool] = ContextVar("narrow", default=False)


def styled(function: Callable[P, Plot | None]) -> Callable[P, Plot | None]:
    """Decorate a function to draw in the page's style, once for wide and once for narrow screens."""

    @wraps(function)
    def draw(*args: P.args, **kwargs: P.kwargs) -> Plot | None:
        with mpl.rc_context(_STYLE):
            plot = function(*args, **kwargs)
            if plot is None:
                return None
            token = _narrow.set(True)
            try:
                small = function(*args, **kwargs)
            finally:
                _narrow.reset(token)
            return replace(plot, narrow=small.svg if small is not None else "")

    return draw


def new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    """Return an empty figure; sizes are in units of 72 page pixels, so that its text matches the page's.

    On narrow screens it is as wide as the screen, and a wide figure gets a little higher for its legend.
    """
    if _narrow.get():
        width, height = NARROW, height + (0.6 if width > 10 else 0.0)
    figure = Figure(figsize=(width, height), dpi=72, layout="constrained")
    return figure, figure.add_subplot()


def legend_columns(count: int) -> int:
    """Return the number of columns of a legend that has `count` on a wide screen."""
    return min(count, 2) if _narrow.get() else count


def is_narrow() -> bool:
    """Return whether the figure is for a narrow screen."""
    return _narrow.get()


def inline(figure: Figure, name: str, alt_text: str) -> str:
    """Return the figure's SVG with page colours and fonts, unique ids and no external references.

    Args:
        figure: the figure, drawn with the placeholder colours.
        name: prefix of the ids, unique on the page.
        alt_text: the figure's content as text, for readers who cannot see it.
    """
    name = f"{name}-narrow" if _narrow.get() else name
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", text).replace("xlink:href", "href")
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    text = re.sub(
        r"font(?:-family)?: (?:(\d[\d.]*px) )?'[^;\"]*;?", lambda m: f"font-size: {m[1]};" if m[1] else "", text
    )
    label = alt_text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    head, rest = text.split(">", 1)
    head = re.sub(r' (width|height)="[^"]*"', "", head)  # the viewBox stays; the page sets the size
    return f'{head} role="img" aria-label="{label}">{rest}'


def rows(axes: Axes, names: Sequence[str]) -> None:
    """Set up one row per name, the first at the top, with grid lines along x."""
    shown = [textwrap.fill(name, NAME_LETTERS) for name in names] if _narrow.get() else list(names)
    axes.set_yticks(range(len(names)), shown)
    axes.tick_params(axis="y", labelcolor=INK)
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.grid(visible=True, axis="x", color=GRID)
    axes.grid(visible=False, axis="y")


def segment(axes: Axes, row: int, left: float, width: float, colour: str, hatched: bool) -> None:
    """Draw a segment of a row's bar: solid if measured, hatched if predicted.

    Args:
        axes: axes that `rows` has set up.
        row: index of the row, from the top.
        left: start of the segment along x.
        width: length of the segment.
        colour: fill colour, or colour of the hatching.
        hatched: whether the value is predicted.
    """
    if hatched:
        axes.barh(row, width, left=left, height=0.62, facecolor="none", edgecolor=colour, hatch="////", linewidth=1)
    else:
        axes.barh(row, width, left=left, height=0.62, color=colour, edgecolor=PAPER, linewidth=0.8)

"""The history of predictions: on a terminal, and as a page that stands alone."""

from matplotlib.ticker import FixedLocator, NullLocator
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tutti.config.history import History
from tutti.report.html import environment
from tutti.report.svg import INK, MUTED, PAPER, SERIES, Plot, inline, new_figure, styled
from tutti.report.words import duration, plural, show, signed_percent, significant

MOST_SHOWN = 60
"""Runs that the figure shows at most, the newest."""


@styled
def history_plot(history: History) -> Plot | None:
    """Predicted step time in percent of the measured one, run by run, each with its predicted interval."""
    shown = [e for e in history.entries if e.predicted_step.value and e.measured_step.value][-MOST_SHOWN:]
    if not shown:
        return None
    figure, axes = new_figure(14.2, 4.4)
    axes.axhline(100, color=INK, linewidth=1.6)
    seen: list[float] = [100.0]
    for at, entry in enumerate(shown):
        truth = float(entry.measured_step.value or 1)
        centre = 100 * float(entry.predicted_step.value or 0) / truth
        low, high = (100 * float(end or 0) / truth for end in (entry.predicted_step.low, entry.predicted_step.high))
        seen.append(centre)
        if low > 0 and high > 0:
            seen += [low, high]
            axes.plot([at, at], [low, high], color=SERIES[0], linewidth=1.6, linestyle=(0, (3, 2)))
        axes.plot(
            [at], [centre], "o", markersize=8, markerfacecolor=PAPER, markeredgewidth=2,
            markeredgecolor=SERIES[0] if entry.within else SERIES[1],
        )  # fmt: skip
    reach = max(1.6, max(seen) / 100, 100 / min(seen)) * 1.15
    axes.set_yscale("log", base=2)
    axes.set_ylim(100 / reach, 100 * reach)
    axes.yaxis.set_major_locator(FixedLocator([100 * 2.0**power for power in range(-8, 9)]))
    axes.yaxis.set_major_formatter(lambda value, _: significant(value))
    axes.yaxis.set_minor_locator(NullLocator())
    step = -(-len(shown) // 12)
    axes.set_xticks(range(0, len(shown), step), [shown[at].started_utc[:10] for at in range(0, len(shown), step)])
    axes.set_xlim(-0.6, len(shown) - 0.4)
    axes.set(xlabel="runs, by when they began", ylabel="predicted step, in % of measured")
    axes.plot([], [], "o", markersize=8, markerfacecolor=PAPER, markeredgewidth=2, markeredgecolor=SERIES[0],
              label="measured within the predicted interval (dashed)")  # fmt: skip
    axes.plot([], [], "o", markersize=8, markerfacecolor=PAPER, markeredgewidth=2, markeredgecolor=SERIES[1],
              label="outside it")  # fmt: skip
    axes.plot([], [], color=MUTED, linewidth=1.6, label="line: as measured")
    figure.legend(loc="outside upper left", ncols=3, columnspacing=1.4)
    words = "Predicted in percent of measured. " + " ".join(
        f"{e.name}: predicted {duration(float(e.predicted_step.value or 0))}, "
        f"measured {duration(float(e.measured_step.value or 0))}."
        for e in shown
    )
    note = f"{plural(len(shown), 'run')}; above the line: predicted too slow, below it: too fast"
    return Plot(
        title="How good predictions were", note=note, svg=inline(figure, "history", words), words=words, wide=True
    )


def history_html(history: History) -> str:
    """The page as one file."""
    whole = history.trust[0] if history.trust else None
    good = whole is not None and whole.within * 2 >= whole.runs
    return (
        environment()
        .get_template("history.html")
        .render(h=history, whole=whole, good=good, plot=history_plot(history), signed=signed_percent)
    )


def history_table(history: History) -> RenderableType:
    """The history for a rich console, the newest run last."""
    shown = Table(title="Predictions and measurements", title_justify="left")
    for name in ("run", "cluster", "plan"):
        shown.add_column(name, no_wrap=name != "plan")
    for name in ("predicted\nstep", "measured\nstep", "error", "memory\nerror"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("in the\ninterval", no_wrap=True)
    for entry in history.entries:
        error, memory = entry.step_error.value, entry.memory_error.value
        shown.add_row(
            entry.name, entry.cluster, entry.plan, show(entry.predicted_step), show(entry.measured_step),
            "" if error is None else signed_percent(error), "" if memory is None else signed_percent(memory),
            "" if entry.within is None else "yes" if entry.within else "no",
            style=None if entry.within else "yellow",
        )  # fmt: skip
    parts: list[RenderableType] = [shown, *(Text(trust.sentence) for trust in history.trust)]
    parts += [Text(f"left out: {words}", style="dim") for words in history.left_out]
    return Group(*parts)

"""Draw the figures of the report: learning curves, time, communication, memory and prediction errors.

Measured values are solid. Predicted values are dashed, hatched or hollow.
"""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator

from tutti.config.prediction import Phase
from tutti.config.run_report import CommunicationReport, MetricCurve, Quantity, RunReport, Split
from tutti.reporting.formatting import CARRIED, PHASE_NAMES, duration, number, quality_text, significant
from tutti.reporting.measurements import PHASES
from tutti.reporting.svg import (
    INK,
    MUTED,
    PAPER,
    PHASE_COLOURS,
    SERIES,
    Plot,
    inline,
    is_narrow,
    legend_columns,
    new_figure,
    rows,
    segment,
    styled,
)

SPLIT_COLOURS: dict[Split, int] = {"train": 0, "test": 1, "validation": 2, "other": 3}
MAX_BARS = 12


TICK_STEPS_S = (
    *(value * unit for unit in (1e-3, 1e-2, 0.1, 1.0) for value in (1, 2, 5)),
    *(10, 15, 30),
    *(60 * value for value in (1, 2, 5, 10, 15, 30)),
    *(3600 * value for value in (1, 2, 3, 6, 12)),
    *(86400 * value for value in (1, 2, 5, 10, 20, 50, 100)),
)
"""Distances of marks on a time axis, in seconds, as clocks and people divide time."""


def time_ticks(longest_s: float, most: int = 8) -> list[float]:
    """Return the marks of a time axis from 0 to `longest_s`, in seconds: at most `most` after the 0.

    Examples:
        >>> [tick_text(tick, 5400) for tick in time_ticks(5400)]
        ['0', '15 min', '30 min', '45 min', '1 h', '1 h 15', '1 h 30']
    """
    step = next((step for step in TICK_STEPS_S if longest_s / step <= most), longest_s / most)
    return [step * index for index in range(int(longest_s / step + 1e-9) + 1)]


def tick_text(seconds: float, longest_s: float) -> str:
    """Format a mark of a time axis that ends at `longest_s`: "0", "200 ms", "30 s", "5 min", "1 h 15", "2 d"."""
    if seconds == 0:
        return "0"
    if longest_s < 1:
        return f"{seconds * 1e3:g} ms"
    if longest_s < 120:
        return f"{seconds:g} s"
    if seconds < 3600:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min" if not rest else f"{minutes}:{rest:02} min" if minutes else f"{rest} s"
    if longest_s >= 4 * 86400 and seconds % 86400 == 0:
        return f"{seconds / 86400:g} d"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02}" if minutes else f"{hours} h"


def _label_seconds(axes: Axes, factor: float = 1.0) -> None:
    """Mark the x axis in milliseconds, seconds, minutes or hours, whichever people would say.

    Args:
        axes: the axes; their x axis is in seconds times `factor`.
        factor: what seconds are multiplied by.
    """
    longest_s = float(axes.get_xlim()[1]) / factor
    ticks = time_ticks(longest_s, most=4 if is_narrow() else 8)
    axes.set_xticks([tick * factor for tick in ticks], [tick_text(tick, longest_s) for tick in ticks])


def _smooth(values: Sequence[float]) -> list[float]:
    """Return the running mean over a twentieth of the points."""
    half = len(values) // 40
    spans = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(span) / len(span) for span in spans]


def _draw(axes: Axes, curve: MetricCurve, over: str, colour: str, label: str) -> None:
    """Draw a curve over "time" or "samples"; a long one as a pale line with its running mean."""
    x = curve.time_s if over == "time" else curve.samples
    if len(x) > 60:
        axes.plot(x, curve.values, color=colour, linewidth=0.8, alpha=0.3)
        axes.plot(x, _smooth(curve.values), color=colour, linewidth=1.8, label=label)
    else:
        marker = "o" if len(x) <= 30 else None
        axes.plot(x, curve.values, color=colour, linewidth=1.8, marker=marker, markersize=4, label=label)


@styled
def curve_plot(
    curves: Sequence[tuple[MetricCurve, str]],
    *,
    over: str,
    title: str,
    name: str,
    target: float | None = None,
    by_run: bool = False,
) -> Plot | None:
    """Draw curves over wall time or samples; return None if there are no points.

    Args:
        curves: each curve with its label.
        over: "time" or "samples".
        title: title of the figure.
        name: prefix of the figure's ids, unique on the page.
        target: quality to mark with a horizontal line.
        by_run: colour by position among `curves`; otherwise by split (training, test, ...).
    """
    if not any(curve.values for curve, _ in curves):
        return None
    figure, axes = new_figure(6.9, 3.7)
    for i, (curve, label) in enumerate(curves):
        _draw(axes, curve, over, SERIES[i % len(SERIES) if by_run else SPLIT_COLOURS[curve.split]], label)
    if target is not None:
        axes.axhline(target, color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.annotate(
            f"target {quality_text(target)}", (1, target), xycoords=("axes fraction", "data"), ha="right", va="bottom",
            fontsize=12, color=INK, xytext=(0, 3), textcoords="offset points",
        )  # fmt: skip
    axes.set_xlim(left=0)
    if over == "time":
        _label_seconds(axes)
        axes.set_xlabel("wall time")
    else:
        axes.set_xlabel("samples trained on")
        longest = max(curve.samples[-1] for curve, _ in curves)
        axes.xaxis.set_major_formatter(lambda v, _: _thousands(v, longest))
    metrics = list(dict.fromkeys(curve.metric for curve, _ in curves))
    values = [value for curve, _ in curves for value in curve.values]
    if min(values) > 0 and max(values) > 30 * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda v, _: f"{v:g}")
        axes.yaxis.set_minor_formatter(lambda v, _: "")
        axes.tick_params(axis="y", which="minor", length=0)
    axes.set_ylabel(" / ".join(metrics))
    if len(curves) > 1:
        axes.legend(loc="best", handlelength=1.6)
    alt_text = f"{title}. " + " ".join(
        f"{label}: {quality_text(c.values[0])} to {quality_text(c.values[-1])} over {significant(c.steps[-1])} steps."
        for c, label in curves
        if c.values
    )
    note = next((curve.note for curve, _ in curves if curve.note), "") or "measured"
    if any(len(curve.values) > 60 for curve, _ in curves):
        note += "; pale: as recorded, solid: running mean"
    return Plot(title=title, note=note, svg=inline(figure, name, alt_text), alt_text=alt_text)


def _thousands(value: float, longest: float) -> str:
    """Format a number of samples, in the unit that the longest of the axis has."""
    unit = next(((size, letter) for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")) if longest >= size), None)
    if unit is None or not value:
        return f"{value:g}"
    return f"{value / {'G': 1e9, 'M': 1e6, 'k': 1e3}[unit[1]]:g} {unit[1]}"


Bars = Sequence[tuple[str, dict[Phase, Quantity]]]


@styled
def stacked_plot(
    bars: Bars,
    *,
    title: str,
    note: str,
    name: str,
    hatched: frozenset[int] = frozenset(),
    unit: str = "wall time",
    wall: float | None = None,
) -> Plot | None:
    """Draw horizontal bars of seconds by phase, the first bar on top; return None if all are empty.

    Args:
        bars: label and seconds by phase of each bar.
        title: title of the figure.
        note: line below the title.
        name: prefix of the figure's ids, unique on the page.
        hatched: positions of the bars that are predicted.
        unit: label of the x axis.
        wall: seconds that a single bar should add up to; the difference is drawn as an outline.
    """
    bars = [(label, parts) for label, parts in bars if sum(q.value or 0 for q in parts.values()) > 0]
    if not bars:
        return None
    totals = [float(sum(q.value or 0 for q in parts.values())) for _, parts in bars]
    gap = wall - totals[0] if wall is not None and wall - totals[0] > 0.005 * wall else 0.0
    longest = max(totals) + gap
    factor = 1e3 if longest < 1 else 1.0
    figure, axes = new_figure(14.2, 1.3 + 0.52 * len(bars))
    shown_phases = [phase for phase in PHASES if any((parts.get(phase, _ZERO).value or 0) > 0 for _, parts in bars)]
    for row, (_, parts) in enumerate(bars):
        left = 0.0
        for phase in shown_phases:
            seconds = float(parts.get(phase, _ZERO).value or 0)
            segment(axes, row, left * factor, seconds * factor, PHASE_COLOURS[phase], row in hatched)
            if seconds > (0.18 if is_narrow() else 0.055) * longest and row not in hatched:
                share = seconds / (totals[row] + gap)
                axes.text((left + seconds / 2) * factor, row, f"{share:.0%}", ha="center", va="center", color=PAPER,
                          fontsize=12, fontweight="bold")  # fmt: skip
            left += seconds
        if gap:
            axes.barh(
                row, gap * factor, left=left * factor, height=0.62, facecolor="none", edgecolor=MUTED, linewidth=1
            )
            left += gap
        axes.text(left * factor + longest * factor * 0.008, row, duration(left), va="center", fontsize=12, color=INK)
    rows(axes, [label for label, _ in bars])
    axes.set_xlim(0, longest * factor * (1.3 if is_narrow() else 1.1))
    _label_seconds(axes, factor)
    axes.set_xlabel(unit)
    for phase in shown_phases:
        axes.bar(0, 0, color=PHASE_COLOURS[phase], label=PHASE_NAMES[phase])
    if gap:
        axes.bar(0, 0, facecolor="none", edgecolor=MUTED, label="unaccounted")
    figure.legend(
        loc="outside upper left",
        ncols=legend_columns(len(shown_phases) + 1),
        handlelength=0.9,
        handleheight=0.9,
        columnspacing=1.4,
    )
    alt_text = f"{title}. " + " ".join(f"{label}: {_describe_phases(parts)}." for label, parts in bars)
    return Plot(title=title, note=note, svg=inline(figure, name, alt_text), alt_text=alt_text, wide=True)


_ZERO = Quantity()


def _describe_phases(parts: dict[Phase, Quantity]) -> str:
    """Describe the seconds by phase in words."""
    return ", ".join(f"{PHASE_NAMES[p]} {duration(q.value)}" for p, q in parts.items() if q.value)


@styled
def communication_plot(report: RunReport) -> Plot | None:
    """Draw the seconds per step of each communication channel: exposed solid, hidden as an outline.

    Returns None if the run recorded no communication.
    """
    longest = max((_channel_seconds(channel) for channel in report.communication), default=0.0)
    shown = [channel for channel in report.communication if _channel_seconds(channel) > 0.002 * longest]
    bars = sorted(shown, key=_channel_seconds, reverse=True)[:MAX_BARS]
    if not bars:
        return None
    factor, unit = (1e3, "ms") if longest < 1 else (1.0, "s")
    figure, axes = new_figure(14.2, 1.3 + 0.52 * len(bars))
    colour = PHASE_COLOURS["exposed_communication"]
    for row, channel in enumerate(bars):
        exposed, total = float(channel.exposed.value or 0), _channel_seconds(channel)
        axes.barh(row, total * factor, height=0.62, facecolor="none", edgecolor=colour, linewidth=1.2)
        segment(axes, row, 0, exposed * factor, colour, hatched=False)
        share = "" if channel.hidden.value is None else f", {channel.hidden.value:.0%} hidden".replace("%", " %")
        axes.text((total + 0.008 * longest) * factor, row, f"{duration(total)}{share}", va="center", color=INK)
    names = [f"{channel.axes.replace('+', ' and ')}: {CARRIED[channel.carried]}" for channel in bars]
    rows(axes, names)
    axes.set_xlim(0, longest * factor * 1.25)
    axes.set_xlabel(f"time in progress per step ({unit})")
    axes.bar(0, 0, color=colour, label="exposed: rank 0 waited")
    axes.bar(0, 0, facecolor="none", edgecolor=colour, label="hidden behind compute")
    figure.legend(loc="outside upper left", ncols=2, handlelength=0.9, handleheight=0.9, columnspacing=1.4)
    alt_text = "Communication per step. " + " ".join(
        f"{name}: {duration(float(channel.exposed.value or 0))} exposed of {duration(_channel_seconds(channel))}."
        for name, channel in zip(names, bars, strict=True)
    )
    return Plot(
        title="Exposed and hidden communication",
        note="measured on rank 0, median of the steady steps",
        svg=inline(figure, "communication", alt_text),
        alt_text=alt_text,
        wide=True,
    )


def _channel_seconds(channel: CommunicationReport) -> float:
    """Return the seconds that a channel was in progress; where progress was not timed, those that rank 0 waited."""
    return max(float(channel.in_progress.value or 0), float(channel.exposed.value or 0))


@styled
def checks_plot(report: RunReport) -> Plot | None:
    """Draw each predicted value in percent of the measured one, with its interval; return None if there is none."""
    checks = [c for c in report.checks if c.predicted.value and c.measured.value]
    if not checks:
        return None
    figure, axes = new_figure(6.9, 1.2 + 0.46 * len(checks))
    axes.axvline(100, color=INK, linewidth=1.6)
    for row, check in enumerate(checks):
        truth = float(check.measured.value or 1)
        centre = 100 * float(check.predicted.value or 0) / truth
        if check.predicted.low is not None and check.predicted.high is not None:
            ends = [100 * check.predicted.low / truth, 100 * check.predicted.high / truth]
            axes.plot(ends, [row, row], color=SERIES[0], linewidth=2, linestyle=(0, (3, 2)), solid_capstyle="butt")
            axes.plot(ends, [row, row], color=SERIES[0], linewidth=0, marker="|", markersize=9, markeredgewidth=1.6)
        axes.plot(
            [centre], [row], "o", markersize=8, markerfacecolor=PAPER, markeredgecolor=SERIES[0], markeredgewidth=2
        )
    rows(axes, [check.name for check in checks])
    low, high = axes.get_xlim()
    smallest = min(
        100 * float(c.predicted.low or c.predicted.value or 1) / float(c.measured.value or 1) for c in checks
    )
    if low < 25 or high > 250:  # large errors: on a log scale, ratios of 1/8 and 8 lie equally far from 1
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda v, _: significant(v))
        axes.xaxis.set_major_locator(
            FixedLocator([100 * 2.0**power for power in range(-6, 7, 3 if is_narrow() else 1)])
        )
        edge = 1.15 * max(high, 1e4 / max(smallest, 1.0))
        axes.set_xlim(1e4 / edge, edge)
    else:
        axes.set_xlim(min(low, 60), max(high, 140))
    axes.set_xlabel("predicted (% of measured)")
    alt_text = "Predicted values in percent of measured ones. " + " ".join(
        f"{c.name}: predicted {number(c.predicted.value or 0, c.predicted.unit)}, "
        f"measured {number(c.measured.value or 0, c.measured.unit)}."
        for c in checks
    )
    note = "circle: predicted; dashed: its interval; solid line: measured"
    return Plot(
        title="Accuracy of the prediction", note=note, svg=inline(figure, "checks", alt_text), alt_text=alt_text
    )


@styled
def memory_plot(report: RunReport) -> Plot | None:
    """Draw the peak memory of each rank (solid) and the predicted peak by component (hatched).

    Returns None if neither is known.
    """
    ranks = [rank for rank in report.ranks if rank.peak_memory.value][:MAX_BARS]
    predicted = {name: q for name, q in report.predicted_memory.items() if q.value}
    if not ranks and not predicted:
        return None
    figure, axes = new_figure(6.9, 1.2 + 0.46 * (len(ranks) + bool(predicted)))
    biggest = max(
        [float(r.peak_memory.value or 0) for r in ranks] + [sum(float(q.value or 0) for q in predicted.values())]
    )
    factor, unit = next((f, u) for f, u in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")) if biggest >= f or f == 1)
    left = 0.0
    for i, quantity in enumerate(predicted.values()):
        segment(axes, 0, left / factor, float(quantity.value or 0) / factor, SERIES[i % len(SERIES)], hatched=True)
        left += float(quantity.value or 0)
    first_row = int(bool(predicted))
    for row, rank in enumerate(ranks, start=first_row):
        segment(axes, row, 0, float(rank.peak_memory.value or 0) / factor, SERIES[0], hatched=False)
    rows(axes, ["predicted"] * first_row + [f"rank {rank.rank}" for rank in ranks])
    axes.set_xlabel(f"peak memory ({unit})")
    for i, component in enumerate(predicted):
        axes.bar(0, 0, facecolor="none", edgecolor=SERIES[i % len(SERIES)], hatch="////", label=component)
    if predicted:
        figure.legend(
            loc="outside upper left", ncols=legend_columns(4), handlelength=1.1, handleheight=0.9, columnspacing=1.2
        )
    parts = ", ".join(f"{component} {number(q.value or 0, 'B')}" for component, q in predicted.items())
    alt_text = "Peak memory. " + (f"Predicted: {parts}. " if predicted else "")
    alt_text += " ".join(f"Rank {r.rank}: {number(r.peak_memory.value or 0, 'B')}." for r in ranks)
    note = "solid: measured; hatched: predicted, by component" if predicted else "measured"
    return Plot(title="Peak memory by rank", note=note, svg=inline(figure, "memory", alt_text), alt_text=alt_text)

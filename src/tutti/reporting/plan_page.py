"""Render a plan as a self-contained page: timeline of a step, memory, other plans, scaling and measured trials."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullLocator

from tutti.config.prediction import (
    ACTIVITY_LABELS,
    DEVICE_PARTS,
    Activity,
    Bar,
    Omission,
    Prediction,
    ScalingCurve,
    Timeline,
    Track,
    Trials,
)
from tutti.reporting.formatting import EVIDENCE, duration, plural, signed_percent, significant
from tutti.reporting.html_report import environment
from tutti.reporting.svg import (
    GRID,
    INK,
    MUTED,
    PAPER,
    PHASE_COLOURS,
    SERIES,
    Plot,
    inline,
    legend_columns,
    new_figure,
    rows,
    segment,
    styled,
)

RowKind = Literal["", "chosen", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFigure:
    """A predicted number at the top of the page.

    Attributes:
        also: small print below the value.
    """

    name: str
    value: str
    also: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """Cells of a table, as text.

    Attributes:
        kind: "chosen" for the chosen plan, "off" for a plan that cannot run.
    """

    cells: tuple[str, ...]
    kind: RowKind = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTable:
    """A table whose cells are text.

    Attributes:
        under: sentence between the title and the table.
        right: indices of the right-aligned (numeric) columns.
    """

    title: str
    under: str
    columns: tuple[str, ...]
    rows: tuple[TableRow, ...]
    right: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPage:
    """The content of the page.

    Attributes:
        name: short description of the plan.
        lead: summary sentence.
        keys: predicted numbers at the top of the page.
        remarks: why the plan was chosen.
        changes: changes that would make another plan win.
        next_command: the command that trains by this plan.
    """

    name: str
    lead: str
    keys: tuple[KeyFigure, ...]
    prediction: Prediction
    timeline: Timeline
    remarks: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    tables: tuple[PageTable, ...] = ()
    scaling: ScalingCurve | None = None
    trials: Trials | None = None
    next_command: str = ""


def plan_html(page: PlanPage) -> str:
    """Render the page as one HTML file with inline style and figures, no scripts and no external references."""
    activities = [
        activity for activity in ACTIVITY_LABELS if any(activity in track.seconds for track in page.timeline.tracks)
    ]
    return (
        environment()
        .get_template("plan.html")
        .render(
            p=page,
            badges=_badges(page),
            step_plots=[timeline_plot(page.timeline)],
            memory_plots=[track_memory_plot(page.timeline)],
            scaling_figure=scaling_plot(page.scaling) if page.scaling is not None else None,
            trials_figure=trials_plot(page.trials) if page.trials is not None else None,
            activities=[ACTIVITY_LABELS[activity] for activity in activities],
            tracks=[_track_row(page.timeline, track, activities) for track in page.timeline.tracks],
            duration=duration,
            rate=significant,
            percent=signed_percent,
            evidence=EVIDENCE,
        )
    )


def _badges(page: PlanPage) -> list[tuple[str, str]]:
    """Return the page's badges, as (kind of badge, text): whether the plan fits, and what trials measured."""
    fits = ("good", "Fits in memory") if page.prediction.fits else ("bad", "Does not fit in memory")
    badges = [fits]
    if page.trials is None:
        badges.append(("warn", "Nothing was run: every number is predicted"))
    elif page.trials.best is None:
        badges.append(("bad", "None of the plans that were tried ran"))
    elif page.trials.changed:
        badges.append(("warn", "Measured: another plan is faster"))
    else:
        badges.append(("good", "Measured: the choice stands"))
    return badges


def _track_row(timeline: Timeline, track: Track, activities: list[Activity]) -> dict[str, object]:
    """Build a table row of a track: the fraction of the step that each activity takes."""
    parts = [track.seconds.get(activity, 0.0) / timeline.step_time_s.value for activity in activities]
    return {
        "name": track_name(track, timeline),
        "count": track.count,
        "shares": [f"{part:.1%}".replace("%", " %") if part else "" for part in parts],
        "full_when": track.full_when,
    }


FILLS: dict[Activity, str] = {
    "data": PHASE_COLOURS["data"],
    "forward": PHASE_COLOURS["forward"],
    "backward": PHASE_COLOURS["backward"],
    "weights": SERIES[6],
    "optimizer": PHASE_COLOURS["optimizer"],
    "communication": PHASE_COLOURS["exposed_communication"],
    "bubble": GRID,
    "waiting": "none",
    "other": PHASE_COLOURS["other"],
}
OUTLINED: tuple[Activity, ...] = ("bubble", "waiting")
"""Activities drawn as outlines, because the rank does nothing."""
BREAK = 0.03
"""Width of the gap that replaces omitted microbatches, as a fraction of the drawn time."""

MAX_LEGEND_COLUMNS = 7
"""Maximum number of legend entries per row: more would be wider than the page."""

XOfTime = Callable[[float], float]


def track_name(track: Track, timeline: Timeline) -> str:
    """Return the ranks of a track as text, with their stage if the timeline has several stages."""
    return track.ranks + (f" (stage {track.stage})" if len({other.stage for other in timeline.tracks}) > 1 else "")


@styled
def timeline_plot(timeline: Timeline) -> Plot:
    """Draw one predicted step: a row per track, bars for activities, and lines below them for hidden communication."""
    omission, end_s = timeline.left_out, timeline.step_time_s.value
    factor, unit = (1e3, "ms") if end_s < 1 else (1.0, "s")
    x_of, width = _x_of_time(omission, end_s)
    handles = _activity_handles(timeline)
    figure, axes = new_figure(14.2, 1.2 + 0.3 * _legend_rows(handles) + 0.46 * len(timeline.tracks))
    for row, track in enumerate(timeline.tracks):
        for activity in FILLS:
            _draw(axes, row, [bar for bar in track.bars if bar.doing == activity], activity, x_of)
        for bar in track.hidden:
            axes.plot(
                [x_of(bar.start_s), x_of(bar.end_s)], [row + 0.42] * 2, color=FILLS["communication"], linewidth=2.5,
                solid_capstyle="butt",
            )  # fmt: skip
    rows(axes, [track_name(track, timeline) for track in timeline.tracks])
    axes.set_xlim(0, width)
    if omission is not None:
        axes.axvspan(x_of(omission.start_s), x_of(omission.end_s), facecolor=PAPER, zorder=4)
        for edge in (omission.start_s, omission.end_s):
            axes.axvline(x_of(edge), color=MUTED, linewidth=1, linestyle=(0, (2, 3)), zorder=5)
    ticks = _ticks(omission, end_s, factor)
    axes.set_xticks([x_of(tick / factor) for tick in ticks], [f"{tick:g}" for tick in ticks])
    axes.set_xlabel(f"time of a step ({unit})")
    _legend(figure, handles)
    note = "all predicted; ranks that do the same share a row"
    if omission is not None:
        note += f"; {plural(omission.microbatches, 'microbatch')} of {timeline.num_microbatches} left out at the gap"
    if timeline.tracks_left_out:
        note += f"; {plural(timeline.tracks_left_out, 'row')} between these not shown"
    alt_text = "One step, predicted. " + " ".join(
        f"{track_name(track, timeline)}: {_describe_track(track)}." for track in timeline.tracks
    )
    return Plot(
        title="One step, rank by rank",
        note=note,
        svg=inline(figure, "timeline", alt_text),
        alt_text=alt_text,
        wide=True,
    )


def _activity_handles(timeline: Timeline) -> list[Patch | Line2D]:
    """Return a legend entry for each activity that takes a visible part of the step."""
    least = 0.002 * timeline.step_time_s.value
    used = [activity for activity in FILLS if any(track.seconds.get(activity, 0) > least for track in timeline.tracks)]
    handles: list[Patch | Line2D] = [
        Patch(facecolor=FILLS[activity], edgecolor=MUTED if activity in OUTLINED else FILLS[activity], linewidth=0.8,
              label=ACTIVITY_LABELS[activity])
        for activity in used
    ]  # fmt: skip
    if any(track.hidden for track in timeline.tracks):
        handles.append(Line2D([], [], color=FILLS["communication"], linewidth=2.5, label=ACTIVITY_LABELS["hidden"]))
    return handles


def _x_of_time(omission: Omission | None, end_s: float) -> tuple[XOfTime, float]:
    """Return the function that maps a time within the step to its x coordinate, and the width of the drawing."""
    if omission is None:
        return (lambda time_s: time_s), end_s
    omitted_s = omission.end_s - omission.start_s
    gap = BREAK * (end_s - omitted_s)

    def x_of(time_s: float) -> float:
        if time_s <= omission.start_s:
            return time_s
        return max(omission.start_s + gap, time_s - omitted_s + gap)

    return x_of, end_s - omitted_s + gap


def _ticks(omission: Omission | None, end_s: float, factor: float) -> list[float]:
    """Return tick positions at round numbers, without those inside the omitted part."""
    shown = end_s - (omission.end_s - omission.start_s if omission is not None else 0.0)
    steps = MaxNLocator(10).tick_values(0.0, shown * factor)
    size = float(steps[1] - steps[0])
    ticks = [index * size for index in range(int(end_s * factor / size) + 1)] if end_s / shown < 1000 else [0.0]
    return [
        round(tick, 9) for tick in ticks
        if omission is None or tick <= omission.start_s * factor or tick >= omission.end_s * factor
    ]  # fmt: skip


def _draw(axes: Axes, row: int, bars: Sequence[Bar], activity: Activity, x_of: XOfTime) -> None:
    """Draw all bars of one activity in a row as one path."""
    if not bars:
        return
    starts, ends = (
        np.array([x_of(at) for at in edge]) for edge in ([b.start_s for b in bars], [b.end_s for b in bars])
    )
    low, high = np.full(len(bars), row - 0.31), np.full(len(bars), row + 0.31)
    corners = np.stack([starts, low, ends, low, ends, high, starts, high, starts, low], axis=1).reshape(-1, 2)
    codes = np.tile([Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY], len(bars))
    edge = MUTED if activity in OUTLINED else PAPER
    axes.add_patch(PathPatch(Path(corners, codes), facecolor=FILLS[activity], edgecolor=edge, linewidth=0.5))


def _legend_rows(handles: Sequence[Patch | Line2D]) -> int:
    """Return the number of rows that the legend needs."""
    return -(-len(handles) // legend_columns(MAX_LEGEND_COLUMNS))


def _legend(figure: Figure, handles: Sequence[Patch | Line2D]) -> None:
    """Draw the legend above the figure, in as many rows as its entries need."""
    figure.legend(
        handles=list(handles), loc="outside upper left", ncols=-(-len(handles) // _legend_rows(handles)),
        handlelength=1.1, handleheight=0.9, columnspacing=1.4,
    )  # fmt: skip


def _describe_track(track: Track) -> str:
    """Describe in words how long a track spends on each activity."""
    return ", ".join(f"{ACTIVITY_LABELS[activity]} {duration(seconds)}" for activity, seconds in track.seconds.items())


@styled
def track_memory_plot(timeline: Timeline) -> Plot:
    """Draw the predicted peak memory of a rank of each track by component (hatched), with its memory limit."""
    tracks = timeline.tracks
    biggest = max(max(track.memory.total, track.memory_limit_nbytes) for track in tracks)
    factor, unit = next((f, u) for f, u in ((2.0**30, "GiB"), (2.0**20, "MiB"), (1.0, "B")) if biggest >= f or f == 1)
    components = [name for name in DEVICE_PARTS if any(getattr(track.memory, name) for track in tracks)]
    handles: list[Patch | Line2D] = [
        Patch(facecolor="none", edgecolor=SERIES[index % len(SERIES)], hatch="////", label=name)
        for index, name in enumerate(components)
    ]
    handles.append(Line2D([], [], color=INK, linewidth=2, label="limit"))
    figure, axes = new_figure(14.2, 1.2 + 0.3 * _legend_rows(handles) + 0.46 * len(tracks))
    for row, track in enumerate(tracks):
        at = 0.0
        for index, name in enumerate(components):
            size = float(getattr(track.memory, name)) / factor
            segment(axes, row, at, size, SERIES[index % len(SERIES)], hatched=True)
            at += size
        limit = track.memory_limit_nbytes / factor
        axes.plot([limit, limit], [row - 0.42, row + 0.42], color=INK, linewidth=2)
        over = at > limit
        text = f"{at:,.1f} {unit}, {at / limit:.0%}".replace("%", " % of the limit") + (": too much" if over else "")
        axes.text(max(at, limit) + 0.01 * biggest / factor, row, text, va="center", fontsize=12, color=INK)
    rows(axes, [track_name(track, timeline) for track in tracks])
    axes.set_xlim(0, biggest / factor * 1.27)
    axes.set_xlabel(f"peak memory of a rank ({unit})")
    _legend(figure, handles)
    alt_text = "Peak memory of a rank, predicted. " + " ".join(
        f"{track_name(entry, timeline)}: {entry.memory.total / factor:.1f} {unit} of "
        f"{entry.memory_limit_nbytes / factor:.1f}."
        for entry in tracks
    )
    note = "hatched: predicted, by component at the peak; line: memory limit of a rank"
    return Plot(
        title="Peak memory of a rank", note=note, svg=inline(figure, "memory", alt_text), alt_text=alt_text, wide=True
    )


@styled
def scaling_plot(curve: ScalingCurve) -> Plot | None:
    """Draw throughput against the number of devices: predicted dashed, measured solid.

    A vertical line marks the number at which more devices stop paying. Returns None when no number of devices has a
    plan.
    """
    points = [point for point in curve.points if point.throughput_per_s and point.step_time_s is not None]
    if not points:
        return None
    figure, axes = new_figure(14.2, 5.2)
    x, y = [point.devices for point in points], [point.throughput_per_s for point in points]
    ends = [
        (p.throughput_per_s * p.step_time_s.value / p.step_time_s.high,
         p.throughput_per_s * p.step_time_s.value / p.step_time_s.low)
        for p in points if p.step_time_s is not None
    ]  # fmt: skip
    axes.fill_between(x, [low for low, _ in ends], [high for _, high in ends], color=SERIES[0], alpha=0.13, linewidth=0)
    axes.plot(x, [y[0] * count / x[0] for count in x], color=MUTED, linewidth=1, linestyle=(0, (1, 3)),
              label=f"linear scaling from {x[0]}")  # fmt: skip
    axes.plot(x, y, color=SERIES[0], linewidth=1.8, linestyle=(0, (4, 2)), marker="o", markersize=7,
              markerfacecolor=PAPER, markeredgewidth=1.8, label="predicted, with its interval as a band")  # fmt: skip
    if curve.measured:
        seen = sorted(curve.measured, key=lambda point: point.devices)
        axes.plot([p.devices for p in seen], [p.throughput_per_s for p in seen], color=SERIES[1], linewidth=1.8,
                  marker="o", markersize=7, label="measured")  # fmt: skip
    if curve.pays_until:
        axes.axvline(curve.pays_until, color=INK, linewidth=1.2)
        axes.annotate(f"pays until {curve.pays_until}", (curve.pays_until, 0.04), xycoords=("data", "axes fraction"),
                      xytext=(-6, 0), textcoords="offset points", ha="right", color=INK, fontsize=12)  # fmt: skip
    if len(x) > 1:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: significant(float(f"{value:.3g}")))
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_xlim(x[0] / 1.25, x[-1] * 1.12)
    axes.xaxis.set_major_locator(FixedLocator([float(count) for count in x]))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set(xlabel="available devices", ylabel=f"{curve.unit}/s")
    axes.legend(loc="upper left", handlelength=2.4)
    alt_text = "Throughput against devices, predicted. " + " ".join(
        f"{p.devices}: {significant(p.throughput_per_s)} {curve.unit}/s." for p in points
    )
    return Plot(
        title="Speed against devices", note="the best plan that uses at most this many devices; " + curve.sentence,
        svg=inline(figure, "scaling", alt_text), alt_text=alt_text, wide=True,
    )  # fmt: skip


@styled
def trials_plot(trials: Trials) -> Plot | None:
    """Draw the step time of each plan that was run: predicted (hatched) above measured (solid, with its range).

    Returns None when no trial was measured.
    """
    measured_trials = [trial for trial in trials.trials if trial.measured_s is not None]
    if not measured_trials:
        return None
    longest = max(max(t.predicted.value, t.most_s or 0.0) for t in measured_trials)
    factor, unit = (1e3, "ms") if longest < 1 else (1.0, "s")
    figure, axes = new_figure(14.2, 1.4 + 0.78 * len(measured_trials))
    for row, trial in enumerate(measured_trials):
        measured = float(trial.measured_s or 0.0)
        axes.barh(row - 0.2, trial.predicted.value * factor, height=0.34, facecolor="none", edgecolor=SERIES[0],
                  hatch="////", linewidth=1)  # fmt: skip
        axes.barh(row + 0.2, measured * factor, height=0.34, color=SERIES[1], edgecolor=PAPER, linewidth=0.8)
        spread = [float(trial.least_s or measured) * factor, float(trial.most_s or measured) * factor]
        axes.plot(spread, [row + 0.2] * 2, color=INK, linewidth=1.4, marker="|", markersize=8)
        for shift, value in ((-0.2, trial.predicted.value), (0.2, max(measured, trial.most_s or 0.0))):
            shown = trial.predicted.value if shift < 0 else measured
            axes.text(value * factor + 0.008 * longest * factor, row + shift, duration(shown), va="center",
                      fontsize=12, color=INK)  # fmt: skip
    rows(axes, [trial.words for trial in measured_trials])
    axes.set_xlim(0, longest * factor * 1.12)
    axes.set_xlabel(f"time of a step ({unit})")
    spread_label = "measured, with a line from the fastest to the slowest step"
    predicted = Patch(facecolor="none", edgecolor=SERIES[0], hatch="////", label="predicted")
    _legend(figure, [predicted, Patch(facecolor=SERIES[1], label=spread_label)])
    alt_text = "Plans that were run. " + " ".join(
        f"{t.words}: predicted {duration(t.predicted.value)}, measured {duration(float(t.measured_s or 0))}."
        for t in measured_trials
    )
    note = "median of the measured steps; plans in the order of their predicted step times"
    return Plot(
        title="Predicted and measured", note=note, svg=inline(figure, "trials", alt_text), alt_text=alt_text, wide=True
    )

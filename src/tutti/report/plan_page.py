"""A plan as a page that stands alone: the step as it falls, memory, the others, speed against devices, trials."""

from dataclasses import dataclass
from typing import Literal

from tutti.config.prediction import Prediction
from tutti.config.scaling import ScalingCurve
from tutti.config.timeline import DOINGS, Doing, Timeline, Track
from tutti.config.trials import Trials
from tutti.report.html import environment
from tutti.report.plan_plots import held_plot, scaling_plot, timeline_plot, track_name, trials_plot
from tutti.report.words import EVIDENCE, duration, signed_percent, significant

RowKind = Literal["", "chosen", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFigure:
    """A predicted number of the first screen, and its small print."""

    name: str
    value: str
    also: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """Cells of a table, as text. `kind`: the chosen plan, or one that cannot be."""

    cells: tuple[str, ...]
    kind: RowKind = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table whose cells are text. `right`: columns of numbers; `under`: a sentence above it."""

    title: str
    under: str
    columns: tuple[str, ...]
    rows: tuple[TableRow, ...]
    right: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPage:
    """What the page says. `name` and `lead`: of the plan, in words; `remarks`: why it was chosen, and `changes`: what
    would make another win; `next_command`: what a user types next."""

    name: str
    lead: str
    keys: tuple[KeyFigure, ...]
    prediction: Prediction
    timeline: Timeline
    remarks: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    scaling: ScalingCurve | None = None
    trials: Trials | None = None
    next_command: str = ""


def plan_html(page: PlanPage) -> str:
    """The page as one file: style and figures inside, no script, no reference to anything."""
    doings = [doing for doing in DOINGS if any(doing in track.seconds for track in page.timeline.tracks)]
    return (
        environment()
        .get_template("plan.html")
        .render(
            p=page,
            badges=_badges(page),
            step_plots=[timeline_plot(page.timeline)],
            memory_plots=[held_plot(page.timeline)],
            scaling_figure=scaling_plot(page.scaling) if page.scaling is not None else None,
            trials_figure=trials_plot(page.trials) if page.trials is not None else None,
            doings=[DOINGS[doing] for doing in doings],
            tracks=[_track_row(page.timeline, track, doings) for track in page.timeline.tracks],
            duration=duration,
            rate=significant,
            percent=signed_percent,
            evidence=EVIDENCE,
        )
    )


def _badges(page: PlanPage) -> list[tuple[str, str]]:
    fits = ("good", "Fits in memory") if page.prediction.fits else ("bad", "Does not fit in memory")
    found = [fits]
    if page.trials is None:
        found.append(("warn", "Nothing was run: every number is predicted"))
    elif page.trials.best is None:
        found.append(("bad", "None of the plans tried ran"))
    elif page.trials.changed:
        found.append(("warn", "Measured: another plan is faster"))
    else:
        found.append(("good", "Measured: the choice stands"))
    return found


def _track_row(found: Timeline, track: Track, doings: list[Doing]) -> dict[str, object]:
    parts = [track.seconds.get(doing, 0.0) / found.step_time_s.value for doing in doings]
    return {
        "name": track_name(track, found),
        "count": track.count,
        "shares": [f"{part:.1%}".replace("%", " %") if part else "" for part in parts],
        "full_when": track.full_when,
    }

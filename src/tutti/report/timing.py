"""Times of a run: wall time, where it went, the steady step, throughput. Pure functions of the recorded rows."""

from collections import Counter
from collections.abc import Iterable
from statistics import median
from typing import get_args

from tutti.config.prediction import Phase
from tutti.config.quantity import Quantity
from tutti.config.report_measured import TimeReport
from tutti.report.read import Records, Row, finite

PHASES: tuple[Phase, ...] = get_args(Phase)
WARM_UP_STEPS = 2
STARTUP_NOTE = "of rank 0; prepare is in the wall time, under other"


def seen(value: float | None, unit: str = "", note: str = "") -> Quantity:
    """A number that the run recorded, or the empty quantity of its unit."""
    value = finite(value)
    return Quantity(unit=unit) if value is None else Quantity(value=value, unit=unit, evidence="measured", note=note)


def steady_steps(records: Records) -> tuple[Row, ...]:
    """Steps that show the speed of the run: full batches, updated, without the first two of each generation.

    A run too short for that gives all its steps.
    """
    steps = [row for row in records.spent("step") if row.number("wall_s") is not None]
    full = max((row.number("samples") or 0 for row in steps), default=0)
    position: Counter[int] = Counter()
    steady = []
    for row in steps:
        position[row.generation] += 1
        warm = position[row.generation] > WARM_UP_STEPS
        if warm and not row.data.get("skipped") and (row.number("samples") or 0) == full:
            steady.append(row)
    return tuple(steady or steps)


def steady_note(records: Records) -> str:
    """Which steps `steady_steps` took, in words."""
    steady, steps = steady_steps(records), records.spent("step")
    if len(steady) == len(steps) and len(steps) <= WARM_UP_STEPS:
        return f"median of all {len(steps)} steps: too few to leave the first ones out"
    return f"median of {len(steady)} steady steps of {len(steps)}; the first {WARM_UP_STEPS} are left out"


def typical(rows: Iterable[Row], name: str) -> float | None:
    """The median of a number over rows that have it."""
    values = [value for row in rows if (value := row.number(name)) is not None]
    return median(values) if values else None


def phases_of(rows: Iterable[Row]) -> dict[Phase, float]:
    """Seconds by phase summed over rows of every kind; a phase not known here counts as other."""
    total: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
    for row in rows:
        whole = "evaluation" if row.kind == "evaluate" else "other"
        parts = row.mapping("phases") or {whole: row.number("wall_s") or 0.0}
        for name, seconds in parts.items():
            total[next((phase for phase in PHASES if phase == name), "other")] += seconds
    return total


def quantities(seconds: dict[Phase, float], note: str = "") -> dict[Phase, Quantity]:
    """Seconds by phase as quantities."""
    return {phase: seen(value, "s", note) for phase, value in seconds.items()}


def wall_s(records: Records) -> float:
    """Seconds from the start of training to its last row, over all generations."""
    return records.rows[-1].time_s if records.rows else 0.0


def time_report(records: Records) -> TimeReport:
    """The time section of the report."""
    wall = wall_s(records)
    parts = phases_of(records.rows)
    steady = steady_steps(records)
    generations = 1 + max((row.generation for row in records.rows), default=0)
    repeated = sum(row.superseded for row in records.spent("step"))
    startup: Counter[str] = Counter()
    for row in records.spent("start"):
        startup.update(row.mapping("startup_s"))
    typical_phases: dict[Phase, float] = {
        phase: _typical_phase(steady, phase) for phase in PHASES if phase != "evaluation"
    }
    return TimeReport(
        wall=seen(wall, "s", "down time between generations is not counted" if generations > 1 else ""),
        breakdown=quantities(parts),
        accounted=seen(sum(parts.values()) / wall if wall else None, "ratio", "sum of the phases over the wall time"),
        per_step=seen(typical(steady, "wall_s"), "s", steady_note(records)),
        step_phases=quantities(typical_phases, "median of the steady steps") if steady else {},
        load_wait=seen(parts["data"], "s", "waiting for the next batch, over the run"),
        startup={
            name: seen(seconds, "s", "of rank 0; prepare is in the wall time, under other")
            for name, seconds in startup.items()
        },
        generations=seen(generations),
        repeated_steps=seen(repeated, note="steps done again after a resume" if repeated else ""),
    )


def _typical_phase(rows: tuple[Row, ...], phase: Phase) -> float:
    values = [row.mapping("phases").get(phase, 0.0) for row in rows]
    return median(values) if values else 0.0


def throughput(records: Records) -> Quantity:
    """Samples (or tokens) a second of the steady steps."""
    steady = steady_steps(records)
    unit = records.header.recipe.unit
    count, seconds = typical(steady, unit), typical(steady, "wall_s")
    if not count or not seconds:
        return Quantity(unit=f"{unit}/s")
    return seen(count / seconds, f"{unit}/s", f"of the step time: {steady_note(records)}")

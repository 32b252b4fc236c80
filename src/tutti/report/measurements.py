"""Times of a run: wall time, where it went, the steady step, throughput. Pure functions of the recorded rows."""

from collections import Counter
from collections.abc import Iterable
from statistics import mean, median
from typing import Any, cast, get_args

from tutti.config.prediction import Phase
from tutti.config.run_report import CommunicationReport, ExpertsReport, Quantity, TimeReport
from tutti.config.sync_notation import format_relaxation
from tutti.config.vocabulary import TrafficKind
from tutti.report.run_records import MetricsRow, Records, finite

PHASES: tuple[Phase, ...] = get_args(Phase)
WARM_UP_STEPS = 2
STARTUP_NOTE = "of rank 0; prepare is in the wall time, under other"


def seen(value: float | None, unit: str = "", note: str = "") -> Quantity:
    """A number that the run recorded, or the empty quantity of its unit."""
    value = finite(value)
    return Quantity(unit=unit) if value is None else Quantity(value=value, unit=unit, evidence="measured", note=note)


def steady_steps(records: Records) -> tuple[MetricsRow, ...]:
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


def typical(rows: Iterable[MetricsRow], name: str) -> float | None:
    """The median of a number over rows that have it."""
    values = [value for row in rows if (value := row.number(name)) is not None]
    return median(values) if values else None


def phases_of(rows: Iterable[MetricsRow]) -> dict[Phase, float]:
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


def _typical_phase(rows: tuple[MetricsRow, ...], phase: Phase) -> float:
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


NOTE = "median of the steady steps, rank 0"


def communication(records: Records) -> tuple[CommunicationReport, ...]:
    """By axes and by what is carried, the most bytes first; empty where the run recorded none.

    Medians of each number over the steady steps that timed it.
    """
    rows = [row for row in steady_steps(records) if row.data.get("timed", True)]
    found: dict[tuple[str, TrafficKind], list[dict[str, Any]]] = {}
    for row in rows:
        for entry in _objects(row.data.get("communication")):
            carried = next((word for word in get_args(TrafficKind) if word == entry.get("carried")), None)
            if carried is not None:
                found.setdefault((str(entry.get("axes", "")), carried), []).append(entry)
    reports = [_one(axes, carried, entries, len(rows)) for (axes, carried), entries in found.items()]
    return tuple(sorted(reports, key=lambda one: (-(one.sent.value or 0), one.axes, one.carried)))


def _one(axes: str, carried: TrafficKind, entries: list[dict[str, Any]], steps: int) -> CommunicationReport:
    """One lane; in steps that do not mention it nothing was exchanged."""

    def typical(values: Iterable[float | None]) -> float:
        known = [value or 0.0 for value in values]
        return median(known + [0.0] * (steps - len(known)))

    waits = [{phase: finite(s) or 0.0 for phase, s in _object(entry.get("exposed_s")).items()} for entry in entries]
    exposed = typical(sum(wait.values()) for wait in waits)
    timed = all(finite(entry.get("in_progress_s")) is not None for entry in entries)
    in_progress = typical(finite(entry.get("in_progress_s")) for entry in entries) if timed else None
    hidden = None if not in_progress else round(max(0.0, 1 - exposed / in_progress), 3)
    return CommunicationReport(
        axes=axes,
        carried=carried,
        exchanges=seen(typical(finite(entry.get("count")) for entry in entries), "", NOTE),
        sent=seen(typical(finite(entry.get("nbytes")) for entry in entries), "B", NOTE),
        in_progress=seen(in_progress, "s", f"{NOTE}; until their end was noticed"),
        exposed=seen(exposed, "s", NOTE),
        exposed_in={
            phase: seen(typical(wait.get(phase) for wait in waits), "s", NOTE)
            for phase in PHASES
            if any(wait.get(phase) for wait in waits)
        },
        hidden=seen(hidden, "ratio", "of the time under way"),
    )


def sent_per_step(records: Records) -> Quantity:
    """Bytes of gradients, divided parameters and activations that the rank which sends most sends in a step.

    Counted as `sent_nbytes_per_rank` of a Prediction is.
    """
    own = _typical_sent(steady_steps(records))
    others = [_typical_sent(_like(rows, steady_steps(records))) for rows in records.rank_rows.values()]
    known = [value for value in (own, *others) if value is not None]
    note = "gradients, divided parameters and activations, median of the steady steps, of the rank that sends most"
    return seen(max(known, default=None), "B", note)


def _typical_sent(rows: Iterable[MetricsRow]) -> float | None:
    values = [
        sent + (row.number("exchanged_nbytes") or 0) for row in rows if (sent := row.number("sent_nbytes")) is not None
    ]
    return median(values) if values else None


def _like(rows: tuple[MetricsRow, ...], steady: tuple[MetricsRow, ...]) -> list[MetricsRow]:
    """A rank's rows of the same steps."""
    steps = {row.step for row in steady}
    return [row for row in rows if row.kind == "step" and row.step in steps]


def experts(records: Records) -> tuple[ExpertsReport, ...]:
    """Every mixture of experts, in the order of the model; empty for a model without one."""
    rows = [row for row in records.kept("step") if _object(row.data.get("experts"))]
    names = dict.fromkeys(name for row in rows for name in _object(row.data.get("experts")))
    return tuple(_mixture(name, [_object(_object(row.data["experts"]).get(name)) for row in rows]) for name in names)


def _mixture(name: str, entries: list[dict[str, Any]]) -> ExpertsReport:
    assigned = sum(finite(entry.get("assigned")) or 0 for entry in entries)
    dropped = sum(finite(entry.get("dropped")) or 0 for entry in entries)
    losses = [value for entry in entries if (value := finite(entry.get("balance_loss"))) is not None]
    return ExpertsReport(
        name=name,
        assigned=seen(assigned, "", "choices of tokens over the run, all ranks"),
        dropped=seen(dropped, "", "choices that found no room, over the run, all ranks"),
        share=seen(dropped / assigned if assigned else None, "ratio", "of all choices"),
        balance_loss=seen(median(losses[-100:]) if losses else None, "", "median of the last 100 steps; 1 if balanced"),
    )


def exposed_phases(reports: Iterable[CommunicationReport]) -> list[Phase]:
    """The phases in which anything was waited for."""
    waited = {phase for one in reports for phase, quantity in one.exposed_in.items() if quantity.value}
    return [phase for phase in PHASES if phase in waited]


def _objects(value: object) -> list[dict[str, Any]]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def _object(value: object) -> dict[str, Any]:
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


DISAGREEMENT_NOTE = "distance of a replica from the mean of all, over the mean's length"


def replicas_report(records: Records) -> dict[str, Quantity]:
    """By what it is; empty for a run whose replicas were equal."""
    steps = records.kept("step")
    seen_too = records.kept("evaluate")  # where no step can: all ranks meet there
    rows = [found for row in [*steps, *seen_too] if isinstance(found := row.data.get("replicas"), dict)]
    if not rows:
        return {}
    measured = [one for row in rows if isinstance(one := row.get("disagreement"), dict)]
    means = [value for one in measured if (value := finite(one.get("mean"))) is not None]
    largest = [value for one in measured if (value := finite(one.get("max"))) is not None]
    stale = [value for row in rows if (value := finite(row.get("staleness"))) is not None]
    sent = [value for row in steps if (value := row.number("sent_nbytes")) is not None]
    times = f"{DISAGREEMENT_NOTE}; measured {len(measured)} times"
    return {
        "disagreement": seen(mean(means) if means else None, "ratio", f"{times}, mean"),
        "largest disagreement": seen(max(largest, default=None), "ratio", f"{times}, farthest replica"),
        "staleness": seen(max(stale, default=None), "steps", "most updates since a replica took in what others had"),
        "bytes sent": seen(mean(sent) if sent else None, "B", "mean over all steps, rank 0: not every step sends"),
    }


def mode_text(records: Records) -> str:
    """The plan's mode in words, nothing where replicas are equal."""
    plan = records.plan
    return "" if plan is None or plan.sync.mode == "synchronous" else f"replicas {format_relaxation(plan.sync)}"

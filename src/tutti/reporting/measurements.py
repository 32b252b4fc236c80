"""Measure a run from its recorded rows: wall time, phases, steady step time, throughput and communication.

All functions are pure.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import mean, median
from typing import Any, cast, get_args

from tutti.config.prediction import Phase
from tutti.config.run_report import CommunicationReport, ExpertsReport, Quantity, TimeReport
from tutti.config.sync_notation import format_relaxation
from tutti.config.vocabulary import TrafficKind
from tutti.reporting.run_records import MetricsRow, Records, finite

PHASES: tuple[Phase, ...] = get_args(Phase)
WARM_UP_STEPS = 2
STARTUP_NOTE = "rank 0; the wall time includes prepare, in phase other"


def seen(value: float | None, unit: str = "", note: str = "") -> Quantity:
    """Return a measured quantity; one without a value if the value is missing or not finite."""
    value = finite(value)
    return Quantity(unit=unit) if value is None else Quantity(value=value, unit=unit, evidence="measured", note=note)


def steady_steps(records: Records) -> tuple[MetricsRow, ...]:
    """Return the steps that show the speed of the run.

    These are steps with a full batch that were not skipped or profiled, without the first two of each generation. A run
    too short to have such steps returns all its steps.
    """
    steps = [row for row in records.spent("step") if row.number("wall_s") is not None]
    full = max((row.number("samples") or 0 for row in steps), default=0)
    position: Counter[int] = Counter()
    steady = []
    for row in steps:
        position[row.generation] += 1
        warm = position[row.generation] > WARM_UP_STEPS
        measured = not row.data.get("skipped") and not row.data.get("profiled")
        if warm and measured and (row.number("samples") or 0) == full:
            steady.append(row)
    return tuple(steady or steps)


def steady_note(records: Records) -> str:
    """Describe which steps `steady_steps` returned, and which it left out."""
    steady, steps = steady_steps(records), records.spent("step")
    if len(steady) == len(steps) and len(steps) <= WARM_UP_STEPS:
        return f"median of all {len(steps)} steps, which are too few to leave out the first ones"
    others = len(steps) - len(steady) - WARM_UP_STEPS * len({row.generation for row in steps})
    profiled = profiled_steps(records)
    kinds = [f"{others - profiled} with a short batch or skipped"] if others > profiled else []
    kinds += [f"{profiled} profiled"] if profiled else []
    rest = f", as are {' and '.join(kinds)}" if kinds else ""
    return f"median of {len(steady)} steady steps of {len(steps)}; the first {WARM_UP_STEPS} are left out{rest}"


def profiled_steps(records: Records) -> int:
    """Return how many steps a profiler has slowed."""
    return sum(bool(row.data.get("profiled")) for row in records.spent("step"))


def typical(rows: Iterable[MetricsRow], name: str) -> float | None:
    """Return the median of a field over the rows that have it; None if no row does."""
    values = [value for row in rows if (value := row.number(name)) is not None]
    return median(values) if values else None


def phases_of(rows: Iterable[MetricsRow]) -> dict[Phase, float]:
    """Return the seconds by phase, summed over all rows; unknown phases count as "other"."""
    total: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
    for row in rows:
        whole = "evaluation" if row.kind == "evaluate" else "other"
        parts = row.mapping("phases") or {whole: row.number("wall_s") or 0.0}
        for name, seconds in parts.items():
            total[next((phase for phase in PHASES if phase == name), "other")] += seconds
    return total


def quantities(seconds: dict[Phase, float], note: str = "") -> dict[Phase, Quantity]:
    """Convert seconds by phase to quantities."""
    return {phase: seen(value, "s", note) for phase, value in seconds.items()}


def wall_s(records: Records) -> float:
    """Return the seconds from the start of prepare to the last row, over all generations."""
    return records.rows[-1].time_s if records.rows else 0.0


def _earlier_steps(records: Records) -> float | None:
    """Return the step from which the first generation resumed a run of another folder; None if it did not."""
    first = next((row for row in records.rows if row.kind == "start"), None)
    return None if first is None else first.number("resumed_at_step") or None


def time_report(records: Records) -> TimeReport:
    """Build the time section of the report."""
    wall = wall_s(records)
    parts = phases_of(records.rows)
    steady = steady_steps(records)
    generations = 1 + max((row.generation for row in records.rows), default=0)
    repeated = sum(row.superseded for row in records.spent("step"))
    startup: Counter[str] = Counter()
    for row in records.spent("start"):
        startup.update(row.mapping("startup_s"))
    return TimeReport(
        wall=seen(wall, "s", "downtime between generations is not counted" if generations > 1 else ""),
        breakdown=quantities(parts),
        accounted=seen(
            sum(parts.values()) / wall if wall else None, "ratio", "sum of the phases divided by the wall time"
        ),
        per_step=seen(typical(steady, "wall_s"), "s", steady_note(records)),
        step_phases=quantities(_step_phases(steady), STEP_PHASES_NOTE) if steady else {},
        load_wait=seen(parts["data"], "s", "waiting for the next batch, during the whole run"),
        startup={name: seen(seconds, "s", STARTUP_NOTE) for name, seconds in startup.items()},
        earlier_steps=seen(_earlier_steps(records), "steps"),
        generations=seen(generations, note=_from_memory(records)),
        repeated_steps=seen(repeated, note="steps repeated after a resume" if repeated else ""),
    )


def _from_memory(records: Records) -> str:
    """Return from which steps the run went on from memory, as a clause; empty if from none."""
    starts = [row for row in records.rows if row.kind == "start" and row.data.get("from_memory")]
    steps = ", ".join(f"{row.number('resumed_at_step') or 0:g}" for row in starts)
    return f"from memory (step {steps})" if steps else ""


STEP_PHASES_NOTE = "the step time, divided as the phases divide the time of all steady steps"


def _step_phases(steady: Sequence[MetricsRow]) -> dict[Phase, float]:
    """Return the seconds of a step by phase; they add up to the step time, which medians of phases would not."""
    parts = {phase: seconds for phase, seconds in phases_of(steady).items() if phase != "evaluation"}
    total = sum(parts.values())
    step_s = typical(steady, "wall_s") or 0.0
    return {phase: step_s * seconds / total if total else 0.0 for phase, seconds in parts.items()}


def throughput(records: Records) -> Quantity:
    """Return the samples (or tokens) per second of the steady steps."""
    steady = steady_steps(records)
    unit = records.header.recipe.unit
    count, seconds = typical(steady, unit), typical(steady, "wall_s")
    if not count or not seconds:
        return Quantity(unit=f"{unit}/s")
    return seen(count / seconds, f"{unit}/s", f"from the step time: {steady_note(records)}")


NOTE = "median of the steady steps, rank 0"


def communication(records: Records) -> tuple[CommunicationReport, ...]:
    """Return the communication channels, by axes and content, those with the most bytes first.

    Each number is a median over the steady steps that were timed. Empty if the run recorded no communication.
    """
    rows = [row for row in steady_steps(records) if row.data.get("timed", True)]
    channels: dict[tuple[str, TrafficKind], list[dict[str, Any]]] = {}
    for row in rows:
        for entry in _objects(row.data.get("communication")):
            carried = next((word for word in get_args(TrafficKind) if word == entry.get("carried")), None)
            if carried is not None:
                channels.setdefault((str(entry.get("axes", "")), carried), []).append(entry)
    reports = [_channel_report(axes, carried, entries, len(rows)) for (axes, carried), entries in channels.items()]
    return tuple(sorted(reports, key=lambda channel: (-(channel.sent.value or 0), channel.axes, channel.carried)))


def _channel_report(axes: str, carried: TrafficKind, entries: list[dict[str, Any]], steps: int) -> CommunicationReport:
    """Summarise one channel; it exchanged nothing in the steps that do not mention it."""

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
        in_progress=seen(in_progress, "s", f"{NOTE}; until the end of each exchange was noticed"),
        exposed=seen(exposed, "s", NOTE),
        exposed_in={
            phase: seen(typical(wait.get(phase) for wait in waits), "s", NOTE)
            for phase in PHASES
            if any(wait.get(phase) for wait in waits)
        },
        hidden=seen(hidden, "ratio", "fraction of the time in progress"),
    )


def sent_per_step(records: Records) -> Quantity:
    """Return the bytes per step of the rank that sends the most: gradients, sharded parameters and activations.

    They are counted like `Prediction.sent_nbytes_per_rank`.
    """
    rank_0 = _typical_sent(steady_steps(records))
    others = [_typical_sent(_rows_of_steps(rows, steady_steps(records))) for rows in records.rank_rows.values()]
    known = [value for value in (rank_0, *others) if value is not None]
    note = "gradients, sharded parameters and activations; median of the steady steps, rank that sends the most"
    return seen(max(known, default=None), "B", note)


def _typical_sent(rows: Iterable[MetricsRow]) -> float | None:
    """Return the median of the bytes sent per step; None if no row has them."""
    values = [
        sent + (row.number("exchanged_nbytes") or 0) for row in rows if (sent := row.number("sent_nbytes")) is not None
    ]
    return median(values) if values else None


def _rows_of_steps(rows: tuple[MetricsRow, ...], steady: tuple[MetricsRow, ...]) -> list[MetricsRow]:
    """Return those of a rank's rows that belong to the given steps."""
    steps = {row.step for row in steady}
    return [row for row in rows if row.kind == "step" and row.step in steps]


def experts(records: Records) -> tuple[ExpertsReport, ...]:
    """Summarise every mixture of experts, in model order; empty for a model without one."""
    rows = [row for row in records.kept("step") if _object(row.data.get("experts"))]
    names = dict.fromkeys(name for row in rows for name in _object(row.data.get("experts")))
    return tuple(_mixture(name, [_object(_object(row.data["experts"]).get(name)) for row in rows]) for name in names)


def _mixture(name: str, entries: list[dict[str, Any]]) -> ExpertsReport:
    """Summarise one mixture of experts from its entries in the step rows."""
    assigned = sum(finite(entry.get("assigned")) or 0 for entry in entries)
    dropped = sum(finite(entry.get("dropped")) or 0 for entry in entries)
    losses = [value for entry in entries if (value := finite(entry.get("balance_loss"))) is not None]
    return ExpertsReport(
        name=name,
        assigned=seen(assigned, "", "choices of tokens over the run, all ranks"),
        dropped=seen(dropped, "", "choices dropped because the expert was full, over the run, all ranks"),
        share=seen(dropped / assigned if assigned else None, "ratio", "dropped choices divided by all choices"),
        balance_loss=seen(median(losses[-100:]) if losses else None, "", "median of the last 100 steps; 1 if balanced"),
    )


def exposed_phases(reports: Iterable[CommunicationReport]) -> list[Phase]:
    """Return the phases in which a rank waited for communication."""
    waited = {phase for channel in reports for phase, quantity in channel.exposed_in.items() if quantity.value}
    return [phase for phase in PHASES if phase in waited]


def _objects(value: object) -> list[dict[str, Any]]:
    """Return the objects in a JSON list; empty for anything else."""
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def _object(value: object) -> dict[str, Any]:
    """Return a JSON object; empty for anything else."""
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


DISAGREEMENT_NOTE = "distance of a replica from the mean of all replicas, relative to the mean's norm"


def replicas_report(records: Records) -> dict[str, Quantity]:
    """Return how far replicas diverged, by quantity name; empty for a run whose replicas were equal."""
    steps = records.kept("step")
    evaluations = records.kept("evaluate")  # some modes can measure only here, where all ranks synchronise
    rows = [entry for row in [*steps, *evaluations] if isinstance(entry := row.data.get("replicas"), dict)]
    if not rows:
        return {}
    measured = [disagreement for row in rows if isinstance(disagreement := row.get("disagreement"), dict)]
    means = [value for disagreement in measured if (value := finite(disagreement.get("mean"))) is not None]
    largest = [value for disagreement in measured if (value := finite(disagreement.get("max"))) is not None]
    stale = [value for row in rows if (value := finite(row.get("staleness"))) is not None]
    sent = [value for row in steps if (value := row.number("sent_nbytes")) is not None]
    times = f"{DISAGREEMENT_NOTE}; measured {len(measured)} times"
    return {
        "disagreement": seen(mean(means) if means else None, "ratio", f"{times}, mean"),
        "largest disagreement": seen(max(largest, default=None), "ratio", f"{times}, farthest replica"),
        "staleness": seen(
            max(stale, default=None), "steps", "most updates of a replica since it last received the others' values"
        ),
        "bytes sent": seen(
            mean(sent) if sent else None, "B", "mean over all steps of rank 0, because not every step sends"
        ),
    }


def mode_text(records: Records) -> str:
    """Describe the plan's consistency mode; empty where replicas are equal."""
    plan = records.plan
    return "" if plan is None or plan.sync.mode == "synchronous" else f"replicas {format_relaxation(plan.sync)}"

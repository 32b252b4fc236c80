"""What ranks exchanged, and how much of it was hidden behind compute; tokens that found no expert with room."""

from collections.abc import Iterable
from statistics import median
from typing import Any, cast, get_args

from tutti.config.prediction import Phase
from tutti.config.quantity import Quantity
from tutti.config.report_measured import CommunicationReport, ExpertsReport
from tutti.config.words import Carried
from tutti.report.read import Records, Row, finite
from tutti.report.timing import PHASES, seen, steady_steps

NOTE = "median of the steady steps, rank 0"


def communication(records: Records) -> tuple[CommunicationReport, ...]:
    """By axes and by what is carried, the most bytes first; empty where the run recorded none.

    Medians of each number over the steady steps that timed it.
    """
    rows = [row for row in steady_steps(records) if row.data.get("timed", True)]
    found: dict[tuple[str, Carried], list[dict[str, Any]]] = {}
    for row in rows:
        for entry in _objects(row.data.get("communication")):
            carried = next((word for word in get_args(Carried) if word == entry.get("carried")), None)
            if carried is not None:
                found.setdefault((str(entry.get("axes", "")), carried), []).append(entry)
    reports = [_one(axes, carried, entries, len(rows)) for (axes, carried), entries in found.items()]
    return tuple(sorted(reports, key=lambda one: (-(one.sent.value or 0), one.axes, one.carried)))


def _one(axes: str, carried: Carried, entries: list[dict[str, Any]], steps: int) -> CommunicationReport:
    """One lane; in steps that do not mention it nothing was exchanged."""

    def typical(values: Iterable[float | None]) -> float:
        known = [value or 0.0 for value in values]
        return median(known + [0.0] * (steps - len(known)))

    waits = [{phase: finite(s) or 0.0 for phase, s in _object(entry.get("exposed_s")).items()} for entry in entries]
    exposed = typical(sum(wait.values()) for wait in waits)
    timed = all(finite(entry.get("under_way_s")) is not None for entry in entries)
    under_way = typical(finite(entry.get("under_way_s")) for entry in entries) if timed else None
    hidden = None if not under_way else round(max(0.0, 1 - exposed / under_way), 3)
    return CommunicationReport(
        axes=axes,
        carried=carried,
        exchanges=seen(typical(finite(entry.get("count")) for entry in entries), "", NOTE),
        sent=seen(typical(finite(entry.get("nbytes")) for entry in entries), "B", NOTE),
        under_way=seen(under_way, "s", f"{NOTE}; until their end was noticed"),
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


def _typical_sent(rows: Iterable[Row]) -> float | None:
    values = [
        sent + (row.number("exchanged_nbytes") or 0) for row in rows if (sent := row.number("sent_nbytes")) is not None
    ]
    return median(values) if values else None


def _like(rows: tuple[Row, ...], steady: tuple[Row, ...]) -> list[Row]:
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

"""What the user stated about a run, beside what the run itself shows: data, tuning, end and baseline."""

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path, PurePath
from typing import Any, get_args

from tutti.config import serialization
from tutti.config.run_folder import LIKE_RANDOM, DataOrigin, RunFolder, RunHeader
from tutti.config.run_report import BaselineReport, DataReport, Quantity, Scaling, StopReport, TuningReport
from tutti.config.vocabulary import StartState, StopRule
from tutti.errors import SpecError
from tutti.reporting.measurements import seen
from tutti.reporting.quality_metrics import cost
from tutti.reporting.run_identity import tuned_sha256
from tutti.reporting.run_records import MetricsRow, Records, read_lines, stitch

_MOST_NEIGHBOURS = 1000


def stated(extra: Mapping[str, str], key: str, unit: str = "") -> Quantity:
    """Return a number that the user stated in the header's `extra`; empty if there is none.

    Its evidence is "assumed", because it was not measured here.
    """
    try:
        value = float(extra[key])
    except (KeyError, ValueError):
        return Quantity(unit=unit)
    return Quantity(value=value, unit=unit, evidence="assumed", note="stated by the user")


# Data


def data_report(records: Records, evaluation: str) -> DataReport:
    """Describe the training data, and the data of the evaluation by which the run is judged."""
    header, extra = records.header, records.header.extra
    rows = [row for row in records.kept("evaluate") if str(row.data.get("name", "")) == evaluation]
    recorded = rows[-1].data.get("data") if rows else None
    test: dict[str, Any] = recorded if isinstance(recorded, dict) else {}
    origin = _origin(records)
    state = next((known for known in get_args(StartState) if known == extra.get("data.start_state")), None)
    timed = extra.get("preprocess.timed")
    shape = _input_shape(records)
    native = "×".join(map(str, origin.native_shape)) if origin.native_shape is not None else None
    test_origin = test.get("origin")
    majority = test_origin.get("majority") if isinstance(test_origin, dict) else None
    return DataReport(
        name=header.data.name,
        kind=header.data.kind,
        train_samples=seen(header.data.samples, "samples"),
        train_sha256=header.data.sha256 or None,
        hash_covers=header.data.hash_covers,
        test_name=str(test["name"]) if test.get("name") else None,
        test_sha256=str(test["sha256"]) if test.get("sha256") else None,
        train_test_overlap=seen(rows[-1].number("overlap_with_training") if rows else None, "samples"),
        trained_on=_trained_on(rows),
        start_state=state or origin.start_state,
        found_state=origin.start_state,
        state_reason=origin.state_reason,
        bytes_read=stated(extra, "data.bytes_read", "B"),
        preprocess_timed=None if timed is None else timed.lower() == "true",
        input_shape=shape,
        native_shape=extra.get("data.native_shape") or native,
        found_shape=native,
        shape_reason=origin.native_reason,
        distinct=seen(origin.distinct, "ratio"),
        chosen_from=seen(_left_for_training(records, origin.chosen_from), "samples"),
        same_as=_evaluations_of(records, test.get("sha256")) if evaluation else (),
        majority=seen(majority if isinstance(majority, float) else None, "ratio", "share of the most frequent label"),
    )


def _left_for_training(records: Records, whole: int | None) -> int | None:
    """Return the size of the data set that the training data was chosen from, without what is evaluated of it."""
    if whole is None:
        return None
    parts = {str(row.data.get("name")): row.data["data"] for row in records.kept("evaluate") if "data" in row.data}
    evaluated = [part for part in parts.values() if (part.get("origin") or {}).get("chosen_from") == whole]
    return whole - sum({part.get("sha256"): int(part.get("samples") or 0) for part in evaluated}.values())


def _evaluations_of(records: Records, digest: Any) -> tuple[str, ...]:
    """Return the names of the evaluations of one data set."""
    rows = records.kept("evaluate")
    names = [
        str(row.data.get("name")) for row in rows if digest and (row.data.get("data") or {}).get("sha256") == digest
    ]
    return tuple(dict.fromkeys(names))


def _trained_on(rows: list[MetricsRow]) -> Quantity:
    """Return how many samples of the evaluated data steps were seen to train on, before the last evaluation."""
    counts = [row.number("trained_on") for row in rows]
    most = max((count for count in counts if count is not None), default=None)
    looked_at = rows[-1].number("trained_looked_at") if rows else None
    return seen(most, "samples", f"of {looked_at or 0:.0f} samples that steps were given, one of a step")


def _input_shape(records: Records) -> str | None:
    """Return the shapes of what a sample holds, the input as the model got it, joined by " and "."""
    shapes = [tuple(shape) for shape in records.header.data.input_shapes]
    given = _given_shape(records)
    if given is not None:
        largest = max(range(len(shapes)), key=lambda at: prod(shapes[at]), default=None)
        shapes = [given] if largest is None else [given if at == largest else s for at, s in enumerate(shapes)]
    return " and ".join("×".join(map(str, shape)) or "scalar" for shape in shapes) or None


def _given_shape(records: Records) -> tuple[int, ...] | None:
    """Return the shape of an input in the first batch that the script trained on; None where it was not recorded."""
    rows = records.spent("inputs")
    shape = rows[0].data.get("shape") if rows else None
    return tuple(int(size) for size in shape) if isinstance(shape, list) else None


def _origin(records: Records) -> DataOrigin:
    """Return where the data comes from, by its samples and by the first batch that the script trained on."""
    origin, rows = records.header.data.origin, records.spent("inputs")
    if origin.start_state is None and records.header.data.kind == "TensorDataset":
        origin = replace(origin, start_state="ram", state_reason="a TensorDataset holds its samples in memory")
    if not rows:
        return origin
    first = rows[0].data
    if first.get("random") and origin.start_state != "generated":
        reason = f"the inputs of the first batch {LIKE_RANDOM} {first['random']}"
        origin = replace(origin, start_state="generated", state_reason=reason)
    given, native = _given_shape(records), first.get("native_shape")
    if given is None or not isinstance(native, list):
        return origin
    before = tuple(int(size) for size in native)
    samples = max(records.header.data.input_shapes, key=prod, default=given)
    if origin.ragged:
        reason = str(first.get("native_reason") or "")
        return replace(origin, native_shape=before if reason else given, native_reason=reason)
    if len(samples) == len(given) >= 2 and 2 * prod(samples) <= prod(before):
        own = origin.native_shape if origin.native_shape is not None and origin.native_reason else samples
        reason = "the script enlarged them after they were read"
        return replace(origin, native_shape=tuple(own), native_reason=reason)
    if first.get("native_reason") and not origin.native_reason:
        return replace(origin, native_shape=before, native_reason=str(first["native_reason"]))
    return origin


# End


def stop_report(records: Records, *, ended_well: bool) -> StopReport:
    """Return what ended the run: the rule that the user stated, else what the script's loop shows."""
    extra, steps = records.header.extra, records.kept("step")
    ends = records.kept("epoch")
    asked = [row for row in records.spent("epochs") if row.number("planned") is not None]
    planned = asked[-1].number("planned") if asked else None
    partial = any(row.data.get("partial") for row in ends) or _inside_epoch(records, steps)
    epochs = len({row.data.get("epoch") for row in ends})
    early = ended_well and (partial or (planned is not None and epochs < planned))
    last = steps[-1].step if steps else 0
    stop = next((row.data for row in records.kept("stop") if row.step == last), {})
    report = StopReport(
        planned_epochs=seen(planned, "epochs", "asked for by the script"),
        left_early=early,
        early_reason=str(stop.get("reason", "")),
        watched=str(stop["watched"]) if stop.get("watched") else None,
        clock=extra.get("clock_exit"),
    )
    rule = next((rule for rule in get_args(StopRule) if rule == extra.get("stop.rule")), None)
    if rule is not None:
        return replace(report, rule=rule, value=stated(extra, "stop.value"))
    if report.watched is not None:
        return replace(report, rule="plateau")
    if not ended_well or not steps or early:
        return report
    if epochs:
        return replace(report, rule="epochs", value=seen(epochs, "epochs"))
    whole = _whole_epochs(records, steps)
    if whole:
        return replace(report, rule="epochs", value=seen(whole, "epochs"))
    return report


def _inside_epoch(records: Records, steps: tuple[MetricsRow, ...]) -> bool:
    """Return whether training ended within an epoch, in a script that does not use job.epochs."""
    if records.kept("epoch") or not steps or not records.header.data.samples:
        return False
    return _whole_epochs(records, steps) is None


def _whole_epochs(records: Records, steps: tuple[MetricsRow, ...]) -> int | None:
    """Return the number of epochs if the samples trained on are that many times the data; a short batch may drop."""
    size, total = records.header.data.samples, steps[-1].number("samples_seen")
    if not size or not total:
        return None
    batch = records.header.recipe.global_batch_size if records.header.recipe.unit == "samples" else 1
    used = size - size % batch if records.header.recipe.last_batch == "drop" and size >= batch else size
    return round(total / used) if total >= used and total % used == 0 else None


def scaling(text: str | None) -> Scaling | None:
    """Parse the kind of scaling that the user stated; None for anything else."""
    return "strong" if text == "strong" else "weak" if text == "weak" else None


# Tuning and baseline


def tuning_report(records: Records, folder: Path) -> TuningReport:
    """Return what the user stated about tuning, and the other settings that runs beside this one tried."""
    extra = records.header.extra
    costs, seeds = _runs_beside(records, folder)
    note = "runs of this script on this data with other settings, in the folder of this run"
    return TuningReport(
        trials=stated(extra, "tuning.trials"),
        device_seconds=stated(extra, "tuning.device_seconds", "device s"),
        space=extra.get("tuning.space"),
        search_log_sha256=extra.get("tuning.search_log_sha256"),
        found_trials=seen(len(costs), "", note),
        found_seeds=seen(len(seeds), "", "runs with the settings of this one and other seeds, in its folder"),
        found_device_seconds=seen(sum(costs.values()), "device s", note),
    )


def _runs_beside(records: Records, folder: Path) -> tuple[dict[str, float], set[tuple[object, ...]]]:
    """Return what runs that lie beside this one tried of its script on its data.

    Returns:
        (device-seconds spent on each other setting, by digest; other seeds with the same settings).
    """
    header = records.header
    own = tuned_sha256(header)
    costs: dict[str, float] = {}
    seeds: set[tuple[object, ...]] = set()
    for path in sorted(folder.resolve().parent.glob("*/run.json"))[:_MOST_NEIGHBOURS]:
        try:
            other = serialization.load(RunHeader, path)
        except SpecError:
            continue
        if _continues(header.resumed_from, path.parent) or _continues(other.resumed_from, folder):
            continue
        same = PurePath(other.script).name == PurePath(header.script).name and other.data.sha256 == header.data.sha256
        digest = tuned_sha256(other)
        if not same or not header.data.sha256:
            continue
        if digest == own:
            seeds.add((other.recipe.seed, other.arguments))
            continue
        rows = stitch(read_lines(RunFolder(path.parent).metrics, []))
        if any(row.kind == "step" for row in rows):
            spent = cost(replace(records, header=other), rows[-1].time_s).value or 0.0
            costs[digest] = costs.get(digest, 0.0) + spent
    return costs, seeds - {(header.recipe.seed, header.arguments)}


def _continues(resumed_from: str | None, folder: Path) -> bool:
    """Return whether a run was resumed from a checkpoint in this folder: it is the same training."""
    return resumed_from is not None and folder.resolve() in (Path(resumed_from), *Path(resumed_from).resolve().parents)


def baseline_report(extra: Mapping[str, str]) -> BaselineReport:
    """Return what the user stated about the baseline."""
    source = extra.get("baseline.source")
    return BaselineReport(
        source="measured-here" if source == "measured-here" else "published" if source == "published" else None,
        system=extra.get("baseline.system"),
        device=extra.get("baseline.device"),
        tuned_by=extra.get("baseline.tuned_by"),
    )

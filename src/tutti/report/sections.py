"""The sections of a report that come from the specs in the run folder: system, data, recipe, work, predictions."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any

from tutti.config import codec
from tutti.config.cluster import DeviceSpec
from tutti.config.quantity import Quantity
from tutti.config.report import RunReport, Verification
from tutti.config.report_measured import FlopsReport, PredictionCheck, RankReport, TargetReport
from tutti.config.report_setting import (
    BaselineReport,
    BatchReport,
    DataReport,
    LinkReport,
    RecipeReport,
    StartState,
    SystemReport,
    TuningReport,
)
from tutti.report.read import Records, Row
from tutti.report.replicas import mode_text
from tutti.report.timing import phases_of, quantities, seen, steady_steps, typical
from tutti.report.words import plural

DTYPES = {"tf32": "tf32", "bfloat16": "bfloat16", "float16": "float16"}
_START_STATES: tuple[StartState, ...] = ("disk-cold", "disk-warm", "ram", "generated")


def stated(extra: Mapping[str, str], key: str, unit: str = "") -> Quantity:
    """A number the user stated for the run (header's `extra`): assumed, for nobody measured it here."""
    try:
        value = float(extra[key])
    except (KeyError, ValueError):
        return Quantity(unit=unit)
    return Quantity(value=value, unit=unit, evidence="assumed", note="stated by the user")


def device_of(records: Records) -> DeviceSpec | None:
    """The cluster's only device of the kind the run used, if there is exactly one."""
    if records.cluster is None:
        return None
    kind = device_kind(records)
    found = [device for device in records.cluster.devices.values() if device.kind == kind]
    return found[0] if len(found) == 1 else None


def device_kind(records: Records) -> str:
    """ "cuda" when a rank ran on a GPU, else "cpu"."""
    return "cuda" if any(rank.device.startswith("cuda") for rank in records.header.ranks) else "cpu"


def system_report(records: Records) -> SystemReport:
    """The machines, from the header's ranks and, where there is one, the cluster file."""
    header, cluster, device = records.header, records.cluster, device_of(records)
    hosts = len({rank.host for rank in header.ranks}) or 1
    kind = device_kind(records)
    granted = cluster.conditions.cores_granted if cluster and cluster.conditions else None
    cores = header.extra.get("cores", "")
    per_host = int(cores) if cores.isdigit() else granted
    models = dict.fromkeys(rank.device_model for rank in header.ranks)
    published = device.evidence if device else None
    return SystemReport(
        device_model=" + ".join(models) or "unknown",
        device_kind=kind,
        ranks=seen(header.world_size, "ranks"),
        hosts=seen(hosts, "hosts"),
        devices=seen(hosts if kind == "cpu" else header.world_size, "devices"),
        cores_used=seen(sum(rank.threads for rank in header.ranks) or None, "cores", "threads of all ranks"),
        cores_granted=seen(per_host * hosts if per_host else None, "cores", "of all hosts"),
        year=Quantity(value=device.year, evidence="published") if device and device.year else Quantity(),
        peak_dense_flops={
            dtype: Quantity(value=value, unit="FLOP/s", evidence=published, note=device.source)
            for dtype, value in (device.peak_flops_per_s.items() if device else ())
        }
        if device
        else {},
        links=tuple(
            LinkReport(
                tier=" ".join(filter(None, (link.tier, link.fitted_to.replace("_", "-")))),
                latency=Quantity(value=link.latency_s, unit="s", evidence=link.evidence, note=link.source),
                bandwidth=Quantity(
                    value=link.bandwidth_bytes_per_s, unit="B/s", evidence=link.evidence, note=link.source
                ),
            )
            for link in (cluster.links if cluster else ())
        ),
        backend=header.backend,
        sums=" + ".join(dict.fromkeys(rank.sums for rank in header.ranks if rank.sums)),
        platform=header.platform,
        versions=dict(header.versions),
    )


def data_report(records: Records, evaluation: str) -> DataReport:
    """The data trained on, and those of the evaluation the run is judged by."""
    header = records.header
    rows = [row for row in records.kept("evaluate") if str(row.data.get("name", "")) == evaluation]
    found = rows[-1].data.get("data") if rows else None
    test: dict[str, Any] = found if isinstance(found, dict) else {}
    state = header.extra.get("data.start_state", "ram" if header.data.kind == "TensorDataset" else "")
    timed = header.extra.get("preprocess.timed")
    shapes = " and ".join("×".join(map(str, shape)) or "scalar" for shape in header.data.input_shapes)
    return DataReport(
        name=header.data.name,
        kind=header.data.kind,
        train_samples=seen(header.data.samples, "samples"),
        train_sha256=header.data.sha256 or None,
        hash_covers=header.data.hash_covers,
        test_name=str(test["name"]) if test.get("name") else None,
        test_sha256=str(test["sha256"]) if test.get("sha256") else None,
        train_test_overlap=seen(rows[-1].number("overlap_with_training") if rows else None, "samples"),
        start_state=next((known for known in _START_STATES if known == state), None),
        bytes_read=stated(header.extra, "data.bytes_read", "B"),
        preprocess_timed=None if timed is None else timed.lower() == "true",
        input_shape=shapes or None,
        native_shape=header.extra.get("data.native_shape"),
    )


def batch_report(records: Records) -> BatchReport:
    """The batch of a step, of a rank, and of a rank's microbatch (mean over ranks where shares are unequal)."""
    header, recipe, plan = records.header, records.header.recipe, records.plan
    parts = plan.data_parallel_degree if plan else header.world_size
    local = recipe.global_batch_size / parts
    shares = ":".join(f"{share:g}" for share in plan.shares) if plan and plan.shares else ""
    note = f"mean over ranks; shares {shares}" if shares else "mean over ranks"
    steps = [f"{size} before batch {until}" for until, size in recipe.batch_ramp]
    grown = f"at the end; {', '.join(steps)}" if steps else ""
    return BatchReport(
        global_size=seen(recipe.global_batch_size, recipe.unit, grown),
        local_size=seen(local, recipe.unit, note),
        micro_size=seen(local / recipe.num_microbatches, recipe.unit, note),
        num_microbatches=seen(recipe.num_microbatches),
        unit=recipe.unit,
    )


def recipe_report(records: Records) -> RecipeReport:
    """How the optimizer was driven; numbers are settings as the run recorded them."""
    recipe = records.header.recipe
    rule = recipe.learning_rate_rule
    return RecipeReport(
        optimizer=recipe.optimizer,
        lr=seen(recipe.learning_rate),
        lr_rule=", ".join(f"{key} {value}" for key, value in rule.items() if value is not None) if rule else None,
        scheduler=recipe.scheduler,
        clip_norm=seen(recipe.clip_norm),
        precision=recipe.precision,
        seed=seen(recipe.seed),
        last_batch=recipe.last_batch,
        compress=recipe.compress,
    )


def plan_text(records: Records) -> str | None:
    """The plan in one line: mesh, microbatches, precision, shares."""
    plan = records.plan
    if plan is None:
        return None
    mesh = " × ".join(f"{axis} {degree}" for axis, degree in plan.mesh.items())
    recompute = any(rule.recompute for rule in plan.layout)
    return ", ".join(
        [mesh, plural(plan.batch.num_microbatches, "microbatch") + " a step", f"{plan.precision} precision"]
        + (["recompute"] if recompute else [])
        + ([mode] if (mode := mode_text(records)) else [])
        + _buckets(records)
        + ([f"shares {':'.join(f'{s:g}' for s in plan.shares)}"] if plan.shares else [])
        + ([f"split shares {':'.join(f'{s:g}' for s in plan.split_weights)}"] if plan.split_weights else [])
    )


def _buckets(records: Records) -> list[str]:
    """The size of buckets that the run chose for itself, if it did."""
    rows = records.kept("buckets")
    if not rows:
        return []
    found = rows[-1].data
    tried = found.get("step_s")
    of = f"the quickest of {len(tried)} sizes" if isinstance(tried, dict) else "measured"
    return [f"buckets of {float(str(found.get('chosen_mib'))):g} MiB ({of})"]


def flops_report(records: Records, system: SystemReport, target: TargetReport) -> FlopsReport:
    """Work and its rate, where the model's FLOPs are known; the fraction of the peak where that is known too."""
    model = records.model
    per_sample = model.flops_forward + model.flops_backward if model else 0.0
    if model is None or not per_sample:
        return FlopsReport()
    dtype = DTYPES.get(records.header.recipe.precision, model.dtype)
    steady = steady_steps(records)
    samples, seconds = typical(steady, "samples"), typical(steady, "wall_s")
    rate = per_sample * samples / seconds if samples and seconds else None
    one = system.peak_dense_flops.get(dtype, Quantity())
    peak = one.value * (system.devices.value or 1) if one.value else None
    note = "counted FLOPs over the measured step time"
    return FlopsReport(
        model_per_sample=Quantity(value=per_sample, unit="FLOP", evidence=model.evidence),
        formula="forward and backward, module by module; a multiply-add is 2; recompute not counted",
        dtype=dtype,
        rate=seen(rate, "FLOP/s", note),
        peak=Quantity(value=peak, unit="FLOP/s", evidence=one.evidence, note=f"{dtype}, dense, all devices; {one.note}")
        if peak
        else Quantity(unit="FLOP/s"),
        peak_fraction=seen(
            rate / peak if rate and peak and rate <= 1.02 * peak else None,
            "ratio",
            f"{note}, over the dense {dtype} peak",
        ),
        to_target=seen(per_sample * target.samples.value if target.samples.value else None, "FLOP"),
    )


def tuning_report(extra: Mapping[str, str]) -> TuningReport:
    """What the user stated about tuning."""
    return TuningReport(
        trials=stated(extra, "tuning.trials"),
        device_seconds=stated(extra, "tuning.device_seconds", "device s"),
        space=extra.get("tuning.space"),
        search_log_sha256=extra.get("tuning.search_log_sha256"),
    )


def baseline_report(extra: Mapping[str, str]) -> BaselineReport:
    """What the user stated about the baseline."""
    source = extra.get("baseline.source")
    return BaselineReport(
        source="measured-here" if source == "measured-here" else "published" if source == "published" else None,
        system=extra.get("baseline.system"),
        tuned_by=extra.get("baseline.tuned_by"),
    )


def rank_reports(records: Records) -> tuple[RankReport, ...]:
    """Every rank: place, peak memory, time by phase."""
    reports = []
    for rank in records.header.ranks:
        rows = records.rank_rows.get(rank.rank, ())
        if rank.rank == 0 and not any(row.kind == "step" for row in rows):
            rows = records.rows
        peaks = [p for row in rows if row.kind == "memory" and (p := row.number("peak_nbytes")) is not None]
        peaks += [
            p
            for row in records.spent("memory")
            if row.data.get("rank") == rank.rank and (p := row.number("peak_nbytes")) is not None
        ]
        steps = [row for row in rows if row.kind == "step"]
        reports.append(
            RankReport(
                rank=rank.rank,
                host=rank.host,
                device=rank.device,
                device_model=rank.device_model,
                threads=seen(rank.threads),
                peak_memory=seen(max(peaks, default=None), "B"),
                breakdown=quantities(phases_of(steps)) if steps else {},
                stolen=seen(max(_stolen(records.rank_rows.get(rank.rank, ())), default=None), "ratio"),
            )
        )
    return tuple(reports)


def _stolen(rows: Iterable[Row]) -> list[float]:
    """What a rank said when it ended, every time it did."""
    return [share for row in rows if row.kind == "machine" and (share := row.number("stolen")) is not None]


def memory_peak(ranks: tuple[RankReport, ...]) -> Quantity:
    """Peak bytes of the fullest rank."""
    return seen(max((r.peak_memory.value for r in ranks if r.peak_memory.value is not None), default=None), "B")


def prediction_checks(records: Records, report: RunReport) -> tuple[PredictionCheck, ...]:
    """Predicted beside measured: step time, throughput, memory, bytes sent."""
    found = records.prediction
    if found is None:
        return ()
    step, memory = found.step_time_s, found.memory_nbytes
    pairs = (
        ("step time", predicted(step.value, "s", step.low, step.high), report.time.per_step),
        ("throughput", predicted(found.throughput_per_s, report.throughput.unit), report.throughput),
        ("peak memory of a rank", predicted(memory.value, "B", memory.low, memory.high), report.memory_peak),
        ("bytes sent by a rank in a step", predicted(found.sent_nbytes_per_rank, "B"), report.sent_per_step),
    )
    return tuple(prediction_check(name, guess, truth) for name, guess, truth in pairs)


def predicted(value: float, unit: str, low: float | None = None, high: float | None = None) -> Quantity:
    """A predicted number with its interval."""
    return Quantity(value=value, unit=unit, evidence="predicted", low=low, high=high)


def prediction_check(name: str, guess: Quantity, truth: Quantity) -> PredictionCheck:
    """One pair with its relative error; 0 predicted and 0 measured is no error."""
    error = within = None
    if guess.value is not None and truth.value is not None:
        if truth.value:
            error = (guess.value - truth.value) / truth.value
        elif not guess.value:
            error = 0.0
        if guess.low is not None and guess.high is not None:
            within = guess.low <= truth.value <= guess.high
    return PredictionCheck(
        name=name, predicted=guess, measured=truth, error=seen(error, "ratio", "(predicted - measured) / measured"),
        within=within,
    )  # fmt: skip


def verification(records: Records) -> Verification | None:
    """The verdict of verify.json, if there is one."""
    verdict = records.verdict
    if verdict is None:
        return None
    return Verification(
        passed=verdict.passed,
        sentence=verdict.sentence,
        largest=seen(verdict.largest.relative_difference if verdict.largest else None, note="of all tensors compared"),
        tolerance=Quantity(value=verdict.tolerance, evidence="assumed", note="relative to a tensor's root mean square"),
        steps=seen(verdict.steps, "steps"),
        arithmetic=verdict.arithmetic,
        cause=f"{verdict.cause.sentence} {verdict.cause.remedy}" if verdict.cause else None,
    )


def config_sha256(records: Records) -> str:
    """Digest of what determines the result except the seed; equal for one recipe on any number of ranks.

    The number of microbatches counts only for a model that normalises over the batch: elsewhere it changes nothing.
    """
    header, model = records.header, records.model
    recipe = codec.to_data(header.recipe)
    del recipe["seed"]
    if not (model and model.batch_statistics):
        del recipe["num_microbatches"]
    settings = {
        "script": PurePath(header.script).name,
        "arguments": _without_seed(header.arguments),
        "recipe": recipe,
        "model": header.model,
        "parameters": header.parameters,
        "data": header.data.sha256,
    }
    text = json.dumps(settings, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _without_seed(arguments: tuple[str, ...]) -> list[str]:
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if not skip and argument != "--seed" and not argument.startswith("--seed="):
            kept.append(argument)
        skip = argument == "--seed"
    return kept

"""Build the RunReport of a run folder. Only the folder is read, so the same folder gives the same report anywhere."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from tutti.config.cluster import DeviceSpec
from tutti.config.mesh_axes import describe_axis
from tutti.config.prediction import DEVICE_PARTS, Phase
from tutti.config.run_report import (
    BatchReport,
    FlopsReport,
    LinkReport,
    PredictionCheck,
    Quantity,
    RankFailure,
    RankReport,
    RecipeReport,
    RuleFinding,
    RunReport,
    Scope,
    Status,
    SystemReport,
    TargetReport,
    VerificationSummary,
)
from tutti.config.shard_engine import describe_engine
from tutti.config.stated_facts import check_facts
from tutti.reporting.formatting import duration, listed, plural, quality_text, show, significant
from tutti.reporting.honesty_rules import by_severity, check_run
from tutti.reporting.measurements import (
    PHASES,
    communication,
    experts,
    mode_text,
    phases_of,
    profiled_steps,
    quantities,
    replicas_report,
    seen,
    sent_per_step,
    steady_steps,
    throughput,
    time_report,
    typical,
    wall_s,
)
from tutti.reporting.quality_metrics import (
    QualityTarget,
    choose,
    cost,
    curves,
    noise_report,
    parse_target,
    quality_report,
    target_report,
)
from tutti.reporting.rule_outcomes import outcomes_of
from tutti.reporting.run_identity import config_sha256
from tutti.reporting.run_records import MetricsRow, Records, read_records
from tutti.reporting.statements import baseline_report, data_report, scaling, stop_report, tuning_report


def build_report(
    folder: Path, *, target: QualityTarget | None = None, facts: Mapping[str, object] | None = None
) -> RunReport:
    """Build the report of a run folder.

    Args:
        folder: the run folder.
        target: the quality to reach; None takes the one that the run states, if any.
        facts: what the user states about the run besides what the script stated in Job(facts=...).

    Raises:
        ReportError: `folder` is not a run folder, or the target names an evaluation that the run does not have.
        SpecError: a fact is not known, or has another form.
    """
    records = read_records(folder)
    extra = {**records.header.extra, **check_facts(facts or {}, "--fact")}
    records = replace(records, header=replace(records.header, extra=extra))
    if target is None and "quality.target" in extra:
        target = parse_target(extra["quality.target"])
    report = _assemble(records, folder, target)
    report = replace(report, checks=prediction_checks(records, report), headline=headline(report))
    report = replace(report, communication=communication(records), experts=experts(records))
    report = replace(report, noise=noise_report(records), replicas=replicas_report(records))
    notes = (*_guard_warnings(records), *_skipped_steps(records), *_profile_note(records), *_reading_notes(records))
    findings = by_severity([*check_run(report), *notes])
    return replace(report, findings=findings, outcomes=outcomes_of(report, findings))


def _assemble(records: Records, folder: Path, target: QualityTarget | None) -> RunReport:
    """Build the report without the parts that are derived from the rest of it: checks, headline and findings."""
    header, metric_curves = records.header, curves(records)
    judged = choose(metric_curves, target)
    quality, reached = quality_report(records, judged, target), target_report(records, judged, target)
    system, ranks = system_report(records), rank_reports(records)
    steps = records.kept("step")
    seen_samples = steps[-1].number("samples_seen") if steps else None
    return RunReport(
        name=header.name,
        script=header.script,
        command=header.command,
        started_utc=header.started_utc,
        model=header.model,
        parameters=seen(header.parameters),
        status=_status(records),
        scope=_scope(records, quality.reached),
        headline="",
        quality=quality,
        data=data_report(records, quality.name),
        time=time_report(records),
        throughput=throughput(records),
        steps=seen(steps[-1].step if steps else 0, "steps"),
        steps_on_same_batch=seen(sum(bool(row.data.get("same_batch")) for row in steps), "steps"),
        skipped_steps=seen(sum(bool(row.data.get("skipped")) for row in steps), "steps"),
        epochs=_epochs(records, seen_samples),
        samples_seen=seen(seen_samples, "samples"),
        device_seconds=cost(records, wall_s(records)),
        energy=energy(records),
        price=price(records, system),
        system=system,
        batch=batch_report(records),
        recipe=recipe_report(records),
        plan=plan_text(records),
        stop=stop_report(records, ended_well=_ended_well(records)),
        to_target=reached,
        scaling=scaling(header.extra.get("scaling")),
        flops=flops_report(records, system, reached),
        tuning=tuning_report(records, folder),
        baseline=baseline_report(header.extra),
        predicted_phases=_predicted_phases(records),
        predicted_memory=_predicted_memory(records),
        prediction_notes=records.prediction.notes if records.prediction else (),
        memory_peak=memory_peak(ranks),
        sent_per_step=sent_per_step(records),
        ranks=ranks,
        curves=metric_curves,
        verification=verification(records),
        failures=_failures(records),
        config_sha256=config_sha256(records),
        git_commit=header.git_commit,
        git_dirty=header.git_dirty,
        env_lock_sha256=header.environment_sha256 or None,
    )


_FEW_EVALUATED = 100
"""Evaluated samples below which the headline says how many they are."""


def headline(report: RunReport) -> str:
    """Summarise the run in one sentence: what was trained, on which machines, how long, and the final quality."""
    system, quality = report.system, report.quality
    where = plural(system.ranks.value or 1, "rank")
    if (system.hosts.value or 1) > 1:
        where += f" on {show(system.hosts)}"
    what = f"{report.model} ({show(report.parameters)} parameters) on {where} ({system.device_model})"
    if report.status == "failed":
        why = "".join(f": rank {f.rank} on {f.host}: {_first_line(f.message)}" for f in report.failures[:1])
        return f"Training {what} failed after {show(report.steps)}{why}."
    verb = {
        "completed": "Trained",
        "stopped": "Trained until stopped:",
        "unfinished": "Trained without finishing:",
    }
    ended = verb.get(report.status, "Trained")
    sentence = f"{ended} {what} for {_amount(report)} in {duration(report.time.wall.value or 0.0)}"
    if report.stop.early_reason:
        sentence += f", stopped early: {report.stop.early_reason}"
    if quality.test_value.value is None:
        return f"{sentence}; no quality was evaluated."
    split = "" if quality.split == quality.name else f" (on {quality.split} data)" if quality.split != "other" else ""
    count = quality.eval_samples.value
    few = f" of {plural(count, 'sample')}" if count is not None and count < _FEW_EVALUATED else ""
    return (
        f"{sentence}; {quality.name} {quality.metric} {quality_text(quality.test_value.value)}{few} at the end{split}."
    )


def _amount(report: RunReport) -> str:
    """Format the length of training: in epochs if they are whole, else in steps."""
    epochs, earlier = report.epochs.value, report.time.earlier_steps.value
    if earlier:
        steps = plural((report.steps.value or 0) - earlier, "step")
        return f"{steps} after the {significant(earlier)} of another run"
    whole = epochs is not None and epochs >= 1 and abs(epochs - round(epochs)) < 0.005
    return plural(round(epochs or 0), "epoch") if whole else show(report.steps)


def _first_line(text: str) -> str:
    """Return the first line of an error message, without its full stop."""
    return text.strip().splitlines()[0].rstrip(".") if text.strip() else "no message"


def _status(records: Records) -> Status:
    """Return how the run ended; "unfinished" if its last generation recorded no end."""
    ends = records.kept("end")
    if any(error.get("kind") != "peer" for error in records.errors) and not _ended_well(records):
        return "failed"
    if not ends or ends[-1].generation < max(row.generation for row in records.rows):
        return "unfinished"
    status = ends[-1].data.get("status")
    return "completed" if status == "completed" else "stopped" if status == "stopped" else "failed"


def _ended_well(records: Records) -> bool:
    """Return whether the last generation completed; any error file is then from an earlier generation."""
    ends = records.kept("end")
    last = max((row.generation for row in records.rows), default=0)
    return bool(ends) and ends[-1].generation == last and ends[-1].data.get("status") == "completed"


def _scope(records: Records, reached: bool | None) -> Scope:
    """Return the largest unit of training that the run completed.

    A run that ended by itself before it had seen its data once was no training, unless the number of steps after which
    it was to end is stated.
    """
    if reached:
        return "train"
    size, steps = records.header.data.samples, records.kept("step")
    samples = steps[-1].number("samples_seen") if steps else None
    once = size is None or samples is None or samples >= size - records.header.recipe.global_batch_size
    planned = records.header.extra.get("stop.rule") in ("steps", "epochs")
    if _ended_well(records) and (once or planned):
        return "train"
    return "epoch" if any(not row.data.get("partial") for row in records.kept("epoch")) else "step"


def _epochs(records: Records, samples: float | None) -> Quantity:
    """Return the number of epochs: from the samples where the size of the data is known, else from the epoch rows."""
    size = records.header.data.samples
    if samples is not None and size:
        return seen(samples / size, "epochs", "samples trained on divided by samples in the training data")
    return seen(len(records.kept("epoch")) or None, "epochs")


def _predicted_phases(records: Records) -> dict[Phase, Quantity]:
    """Return the predicted seconds of a step by phase."""
    phases = records.prediction.phases if records.prediction else {}
    return {phase: predicted(phases[phase], "s") for phase in PHASES if phase in phases}


def _predicted_memory(records: Records) -> dict[str, Quantity]:
    """Return the predicted peak memory of the fullest rank, by component, in bytes."""
    memory = records.prediction.memory if records.prediction else None
    return {name: predicted(getattr(memory, name), "B") for name in DEVICE_PARTS} if memory else {}


def _failures(records: Records) -> tuple[RankFailure, ...]:
    """Return what stopped the run, with causes before ranks that only lost their peers; empty if it ended well."""
    if _ended_well(records):
        return ()
    errors = sorted(records.errors, key=lambda error: (error.get("kind") == "peer", error.get("time_s", 0)))
    return tuple(
        RankFailure(
            rank=int(error.get("rank", 0)),
            host=str(error.get("host", "")),
            kind=str(error.get("kind", "exception")),
            message=str(error.get("message", "")),
        )
        for error in errors
    )


def _guard_warnings(records: Records) -> tuple[RuleFinding, ...]:
    """Return the warnings of the checks that ran while the model trained."""
    sentences = dict.fromkeys(str(row.data.get("sentence", "")) for row in records.spent("guard"))
    return tuple(
        RuleFinding(rule=0, code="GUARD", severity="warn", sentence=f"{text[:1].upper()}{text[1:]}.", where="training")
        for text in sentences
        if text
    )


_MOST_SKIPPED = 20
"""Skipped steps that a report names."""


def _skipped_steps(records: Records) -> tuple[RuleFinding, ...]:
    """Return a finding for each skipped step, each roll-back, and each change of the shares of the batch."""
    found = []
    for kind, code in (("skipped", "SKIPPED"), ("rolled_back", "ROLLED-BACK"), ("shares", "SHARES")):
        sentences = [*dict.fromkeys(str(row.data.get("sentence", "")) for row in records.spent(kind))]
        more = len(sentences) - _MOST_SKIPPED
        if more > 0:
            sentences = [*sentences[:_MOST_SKIPPED], f"{more} more are in metrics.jsonl, as rows of kind {kind!r}"]
        found += [
            RuleFinding(rule=0, code=code, severity="note", sentence=f"{text[:1].upper()}{text[1:]}.", where="training")
            for text in sentences
            if text
        ]
    return tuple(found)


def _profile_note(records: Records) -> tuple[RuleFinding, ...]:
    """Return a finding that says which times a profiler has slowed."""
    steps = profiled_steps(records)
    if not steps:
        return ()
    sentence = (
        f"{plural(steps, 'step')} ran slower because of the profiler: the step time and the throughput leave them out, "
        "totals and peak memory include them."
    )
    return (RuleFinding(rule=0, code="PROFILED", severity="note", sentence=sentence, where="time"),)


def _reading_notes(records: Records) -> tuple[RuleFinding, ...]:
    """Return a finding that lists the parts of the run folder that could not be read."""
    if not records.notes:
        return ()
    sentence = f"Parts of the run folder could not be read: {listed(list(records.notes))}."
    return (RuleFinding(rule=0, code="UNREADABLE-PART", severity="note", sentence=sentence, where="run folder"),)


DTYPES = {"tf32": "tf32", "bfloat16": "bfloat16", "float16": "float16"}


def device_of(records: Records) -> DeviceSpec | None:
    """Return the cluster's device of the kind that the run used; None unless there is exactly one."""
    if records.cluster is None:
        return None
    kind = device_kind(records)
    candidates = [device for device in records.cluster.devices.values() if device.kind == kind]
    return candidates[0] if len(candidates) == 1 else None


_BACKENDS = {"staged": "gloo, by way of the host's memory"}
"""What backends are called whose own names say little."""


def device_kind(records: Records) -> str:
    """Return "cpu", or the kind of the accelerator on which any rank ran, such as "cuda"."""
    kinds = (rank.device.partition(":")[0] for rank in records.header.ranks)
    return next((kind for kind in kinds if kind != "cpu"), "cpu")


def system_report(records: Records) -> SystemReport:
    """Describe the machines, from the header's ranks and the cluster file if there is one."""
    header, cluster, device = records.header, records.cluster, device_of(records)
    hosts = len({rank.host for rank in header.ranks}) or 1
    kind = device_kind(records)
    granted = cluster.conditions.cores_granted if cluster and cluster.conditions else None
    cores = header.extra.get("cores", "")
    per_host = int(cores) if cores.isdigit() else granted
    models = dict.fromkeys(rank.device_model for rank in header.ranks)
    published = device.evidence if device else None
    shared = header.extra.get("shared_devices", "")
    return SystemReport(
        device_model=" + ".join(models) or "unknown",
        device_kind=kind,
        ranks=seen(header.world_size, "ranks"),
        hosts=seen(hosts, "hosts"),
        devices=seen(int(shared) if shared else hosts if kind == "cpu" else header.world_size, "devices"),
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
        backend=_BACKENDS.get(header.backend, header.backend),
        sums=" + ".join(dict.fromkeys(rank.sums for rank in header.ranks if rank.sums)),
        attention=next(
            (str(row.data.get("engines", "")) for row in reversed(records.rows) if row.kind == "attention"), ""
        ),
        platform=header.platform,
        versions=dict(header.versions),
    )


def batch_report(records: Records) -> BatchReport:
    """Return the batch of a step, of a rank, and of a rank's microbatch (means over ranks where shares are unequal)."""
    header, recipe, plan = records.header, records.header.recipe, records.plan
    degree = plan.data_parallel_degree if plan else header.world_size
    local = recipe.global_batch_size / degree
    shares = ":".join(f"{share:g}" for share in plan.shares) if plan and plan.shares else ""
    note = f"mean over ranks; shares {shares}" if shares else "mean over ranks"
    note += "; shares changed" if any(row.kind == "shares" for row in records.rows) else ""
    steps = [f"{size} before batch {until}" for until, size in recipe.batch_ramp]
    grown = f"final size; {', '.join(steps)}" if steps else ""
    return BatchReport(
        global_size=seen(recipe.global_batch_size, recipe.unit, grown),
        local_size=seen(local, recipe.unit, note),
        micro_size=seen(local / recipe.num_microbatches, recipe.unit, note),
        num_microbatches=seen(recipe.num_microbatches),
        unit=recipe.unit,
    )


def recipe_report(records: Records) -> RecipeReport:
    """Describe the optimizer and its settings, as the run recorded them."""
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
    """Describe the plan in one line: mesh, microbatches, precision and shares."""
    plan = records.plan
    if plan is None:
        return None
    mesh = " × ".join(f"{describe_axis(axis)} {degree}" for axis, degree in plan.mesh.items())
    recompute = any(rule.recompute for rule in plan.layout)
    return ", ".join(
        [mesh, plural(plan.batch.num_microbatches, "microbatch") + " a step", f"{plan.precision} precision"]
        + ([f"sharding level {plan.sharding.level} by {engine}"] if (engine := describe_engine(plan)) else [])
        + (["recompute"] if recompute else [])
        + ([mode] if (mode := mode_text(records)) else [])
        + _buckets(records)
        + ([f"shares {':'.join(f'{s:g}' for s in plan.shares)}"] if plan.shares else [])
        + ([f"split shares {':'.join(f'{s:g}' for s in plan.split_weights)}"] if plan.split_weights else [])
    )


def _buckets(records: Records) -> list[str]:
    """Describe the bucket size that the run chose by measuring; empty if it did not choose one."""
    rows = records.kept("buckets")
    if not rows:
        return []
    choice = rows[-1].data
    tried = choice.get("step_s")
    of = f"the fastest of {len(tried)} sizes" if isinstance(tried, dict) else "measured"
    return [f"buckets of {float(str(choice.get('chosen_mib'))):g} MiB ({of})"]


def flops_report(records: Records, system: SystemReport, target: TargetReport) -> FlopsReport:
    """Return the FLOPs of the model, their rate, and the fraction of the peak, as far as each is known."""
    model = records.model
    per_sample = model.flops_forward + model.flops_backward if model else 0.0
    if model is None or not per_sample:
        return FlopsReport()
    dtype = DTYPES.get(records.header.recipe.precision, model.dtype)
    steady = steady_steps(records)
    samples, seconds = typical(steady, "samples"), typical(steady, "wall_s")
    rate = per_sample * samples / seconds if samples and seconds else None
    device_peak = system.peak_dense_flops.get(dtype, Quantity())
    peak = device_peak.value * (system.devices.value or 1) if device_peak.value else None
    note = "counted FLOPs divided by the measured step time"
    return FlopsReport(
        model_per_sample=Quantity(value=per_sample, unit="FLOP", evidence=model.evidence),
        formula="forward and backward, summed over modules; a multiply-add counts as 2; recompute is not counted",
        dtype=dtype,
        rate=seen(rate, "FLOP/s", note),
        peak=Quantity(
            value=peak,
            unit="FLOP/s",
            evidence=device_peak.evidence,
            note=f"{dtype}, dense, all devices; {device_peak.note}",
        )
        if peak
        else Quantity(unit="FLOP/s"),
        peak_fraction=seen(
            rate / peak if rate and peak and rate <= 1.02 * peak else None,
            "ratio",
            f"{note}, relative to the dense {dtype} peak",
        ),
        to_target=seen(per_sample * target.samples.value if target.samples.value else None, "FLOP"),
    )


def rank_reports(records: Records) -> tuple[RankReport, ...]:
    """Describe every rank: its host and device, peak memory and time by phase."""
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
        steps = [row for row in rows if row.kind == "step" and not row.data.get("profiled")]
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
                others=seen(_others(records, rank.host), "ratio"),
            )
        )
    return tuple(reports)


def _others(records: Records, host: str) -> float | None:
    """Return the fraction of a host's core time that other programs than its ranks used, in the last generation."""
    last = [
        next((row for row in reversed(records.rank_rows.get(rank.rank, ())) if row.kind == "machine"), None)
        for rank in records.header.ranks
        if rank.host == host
    ]
    shares = [(row.number("busy"), row.number("own")) for row in last if row is not None]
    if len(shares) < len(last) or any(busy is None or own is None for busy, own in shares):
        return None
    return max(0.0, max(busy or 0.0 for busy, _ in shares) - sum(own or 0.0 for _, own in shares))


def _stolen(rows: Iterable[MetricsRow]) -> list[float]:
    """Return the fractions of core time that went to other machines; a rank records one whenever it ends."""
    return [share for row in rows if row.kind == "machine" and (share := row.number("stolen")) is not None]


def energy(records: Records) -> Quantity:
    """Return the energy that all ranks' devices and hosts drew while the run lasted, over all its generations."""
    rows = [row for rank in records.rank_rows.values() for row in rank if row.kind == "machine"]
    measured = [joules for row in rows if (joules := row.number("energy_j")) is not None]
    what = "processors and memory of all hosts (RAPL), with all their processes"
    if device_kind(records) == "cuda":
        what += ", and the ranks' GPUs (NVML); what the system cannot measure is missing"
    return seen(sum(measured) if measured else None, "J", what)


def price(records: Records, system: SystemReport) -> Quantity:
    """Return devices multiplied by hours and by the price of the cluster file, in its currency."""
    device, devices = device_of(records), system.devices.value
    if device is None or device.price_per_device_hour is None or not devices:
        return Quantity()
    cost = devices * wall_s(records) / 3600 * device.price_per_device_hour
    note = f"{device.price_per_device_hour:g} a device and hour in the cluster file, in its currency"
    return Quantity(value=cost, evidence="assumed", note=f"measured time, {note}")


def memory_peak(ranks: tuple[RankReport, ...]) -> Quantity:
    """Return the peak memory of the fullest rank, in bytes."""
    return seen(max((r.peak_memory.value for r in ranks if r.peak_memory.value is not None), default=None), "B")


def prediction_checks(records: Records, report: RunReport) -> tuple[PredictionCheck, ...]:
    """Compare predicted with measured values: step time, throughput, peak memory and bytes sent."""
    prediction = records.prediction
    if prediction is None:
        return ()
    step, allocator = prediction.step_time_s, prediction.allocator
    memory = prediction.memory_nbytes if allocator is None else allocator.allocated  # what a run measures
    pairs = (
        ("step time", predicted(step.value, "s", step.low, step.high), report.time.per_step),
        ("throughput", predicted(prediction.throughput_per_s, report.throughput.unit), report.throughput),
        ("peak memory of a rank", predicted(memory.value, "B", memory.low, memory.high), report.memory_peak),
        ("bytes sent by a rank in a step", predicted(prediction.sent_nbytes_per_rank, "B"), report.sent_per_step),
    )
    return tuple(
        prediction_check(name, predicted_value, measured_value) for name, predicted_value, measured_value in pairs
    )


def predicted(value: float, unit: str, low: float | None = None, high: float | None = None) -> Quantity:
    """Return a predicted quantity, with its interval if it has one."""
    return Quantity(value=value, unit=unit, evidence="predicted", low=low, high=high)


def prediction_check(name: str, prediction: Quantity, measurement: Quantity) -> PredictionCheck:
    """Compare one predicted quantity with the measured one; two zeros count as no error.

    Args:
        name: what is predicted.
        prediction: the predicted quantity.
        measurement: the measured quantity.
    """
    error = within = None
    if prediction.value is not None and measurement.value is not None:
        if measurement.value:
            error = (prediction.value - measurement.value) / measurement.value
        elif not prediction.value:
            error = 0.0
        if prediction.low is not None and prediction.high is not None:
            within = prediction.low <= measurement.value <= prediction.high
    return PredictionCheck(
        name=name, predicted=prediction, measured=measurement,
        error=seen(error, "ratio", "(predicted - measured) / measured"), within=within,
    )  # fmt: skip


def verification(records: Records) -> VerificationSummary | None:
    """Summarise the verdict of verify.json; None if there is none."""
    verdict = records.verdict
    if verdict is None:
        return None
    return VerificationSummary(
        passed=verdict.passed,
        comparable=verdict.comparable,
        sentence=verdict.sentence,
        largest=seen(
            verdict.largest.relative_difference if verdict.largest else None, note="over all compared tensors"
        ),
        tolerance=Quantity(value=verdict.tolerance, evidence="assumed", note="relative to a tensor's root mean square"),
        steps=seen(verdict.steps, "steps"),
        arithmetic=verdict.arithmetic,
        cause=f"{verdict.cause.sentence} {verdict.cause.remedy}" if verdict.cause else None,
    )

"""From a run folder to its RunReport. Reads only the folder: the same folder gives the same report anywhere."""

from dataclasses import fields, replace
from pathlib import Path

from tutti.config.prediction import Phase
from tutti.config.quantity import Quantity
from tutti.config.report import Failure, Finding, RunReport, Scaling, Scope, Status
from tutti.config.report_setting import StopReport, StopRule
from tutti.config.run import RunFolder
from tutti.report.communication import communication, experts, sent_per_step
from tutti.report.noise import noise_report
from tutti.report.quality import Target, choose, cost, curves, quality_report, target_report
from tutti.report.read import Records, read_records
from tutti.report.replicas import replicas_report
from tutti.report.rules import check_run
from tutti.report.sections import (
    baseline_report,
    batch_report,
    config_sha256,
    data_report,
    flops_report,
    memory_peak,
    plan_text,
    predicted,
    prediction_checks,
    rank_reports,
    recipe_report,
    stated,
    system_report,
    tuning_report,
    verification,
)
from tutti.report.timing import PHASES, seen, throughput, time_report, wall_s
from tutti.report.words import duration, listed, plural, quality_text, show
from tutti.report.write import write_files

_STOP_RULES: tuple[StopRule, ...] = ("target", "epochs", "steps", "time")


def build_report(folder: Path, *, target: Target | None = None) -> RunReport:
    """The report of a run folder. Raises ReportError when it is no run folder, or the target names nothing in it."""
    records = read_records(folder)
    report = _assemble(records, target)
    report = replace(report, checks=prediction_checks(records, report), headline=headline(report))
    report = replace(report, communication=communication(records), experts=experts(records))
    report = replace(report, noise=noise_report(records), replicas=replicas_report(records))
    return replace(report, findings=check_run(report) + _reading_notes(records))


def _assemble(records: Records, target: Target | None) -> RunReport:
    """The report but for what follows from the rest of it: checks, headline, findings."""
    header, found = records.header, curves(records)
    judged = choose(found, target)
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
        skipped_steps=seen(sum(bool(row.data.get("skipped")) for row in steps), "steps"),
        epochs=_epochs(records, seen_samples),
        samples_seen=seen(seen_samples, "samples"),
        device_seconds=cost(records, wall_s(records)),
        system=system,
        batch=batch_report(records),
        recipe=recipe_report(records),
        plan=plan_text(records),
        stop=_stop(records),
        to_target=reached,
        scaling=_scaling(header.extra.get("scaling")),
        flops=flops_report(records, system, reached),
        tuning=tuning_report(header.extra),
        baseline=baseline_report(header.extra),
        predicted_phases=_predicted_phases(records),
        predicted_memory=_predicted_memory(records),
        prediction_notes=records.prediction.notes if records.prediction else (),
        memory_peak=memory_peak(ranks),
        sent_per_step=sent_per_step(records),
        ranks=ranks,
        curves=found,
        verification=verification(records),
        failures=_failures(records),
        config_sha256=config_sha256(records),
        git_commit=header.git_commit,
        git_dirty=header.git_dirty,
        env_lock_sha256=header.environment_sha256 or None,
    )


def headline(report: RunReport) -> str:
    """The run in one sentence: what was trained, on what, how long, and the quality at the end."""
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
        "stopped": "Training was stopped for",
        "unfinished": "Training began but did not end for",
    }
    ended = verb.get(report.status, "Trained")
    sentence = f"{ended} {what} for {_amount(report)} in {duration(report.time.wall.value or 0.0)}"
    if quality.test_value.value is None:
        return f"{sentence}; no quality was evaluated."
    split = "" if quality.split == quality.name else f" (on {quality.split} data)" if quality.split != "other" else ""
    return f"{sentence}; {quality.name} {quality.metric} {quality_text(quality.test_value.value)} at the end{split}."


def _amount(report: RunReport) -> str:
    epochs = report.epochs.value
    whole = epochs is not None and epochs >= 1 and abs(epochs - round(epochs)) < 0.005
    return plural(round(epochs or 0), "epoch") if whole else show(report.steps)


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0].rstrip(".") if text.strip() else "no message"


def _status(records: Records) -> Status:
    ends = records.kept("end")
    if any(error.get("kind") != "peer" for error in records.errors) and not _ended_well(records):
        return "failed"
    if not ends or ends[-1].generation < max(row.generation for row in records.rows):
        return "unfinished"
    status = ends[-1].data.get("status")
    return "completed" if status == "completed" else "stopped" if status == "stopped" else "failed"


def _ended_well(records: Records) -> bool:
    """Whether the last generation ended by itself: an error file is then an earlier generation's."""
    ends = records.kept("end")
    last = max((row.generation for row in records.rows), default=0)
    return bool(ends) and ends[-1].generation == last and ends[-1].data.get("status") == "completed"


def _scope(records: Records, reached: bool | None) -> Scope:
    if reached or _ended_well(records):
        return "train"
    return "epoch" if records.kept("epoch") else "step"


def _epochs(records: Records, samples: float | None) -> Quantity:
    size = records.header.data.samples
    if samples is not None and size:
        return seen(samples / size, "epochs", "samples trained on over samples of the training data")
    return seen(len(records.kept("epoch")) or None, "epochs")


def _stop(records: Records) -> StopReport:
    extra = records.header.extra
    rule = next((rule for rule in _STOP_RULES if rule == extra.get("stop.rule")), None)
    if rule is not None:
        return StopReport(rule=rule, value=stated(extra, "stop.value"))
    steps = records.kept("step")
    if not _ended_well(records) or not steps:
        return StopReport()
    epochs = len({row.data.get("epoch") for row in records.kept("epoch")})
    if epochs:
        return StopReport(rule="epochs", value=seen(epochs, "epochs"))
    return StopReport(rule="steps", value=seen(steps[-1].step, "steps"))


def _scaling(text: str | None) -> Scaling | None:
    return "strong" if text == "strong" else "weak" if text == "weak" else None


def _predicted_phases(records: Records) -> dict[Phase, Quantity]:
    phases = records.prediction.phases if records.prediction else {}
    return {phase: predicted(phases[phase], "s") for phase in PHASES if phase in phases}


def _predicted_memory(records: Records) -> dict[str, Quantity]:
    """Predicted bytes of the fullest rank by what holds them."""
    memory = records.prediction.memory if records.prediction else None
    return {f.name: predicted(getattr(memory, f.name), "B") for f in fields(memory)} if memory else {}


def _failures(records: Records) -> tuple[Failure, ...]:
    """What stopped the run, causes before the ranks that only lost their peers; none if it ended well after all."""
    if _ended_well(records):
        return ()
    errors = sorted(records.errors, key=lambda error: (error.get("kind") == "peer", error.get("time_s", 0)))
    return tuple(
        Failure(
            rank=int(error.get("rank", 0)),
            host=str(error.get("host", "")),
            kind=str(error.get("kind", "exception")),
            message=str(error.get("message", "")),
        )
        for error in errors
    )


def _reading_notes(records: Records) -> tuple[Finding, ...]:
    if not records.notes:
        return ()
    sentence = f"Parts of the run folder could not be read: {listed(list(records.notes))}."
    return (Finding(rule=0, code="UNREADABLE-PART", severity="note", sentence=sentence, where="run folder"),)


def write_report(folder: Path, *, target: Target | None = None, output: Path | None = None) -> RunReport:
    """Build the report and write report.json, report.html and report.txt into `output` (the folder's report/)."""
    report = build_report(folder, target=target)
    write_files(report, output or RunFolder(folder).report)
    return report

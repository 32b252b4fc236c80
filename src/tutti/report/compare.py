"""Several runs side by side: what differs, what each reached and cost, and a speed-up only where one may be stated."""

from collections.abc import Sequence

from tutti.config.comparison import Comparison, ComparisonRow, Difference
from tutti.config.report import Claim, Finding, RunReport
from tutti.errors import ReportError
from tutti.report.comparability import (
    check_comparison,
    judged_time,
    labels,
    resource_ratio,
    scaling_of,
    time_ratio,
)
from tutti.report.timing import seen
from tutti.report.words import listed, plural, show


def compare(reports: Sequence[RunReport]) -> Comparison:
    """Compare runs with the first one. Raises ReportError for fewer than two."""
    if len(reports) < 2:
        raise ReportError("a comparison needs two runs; name another run folder")
    findings = check_comparison(reports)
    rows = tuple(_row(i, reports, findings) for i in range(len(reports)))
    return Comparison(
        runs=tuple(reports),
        rows=rows,
        differences=differences(reports),
        scaling=scaling_of(reports),
        headline=_headline(reports, rows),
        findings=findings,
    )


def _refused(findings: Sequence[Finding], run: int, claim: Claim) -> Finding | None:
    """The finding that forbids a claim about a run: its own, one over the pair, or one about the reference."""
    return next((f for f in findings if claim in f.refuses and f.run in (run, 0, None)), None)


def _row(i: int, reports: Sequence[RunReport], findings: Sequence[Finding]) -> ComparisonRow:
    reference, report = reports[0], reports[i]
    ratio, share = time_ratio(reference, report), resource_ratio(reference, report)
    barrier = _refused(findings, i, "speedup") if i else None
    no_efficiency = barrier or _refused(findings, i, "efficiency")
    speedup = seen(
        1.0 if i == 0 else None if barrier else ratio, "x", "time of the reference over the time of this run"
    )
    efficiency = ratio / share if i and ratio and share and share != 1 and not no_efficiency else None
    to_target = report.quality.reached and judged_time(report, reports) is report.to_target.time
    return ComparisonRow(
        name=labels(reports)[i],
        quality=report.quality.test_value,
        time=judged_time(report, reports),
        throughput=report.throughput,
        device_seconds=report.to_target.device_seconds if to_target else report.device_seconds,
        speedup=speedup,
        efficiency=seen(efficiency, "ratio", "speed-up over the ratio of devices (of CPU runs: of cores)"),
        refusal=barrier.sentence if barrier else "",
    )


def differences(reports: Sequence[RunReport]) -> tuple[Difference, ...]:
    """The settings that are not the same in all runs."""
    settings = [_settings(report) for report in reports]
    return tuple(
        Difference(name=name, values=tuple(setting[name] for setting in settings))
        for name in settings[0]
        if len({setting[name] for setting in settings}) > 1
    )


def _settings(report: RunReport) -> dict[str, str]:
    """What defines a run, as text."""
    recipe, batch, system = report.recipe, report.batch, report.system
    return {
        "ranks": show(system.ranks),
        "hosts": show(system.hosts),
        "device": system.device_model,
        "cores used": show(system.cores_used),
        "gradients are summed through": system.sums or "nothing",
        "script": report.command,
        "model": f"{report.model}, {show(report.parameters)} parameters",
        "training data": (report.data.train_sha256 or "not recorded")[:12],
        "input shape": report.data.input_shape or "not recorded",
        "global batch": show(batch.global_size),
        "microbatches": show(batch.num_microbatches),
        "optimizer": recipe.optimizer,
        "learning rate": show(recipe.lr),
        "learning-rate rule": recipe.lr_rule or "none",
        "scheduler": recipe.scheduler or "none",
        "gradient clipping": show(recipe.clip_norm),
        "precision": recipe.precision,
        "sums of gradients": recipe.compress or "exact",
        "seed": show(recipe.seed),
        "epochs": show(report.epochs),
        "samples seen": show(report.samples_seen),
        "stopped by": report.stop.rule or "not recorded",
        "commit": (report.git_commit or "not recorded")[:12] + (" (changed)" if report.git_dirty else ""),
        "packages": (report.env_lock_sha256 or "not recorded")[:12],
    }


def _headline(reports: Sequence[RunReport], rows: Sequence[ComparisonRow]) -> str:
    """The comparison in one sentence."""
    stated = [
        f"{row.name} is {show(row.speedup)} as fast as {rows[0].name}"
        for row in rows[1:]
        if row.speedup.value is not None
    ]
    refused = sum(bool(row.refusal) for row in rows)
    text = f"{plural(len(reports), 'run')} compared with {rows[0].name}"
    if stated:
        text += f": {listed(stated)} to {'the target' if reports[0].to_target.time.value else 'equal quality'}"
    if refused:
        text += f"; {'no speed-up is stated' if not stated else plural(refused, 'speed-up') + ' refused'}"
        text += f" for {plural(refused, 'run')}, and the table says why" if not stated else ""
    return text + "."

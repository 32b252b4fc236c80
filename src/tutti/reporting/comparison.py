"""Compare several runs: their differences, quality, time and cost, with a speed-up only where the rules allow one."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import sqrt
from statistics import variance

from tutti.config.run_report import Claim, Quantity, RuleFinding, RunReport, Scaling, Severity
from tutti.config.several_runs import Comparison, ComparisonRow, SettingDifference
from tutti.errors import ReportError
from tutti.reporting.formatting import listed, plural, quality_text, show, significant
from tutti.reporting.honesty_rules import by_severity, check_run, eps_of
from tutti.reporting.measurements import seen
from tutti.reporting.rule_outcomes import outcomes_across


def compare(reports: Sequence[RunReport]) -> Comparison:
    """Compare runs with the first one, which is the reference.

    Raises:
        ReportError: fewer than two reports were given.
    """
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
        outcomes=outcomes_across(reports, findings),
    )


def _refused(findings: Sequence[RuleFinding], run: int, claim: Claim) -> RuleFinding | None:
    """Return the first finding that forbids a claim about a run; it may concern the run, the reference or all runs."""
    return next((f for f in findings if claim in f.refuses and f.run in (run, 0, None)), None)


def _row(i: int, reports: Sequence[RunReport], findings: Sequence[RuleFinding]) -> ComparisonRow:
    """Build the table row of one run."""
    reference, report = reports[0], reports[i]
    ratio, share = time_ratio(reference, report), resource_ratio(reference, report)
    barrier = _refused(findings, i, "speedup") if i else None
    no_efficiency = barrier or _refused(findings, i, "efficiency")
    speedup = seen(
        1.0 if i == 0 else None if barrier else ratio, "x", "time of the reference divided by the time of this run"
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
        efficiency=seen(
            efficiency, "ratio", "speed-up divided by the ratio of devices (of cores, if the runs used CPUs)"
        ),
        refusal=barrier.sentence if barrier else "",
    )


def differences(reports: Sequence[RunReport]) -> tuple[SettingDifference, ...]:
    """Return the settings that are not the same in all runs."""
    settings = [_settings(report) for report in reports]
    return tuple(
        SettingDifference(name=name, values=tuple(setting[name] for setting in settings))
        for name in settings[0]
        if len({setting[name] for setting in settings}) > 1
    )


def _settings(report: RunReport) -> dict[str, str]:
    """Return the settings that define a run, as text by name."""
    recipe, batch, system = report.recipe, report.batch, report.system
    return {
        "ranks": show(system.ranks),
        "hosts": show(system.hosts),
        "device": system.device_model,
        "cores used": show(system.cores_used),
        "gradients are reduced through": system.sums or "nothing",
        "attention over mesh.context": system.attention or "none",
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
        "gradient reductions": recipe.compress or "exact",
        "seed": show(recipe.seed),
        "epochs": show(report.epochs),
        "samples seen": show(report.samples_seen),
        "stopped by": report.stop.rule or "not recorded",
        "commit": (report.git_commit or "not recorded")[:12] + (" (changed)" if report.git_dirty else ""),
        "packages": (report.env_lock_sha256 or "not recorded")[:12],
    }


def _headline(reports: Sequence[RunReport], rows: Sequence[ComparisonRow]) -> str:
    """Summarise the comparison in one sentence."""
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


Reports = Sequence[RunReport]
Rule = Callable[[Reports], list[RuleFinding]]
_SPEED: tuple[Claim, ...] = ("speedup", "efficiency")


def labels(reports: Reports) -> list[str]:
    """Return a unique name for every run."""
    names = [report.name for report in reports]
    return [f"{name} ({i + 1})" if names.count(name) > 1 else name for i, name in enumerate(names)]


def _refuse(
    rule: int,
    code: str,
    sentence: str,
    where: str,
    run: int,
    severity: Severity = "refuse",
    claims: tuple[Claim, ...] = _SPEED,
) -> RuleFinding:
    """Build a finding about one run of the comparison; by default it refuses speed-up and efficiency."""
    return RuleFinding(
        rule=rule, code=code, severity=severity, sentence=sentence, where=where, run=run, refuses=claims
    )  # fmt: skip


def pooled_std(groups: Sequence[Sequence[float]]) -> float:
    """Return the standard deviation within groups of repeats, pooled over them; 0 where every group has one value."""
    freedom = sum(len(group) - 1 for group in groups)
    return sqrt(sum((len(g) - 1) * variance(g) for g in groups if len(g) > 1) / freedom) if freedom > 0 else 0.0


def tolerance(reports: Reports) -> float:
    """Return how far two qualities may differ and still count as equal: max(eps, 2 * pooled std over repeats).

    Repeats are at least three runs of one configuration on the same number of ranks. The tolerance is at most 4 * eps:
    a recipe whose repeats vary more cannot show equality, and a failed repeat must not widen the tolerance.
    """
    groups: dict[tuple[str, float | int | None], list[float]] = {}
    for report in reports:
        if report.quality.test_value.value is not None and report.config_sha256 is not None:
            key = (report.config_sha256, report.system.ranks.value)
            groups.setdefault(key, []).append(report.quality.test_value.value)
    first = reports[0].quality
    eps = eps_of(first.test_value.value or 0.0, first.higher_is_better)
    return min(4 * eps, max(eps, 2 * pooled_std([group for group in groups.values() if len(group) > 2])))


def same_quality(reports: Reports) -> list[RuleFinding]:
    """Rule 1: state no speed-up between runs of different quality, or where a run missed its target."""
    names, reference, findings = labels(reports), reports[0], []
    allowed = tolerance(reports)
    for i, report in enumerate(reports[1:], start=1):
        sentence = _quality_sentence(reference, report, names[0], names[i], allowed)
        if sentence:
            findings.append(_refuse(1, "QUALITY-LOSS", sentence, "quality.test_value", i))
    return findings


def _quality_sentence(reference: RunReport, report: RunReport, first: str, name: str, allowed: float) -> str:
    """Return why the qualities of two runs forbid a comparison of speed; empty when they allow it."""
    a, b = reference.quality, report.quality
    if a.test_value.value is None or b.test_value.value is None:
        missing = first if a.test_value.value is None else name
        return f"{missing} has no test quality, so it is not known whether {name} reaches the same in less time."
    if a.metric != b.metric or a.name != b.name:
        return (
            f"{first} is judged by {a.name} {a.metric}, {name} by {b.name} {b.metric}: these are different qualities."
        )
    for quality, who in ((a, first), (b, name)):
        if quality.reached is False and quality.target.value is not None and quality.test_value.value is not None:
            got, want = quality_text(quality.test_value.value), quality_text(quality.target.value)
            return f"{who} reached {a.metric} {got} and missed the target {want}; no speed-up is computed."
    better = (b.test_value.value - a.test_value.value) * (1 if a.higher_is_better else -1)
    values = (
        f"{name} ended at {a.metric} {quality_text(b.test_value.value)}, {first} at {quality_text(a.test_value.value)}"
    )
    if better < -allowed:
        return f"{values}: faster and worse is not faster (equal within {significant(allowed, 2)})."
    if better > allowed and not (a.reached and b.reached):
        return f"{values}: not equal within {significant(allowed, 2)}; set a target to compare the time to reach it."
    return ""


def same_tuning(reports: Reports) -> list[RuleFinding]:
    """Rule 3: a system that was tuned with more trials is not better for that."""
    names, findings = labels(reports), []
    base = reports[0].tuning.trials.value
    for i, report in enumerate(reports[1:], start=1):
        trials = report.tuning.trials.value
        if base and trials and max(base, trials) > 2 * min(base, trials):
            sentence = f"{names[0]} was tuned with {plural(base, 'trial')}, {names[i]} with {plural(trials, 'trial')}."
            findings.append(_refuse(3, "TUNING-COST", sentence, "tuning.trials", i, claims=("ranking", *_SPEED)))
    return findings


def same_hardware(reports: Reports) -> list[RuleFinding]:
    """Rule 4: state no speed-up and no efficiency across different devices."""
    names, findings = labels(reports), []
    base = reports[0].system.device_model
    for i, report in enumerate(reports[1:], start=1):
        if report.system.device_model != base:
            sentence = (
                f"{names[i]} ran on {report.system.device_model}, {names[0]} on {base}: the ratio of their times "
                "compares hardware and is not a scaling efficiency."
            )
            findings.append(_refuse(4, "DIFFERENT-HARDWARE", sentence, "system.device_model", i))
    return findings


def same_configuration(reports: Reports) -> list[RuleFinding]:
    """Rule 8: do not combine the speed of one configuration with the quality of another."""
    names, base, findings = labels(reports), reports[0], []
    for i, report in enumerate(reports[1:], start=1):
        if report.config_sha256 != base.config_sha256:
            sentence = (
                f"{names[i]} and {names[0]} differ in settings that determine the result (see the differences): their "
                "times are shown side by side, but their ratio is not a speed-up from more devices."
            )
            findings.append(_refuse(8, "DIFFERENT-RECIPE", sentence, "config_sha256", i))
        elif report.git_commit != base.git_commit and report.git_commit and base.git_commit:
            sentence = f"{names[i]} ran commit {report.git_commit[:10]}, {names[0]} ran {base.git_commit[:10]}."
            findings.append(_refuse(8, "DIFFERENT-CODE", sentence, "git_commit", i))
        elif report.env_lock_sha256 != base.env_lock_sha256:
            sentence = f"{names[i]} and {names[0]} ran with different installed packages."
            findings.append(_refuse(8, "DIFFERENT-PACKAGES", sentence, "env_lock_sha256", i, "warn", ()))
    return findings


def same_inputs(reports: Reports) -> list[RuleFinding]:
    """Rule 9: inputs of different sizes are different workloads."""
    names, base, findings = labels(reports), reports[0].data.input_shape, []
    for i, report in enumerate(reports[1:], start=1):
        shape = report.data.input_shape
        if shape != base and shape and base:
            sentence = f"{names[i]} has inputs of {shape}, {names[0]} of {base}: these are different workloads."
            findings.append(_refuse(9, "DIFFERENT-INPUTS", sentence, "data.input_shape", i))
    return findings


def same_test_data(reports: Reports) -> list[RuleFinding]:
    """Rule 2: qualities on different data are not comparable."""
    names, base, findings = labels(reports), reports[0], []
    for i, report in enumerate(reports[1:], start=1):
        digests = (base.data.test_sha256, report.data.test_sha256)
        if all(digests) and digests[0] != digests[1]:
            a, b = base.quality.eval_samples.value, report.quality.eval_samples.value
            sentence = (
                f"{names[i]} was evaluated on other data ({_count(b)} samples) than {names[0]} ({_count(a)}): their "
                "qualities cannot be compared."
            )
            findings.append(_refuse(2, "DIFFERENT-TEST-DATA", sentence, "data.test_sha256", i))
    return findings


def same_work(reports: Reports) -> list[RuleFinding]:
    """Rule 10: without a target, runs did the same work only if they trained on the same number of samples."""
    names, base, findings = labels(reports), reports[0], []
    for i, report in enumerate(reports[1:], start=1):
        timed = [name for r, name in ((base, names[0]), (report, names[i])) if r.stop.rule == "time"]
        a, b = base.samples_seen.value, report.samples_seen.value
        if timed:
            sentence = f"{' and '.join(timed)} stopped when the time was up: throughput is not speed-up."
            findings.append(_refuse(10, "STOPPED-BY-TIME", sentence, "stop.rule", i))
        elif a != b and not (base.quality.reached and report.quality.reached):
            sentence = (
                f"{names[i]} trained on {_count(b)} samples, {names[0]} on {_count(a)}: they did not do the same work. "
                "Set a target to compare the time to reach it."
            )
            findings.append(_refuse(10, "DIFFERENT-WORK", sentence, "samples_seen", i))
    return findings


def _count(value: float | None) -> str:
    """Format a number of samples; a missing one reads as unknown."""
    return "an unknown number of" if value is None else significant(value)


def scaling_of(reports: Reports) -> Scaling | None:
    """Return "strong" when the global batch is constant and "weak" otherwise; None when all runs have as many ranks."""
    if len({report.system.ranks.value for report in reports}) < 2:
        return None
    return "strong" if len({report.batch.global_size.value for report in reports}) == 1 else "weak"


def strong_or_weak(reports: Reports) -> list[RuleFinding]:
    """Rule 11: scaling with a growing batch is weak, and the epochs to the target decide whether it pays."""
    names, base, findings = labels(reports), reports[0], []
    for i, report in enumerate(reports[1:], start=1):
        a, b = base.batch.global_size.value, report.batch.global_size.value
        if a == b or a is None or b is None:
            continue
        if "strong" in (report.scaling, base.scaling):
            sentence = (
                f"The runs are labelled as strong scaling, but their global batches are {_count(a)} and {_count(b)}: "
                "this is weak scaling."
            )
            findings.append(_refuse(11, "NOT-STRONG", sentence, "scaling", i, claims=("strong scaling", *_SPEED)))
        if base.to_target.steps.value is None or report.to_target.steps.value is None:
            sentence = (
                f"The global batch went from {_count(a)} to {_count(b)} (weak scaling) and the steps to a target are "
                "not known, so no efficiency is stated."
            )
            findings.append(_refuse(11, "WEAK-SCALING", sentence, "to_target.steps", i, claims=("efficiency",)))
        before, after = base.to_target.epochs.value, report.to_target.epochs.value
        if before is not None and after is not None and after > 1.05 * before:
            sentence = (
                f"Epochs to the target went from {before:.1f} to {after:.1f} for {names[i]} with the larger batch."
            )
            findings.append(_refuse(11, "EPOCHS-GROW", sentence, "to_target.epochs", i, "warn", ()))
    return findings


def all_axes(reports: Reports) -> list[RuleFinding]:
    """Rule 12: rank runs only by time, quality and cost together, to a common target."""
    if all(report.quality.reached for report in reports):
        return []
    sentence = "No common target was set and reached by all runs: none of them may be called the best."
    return [
        RuleFinding(
            rule=12, code="NO-RANKING", severity="note", sentence=sentence, where="quality.target", refuses=("ranking",)
        )
    ]


def superlinear(reports: Reports) -> list[RuleFinding]:
    """Warn of a speed-up that is more than linear: usually something else changed."""
    names, findings = labels(reports), []
    for i, report in enumerate(reports[1:], start=1):
        ratio, share = time_ratio(reports[0], report), resource_ratio(reports[0], report)
        if ratio and share and share > 1 and ratio / share > 1.02:
            sentence = (
                f"The times of {names[i]} and {names[0]} differ by more than the {significant(share)} times as many "
                "devices explain. Look for what else changed."
            )
            findings.append(_refuse(1, "MORE-THAN-LINEAR", sentence, "time.wall", i, "warn", ()))
    return findings


def judged_time(report: RunReport, reports: Reports) -> Quantity:
    """Return the time to the target when every run of the comparison has a target, else the wall time."""
    return report.to_target.time if all(r.quality.target.value is not None for r in reports) else report.time.wall


def time_ratio(reference: RunReport, report: RunReport) -> float | None:
    """Return the reference's time divided by the run's time; None where either is unknown."""
    pair = (reference, report)
    before, after = judged_time(reference, pair).value, judged_time(report, pair).value
    return before / after if before and after else None


def resource_ratio(reference: RunReport, report: RunReport) -> float | None:
    """Return the number of devices of a run (cores, if both ran on CPUs) divided by the reference's."""
    cpu = reference.system.device_kind == report.system.device_kind == "cpu"
    before, after = reference.system.cores_used.value, report.system.cores_used.value
    if not (cpu and before and after):
        before, after = reference.system.devices.value, report.system.devices.value
    return after / before if before and after else None


RULES: tuple[Rule, ...] = (
    same_quality,
    same_tuning,
    same_hardware,
    same_configuration,
    same_inputs,
    same_test_data,
    same_work,
    strong_or_weak,
    all_axes,
    superlinear,
)


def check_comparison(reports: Reports) -> tuple[RuleFinding, ...]:
    """Return the findings over all runs and in each of them, the most severe first."""
    across = [item for rule in RULES for item in rule(reports)]
    within = [replace(item, run=i) for i, report in enumerate(reports) for item in check_run(report)]
    return by_severity([*across, *within])

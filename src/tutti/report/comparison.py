"""Several runs side by side: what differs, what each reached and cost, and a speed-up only where one may be stated."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import sqrt
from statistics import variance

from tutti.config.run_report import (
    Claim,
    Comparison,
    ComparisonRow,
    Quantity,
    RuleFinding,
    RunReport,
    Scaling,
    SettingDifference,
    Severity,
)
from tutti.errors import ReportError
from tutti.report.formatting import listed, plural, quality_text, show, significant
from tutti.report.honesty_rules import by_gravity, check_run, eps_of
from tutti.report.measurements import seen


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


def _refused(findings: Sequence[RuleFinding], run: int, claim: Claim) -> RuleFinding | None:
    """The finding that forbids a claim about a run: its own, one over the pair, or one about the reference."""
    return next((f for f in findings if claim in f.refuses and f.run in (run, 0, None)), None)


def _row(i: int, reports: Sequence[RunReport], findings: Sequence[RuleFinding]) -> ComparisonRow:
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


def differences(reports: Sequence[RunReport]) -> tuple[SettingDifference, ...]:
    """The settings that are not the same in all runs."""
    settings = [_settings(report) for report in reports]
    return tuple(
        SettingDifference(name=name, values=tuple(setting[name] for setting in settings))
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


Reports = Sequence[RunReport]
Rule = Callable[[Reports], list[RuleFinding]]
_SPEED: tuple[Claim, ...] = ("speedup", "efficiency")


def labels(reports: Reports) -> list[str]:
    """A name for every run, unique among them."""
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
    return RuleFinding(
        rule=rule, code=code, severity=severity, sentence=sentence, where=where, run=run, refuses=claims
    )  # fmt: skip


def pooled_std(groups: Sequence[Sequence[float]]) -> float:
    """Standard deviation within groups of repeats, pooled over them; 0 where no group has two."""
    freedom = sum(len(group) - 1 for group in groups)
    return sqrt(sum((len(g) - 1) * variance(g) for g in groups if len(g) > 1) / freedom) if freedom > 0 else 0.0


def tolerance(reports: Reports) -> float:
    """How far apart two qualities may be and count as equal: max(eps, 2 * pooled std over repeats).

    Repeats are three runs or more of one configuration on equally many ranks. The tolerance is at most four times
    eps: a recipe whose repeats differ by more shows no equality, and a failed repeat must not widen it.
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
    """Rule 1: no speed-up between runs of different quality, nor where the target was missed."""
    names, reference, found = labels(reports), reports[0], []
    allowed = tolerance(reports)
    for i, report in enumerate(reports[1:], start=1):
        sentence = _quality_sentence(reference, report, names[0], names[i], allowed)
        if sentence:
            found.append(_refuse(1, "QUALITY-LOSS", sentence, "quality.test_value", i))
    return found


def _quality_sentence(reference: RunReport, report: RunReport, first: str, name: str, allowed: float) -> str:
    """Why these two may not be compared in speed by their quality; empty when they may."""
    a, b = reference.quality, report.quality
    if a.test_value.value is None or b.test_value.value is None:
        missing = first if a.test_value.value is None else name
        return f"{missing} has no test quality, so it is not known whether {name} does the same in less time."
    if a.metric != b.metric or a.name != b.name:
        return f"{first} is judged by {a.name} {a.metric}, {name} by {b.name} {b.metric}: not the same quality."
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
        return f"{values}: not equal within {significant(allowed, 2)}; set a target to compare the time to it."
    return ""


def same_tuning(reports: Reports) -> list[RuleFinding]:
    """Rule 3: a system tuned for longer is not better for that."""
    names, found = labels(reports), []
    base = reports[0].tuning.trials.value
    for i, report in enumerate(reports[1:], start=1):
        trials = report.tuning.trials.value
        if base and trials and max(base, trials) > 2 * min(base, trials):
            sentence = f"{names[0]} was tuned with {plural(base, 'trial')}, {names[i]} with {plural(trials, 'trial')}."
            found.append(_refuse(3, "TUNING-COST", sentence, "tuning.trials", i, claims=("ranking", *_SPEED)))
    return found


def same_hardware(reports: Reports) -> list[RuleFinding]:
    """Rule 4: no speed-up and no efficiency across different devices."""
    names, found = labels(reports), []
    base = reports[0].system.device_model
    for i, report in enumerate(reports[1:], start=1):
        if report.system.device_model != base:
            sentence = (
                f"{names[i]} ran on {report.system.device_model}, {names[0]} on {base}: a ratio of their times is one "
                "of hardware, and no scaling efficiency."
            )
            found.append(_refuse(4, "DIFFERENT-HARDWARE", sentence, "system.device_model", i))
    return found


def same_configuration(reports: Reports) -> list[RuleFinding]:
    """Rule 8: speed of one configuration and quality of another do not belong together."""
    names, base, found = labels(reports), reports[0], []
    for i, report in enumerate(reports[1:], start=1):
        if report.config_sha256 != base.config_sha256:
            sentence = (
                f"{names[i]} and {names[0]} differ in what determines the result (see the differences): their times "
                "stand side by side, but their ratio is no speed-up of more devices."
            )
            found.append(_refuse(8, "DIFFERENT-RECIPE", sentence, "config_sha256", i))
        elif report.git_commit != base.git_commit and report.git_commit and base.git_commit:
            sentence = f"{names[i]} is of commit {report.git_commit[:10]}, {names[0]} of {base.git_commit[:10]}."
            found.append(_refuse(8, "DIFFERENT-CODE", sentence, "git_commit", i))
        elif report.env_lock_sha256 != base.env_lock_sha256:
            sentence = f"{names[i]} and {names[0]} ran with different installed packages."
            found.append(_refuse(8, "DIFFERENT-PACKAGES", sentence, "env_lock_sha256", i, "warn", ()))
    return found


def same_inputs(reports: Reports) -> list[RuleFinding]:
    """Rule 9: inputs of different sizes are different workloads."""
    names, base, found = labels(reports), reports[0].data.input_shape, []
    for i, report in enumerate(reports[1:], start=1):
        shape = report.data.input_shape
        if shape != base and shape and base:
            sentence = f"{names[i]} has inputs of {shape}, {names[0]} of {base}: different workloads."
            found.append(_refuse(9, "DIFFERENT-INPUTS", sentence, "data.input_shape", i))
    return found


def same_work(reports: Reports) -> list[RuleFinding]:
    """Rule 10: without a target, only runs that saw equally many samples did the same work."""
    names, base, found = labels(reports), reports[0], []
    for i, report in enumerate(reports[1:], start=1):
        timed = [name for r, name in ((base, names[0]), (report, names[i])) if r.stop.rule == "time"]
        a, b = base.samples_seen.value, report.samples_seen.value
        if timed:
            sentence = f"{' and '.join(timed)} stopped when the time was up: throughput is not speed-up."
            found.append(_refuse(10, "STOPPED-BY-TIME", sentence, "stop.rule", i))
        elif a != b and not (base.quality.reached and report.quality.reached):
            sentence = (
                f"{names[i]} trained on {_count(b)} samples, {names[0]} on {_count(a)}: not the same work. Set a "
                "target to compare the time to it."
            )
            found.append(_refuse(10, "DIFFERENT-WORK", sentence, "samples_seen", i))
    return found


def _count(value: float | None) -> str:
    return "an unknown number of" if value is None else significant(value)


def scaling_of(reports: Reports) -> Scaling | None:
    """Strong when the global batch is constant, weak when it grows; None when the ranks are equally many."""
    if len({report.system.ranks.value for report in reports}) < 2:
        return None
    return "strong" if len({report.batch.global_size.value for report in reports}) == 1 else "weak"


def strong_or_weak(reports: Reports) -> list[RuleFinding]:
    """Rule 11: when the batch grows with the ranks it is weak scaling, and epochs to the target count."""
    names, base, found = labels(reports), reports[0], []
    for i, report in enumerate(reports[1:], start=1):
        a, b = base.batch.global_size.value, report.batch.global_size.value
        if a == b or a is None or b is None:
            continue
        if "strong" in (report.scaling, base.scaling):
            sentence = (
                f"Called strong scaling, but the global batch is {_count(a)} and {_count(b)}: it is weak scaling."
            )
            found.append(_refuse(11, "NOT-STRONG", sentence, "scaling", i, claims=("strong scaling", *_SPEED)))
        if base.to_target.steps.value is None or report.to_target.steps.value is None:
            sentence = (
                f"The global batch went from {_count(a)} to {_count(b)} (weak scaling) and the steps to a target are "
                "not known: no efficiency."
            )
            found.append(_refuse(11, "WEAK-SCALING", sentence, "to_target.steps", i, claims=("efficiency",)))
        before, after = base.to_target.epochs.value, report.to_target.epochs.value
        if before is not None and after is not None and after > 1.05 * before:
            sentence = (
                f"Epochs to the target went from {before:.1f} to {after:.1f} for {names[i]} with the larger batch."
            )
            found.append(_refuse(11, "EPOCHS-GROW", sentence, "to_target.epochs", i, "warn", ()))
    return found


def all_axes(reports: Reports) -> list[RuleFinding]:
    """Rule 12: runs are ranked by time, quality and cost together, to one target."""
    if all(report.quality.reached for report in reports):
        return []
    sentence = "No common target was set and reached by all runs: none of them may be called the best."
    return [
        RuleFinding(
            rule=12, code="NO-RANKING", severity="note", sentence=sentence, where="quality.target", refuses=("ranking",)
        )
    ]


def superlinear(reports: Reports) -> list[RuleFinding]:
    """More than linear speed-up usually means that something else changed."""
    names, found = labels(reports), []
    for i, report in enumerate(reports[1:], start=1):
        ratio, share = time_ratio(reports[0], report), resource_ratio(reports[0], report)
        if ratio and share and share > 1 and ratio / share > 1.02:
            sentence = (
                f"{names[i]} would be {significant(ratio)} times as fast with {significant(share)} times the devices: "
                "more than linear. Look for what else changed."
            )
            found.append(_refuse(1, "MORE-THAN-LINEAR", sentence, "time.wall", i, "warn", ()))
    return found


def judged_time(report: RunReport, reports: Reports) -> Quantity:
    """Time to the target when every run of the comparison has a target, else the wall time."""
    return report.to_target.time if all(r.quality.target.value is not None for r in reports) else report.time.wall


def time_ratio(reference: RunReport, report: RunReport) -> float | None:
    """How many times less time a run took than the reference; None where either is not known."""
    pair = (reference, report)
    before, after = judged_time(reference, pair).value, judged_time(report, pair).value
    return before / after if before and after else None


def resource_ratio(reference: RunReport, report: RunReport) -> float | None:
    """How many times the devices (of CPU runs: the cores) a run used."""
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
    same_work,
    strong_or_weak,
    all_axes,
    superlinear,
)


def check_comparison(reports: Reports) -> tuple[RuleFinding, ...]:
    """All that the rules find over several runs and in each of them, the gravest first."""
    across = [item for rule in RULES for item in rule(reports)]
    each = [replace(item, run=i) for i, report in enumerate(reports) for item in check_run(report)]
    return by_gravity([*across, *each])

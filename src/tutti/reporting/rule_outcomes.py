"""What each of the twelve rules says of a run or a comparison: kept, an objection, or that something is not stated."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from tutti.config.run_folder import FRAMED
from tutti.config.run_report import RuleFinding, RuleOutcome, RunReport
from tutti.reporting.honesty_rules import TITLES

_FACT = "{} with --fact or Job(facts=...)"


def outcomes_of(report: RunReport, findings: Sequence[RuleFinding]) -> tuple[RuleOutcome, ...]:
    """Return what each rule says of one run, by number.

    A rule without an objection is kept only if the run recorded, or the user stated, what it judges by.
    """
    return _outcomes([report], findings)


def outcomes_across(reports: Sequence[RunReport], findings: Sequence[RuleFinding]) -> tuple[RuleOutcome, ...]:
    """Return what each rule says of a comparison: an objection or something not stated in any of its runs counts.

    The first run is the reference of the others, so that neither a reference nor a baseline need be stated.
    """
    return _outcomes([_compared(report, reports[0]) for report in reports], findings)


def _outcomes(reports: Sequence[RunReport], findings: Sequence[RuleFinding]) -> tuple[RuleOutcome, ...]:
    objections = {item.rule for item in findings if item.severity != "note"}
    outcomes = []
    for rule in TITLES:
        missing = next((clause for report in reports if (clause := _MISSING[rule](report))), "")
        if rule in objections:
            outcomes.append(RuleOutcome(rule=rule, outcome="objection"))
        else:
            outcomes.append(RuleOutcome(rule=rule, outcome="unstated" if missing else "kept", missing=missing))
    return tuple(outcomes)


def _compared(report: RunReport, reference: RunReport) -> RunReport:
    """Return a run as it stands in a comparison, where the first run is the reference and the baseline."""
    quality = replace(report.quality, reference_value=reference.quality.test_value)
    baseline = report.baseline
    if baseline.source is None:
        tuned_by = baseline.tuned_by or ("the same" if reference.tuning.trials.value is not None else None)
        baseline = replace(
            baseline,
            source="measured-here",
            system=reference.name,
            device=reference.system.device_model,
            tuned_by=tuned_by,
        )
    equal = report.batch.global_size.value == reference.batch.global_size.value
    return replace(
        report, quality=quality, baseline=baseline, scaling=report.scaling or ("strong" if equal else "weak")
    )


def checked(outcomes: Sequence[RuleOutcome]) -> int:
    """Return how many rules could be checked."""
    return sum(item.outcome != "unstated" for item in outcomes)


def _quality_kept(report: RunReport) -> str:
    quality = report.quality
    if quality.test_value.value is None:
        return "no quality was evaluated"
    if quality.target.value is None and quality.reference_value.value is None:
        return "neither a target quality nor that of a reference is stated; give --target NAME.METRIC=VALUE"
    return ""


def _held_out(report: RunReport) -> str:
    quality, data = report.quality, report.data
    if quality.split == "other":
        return f"whether {quality.name or 'the evaluation'} uses held-out data; name it test or validation"
    if data.train_sha256 is None or data.test_sha256 is None or data.train_test_overlap.value is None:
        return "whether samples are in both the training and the test data: one is a stream, large, or augmented"
    every, trained = quality.eval_every_samples.value, report.samples_seen.value
    several = every is not None and trained is not None and every < 0.75 * trained
    if quality.split == "test" and several and report.stop.left_early and report.stop.rule is None:
        return f"whether the quality on test data decided when training ended; state {_FACT.format('stop.rule')}"
    return ""


def _tuning(report: RunReport) -> str:
    tuning = report.tuning
    if tuning.trials.value is None:
        return f"how many settings were tried, this one included; state {_FACT.format('tuning.trials=N')}"
    if tuning.trials.value > 1 and tuning.device_seconds.value is None:
        return f"what the {tuning.trials.value:g} trials cost; state {_FACT.format('tuning.device_seconds=S')}"
    return ""


def _hardware(report: RunReport) -> str:
    if report.system.device_model in ("", "unknown") or report.system.cores_used.value is None:
        return "which device the run used"
    if report.baseline.source is not None and report.baseline.device is None:
        return f"which device the baseline used; state {_FACT.format('baseline.device=MODEL')}"
    return ""


def _whole(report: RunReport) -> str:
    if not report.time.breakdown:
        return "no breakdown of the time was recorded"
    stream = report.data.train_samples.value is None and report.stop.rule is None and not report.quality.reached
    if stream and report.scope == "train":
        return f"whether this is the whole training: the data is a stream; state {_FACT.format('stop.rule=steps')}"
    return ""


def _input(report: RunReport) -> str:
    if report.data.start_state is None:
        return f"where the data was when the clock started; state {_FACT.format('data.start_state=disk-warm')}"
    return "" if report.time.load_wait.value is not None else "the time that steps waited for data was not recorded"


def _rate(report: RunReport) -> str:
    flops = report.flops
    if flops.model_per_sample.value is None or flops.dtype is None or flops.rate.value is None:
        return (
            "the FLOPs of the model were not counted; start it with `tutti run`, without --no-predict, on its own; if "
            "it said `no prediction`, mend what it named"
        )
    return ""


def _recoverable(report: RunReport) -> str:
    if report.git_commit is None:
        return "the code's commit: the script is in no git repository; run it from one"
    if report.git_dirty:
        return "the code's commit: files were changed after the last one; commit them and run again"
    return "" if report.env_lock_sha256 and report.config_sha256 else "the installed packages were not recorded"


def _sizes(report: RunReport) -> str:
    if report.data.input_shape is None or report.data.native_shape is None:
        return f"the data's own size, before enlarging or padding; state {_FACT.format('data.native_shape=3x32x32')}"
    if report.data.shape_reason == FRAMED and report.data.native_shape == report.data.found_shape:
        return f"whether the border of the inputs was added; state {_FACT.format('data.native_shape=...')}"
    return ""


def _stop(report: RunReport) -> str:
    if report.stop.rule is None and not report.quality.reached:
        return f"what ended the training; state {_FACT.format('stop.rule=plateau, or steps with stop.value=N,')}"
    if report.stop.rule in ("steps", "epochs") and report.stop.value.value is None:
        return f"after how many {report.stop.rule} training was to end; state {_FACT.format('stop.value=N')}"
    if report.stop.rule == "target" and not report.quality.reached:
        return "which target ended the training; give --target NAME.METRIC=VALUE"
    return ""


def _scaling(report: RunReport) -> str:
    if report.batch.global_size.value is None:
        return "the global batch was not recorded"
    if (report.system.ranks.value or 1) == 1 or report.scaling == "strong":
        return ""
    if report.scaling is None:
        return f"whether the batch grew with the ranks; state {_FACT.format('scaling=strong (or weak)')}"
    if report.to_target.steps.value is None:
        return "how many steps the target took with this batch; give --target NAME.METRIC=VALUE"
    return ""


def _baseline(report: RunReport) -> str:
    if report.baseline.source is None:
        return f"which baseline the run is compared with; state {_FACT.format('baseline.source=measured-here')}"
    if report.baseline.tuned_by is None:
        return f"who tuned the baseline; state {_FACT.format('baseline.tuned_by=NAME')}"
    if report.to_target.time.value is None and report.quality.target.value is not None:
        return "the time to the target quality, which was not reached"
    if report.to_target.time.value is None:
        return "the time to a target quality; give --target NAME.METRIC=VALUE"
    return ""


_MISSING: dict[int, Callable[[RunReport], str]] = {
    1: _quality_kept,
    2: _held_out,
    3: _tuning,
    4: _hardware,
    5: _whole,
    6: _input,
    7: _rate,
    8: _recoverable,
    9: _sizes,
    10: _stop,
    11: _scaling,
    12: _baseline,
}
"""Rule -> what it lacks in a run and how to state it, as a clause; empty if it can be checked."""

"""What an honest report may say about one run. A rule is a function from a report to what it finds in it.

The numbers are those of the twelve ways to fool the masses with performance results of deep learning; rules over
several runs are in tutti.report.comparison.
"""

from collections.abc import Callable
from math import prod

from tutti.config.run_report import Claim, RuleFinding, RunReport, Severity
from tutti.report.formatting import duration, number, plural, quality_text, significant

BREAKDOWN_TOLERANCE = 0.02
QUALITY_EPS = 0.005
STOLEN = 0.05
"""Of the core time: more than that taken away, and times are not the work's."""

Rule = Callable[[RunReport], list[RuleFinding]]

REQUIRED: dict[int, tuple[str, ...]] = {
    1: ("quality.test_value", "quality.target", "quality.reference_value"),
    2: ("quality.split", "data.test_sha256", "data.train_test_overlap", "quality.eval_every_samples"),
    3: ("tuning.trials", "tuning.device_seconds", "tuning.space", "tuning.search_log_sha256"),
    4: ("system.device_model", "system.year", "system.peak_dense_flops", "system.cores_used", "baseline.system"),
    5: ("scope", "time.breakdown"),
    6: ("data.start_state", "time.load_wait", "data.bytes_read", "data.preprocess_timed"),
    7: ("flops.model_per_sample", "flops.dtype", "flops.counts_recompute", "flops.sparsity", "time.per_step"),
    8: ("config_sha256", "git_commit", "env_lock_sha256"),
    9: ("data.input_shape", "data.native_shape", "flops.model_per_sample"),
    10: ("stop.rule", "stop.value", "samples_seen"),
    11: (
        "batch.global_size",
        "batch.local_size",
        "batch.micro_size",
        "recipe.lr",
        "scaling",
        "to_target.steps",
        "to_target.epochs",
    ),
    12: ("to_target.time", "device_seconds", "baseline.source", "baseline.tuned_by"),
}
"""What each rule needs, as paths in a RunReport."""

TITLES = {
    1: "Accuracy kept when scaling up",
    2: "Quality on data not trained on",
    3: "Tuning runs counted",
    4: "Like compared with like hardware",
    5: "The whole training, not a part of it",
    6: "Input and output counted",
    7: "Rates with dtype, against dense peaks",
    8: "Speed and quality of one configuration",
    9: "Inputs of their real size",
    10: "Stopped by quality, not by the clock",
    11: "Strong and weak scaling kept apart",
    12: "A fair baseline, on every axis",
}

# Dense peaks in FLOP/s of one device, where sparsity rates twice as high are often quoted instead: NVIDIA A100 and
# H100 data sheets; the errata of the DGX A100 (2.5 PFLOP/s of TF32 for eight is 2:4 sparse, dense is 1.25).
DENSE_PEAKS = {
    ("A100", "tf32"): 156e12,
    ("A100", "float16"): 312e12,
    ("A100", "bfloat16"): 312e12,
    ("H100", "tf32"): 494.7e12,
    ("H100", "float16"): 989.4e12,
    ("H100", "bfloat16"): 989.4e12,
    ("H200", "tf32"): 494.7e12,
    ("H200", "float16"): 989.4e12,
    ("H200", "bfloat16"): 989.4e12,
}


def finding(
    rule: int, code: str, severity: Severity, sentence: str, where: str, refuses: tuple[Claim, ...] = ()
) -> list[RuleFinding]:
    """One finding, as a list."""
    return [RuleFinding(rule=rule, code=code, severity=severity, sentence=sentence, where=where, refuses=refuses)]


def target_missed(report: RunReport) -> list[RuleFinding]:
    """Rule 1: a run that missed its target has no time to the target."""
    quality = report.quality
    if quality.reached is not False or quality.target.value is None or quality.test_value.value is None:
        return []
    sign = "<" if quality.higher_is_better else ">"
    sentence = (
        f"With {plural(report.system.ranks.value or 1, 'rank')} the run reached {quality.name} {quality.metric} "
        f"{quality_text(quality.test_value.value)} {sign} target {quality_text(quality.target.value)}; no speed-up is "
        "computed from it."
    )
    return finding(1, "QUALITY-LOSS", "warn", sentence, "quality.test_value", ("speedup", "efficiency"))


def quality_is_there(report: RunReport) -> list[RuleFinding]:
    """Rule 2: a time without a quality on data not trained on says little."""
    quality = report.quality
    if quality.test_value.value is None:
        sentence = "No quality was evaluated, so the time says nothing about how well the model was trained."
        return finding(2, "NO-TEST-QUALITY", "warn", sentence, "quality.test_value", ("quality", "ranking"))
    if quality.split == "train":
        sentence = (
            f"The quality ({quality.name} {quality.metric}) was taken on the training data; it is no test quality. "
            "Evaluate on data that was not trained on."
        )
        return finding(2, "TRAIN-QUALITY", "refuse", sentence, "quality.split", ("quality", "ranking", "speedup"))
    if quality.split == "other":
        sentence = f"The evaluation is named {quality.name!r}; name it test or validation to say what it stands for."
        return finding(2, "UNNAMED-SPLIT", "note", sentence, "quality.split")
    return []


def best_of_epochs(report: RunReport) -> list[RuleFinding]:
    """Rule 2: choosing the best epoch by the test set is training on it."""
    quality = report.quality
    last, best = quality.test_value.value, quality.best_value.value
    if quality.selection == "best" and quality.split == "test":
        sentence = "The headline is the best of all epochs, chosen on the test data; report the last epoch's value."
        return finding(2, "BEST-OF-EPOCHS", "refuse", sentence, "quality.selection", ("quality", "ranking", "speedup"))
    if last is None or best is None or abs(best - last) <= eps_of(last, quality.higher_is_better):
        return []
    sentence = (
        f"An earlier evaluation was better ({quality_text(best)}) than the last one ({quality_text(last)}). The last "
        "one is reported: choosing by the same data would flatter."
    )
    return finding(2, "BEST-OF-EPOCHS", "note", sentence, "quality.best_value")


def data_overlap(report: RunReport) -> list[RuleFinding]:
    """Rule 2: samples in both sets make the quality too good."""
    shared = report.data.train_test_overlap.value
    if not shared:
        return []
    size = report.quality.eval_samples.value
    part = f" of {significant(size)}" if size else ""
    sentence = (
        f"{plural(shared, 'sample')}{part} of the {report.quality.name} data {'is' if shared == 1 else 'are'} also in "
        "the training data, so the quality is partly remembered. Remove them and evaluate again."
    )
    return finding(2, "DATA-OVERLAP", "refuse", sentence, "data.train_test_overlap", ("quality", "ranking", "speedup"))


def tuning_cost(report: RunReport) -> list[RuleFinding]:
    """Rule 3: tuning is part of the cost."""
    spent, cost = report.tuning.device_seconds.value, report.device_seconds.value
    if not spent or not cost:
        return []
    sentence = (
        f"The headline excludes {number(spent / cost, 'x')} its own cost: {number(spent, 'device s')} went into tuning "
        f"({report.tuning.trials.value or 'an unknown number of'} trials)."
    )
    return finding(3, "TUNING-COST", "warn", sentence, "tuning.device_seconds")


def whole_training(report: RunReport) -> list[RuleFinding]:
    """Rule 5: only a whole training has a time to train."""
    if report.scope == "train":
        return []
    code = "KERNEL-ONLY" if report.scope in ("kernel", "step") else "PART-OF-A-TRAINING"
    sentence = (
        f"The run {_ENDED.get(report.status, 'ended early')} after {significant(report.steps.value or 0)} steps: these "
        f"are times of {_SCOPES[report.scope]}, not of a training."
    )
    return finding(5, code, "warn", sentence, "scope", ("ranking", "end-to-end", "speedup", "efficiency"))


_ENDED = {"failed": "failed", "stopped": "was stopped", "unfinished": "has no end on record and broke off"}
_SCOPES = {"kernel": "kernels", "step": "single steps", "epoch": "whole epochs"}


def breakdown_adds_up(report: RunReport) -> list[RuleFinding]:
    """Rule 5: the parts of the time must add up to the wall time within 2 %."""
    accounted, wall = report.time.accounted.value, report.time.wall.value
    if accounted is None or not wall or abs(accounted - 1) <= BREAKDOWN_TOLERANCE:
        return []
    gap = wall * (1 - accounted)
    direction = f"{duration(abs(gap))} {'are in no phase' if gap > 0 else 'are counted twice'}"
    sentence = (
        f"The time breakdown does not add up: its parts sum to {number(accounted, 'ratio')} of the wall time "
        f"({direction}). "
        "Shares of the time may not be quoted from this run."
    )
    return finding(5, "BREAKDOWN-GAP", "refuse", sentence, "time.breakdown", ("breakdown",))


def data_source(report: RunReport) -> list[RuleFinding]:
    """Rule 6: data that lay in memory, or was made up, hides the cost of reading."""
    state = report.data.start_state
    if state == "ram":
        sentence = "The data lay in memory before the clock started: reading it is not in these times."
        return finding(6, "DATA-IN-RAM", "warn", sentence, "data.start_state", ("end-to-end",))
    if state == "generated":
        sentence = (
            "The data was generated, not read: these times say nothing about input, nor the quality about a task."
        )
        return finding(6, "SYNTHETIC-DATA", "warn", sentence, "data.start_state", ("end-to-end", "quality"))
    return []


def honest_peak(report: RunReport) -> list[RuleFinding]:
    """Rule 7: rates are compared with dense floating-point peaks only, and cannot exceed them."""
    flops, found = report.flops, []
    for dtype, peak in report.system.peak_dense_flops.items():
        known = next((v for (k, d), v in DENSE_PEAKS.items() if k in report.system.device_model and d == dtype), None)
        if dtype.startswith(("int", "uint")):
            sentence = f"The peak is one of {dtype} operations; training is measured against floating-point peaks."
            found += finding(7, "INTEGER-PEAK", "refuse", sentence, f"system.peak_dense_flops.{dtype}", ("rate",))
        elif known and peak.value and peak.value > 1.02 * known:
            sentence = (
                f"The {dtype} peak of {number(peak.value, 'FLOP/s')} is no dense peak of one "
                f"{report.system.device_model} ({number(known, 'FLOP/s')}): it is a sparsity rate, or that of several."
            )
            found += finding(7, "SPARSE-PEAK", "refuse", sentence, f"system.peak_dense_flops.{dtype}", ("rate",))
    if flops.sparsity == "sparse":
        sentence = "The peak counts zeros that are skipped (2:4 sparsity); a dense model cannot reach it."
        found += finding(7, "SPARSE-PEAK", "refuse", sentence, "flops.sparsity", ("rate",))
    if flops.rate.value is not None and flops.dtype is None:
        found += finding(7, "NO-DTYPE", "refuse", "The rate has no dtype, so it has no peak.", "flops.dtype", ("rate",))
    if flops.rate.value and flops.peak.value and flops.rate.value > 1.02 * flops.peak.value:
        sentence = (
            f"The rate of {number(flops.rate.value, 'FLOP/s')} exceeds the peak of "
            f"{number(flops.peak.value, 'FLOP/s')}: the FLOP count or the peak is wrong, so no fraction is stated."
        )
        found += finding(7, "ABOVE-PEAK", "refuse", sentence, "flops.rate", ("rate",))
    return found


def recoverable(report: RunReport) -> list[RuleFinding]:
    """Rule 8: the code of a run must be found again."""
    if not report.git_dirty:
        return []
    sentence = (
        f"The code had changes that were not committed (commit {(report.git_commit or 'unknown')[:10]}): this run "
        "cannot be made again from the commit alone."
    )
    return finding(8, "UNCOMMITTED-CODE", "note", sentence, "git_dirty")


def input_size(report: RunReport) -> list[RuleFinding]:
    """Rule 9: inputs blown up beyond their native size inflate the work."""
    given, native = _elements(report.data.input_shape), _elements(report.data.native_shape)
    if not given or not native or given <= native:
        return []
    sentence = (
        f"Inputs were enlarged to {number(given / native, 'x')} their native size ({report.data.native_shape} to "
        f"{report.data.input_shape}); the work is inflated by about as much."
    )
    return finding(9, "INPUT-INFLATED", "warn", sentence, "data.input_shape")


def _elements(shape: str | None) -> int | None:
    parts = shape.replace("x", "×").split("×") if shape else []
    return prod(int(part) for part in parts) if parts and all(part.strip().isdigit() for part in parts) else None


def stopped_by_time(report: RunReport) -> list[RuleFinding]:
    """Rule 10: a run that ends when its time is up has no time to anything."""
    if report.stop.rule != "time":
        return []
    sentence = "Training was stopped by the clock: there is no time to a quality, and throughput is not speed-up."
    return finding(10, "STOPPED-BY-TIME", "warn", sentence, "stop.rule", ("speedup", "efficiency", "ranking"))


def baseline_rerun(report: RunReport) -> list[RuleFinding]:
    """Rule 12: a baseline that was not run here was not run the same way."""
    if report.baseline.source != "published":
        return []
    sentence = f"The baseline ({report.baseline.system or 'unnamed'}) is a published number and was not run here."
    return finding(12, "BASELINE-NOT-RERUN", "warn", sentence, "baseline.source", ("ranking",))


def same_as_one_device(report: RunReport) -> list[RuleFinding]:
    """A run that computes something else than one device has no speed-up over it."""
    verdict = report.verification
    if verdict is None or verdict.passed:
        return []
    sentence = " ".join(
        filter(None, ("The ranks did not compute what one device computes.", verdict.sentence, verdict.cause))
    )
    return finding(
        0, "NOT-THE-SAME", "refuse", sentence, "verification", ("speedup", "efficiency", "quality", "ranking")
    )


def enough_cores(report: RunReport) -> list[RuleFinding]:
    """Ranks beyond the cores take turns: that shows that the program works, not how fast it would be."""
    ranks, cores = report.system.ranks.value or 1, report.system.cores_granted.value
    if report.system.device_kind != "cpu" or cores is None or ranks <= cores:
        return []
    sentence = (
        f"{plural(ranks, 'rank')} took turns on {plural(cores, 'core')}: this proves function, not speed. No speed-up "
        "is computed from it."
    )
    return finding(0, "FUNCTION-NOT-SPEED", "warn", sentence, "system.cores_granted", ("speedup", "efficiency"))


def cores_of_its_own(report: RunReport) -> list[RuleFinding]:
    """Core time that a hypervisor gave to other machines makes every second longer, and not every run's alike."""
    hosts = {rank.host: rank.stolen.value for rank in report.ranks if (rank.stolen.value or 0) > STOLEN}
    if not hosts:
        return []
    most = max(hosts, key=lambda host: hosts[host] or 0)
    sentence = (
        f"While this ran, {number(hosts[most] or 0, 'ratio')} of the core time of host {most} went to other virtual "
        "machines: its times are longer than the work, so compare them with no other run's; measure again when the "
        "machine is quiet."
    )
    return finding(0, "TIME-STOLEN", "warn", sentence, "ranks", ("speedup", "efficiency", "ranking"))


def interruptions(report: RunReport) -> list[RuleFinding]:
    """What the reader of the curves must know: resumes, repeated and skipped steps."""
    found = []
    generations, again = report.time.generations.value or 1, report.time.repeated_steps.value or 0
    if generations > 1:
        redone = f"; {plural(again, 'step')} done again count in the time, once in the curves" if again else ""
        sentence = f"The run was resumed {plural(generations - 1, 'time')}{redone}. Down time is not counted."
        found += finding(0, "RESUMED", "note", sentence, "time.generations")
    if report.skipped_steps.value:
        sentence = f"{plural(report.skipped_steps.value, 'step')} left the parameters as they were (not finite)."
        found += finding(0, "SKIPPED-STEPS", "warn", sentence, "skipped_steps")
    return found


def prediction_error(report: RunReport) -> list[RuleFinding]:
    """A prediction whose interval misses the measured value is said to be wrong."""
    found = []
    for check in report.checks:
        if check.within is False and check.error.value is not None:
            direction = "high" if check.error.value > 0 else "low"
            sentence = (
                f"The predicted {check.name} is {number(abs(check.error.value), 'ratio')} too {direction}, "
                f"outside its own "
                "interval: do not trust this plan's comparison with others without a probe of this machine."
            )
            found += finding(0, "PREDICTION-MISSED", "note", sentence, "checks")
    return found


RULES: tuple[Rule, ...] = (
    target_missed,
    quality_is_there,
    best_of_epochs,
    data_overlap,
    tuning_cost,
    whole_training,
    breakdown_adds_up,
    data_source,
    honest_peak,
    recoverable,
    input_size,
    stopped_by_time,
    baseline_rerun,
    same_as_one_device,
    enough_cores,
    cores_of_its_own,
    interruptions,
    prediction_error,
)

_ORDER: dict[Severity, int] = {"refuse": 0, "warn": 1, "note": 2}


def check_run(report: RunReport) -> tuple[RuleFinding, ...]:
    """All that the rules find in one run, the gravest first."""
    return by_gravity([item for rule in RULES for item in rule(report)])


def by_gravity(found: list[RuleFinding]) -> tuple[RuleFinding, ...]:
    """Refusals first, then warnings, then notes; by rule among each."""
    return tuple(sorted(found, key=lambda item: (_ORDER[item.severity], item.rule)))


def eps_of(value: float, higher_is_better: bool) -> float:
    """What counts as no difference in quality: 0.005 for a share between 0 and 1, else half a percent of the value."""
    return QUALITY_EPS if higher_is_better and 0 <= value <= 1 else QUALITY_EPS * abs(value)

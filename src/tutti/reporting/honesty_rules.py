"""The rules of honest reporting for one run. Each rule maps a RunReport to a list of findings.

Rule numbers follow the twelve ways to fool the masses with performance results of deep learning. Rules that compare
several runs are in `tutti.reporting.comparison`.
"""

from collections.abc import Callable
from math import prod, sqrt

from tutti.config.run_folder import FRAMED, LIKE_RANDOM
from tutti.config.run_report import Claim, RuleFinding, RunReport, Severity
from tutti.reporting.formatting import PHASE_NAMES, duration, listed, number, plural, quality_text, significant

BREAKDOWN_TOLERANCE = 0.02
QUALITY_EPS = 0.005
STOLEN = 0.05
"""Fraction of a host's core time taken by other virtual machines above which a run's times cannot be trusted."""

SHARED, LONG_S = 0.25, 30.0
"""Fraction of a host's core time that other programs may use, and seconds below which tutti's own are too many."""
_FEW_SHARED = 0.01
"""Share of the evaluated samples below which those that are also trained on may be chance repeats."""

BUSY = 0.1
"""Fraction of a host's core time used by other programs above which they explain longer steps."""

Rule = Callable[[RunReport], list[RuleFinding]]

TITLES = {
    1: "Accuracy kept when scaling up",
    2: "Quality on held-out data",
    3: "Tuning runs counted",
    4: "Comparison on the same hardware",
    5: "The complete training run, not a part of it",
    6: "Reading of the input counted",
    7: "Rates with dtype, against dense peaks",
    8: "Speed and quality of one configuration",
    9: "Inputs of their real size",
    10: "Stopped by quality, not by the clock",
    11: "Strong and weak scaling distinguished",
    12: "A fair baseline in time, quality and cost",
}

# Dense peaks of one device in FLOP/s; sparse rates, twice as high, are often quoted instead. Sources: NVIDIA A100 and
# H100 data sheets, and the errata of the DGX A100: 2.5 PFLOP/s of TF32 for eight devices is 2:4 sparse, dense is 1.25.
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
    """Return a list that holds one finding.

    Args:
        rule: number of the rule; 0 for rules of the report itself.
        code: short name of the finding, such as "QUALITY-LOSS".
        severity: "refuse", "warn" or "note".
        sentence: the finding as one sentence.
        where: dotted path of the field that it is about.
        refuses: claims that may not be made.
    """
    return [RuleFinding(rule=rule, code=code, severity=severity, sentence=sentence, where=where, refuses=refuses)]


def target_missed(report: RunReport) -> list[RuleFinding]:
    """Rule 1: a run that missed its target, or is worse than its reference, has no time to compare."""
    quality, value = report.quality, report.quality.test_value.value
    if value is None:
        return []
    reference = quality.reference_value.value
    ranks = plural(report.system.ranks.value or 1, "rank")
    if quality.reached is False and quality.target.value is not None:
        sign = "<" if quality.higher_is_better else ">"
        sentence = (
            f"With {ranks} the run reached {quality.name} {quality.metric} {quality_text(value)} {sign} target "
            f"{quality_text(quality.target.value)}; no speed-up is computed from it."
        )
        return finding(1, "QUALITY-LOSS", "warn", sentence, "quality.test_value", ("speedup", "efficiency"))
    target = quality.target.value
    if quality.reached and target is not None:
        lost = (target - value) * (1 if quality.higher_is_better else -1)
        if lost > eps_of(target, quality.higher_is_better):
            sentence = (
                f"The run reached the target of {quality_text(target)} on the way, but its {quality.name} "
                f"{quality.metric} at the end is {quality_text(value)}: the trained model does not have the quality."
            )
            return finding(
                1, "QUALITY-LOST", "warn", sentence, "quality.test_value", ("speedup", "efficiency", "ranking")
            )
    if reference is not None:
        loss = (reference - value) * (1 if quality.higher_is_better else -1)
        if loss > eps_of(reference, quality.higher_is_better):
            sentence = (
                f"With {ranks} the run reached {quality.name} {quality.metric} {quality_text(value)}, the reference "
                f"{quality_text(reference)}: faster and worse is not faster."
            )
            return finding(1, "QUALITY-LOSS", "warn", sentence, "quality.reference_value", ("speedup", "efficiency"))
    return []


def quality_on_held_out_data(report: RunReport) -> list[RuleFinding]:
    """Rule 2: a time means little without a quality measured on held-out data."""
    quality = report.quality
    if quality.test_value.value is None:
        sentence = "No quality was evaluated, so the time does not say how well the model was trained."
        return finding(2, "NO-TEST-QUALITY", "warn", sentence, "quality.test_value", ("quality", "ranking"))
    if quality.split == "train":
        sentence = (
            f"The quality ({quality.name} {quality.metric}) was measured on the training data, so it is not a test "
            "quality. Evaluate on held-out data."
        )
        return finding(2, "TRAIN-QUALITY", "refuse", sentence, "quality.split", ("quality", "ranking", "speedup"))
    if quality.split == "other":
        sentence = f"The evaluation is named {quality.name!r}; name it test or validation to say which data it uses."
        return finding(2, "UNNAMED-SPLIT", "note", sentence, "quality.split")
    return []


def best_of_epochs(report: RunReport) -> list[RuleFinding]:
    """Rule 2: choosing the best epoch by its test quality amounts to training on the test data."""
    quality = report.quality
    last, best = quality.test_value.value, quality.best_value.value
    if quality.selection == "best" and quality.split == "test":
        sentence = "The headline is the best of all epochs, chosen on the test data; report the last epoch's value."
        return finding(2, "BEST-OF-EPOCHS", "refuse", sentence, "quality.selection", ("quality", "ranking", "speedup"))
    if report.quality.reloaded and quality.split == "test":
        sentence = (
            f"The model of an earlier evaluation was evaluated again at the end: its {quality.metric} of "
            f"{quality_text(last or 0)} was chosen on the test data. Choose on validation data."
        )
        return finding(2, "BEST-OF-EPOCHS", "refuse", sentence, "quality.reloaded", ("quality", "ranking", "speedup"))
    if last is None or best is None or abs(best - last) <= eps_of(last, quality.higher_is_better):
        return []
    sentence = (
        f"An earlier evaluation was better ({quality_text(best)}) than the last one ({quality_text(last)}). The last "
        "one is reported: choosing the best one on the same data would flatter the result."
    )
    return finding(2, "BEST-OF-EPOCHS", "note", sentence, "quality.best_value")


def stopped_on_test(report: RunReport) -> list[RuleFinding]:
    """Rule 2: a training that ends by its quality on test data has chosen its epoch on the test data."""
    quality, stop = report.quality, report.stop
    if quality.split != "test" or stop.watched is None or not stop.watched.startswith(f"{quality.name}/"):
        return []
    sentence = (
        f"Training was stopped by its quality on test data ({stop.early_reason}), so that is no quality on held-out "
        "data. Stop by the quality on validation data."
    )
    return finding(2, "STOPPED-ON-TEST", "warn", sentence, "stop.watched", ("quality", "ranking"))


def validation_is_test(report: RunReport) -> list[RuleFinding]:
    """Rule 2: what is decided by validation on the test data is decided by the test."""
    others = [name for name in report.data.same_as if name != report.quality.name]
    if report.quality.split != "test" or not others:
        return []
    sentence = (
        f"The data of {report.quality.name} is also that of {listed(others)}: what was decided by one was decided by "
        "the other, so it is no held-out data. Keep test data apart."
    )
    return finding(2, "TEST-USED-BEFORE", "warn", sentence, "data.same_as", ("quality", "ranking"))


def data_overlap(report: RunReport) -> list[RuleFinding]:
    """Rule 2: samples that are in both the training and the evaluation data inflate the quality."""
    shared, trained = report.data.train_test_overlap.value, report.data.trained_on.value
    if trained and not shared:
        sentence = (
            f"Steps trained on {plural(trained, 'sample')} of the {report.quality.name} data "
            f"({report.data.trained_on.note}), so the quality measures memorisation. Train on training data only."
        )
        where = "data.trained_on"
        return finding(2, "TRAINED-ON-TEST", "refuse", sentence, where, ("quality", "ranking", "speedup"))
    if not shared:
        return []
    size = report.quality.eval_samples.value
    part = f" of {significant(size)}" if size else ""
    sentence = (
        f"{plural(shared, 'sample')}{part} of the {report.quality.name} data {'is' if shared == 1 else 'are'} also in "
        "the training data, so the quality partly measures memorisation. Remove them and evaluate again."
    )
    if size and shared < _FEW_SHARED * size:
        return finding(2, "DATA-OVERLAP", "warn", sentence, "data.train_test_overlap", ("quality",))
    return finding(2, "DATA-OVERLAP", "refuse", sentence, "data.train_test_overlap", ("quality", "ranking", "speedup"))


def tuning_cost(report: RunReport) -> list[RuleFinding]:
    """Rule 3: the time spent on tuning belongs to the cost, and runs beside this one show what was tried."""
    tuning, cost = report.tuning, report.device_seconds.value
    trials, found, findings = tuning.trials.value, tuning.found_trials.value or 0, []
    if found and (trials is None or trials <= found):  # this run's settings are one of them
        said = "the run does not say so" if trials is None else f"the run states {plural(trials, 'trial')}"
        times = number((tuning.found_device_seconds.value or 0) / cost, "x") if cost else "an unknown number of times"
        sentence = (
            f"Runs beside this one tried {plural(found, 'other setting')} of its script on the same data, at {times} "
            f"the cost of this run, and {said}. If they were tuning, state tuning.trials and tuning.device_seconds."
        )
        findings += finding(3, "TUNING-HIDDEN", "warn", sentence, "tuning.trials", ("ranking",))
    seeds = tuning.found_seeds.value
    if seeds:
        sentence = (
            f"Runs beside this one trained with the same settings and {plural(seeds, 'other seed')}: report the mean "
            "and the scatter of all, not this run alone."
        )
        findings += finding(3, "SEEDS", "note", sentence, "tuning.found_seeds")
    spent = tuning.device_seconds.value
    if spent and cost:
        runs = plural(trials, "trial") if trials else "an unknown number of trials"
        sentence = (
            f"The headline excludes tuning, which cost {number(spent, 'device s')} ({runs}): "
            f"{number(spent / cost, 'x')} the cost of the run itself."
        )
        findings += finding(3, "TUNING-COST", "note", sentence, "tuning.device_seconds")
    return findings


def baseline_hardware(report: RunReport) -> list[RuleFinding]:
    """Rule 4: a baseline on another device compares hardware."""
    device, own = report.baseline.device, report.system.device_model
    if report.baseline.source is None or device is None or device == own:
        return []
    sentence = (
        f"The baseline ({report.baseline.system or 'unnamed'}) ran on {device}, this run on {own}: the ratio of their "
        "times compares hardware."
    )
    return finding(4, "DIFFERENT-HARDWARE", "warn", sentence, "baseline.device", ("speedup", "efficiency", "ranking"))


def whole_training(report: RunReport) -> list[RuleFinding]:
    """Rule 5: only a complete training run has a time to train."""
    earlier = report.time.earlier_steps.value
    if report.scope == "train" and earlier:
        sentence = (
            f"The run continues another one from step {significant(earlier)}: its times and cost are those of the "
            "steps after that, not of a complete training run. Resume in the run's own folder to count both."
        )
        where = "time.earlier_steps"
        return finding(5, "CONTINUED", "warn", sentence, where, ("ranking", "end-to-end", "speedup", "efficiency"))
    if report.scope == "train":
        return _part_of_the_data(report)
    steps = plural(report.steps.value or 0, "step")
    ended = _ENDED.get(report.status)
    if ended is None:
        seen_data = f", {number(report.epochs.value, 'ratio')} of its data" if report.epochs.value is not None else ""
        what = f"ended by itself after {steps}{seen_data}, and does not state that it was to"
    else:
        what = f"{ended} after {steps}"
    code = "KERNEL-ONLY" if report.scope in ("kernel", "step") else "PART-OF-A-TRAINING"
    sentence = f"The run {what}: these are times of {_SCOPES[report.scope]}, not of a complete training run."
    return finding(5, code, "warn", sentence, "scope", ("ranking", "end-to-end", "speedup", "efficiency"))


def _part_of_the_data(report: RunReport) -> list[RuleFinding]:
    """Rule 5: epochs that end early, and small subsets, train on a part of the data."""
    whole, chosen = report.data.chosen_from.value, report.data.train_samples.value
    claims: tuple[Claim, ...] = ("ranking", "end-to-end", "speedup", "efficiency")
    if whole and chosen and 2 * chosen < whole:
        sentence = f"Training used {significant(chosen)} of the {significant(whole)} samples of its data set."
        return finding(5, "PART-OF-THE-DATA", "warn", sentence, "data.chosen_from", claims)
    planned, epochs = report.stop.planned_epochs.value, report.epochs.value
    if not report.stop.left_early or not planned or not epochs or report.stop.rule not in (None, "epochs"):
        return []
    if report.quality.reached or report.stop.early_reason or epochs >= 0.9 * planned:
        return []
    asked = plural(planned, "epoch")
    sentence = f"The script asked for {asked}, and trained on as many samples as {significant(epochs)} have."
    return finding(5, "PART-OF-THE-DATA", "warn", sentence, "stop", claims)


def repeated_batches(report: RunReport) -> list[RuleFinding]:
    """Rule 5: steps on one batch again and again are not a training on the data that the loader reads."""
    repeated, steps = report.steps_on_same_batch.value or 0, report.steps.value or 0
    if not steps or repeated < 0.1 * steps:
        return []
    sentence = (
        f"{plural(repeated, 'step')} of {significant(steps)} trained on the same batch as the step before, although "
        "the loader had given another: these are times of single steps, not of a training."
    )
    return finding(5, "SAME-BATCH", "warn", sentence, "steps_on_same_batch", ("ranking", "end-to-end", "speedup"))


def repeated_samples(report: RunReport) -> list[RuleFinding]:
    """Rule 5: a data set that gives few samples under many indices is a small one."""
    distinct = report.data.distinct.value
    if distinct is None or distinct > 0.8:
        return []
    sentence = (
        f"Only {number(distinct, 'ratio')} of the samples that were looked at differ: the data set gives the same "
        "samples under several indices (as oversampling does), so an epoch has fewer samples than it counts."
    )
    return finding(
        5,
        "SAME-SAMPLES",
        "warn" if distinct < 0.6 else "note",
        sentence,
        "data.distinct",
        ("ranking", "end-to-end", "quality"),
    )


def better_than_chance(report: RunReport) -> list[RuleFinding]:
    """Rule 5: a model that is no better than always giving the most frequent answer was not trained."""
    quality, share = report.quality, report.data.majority.value
    value, count = quality.test_value.value, quality.eval_samples.value
    words = set(quality.metric.lower().replace("-", "_").split("_"))
    if (
        not words & {"accuracy", "acc"}
        or words & _OTHER_ACCURACIES
        or share is None
        or value is None
        or not count
        or value > 1
    ):
        return []
    scatter = 2 * sqrt(share * (1 - share) / count)
    if value > share + min(scatter, (1 - share) / 2):
        return []
    sentence = (
        f"The {quality.name} {quality.metric} of {quality_text(value)} is no better than always giving the most "
        f"frequent answer ({quality_text(share)}): the model has learned nothing, so these times are not of a training."
    )
    return finding(5, "NOTHING-LEARNED", "warn", sentence, "quality.test_value", ("ranking", "end-to-end", "speedup"))


_OTHER_ACCURACIES = {"balanced", "mean", "macro", "class", "top", "top3", "top5", "top10", "topk", "per", "weighted"}
"""Words of accuracies of which the most frequent answer has another than its share."""

_FEW_NUMBERS = 200
"""Numbers of a sample below which it may be a row of a table rather than an image or a signal."""

_ENDED = {"failed": "failed", "stopped": "was stopped", "unfinished": "broke off without recording an end"}
_SCOPES = {"kernel": "kernels", "step": "single steps", "epoch": "whole epochs"}


def breakdown_adds_up(report: RunReport) -> list[RuleFinding]:
    """Rule 5: the phases must add up to the wall time within 2 %."""
    accounted, wall = report.time.accounted.value, report.time.wall.value
    if accounted is None or not wall or abs(accounted - 1) <= BREAKDOWN_TOLERANCE:
        return []
    gap = wall * (1 - accounted)
    direction = f"{duration(abs(gap))} {'belong to no phase' if gap > 0 else 'are counted twice'}"
    sentence = (
        f"The time breakdown does not add up: its parts sum to {number(accounted, 'ratio')} of the wall time "
        f"({direction}). "
        "Shares of the time may not be quoted from this run."
    )
    return finding(5, "BREAKDOWN-GAP", "refuse", sentence, "time.breakdown", ("breakdown",))


def data_source(report: RunReport) -> list[RuleFinding]:
    """Rule 6: data that was preloaded into memory or generated hides the cost of reading it."""
    data = report.data
    state, found = data.start_state, data.found_state
    untrue: tuple[Claim, ...] = ("end-to-end", "speedup", "quality", "ranking")
    if found == "generated" and _may_be_transformed(report):
        found = state if state != "generated" else found
    if state in ("disk-cold", "disk-warm") and found in ("ram", "generated"):
        sentence = f"The run states that its data came from disk, but {data.state_reason}."
        return finding(6, "DATA-MISSTATED", "refuse", sentence, "data.start_state", untrue)
    how = f" ({data.state_reason})" if state == found and data.state_reason else ""
    if state == "ram":
        if found == "generated":
            sentence = f"The run states that its data was read into memory, but {data.state_reason}."
            return finding(6, "DATA-MISSTATED", "refuse", sentence, "data.start_state", untrue)
        sentence = f"The data was in memory before the clock started, so these times do not include reading it{how}."
        return finding(6, "DATA-IN-RAM", "warn", sentence, "data.start_state", ("end-to-end",))
    if state == "generated":
        sentence = (
            f"The data was generated, not read{how}: these times say nothing about reading input, and the quality says "
            "nothing about a real task."
        )
        if _may_be_transformed(report):
            sentence = (
                f"The data seems to be generated: {data.state_reason}. If these are transformed measurements, "
                "say where they were: state data.start_state with --fact or Job(facts=...)."
            )
        return finding(6, "SYNTHETIC-DATA", "warn", sentence, "data.start_state", ("end-to-end", "quality"))
    return []


def _may_be_transformed(report: RunReport) -> bool:
    """Return whether a few numbers a sample look random: quantiles of measurements do, too."""
    size = _elements(report.data.input_shape)
    return LIKE_RANDOM in report.data.state_reason and size is not None and size < _FEW_NUMBERS


def honest_peak(report: RunReport) -> list[RuleFinding]:
    """Rule 7: compare rates only with dense floating-point peaks; a rate cannot exceed its peak."""
    flops, findings = report.flops, []
    for dtype, peak in report.system.peak_dense_flops.items():
        known = next((v for (k, d), v in DENSE_PEAKS.items() if k in report.system.device_model and d == dtype), None)
        if dtype.startswith(("int", "uint")):
            sentence = f"The peak counts {dtype} operations; training is measured against floating-point peaks."
            findings += finding(7, "INTEGER-PEAK", "refuse", sentence, f"system.peak_dense_flops.{dtype}", ("rate",))
        elif known and peak.value and peak.value > 1.02 * known:
            sentence = (
                f"The {dtype} peak of {number(peak.value, 'FLOP/s')} exceeds the dense peak of one "
                f"{report.system.device_model} ({number(known, 'FLOP/s')}): it assumes sparsity or counts several "
                "devices."
            )
            findings += finding(7, "SPARSE-PEAK", "refuse", sentence, f"system.peak_dense_flops.{dtype}", ("rate",))
    if flops.sparsity == "sparse":
        sentence = "The peak counts zeros that are skipped (2:4 sparsity); a dense model cannot reach it."
        findings += finding(7, "SPARSE-PEAK", "refuse", sentence, "flops.sparsity", ("rate",))
    if flops.rate.value is not None and flops.dtype is None:
        findings += finding(
            7, "NO-DTYPE", "refuse", "The rate has no dtype, so no peak applies to it.", "flops.dtype", ("rate",)
        )
    if flops.rate.value and flops.peak.value and flops.rate.value > 1.02 * flops.peak.value:
        sentence = (
            f"The rate of {number(flops.rate.value, 'FLOP/s')} exceeds the peak of "
            f"{number(flops.peak.value, 'FLOP/s')}: the FLOP count or the peak is wrong, so no fraction is stated."
        )
        findings += finding(7, "ABOVE-PEAK", "refuse", sentence, "flops.rate", ("rate",))
    return findings


def recoverable(report: RunReport) -> list[RuleFinding]:
    """Rule 8: the code of a run must be recoverable from its commit."""
    if not report.git_dirty:
        return []
    sentence = (
        f"The code had uncommitted changes (commit {(report.git_commit or 'unknown')[:10]}): the commit alone does not "
        "reproduce this run."
    )
    return finding(8, "UNCOMMITTED-CODE", "note", sentence, "git_dirty")


def input_size(report: RunReport) -> list[RuleFinding]:
    """Rule 9: inputs enlarged beyond their native size inflate the work, whatever the run states of them."""
    data = report.data
    given = _elements(data.input_shape)
    found = data.found_shape if data.shape_reason else None
    sizes = {shape: size for shape in (data.native_shape, found) if (size := _elements(shape))}
    if not given or not sizes:
        return []
    native = min(sizes, key=lambda shape: sizes[shape])
    if given <= sizes[native]:
        return []
    if native == found and data.shape_reason == FRAMED:
        if data.native_shape != found:
            return []  # the user states that the border is the data's own
        sentence = (
            f"All inputs have an equal border around {native} of {_largest(data.input_shape)}. If it was added, it "
            "inflates the work; state data.native_shape."
        )
        return finding(9, "INPUT-BORDER", "note", sentence, "data.input_shape")
    how = f", because {data.shape_reason}" if native == found else ""
    sentence = (
        f"Inputs were enlarged to {number(given / sizes[native], 'x')} their native size ({native} to "
        f"{_largest(data.input_shape)}{how}); this inflates the work by about the same factor."
    )
    return finding(9, "INPUT-INFLATED", "warn", sentence, "data.input_shape", ("rate",))


def _largest(shapes: str | None) -> str:
    """Return the largest of shapes joined by " and ": that of the input, beside labels."""
    return max((shapes or "").split(" and "), key=lambda shape: _one_size(shape) or 0)


def _elements(shapes: str | None) -> int | None:
    """Return the number of values of the largest of shapes joined by " and "; None if it is no shape."""
    return _one_size(_largest(shapes))


def _one_size(shape: str) -> int | None:
    parts = shape.replace("x", "×").split("×")
    return prod(int(part) for part in parts) if all(part.strip().isdigit() for part in parts) else None


def _went_on_after_target(report: RunReport) -> bool:
    """Return whether training went on for several evaluations after its target was reached."""
    reached, last = report.to_target.samples.value, report.samples_seen.value
    every = report.quality.eval_every_samples.value
    return bool(reached and last and every) and (last or 0) - (reached or 0) >= 2 * (every or 0)


def stopped_by_time(report: RunReport) -> list[RuleFinding]:
    """Rule 10: a run that stops when its time is up has no time to a quality."""
    stop = report.stop
    claims: tuple[Claim, ...] = ("speedup", "efficiency", "ranking")
    if stop.rule == "time":
        sentence = "Training was stopped by the clock, so it has no time to a quality; throughput is not speed-up."
        return finding(10, "STOPPED-BY-TIME", "warn", sentence, "stop.rule", claims)
    if report.quality.reached and not _went_on_after_target(report):
        return []
    unplanned = stop.planned_epochs.value is None and stop.rule is None
    if stop.clock and (stop.left_early or unplanned):
        wanted = stop.planned_epochs.value
        asked = f" of {plural(wanted, 'epoch')}" if wanted else ""
        done = f"after {significant(report.epochs.value)}{asked}" if report.epochs.value is not None else "early"
        sentence = (
            f"Training ended {done}, and its script can end it by the clock ({stop.clock}): it has no time to a "
            "quality, and throughput is not speed-up."
        )
        return finding(10, "STOPPED-BY-TIME", "warn", sentence, "stop.clock", claims)
    planned = stop.planned_epochs.value
    if stop.rule == "epochs" and stop.left_early and planned and stop.value.value not in (None, planned):
        sentence = (
            f"The run states that it ends after {significant(stop.value.value or 0)} epochs, but its script asked for "
            f"{significant(planned)} and left the loop."
        )
        return finding(10, "STOP-MISSTATED", "warn", sentence, "stop.value", claims)
    done_count = {"steps": report.steps.value, "epochs": report.epochs.value}.get(stop.rule or "")
    stated = stop.value.value
    if done_count is not None and stated is not None and abs(done_count - stated) > 0.01 * stated + 0.5:
        said = "The run states that it ends after" if stop.value.evidence == "assumed" else "The script asked for"
        sentence = f"{said} {significant(stated)} {stop.rule}, and it trained for {significant(done_count)}."
        return finding(10, "STOP-MISSTATED", "warn", sentence, "stop.value", claims)
    return []


def baseline_rerun(report: RunReport) -> list[RuleFinding]:
    """Rule 12: a published baseline was not run under the same conditions."""
    if report.baseline.source != "published":
        return []
    sentence = f"The baseline ({report.baseline.system or 'unnamed'}) is a published number and was not run here."
    return finding(12, "BASELINE-NOT-RERUN", "warn", sentence, "baseline.source", ("ranking",))


def same_as_one_device(report: RunReport) -> list[RuleFinding]:
    """Refuse a speed-up over one device when the ranks did not compute what one device computes.

    Warn when the two could not be compared.
    """
    verdict = report.verification
    if verdict is None or verdict.passed:
        return []
    if not verdict.comparable:
        sentence = f"Whether the ranks computed what one device computes is not known. {verdict.sentence}"
        return finding(0, "NOT-COMPARABLE", "warn", sentence, "verification", ("speedup", "efficiency", "ranking"))
    sentence = " ".join(
        filter(None, ("The ranks did not compute what one device computes.", verdict.sentence, verdict.cause))
    )
    return finding(
        0, "NOT-THE-SAME", "refuse", sentence, "verification", ("speedup", "efficiency", "quality", "ranking")
    )


def enough_cores(report: RunReport) -> list[RuleFinding]:
    """Warn when ranks share cores or accelerators: such a run shows that the program works, not how fast it is."""
    system, where = report.system, "system.cores_granted"
    ranks, places, noun = system.ranks.value or 1, system.cores_granted.value, "core"
    if system.device_kind != "cpu":
        places, noun, where = system.devices.value, "device", "system.devices"
    if places is None or ranks <= places:
        return []
    sentence = (
        f"{plural(ranks, 'rank')} took turns on {plural(places, noun)}: this shows that the program works, not how "
        "fast it is. No speed-up is computed from it."
    )
    return finding(0, "FUNCTION-NOT-SPEED", "warn", sentence, where, ("speedup", "efficiency"))


def undisturbed_cores(report: RunReport) -> list[RuleFinding]:
    """Warn when others had the cores for a part of the run, which lengthens the measured times unevenly."""
    stolen = {rank.host: rank.stolen.value or 0.0 for rank in report.ranks if (rank.stolen.value or 0) > STOLEN}
    findings = _disturbed("TIME-STOLEN", "went to other virtual machines", stolen)
    if (report.time.wall.value or 0) >= LONG_S and report.system.device_kind == "cpu":
        others = {rank.host: rank.others.value or 0.0 for rank in report.ranks if (rank.others.value or 0) > SHARED}
        findings += _disturbed("CORES-SHARED", "went to other programs", others)
    return findings


def _disturbed(code: str, where: str, shares: dict[str, float]) -> list[RuleFinding]:
    """Return a finding about the host that lost the largest share of its core time; none without a host."""
    if not shares:
        return []
    host = max(shares, key=lambda name: shares[name])
    sentence = (
        f"During the run, {number(shares[host], 'ratio')} of the core time of host {host} {where}, so its times are "
        "too long. Do not compare them with those of other runs; measure again when the machine is quiet."
    )
    return finding(0, code, "warn", sentence, "ranks", ("speedup", "efficiency", "ranking"))


def interruptions(report: RunReport) -> list[RuleFinding]:
    """Report resumes, repeated steps and skipped steps, which a reader of the curves must know about."""
    findings = []
    generations, again = report.time.generations.value or 1, report.time.repeated_steps.value or 0
    if generations > 1:
        redone = f"; {plural(again, 'repeated step')} count in the time, but only once in the curves" if again else ""
        where = f", {note}" if (note := report.time.generations.note) else ""
        sentence = f"The run was resumed {plural(generations - 1, 'time')}{where}{redone}. Downtime is not counted."
        findings += finding(0, "RESUMED", "note", sentence, "time.generations")
    if report.skipped_steps.value:
        sentence = (
            f"{plural(report.skipped_steps.value, 'step')} did not update the parameters, because the loss or "
            "gradients were not finite, or the loss was above the limit."
        )
        findings += finding(0, "SKIPPED-STEPS", "warn", sentence, "skipped_steps")
    return findings


def prediction_error(report: RunReport) -> list[RuleFinding]:
    """Note each prediction whose interval does not contain the measured value, and why, as far as it is known."""
    findings = []
    for check in report.checks:
        if check.within is False and check.error.value is not None:
            direction = "high" if check.error.value > 0 else "low"
            why = _why_slower(report) if check.name == "step time" else ""
            sentence = (
                f"The predicted {check.name} is {number(abs(check.error.value), 'ratio')} too {direction}, and the "
                f"measured value lies outside the predicted interval. {why or 'Why is not known.'} Run tutti probe on "
                "this machine before you trust this plan's comparison with others."
            )
            findings += finding(0, "PREDICTION-MISSED", "note", sentence, "checks")
    return findings


def _why_slower(report: RunReport) -> str:
    """Say which phase of a step the prediction missed by most, and what the run shows that explains it."""
    predicted, measured = report.predicted_phases, report.time.step_phases
    gaps = {
        phase: (measured[phase].value or 0.0) - (predicted[phase].value or 0.0)
        for phase in predicted
        if phase in measured
    }
    if not gaps or not any(gaps.values()):
        return ""
    phase = max(gaps, key=lambda name: abs(gaps[name]))
    before, after = duration(predicted[phase].value or 0.0), duration(measured[phase].value or 0.0)
    where = f"Most of the difference is in {PHASE_NAMES[phase]}: {before} predicted, {after} measured"
    stolen = max((rank.stolen.value or 0.0 for rank in report.ranks), default=0.0)
    ranks, cores = report.system.ranks.value or 1, report.system.cores_granted.value
    if gaps[phase] > 0 and stolen > STOLEN:
        return f"{where}; other virtual machines took {number(stolen, 'ratio')} of a host's core time."
    if gaps[phase] > 0 and cores is not None and ranks > cores and report.system.device_kind == "cpu":
        return f"{where}; {plural(ranks, 'rank')} shared {plural(cores, 'core')}."
    others = max((rank.others.value or 0.0 for rank in report.ranks), default=0.0)
    if gaps[phase] > 0 and others > BUSY:
        return f"{where}; other programs used {number(others, 'ratio')} of a host's cores, tutti's prediction included."
    if phase == "data" and gaps[phase] > 0:
        return f"{where}: steps waited for the loader, whose work a prediction knows only if `tutti plan` ran it."
    assumed = {link.tier for link in report.system.links if link.bandwidth.evidence in ("published", "assumed")}
    if phase == "exposed_communication" and assumed:
        return f"{where}; the links' numbers are not measured ({', '.join(sorted(assumed))})."
    return f"{where}. What made it differ is not known."


RULES: tuple[Rule, ...] = (
    target_missed,
    quality_on_held_out_data,
    best_of_epochs,
    stopped_on_test,
    validation_is_test,
    data_overlap,
    tuning_cost,
    baseline_hardware,
    whole_training,
    repeated_batches,
    repeated_samples,
    better_than_chance,
    breakdown_adds_up,
    data_source,
    honest_peak,
    recoverable,
    input_size,
    stopped_by_time,
    baseline_rerun,
    same_as_one_device,
    enough_cores,
    undisturbed_cores,
    interruptions,
    prediction_error,
)

_ORDER: dict[Severity, int] = {"refuse": 0, "warn": 1, "note": 2}


def check_run(report: RunReport) -> tuple[RuleFinding, ...]:
    """Return the findings of all rules about one run, the most severe first."""
    return by_severity([item for rule in RULES for item in rule(report)])


def by_severity(findings: list[RuleFinding]) -> tuple[RuleFinding, ...]:
    """Sort findings: refusals first, then warnings, then notes, each by rule number."""
    return tuple(sorted(findings, key=lambda item: (_ORDER[item.severity], item.rule)))


def eps_of(value: float, higher_is_better: bool) -> float:
    """Return the quality difference that counts as none.

    It is 0.005 for a quality between 0 and 1 of which more is better, and 0.5 % of the value otherwise.
    """
    return QUALITY_EPS if higher_is_better and 0 <= value <= 1 else QUALITY_EPS * abs(value)

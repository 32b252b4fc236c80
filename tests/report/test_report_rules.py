"""The twelve rules: published tables that mislead are refused, honest runs are left alone."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_folders import Story, rows, vary, write_run

from tutti.config import serialization
from tutti.config.run_folder import FRAMED, DataOrigin
from tutti.config.run_report import (
    BaselineReport,
    BatchReport,
    DataReport,
    FlopsReport,
    QualityReport,
    Quantity,
    RecipeReport,
    RuleFinding,
    RunReport,
    StopReport,
    SystemReport,
    TimeReport,
    TuningReport,
)
from tutti.reporting.build_report import build_report
from tutti.reporting.comparison import compare, pooled_std, tolerance
from tutti.reporting.honesty_rules import (
    better_than_chance,
    check_run,
    data_overlap,
    data_source,
    input_size,
    prediction_error,
    repeated_samples,
    stopped_by_time,
    target_missed,
    tuning_cost,
    undisturbed_cores,
    whole_training,
)
from tutti.reporting.html_report import report_html
from tutti.reporting.measurements import seen
from tutti.reporting.quality_metrics import parse_target
from tutti.reporting.rule_outcomes import outcomes_of


def published(value: float | None, unit: str = "") -> Quantity:
    return Quantity(unit=unit) if value is None else Quantity(value=value, unit=unit, evidence="published")


def published_row(
    name: str,
    *,
    device: str,
    devices: int,
    batch: int,
    quality: float,
    seconds: float,
    metric: str = "f1",
    config: str | None = None,
    **changes: Any,
) -> RunReport:
    """A line of a published table as a report: what the table does not say is null."""
    unknown = Quantity()
    row = RunReport(
        name=name, script="", command="", started_utc="", model="ResNet-50", parameters=unknown, status="completed",
        scope="train", headline="",
        quality=QualityReport(name="test", metric=metric, split="test", test_value=published(quality),
                              best_value=published(quality)),
        data=DataReport(name="", kind="", train_samples=unknown, train_sha256=None, hash_covers=""),
        time=TimeReport(wall=published(seconds, "s"), breakdown={}, accounted=unknown, per_step=unknown),
        throughput=unknown, steps=unknown, skipped_steps=unknown, epochs=unknown, samples_seen=unknown,
        device_seconds=published(devices * seconds, "device s"),
        system=SystemReport(device_model=device, device_kind="cuda", ranks=published(devices, "ranks"), hosts=unknown,
                            devices=published(devices, "devices"), cores_used=unknown),
        batch=BatchReport(global_size=published(batch, "samples"), local_size=unknown, micro_size=unknown,
                          num_microbatches=unknown),
        recipe=RecipeReport(optimizer="", lr=unknown, lr_rule=None, scheduler=None, clip_norm=unknown,
                            precision="full", seed=unknown, last_batch=""),
        plan=None, stop=StopReport(), config_sha256=config,
    )  # fmt: skip
    return replace(row, **changes)


# Sedona, IGARSS tutorial 2021: batch, GPUs, F1, seconds.
SEDONA = ((512, 8, 0.78, 49400), (8000, 128, 0.74, 3400), (16000, 128, 0.64, 2800), (32000, 128, 0.43, 2500))
# LAPENNA unit 11, 2022: device, count, seconds, top-1 in percent.
IMAGENET = (
    ("He 2016", "P100", 8, 256, 29 * 3600, 75.3),
    ("Goyal 2017", "P100", 256, 8192, 3600, 76.3),
    ("Akiba 2017", "P100", 1024, 32768, 900, 74.9),
    ("Jia 2018", "P40", 2048, 65536, 396, 75.8),
    ("Mikami 2018", "V100", 2176, 34816, 224, 75.03),
)


def test_sedona_rows_below_the_reference_quality_have_no_speedup() -> None:
    reports = [
        published_row(f"batch {batch}", device="K80", devices=gpus, batch=batch, quality=f1, seconds=seconds)
        for batch, gpus, f1, seconds in SEDONA
    ]
    comparison = compare(reports)
    for i in (1, 2, 3):
        codes = {finding.code for finding in comparison.findings if finding.run == i and finding.severity == "refuse"}
        assert "QUALITY-LOSS" in codes
        assert comparison.rows[i].speedup.value is None
        assert comparison.rows[i].efficiency.value is None
        assert "faster and worse is not faster" in comparison.rows[i].refusal
    assert comparison.scaling == "weak"
    more_than_linear = {f.run for f in comparison.findings if f.code == "MORE-THAN-LINEAR"}
    assert more_than_linear == {2, 3}  # the table's own efficiencies: 0.908, 1.103, 1.235


def test_imagenet_table_has_no_scaling_efficiency_and_no_ranking() -> None:
    reports = [
        published_row(name, device=device, devices=count, batch=batch, quality=top1, seconds=seconds, metric="accuracy")
        for name, device, count, batch, seconds, top1 in IMAGENET
    ]
    comparison = compare(reports)
    assert all(row.efficiency.value is None for row in comparison.rows)
    different = {f.run for f in comparison.findings if f.code == "DIFFERENT-HARDWARE"}
    assert different == {3, 4}
    assert any("ranking" in finding.refuses for finding in comparison.findings)


def with_peak(device: str, dtype: str, peak: float) -> RunReport:
    row = published_row("dgx", device=device, devices=8, batch=256, quality=0.76, seconds=100.0)
    peaks = {dtype: published(peak, "FLOP/s")}
    return replace(row, system=replace(row.system, peak_dense_flops=peaks))


@pytest.mark.parametrize(
    ("dtype", "peak", "refused"),
    [
        ("tf32", 2.5e15, True),  # DGX A100 "312 x 8": sparse, and of eight devices
        ("tf32", 312e12, True),  # one A100, 2:4 sparse
        ("tf32", 156e12, False),
        ("float16", 311.87e12, False),
        ("float16", 624e12, True),
        ("int8", 624e12, True),
    ],
)
def test_sparse_and_integer_peaks_are_no_denominators(dtype: str, peak: float, refused: bool) -> None:
    found = [f for f in check_run(with_peak("NVIDIA A100-SXM4-40GB", dtype, peak)) if f.rule == 7]
    assert bool(found) == refused
    assert all(f.severity == "refuse" and "rate" in f.refuses for f in found)


def test_sparse_flag_and_impossible_rates_are_refused() -> None:
    row = with_peak("A100", "tf32", 156e12)
    sparse = replace(row, flops=FlopsReport(sparsity="sparse"))
    assert "SPARSE-PEAK" in {f.code for f in check_run(sparse)}
    above = FlopsReport(rate=published(2e15, "FLOP/s"), peak=published(1.2e15, "FLOP/s"), dtype="tf32")
    assert "ABOVE-PEAK" in {f.code for f in check_run(replace(row, flops=above))}
    assert "NO-DTYPE" in {f.code for f in check_run(replace(row, flops=replace(above, dtype=None)))}


def codes(path: Path, story: Story, **options: Any) -> set[str]:
    return {finding.code for finding in build_report(write_run(path, story), **options).findings}


def test_an_honest_run_has_nothing_to_object_to(tmp_path: Path) -> None:
    assert codes(tmp_path / "run", Story()) == set()


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"overlap": 7}, "DATA-OVERLAP"),
        ({"evaluation": "train"}, "TRAIN-QUALITY"),
        ({"test_sha256": "a" * 64}, "TRAIN-QUALITY"),  # called test, but it is the training data
        ({"evaluation": "holdout"}, "UNNAMED-SPLIT"),
        ({"quality": (0.8, 0.97, 0.9, 0.9, 0.9)}, "BEST-OF-EPOCHS"),
        ({"kind": "TensorDataset"}, "DATA-IN-RAM"),
        ({"extra": {"data.start_state": "generated"}}, "SYNTHETIC-DATA"),
        ({"extra": {"stop.rule": "time", "stop.value": "60"}}, "STOPPED-BY-TIME"),
        ({"extra": {"tuning.device_seconds": "1e4"}}, "TUNING-COST"),
        ({"extra": {"data.native_shape": "1x4x4"}}, "INPUT-INFLATED"),
        ({"extra": {"baseline.source": "published"}}, "BASELINE-NOT-RERUN"),
        ({"world_size": 8, "extra": {"cores": "2"}}, "FUNCTION-NOT-SPEED"),
        ({"device": "cuda:0", "extra": {"shared_devices": "1"}}, "FUNCTION-NOT-SPEED"),
        ({"stolen": 0.12}, "TIME-STOLEN"),
        ({"status": "stopped"}, "PART-OF-A-TRAINING"),
        ({"slower": 3.0}, "PREDICTION-MISSED"),
    ],
)
def test_what_misleads_is_found(tmp_path: Path, changes: dict[str, Any], code: str) -> None:
    assert codes(tmp_path / "run", vary(Story(), **changes)) == {code}


def test_a_missed_target_is_said(tmp_path: Path) -> None:
    found = build_report(write_run(tmp_path / "run"), target=parse_target("accuracy=0.99")).findings
    assert [f.code for f in found] == ["QUALITY-LOSS"]
    assert "2 ranks" in found[0].sentence
    assert "0.9600 < target 0.9900" in found[0].sentence


def test_the_best_epoch_on_test_data_is_no_headline() -> None:
    row = published_row("x", device="V100", devices=1, batch=1, quality=0.9, seconds=1)
    chosen = replace(row, quality=replace(row.quality, selection="best"))
    assert ("BEST-OF-EPOCHS", "refuse") in {(f.code, f.severity) for f in check_run(chosen)}


def pair(path: Path, second: Story, first: Story | None = None, target: str | None = None) -> Any:
    wanted = parse_target(target) if target else None
    stories = (first or Story(name="one", world_size=1, slower=1.8), second)
    return compare([build_report(write_run(path / str(i), s), target=wanted) for i, s in enumerate(stories)])


def test_a_fair_pair_has_a_speedup_and_an_efficiency(tmp_path: Path) -> None:
    comparison = pair(tmp_path, Story(name="two"))
    one, two = (run.time.wall.value for run in comparison.runs)
    assert comparison.rows[1].refusal == ""
    assert comparison.rows[1].speedup.value == pytest.approx(one / two)
    assert comparison.rows[1].efficiency.value == pytest.approx(one / two / 2)
    assert comparison.scaling == "strong"
    assert {d.name for d in comparison.differences} == {"ranks", "cores used", "script"}


def test_what_sums_go_through_is_told(tmp_path: Path) -> None:
    off = "process group (TUTTI_SHARED_MEMORY=off)"
    comparison = pair(tmp_path, Story(name="two", sums=("process group", off)), Story(name="one"))
    (told,) = (d for d in comparison.differences if d.name == "gradients are reduced through")
    assert told.values == ("shared memory", f"process group + {off}")
    assert told.values[1] in report_html(comparison.runs[1])


def test_what_computes_attention_is_told(tmp_path: Path) -> None:
    story = Story(name="two")
    noted = [{"kind": "attention", "time_s": 0.0, "step": 0, "engines": engines} for engines in ("tiles", "flash")]
    folders = [tmp_path / "plain", tmp_path / "context"]
    for folder, extra in zip(folders, ([], noted), strict=True):
        write_run(folder, story, metrics=[*rows(story)[:1], *extra, *rows(story)[1:]])
    comparison = compare([build_report(folder) for folder in folders])
    (told,) = (d for d in comparison.differences if d.name == "attention over mesh.context")
    assert told.values == ("none", "flash")
    assert "attention over mesh.context" in report_html(comparison.runs[1])
    assert "attention over mesh.context" not in report_html(comparison.runs[0])


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"quality": (0.5, 0.6, 0.7, 0.8, 0.9)}, "QUALITY-LOSS"),
        ({"device_model": "Another CPU"}, "DIFFERENT-HARDWARE"),
        ({"precision": "bfloat16"}, "DIFFERENT-RECIPE"),
        ({"batch": 128}, "DIFFERENT-WORK"),
        ({"extra": {"scaling": "strong"}, "batch": 128}, "NOT-STRONG"),
        ({"epochs": 4}, "DIFFERENT-WORK"),
        ({"extra": {"stop.rule": "time"}}, "STOPPED-BY-TIME"),
        ({"world_size": 4, "extra": {"cores": "2"}}, "FUNCTION-NOT-SPEED"),
        ({"test_sha256": "e" * 64}, "DIFFERENT-TEST-DATA"),
    ],
)
def test_an_unfair_pair_has_none(tmp_path: Path, changes: dict[str, Any], code: str) -> None:
    comparison = pair(tmp_path, vary(Story(name="two"), **changes))
    assert code in {finding.code for finding in comparison.findings}
    assert comparison.rows[1].speedup.value is None
    assert comparison.rows[1].refusal


def test_no_efficiency_from_equal_cores(tmp_path: Path) -> None:
    """One rank with two threads and two ranks with one use the same cores."""
    comparison = pair(tmp_path, Story(name="two"), Story(name="one", world_size=1, threads=2, slower=1.2))
    assert comparison.rows[1].speedup.value is not None
    assert comparison.rows[1].efficiency.value is None


def test_seeds_are_repeats_of_one_configuration(tmp_path: Path) -> None:
    comparison = pair(tmp_path, Story(name="two", seed=3))
    assert comparison.rows[1].refusal == ""


def test_better_quality_needs_a_target_for_a_speedup(tmp_path: Path) -> None:
    better = Story(name="two", quality=(0.8, 0.93, 0.95, 0.97, 0.98))
    assert "set a target" in pair(tmp_path / "a", better).rows[1].refusal
    comparison = pair(tmp_path / "b", better, target="test.accuracy=0.93")
    times = [run.to_target.time.value for run in comparison.runs]
    assert comparison.rows[1].speedup.value == pytest.approx(times[0] / times[1])
    assert "the target" in comparison.headline


def test_epochs_that_grow_with_the_batch_are_said(tmp_path: Path) -> None:
    slow = Story(name="two", batch=128, world_size=2, quality=(0.5, 0.6, 0.7, 0.93, 0.96))
    found = {f.code: f for f in pair(tmp_path, slow, target="test.accuracy=0.93").findings}
    assert "3.0 to 4.0" in found["EPOCHS-GROW"].sentence


def test_tuning_effort_must_be_alike(tmp_path: Path) -> None:
    stories = [vary(Story(name=str(n), world_size=w), extra={"tuning.trials": str(n)}) for n, w in ((10, 1), (100, 2))]
    found = {f.code for f in pair(tmp_path, stories[1], stories[0]).findings}
    assert "TUNING-COST" in found


def test_a_baseline_and_a_tuning_of_nothing_are_unknown() -> None:
    assert BaselineReport().source is None
    assert TuningReport().trials.value is None


@given(st.lists(st.lists(st.floats(-10, 10), min_size=1, max_size=5), min_size=1, max_size=4), st.floats(-5, 5))
def test_pooled_std_ignores_the_level_of_each_group(groups: list[list[float]], shift: float) -> None:
    moved = [[value + shift * i for value in group] for i, group in enumerate(groups)]
    assert pooled_std(moved) == pytest.approx(pooled_std(groups), abs=1e-9)


def test_pooled_std_by_hand() -> None:
    # variances 2/1 (n=2) and 1 (n=3): sqrt((1*2 + 2*1) / 3)
    assert pooled_std([[1.0, 3.0], [1.0, 2.0, 3.0], [7.0]]) == pytest.approx((4 / 3) ** 0.5)
    assert pooled_std([[1.0], [2.0]]) == 0.0


def test_repeats_widen_the_tolerance() -> None:
    def row(quality: float, devices: int) -> RunReport:
        return published_row("x", device="V100", devices=devices, batch=64, quality=quality, seconds=1, config="c" * 64)

    single = tolerance([row(0.9, 1), row(0.93, 2)])
    pair = tolerance([row(0.9, 1), row(0.93, 1)])  # two are no measure of their spread
    repeated = tolerance([row(value, 1) for value in (0.900, 0.904, 0.908)])
    one_failed = tolerance([row(value, 1) for value in (0.90, 0.90, 0.10)])
    assert single == pair == pytest.approx(0.005)
    assert repeated == pytest.approx(0.008)
    assert one_failed == pytest.approx(0.02)


def test_a_missed_prediction_says_where_it_was_off_and_whether_it_knows_why(tmp_path: Path) -> None:
    report = build_report(write_run(tmp_path / "run", Story(slower=3.0)))
    (missed,) = [item.sentence for item in report.findings if item.code == "PREDICTION-MISSED"]
    assert "Most of the difference is in" in missed
    assert "What made it differ is not known." in missed
    ranks = tuple(replace(rank, others=seen(0.4, "ratio")) for rank in report.ranks)
    (busy,) = prediction_error(replace(report, ranks=ranks))
    assert "other programs used 40 % of a host's cores" in busy.sentence
    ranks = tuple(replace(rank, stolen=seen(0.3, "ratio")) for rank in report.ranks)
    (stolen,) = prediction_error(replace(report, ranks=ranks))
    assert "took 30 % of a host's core time" in stolen.sentence


def test_a_model_that_is_always_right_is_better_than_chance_on_unequal_classes(tmp_path: Path) -> None:
    report = build_report(write_run(tmp_path / "run"))
    report = replace(report, data=replace(report.data, majority=seen(0.97, "ratio")))
    quality = replace(report.quality, metric="accuracy", test_value=seen(1.0), eval_samples=seen(100, "samples"))
    assert not better_than_chance(replace(report, quality=quality))
    assert better_than_chance(replace(report, quality=replace(quality, test_value=seen(0.975))))
    balanced = replace(quality, metric="balanced_accuracy", test_value=seen(0.81))  # constant answers reach 0.5
    assert not better_than_chance(replace(report, quality=balanced))


def data_of(report: RunReport, **changes: Any) -> RunReport:
    return replace(report, data=replace(report.data, **changes))


def codes_of(findings: list[RuleFinding]) -> list[tuple[str, str]]:
    return [(item.code, item.severity) for item in findings]


def test_numbers_of_a_table_may_be_transformed_to_look_random(tmp_path: Path) -> None:
    report = build_report(write_run(tmp_path / "run"))
    random = {
        "start_state": "generated",
        "found_state": "generated",
        "state_reason": "inputs cannot be told from x",
    }
    (table,) = data_source(data_of(report, input_shape="30", **random))
    assert "state data.start_state" in table.sentence
    assert codes_of(data_source(data_of(report, input_shape="30", **random | {"start_state": "ram"}))) == [
        ("DATA-IN-RAM", "warn")
    ]
    image = data_of(report, input_shape="3×32×32", **random | {"start_state": "ram"})
    assert codes_of(data_source(image)) == [("DATA-MISSTATED", "refuse")]


def test_a_chance_repeat_and_oversampling_refuse_nothing(tmp_path: Path) -> None:
    report = build_report(write_run(tmp_path / "run"))
    few, many = (data_of(report, train_test_overlap=seen(count, "samples")) for count in (1, 40))
    assert codes_of(data_overlap(few)) == [("DATA-OVERLAP", "warn")]
    assert codes_of(data_overlap(many)) == [("DATA-OVERLAP", "refuse")]
    assert codes_of(repeated_samples(data_of(report, distinct=seen(0.7, "ratio")))) == [("SAME-SAMPLES", "note")]
    assert codes_of(repeated_samples(data_of(report, distinct=seen(0.5, "ratio")))) == [("SAME-SAMPLES", "warn")]


def test_a_target_that_was_lost_again_is_said(tmp_path: Path) -> None:
    report = build_report(write_run(tmp_path / "run"), target=parse_target("test.accuracy=0.5"))
    assert not target_missed(report)
    lost = replace(report, quality=replace(report.quality, test_value=seen(0.1)))
    assert codes_of(target_missed(lost)) == [("QUALITY-LOST", "warn")]


def test_a_clock_ends_a_training_that_had_reached_a_low_target(tmp_path: Path) -> None:
    report = build_report(write_run(tmp_path / "run"), target=parse_target("test.accuracy=0.1"))
    stop = replace(report.stop, rule=None, clock="line 9", left_early=True, planned_epochs=seen(1000, "epochs"))
    assert codes_of(stopped_by_time(replace(report, stop=stop))) == [("STOPPED-BY-TIME", "warn")]
    at_once = replace(report.to_target, samples=report.samples_seen)
    assert not stopped_by_time(replace(report, stop=stop, to_target=at_once))


def test_steps_after_those_of_another_run_are_a_part_of_a_training(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    assert not whole_training(build_report(folder))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    start = next((line for line in lines if line["kind"] == "start"), None)
    if start is None:
        lines.insert(0, start := {"kind": "start", "time_s": 0.0})
    start["resumed_at_step"] = 20
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = build_report(folder)
    assert codes_of(whole_training(report)) == [("CONTINUED", "warn")]
    assert "after the 20 of another run" in report.headline


def test_test_data_that_was_validated_on_is_not_held_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    first = next(number for number, line in enumerate(lines) if line["kind"] == "evaluate")
    lines.insert(first, lines[first] | {"name": "validation"})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = build_report(folder)
    assert ("TEST-USED-BEFORE", "warn") in codes_of(report.findings)
    assert "also that of validation" in next(item.sentence for item in report.findings if item.rule == 2)


def test_what_is_evaluated_of_a_data_set_is_not_left_out_of_training(tmp_path: Path) -> None:
    """Of 1,000 samples 400 train and 250 test: more than half of what may train does."""
    folder = write_run(tmp_path / "run")
    header = json.loads((folder / "run.json").read_text())
    origin = serialization.to_data(DataOrigin(chosen_from=1000))
    header["data"] |= {"origin": origin, "samples": 400}
    (folder / "run.json").write_text(json.dumps(header))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for part in ({}, {"origin": origin, "samples": 250}):
        for line in lines:
            if line["kind"] == "evaluate":
                line["data"] |= part
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        report = build_report(folder)
        assert report.data.chosen_from.value == (750 if part else 1000)
        assert codes_of(whole_training(report)) == ([] if part else [("PART-OF-THE-DATA", "warn")])


def test_a_loop_that_the_ranks_agreed_to_leave_says_why(tmp_path: Path) -> None:
    report = build_report(write_run(tmp_path / "run"))
    stop = replace(report.stop, left_early=True, planned_epochs=seen(50, "epochs"), rule=None)
    assert codes_of(whole_training(replace(report, stop=stop))) == [("PART-OF-THE-DATA", "warn")]
    said = replace(stop, early_reason="job.should_stop was true")
    assert not whole_training(replace(report, stop=said))


def test_a_border_is_asked_about_and_not_called_enlarged(tmp_path: Path) -> None:
    report = build_report(write_run(tmp_path / "run"))
    framed = {"input_shape": "1×64×64", "found_shape": "1×35×35", "shape_reason": FRAMED}
    (asked,) = input_size(data_of(report, native_shape="1×35×35", **framed))
    assert (asked.code, asked.severity) == ("INPUT-BORDER", "note")
    assert outcomes_of(data_of(report, native_shape="1×35×35", **framed), [asked])[8].outcome == "unstated"
    stated = data_of(report, native_shape="1x64x64", **framed)
    assert not input_size(stated)
    assert outcomes_of(stated, [])[8].outcome == "kept"


def test_cores_shared_with_other_programs_are_said_of_long_runs(tmp_path: Path) -> None:
    report = build_report(write_run(tmp_path / "run", Story(slower=60.0)))
    shared = replace(report, ranks=tuple(replace(rank, others=seen(0.4, "ratio")) for rank in report.ranks))
    assert [item.code for item in undisturbed_cores(shared)] == ["CORES-SHARED"]
    assert not undisturbed_cores(report)
    assert not undisturbed_cores(replace(shared, time=replace(shared.time, wall=seen(5.0, "s"))))


def test_a_number_of_epochs_that_the_script_did_not_ask_for_is_misstated(tmp_path: Path) -> None:
    report = build_report(write_run(tmp_path / "run"))
    stop = StopReport(rule="epochs", value=seen(5, "epochs"), planned_epochs=seen(1000, "epochs"), left_early=True)
    (misstated,) = stopped_by_time(replace(report, stop=stop))
    assert misstated.code == "STOP-MISSTATED"
    assert not stopped_by_time(replace(report, stop=replace(stop, planned_epochs=seen(5, "epochs"), left_early=False)))


def test_other_seeds_beside_a_run_are_told(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        write_run(tmp_path / f"seed-{seed}", Story(seed=seed))
    report = build_report(tmp_path / "seed-2")
    assert report.tuning.found_seeds.value == 2
    assert codes_of(tuning_cost(report)) == [("SEEDS", "note")]


def test_this_runs_settings_are_one_of_those_tried(tmp_path: Path) -> None:
    report = build_report(write_run(tmp_path / "run"))
    tuning = replace(report.tuning, trials=seen(1), found_trials=seen(1), device_seconds=seen(1.0, "device s"))
    hidden = tuning_cost(replace(report, tuning=tuning))
    assert {item.code for item in hidden} == {"TUNING-HIDDEN", "TUNING-COST"}
    counted = tuning_cost(replace(report, tuning=replace(tuning, trials=seen(2))))
    assert {item.code for item in counted} == {"TUNING-COST"}

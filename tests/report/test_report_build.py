"""The report of a written run folder says exactly what was written into it."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from run_folders import STEP_S, Story, rows, write_lines, write_run

from tutti.config import serialization
from tutti.config.prediction import AllocatorMemory, Estimate, Prediction
from tutti.config.run_report import Quantity, RunReport
from tutti.config.verdict import Cause, TensorDifference, Verdict
from tutti.errors import ReportError, SpecError
from tutti.reporting.build_report import build_report
from tutti.reporting.quality_metrics import parse_target
from tutti.reporting.report_files import write_report

TARGET = parse_target("test.accuracy=0.93")


def test_a_known_run_gives_its_known_numbers(tmp_path: Path) -> None:
    report = build_report(write_run(tmp_path / "run"), target=TARGET)
    # 100 steps of STEP_S (the first ten times as long), 5 evaluations of 0.05 s, a checkpoint of 0.02 s
    wall = 109 * STEP_S + 5 * 0.05 + 0.02
    assert report.time.wall.value == pytest.approx(wall)
    assert report.time.per_step.value == pytest.approx(STEP_S)
    assert report.time.breakdown["forward"].value == pytest.approx(109 * 0.003)
    assert report.time.breakdown["evaluation"].value == pytest.approx(0.25)
    assert report.time.breakdown["other"].value == pytest.approx(109 * 0.0005 + 0.02)
    assert report.throughput.value == pytest.approx(64 / STEP_S)
    assert report.quality.test_value.value == 0.96
    assert (report.quality.name, report.quality.metric, report.quality.split) == ("test", "accuracy", "test")
    assert report.quality.eval_every_samples.value == 20 * 64
    assert report.samples_seen.value == 6400
    assert report.epochs.value == 5
    assert report.device_seconds.value == pytest.approx(2 * wall)
    assert report.batch.local_size.value == 32
    assert report.memory_peak.value == 200_000_000
    assert report.sent_per_step.value == 9098 * 4  # ring of two: 2 (P-1)/P n bytes
    assert report.flops.model_per_sample.value == 3e6
    assert report.flops.peak_fraction.value == pytest.approx(3e6 * 64 / STEP_S / 1e11)
    assert (report.stop.rule, report.stop.value.value, report.scope) == ("epochs", 5, "train")
    assert "test accuracy 0.9600" in report.headline
    assert "2 ranks" in report.headline


def test_a_size_of_buckets_that_was_chosen_by_measurement_is_in_the_plan(tmp_path: Path) -> None:
    story = Story()
    row = {"kind": "buckets", "time_s": 0.5, "step": 43, "chosen_mib": 0.5, "step_s": {"25": 0.02, "0.5": 0.01}}
    folder = write_run(tmp_path / "run", story)
    write_lines(folder / "metrics.jsonl", [*rows(story), row])
    assert "buckets of 0.5 MiB (the fastest of 2 sizes)" in str(build_report(folder).plan)
    assert str(build_report(folder).plan).startswith("replicate (data parallel) 2")


def test_target_is_reached_at_the_first_evaluation_beyond_it(tmp_path: Path) -> None:
    report = build_report(write_run(tmp_path / "run"), target=TARGET)
    assert report.quality.reached is True
    assert report.to_target.steps.value == 60
    assert report.to_target.epochs.value == 3
    assert report.to_target.samples.value == 3840
    assert report.to_target.time.value == pytest.approx(69 * STEP_S + 3 * 0.05)
    missed = build_report(tmp_path / "run", target=parse_target("test.accuracy=0.99"))
    assert missed.quality.reached is False
    assert missed.to_target.time.value is None
    low = build_report(tmp_path / "run", target=parse_target("test.loss<=0.3"))
    assert low.quality.higher_is_better is False
    assert low.to_target.steps.value == 60  # 2.2 * (1 - 0.93) + 0.1 = 0.254


def test_predictions_stand_beside_measurements_with_their_error(tmp_path: Path) -> None:
    checks = {check.name: check for check in build_report(write_run(tmp_path / "run")).checks}
    assert checks["step time"].error.value == pytest.approx((0.0095 - STEP_S) / STEP_S)
    assert checks["step time"].within is True
    assert checks["bytes sent by a rank in a step"].error.value == 0
    assert checks["peak memory of a rank"].predicted.evidence == "predicted"
    assert checks["peak memory of a rank"].measured.evidence == "measured"


def test_memory_on_a_gpu_is_compared_with_what_torch_allocates(tmp_path: Path) -> None:
    """A run on a GPU measures allocated memory, without the CUDA context."""
    folder = write_run(tmp_path / "run")
    file = folder / "prediction.json"
    before = serialization.loads(Prediction, file.read_text())
    allocated, reserved = (Estimate(value=value, low=0.9 * value, high=1.1 * value) for value in (2e6, 3e6))
    allocator = AllocatorMemory(allocated=allocated, reserved=reserved, context_nbytes=1e9)
    file.write_text(serialization.dumps(replace(before, allocator=allocator)))
    checks = {check.name: check for check in build_report(folder).checks}
    assert checks["peak memory of a rank"].predicted.value == 2e6


@pytest.mark.parametrize("lost_s", [0.0, 0.5])
def test_breakdown_adds_up_or_the_report_refuses_it(tmp_path: Path, lost_s: float) -> None:
    report = build_report(write_run(tmp_path / "run", Story(lost_s=lost_s)))
    total = sum(quantity.value or 0 for quantity in report.time.breakdown.values())
    wall = report.time.wall.value or 0
    refused = [finding for finding in report.findings if finding.code == "BREAKDOWN-GAP"]
    assert (abs(total - wall) <= 0.02 * wall) == (not refused)
    assert bool(refused) == bool(lost_s)
    assert all(finding.severity == "refuse" for finding in refused)


def test_every_number_has_its_evidence(tmp_path: Path) -> None:
    story = Story(extra={"tuning.trials": "12", "tuning.device_seconds": "400", "cores": "4"})
    data = serialization.to_data(build_report(write_run(tmp_path / "run", story), target=TARGET))
    identifiers = {"version", "rank", "rule", "run"}

    def bare(value: Any, path: str, known: bool) -> list[str]:
        if isinstance(value, dict):
            known = known or value.get("evidence") is not None
            pairs = value.items()
        elif isinstance(value, list):
            pairs = enumerate(value)
        else:
            number = isinstance(value, int | float) and not isinstance(value, bool)
            return [path] if number and not known and path.rpartition(".")[2] not in identifiers else []
        return [found for key, item in pairs for found in bare(item, f"{path}.{key}", known)]

    assert bare(data, "", False) == []
    assert data["tuning"]["trials"]["evidence"] == "assumed"


def test_a_number_without_evidence_cannot_be_made() -> None:
    with pytest.raises(SpecError, match="evidence"):
        Quantity(value=1.0, unit="s")
    with pytest.raises(SpecError, match="evidence"):
        Quantity(evidence="measured")
    with pytest.raises(SpecError, match="null"):
        Quantity(value=math.nan, evidence="measured")


def test_report_round_trips_and_is_the_same_in_a_copied_folder(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    report = write_report(folder)
    text = (folder / "report" / "report.json").read_text()
    assert "NaN" not in text
    assert serialization.loads(RunReport, text) == report
    elsewhere = tmp_path / "far" / "away"
    shutil.copytree(folder, elsewhere, ignore=shutil.ignore_patterns("report"))
    write_report(elsewhere)
    for name in ("report.json", "report.txt", "report.html"):
        assert (elsewhere / "report" / name).read_bytes() == (folder / "report" / name).read_bytes()


def test_a_torn_last_line_is_left_out_and_said(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", metrics=rows(Story())[:50])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 51, "lo')
    report = build_report(folder)
    assert report.status == "unfinished"
    assert report.scope == "epoch"
    assert [finding.code for finding in report.findings if finding.rule == 0] == ["UNREADABLE-PART"]
    assert report.steps.value == 45  # 50 rows: a start, 2 evaluations, 2 epochs


def test_slow_first_steps_are_not_the_step_time(tmp_path: Path) -> None:
    lines = rows(Story(epochs=1, steps_per_epoch=5))
    steps = [row for row in lines if row["kind"] == "step"]
    for row, factor in zip(steps, (10, 10, 1, 2, 3), strict=True):
        row["wall_s"] = STEP_S * factor
    report = build_report(write_run(tmp_path / "run", metrics=lines))
    assert report.time.per_step.value == pytest.approx(2 * STEP_S)
    assert report.time.per_step.note == "median of 3 steady steps of 5; the first 2 are left out"


def test_the_step_time_says_that_short_batches_are_left_out(tmp_path: Path) -> None:
    lines = rows(Story(epochs=1, steps_per_epoch=6))
    last = [row for row in lines if row["kind"] == "step"][-1]
    last["samples"] //= 2
    note = build_report(write_run(tmp_path / "run", metrics=lines)).time.per_step.note
    assert note.endswith("3 steady steps of 6; the first 2 are left out, as are 1 with a short batch or skipped")


@pytest.mark.parametrize("restarted_clock", [False, True])
@pytest.mark.parametrize("glued", [False, True])
def test_a_resumed_run_is_one_run(tmp_path: Path, restarted_clock: bool, glued: bool) -> None:
    """Killed after step 45, resumed from the checkpoint at step 40: curves have each step once, time counts both."""
    whole = [row for row in rows(Story()) if row["kind"] != "start"]
    first = [row for row in whole if row.get("step", 999) <= 45 and row["kind"] != "memory"]
    at = next(row["time_s"] for row in whole if row.get("step") == 40 and row["kind"] == "epoch")
    shift = -at if restarted_clock else first[-1]["time_s"] - at
    again = [{**row, "time_s": row["time_s"] + shift} for row in whole if row.get("step", 999) > 40]
    start = {"kind": "start", "time_s": 0.0, "resumed_at_step": 0, "startup_s": {"import": 1.0}}
    folder = write_run(tmp_path / "run", metrics=[])
    text = "".join(json.dumps(row) + "\n" for row in [start, *first])
    text += '{"kind": "step", "st' if glued else ""
    text += "".join(json.dumps(row) + "\n" for row in [{**start, "resumed_at_step": 40}, *again])
    (folder / "metrics.jsonl").write_text(text)
    report = build_report(folder)
    lost = 5 * STEP_S
    loss = next(curve for curve in report.curves if curve.name == "training loss")
    assert loss.steps == tuple(range(1, 101))
    assert list(loss.time_s) == sorted(loss.time_s)
    assert report.time.repeated_steps.value == 5
    assert report.time.generations.value == 2
    assert report.time.wall.value == pytest.approx(109 * STEP_S + 0.25 + 0.02 + lost)
    assert report.time.accounted.value == pytest.approx(1.0)
    assert report.samples_seen.value == 6400
    assert "RESUMED" in {finding.code for finding in report.findings}
    assert report.time.startup["import"].value == 2.0


def test_skipped_steps_and_losses_that_are_not_finite_leave_no_nan(tmp_path: Path) -> None:
    lines = rows(Story())
    for row in lines:
        if row.get("step") in (30, 31) and row["kind"] == "step":
            row.update(loss=math.nan, skipped=True)
    folder = write_run(tmp_path / "run", metrics=lines)
    report = build_report(folder)
    assert report.skipped_steps.value == 2
    loss = next(curve for curve in report.curves if curve.name == "training loss")
    assert not {30, 31} & set(loss.steps)
    assert "NaN" not in serialization.dumps(report)


def test_steps_that_were_skipped_and_roll_backs_are_told(tmp_path: Path) -> None:
    story = Story()
    told = [
        {"kind": "skipped", "time_s": 0.5, "step": 43, "sentence": "step 43 is skipped: the loss is NaN"},
        {"kind": "rolled_back", "time_s": 0.5, "step": 43, "sentence": "after step 43, the model is rolled back"},
        *({"kind": "skipped", "time_s": 0.6, "step": n, "sentence": f"step {n} is skipped"} for n in range(50, 75)),
    ]
    folder = write_run(tmp_path / "run", story)
    write_lines(folder / "metrics.jsonl", [*rows(story), *told])
    sentences = [finding.sentence for finding in build_report(folder).findings]
    assert "Step 43 is skipped: the loss is NaN." in sentences
    assert "After step 43, the model is rolled back." in sentences
    assert "6 more are in metrics.jsonl, as rows of kind 'skipped'." in sentences


def test_a_failed_run_names_the_rank_that_caused_it(tmp_path: Path) -> None:
    lines = [row for row in rows(Story(status=None)) if row.get("step", 0) <= 10]
    folder = write_run(tmp_path / "run", metrics=lines)
    base = {"host": "node0", "exit_code": 1, "traceback": ""}
    peer = {**base, "rank": 0, "time_s": 5.0, "kind": "peer", "message": "rank 1 is gone"}
    cause = {**base, "rank": 1, "time_s": 6.0, "kind": "exception", "message": "KeyError: 'x'"}
    write_lines(folder / "ranks/0/error.json", [peer])
    write_lines(folder / "ranks/1/error.json", [cause])
    report = build_report(folder)
    assert report.status == "failed"
    assert report.failures[0].rank == 1
    assert "rank 1 on node0: KeyError" in report.headline
    assert "KERNEL-ONLY" in {finding.code for finding in report.findings}


def test_a_run_without_plan_cluster_model_prediction_says_not_recorded(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", complete=False)
    report = write_report(folder)
    assert report.checks == ()
    assert report.flops.rate.value is None
    assert report.plan is None
    assert "not recorded" in (folder / "report/report.html").read_text()


@pytest.mark.parametrize("passed", [True, False])
def test_the_verdict_of_verify_is_told(tmp_path: Path, passed: bool) -> None:
    largest = TensorDifference(stage="parameter", step=3, module="conv", tensor="weight", relative_difference=2e-7)
    cause = Cause(kind="mean", sentence="Gradients were summed.", remedy="Divide by the samples.")
    verdict = Verdict(passed=passed, sentence="About equal.", script="x.py", world_size=2, steps=3,
                      arithmetic="float32", tolerance=1e-5, largest=largest,
                      cause=None if passed else cause)  # fmt: skip
    folder = write_run(tmp_path / "run")
    serialization.save(verdict, folder / "verify.json")
    report = write_report(folder)
    assert report.verification is not None
    assert report.verification.largest == Quantity(value=2e-7, evidence="measured", note="over all compared tensors")
    assert [f.code for f in report.findings] == ([] if passed else ["NOT-THE-SAME"])
    page = (folder / "report/report.html").read_text()
    assert ("Verified against one device" in page) is passed
    assert ("Divide by the samples." in page) is not passed


def test_a_verdict_that_could_not_compare_is_a_warning(tmp_path: Path) -> None:
    verdict = Verdict(passed=False, comparable=False, sentence="NOT COMPARABLE: draws differ.", script="x.py",
                      world_size=2, steps=1, arithmetic="float64", tolerance=1e-8)  # fmt: skip
    folder = write_run(tmp_path / "run")
    serialization.save(verdict, folder / "verify.json")
    report = write_report(folder)
    assert [(f.code, f.severity) for f in report.findings] == [("NOT-COMPARABLE", "warn")]
    page = (folder / "report/report.html").read_text()
    assert "Not comparable with one device" in page
    assert "Verification failed" not in page


def test_long_curves_are_thinned_by_means(tmp_path: Path) -> None:
    story = Story(steps_per_epoch=300)
    report = build_report(write_run(tmp_path / "run", story))
    loss = next(curve for curve in report.curves if curve.name == "training loss")
    recorded = [row["loss"] for row in rows(story) if row["kind"] == "step"]
    assert len(loss.values) == 500
    assert loss.values[0] == pytest.approx(sum(recorded[:3]) / 3)
    assert "mean of 3" in loss.note


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path / "nowhere", "not a folder"),
        (lambda path: path, "no run.json"),
        (lambda path: _broken_header(path), "run.json"),
        (lambda path: write_run(path / "empty", metrics=[]), "no metrics"),
    ],
)
def test_a_bad_folder_is_one_clear_sentence(tmp_path: Path, make: Any, words: str) -> None:
    with pytest.raises(ReportError, match=words):
        build_report(make(tmp_path))


def _broken_header(path: Path) -> Path:
    (path / "run.json").write_text('{"name": 3}')
    return path


def test_a_broken_optional_file_is_a_note_not_an_end(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "prediction.json").write_text("{")
    report = build_report(folder)
    assert report.checks == ()
    assert any("prediction.json" in finding.sentence for finding in report.findings)

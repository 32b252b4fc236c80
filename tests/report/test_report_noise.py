"""The noise scale in a report, and what a run says about other batches."""

import json
from pathlib import Path

import pytest

from planner.machines import cards
from planner.test_cli_search import ask, chosen
from report.run_folders import Story, write_run
from tutti.config import serialization
from tutti.errors import PlanError, ReportError
from tutti.planner import NoiseScale
from tutti.planner.plan_request import samples_to_quality
from tutti.reporting.build_report import build_report
from tutti.reporting.html_report import boxes
from tutti.reporting.quality_metrics import parse_target, samples_at_small_batches
from tutti.reporting.run_records import read_records
from tutti.reporting.terminal_report import as_text, report_table


def with_noise(path: Path, scale: float | None, every: int = 10) -> Path:
    """A run of 100 steps of 64 samples, whose rows of every tenth step have a measurement; 128 in the later half."""
    folder = write_run(path, Story())
    metrics = folder / "metrics.jsonl"
    lines = []
    for line in metrics.read_text().splitlines():
        row = json.loads(line)
        if row["kind"] == "step" and row["step"] % every == 0:
            row["noise_scale"] = scale
            late = row["step"] > 50  # the first half is louder, and not used
            squares = {60: 0.3, 70: 0.7, 80: 0.5, 90: 0.6, 100: 0.4}  # 0.5 in the mean
            square = -0.1 if scale is None else squares[row["step"]] if late else 9.0
            row["noise"] = {"step": row["step"] - 1, "square": square, "variance": 64.0 if late else 1.0}
        lines.append(json.dumps(row))
    metrics.write_text("\n".join(lines) + "\n")
    return folder


def test_the_report_says_the_critical_batch_and_that_it_was_measured(tmp_path: Path) -> None:
    report = build_report(with_noise(tmp_path, 128.0))
    assert report.noise is not None
    assert report.noise.critical_batch.value == pytest.approx(128.0)
    assert report.noise.critical_batch.evidence == "measured"
    assert report.noise.critical_batch.unit == "samples"
    assert report.noise.measured.value == 10
    shown = as_text(report_table(report))
    assert "critical batch" in shown
    assert "128 samples (measured)" in shown
    recipe = dict(dict(boxes(report))["Recipe"])
    assert recipe["critical batch"] == report.noise.critical_batch


def test_a_run_without_measurements_says_nothing(tmp_path: Path) -> None:
    folder = write_run(tmp_path, Story())
    report = build_report(folder)
    assert report.noise is None
    assert "critical batch" not in dict(dict(boxes(report))["Recipe"])
    with pytest.raises(ReportError, match="noise_every"):
        samples_at_small_batches(read_records(folder), None)


def test_least_samples_follow_from_the_steps_to_the_quality(tmp_path: Path) -> None:
    """0.93 after 60 steps of 64 samples: 3,840 = E_min (1 + 64 / 128)."""
    records = read_records(with_noise(tmp_path, 128.0))
    critical, least = samples_at_small_batches(records, parse_target("test.accuracy=0.93"))
    assert critical == pytest.approx(128.0)
    assert least == pytest.approx(3840 / 1.5)
    noise = NoiseScale(critical_batch=critical, least_samples=least, evidence="measured")
    assert samples_to_quality(64, noise) == pytest.approx(3840)
    assert samples_at_small_batches(records, None)[1] == pytest.approx(6400 / 1.5)
    with pytest.raises(ReportError, match="did not reach"):
        samples_at_small_batches(records, parse_target("test.accuracy=0.99"))


def test_a_scale_that_does_not_stand_out_is_not_used(tmp_path: Path) -> None:
    folder = with_noise(tmp_path, None)
    report = build_report(folder)
    assert report.noise is not None
    assert report.noise.critical_batch.value is None
    with pytest.raises(ReportError, match="no measured noise scale"):
        samples_at_small_batches(read_records(folder), None)


@pytest.mark.long
def test_the_planner_takes_it(tmp_path: Path) -> None:
    cluster = serialization.save(cards(2, 4), tmp_path / "machines.json")
    run = with_noise(tmp_path / "run", 128.0)
    options = ("--objective", "time-to-quality", "--noise-from", str(run), "--target-quality", "test.accuracy=0.93")
    choice = chosen(ask(str(cluster), "--json", *options))
    noise = choice.request.noise
    assert noise is not None
    assert (noise.critical_batch, noise.least_samples) == pytest.approx((128.0, 2560.0))
    assert noise.evidence == "measured"
    assert choice.totals is not None
    assert choice.totals.evidence == "measured"
    assert "a run's measured noise scale" in ask(str(cluster), *options).stdout
    with pytest.raises(PlanError, match=r"its batch counts samples, but the plan.s counts tokens"):
        ask(str(cluster), *options, "--unit", "tokens")
    with pytest.raises(PlanError, match="leave --critical-batch and --least-samples out"):
        ask(str(cluster), *options, "--critical-batch", "64")
    with pytest.raises(PlanError, match="--noise-from"):
        ask(str(cluster), "--target-quality", "test.accuracy=0.93")

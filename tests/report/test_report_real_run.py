"""A report of a run that really happened: what the runtime writes is what the report reads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tutti.config import serialization
from tutti.config.run_report import RunReport
from tutti.reporting.report_files import write_report

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "digits_tutti.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sklearn", reason="the example's data are scikit-learn's")
    path = tmp_path_factory.mktemp("real") / "digits"
    environment = {**os.environ, "TUTTI_RUN_FOLDER": str(path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLE), "--epochs", "2"]
    done = subprocess.run(command, env=environment, cwd=path.parent, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return path


def test_a_real_run_is_reported_whole(folder: Path) -> None:
    report = write_report(folder)
    assert report.status == "completed"
    assert report.scope == "train"
    assert report.steps.value == 46  # 1437 samples in batches of 64: 23 steps an epoch
    assert report.samples_seen.value == 2 * 1437
    assert report.epochs.value == 2
    assert report.quality.split == "test"
    assert report.quality.eval_samples.value == 360
    assert 0 < (report.quality.test_value.value or 0) <= 1
    assert report.data.train_test_overlap.value == 0
    assert report.data.test_sha256 != report.data.train_sha256
    assert report.sent_per_step.value == 0  # one rank sends nothing
    assert report.memory_peak.value
    assert serialization.load(RunReport, folder / "report" / "report.json") == report


def test_the_breakdown_of_a_real_run_adds_up_to_its_wall_time(folder: Path) -> None:
    report = write_report(folder)
    parts = [quantity.value or 0 for quantity in report.time.breakdown.values()]
    assert sum(parts) == pytest.approx(report.time.wall.value, rel=0.02)
    assert report.time.accounted.value == pytest.approx(1, abs=0.02)
    assert not [finding for finding in report.findings if finding.severity == "refuse"]
    for phase in ("forward", "backward", "optimizer", "evaluation"):
        assert (report.time.breakdown[phase].value or 0) > 0

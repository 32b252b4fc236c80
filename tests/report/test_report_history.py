"""The history of predictions: errors over run folders, by cluster, and what had none."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from run_folders import Story, cluster, write_run
from test_report_html import stands_alone

from tutti.cli.report import command
from tutti.config import serialization
from tutti.config.run_folder import RunFolder
from tutti.config.several_runs import PredictionHistory
from tutti.errors import ReportError
from tutti.reporting.prediction_history import build_history, history_html, prediction_accuracy, run_folders

# run_folders predicts 9.5 ms (8 to 12) for steps of 10.5 ms


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    write_run(folder / "good")
    write_run(folder / "slow", Story(name="slow", slower=2.0))
    write_run(folder / "bare", complete=False)
    (folder / "empty").mkdir()
    serialization.save(replace(cluster(), name="there"), RunFolder(folder / "slow").cluster)
    return folder


def test_errors_are_those_of_the_steady_steps(runs: Path) -> None:
    history = build_history(run_folders([runs]))
    assert [entry.name for entry in history.entries] == ["digits", "slow"]
    good, slow = history.entries
    assert good.step_error.value == pytest.approx(9.5 / 10.5 - 1)
    assert slow.step_error.value == pytest.approx(9.5 / 21 - 1)
    assert (good.within, slow.within) == (True, False)
    assert good.predicted_step.evidence == "predicted"
    assert good.measured_step.evidence == "measured"
    assert good.memory_error.value == pytest.approx((20e6 + 4 * 36_392 + 160e6) / 200e6 - 1, abs=0.2)
    assert history.left_out == ("bare: it has no prediction",)


def test_trust_is_told_for_all_and_by_cluster(runs: Path) -> None:
    history = build_history(run_folders([runs]))
    whole, *by_cluster = history.trust
    assert [trust.cluster for trust in by_cluster] == ["here", "there"]
    errors = [9.5 / 10.5 - 1, 9.5 / 21 - 1]
    assert whole.bias.value == pytest.approx(sum(errors) / 2)
    assert whole.median.value == pytest.approx(-sum(errors) / 2)
    assert whole.ninetieth.value is None  # of two runs
    assert [trust.within for trust in (whole, *by_cluster)] == [1, 1, 0]
    assert "2 runs: steps took longer than predicted (median error −32 %)" in whole.sentence
    assert "1 of 2 were in the predicted interval" in whole.sentence
    assert "1 run on there" in by_cluster[1].sentence


def test_of_many_runs_nine_of_ten_are_told(runs: Path) -> None:
    entries = build_history([runs / "good"]).entries * 6
    trust = prediction_accuracy(entries, "")
    assert trust.ninetieth.value == pytest.approx(1 - 9.5 / 10.5)
    assert "nine of ten errors are at most" in trust.sentence


def test_the_page_stands_alone(runs: Path) -> None:
    text = history_html(build_history(run_folders([runs])))
    assert stands_alone(text).count["svg"] == 2  # for wide and narrow screens
    assert text.count(">predicted</span>") >= 2
    assert "No run here was both predicted and measured" in history_html(build_history([runs / "bare"]))


def test_the_command_prints_writes_and_refuses(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(command, ["--history", "--output", "seen"])
    assert "in the predicted interval" in " ".join(shown.stdout.split())
    assert {path.name for path in Path("seen").iterdir()} == {"history.json", "history.html", "history.txt"}
    document = CliRunner().invoke(command, ["--history", "--json", str(runs)])
    assert serialization.from_data(PredictionHistory, json.loads(document.stdout)).trust[0].runs == 2
    for arguments, words in ((["--history", "gone"], "is not a folder"), ([], "no run was named"),
                             (["--history", "runs/empty"], "no run folder")):  # fmt: skip
        refused = CliRunner().invoke(command, arguments).exception
        assert isinstance(refused, ReportError)
        assert words in str(refused)

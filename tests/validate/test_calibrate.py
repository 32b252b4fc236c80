"""`tutti calibrate`: from run folders to a new cluster that predicts them."""

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from report.run_folders import STEP_S, Story, cluster, write_run
from tutti.cli.calibrate import command
from tutti.commands.calibrate import calibrated
from tutti.config import serialization
from tutti.config.cluster import ClusterSpec
from tutti.config.model import ModelSpec
from tutti.config.plan import Plan
from tutti.cost_model import predict
from tutti.errors import ReportError

WORK_S = STEP_S - 0.001  # without the wait for data, which is not predicted


def test_the_new_cluster_predicts_the_run_and_says_from_what_it_is(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Story(slower=40.0))
    output = tmp_path / "fitted.json"
    done = CliRunner().invoke(command, [str(run), "--output", str(output)])
    assert done.exit_code == 0, done.output
    fitted = serialization.load(ClusterSpec, output)
    before = serialization.load(ClusterSpec, run / "cluster.json")
    assert before == cluster()
    model, plan = serialization.load(ModelSpec, run / "model.json"), serialization.load(Plan, run / "plan.json")
    wrong = abs(predict(model, before, plan).step_time_s.value / (40 * WORK_S) - 1)
    right = abs(predict(model, fitted, plan).step_time_s.value / (40 * WORK_S) - 1)
    assert right < 0.1 < wrong
    assert all("fitted to 1 runs" in device.source for device in fitted.devices.values())
    assert fitted.conditions is not None
    assert fitted.conditions.versions["torch"] == "2.13.0"
    assert "fitted at" in fitted.conditions.notes[-1]


def test_a_folder_of_runs_is_taken_whole(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name, Story(slower=20.0))
    write_run(tmp_path / "c", Story(), complete=False)  # without a model: left out
    _, fit = calibrated((tmp_path,), None)
    assert fit.rows == 2
    assert fit.after < fit.before


def test_runs_that_contradict_each_other_are_named_so(tmp_path: Path) -> None:
    for name, slower in (("quiet", 1.0), ("disturbed", 300.0)):
        write_run(tmp_path / name, Story(slower=slower))
    done = CliRunner().invoke(command, [str(tmp_path)])
    assert done.exit_code == 0
    assert "contradict each other" in done.stderr


def test_runs_that_say_nothing_are_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "bare", complete=False)
    with pytest.raises(ReportError, match="no run has"):
        calibrated((tmp_path / "bare",), None)


def test_a_given_cluster_of_other_devices_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Story(slower=2.0))
    own = cluster()
    again = replace(own, name="measured again")
    fitted, fit = calibrated((run,), serialization.save(again, tmp_path / "again.json"))
    assert (fitted.name, fit.rows) == ("measured again", 1)
    key, device = next(iter(own.devices.items()))
    for change in ({"kind": "cuda"}, {"name": "another card"}):
        other = replace(own, devices={**own.devices, key: replace(device, **change)})
        with pytest.raises(ReportError, match=r"run ran on '.*' \(cpu\), but .* has .*; name the machines"):
            calibrated((run,), serialization.save(other, tmp_path / "other.json"))


def test_a_run_whose_model_was_not_traced_tells_nothing_of_the_machine(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    model = serialization.load(ModelSpec, run / "model.json")
    serialization.save(replace(model, untraced="the loss function f could not be traced"), run / "model.json")
    with pytest.raises(ReportError, match="no run has"):
        calibrated((run,), None)

"""Launchers are found by name, and a package outside tutti can add one."""

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import CliRunner
from launch_rig import SCRIPTS

from tutti.cli.run import command
from tutti.config import serialization
from tutti.config.plan import Plan
from tutti.config.run_folder import RunFolder
from tutti.errors import LaunchError
from tutti.launch import launch_environment, launcher_registry
from tutti.launch.launcher import LaunchSpec, RankError
from tutti.launch.launcher_registry import LAUNCHERS, launcher_for, launcher_names, register_launcher
from tutti.launch.local_launcher import LocalLauncher
from tutti.launch.rank_main import rank_command

STARTED: list[int] = []
"""The ranks that `ToyLauncher` has started."""


class ToyHandle:
    """Ranks that are plain subprocesses."""

    def __init__(self, processes: dict[int, subprocess.Popen[bytes]]) -> None:
        self._processes = processes

    def wait(self, timeout_s: float) -> dict[int, int]:
        for process in self._processes.values():
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                break
        codes = {rank: process.poll() for rank, process in self._processes.items()}
        return {rank: code for rank, code in codes.items() if code is not None}

    def stop(self, grace_s: float, hurry: Callable[[], bool] = lambda: False) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()


class ToyLauncher:
    """Starts each rank as a process of its own, with the variables that every rank reads."""

    def start(self, spec: LaunchSpec) -> ToyHandle:
        STARTED.extend(spec.ranks)
        shared = launch_environment.of_node(spec, Path(tempfile.mkdtemp()))
        return ToyHandle(
            {
                rank: subprocess.Popen(
                    rank_command(spec), env={**os.environ, **shared, **launch_environment.of_rank(rank, local_rank)}
                )
                for local_rank, rank in enumerate(spec.ranks)
            }
        )


@pytest.fixture(autouse=True)
def launchers_as_before() -> Iterator[None]:
    before = dict(LAUNCHERS)
    yield
    LAUNCHERS.clear()
    LAUNCHERS.update(before)


def test_a_launcher_from_outside_runs_a_script_of_two_ranks(tmp_path: Path) -> None:
    register_launcher("toy", ToyLauncher)
    folder = tmp_path / "run"
    arguments = ["--on", "toy", "--nproc", "2", "--no-predict", "--folder", str(folder), str(SCRIPTS / "train.py")]
    outcome = CliRunner().invoke(command, [*arguments, "1", "0"])
    assert outcome.exit_code == 0, outcome.output
    assert sorted(STARTED) == [0, 1]
    assert serialization.load(Plan, RunFolder(folder).plan).world_size == 2


def test_a_failure_under_a_launcher_from_outside_names_its_rank(tmp_path: Path) -> None:
    register_launcher("toy", ToyLauncher)
    script, folder = tmp_path / "fails.py", tmp_path / "run"
    script.write_text(
        "import os, sys, time\n"
        "print('output of rank', os.environ['RANK'])\n"
        "if os.environ['RANK'] == '1':\n"
        "    raise KeyError('no such column')\n"
        "time.sleep(60)\n"
    )
    arguments = ["--on", "toy", "--nproc", "2", "--no-predict", "--folder", str(folder), str(script)]
    outcome = CliRunner().invoke(command, arguments, standalone_mode=False)
    shown = outcome.output + str(outcome.exception or "")
    assert outcome.return_value == 1 or outcome.exit_code == 1, shown
    record = serialization.load(RankError, RunFolder(folder).rank(1) / "error.json")
    assert (record.rank, record.kind) == (1, "exception")
    assert "KeyError: 'no such column'" in record.message
    assert "output of rank 0" in (RunFolder(folder).rank(0) / "stdout.log").read_text()


def test_a_module_runs_under_a_launcher_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register_launcher("toy", ToyLauncher)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    script = "import sys\nprint('module', __name__, __package__, *sys.argv[1:])\n"
    (tmp_path / "package" / "train.py").write_text(script)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    arguments = ["--on", "toy", "--nproc", "1", "--no-predict", "--folder", str(folder), "-m", "package.train", "word"]
    outcome = CliRunner().invoke(command, arguments)
    assert "without preparing a tutti.Job" in outcome.output, outcome.output
    assert (RunFolder(folder).rank(0) / "stdout.log").read_text() == "module __main__ package word\n"


def test_a_module_is_started_as_a_module(tmp_path: Path) -> None:
    spec = LaunchSpec(target="package.train", arguments=("-m", "x"), is_module=True, folder=tmp_path)
    assert rank_command(spec)[1:] == ["-m", "tutti.launch.rank_main", "-m", "package.train", "-m", "x"]


def test_local_is_the_launcher_of_this_machine() -> None:
    assert isinstance(launcher_for("local"), LocalLauncher)


def test_an_installed_package_offers_a_launcher_by_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = metadata.EntryPoint("toy", f"{__name__}:ToyLauncher", launcher_registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(launcher_registry, "_entry_points", lambda: metadata.EntryPoints([entry]))
    assert launcher_names() == ["local", "toy"]
    assert type(launcher_for("toy")).__name__ == "ToyLauncher"


def test_an_entry_point_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = metadata.EntryPoint("toy", "no_such_package:Toy", launcher_registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(launcher_registry, "_entry_points", lambda: metadata.EntryPoints([entry]))
    with pytest.raises(LaunchError, match="cannot be loaded from no_such_package:Toy"):
        launcher_for("toy")


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(LaunchError, match="did you mean 'local'"):
        launcher_for("locl")


def test_an_unknown_name_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = CliRunner().invoke(command, ["--on", "kube", str(SCRIPTS / "train.py")])
    assert isinstance(outcome.exception, LaunchError)
    assert outcome.output == ""
    assert not list(tmp_path.iterdir())


def test_a_name_is_registered_once() -> None:
    register_launcher("toy", ToyLauncher)
    register_launcher("toy", ToyLauncher)
    with pytest.raises(LaunchError, match="already"):
        register_launcher("toy", LocalLauncher)

"""Runs go on from checkpoints in the nodes' memory after the loss of a rank or a node, and leave nothing there."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch_rig import SCRIPTS, TUTTI, Finished, free_port, running, tutti_run, wait_until
from test_restarts_multirank import batches, difference, starts

from tutti.errors import LaunchError
from tutti.launch.launch_environment import memory_root
from tutti.launch.memory_folder import memory_folder

RECOVER = str(SCRIPTS / "recover.py")
PLANS = {
    "shard": ("--mesh", "shard=2", "--shard", "level=3"),
    "stage": ("--mesh", "stage=2"),
    "split": ("--mesh", "split=2"),
    "local": ("--sync", "local:3"),
}


def recovered(folder: Path, *arguments: str, memory: Path | None = None) -> Finished:
    folder.mkdir(exist_ok=True)
    options, script = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    environment = {} if memory is None else {"TUTTI_MEMORY_FOLDER": str(memory)}
    done = tutti_run(folder, "--nproc", "2", *options, RECOVER, *script, environment=environment)
    assert done.code == 0, done.err
    return done


@pytest.fixture(autouse=True)
def _nothing_stays_in_memory() -> Iterator[None]:
    before = {*memory_root().glob("tutti-*")}
    yield
    assert wait_until(lambda: {*memory_root().glob("tutti-*")} <= before, 10), "a folder stays in memory"


@pytest.fixture
def small_memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory that has room for one checkpoint of the script, and not for two."""
    folder = tmp_path / "memory"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting needs root")
    yield folder
    assert not [*folder.iterdir()]
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize("plan", ["shard", *(pytest.param(name, marks=pytest.mark.long) for name in [*PLANS][1:])])
def test_a_divided_state_goes_on_from_memory_bit_for_bit(plan: str, tmp_path: Path) -> None:
    recovered(tmp_path / "one", *PLANS[plan], "--", "0")
    options = (*PLANS[plan], "--max-restarts", "3", "--memory-checkpoint-every", "8")
    done = recovered(tmp_path / "two", *options, "--", "0", "kill@15:1", "spoil@23:0")
    assert "restart 1 of 3: 2 ranks go on from memory (step 8)" in done.err
    assert "tutti: resumed from memory (step 8)" in done.err
    assert "restart 2 of 3: 2 ranks go on from memory (step 16)" in done.err
    assert re.search(
        r"resumed from memory \(step 8\); passed over memory \(step 16\): rank-00000\.safetensors: "
        r"the values of .* are not those that were saved",
        done.err,
    ), done.err
    assert starts(tmp_path / "two") == [0, 8, 8]
    assert batches(tmp_path / "two") == batches(tmp_path / "one")
    assert difference(tmp_path / "one", tmp_path / "two") == 0
    report = json.loads((tmp_path / "two/run/report/report.json").read_text())
    assert report["steps"]["value"] == 30
    assert "was resumed 2 times, from memory (step 8, 8)" in json.dumps(report)
    checkpoints = sorted(path.name for path in (tmp_path / "two/run/checkpoints").iterdir())
    assert checkpoints == ["step-00000030"], "the run folder has its own checkpoints alone"


def test_a_full_memory_keeps_the_earlier_checkpoint_and_training_goes_on(tmp_path: Path, small_memory: Path) -> None:
    options = (*PLANS["shard"], "--max-restarts", "1", "--memory-checkpoint-every", "8")
    done = recovered(tmp_path / "two", *options, "--", "0", "kill@29:1", memory=small_memory)
    assert done.err.count("checkpoint in memory of step") == 2, "each generation says it once"
    assert re.search(r"checkpoint in memory of step 16 could not be written to .*No space left on device", done.err)
    assert "newest: step-00000008). Enlarge" in done.err
    assert "go on from memory (step 8)" in done.err
    assert starts(tmp_path / "two") == [0, 8]


@pytest.mark.long
def test_a_lost_node_s_files_come_from_the_copies_on_another_node(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    mesh = ("--mesh", "shard=4", "--shard", "level=3")
    plain = tutti_run(tmp_path / "one", "--nproc", "4", *mesh, RECOVER, "0")
    assert plain.code == 0, plain.err
    folder, meet = tmp_path / "two", f"127.0.0.1:{free_port()}"
    folder.mkdir()
    first, second = (
        (
            *TUTTI, "run", "--no-predict", "--nnodes", "2", "--node-rank", str(number), "--nproc", "2", *mesh,
            "--rendezvous", meet, "--timeout", "60", "--folder", "run", "--max-restarts", "3", "--on-failure", "shrink",
            "--memory-checkpoint-every", "6", RECOVER, "0", "pause@11:0",
        )
        for number in (0, 1)
    )  # fmt: skip
    with running(*first, cwd=folder) as leader, running(*second, cwd=folder) as lost:
        assert wait_until(lambda: (folder / "faults").exists(), 90)
        os.kill(lost.process.pid, signal.SIGKILL)
        lost.assert_nothing_left()
        (folder / "go-11").touch()
        code, _, err = leader.finish()
        assert code == 0, err
        leader.assert_nothing_left()
    assert re.search(r"node 1 \(.*\) is lost: .*\n?.*restart 1 of 3: 2 ranks go on from memory \(step 6\)", err), err
    assert "tutti: resumed from memory (step 6)" in err
    assert starts(folder) == [0, 6]
    assert batches(folder) == batches(tmp_path / "one"), "no sample is lost, and none counted twice"
    assert 0 < difference(folder, tmp_path / "one") <= 1e-12


HOLDS = """
import time
from tutti.launch.memory_folder import memory_folder
with memory_folder(True) as variables:
    print(variables["TUTTI_MEMORY_CHECKPOINTS"], flush=True)
    time.sleep(60)
"""


def test_the_folder_goes_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        folder = Path(launcher.stdout.readline().strip())
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "checkpoints").mkdir()
        launcher.kill()
    assert wait_until(lambda: not folder.exists(), 10)


def test_a_relative_folder_is_the_same_for_ranks_that_change_theirs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "memory").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TUTTI_MEMORY_FOLDER", "memory")
    with memory_folder(True) as variables:
        assert Path(variables["TUTTI_MEMORY_CHECKPOINTS"]).parent == tmp_path / "memory"
    assert not [*(tmp_path / "memory").iterdir()]


TWO_JOBS = """
import torch, tutti
from torch import nn
for seed in range(2):
    job = tutti.Job(global_batch_size=4, seed=seed)
    model = nn.Linear(2, 1)
    data = torch.utils.data.TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
    model, _, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data, nn.functional.mse_loss)
    for _ in job.epochs(1):
        for batch in loader:
            job.step(batch)
"""


@pytest.mark.long
def test_a_second_job_goes_without_checkpoints_in_memory(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(TWO_JOBS)
    options = ("--nproc", "2", "--memory-checkpoint-every", "1", "--max-restarts", "1")
    done = tutti_run(tmp_path, *options, "two.py")
    assert done.code == 0, done.err
    assert done.err.count("checkpoints in memory are of the script's first Job alone") == 1, done.err


def test_a_folder_that_cannot_be_used_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TUTTI_MEMORY_FOLDER", str(tmp_path / "none"))
    with pytest.raises(LaunchError, match=r"needs a folder in memory, and .* cannot be used"), memory_folder(True):
        pass

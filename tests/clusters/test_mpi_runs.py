"""Runs by a real mpirun over real sshd's: nodes train, are followed, stopped, resumed, killed, looked at and refused."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from clusters.command_rig import started, state, tutti
from clusters.ssh_rig import SshHosts, missing_for_ssh
from launch.launch_rig import SCRIPTS, wait_until
from tutti.clusters.driver_job import read_state


def missing_for_mpi() -> str | None:
    """Why mpirun cannot be used here, or None."""
    return missing_for_ssh() or ("mpirun is not installed" if shutil.which("mpirun") is None else None)


pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing_for_mpi() is not None, reason=str(missing_for_mpi()))]

OPTIONS = ("--no-predict", "--timeout", "60")

ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


class MpiProject:
    """A folder with a script and a tutti.toml, and commands in it."""

    def __init__(self, folder: Path, hosts: SshHosts) -> None:
        self.folder, self.hosts = folder, hosts
        self.cluster = {"XDG_STATE_HOME": str(folder / "state"), **ROOT}
        folder.mkdir()
        shutil.copy(SCRIPTS / "train.py", folder)
        self.write("")

    def write(self, settings: str, hosts: str = "alpha:1,beta:2") -> None:
        agent = f"options = [\"--mca plm_rsh_args '-F {self.hosts.config}'\"]"
        (self.folder / "tutti.toml").write_text(f'[run]\non = "mpi"\n[mpi]\nhosts = "{hosts}"\n{agent}\n{settings}\n')

    def tutti(self, *words: str, timeout_s: float = 100) -> tuple[int, str, str]:
        return tutti(self.folder, self.cluster, *words, timeout_s=timeout_s)

    def log(self, run: str = "run") -> str:
        file = self.folder / run / "mpi.log"
        return file.read_text() if file.exists() else ""

    def rows(self, kind: str, run: str = "run") -> list[dict[str, object]]:
        file = self.folder / run / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [row for row in map(json.loads, lines) if row["kind"] == kind]

    def reaches_step(self, step: int) -> bool:
        return wait_until(lambda: any(int(str(row["step"])) >= step for row in self.rows("step")), 100)

    def submit(self, *words: str) -> psutil.Process:
        """Submit a run and return its driver."""
        code, out, err = self.tutti("submit", "--json", *OPTIONS, "--folder", "run", *words)
        assert code == 0, err + self.log()
        return psutil.Process(int(json.loads(out)["job"].partition("-")[0]))

    def assert_nothing_left(self, timeout_s: float = 10) -> None:
        assert wait_until(lambda: not self.hosts.processes(), timeout_s), self.hosts.processes()


@pytest.fixture
def project(tmp_path: Path, hosts: SshHosts) -> Iterator[MpiProject]:
    made = MpiProject(tmp_path / "my project", hosts)
    yield made
    made.assert_nothing_left(30)


def test_two_nodes_of_unequal_ranks_train_and_are_found(project: MpiProject) -> None:
    project.write('setup = ["export MARK=\'a b\'", "export PAIR=$MARK"]\nenv = ["GIVEN=c d"]')
    (project.folder / "train.py").write_text(
        (SCRIPTS / "train.py").read_text()
        + "\nimport os\nprint('mark', os.environ['PAIR'], os.environ['GIVEN'], 'PMIX_RANK' in os.environ, flush=True)\n"
    )
    code, out, err = project.tutti("run", *OPTIONS, "--folder", "my run", "train.py", "2", "0")
    assert code == 0, err + project.log("my run")
    assert out == "epoch 0 of 3 ranks\nepoch 1 of 3 ranks\nmark a b c d False\n", err
    run = project.folder / "my run"
    assert json.loads((run / "run.json").read_text())["world_size"] == 3
    found = state(project.folder, project.cluster, "my run")
    assert (found["state"], found["step"]) == ("completed", 8)
    assert not list(run.glob(".tutti-*"))

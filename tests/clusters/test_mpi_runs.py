"""Runs by a real mpirun over real sshd's: nodes train, are followed, stopped, resumed, killed and refused."""

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
from launch.launch_rig import SCRIPTS, TUTTI, wait_until
from tutti.clusters.driver_job import DRIVERS


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
        listed = f'hosts = "{hosts}"\n' if hosts else ""
        agent = f"options = [\"--mca plm_rsh_args '-F {self.hosts.config}'\"]"
        (self.folder / "tutti.toml").write_text(f'[run]\non = "mpi"\n[mpi]\n{listed}{agent}\n{settings}\n')

    def tutti(self, *words: str, timeout_s: float = 300) -> tuple[int, str, str]:
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


@pytest.mark.long
def test_stopped_with_a_checkpoint_left_alone_resumed_and_failed(project: MpiProject) -> None:
    begun = ("run", *OPTIONS, "--nproc", "1,1", "--folder", "run", "train.py", "100", "0.2")
    project.write("", "alpha,beta")
    with started(project.folder, project.cluster, *begun) as command:
        assert project.reaches_step(2), project.log()
        command.send_signal(signal.SIGINT)
        _, err = command.communicate(timeout=60)
    assert command.returncode == 0
    assert "the job goes on; `tutti attach run`" in err
    assert state(project.folder, project.cluster, "run")["state"] == "running"
    secrets = {psutil.Process(pid).environ().get("TUTTI_SECRET") for pid in project.hosts.processes()} - {None}
    assert len(secrets) == 1
    words = [word for process in psutil.process_iter(["cmdline"]) for word in process.info["cmdline"] or ()]
    assert not any(str(secret) in word for secret in secrets for word in words), "it is on no command line"
    code, _, err = project.tutti("cancel", "--checkpoint", "run")
    assert code == 0, err
    code, _, err = project.tutti("attach", "run")
    assert code == 75, err
    (last,) = (row["step"] for row in project.rows("step")[-1:])
    again = ("run", *OPTIONS, "--nproc", "1,1", "--resume", "run", "train.py")
    code, _, err = project.tutti(*again, str(int(str(last)) // 4 + 1), "0")
    assert code == 0, err + project.log()
    assert [row["resumed_at_step"] for row in project.rows("start")] == [0, last]
    bad = "\nimport os\nif os.environ['RANK'] == '1': raise KeyError('no column')\n"
    (project.folder / "bad.py").write_text((SCRIPTS / "train.py").read_text() + bad)
    code, _, err = project.tutti("run", *OPTIONS, "--nproc", "1", "--folder", "bad", "bad.py", "1", "0")
    assert code == 1
    assert "KeyError: 'no column'" in err
    assert "rank 1 on" in str(state(project.folder, project.cluster, "bad")["reason"])


@pytest.mark.long
@pytest.mark.parametrize("killed", ["driver", "mpirun", "node"])
def test_everything_ends_when_a_part_is_killed(project: MpiProject, killed: str) -> None:
    project.write("", "alpha,beta")
    driver = project.submit("--nproc", "1", "--checkpoint-every", "2", "train.py", "100", "0.2")
    assert project.reaches_step(3), project.log()
    (mpirun,) = [child for child in driver.children() if child.name() == "mpirun"]
    nodes = [pid for pid in project.hosts.processes() if "tutti.clusters.mpi_node" in psutil.Process(pid).cmdline()]
    assert len(nodes) == 2
    os.kill({"driver": driver.pid, "mpirun": mpirun.pid, "node": nodes[0]}[killed], signal.SIGKILL)
    project.assert_nothing_left(40)
    assert wait_until(lambda: not psutil.pid_exists(mpirun.pid), 10)
    assert wait_until(lambda: state(project.folder, project.cluster, "run")["state"] == "failed", 40)
    reason = str(state(project.folder, project.cluster, "run")["reason"])
    said = {
        "driver": "its driver on this machine was killed",
        "mpirun": "was ended from outside (mpirun: it said nothing",
        "node": "exited on signal 9 (Killed)",
    }
    assert said[killed] in reason, reason


@pytest.mark.long
def test_the_doctor_and_the_probe_run_on_nodes_of_mpi(project: MpiProject) -> None:
    project.write("", "alpha,beta")
    code, out, err = project.tutti("doctor", "--on", "mpi", "--nnodes", "2", "--nproc", "1")
    assert code == 0, out + err
    assert out.count("nothing would stop a launch here") == 2, "each node says so"
    assert "links" in out
    file = project.folder / "two nodes.json"
    words = ("--nodes", "2", "--nproc", "1", "--quick", "--no-plot", "--output", str(file))
    code, out, err = project.tutti("probe", "--on", "mpi", *words)
    assert code == 0, out + err
    assert json.loads(file.read_text())["nodes"]


def refused(project: MpiProject, *words: str, cluster: dict[str, str] | None = None) -> str:
    """Submit a run that is refused, and return the sentence."""
    code, _, err = tutti(
        project.folder, project.cluster | (cluster or {}), "submit", *OPTIONS, "--folder", "run", *words, "train.py"
    )
    assert code == 2, err
    assert len(err.splitlines()) == 1, "one sentence"
    assert not (project.folder / "run/job.json").exists()
    return err


@pytest.mark.long
def test_what_mpirun_says_is_said_in_words(project: MpiProject, tmp_path: Path) -> None:
    project.write("", "alpha,gamma")
    assert "the name of a host is not known (ssh: Could not resolve hostname gamma" in refused(project, "--nproc", "1")
    project.write("", "")
    assert "mpirun knows fewer nodes than 2; ask for an allocation" in refused(project, "--nnodes", "2", "--nproc", "1")
    project.write("python = '/no/python'", "alpha")
    assert "there is no /no/python on vm; name Python" in refused(project, "--nproc", "1").replace(os.uname()[1], "vm")
    project.write("setup = ['true', 'module load cuda']", "alpha")
    assert "setup line 2 failed on" in refused(project, "--nproc", "1")
    project.write("", "alpha")
    if os.geteuid() == 0:
        words = refused(project, "--nproc", "1", cluster=dict.fromkeys(ROOT, "0"))
        assert "Open MPI refuses to run as root; submit as another user, or, if root is meant, export" in words
    elsewhere = project.hosts.disk / tmp_path.name  # another folder on each host
    words = refused(project, "--nproc", "1", "--folder", str(elsewhere))
    assert f"does not see the run folder {elsewhere}" in words
    shutil.rmtree(elsewhere)
    program = tmp_path / "mpirun"
    program.write_text("#!/bin/sh\necho 'HYDRA build details:'\n")
    program.chmod(0o755)
    assert "is MPICH's, which passes its input to one process only" in refused(
        project, "--request", f"mpirun={program}"
    )
    assert "there is no nompi here; load MPI's module" in refused(project, "--request", "mpirun=nompi")
    assert "--nnodes 3 is more than the 1 hosts" in refused(project, "--nnodes", "3", "--nproc", "1")
    assert DRIVERS.read("none") is None


def test_nodes_come_from_the_allocation_or_a_file(project: MpiProject) -> None:
    file = project.folder / "nodes"
    file.write_text("n0\nn0\nn1\n")  # as PBS writes it

    def shown(cluster: dict[str, str], *words: str) -> str:
        code, out, err = tutti(project.folder, project.cluster | cluster, "submit", "--dry-run", *words, "train.py")
        assert code == 0, err
        return out

    out = shown({}, "--hosts", "nodes")
    assert "--host n0 -n 1" in out
    assert "--nproc 2,1 --nnodes 2 --node-rank NODE" in out
    project.write("", "")
    assert "--map-by ppr:1:node -n 2" in shown({"PBS_NODEFILE": str(file)}, "--nproc", "4")
    assert "-n 3" in shown({"LSB_MCPU_HOSTS": "a 4 b 4 c 2"}, "--nproc", "4")
    assert "PBS_NODEFILE=/none cannot be read" in subprocess.run(
        ["env", "PBS_NODEFILE=/none", *TUTTI, "submit", "train.py"],
        cwd=project.folder, capture_output=True, text=True, check=False,
    ).stderr  # fmt: skip

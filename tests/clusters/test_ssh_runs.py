"""Runs over real sshd's: hosts with disks of their own train, are followed, stopped, resumed, killed and cut off."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import tutti
from clusters.ssh_rig import SshHosts, make_noisy, missing_for_ssh, ssh_hosts
from lab.hosts import lab_or_skip
from launch.launch_rig import SCRIPTS, TUTTI, default_signals, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing_for_ssh() is not None, reason=str(missing_for_ssh()))]

PACKAGE = Path(tutti.__file__).parent

OPTIONS = ("--no-predict", "--timeout", "60")


class Project:
    """A folder with a script and a tutti.toml, and commands in it."""

    def __init__(self, folder: Path, hosts: SshHosts, directory: Path, listed: str = "alpha:1,beta:1") -> None:
        self.folder, self.hosts, self.environment = folder, hosts, {"XDG_STATE_HOME": str(folder / "state")}
        folder.mkdir()
        shutil.copy(SCRIPTS / "train.py", folder)
        (folder / "tutti.toml").write_text(
            f'[ssh]\nhosts = "{listed}"\nconfig = "{hosts.config}"\ndirectory = "{directory}"\nexclude = ["state"]\n'
        )

    def start(self, *words: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [*TUTTI, *words], cwd=self.folder, env={**os.environ, **self.environment}, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=default_signals,
        )  # fmt: skip

    def tutti(self, *words: str, timeout_s: float = 300) -> tuple[int, str, str]:
        with self.start(*words) as command:
            try:
                out, err = command.communicate(timeout=timeout_s)
            finally:
                command.kill()
            return command.returncode, out, err

    def submit(self, *words: str) -> int:
        """Submit a run and return the process of its driver."""
        code, out, err = self.tutti("submit", "--on", "ssh", "--json", *OPTIONS, "--folder", "run", *words)
        assert code == 0, err
        return int(json.loads(out)["job"].partition("-")[0])

    def state(self, run: str = "run") -> dict[str, object]:
        code, out, err = self.tutti("status", "--json", run)
        assert code == 0, err
        return json.loads(out)["runs"][0]

    def log(self, run: str = "run") -> str:
        file = self.folder / run / "ssh.log"
        logs = [*self.hosts.base.glob("sshd-*.log"), *([file] if file.exists() else [])]
        return "\n".join(log.read_text(errors="replace") for log in logs)

    def rows(self, kind: str, run: str = "run") -> list[dict[str, object]]:
        file = self.folder / run / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [row for row in map(json.loads, lines) if row["kind"] == kind]

    def reaches_step(self, step: int, timeout_s: float = 120) -> bool:
        return wait_until(lambda: any(int(str(row["step"])) >= step for row in self.rows("step")), timeout_s)

    def assert_nothing_left(self, timeout_s: float = 10) -> None:
        assert wait_until(lambda: not self.hosts.processes(), timeout_s), self.hosts.processes()


@pytest.fixture
def project(tmp_path: Path, hosts: SshHosts) -> Iterator[Project]:
    """A project whose code goes to disks that only one host each sees; its path and theirs have spaces."""
    made = Project(tmp_path / "my project", hosts, hosts.disk / f"the code {tmp_path.name}")
    yield made
    for name in ("alpha", "beta"):
        shutil.rmtree(hosts.on(name) / f"the code {tmp_path.name}", ignore_errors=True)
    made.assert_nothing_left(30)


def test_two_hosts_that_share_nothing_train_and_their_results_come_back(project: Project, hosts: SshHosts) -> None:
    for name in ("named", "other"):  # below a folder that is left out
        (project.folder / "state").mkdir(exist_ok=True)
        (project.folder / f"state/{name}").touch()
    words = ("train.py", "2", "0.3", "state/named")
    code, out, err = project.tutti("run", "--on", "ssh", *OPTIONS, "--folder", "my run", *words)
    assert code == 0, err + project.log("my run")
    assert out == "epoch 0 of 2 ranks\nepoch 1 of 2 ranks\n"
    assert "completed on alpha,beta" in err
    run = project.folder / "my run"
    header = json.loads((run / "run.json").read_text())
    assert header["world_size"] == 2
    (copy,) = {Path(header["script"])}
    assert copy.is_relative_to(hosts.disk), "the copy of the script has run"
    assert not copy.exists(), "which is on the hosts only"
    for name in ("alpha", "beta"):
        assert [path.name for path in hosts.on(name).glob("the code */state/*")] == ["named"]
    assert [row["step"] for row in project.rows("step", "my run")] == list(range(1, 9))
    assert all((run / f"ranks/{rank}/stdout.log").exists() for rank in (0, 1))
    assert (run / "report/report.html").exists()
    assert (run / "checkpoints/step-00000008/index.json").exists()
    assert [path.name for path in hosts.on("beta").glob("the code */runs/*")] == [], "its logs are here"
    found = project.state("my run")
    assert (found["state"], found["step"]) == ("completed", 8)
    code, out, _ = project.tutti("logs", "-f", "my run")
    assert (code, "alpha: epoch 1 of 2 ranks\n" in out) == (0, True)
    assert "has ended already (completed)" in project.tutti("cancel", "my run")[2]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_killed_driver_ends_all_hosts_and_the_run_goes_on_later(project: Project, hosts: SshHosts) -> None:
    driver = project.submit("--checkpoint-every", "2", "train.py", "100", "0.2")
    assert project.reaches_step(4), project.log()
    commands = [word for pid in hosts.processes() for word in psutil.Process(pid).cmdline()]
    secrets = {psutil.Process(pid).environ().get("TUTTI_SECRET") for pid in hosts.processes()} - {None}
    assert len(secrets) == 1
    assert not any(str(secret) in word for secret in secrets for word in commands)
    os.kill(driver, signal.SIGKILL)
    project.assert_nothing_left(25)
    found = project.state()
    assert (found["state"], found["reason"]) == (
        "failed", "its driver on this machine was killed, so the hosts have ended the ranks",
    )  # fmt: skip
    last = max(int(path.name[5:]) for path in hosts.on("alpha").glob("the code */runs/*/checkpoints/step-????????"))
    code, _, err = project.tutti("run", "--on", "ssh", *OPTIONS, "--resume", "run", "train.py", str(last // 4 + 1), "0")
    assert code == 0, err + project.log()
    assert [row["resumed_at_step"] for row in project.rows("start")] == [0, last]
    assert project.rows("step")[-1]["step"] == (last // 4 + 1) * 4


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_stop_writes_a_checkpoint_and_other_disks_get_it(project: Project, hosts: SshHosts) -> None:
    project.submit("train.py", "100", "0.2")
    assert project.reaches_step(6), project.log()
    code, _, err = project.tutti("cancel", "--checkpoint", "run")
    assert code == 0, err
    code, _, err = project.tutti("attach", "run")
    assert code == 75, err + project.log()
    assert "go on with `tutti submit --resume run`" in err
    project.assert_nothing_left()
    (checkpoint,) = (project.folder / "run/checkpoints").glob("step-*")
    stopped_at = int(checkpoint.name[5:])
    for name in ("alpha", "beta"):  # as if the hosts were others
        shutil.rmtree(next(hosts.on(name).glob("the code *")))
    epochs = stopped_at // 4 + 2
    words = (*OPTIONS, "--resume", "run", "train.py", str(epochs), "0")
    code, _, err = project.tutti("run", "--on", "ssh", "--hosts", "beta:1,alpha:1", *words)
    assert code == 0, err + project.log()
    assert f"{checkpoint.name} is brought to beta" in err
    printed = (project.folder / "run/ranks/0/stdout.log").read_text()
    assert printed == "".join(f"epoch {epoch} of 2 ranks\n" for epoch in range(epochs)), "those of both hosts"
    other = [json.loads(line) for line in (project.folder / "run/ranks/1/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in other if row["kind"] == "step"] == list(range(1, 4 * epochs + 1))
    steps = [row["step"] for row in project.rows("step")]
    assert steps == list(range(1, 4 * epochs + 1)), "no step is left out or repeated"
    code, _, err = project.tutti("run", "--on", "ssh", *OPTIONS, "--folder", "whole", "train.py", str(epochs), "0")
    assert code == 0, err
    assert [row["loss"] for row in project.rows("step")] == [row["loss"] for row in project.rows("step", "whole")]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_host_without_tutti_gets_it_and_what_is_committed(tmp_path: Path) -> None:
    base = Path(tempfile.mkdtemp(prefix="ssh-bare-"))
    try:
        with ssh_hosts(base, ["gamma"], hidden=PACKAGE.parent) as hosts:
            make_noisy(hosts, "gamma")
            project = Project(tmp_path / "my project", hosts, hosts.disk / "code", "gamma:2")
            git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(project.folder)]
            for words in (["init", "-q"], ["add", "train.py"], ["commit", "-qm", "all"]):
                subprocess.run([*git, *words], check=True)
            (project.folder / "later.py").touch()
            words = ["--request", "sync=git,fetch=reports", *OPTIONS, "--folder", "run", "train.py", "1", "0"]
            code, out, err = project.tutti("run", "--on", "ssh", *words)
            assert code == 0, err + project.log()
            assert re.search(r"^gamma has (no|another) tutti: this machine's is brought there$", err, re.MULTILINE), err
            assert out == "epoch 0 of 2 ranks\n"
            assert sorted(path.name for path in hosts.on("gamma").glob("code/*")) == ["runs", "train.py"]
            assert len([*hosts.on("gamma").glob("code/runs/*/checkpoints/step-*/index.json")]) == 1
            assert not [*project.folder.glob("run/checkpoints/*")]
            project.assert_nothing_left()
    finally:
        shutil.rmtree(base, ignore_errors=True)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_ctrl_c_leaves_the_run_and_cancel_ends_it_everywhere(project: Project) -> None:
    with project.start("run", "--on", "ssh", *OPTIONS, "--folder", "run", "train.py", "500", "0.2") as command:
        assert project.reaches_step(2), project.log()
        command.send_signal(signal.SIGINT)
        _, err = command.communicate(timeout=120)
    assert command.returncode == 0
    assert "the job goes on; `tutti attach run`" in err
    assert project.state()["state"] == "running"
    code, _, err = project.tutti("submit", "--on", "ssh", *OPTIONS, "--folder", "run", "train.py", "1", "0")
    assert code == 2
    assert "run that still runs" in err or "still writes into" in err
    assert project.tutti("cancel", "run")[0] == 0
    project.assert_nothing_left()
    assert project.state()["state"] == "cancelled"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_rank_that_fails_ends_both_hosts_and_says_why(project: Project) -> None:
    shutil.copy(SCRIPTS / "act.py", project.folder)
    code, _, err = project.tutti("run", "--on", "ssh", *OPTIONS, "--folder", "run", "act.py", "raise", "1")
    assert code == 1
    assert re.search(r"failed \(rank 1 on .*: ValueError: boom in user code\)", err), err
    assert "beta: ValueError: boom in user code" in err, err


@pytest.mark.long
@pytest.mark.timeout(600)
def test_restarts_need_a_folder_that_hosts_share_and_then_outlive_a_host(tmp_path: Path, hosts: SshHosts) -> None:
    apart = Project(tmp_path / "apart", hosts, hosts.disk / "apart")
    words = ("run", "--on", "ssh", *OPTIONS, "--folder", "run", "--max-restarts", "2", "--checkpoint-every", "1")
    code, _, err = apart.tutti(*words, "train.py", "1", "0")
    assert code == 2
    assert "--max-restarts goes on from checkpoints in a folder that all hosts share, and beta does not see" in err
    shared = Project(tmp_path / "shared", hosts, tmp_path / "on both hosts")
    with shared.start(*words, "train.py", "8", "0.5") as command:
        assert shared.reaches_step(3), shared.log()
        (agent,) = [pid for pid in hosts.processes() if _is_node(pid, "beta", hosts)]
        os.kill(agent, signal.SIGKILL)
        _, err = command.communicate(timeout=200)
    assert command.returncode == 0, err + shared.log()
    assert "beta was lost" in shared.log()
    assert "restart 1 of 2: 2 ranks go on from step-" in shared.log()
    assert {int(str(row["step"])) for row in shared.rows("step")} == set(range(1, 33))
    shared.assert_nothing_left()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_range_of_hosts_begins_without_one_and_outlives_another(tmp_path: Path, hosts: SshHosts) -> None:
    project = Project(tmp_path / "range", hosts, tmp_path / "on both hosts", "alpha:1,gone.invalid:1,beta:1")
    words = ("run", "--on", "ssh", *OPTIONS, "--folder", "run", "--nnodes", "1:3", "--checkpoint-every", "1")
    with project.start(*words, "train.py", "16", "0.5") as command:
        assert project.reaches_step(3), project.log()
        (agent,) = [pid for pid in hosts.processes() if _is_node(pid, "beta", hosts)]
        os.kill(agent, signal.SIGKILL)
        _, err = command.communicate(timeout=200)
    assert command.returncode == 0, err + project.log()
    assert re.search(r"^gone.invalid: .*\nthe run begins without this host$", err, re.MULTILINE), err
    log = project.log()
    assert re.search(r"node 1 \(\S+\) is lost", log)
    assert "1 rank goes on from step-" in log
    assert "node 1 on " in log.partition("1 rank goes on from")[2], "it has come again"
    assert {int(str(row["step"])) for row in project.rows("step")} == set(range(1, 65))
    project.assert_nothing_left()
    words = ("run", "--on", "ssh", *OPTIONS, "--folder", "other", "--nnodes", "3:3", "train.py", "1", "0")
    code, _, err = project.tutti(*words)
    assert (code, err.startswith("tutti: gone.invalid: ")) == (2, True), err


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, hosts: SshHosts) -> dict[int, float]:
    """The losses of two ranks here, step by step."""
    project = Project(tmp_path_factory.mktemp("here") / "here", hosts, Path("unused"))
    words = ("run", "--on", "local", "--nproc", "2", "--no-predict", "--folder", "run", "train.py", "8", "0")
    code, _, err = project.tutti(*words)
    assert code == 0, err
    return _losses(project)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "goes_on",
    ["--max-restarts 2", "--max-restarts 2 --on-failure shrink", "--nnodes 1:2"],
    ids=["all", "less", "range"],
)
def test_another_host_takes_the_place_of_node_0(
    goes_on: str, tmp_path: Path, hosts: SshHosts, undisturbed: dict[int, float]
) -> None:
    project = Project(tmp_path / "shared", hosts, tmp_path / "on both hosts")
    words = ("run", "--on", "ssh", *OPTIONS, "--folder", "run", *goes_on.split(), "--checkpoint-every", "1")
    with project.start(*words, "train.py", "8", "0.5") as command:
        assert project.reaches_step(3), project.log()
        (agent,) = [pid for pid in hosts.processes() if _is_node(pid, "alpha", hosts)]
        os.kill(agent, signal.SIGKILL)
        _, err = command.communicate(timeout=200)
    log = project.log()
    assert command.returncode == 0, err + log
    assert "beta is node 0 now, in place of alpha" in log
    assert re.search(r"^alpha: train.py: ", log.partition("beta is node 0 now")[2], re.MULTILINE)
    assert _losses(project) == pytest.approx(undisturbed, rel=1e-5)  # float32
    assert project.state()["state"] == "completed"
    project.assert_nothing_left()


def _losses(project: Project) -> dict[int, float]:
    return {int(str(row["step"])): float(str(row["loss"])) for row in project.rows("step")}


def _is_node(pid: int, name: str, hosts: SshHosts) -> bool:
    """Whether a process is what the driver has started on a host."""
    try:
        process = psutil.Process(pid)
        home = process.environ().get("HOME") == str(hosts.base / f"home-{name}")
        return home and process.cmdline()[1:3] == ["-u", "-c"]
    except psutil.Error:
        return False


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("cut", [0, 2])
def test_a_link_that_is_cut_ends_the_run_everywhere(cut: int, tmp_path: Path) -> None:
    """Two hosts of a lab, each with its own network and disk, and the driver on another one; one of them is cut off."""
    base = Path(tempfile.mkdtemp(prefix="ssh-lab-"))
    try:
        with lab_or_skip(3) as lab:
            addresses = [lab.address(number) for number in (1, 2)]
            inside = [lab.inside(number, []) for number in (1, 2)]
            with ssh_hosts(base, ["host1", "host2"], addresses=addresses, inside=inside) as hosts:
                project = Project(tmp_path / "my project", hosts, hosts.disk / "code", "host1:1,host2:1")
                words = ("run", "--on", "ssh", *OPTIONS, "--grace", "5", "--folder", "run", "train.py", "400", "0.1")
                with subprocess.Popen(
                    lab.inside(0, [*TUTTI, *words]), cwd=project.folder, env=os.environ | project.environment,
                    text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                ) as command:  # fmt: skip
                    assert project.reaches_step(3), project.log()
                    subprocess.run(["ip", "-n", lab.record.namespace(cut), "link", "set", "eth0", "down"], check=True)
                    _, err = command.communicate(timeout=120)
                    project.assert_nothing_left(40)
                assert command.returncode == 1, err
                lost = "host2" if cut else "host[12]"
                assert re.search(f"failed \\({lost} is lost: it gave no sign of life for 15 s", err), err
                written = [*hosts.on("host1").glob("code/runs/*/checkpoints/step-*/index.json")]
                assert len(written) == (0 if cut else 1), "ranks that still reach each other stop with a checkpoint"
    finally:
        shutil.rmtree(base, ignore_errors=True)


def test_what_would_run_is_shown_and_nothing_is_made(project: Project) -> None:
    words = ("--grace", "5", str(project.folder / "train.py"), f"--data={project.folder}/data", "a b")
    code, out, err = project.tutti("run", "--hosts", "u@alpha:2,beta:1", "--dry-run", *words)
    assert code == 0, err
    assert "# alpha: node 0 of 2\nrsync -a -s " in out
    assert f"-F {project.hosts.config} u@alpha" in out
    assert f"{sys.executable} -m tutti.cli.main run --on local --folder " in out
    assert "--nproc 2,1 --nnodes 2 --node-rank 1 --rendezvous alpha:PORT --one-screen --grace 5 " in out
    copied = f"{project.hosts.disk}/the code {project.folder.parent.name}"
    assert f"'{copied}/train.py' '--data={copied}/data' 'a b'" in out
    assert not (project.folder / "runs").exists()

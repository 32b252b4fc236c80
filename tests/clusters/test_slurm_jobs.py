"""Runs as jobs of a real, private Slurm of two nodes: submitted, followed, stopped, requeued, cancelled, refused."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusters.command_rig import started, state, tutti
from launch.launch_rig import SCRIPTS, TUTTI, wait_until
from launch.slurm_rig import lose_node, missing, own_slurm, slurmd
from tutti.clusters.slurm_node import ended

pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing() is not None, reason=str(missing()))]

TRAIN = str(SCRIPTS / "train.py")


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    with own_slurm() as environment:
        yield environment


@pytest.fixture
def own_cluster() -> Iterator[dict[str, str]]:
    with own_slurm() as environment:
        yield environment


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a space in its name."""
    folder = tmp_path / "my project"
    folder.mkdir()
    return folder


def test_two_nodes_train_and_are_followed_and_found(project: Path, cluster: dict[str, str]) -> None:
    (project / "tutti.toml").write_text('[run]\non = "slurm"\nnnodes = 2\n[slurm]\nsetup = ["export MARK=\'a b\'"]\n')
    code, out, err = tutti(
        project, cluster, "run", "--no-predict", "--json", "--nproc", "2", "--folder", "my run", TRAIN, "2", "0"
    )
    log = "\n".join(file.read_text() for file in project.glob("my run/slurm-*.out"))
    assert code == 0, err + log
    told = json.loads(out)
    assert (told["folder"], told["state"], told["step"]) == ("my run", "completed", 8)
    assert "epoch 0 of 4 ranks\nepoch 1 of 4 ranks\n" in err
    header = json.loads((project / "my run/run.json").read_text())
    assert header["world_size"] == 4
    assert (project / "my run/report/report.html").exists()
    assert re.search(r"slurm job \d+: completed", err)
    found = state(project, cluster, "my run")
    assert (found["state"], found["step"]) == ("completed", 8)
    code, out, _ = tutti(project, cluster, "logs", "my run", "--rank", "0")
    assert (code, out) == (0, "epoch 0 of 4 ranks\nepoch 1 of 4 ranks\n")
    code, _, err = tutti(project, cluster, "cancel", "my run")
    assert code == 2
    assert "has ended already (completed)" in err


@pytest.mark.long
def test_stopped_with_a_checkpoint_and_requeued_where_nobody_asked(project: Path, cluster: dict[str, str]) -> None:
    words = ("--no-predict", "--nproc", "2", "--folder", "run", TRAIN, "100", "0.2")
    code, out, err = tutti(project, cluster, "submit", "--json", *words)
    assert code == 0, err
    job = json.loads(out)["job"]

    def step() -> int:
        return int(str(state(project, cluster, "run")["step"] or 0))

    assert wait_until(lambda: step() >= 2, 60)
    # What Slurm sends before a time limit and when it preempts a job: the run stops with a checkpoint and goes on.
    subprocess.run(["scancel", "--signal=TERM", job], env={**cluster, "PATH": "/usr/bin:/bin"}, check=True)
    checkpoints = project / "run/checkpoints"
    assert wait_until(lambda: any(checkpoints.glob("step-*/index.json")), 40)
    stopped_at = max(int(each.parent.name.partition("-")[2]) for each in checkpoints.glob("step-*/index.json"))
    assert wait_until(lambda: step() > stopped_at + 2, 120), (project / f"run/slurm-{job}.out").read_text()
    rows = [json.loads(line) for line in (project / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["resumed_at_step"] for row in rows if row["kind"] == "start"] == [0, stopped_at]
    steps = [row["step"] for row in rows if row["kind"] == "step"]
    assert steps == list(range(1, len(steps) + 1)), "no step is left out or repeated"
    # `tutti cancel --checkpoint` stops it for good.
    code, _, err = tutti(project, cluster, "cancel", "--checkpoint", "run")
    assert code == 0, err
    code, _, err = tutti(project, cluster, "attach", "run")
    assert code == 75, err
    assert "go on with `tutti submit --resume run`" in err
    code, out, err = tutti(project, cluster, "run", "--on", "slurm", "--resume", "run", *words[:3], TRAIN, "3", "0")
    assert code == 0, err
    assert state(project, cluster, "run")["state"] == "completed"


def starts(project: Path) -> list[int]:
    """Steps after which the run has started so far."""
    file = project / "run/metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [row["resumed_at_step"] for row in rows if row["kind"] == "start"]


@pytest.mark.long
def test_the_doctor_and_the_probe_run_on_nodes(project: Path, cluster: dict[str, str]) -> None:
    (project / "tutti.toml").write_text('[slurm]\nsetup = ["export TUTTI_X=1"]\n')
    code, out, err = tutti(project, cluster, "doctor", "--on", "slurm", "--nnodes", "2", "--nproc", "1")
    assert code == 0, out + err
    assert out.count("nothing would stop a launch here") == 2, "each node says so"
    assert "links" in out
    file = project / "two nodes.json"
    words = ("--nodes", "2", "--nproc", "1", "--quick", "--no-plot", "--output", str(file))
    code, _, err = tutti(project, cluster, "probe", "--on", "slurm", *words)
    assert code == 0, err
    assert json.loads(file.read_text())["nodes"][0]["name"] == socket.gethostname(), "both nodes are this host"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("doctor", "--on", "slurm", "--request", "partition=gpu"), "`sinfo --summarize` lists the partitions"),
        (("doctor", "--on", "slurm", "--node-rank", "1"), "leave --rendezvous and --node-rank out"),
        (("doctor", "--request", "partition=gpu"), "add --on slurm, or leave it out"),
        (("probe", "--on", "slurm"), "add --nproc N"),
        (("probe", "--on", "slurm", "--nproc", "1", "--list"), "leave one out"),
        (("probe", "--on", "pbs", "--nproc", "1"), "there is no scheduler 'pbs'"),
    ],
)
def test_refused_on_nodes(project: Path, cluster: dict[str, str], words: tuple[str, ...], said: str) -> None:
    code, _, err = tutti(project, cluster, *words)
    assert code == 2, err
    assert said in err
    assert len(err.splitlines()) == 1, "one sentence"


@pytest.mark.long
def test_preempted_by_a_job_of_a_higher_partition(project: Path, cluster: dict[str, str]) -> None:
    words = ("--nnodes", "2", "--nproc", "1", "--grace", "10", "--folder", "run", TRAIN, "100", "0.2")
    code, _, err = tutti(project, cluster, "submit", "--no-predict", *words)
    assert code == 0, err
    assert wait_until(lambda: int(str(state(project, cluster, "run")["step"] or 0)) >= 4, 60)
    urgent = ("sbatch", "--partition=urgent", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=4", "--wrap=sleep 2")
    subprocess.run(urgent, cwd=project, env={**os.environ, **cluster}, check=True, capture_output=True)
    log = project.glob("run/slurm-*.out")
    assert wait_until(lambda: len(starts(project)) == 2, 120), "".join(each.read_text() for each in log)
    assert starts(project)[1] >= 4
    assert wait_until(lambda: int(str(state(project, cluster, "run")["step"] or 0)) > starts(project)[1] + 2, 60)
    rows = [json.loads(line) for line in (project / "run/metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if row["kind"] == "step"]
    assert steps == list(range(1, len(steps) + 1)), "no step is left out or repeated"
    assert tutti(project, cluster, "cancel", "run")[0] == 0
    assert wait_until(lambda: state(project, cluster, "run")["state"] == "cancelled", 60)


@pytest.mark.long
def test_a_failure_and_a_job_that_is_left_and_cancelled(project: Path, cluster: dict[str, str]) -> None:
    (project / "bad.py").write_text("import tutti\nraise ValueError('boom')\n")
    code, _, err = tutti(project, cluster, "run", "--on", "slurm", "--nproc", "1", "--folder", "bad", "bad.py")
    assert code == 1
    assert "ValueError: boom" in err
    assert "failed" in err
    words = ("run", "--on", "slurm", "--no-predict", "--nproc", "1", "--folder", "long", TRAIN, "500", "0.2")
    with started(project, cluster, *words) as command:
        assert wait_until(lambda: (project / "long/job.json").exists())
        assert wait_until(lambda: (project / "long/run.json").exists())
        command.send_signal(signal.SIGINT)
        _, err = command.communicate(timeout=60)
    assert command.returncode == 0
    assert "the job goes on; `tutti attach long`" in err
    assert state(project, cluster, "long")["state"] == "running"
    assert tutti(project, cluster, "cancel", "long")[0] == 0
    assert wait_until(lambda: state(project, cluster, "long")["state"] == "cancelled", 60)
    code, _, err = tutti(project, cluster, "status")
    assert code == 0
    assert "long: cancelled" in err
    assert "bad: failed" in err


@pytest.mark.long
def test_a_job_that_never_starts_says_why(project: Path, cluster: dict[str, str]) -> None:
    code, _, err = tutti(
        project, cluster, "submit", "--nnodes", "9", "--nproc", "1", "--folder", "run", TRAIN, "1", "0"
    )
    assert code == 0, err
    never = "PartitionConfig: it asks for more than the partition gives, so it never starts"
    assert wait_until(lambda: state(project, cluster, "run")["reason"] == never)
    assert tutti(project, cluster, "cancel", "run")[0] == 0
    assert wait_until(lambda: state(project, cluster, "run")["state"] == "cancelled")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--request", "partition=gpu"), "`sinfo --summarize` lists the partitions"),
        (("--request", "gpus=4"), "`sinfo --Node --long` shows them"),
        (("--node-rank", "0"), "the cluster numbers its nodes and says where they meet; leave --rendezvous and"),
        (("--request", "speed=9"), "slurm has no setting 'speed'; settings are partition, account"),
        (("--request", "time=60s"), "ranks are told to write a checkpoint 90 s before the limit"),
        (("--request", "time"), "'time' is no setting; write such as partition=gpu,time=2h"),
        (("--on", "pbs"), "there is no scheduler 'pbs'; schedulers are slurm"),
        (("--node-rank", "1"), "leave --rendezvous and --node-rank out"),
        (("--mesh", "replicate=3"), "its mesh has 3 ranks, but --nproc starts 1"),
    ],
)
def test_refusals(project: Path, cluster: dict[str, str], words: tuple[str, ...], said: str) -> None:
    code, _, err = tutti(project, cluster, "submit", "--nproc", "1", "--folder", "run", *words, TRAIN, "1", "0")
    assert code == 2, err
    assert said in err
    assert len(err.splitlines()) == 1, "one sentence"
    assert not (project / "run/job.json").exists()
    assert (project / "run").exists() == ("Slurm refuses" in err), "what is refused here leaves no folder"


def test_the_script_is_shown_and_nothing_is_made(project: Path) -> None:
    settings = (
        'partition = "gpu"\ntime = "2h"\ngpus = 4\nsetup = ["module load cuda"]\ncontainer = "apptainer exec i.sif"'
    )
    (project / "tutti.toml").write_text(f'[slurm]\n{settings}\noptions = ["--exclusive"]\n')
    done = subprocess.run(
        [*TUTTI, "submit", "--dry-run", "--nnodes", "2", "--nproc", "4", TRAIN, "--epochs", "a b"],
        cwd=project, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert not (project / "runs").exists()
    for line in ("--nodes=2", "--partition=gpu", "--time=120", "--gpus-per-node=4", "--cpus-per-task=4", "--exclusive"):
        assert f"#SBATCH {line}\n" in done.stdout
    assert "module load cuda\n" in done.stdout
    assert f"exec apptainer exec i.sif {sys.executable} -m tutti.clusters.slurm_node" in done.stdout
    checked = subprocess.run(["bash", "-n"], input=done.stdout, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[slurm", "cannot be read"),
        ("[run]\nnnodes = 0\n", "run.nnodes"),
        ("[slum]\n", "slum"),
        ("x = 1\n", "x is no table"),
    ],
)
def test_a_damaged_profile_is_refused(project: Path, text: str, said: str) -> None:
    (project / "tutti.toml").write_text(text)
    done = subprocess.run([*TUTTI, "submit", TRAIN], cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"{project / 'tutti.toml'}" in done.stderr
    assert said in done.stderr


@pytest.mark.long
def test_a_lost_node_lets_the_job_begin_again_from_its_checkpoint(project: Path, cluster: dict[str, str]) -> None:
    words = ("--nnodes", "2", "--nproc", "1", "--checkpoint-every", "4", "--folder", "run", TRAIN, "100", "0.2")
    code, _, err = tutti(project, cluster, "submit", "--no-predict", *words)
    assert code == 0, err
    assert wait_until(lambda: int(str(state(project, cluster, "run")["step"] or 0)) >= 6, 60)
    lose_node(cluster, "n1")
    assert wait_until(lambda: state(project, cluster, "run")["state"] == "pending", 120), "Slurm requeues it"
    with subprocess.Popen(slurmd(cluster, "n1"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as node:
        try:
            assert wait_until(lambda: len(starts(project)) == 2, 120), state(project, cluster, "run")
            first, resumed = starts(project)
            assert (first, resumed % 4) == (0, 0)
            assert resumed >= 4
            assert tutti(project, cluster, "cancel", "run")[0] == 0
            assert wait_until(lambda: state(project, cluster, "run")["state"] == "cancelled", 60)
        finally:
            node.terminate()


@pytest.mark.long
def test_a_range_of_nodes_takes_what_there_is_and_outlives_a_node(project: Path, own_cluster: dict[str, str]) -> None:
    cluster = own_cluster  # of which no other test has lost a node
    words = ("submit", "--no-predict", "--nnodes", "1:2", "--nproc", "1", "--checkpoint-every", "2")
    code, _, err = tutti(project, cluster, *words, "--folder", "run", TRAIN, "20", "0.2")
    assert code == 0, err
    assert wait_until(lambda: int(str(state(project, cluster, "run")["step"] or 0)) >= 6, 60)
    lose_node(cluster, "n1")
    assert wait_until(lambda: state(project, cluster, "run")["state"] == "completed", 120), log_of(project, "run")
    assert len(starts(project)) == 2, "the job went on without the node, and was not put into the queue again"
    printed = log_of(project, "run")
    assert re.search(r"node 1 \(.*\) is lost", printed), printed
    assert "1 rank goes on from step-" in printed
    # The node is still lost, so the next job begins with the other one.
    code, _, err = tutti(project, cluster, *words, "--folder", "next", TRAIN, "1", "0")
    assert code == 0, err
    assert wait_until(lambda: state(project, cluster, "next")["state"] == "completed", 60), log_of(project, "next")
    assert "epoch 0 of 1 ranks" in log_of(project, "next")


@pytest.mark.long
def test_a_wrong_account_is_said(project: Path, own_cluster: dict[str, str]) -> None:
    def configure(line: str) -> None:
        with Path(own_cluster["SLURM_CONF"]).open("a") as configuration:
            configuration.write(f"{line}\n")
        subprocess.run(["scontrol", "reconfigure"], env={**os.environ, **own_cluster}, check=True)

    configure("PartitionName=ops Nodes=n[0-1] AllowAccounts=ops State=UP")
    words = ("submit", "--no-predict", "--nproc", "1", "--request", "partition=ops,account=lab")
    code, _, err = tutti(project, own_cluster, *words, "--folder", "waits", TRAIN, "1", "0")
    assert code == 0, err
    said = (
        "so it can't use this partition (ops allows ops): name another one: --request partition=NAME, or account=NAME"
    )
    assert wait_until(lambda: said in str(state(project, own_cluster, "waits")["reason"]), 20), state(
        project, own_cluster, "waits"
    )
    configure("EnforcePartLimits=ALL")
    code, _, err = tutti(project, own_cluster, *words, "--folder", "refused", TRAIN, "1", "0")
    assert code == 2
    assert (
        "Slurm refuses the job (Batch job submission failed: Invalid account or account/partition combination "
        "specified); `sacctmgr show associations user=$USER` lists yours; name one with --request account=NAME" in err
    )


@pytest.mark.long
def test_the_time_limit_of_the_run_ends_the_job(project: Path, cluster: dict[str, str]) -> None:
    words = ("submit", "--no-predict", "--nproc", "1", "--time-limit", "5s", "--folder", "run", TRAIN, "500", "0.1")
    code, _, err = tutti(project, cluster, *words)
    assert code == 0, err
    assert wait_until(lambda: state(project, cluster, "run")["state"] not in ("pending", "running"), 60)
    found = state(project, cluster, "run")
    assert found["state"] == "failed", found  # exit code 75: it has stopped with a checkpoint
    assert len(starts(project)) == 1, "it was not put into the queue again"
    assert len([*(project / "run/checkpoints").glob("step-*")]) == 1


@pytest.mark.parametrize(
    ("rows", "before", "code", "expected"),
    [
        ([{"kind": "start"}, {"kind": "end", "status": "completed"}], 0, 1, 0),
        ([{"kind": "start"}, {"kind": "end", "status": "stopped"}], 0, 1, 75),
        ([{"kind": "end", "status": "completed"}, {"kind": "start"}], 0, 1, 1),
        ([{"kind": "end", "status": "completed"}], None, 2, 2),
        ([{"kind": "end", "status": "stopped"}], None, 2, 2),
    ],
)
def test_a_job_ends_as_its_own_start_of_the_run_did(
    tmp_path: Path, rows: list[dict[str, str]], before: int | None, code: int, expected: int
) -> None:
    (tmp_path / "checkpoints/step-00000002").mkdir(parents=True)
    (tmp_path / "checkpoints/step-00000002/index.json").touch()
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    size = metrics.stat().st_size if before is None else before
    assert ended(tmp_path, size, code) == expected


def log_of(project: Path, run: str) -> str:
    return "\n".join(file.read_text() for file in (project / run).glob("slurm-*.out"))

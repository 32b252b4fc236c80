"""Runs as jobs of a real Ray of two nodes, by the real command line."""

import importlib.util
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

from clusters.ray_rig import RayNodes, ray_nodes, without_ray
from launch.launch_rig import tutti_run, wait_until
from tutti.config import serialization
from tutti.config.plan import BatchPlan, Plan

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(without_ray()), reason=without_ray()),
]

TRAIN = """\
import pathlib, sys, time
import torch
import tutti

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
job = tutti.Job(global_batch_size=16, seed=0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer, loader = job.prepare(model, optimizer, data, torch.nn.functional.mse_loss)
for epoch in job.epochs(int(sys.argv[1])):
    for batch in loader:
        job.step(batch)
        if not pathlib.Path("fast").exists():
            time.sleep(float(sys.argv[2]))
    job.print("epoch", epoch, "of", job.world_size, "ranks")
"""

PROFILE = """\
[run]
on = "ray"
nnodes = 2

[ray]
tutti = "installed"
env = { MARK = "a b" }
setup = ["export MORE=more"]
"""

EPOCHS = 20


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayNodes]:
    base = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # a short path: Ray's sockets are below it
    try:
        with ray_nodes(base) as nodes:
            yield nodes
    finally:
        shutil.rmtree(base, ignore_errors=True)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a space in its name."""
    folder = tmp_path / "my project"
    folder.mkdir()
    (folder / "tutti.toml").write_text(PROFILE)
    (folder / "train.py").write_text(TRAIN)
    return folder


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The loss of each step on one device."""
    folder = tmp_path_factory.mktemp("one device")
    (folder / "train.py").write_text(TRAIN)
    done = tutti_run(folder, "--nproc", "1", "train.py", str(EPOCHS), "0")
    assert done.code == 0, done.err
    return [row["loss"] for row in rows(done.folder, "step")]


def rows(folder: Path, kind: str) -> list[dict[str, float]]:
    file = folder / "metrics.jsonl"
    found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [row for row in found if row["kind"] == kind]


def losses(folder: Path) -> list[float]:
    """The loss of each step, the last time that it was made."""
    found = {int(row["step"]): row["loss"] for row in rows(folder, "step")}
    assert sorted(found) == list(range(1, len(found) + 1)), "no step is left out"
    return [found[step] for step in sorted(found)]


def log_of(folder: Path) -> str:
    file = folder / "ray.log"
    return file.read_text() if file.exists() else ""


def test_the_doctor_and_the_probe_run_on_nodes(project: Path, cluster: RayNodes) -> None:
    code, out, err = cluster.tutti(project, "doctor", "--on", "ray", "--nnodes", "2", "--nproc", "1")
    assert code == 0, out + err
    assert out.count("nothing would stop a launch here") == 2
    words = ("probe", "--on", "ray", "-N", "2", "--nproc", "1", "--quick", "--no-plot")
    code, _, err = cluster.tutti(project, *words, XDG_CACHE_HOME=str(project / "cache"))
    assert code == 0, err
    assert len(json.loads((project / "cluster.json").read_text())["conditions"]["hosts"]) == 2


def test_two_nodes_train_and_are_followed_and_found(project: Path, cluster: RayNodes, one_device: list[float]) -> None:
    code, out, err = cluster.tutti(
        project, "run", "--no-predict", "--nproc", "1", "--folder", "my run", "train.py", str(EPOCHS), "0"
    )
    log = log_of(project / "my run")
    assert code == 0, err + log
    assert out == "".join(f"epoch {epoch} of 2 ranks\n" for epoch in range(EPOCHS))
    assert losses(project / "my run") == pytest.approx(one_device, rel=1e-12)
    header = json.loads((project / "my run/run.json").read_text())
    assert {rank["host"] for rank in header["ranks"]} == {"host0", "host1"}
    found = cluster.state(project, "my run")
    assert (found["state"], found["step"]) == ("completed", 4 * EPOCHS)
    assert sorted(str(found["nodes"]).split(",")) == ["host0", "host1"]
    code, out, _ = cluster.tutti(project, "logs", "my run")
    assert (code, out) == (0, log_of(project / "my run"))
    assert out.count("epoch 3 of 2 ranks\n") == 1
    assert "[node 1] " in out
    assert "tutti-state" not in out
    assert not re.search(r"[0-9a-f]{64}", out), "no secret"
    code, _, err = cluster.tutti(project, "cancel", "my run")
    assert code == 2
    assert "has ended already (completed)" in err


def test_a_rank_that_fails_and_a_job_that_is_left_and_cancelled(project: Path, cluster: RayNodes) -> None:
    (project / "bad.py").write_text("import tutti\nraise ValueError('boom')\n")
    code, _, err = cluster.tutti(project, "run", "--nproc", "1", "--folder", "bad", "bad.py")
    assert code == 1
    assert "ValueError: boom" in err
    assert re.search(r"failed \(`tutti run` on host[01] ended with exit code 1\)", err)
    words = ("run", "--no-predict", "--nproc", "1", "--folder", "long", "train.py", "900", "0.2")
    with cluster.started(project, *words) as command:
        assert wait_until(lambda: len(rows(project / "long", "step")) > 2, 120), log_of(project / "long")
        command.send_signal(signal.SIGINT)
        _, err = command.communicate(timeout=60)
    assert command.returncode == 0
    assert "the job goes on; `tutti attach long`" in err
    assert cluster.ranks(0)
    assert cluster.ranks(1)
    code, _, err = cluster.tutti(project, "submit", "--resume", "long", "--nproc", "1", "train.py", "1", "0")
    assert code == 2
    assert "writes into" in err
    code, _, err = cluster.tutti(project, "cancel", "long")
    assert code == 0, err
    assert "time for a checkpoint" not in err
    assert wait_until(lambda: not cluster.ranks(0) + cluster.ranks(1), 10), err + log_of(project / "long")
    assert wait_until(lambda: cluster.state(project, "long")["state"] == "cancelled", 60)
    assert not list((project / "long").glob("checkpoints/*")), "it was not given time for one"


def test_stopped_with_a_checkpoint_where_folder_code_and_tutti_are_brought(
    project: Path, cluster: RayNodes, one_device: list[float], tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    (project / "tutti.toml").write_text(f'[run]\non = "ray"\nnnodes = 2\n[ray]\nfolder = "{disk}"\n')
    (project / "train.py").write_text(TRAIN + "job.print(tutti.__file__, pathlib.Path.cwd())\n")
    words = ("--no-predict", "--nproc", "1", "--folder", "run", str(project / "train.py"), str(EPOCHS))
    (project / "runs").mkdir()
    plan = Plan(mesh={"replicate": 2}, batch=BatchPlan(global_batch_size=16))
    serialization.save(plan, project / "runs/plan.json")  # which is not among what Ray copies
    code, out, err = cluster.tutti(project, "submit", "--json", "--plan", "runs/plan.json", *words, "0.3")
    assert code == 0, err
    assert err.count("the run folder lies in the cluster") == 1
    inside = disk / json.loads(out)["job"]
    assert wait_until(lambda: len(rows(inside, "step")) > 2, 120), cluster.tutti(project, "logs", "run")
    code, _, err = cluster.tutti(project, "cancel", "--checkpoint", "run")
    assert code == 0, err
    code, out, err = cluster.tutti(project, "attach", "run")
    assert code == 75, err + out
    assert "go on with `tutti submit --resume run`" in err
    found = cluster.state(project, "run")
    assert (found["state"], found["reason"]) == ("cancelled", "it stopped with a checkpoint")
    stopped_at = len(rows(inside, "step"))
    assert 2 < stopped_at < 4 * EPOCHS
    code, out, err = cluster.tutti(project, "run", "--resume", "run", *words[:3], *words[5:], "0")
    assert code == 0, err
    assert f"epoch {EPOCHS - 1} of 2 ranks\n" in out
    assert re.search(r"\S+/py_modules_files/\S+ \S+/working_dir_files/", out), "both are Ray's copies"
    assert [row["resumed_at_step"] for row in rows(inside, "start")] == [0, stopped_at]
    assert losses(inside) == pytest.approx(one_device, rel=1e-12)
    code, _, err = cluster.tutti(project, "logs", "run", "--rank", "0")
    assert code == 2
    assert "the run folder lies in the cluster" in err


def test_what_a_cluster_refuses_is_said_in_words(project: Path, cluster: RayNodes) -> None:
    words = ("submit", "--nproc", "1", "--folder", "run", "train.py", "1", "0")
    for variables, said in (
        ({"RAY_AUTH_TOKEN": "wrong" * 8}, "does not take the token in RAY_AUTH_TOKEN; get the cluster's own"),
        ({"RAY_AUTH_MODE": "disabled"}, "asks for a token; export RAY_AUTH_MODE=token"),
        ({"RAY_AUTH_TOKEN": "", "HOME": "/nonexistent"}, "RAY_AUTH_MODE=token, but there is no token"),
        ({"RAY_ADDRESS": f"{cluster.address[:-4]}1"}, "cannot be reached (Connection refused)"),
    ):
        code, _, err = cluster.tutti(project, *words, **variables)
        assert (code, said in err) == (2, True), err
        assert len(err.splitlines()) == 1, "one sentence"
    assert not (project / "run/job.json").exists()
    (project / "tutti.toml").write_text(PROFILE.partition("setup")[0])
    for request, said in (
        ("python=/usr/bin/false", "/usr/bin/false cannot be started there"),
        ("directory=/nowhere", "it does not see the directory /nowhere; let Ray copy this one"),
    ):
        code, _, err = cluster.tutti(project, "run", "--request", request, *words[1:])
        assert (code, said in err) == (2, True), err
    # What cannot be placed says why it waits, and ends at once.
    code, _, err = cluster.tutti(project, "submit", "--request", "gpus=4", *words[1:])
    assert code == 0, err
    asked = "it waits for 2 nodes with 1 CPU, 4 GPU each, and the cluster has no such node"
    assert wait_until(lambda: str(cluster.state(project, "run")["reason"]).startswith(asked), 60)
    found = cluster.state(project, "run")
    assert found["state"] == "pending"
    assert "host0 has 2 CPU, 0 GPU" in str(found["reason"])
    assert cluster.tutti(project, "cancel", "run")[0] == 0
    assert wait_until(lambda: cluster.state(project, "run")["state"] == "cancelled", 30)


def test_all_ends_with_the_driver(project: Path, cluster: RayNodes) -> None:
    words = ("--no-predict", "--nproc", "1", "--folder", "run", "train.py", "900", "0.2")
    code, _, err = cluster.tutti(project, "submit", *words)
    assert code == 0, err
    assert wait_until(lambda: len(rows(project / "run", "step")) > 2, 120), log_of(project / "run")
    drivers = [pid for pid in cluster.processes(0) if "ray_driver" in " ".join(psutil.Process(pid).cmdline())]
    for pid in drivers:
        os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not cluster.ranks(0) + cluster.ranks(1), 30)
    assert wait_until(lambda: cluster.state(project, "run")["state"] == "failed", 30)
    assert "its driver ended" in str(cluster.state(project, "run")["reason"])


LOOP = """\
import torch
import tutti

def train_loop(config):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    job = tutti.Job(global_batch_size=16, seed=0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = job.prepare(model, optimizer, data, torch.nn.functional.mse_loss)
    for epoch in job.epochs(config["epochs"]):
        for batch in loader:
            job.step(batch)
        if job.rank == config.get("bad", -1):
            raise ValueError("boom")
    return job.rank, job.world_size
"""

TRAINER = """\
import ray, tutti
from tutti.ray import TuttiTrainer
from train import train_loop

ray.init(address="auto", log_to_driver=False)
several = dict(num_workers=2, placement_strategy="STRICT_SPREAD")
print(TuttiTrainer(train_loop, train_loop_config={"epochs": 2}, run_folder="/shared/run", **several).fit())
for more, config in (({}, {"epochs": 1, "bad": 1}), ({"resources_per_worker": {"x": 1}, "timeout_s": 2}, {})):
    try:
        TuttiTrainer(train_loop, train_loop_config=config, run_folder="/shared/bad", **several, **more).fit()
    except tutti.TuttiError as error:
        print(f"{type(error).__name__}: {error}")
"""


def printed_by(project: Path, cluster: RayNodes, program: str) -> str:
    """What a program that uses Ray prints; /shared in it is the project's folder."""
    (project / "train.py").write_text(LOOP)
    (project / "trainer.py").write_text(program.replace("/shared", str(project)))
    done = subprocess.run(
        [*cluster.before, sys.executable, "trainer.py"],
        cwd=project, env={**os.environ, **cluster.variables, "RAY_ADDRESS": cluster.inside},
        capture_output=True, text=True,
        timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_ranks_in_a_program_that_uses_ray(project: Path, cluster: RayNodes, one_device: list[float]) -> None:
    results, failed, waited = printed_by(project, cluster, TRAINER).splitlines()
    assert results == "[(0, 2), (1, 2)]"
    assert failed == "TrainingError: rank 1 failed (ValueError: boom); the others were ended"
    assert waited.startswith("LaunchError: Ray had no 2 times {'CPU': 1.0, 'x': 1} in 2 s")
    assert losses(project / "run") == pytest.approx(one_device[:8], rel=1e-12)
    header = json.loads((project / "run/run.json").read_text())
    assert {rank["host"] for rank in header["ranks"]} == {"host0", "host1"}


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="ray[train] is not installed")
def test_the_example_of_ray_train(project: Path, cluster: RayNodes, one_device: list[float]) -> None:
    page = (Path(__file__).parents[2] / "docs/launchers.md").read_text().partition("\n## Ray Train\n")[2]
    printed_by(project, cluster, page.partition("```python\n")[2].partition("```")[0])
    assert losses(project / "run") == pytest.approx(one_device[:8], rel=1e-12)
    assert json.loads((project / "run/run.json").read_text())["world_size"] == 2


def test_a_lost_a_new_and_a_drained_node_are_new_generations(
    project: Path, cluster: RayNodes, one_device: list[float]
) -> None:
    (project / "tutti.toml").write_text(PROFILE + "grow_s = 1\n")
    words = ("--no-predict", "--nnodes", "1:2", "--nproc", "1", "--checkpoint-every", "4", "--folder", "run")
    code, _, err = cluster.tutti(project, "submit", *words, "train.py", str(EPOCHS), "0.5")
    assert code == 0, err

    def starts() -> list[float]:
        return [row["resumed_at_step"] for row in rows(project / "run", "start")]

    assert wait_until(lambda: len(rows(project / "run", "step")) > 6, 120), log_of(project / "run")
    cluster.lose()
    assert wait_until(lambda: not cluster.ranks(1), 30), "the kernel ends the ranks of a node whose raylet is killed"
    assert wait_until(lambda: len(starts()) == 2, 150), cluster.tutti(project, "logs", "run")
    assert cluster.state(project, "run")["nodes"] == "host0"
    cluster.clear()
    cluster.join()
    assert wait_until(lambda: len(starts()) == 3, 120), cluster.tutti(project, "logs", "run")
    assert cluster.state(project, "run")["nodes"] in ("host0,host1", "host1,host0")
    cluster.drain()
    assert wait_until(lambda: len(starts()) == 4, 120), cluster.tutti(project, "logs", "run")
    assert cluster.state(project, "run")["nodes"] == "host0"
    (project / "fast").touch()
    code, _, err = cluster.tutti(project, "attach", "run")
    log = log_of(project / "run")
    assert code == 0, err + log
    assert "host1 was lost (its node has died, or the network to it is cut); the run goes on" in log
    assert "nodes have been added" in log
    assert "a node is being drained" in log
    assert f"epoch {EPOCHS - 1} of 1 ranks\n" in log
    assert all(step >= 4 for step in starts()[1:])
    assert losses(project / "run") == pytest.approx(one_device, rel=1e-12)

"""Runs on Kubernetes, by the official client and the real command line, against a stand-in that starts the pods."""

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusters.command_rig import started, state, tutti
from clusters.kubernetes_rig import Cluster, kubernetes
from launch.launch_rig import SCRIPTS, free_port, wait_until

pytestmark = pytest.mark.slow

TRAIN = str(SCRIPTS / "train.py")

PROFILE = """\
[run]
on = "k8s"
nnodes = 2

[kubernetes]
image = "train:1"
python = "{python}"
volumes = ["runs:{disk}"]
port = {port}
env = {{ MARK = "a b" }}
setup = ["export MORE=more"]
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with kubernetes(tmp_path / "cluster") as (found, _):
        yield found


@pytest.fixture
def project(tmp_path: Path, cluster: Cluster) -> Path:
    """A folder with a space in its name, on the disk that pods mount."""
    folder = tmp_path / "my disk" / "project"
    folder.mkdir(parents=True)
    profile = PROFILE.format(python=sys.executable, disk=folder.parent, port=free_port())
    (folder / "tutti.toml").write_text(profile)
    return folder


def log_of(folder: Path) -> str:
    file = folder / "kubernetes.log"
    return file.read_text() if file.exists() else ""


@pytest.mark.long
def test_two_pods_train_and_are_followed_and_found(project: Path, cluster: Cluster) -> None:
    code, out, err = tutti(
        project, cluster.variables, "run", "--no-predict", "--nproc", "1", "--folder", "my run", TRAIN, "2", "0"
    )
    assert code == 0, err + log_of(project / "my run")
    assert out == "epoch 0 of 2 ranks\nepoch 1 of 2 ranks\n"
    assert json.loads((project / "my run/run.json").read_text())["world_size"] == 2
    found = state(project, cluster.variables, "my run")
    assert (found["state"], found["step"], found["nodes"]) == ("completed", 8, "node0,node1")
    code, out, _ = tutti(project, cluster.variables, "logs", "my run")
    assert code == 0
    lines = [
        ("" if kubelet.index == 0 else "[pod 1] ") + text
        for kubelet in cluster.kubelets.values()
        for _, text in kubelet.lines
    ]
    assert sorted(out.splitlines()) == sorted(lines), "each line of each pod, and once"
    assert "epoch 0 of 2 ranks" in lines
    job, service, secret = cluster.posted
    pod = job["spec"]["template"]["spec"]
    values = [variable.get("value") for variable in pod["containers"][0]["env"]]
    assert values == [None, "a b"], "the secret is in no pod"
    assert secret["stringData"]["secret"] not in json.dumps(job) + (project / "my run/kubernetes.json").read_text()
    assert len(secret["stringData"]["secret"]) == 64
    assert pod["subdomain"] == service["metadata"]["name"] == job["metadata"]["name"]
    assert pod["terminationGracePeriodSeconds"] == 60
    for thing in (service, secret):
        assert thing["metadata"]["ownerReferences"][0]["name"] == job["metadata"]["name"]
    code, _, err = tutti(project, cluster.variables, "cancel", "my run")
    assert code == 2
    assert "has ended already (completed)" in err


def steps_of(folder: Path) -> list[int]:
    file = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [row["step"] for row in rows if row["kind"] == "step"]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_preempted_and_stopped_with_a_checkpoint_where_the_folder_lies_in_the_cluster(
    project: Path, cluster: Cluster
) -> None:
    volume = project.parent
    profile = (project / "tutti.toml").read_text()
    (project / "tutti.toml").write_text(f'{profile}folder = "{volume}/runs"\n')
    words = ("--no-predict", "--nproc", "1", "--folder", "run", TRAIN, "400", "0.2")
    code, out, err = tutti(project, cluster.variables, "submit", "--json", *words)
    assert code == 0, err
    assert err.count("the run folder lies in the cluster") == 1
    space, _, name = json.loads(out)["job"].partition("/")
    job = cluster.find("jobs", space, name)
    assert job is not None
    inside = volume / "runs" / name
    assert wait_until(lambda: len(steps_of(inside)) >= 2, 120), log_of(project / "run")
    # A pod of more importance takes the place of one: all ranks stop with a checkpoint, and new pods go on from it.
    first = next(pod for pod in cluster.pods(job) if cluster.index(pod) == 1)
    cluster.evict(first)
    assert wait_until(lambda: any(inside.glob("checkpoints/step-*/index.json")), 90)
    stopped_at = max(int(each.parent.name.partition("-")[2]) for each in inside.glob("checkpoints/step-*/index.json"))
    assert wait_until(lambda: len(steps_of(inside)) > stopped_at + 2, 180), tutti(
        project, cluster.variables, "logs", "run"
    )
    rows = [json.loads(line) for line in (inside / "metrics.jsonl").read_text().splitlines()]
    assert [row["resumed_at_step"] for row in rows if row["kind"] == "start"] == [0, stopped_at]
    # `tutti cancel --checkpoint` stops it for good.
    code, _, err = tutti(project, cluster.variables, "cancel", "--checkpoint", "run")
    assert code == 0, err
    steps = steps_of(inside)
    assert steps == list(range(1, len(steps) + 1)), "no step is left out or repeated"
    assert int(sorted(inside.glob("checkpoints/step-*"))[-1].name.partition("-")[2]) == len(steps)
    assert cluster.find("jobs", space, name) is job, "the Job stays, as the record"
    code, _, err = tutti(project, cluster.variables, "attach", "run")
    assert code == 75, err
    assert "go on with `tutti submit --resume run`" in err
    assert state(project, cluster.variables, "run")["reason"] == "stopped by `tutti cancel`"
    code, _, err = tutti(project, cluster.variables, "logs", "run", "--rank", "0")
    assert code == 2
    assert "the run folder lies in the cluster, and so does what rank 0 prints" in err
    # And goes on in the same folder of the cluster.
    last = (len(steps) + 7) // 4
    code, out, err = tutti(project, cluster.variables, "run", "--resume", "run", *words[:3], TRAIN, str(last), "0")
    assert code == 0, err
    assert f"epoch {last - 1} of 2 ranks\n" in out
    assert steps_of(inside) == list(range(1, 4 * last + 1))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_pod_that_fails_and_a_job_that_is_left_and_cancelled(project: Path, cluster: Cluster) -> None:
    (project / "bad.py").write_text("import tutti\nraise ValueError('boom')\n")
    code, _, err = tutti(project, cluster.variables, "run", "--nproc", "1", "--folder", "bad", "bad.py")
    assert code == 1
    assert "ValueError: boom" in err
    assert "failed (pod" in err
    assert "ended with exit code 1" in err
    with started(
        project, cluster.variables, "run", "--no-predict", "--nproc", "1", "--folder", "long", TRAIN, "900", "0.2"
    ) as command:
        assert wait_until(lambda: (project / "long/run.json").exists(), 120)
        command.send_signal(signal.SIGINT)
        _, err = command.communicate(timeout=60)
    assert command.returncode == 0
    assert "the job goes on; `tutti attach long`" in err
    processes = [kubelet.process for kubelet in cluster.kubelets.values()]
    assert state(project, cluster.variables, "long")["state"] == "running"
    code, _, err = tutti(project, cluster.variables, "submit", "--resume", "long", "--nproc", "1", TRAIN, "1", "0")
    assert code == 2
    assert "writes into" in err
    assert tutti(project, cluster.variables, "cancel", "long")[0] == 0
    assert state(project, cluster.variables, "long")["state"] == "cancelled"
    assert wait_until(lambda: all(process is None or process.poll() is not None for process in processes), 60)
    left = {thing["metadata"]["name"] for thing in cluster.things.values() if thing["kind"] != "Event"}
    assert all(name.startswith("bad-") for name in left), "Job, Service, Secret and pods are gone"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_pod_without_a_volume_goes_on_from_its_store(project: Path, cluster: Cluster, tmp_path: Path) -> None:
    profile = f'[run]\non = "k8s"\n[kubernetes]\nimage = "train:1"\npython = "{sys.executable}"\n'
    (project / "tutti.toml").write_text(profile)
    store = tmp_path / "store"
    words = ("--no-predict", "--nproc", "1", "--folder", "run", "--checkpoint-store", f"file://{store}")
    code, out, err = tutti(project, cluster.variables, "submit", "--json", *words, TRAIN, "20", "0.2")
    assert code == 0, err
    space, _, name = json.loads(out)["job"].partition("/")
    inside = Path("/tmp/tutti") / name
    try:
        assert wait_until(lambda: len(steps_of(inside)) >= 2, 120), log_of(project / "run")
        job = cluster.find("jobs", space, name)
        assert job is not None
        with cluster.lock:
            (first,) = cluster.pods(job)
            cluster.evict(first)
        kubelet = cluster.kubelets[first["metadata"]["uid"]]
        assert kubelet.process is not None
        kubelet.process.wait(60)
        with cluster.lock:
            shutil.rmtree(inside)  # a pod's disk ends with it
        (stored,) = store.glob("step-*/index.json")
        code, _, err = tutti(project, cluster.variables, "attach", "run")
        assert code == 0, err
        assert steps_of(inside) == list(range(int(stored.parent.name[5:13]) + 1, 81))
    finally:
        shutil.rmtree(inside, ignore_errors=True)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_range_begins_with_one_pod_takes_on_another_and_outlives_pod_0(project: Path, cluster: Cluster) -> None:
    cluster.most_pods = 1
    words = ("--no-predict", "--nnodes", "1:2", "--nproc", "1", "--folder", "run", "--checkpoint-every", "1")
    code, out, err = tutti(project, cluster.variables, "submit", "--json", *words, TRAIN, "60", "0.2")
    assert code == 0, err
    space, _, name = json.loads(out)["job"].partition("/")
    job, run = cluster.find("jobs", space, name), project / "run"
    assert job is not None

    def log() -> str:
        return tutti(project, cluster.variables, "logs", "run")[1]

    def pod(index: int) -> dict[str, Any]:
        with cluster.lock:
            running = [each for each in cluster.pods(job) if each["status"]["phase"] == "Running"]
            return next(each for each in running if cluster.index(each) == index)

    assert wait_until(lambda: len(steps_of(run)) >= 2, 120), log()
    found = state(project, cluster.variables, "run")
    assert (found["state"], found["nodes"]) == ("running", "node0"), log()
    assert "1 of 2 pods wait: Unschedulable" in found["reason"]
    cluster.most_pods = 2
    assert wait_until(lambda: "2 ranks go on" in log(), 120), log()
    # A pod that is evicted leaves, the other one goes on, and the next one is taken on.
    cluster.evict(pod(1))
    assert wait_until(lambda: "1 rank goes on" in log(), 120), log()
    assert wait_until(lambda: f"\n{log()}".count("\n2 ranks go on") == 2, 120), log()
    # The node of pod 0 is lost.
    with cluster.lock:
        lost = pod(0)
        lost["status"]["conditions"] = [
            {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
        ]
        process = cluster.kubelets[lost["metadata"]["uid"]].process
        assert process is not None
        os.killpg(process.pid, signal.SIGKILL)
    code, _, err = tutti(project, cluster.variables, "attach", "run")
    assert code == 0, err + log()
    assert "node 0, which decides for all nodes, is lost" in log()
    assert set(steps_of(run)) == set(range(1, 241)), "no step is left out"
    assert state(project, cluster.variables, "run")["state"] == "completed"

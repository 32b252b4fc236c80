"""Runs on Kubernetes, through the official client and the real command line, against a stand-in that starts the pods."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from clusters.kubernetes_rig import Cluster, kubernetes
from launch.launch_rig import SCRIPTS, TUTTI, default_signals, free_port, wait_until

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


@contextmanager
def started(cwd: Path, cluster: Cluster, *words: str) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "KUBECONFIG": str(cluster.base / "kubeconfig"), "XDG_STATE_HOME": str(cluster.base)}
    command = subprocess.Popen(
        [*TUTTI, *words], cwd=cwd, env=environment, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=default_signals,
    )  # fmt: skip
    try:
        yield command
    finally:
        command.kill()
        command.communicate()


def tutti(cwd: Path, cluster: Cluster, *words: str, timeout_s: float = 90) -> tuple[int, str, str]:
    with started(cwd, cluster, *words) as command:
        out, err = command.communicate(timeout=timeout_s)
        return command.returncode, out, err


def state(cwd: Path, cluster: Cluster, run: str) -> dict[str, object]:
    code, out, err = tutti(cwd, cluster, "status", "--json", run)
    assert code == 0, err
    return json.loads(out)["runs"][0]


def log_of(folder: Path) -> str:
    file = folder / "kubernetes.log"
    return file.read_text() if file.exists() else ""


def test_two_pods_train_and_are_followed_and_found(project: Path, cluster: Cluster) -> None:
    code, out, err = tutti(
        project, cluster, "run", "--no-predict", "--nproc", "1", "--folder", "my run", TRAIN, "2", "0"
    )
    assert code == 0, err + log_of(project / "my run")
    assert out == "epoch 0 of 2 ranks\nepoch 1 of 2 ranks\n"
    assert json.loads((project / "my run/run.json").read_text())["world_size"] == 2
    found = state(project, cluster, "my run")
    assert (found["state"], found["step"], found["nodes"]) == ("completed", 8, "node0,node1")
    code, out, _ = tutti(project, cluster, "logs", "my run")
    assert code == 0
    assert "epoch 0 of 2 ranks\n" in out
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
    code, _, err = tutti(project, cluster, "cancel", "my run")
    assert code == 2
    assert "has ended already (completed)" in err

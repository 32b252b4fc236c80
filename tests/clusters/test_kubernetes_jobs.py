"""Jobs of Kubernetes: their objects against the published schemas, what is refused, and why pods wait."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

import tutti
from clusters.kubernetes_rig import KUBECONFIG, TOKEN, Cluster, Refusal, kubernetes
from launch.launch_rig import TUTTI, free_port, wait_until
from tutti.clusters.cluster_job import JobRecord, JobRequest, write_record
from tutti.clusters.kubernetes import Kubernetes
from tutti.clusters.kubernetes_manifest import manifests, object_name, read_kubernetes_settings
from tutti.clusters.kubernetes_node import pod_command, wait_for_names
from tutti.errors import LaunchError

VERSIONS = ("1.28", "1.31", "1.34", "1.37")

EVERYTHING: dict[str, Any] = {
    "image": "registry.example.org/team/train:1",
    "namespace": "team",
    "cpus": "8",
    "memory": "64Gi",
    "gpus": "4",
    "shared_memory": "16Gi",
    "volumes": "runs:/runs,runs:/more,data:/data",
    "folder": "/runs",
    "directory": "/workspace",
    "prefix": "conda run -n train",
    "setup": ["export A=1"],
    "env": {"NCCL_DEBUG": "INFO"},
    "secrets": "wandb,s3",
    "secret_env": {"HF_TOKEN": "hub/token"},
    "node_selector": "accelerator:a100",
    "tolerations": "nvidia.com/gpu:NoSchedule,team=ml:NoExecute",
    "service_account": "trainer",
    "pull_secrets": "registry",
    "queue": "team-queue",
    "priority_class": "high",
    "user": 1000,
    "group": 2000,
    "pod": {"hostIPC": False, "volumes": [{"name": "nfs", "nfs": {"server": "nfs", "path": "/"}}]},
    "container": {"volumeMounts": [{"name": "nfs", "mountPath": "/nfs"}], "securityContext": {"privileged": False}},
}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with kubernetes(tmp_path / "cluster") as (found, _):
        yield found


def request_for(folder: Path, /, **settings: Any) -> JobRequest:
    folder.mkdir(parents=True, exist_ok=True)
    return JobRequest(
        name="My run_1!", folder=folder, directory=folder.parent, words=("train.py", "--epochs", "2"), nodes=2,
        nproc=(4, 4), settings={"image": "train:1", **settings},
    )  # fmt: skip


@pytest.fixture
def request_here(tmp_path: Path, cluster: Cluster) -> JobRequest:
    """A request whose pods see the run folder."""
    config = str(cluster.base / "kubeconfig")
    return request_for(tmp_path / "disk/run", volumes=f"runs:{tmp_path / 'disk'}", kubeconfig=config)


def with_settings(request: JobRequest, **settings: Any) -> JobRequest:
    return replace(request, settings={**request.settings, **settings})


def refusal(request: JobRequest) -> str:
    with pytest.raises(LaunchError) as caught:
        Kubernetes().submit(request)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("version", VERSIONS)
def test_all_objects_are_valid_in_strict_schemas(tmp_path: Path, version: str) -> None:
    few = {"volumes": "runs:/runs", "folder": "/runs"}
    for settings in (few, {key: value for key, value in EVERYTHING.items() if key != "image"}):
        for thing in yaml.safe_load_all(Kubernetes().preview(request_for(tmp_path / "run", **settings))):
            kubernetes_validate.validate(thing, version, strict=True)
    thing["typo"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(thing, version, strict=True)


@pytest.mark.parametrize("version", [version for version in VERSIONS if version >= "1.31"])
def test_a_range_ends_with_pod_0(tmp_path: Path, version: str) -> None:
    request = replace(request_for(tmp_path / "run", volumes="runs:/runs", folder="/runs"), least_nodes=1, nproc=(4,))
    job, *_ = yaml.safe_load_all(Kubernetes().preview(request))
    kubernetes_validate.validate(job, version, strict=True)
    assert job["spec"]["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
    assert job["spec"]["completions"] == 2
    assert "1:2" in job["spec"]["template"]["spec"]["containers"][0]["command"]


def test_a_range_needs_a_cluster_with_success_policies(request_here: JobRequest, cluster: Cluster) -> None:
    cluster.release = "30+"
    said = refusal(replace(request_here, least_nodes=1))
    assert "--nnodes 1:2 needs Kubernetes 1.31 or newer" in said
    assert "this cluster has 1.30; give one number of nodes" in said
    assert not cluster.posted
    assert refusal(replace(request_here, least_nodes=1, settings={"image": "train:1"})).startswith(
        "the run folder would"
    )


def test_settings_reach_the_pod(tmp_path: Path) -> None:
    request = replace(request_for(tmp_path / "run", **EVERYTHING), grace_s=90.5, restarts=3, resume="s3://b/run")
    request = replace(request, words=("--nproc", "4", f"{tmp_path}/train.py", f"--data={tmp_path}/d", "/data/x"))
    job, service, secret = manifests(request, read_kubernetes_settings(request.settings), "n-1", "/runs/n-1", "inside")
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-queue"
    spec = job["spec"]
    assert (spec["completions"], spec["parallelism"], spec["backoffLimit"], spec["suspend"]) == (2, 2, 3, True)
    pod = spec["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 91 + 30
    assert pod["nodeSelector"] == {"accelerator": "a100"}
    assert pod["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "team", "operator": "Equal", "value": "ml", "effect": "NoExecute"},
    ]
    assert pod["volumes"][0] == {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}}
    assert [volume["name"] for volume in pod["volumes"]] == ["shm", "volume-0", "volume-1", "nfs"]
    (container,) = pod["containers"]
    paths = [(mount["name"], mount["mountPath"]) for mount in container["volumeMounts"]]
    assert paths == [
        ("shm", "/dev/shm"),
        ("volume-0", "/runs"),
        ("volume-0", "/more"),
        ("volume-1", "/data"),
        ("nfs", "/nfs"),
    ]
    assert container["resources"]["limits"] == {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "4"}
    assert container["workingDir"] == "/workspace"
    expected = ["sh", "-c", 'set -e\nexport A=1\nexec "$@"', "sh", "conda", "run", "-n", "train", "python", "-m"]
    expected += ["tutti.clusters.kubernetes_node", "inside", "/runs/n-1", "s3://b/run", "2", "n-1-{}.n-1:29400"]
    assert container["command"] == [*expected, "--nproc", "4", "/workspace/train.py", "--data=/workspace/d", "/data/x"]
    assert service["spec"]["clusterIP"] == "None"
    assert "stringData" not in secret


@pytest.mark.parametrize("name", ["My run_1!", "2024", "-x-", "a" * 99, "ä.ö", ""])
def test_names_are_those_of_rfc_1123(name: str) -> None:
    found = object_name(name, 1000, "abc123")
    assert found.endswith("-abc123")
    assert found[0].isalpha()
    assert set(found) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert len(f"{found}-999-abcde") <= 63, "also that of a pod"


def test_the_command_line_shows_the_objects_and_makes_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "tutti.toml").write_text(
        '[kubernetes]\nimage = "train:1"\nvolumes = ["runs:/runs"]\nfolder = "/runs"\n'
    )
    words = ("submit", "--on", "k8s", "--dry-run", "--nnodes", "2", "--nproc", "4", "train.py")
    done = subprocess.run([*TUTTI, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "# The image or a volume holds the code: the command runs in the image's working directory." in done.stdout
    job, _, secret = yaml.safe_load_all(done.stdout)
    assert job["spec"]["completions"] == 2
    assert job["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"] == {"cpu": "4"}
    assert secret["stringData"] == {"secret": "made at submission"}
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"image": None}, "needs an image with tutti; name it with --request image=NAME:TAG"),
        ({"speed": 9}, "kubernetes has no setting 'speed'; settings are image, namespace"),
        ({"memory": "64 GB"}, "kubernetes setting memory: "),
        ({"volumes": "/runs"}, "kubernetes setting volumes.0: "),
        ({"env": {"TUTTI_SECRET": "x"}}, "TUTTI_SECRET is made for each run; leave it out"),
        ({}, "the run folder would end with the pods; keep it on a volume"),
        ({"folder": "/runs"}, "folder=/runs is on no volume, so it ends with its pod"),
    ],
)
def test_settings_that_are_refused(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    assert said in refusal(request_for(tmp_path / "run", **settings))


def test_only_the_store_of_the_run_keeps_a_pod_s_checkpoints(tmp_path: Path) -> None:
    request = replace(request_for(tmp_path / "run"), nodes=1, nproc=(4,), script="train.py")
    request = replace(request, words=("train.py", "--checkpoint-store", "s3://the/script's"))
    assert "the run folder would end with the pods" in refusal(request)
    assert "- s3://b/run\n" in Kubernetes().preview(replace(request, checkpoint_store="s3://b/run"))


def test_a_file_of_this_machine_without_a_place_in_the_pods_is_refused(tmp_path: Path) -> None:
    request = request_for(tmp_path / "run", volumes="runs:/runs", folder="/runs")
    words = refusal(replace(request, words=(f"{tmp_path}/train.py",)))
    assert "name the folder of the project in the image or on a volume with --request directory=PATH" in words
    assert "--time-limit: pods that have stopped" in refusal(replace(request, words=("train.py",), time_limit_s=60.0))


def test_clusters_that_do_not_answer_are_named(request_here: JobRequest, cluster: Cluster, tmp_path: Path) -> None:
    config = tmp_path / "other"
    config.write_text(KUBECONFIG.format(server=f"http://127.0.0.1:{free_port()}", token=TOKEN, namespace="team"))
    said = refusal(with_settings(request_here, kubeconfig=str(config)))
    assert "cannot be reached" in said
    assert "bring up the VPN or tunnel" in said
    assert "no cluster is configured" in refusal(with_settings(request_here, kubeconfig=str(tmp_path / "none")))
    assert "no cluster is configured" in refusal(with_settings(request_here, context="nowhere"))
    wrong = tmp_path / "wrong"
    wrong.write_text((cluster.base / "kubeconfig").read_text().replace(TOKEN, "another"))
    said = refusal(with_settings(request_here, kubeconfig=str(wrong)))
    assert "Kubernetes refuses it (Unauthorized); the credentials of the kubeconfig are not accepted" in said


def test_what_the_api_refuses_is_said_and_leaves_nothing(request_here: JobRequest, cluster: Cluster) -> None:
    said = refusal(with_settings(request_here, namespace="nowhere"))
    assert 'namespaces "nowhere" not found' in said
    assert "`kubectl get namespaces` lists them" in said
    cluster.quota = 0
    said = refusal(request_here)
    assert "exceeded quota: compute, requested: count/jobs.batch=1" in said
    assert "`kubectl describe quota` shows the quota" in said
    cluster.quota = 9

    def refuse(method: str, path: str) -> None:
        if method == "POST" and path.endswith("/secrets"):
            words = 'secrets is forbidden: User "me" cannot create resource "secrets" in API group "" in the namespace'
            raise Refusal(403, "Forbidden", f'{words} "team"')

    cluster.refuse = refuse
    assert "it takes the right to create jobs, services and secrets" in refusal(request_here)
    kinds = {"Job", "Service", "Secret"}
    assert wait_until(lambda: not any(thing["kind"] in kinds for thing in list(cluster.things.values())), 10)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"image": "missing:1"}, '2 of 2 pods wait: ImagePullBackOff: Back-off pulling image "missing:1"; correct'),
        ({"node_selector": "gpu:a100"}, "pods wait: Unschedulable: 0/2 nodes are available"),
        ({"volumes": "other:{disk}"}, "`kubectl get pvc` lists the claims"),
        ({"secret_env": {"KEY": "hub/token"}}, 'CreateContainerConfigError: secret "hub" not found; `kubectl get'),
        ({"queue": "team"}, "it waits in the queue team until Kueue admits it"),
        ({"quota": 1}, "1 of 2 pods do not exist yet: FailedCreate: Error creating: pods"),
    ],
)
def test_why_pods_wait_and_cancelling_them(
    request_here: JobRequest, cluster: Cluster, settings: dict[str, Any], said: str
) -> None:
    settings = dict(settings)
    cluster.pods_quota = settings.pop("quota", 9)
    if cluster.pods_quota == 1:
        settings["image"] = "missing:1"  # no pod need start
    if "volumes" in settings:
        settings["volumes"] = settings["volumes"].format(disk=request_here.folder.parent)
    scheduler = Kubernetes()
    job = scheduler.submit(with_settings(request_here, **settings))
    assert wait_until(lambda: said in scheduler.status(job).reason, 20), scheduler.status(job)
    assert scheduler.status(job).state == "pending"
    assert scheduler.collect(job) is False
    scheduler.cancel(job)
    assert scheduler.status(job).state == "cancelled"
    kinds = {"Job", "Service", "Secret", "Pod"}
    assert wait_until(lambda: not any(thing["kind"] in kinds for thing in list(cluster.things.values())), 10)


def test_a_folder_whose_job_has_not_ended_takes_no_other(
    request_here: JobRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = with_settings(request_here, image="missing:1")
    monkeypatch.chdir(request.directory)
    scheduler = Kubernetes()
    job = scheduler.submit(request)
    about = JobRecord(scheduler="kubernetes", job=job, name="x", nodes=2, nproc=None, submitted_utc="", log="")
    write_record(request.folder, about)
    (request.directory / "train.py").touch()
    for on in ("kubernetes", "slurm"):
        with pytest.raises(LaunchError, match=f"^kubernetes job {job} still writes into run; wait for its end"):
            tutti.submit("train.py", on=on, folder="run", nproc=1, settings=request.settings if on != "slurm" else {})
    scheduler.cancel(job)
    found = tutti.submit("train.py", on="kubernetes", folder="run", nproc=1, settings=request.settings)
    assert found.status().state == "pending"
    found.cancel()


PROGRAM = """\
#!/bin/sh
trap 'echo told; exit {told}' TERM
echo start >> {base}/starts-$JOB_COMPLETION_INDEX
for burst in 1 2 3 4 5 6; do
    for line in a b c; do echo "pod $JOB_COMPLETION_INDEX: $burst $line"; done
    sleep 0.1
done
while [ -e {base}/hold ]; do sleep 0.05; done
[ $(wc -l < {base}/starts-$JOB_COMPLETION_INDEX) -gt {again} ] || exit 75
exit {code}
"""


def program(request: JobRequest, code: int = 0, *, again: int = 0, told: int = 75) -> JobRequest:
    """A request whose pods run a small program in the place of Python: it prints lines and ends with an exit code.

    Args:
        again: how often it ends with exit code 75 first.
        told: the exit code when it is told to stop.
    """
    base = request.folder.parent
    file = base / "program"
    file.write_text(PROGRAM.format(base=base, code=code, again=again, told=told))
    file.chmod(0o755)
    return with_settings(request, python=str(file))


def test_what_pods_print_is_in_the_log_once(request_here: JobRequest, cluster: Cluster) -> None:
    scheduler = Kubernetes()
    job = scheduler.submit(program(request_here, again=1))
    assert wait_until(lambda: not scheduler.collect(job) and scheduler.status(job).ended, 60)
    scheduler.collect(job)
    assert scheduler.status(job).state == "completed"
    log = (request_here.folder / "kubernetes.log").read_text().splitlines()
    lines = [f"pod 0: {burst} {line}" for burst in range(1, 7) for line in "abc"] * 2
    assert [line for line in log if not line.startswith("[")] == lines, "of two starts: the first ended with 75"
    assert [line for line in log if line.startswith("[")] == [f"[pod 1] {line.replace('0:', '1:')}" for line in lines]


def test_the_command_line_follows_pods_whose_folder_lies_in_the_cluster(
    request_here: JobRequest, cluster: Cluster
) -> None:
    disk = request_here.folder.parent
    python = program(request_here).settings["python"]
    (disk / "train.py").write_text("")
    settings = f'image = "train:1"\npython = "{python}"\nvolumes = ["runs:{disk}"]\nfolder = "{disk}/inside"\n'
    (disk / "tutti.toml").write_text(f'[run]\non = "k8s"\nnnodes = 2\n[kubernetes]\n{settings}')
    done = subprocess.run(
        [*TUTTI, "run", "--nproc", "1", "--folder", "my run", "train.py"], cwd=disk, capture_output=True, text=True,
        env={**os.environ, "KUBECONFIG": str(cluster.base / "kubeconfig")}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [f"pod 0: {burst} {line}" for burst in range(1, 7) for line in "abc"]
    assert [line for line in done.stdout.splitlines() if not line.startswith("[pod 1] ")] == lines
    assert done.stdout.count("[pod 1] ") == len(lines)
    assert done.stderr.count("the run folder lies in the cluster") == 1
    assert "completed on node0,node1" in done.stderr


@pytest.mark.parametrize("code", [1, 2, 137])
def test_a_failure_ends_the_job(request_here: JobRequest, code: int) -> None:
    scheduler = Kubernetes()
    job = scheduler.submit(program(request_here, code))
    assert wait_until(lambda: scheduler.status(job).ended, 60)
    status = scheduler.status(job)
    assert (status.state, status.exit_code) == ("failed", code)
    assert status.reason.endswith(f"ended with exit code {code}")


@pytest.mark.parametrize("told", [75, 1])
def test_a_stopped_job_has_the_exit_code_of_its_pods(request_here: JobRequest, told: int) -> None:
    scheduler = Kubernetes()
    (request_here.folder.parent / "hold").touch()
    job = scheduler.submit(program(request_here, told=told))
    log = request_here.folder / "kubernetes.log"
    assert wait_until(lambda: scheduler.collect(job) or (log.exists() and log.read_text().count(": 6 c") == 2), 60)
    assert scheduler.status(job).state == "running"
    scheduler.stop(job)
    status = scheduler.status(job)
    assert (status.state, status.exit_code) == ("cancelled", told)


def test_a_range_that_has_ended_waits_for_no_pod_without_a_place(request_here: JobRequest, cluster: Cluster) -> None:
    cluster.most_pods, scheduler = 1, Kubernetes()
    job = scheduler.submit(replace(program(request_here), least_nodes=1, nproc=(4,)))
    assert wait_until(lambda: scheduler.status(job).state == "running", 60), scheduler.status(job)
    cluster.most_pods = 0  # another job takes the place of pod 0
    assert wait_until(lambda: scheduler.status(job).ended, 20), scheduler.status(job)
    assert scheduler.status(job).state == "completed"
    assert wait_until(lambda: all(pod["status"]["phase"] != "Pending" for pod in _pods(cluster)), 10)


def test_a_range_that_is_stopped_has_the_exit_code_of_the_pods_that_ran(
    request_here: JobRequest, cluster: Cluster
) -> None:
    cluster.most_pods, scheduler = 1, Kubernetes()
    (request_here.folder.parent / "hold").touch()
    job = scheduler.submit(replace(program(request_here), least_nodes=1, nproc=(4,)))
    log = request_here.folder / "kubernetes.log"
    assert wait_until(lambda: scheduler.collect(job) or (log.exists() and log.read_text().count(": 6 c") == 1), 60)
    scheduler.stop(job)
    status = scheduler.status(job)
    assert (status.state, status.exit_code) == ("cancelled", 75)


def _pods(cluster: Cluster) -> list[dict[str, Any]]:
    with cluster.lock:
        return [thing for thing in cluster.things.values() if thing["kind"] == "Pod"]


def test_logs_that_may_not_be_read_are_refused(request_here: JobRequest, cluster: Cluster) -> None:
    def refuse(method: str, path: str) -> None:
        if path.endswith("/log"):
            raise Refusal(403, "Forbidden", 'pods "x" is forbidden: User "me" cannot get resource "pods/log"')

    cluster.refuse = refuse
    scheduler = Kubernetes()
    job = scheduler.submit(program(request_here))
    assert wait_until(lambda: scheduler.status(job).state in ("running", "completed"), 60)
    with pytest.raises(LaunchError, match="to read pods and their logs"):
        scheduler.collect(job)


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    (tmp_path / "kubernetes.py").write_text("raise ImportError('no')\n")
    code = (
        "from tutti.clusters.kubernetes_api import Cluster\n"
        "from tutti.errors import LaunchError\n"
        "try:\n    Cluster(None, None)\nexcept LaunchError as error:\n    print(error)\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    assert done.stdout == "the package kubernetes is not installed (no); install it: pip install 'tutti[kubernetes]'\n"


def test_a_pod_goes_on_with_a_run_that_has_begun(tmp_path: Path) -> None:
    words = ("--nproc", "1", "train.py")
    begun = pod_command("inside", tmp_path, "/runs/old", "2", "n-{}.n:29400", 1, words)
    nodes = ["--nnodes", "2", "--node-rank", "1", "--rendezvous", "n-0.n:29400", "--one-screen"]
    start = ["run", "--on", "local", "--folder", str(tmp_path)]
    assert begun == [*start, "--resume", "/runs/old", *nodes, *words]
    ranged = pod_command("inside", tmp_path, "", "1:4", "n-{}.n:29400", 1, words)
    assert ranged == [*start, "--nnodes", "1:4", *nodes[2:], *words]
    (tmp_path / "run.json").write_text("{}")
    assert pod_command("inside", tmp_path, "/runs/old", "1", "", 0, words) == [
        *start,
        "--resume",
        str(tmp_path),
        *words,
    ]
    with pytest.raises(LaunchError, match="the pods do not see"):
        pod_command("seen", tmp_path, "", "1", "", 0, words)


def test_a_pod_with_a_store_goes_on_from_its_own_checkpoints_only(tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store"
    (tmp_path / "store/step-00000004").mkdir(parents=True)
    (tmp_path / "store/step-00000004/index.json").write_text("{}")  # of another job
    start = ["run", "--on", "local", "--folder", "/tmp/tutti/n-1"]
    assert pod_command(store, Path("/tmp/tutti/n-1"), "", "1", "", 0, ["train.py"]) == [*start, "train.py"]
    assert pod_command(store, Path("/tmp/tutti/n-1"), "", "1", "", 0, ["train.py"]) == [*start, "train.py"]
    for name in ("step-00000002.0a", "step-00000003.0b"):
        (tmp_path / "store" / name).mkdir()
        (tmp_path / "store" / name / "index.json").write_text("{}")
    again = pod_command(store, Path("/tmp/tutti/n-1"), "", "1", "", 0, ["train.py"])
    assert again == [*start, "--resume", f"{store}/step-00000003.0b", "train.py"]


def test_a_pod_waits_for_all_names() -> None:
    asked, known = [], {"a"}

    def resolve(host: str) -> None:
        asked.append(host)
        if host not in known:
            known.add(host)
            raise OSError("no such name")

    wait_for_names(["a", "b", "c"], resolve, pause_s=0)
    assert asked == ["a", "b", "b", "c", "c"]


def test_a_pod_that_is_told_to_stop_before_it_begins_is_resumable(tmp_path: Path) -> None:
    arguments = ("inside", str(tmp_path), "", "2", "no-such-pod-{}.invalid:29400", "train.py")
    with subprocess.Popen(
        [sys.executable, "-m", "tutti.clusters.kubernetes_node", *arguments],
        env={**os.environ, "JOB_COMPLETION_INDEX": "1"}, stderr=subprocess.PIPE, text=True,
    ) as pod:  # fmt: skip
        assert pod.stderr is not None
        assert pod.stderr.readline() == "waiting until pod 0 is placed\n"
        time.sleep(0.05)
        pod.send_signal(signal.SIGTERM)
        assert pod.wait(20) == 75

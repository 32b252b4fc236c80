"""Kubernetes: an Indexed Job that starts `tutti run` once in each of its pods, through the official client.

The Job, a headless Service and a Secret make up a run; the latter two belong to the Job. What pods print is copied into
the run folder's log whenever somebody looks.
"""

import contextlib
import json
import math
import re
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from tutti.clusters.cluster_job import JobRequest, JobStatus, NodeCommand
from tutti.clusters.cluster_resources import NodePool
from tutti.clusters.job_states import JobStates
from tutti.clusters.kubernetes_api import Cluster, cluster_of, package, pod_index
from tutti.clusters.kubernetes_manifest import (
    COMMAND,
    ENDED,
    EXTRA_GRACE_S,
    MARK,
    KubernetesSettings,
    is_mounted,
    manifests,
    object_name,
    owned,
    read_kubernetes_settings,
    unique_part,
    with_secret,
)
from tutti.clusters.kubernetes_status import EXIT_CODE, SEEN_S, STOP, container_state, exit_code, status_of
from tutti.errors import RESUMABLE, LaunchError

LOG = "kubernetes.log"

_FOLLOW_S = 0.5
_LOG_SLACK_S = 10.0
_WATCH_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesJob:
    """What this user's machine knows of a job.

    Attributes:
        inside: the run folder in the cluster; empty if it is the one of this machine.
        log: the file that takes what pods print.
        cancelled: whether the user has ended it.
        copied: for each pod the stamp of the last line in the log, how many lines have it, and when they were read.
    """

    context: str | None
    kubeconfig: str | None
    grace_s: float
    inside: str
    log: str
    cancelled: bool = False
    copied: Mapping[str, tuple[str, int, float]] = field(default_factory=dict)


_JOBS = JobStates("kubernetes", KubernetesJob)


class Kubernetes:
    """See `tutti.clusters.cluster_job.Scheduler`."""

    def nodes(self, settings: Mapping[str, Any], nnodes: int | None) -> tuple[int | None, ...]:
        return ()

    def preview(self, request: JobRequest) -> str:
        settings = read_kubernetes_settings(request.settings)
        name = object_name(request.name, request.nodes, "xxxxxx")
        kind, folder = _place(request, settings, name)
        job, service, secret = manifests(request, settings, name, folder, kind)
        yaml = package("yaml")
        workdir = settings.directory or job["spec"]["template"]["spec"]["containers"][0].get("workingDir")
        where = workdir or "the image's working directory"
        text = f"# The image or a volume holds the code: the command runs in {where}.\n"
        text += f"# The run folder is {folder} in the pods.\n"
        documents = (job, service, with_secret(secret, "made at submission"))
        return text + str(yaml.safe_dump_all(documents, sort_keys=False, width=120))

    def submit(self, request: JobRequest) -> str:
        settings = read_kubernetes_settings(request.settings)
        name = object_name(request.name, request.nodes, unique_part())
        kind, folder = _place(request, settings, name)
        request = replace(request, resume=_resumed(request, folder))
        job, service, secret = manifests(request, settings, name, folder, kind)
        cluster = cluster_of(settings.context, settings.kubeconfig)
        _check_version(request, cluster)
        space = settings.namespace or cluster.namespace
        mark = {"folder": folder if kind == "inside" else "", "job": name}
        (request.folder / MARK).write_text(json.dumps(mark) + "\n", encoding="utf-8")
        _create(cluster, space, [job, service, secret])
        about = KubernetesJob(
            context=settings.context or cluster.context,
            kubeconfig=settings.kubeconfig,
            grace_s=request.grace_s,
            inside="" if kind == "seen" else folder,
            log=self.log(request, name),
        )
        _JOBS.write(f"{space}/{name}", about)
        if kind != "seen":
            where = "in the cluster" if kind == "inside" else "in its pod and ends with it, but for checkpoints"
            print(
                f"the run folder lies {where} ({folder}), so steps and loss are not shown here; "
                f"{LOG} has what the pods print",
                file=sys.stderr,
            )
        return f"{space}/{name}"

    def check_range(self, request: JobRequest) -> None:
        pass  # the version of the cluster is looked at when the job is submitted

    def log(self, request: JobRequest, job: str) -> str:
        return str(request.folder / LOG)

    def status(self, job: str) -> JobStatus:
        state = _JOBS.read(job)
        if state is not None and state.cancelled:
            return JobStatus(state="cancelled")
        cluster, space, name = _of(job, state)
        found = cluster.ask(cluster.batch.read_namespaced_job, name, space, absent=True)
        if found is None:
            return JobStatus(
                state="unknown", reason="the cluster has no such job; its time to live is over, or it was deleted"
            )
        return status_of(cluster, space, found, cluster.pods(space, name))

    def pools(self, settings: Mapping[str, Any]) -> tuple[NodePool, ...]:
        from tutti.clusters.kubernetes_resources import kubernetes_pools

        read = read_kubernetes_settings({"image": "any", **settings})
        return kubernetes_pools(cluster_of(read.context, read.kubeconfig), read)

    def run_on_nodes(
        self, command: NodeCommand, settings: Mapping[str, Any], show: Callable[[str], None]
    ) -> tuple[int, tuple[str, ...]]:
        read, nodes = read_kubernetes_settings(settings), command.nodes or 1
        nproc = command.nproc or read.gpus or 2
        name = object_name(f"tutti-{command.words[0]}", nodes, unique_part())
        request = JobRequest(
            name=name, folder=Path.cwd(), directory=Path.cwd(), words=command.words, nodes=nodes,
            nproc=(nproc,) * nodes, script=command.script or "", grace_s=1, resume=str(nproc),
        )  # fmt: skip
        things = manifests(request, read, name, command.numbered, COMMAND)
        cluster = cluster_of(read.context, read.kubeconfig)
        space = read.namespace or cluster.namespace
        try:
            _create(cluster, space, things)
            return _followed(cluster, space, name, show)
        finally:
            cluster.delete(space, name, grace_s=1)

    def collect(self, job: str) -> bool:
        state = _JOBS.read(job)
        if state is None:
            return False
        with contextlib.suppress(Timeout), FileLock(f"{_JOBS.file(job)}.lock", timeout=30):
            state = _JOBS.read(job) or state
            if not state.cancelled:
                cluster, space, name = _of(job, state)
                _JOBS.write(job, _copy_logs(cluster, space, name, state))
        return bool(state.inside)

    def stop(self, job: str) -> None:
        state = _JOBS.read(job)
        cluster, space, name = _of(job, state)
        pods = cluster.pods(space, name)
        live = {pod["metadata"]["name"] for pod in pods if pod["status"].get("phase") == "Running"}
        # The cluster ends the pods as it does at a deadline: with their grace, and for good. The Job stays.
        now = datetime.now(UTC).isoformat(timespec="seconds")
        change = {"metadata": {"annotations": {STOP: now}}, "spec": {"activeDeadlineSeconds": 1}}
        cluster.ask(cluster.batch.patch_namespaced_job, name, space, change)
        grace_s = (state.grace_s if state is not None else 30.0) + EXTRA_GRACE_S + SEEN_S
        count = len(live)
        codes = _last_codes(cluster, space, name, live, grace_s, lambda: self.collect(job))
        bad = [code for code in codes if code not in (0, RESUMABLE)]
        if bad or (codes and len(codes) == count):
            code = bad[0] if bad else max(codes)
            change = {"metadata": {"annotations": {EXIT_CODE: str(code)}}}
            cluster.ask(cluster.batch.patch_namespaced_job, name, space, change, absent=True)

    def cancel(self, job: str) -> None:
        state = _JOBS.read(job)
        self.collect(job)
        cluster, space, name = _of(job, state)
        cluster.delete(space, name, grace_s=1)
        if state is not None:
            _JOBS.write(job, replace(_JOBS.read(job) or state, cancelled=True))


def _check_version(request: JobRequest, cluster: Cluster) -> None:
    """Check that the cluster knows success policies, which a range needs. Raises LaunchError otherwise."""
    major, minor = (1, 31) if request.least_nodes is None else cluster.version()
    if (major, minor) < (1, 31):
        raise LaunchError(
            f"--nnodes {request.least_nodes}:{request.nodes} needs Kubernetes 1.31 or newer, where a job has a success "
            f"policy, and this cluster has {major}.{minor}; give one number of nodes"
        )


def _place(request: JobRequest, settings: KubernetesSettings, name: str) -> tuple[str, str]:
    """Return where pods keep the run: its kind, as `manifests` knows it, and the folder.

    Raises:
        LaunchError: the folder would end with the pods, or they would be made again after the run's time limit.
    """
    if request.time_limit_s is not None:
        raise LaunchError(
            "--time-limit: pods that have stopped with a checkpoint are made again, so the run would go on; leave it "
            "out, and end the run with `tutti cancel --checkpoint`"
        )
    if settings.folder is not None:
        if is_mounted(settings.folder, settings):
            return "inside", _earlier_folder(request.folder) or f"{settings.folder.rstrip('/')}/{name}"
        raise LaunchError(
            f"folder={settings.folder} is on no volume, so it ends with its pod; name one: volumes=CLAIM:PATH"
        )
    if is_mounted(str(request.folder), settings):
        return "seen", str(request.folder)
    if request.checkpoint_store is not None and request.nodes == 1:
        return request.checkpoint_store, f"/tmp/tutti/{name}"
    other = "; a single pod can leave its checkpoints in --checkpoint-store URL" if request.nodes == 1 else ""
    raise LaunchError(
        "the run folder would end with the pods; keep it on a volume: --request volumes=CLAIM:/runs "
        f"--request folder=/runs{other}"
    )


def _earlier_folder(folder: Path) -> str:
    """Return the folder in the cluster of an earlier job of this run folder; empty without one."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads((folder / MARK).read_text(encoding="utf-8"))["folder"])
    return ""


def _resumed(request: JobRequest, folder: str) -> Path | str | None:
    """Return what pods continue from: in the cluster, where a run folder of this machine is that of an earlier job."""
    if not isinstance(request.resume, Path):
        return request.resume
    earlier = _earlier_folder(request.resume)
    return None if earlier == folder else earlier or request.resume


def _of(job: str, state: KubernetesJob | None) -> tuple[Cluster, str, str]:
    """Return the cluster of a job, its namespace and its name."""
    space, _, name = job.partition("/")
    if not name:
        raise LaunchError(f"{job} is no job of Kubernetes (NAMESPACE/NAME); submit the run again")
    return (cluster_of(None, None) if state is None else cluster_of(state.context, state.kubeconfig)), space, name


def _create(cluster: Cluster, space: str, things: Sequence[Mapping[str, Any]]) -> None:
    """Create the Job, the Service and the Secret of a run, or none of them."""
    job, service, secret = things
    made = cluster.ask(cluster.batch.create_namespaced_job, space, job)["metadata"]
    try:
        token = secrets.token_hex(32)
        cluster.ask(cluster.core.create_namespaced_service, space, owned(service, made))
        cluster.ask(cluster.core.create_namespaced_secret, space, owned(with_secret(secret, token), made))
    except BaseException:
        with contextlib.suppress(LaunchError):
            cluster.delete(space, made["name"], grace_s=1)
        raise


def _followed(cluster: Cluster, space: str, name: str, show: Callable[[str], None]) -> tuple[int, tuple[str, ...]]:
    """Show what the pods of a job print until it has ended, and return the worst exit code and the nodes' names.

    Raises:
        LaunchError: a pod has ended without an exit code of its command.
    """
    codes, nodes, reason, ended = list[int](), dict[str, None](), "", False
    with tempfile.TemporaryDirectory(prefix="tutti-") as folder:
        log = Path(folder) / LOG
        log.touch()
        state = KubernetesJob(context=None, kubeconfig=None, grace_s=1, inside="", log=str(log))
        with log.open(encoding="utf-8") as printed:
            while True:
                job = cluster.ask(cluster.batch.read_namespaced_job, name, space)
                pods = cluster.pods(space, name)
                status = status_of(cluster, space, job, pods)
                nodes |= dict.fromkeys(pod["spec"]["nodeName"] for pod in pods if pod["spec"].get("nodeName"))
                if status.reason and status.reason != reason:
                    print(f"kubernetes job {space}/{name}: {status.state} ({status.reason})", file=sys.stderr)
                reason, ended = status.reason, status.ended
                state = _copy_logs(cluster, space, name, state)
                for line in printed.read().splitlines():
                    if ENDED in line:
                        codes.append(int(line.rpartition(ENDED)[2]))
                    else:
                        show(line)
                if ended:
                    break
                time.sleep(_FOLLOW_S)
    if status.state != "completed":
        raise LaunchError(f"kubernetes job {space}/{name} has {status.state} ({status.reason}); correct what it names")
    return max(codes, default=0), tuple(nodes)


def _copy_logs(cluster: Cluster, space: str, name: str, state: KubernetesJob) -> KubernetesJob:
    """Append what is new in the pods' output to the log."""
    copied, now = dict(state.copied), time.time()
    pods = [pod for pod in cluster.pods(space, name) if {"running", "terminated"} & set(container_state(pod))]
    single = all(pod_index(pod) == 0 for pod in pods)
    for pod in pods:
        key = pod["metadata"]["name"]
        stamp, count, read_at = copied.get(key, ("", 0, 0.0))
        text = cluster.output(space, key, math.ceil(now - read_at + _LOG_SLACK_S) if read_at else None)
        head = "" if single or pod_index(pod) == 0 else f"[pod {pod_index(pod)}] "
        fresh, same = [], 0
        for line in text.splitlines():
            time_text, _, words = line.partition(" ")
            at = _comparable(time_text)
            same = same + 1 if at == stamp else 0
            if at < stamp or (at == stamp and same <= count):
                continue
            count = count + 1 if at == stamp else 1
            stamp, same = at, count
            fresh.append(f"{head}{words}\n")
        copied[key] = (stamp, count, now)
        if fresh:
            with Path(state.log).open("a", encoding="utf-8") as log:
                log.writelines(fresh)
    return replace(state, copied=copied)


def _comparable(stamp: str) -> str:
    """Return a time of a log with nine digits after the point, so that texts compare as times do."""
    match = re.fullmatch(r"([^.Z+]*)(?:\.(\d+))?(.*)", stamp)
    return f"{match[1]}.{(match[2] or '').ljust(9, '0')}{match[3]}" if match else stamp


def _last_codes(
    cluster: Cluster, space: str, name: str, live: set[str], seconds: float, look: Callable[[], object]
) -> list[int]:
    """Return the exit codes of those of these pods that end within a time, calling `look` whenever one changes."""
    deadline = time.monotonic() + seconds
    codes: dict[str, int] = {}
    with contextlib.suppress(LaunchError):
        while live and time.monotonic() < deadline:
            for pod in cluster.changes(space, name, min(_WATCH_S, deadline - time.monotonic())):
                code, key = exit_code(pod), pod["metadata"]["name"]
                look()
                if code is not None and key in live:
                    codes[key] = code
                if code is not None or pod["gone"]:
                    live.discard(key)
                if not live:
                    break
            live &= {pod["metadata"]["name"] for pod in cluster.pods(space, name)}
    return list(codes.values())

"""Ray: a job of an existing cluster, whose driver starts `tutti run` once on each of its nodes.

What the nodes print is the job's log, which is copied into the run folder whenever somebody looks.
"""

import contextlib
import json
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from tutti.clusters.cluster_job import JobRequest, JobState, JobStatus, NodeCommand
from tutti.clusters.job_states import JobStates
from tutti.clusters.ray_api import (
    DEFAULT_ADDRESS,
    RayCluster,
    RayJobInfo,
    checked_address,
    last_state,
    printed,
    ray_cluster,
)
from tutti.clusters.ray_driver import CANCELLED
from tutti.clusters.ray_node import MARK
from tutti.clusters.ray_task import (
    RaySettings,
    command_task,
    entrypoint,
    plain_name,
    read_ray_settings,
    runtime_env_of,
    task_of,
)
from tutti.config.safe_text import plain_text, shorten
from tutti.environment import ray_address
from tutti.errors import RESUMABLE, LaunchError

LOG = "ray.log"

_CANCEL_S = 60.0
_FOLLOW_S = 0.5
_STATES: dict[str, JobState] = {
    "PENDING": "pending", "RUNNING": "running", "SUCCEEDED": "completed", "FAILED": "failed", "STOPPED": "cancelled",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RayJob:
    """What this user's machine knows of a job.

    Attributes:
        address: of the cluster's dashboard.
        inside: the run folder in the cluster; empty if it is the one of this machine.
        log: the file that takes what the nodes print.
        cancelled: whether the user has ended it.
        copied: number of characters of the job's output that are in the log.
    """

    address: str
    inside: str
    log: str
    cancelled: bool = False
    copied: int = 0


_JOBS = JobStates("ray", RayJob)


class RayJobs:
    """See `tutti.clusters.cluster_job.Scheduler`."""

    def nodes(self, settings: Mapping[str, Any], nnodes: int | None) -> tuple[int | None, ...]:
        return ()

    def check_range(self, request: JobRequest) -> None:
        end = request.words.index(request.script) if request.script in request.words else len(request.words)
        for option in ("--mesh", "--plan"):
            if any(word == option or word.startswith(f"{option}=") for word in request.words[:end]):
                raise LaunchError(
                    f"{option} fixes the number of ranks, and --nnodes {request.least_nodes}:{request.nodes} lets it "
                    "change; leave one of them out"
                )

    def preview(self, request: JobRequest) -> str:
        settings = read_ray_settings(request.settings)
        task = task_of(request, settings, f"tutti-{request.name}-xxxxxx")
        bundles = {"strategy": "STRICT_SPREAD", "bundles": [task["bundle"]] * request.nodes}
        shown = {
            "address": _dashboard(settings),
            "submission_id": task["job"],
            "placement_group": bundles,
            "runtime_env": runtime_env_of(request, settings),
            "entrypoint": ["python3", "-c", "...", task],
        }
        return json.dumps(shown, indent=2) + "\n"

    def submit(self, request: JobRequest) -> str:
        settings = read_ray_settings(request.settings)
        name = f"tutti-{plain_name(request.name)}-{secrets.token_hex(3)}"
        task = task_of(request, settings, name)
        address = _dashboard(settings)
        cluster = ray_cluster(address)
        inside = task["folder"] if task["kind"] == "inside" else ""
        (request.folder / MARK).write_text(json.dumps({"job": name, "inside": inside}) + "\n", encoding="utf-8")
        cluster.submit(name, entrypoint(json.dumps(task)), runtime_env_of(request, settings))
        _JOBS.write(name, RayJob(address=address, inside=inside, log=self.log(request, name)))
        if inside:
            print(
                f"the run folder lies in the cluster ({inside}), so steps and loss are not shown here; {LOG} has what "
                "the nodes print",
                file=sys.stderr,
            )
        return name

    def log(self, request: JobRequest, job: str) -> str:
        return str(request.folder / LOG)

    def status(self, job: str) -> JobStatus:
        state = _JOBS.read(job)
        cluster = _cluster_of(state)
        info = cluster.info(job)
        if info is None:
            return JobStatus(state="unknown", reason="the cluster does not know it, or has been started anew")
        ended = info.status not in ("PENDING", "RUNNING")
        text = "" if info.status == "PENDING" else cluster.output(job, fresh=ended)
        return status_of(info, last_state(text), cancelled=state is not None and state.cancelled)

    def run_on_nodes(
        self, command: NodeCommand, settings: Mapping[str, Any], show: Callable[[str], None]
    ) -> tuple[int, tuple[str, ...]]:
        read = read_ray_settings(settings)
        name = f"tutti-{plain_name(command.words[0])}-{secrets.token_hex(3)}"
        task = command_task(command, read, name)
        request = JobRequest(name=name, folder=Path("/"), directory=Path.cwd(), words=command.words, grace_s=1)
        if command.script is None:  # none of the project's code is needed
            task["directory"], read = "/", read.model_copy(update={"sync": "none", "directory": "/"})
        cluster = ray_cluster(_dashboard(read))
        cluster.submit(name, entrypoint(json.dumps(task)), runtime_env_of(request, read))
        try:
            return _followed(cluster, name, show)
        finally:
            cluster.stop(name)

    def collect(self, job: str) -> bool:
        state = _JOBS.read(job)
        if state is None:
            return False
        with contextlib.suppress(Timeout), FileLock(f"{_JOBS.file(job)}.lock", timeout=30):
            state = _JOBS.read(job) or state
            cluster = ray_cluster(state.address)
            info = cluster.info(job)
            if info is not None and info.status != "PENDING":
                ended = info.status != "RUNNING"
                text = cluster.output(job, fresh=ended)
                whole = len(text) if ended else text.rfind("\n") + 1
                if whole > state.copied:
                    with Path(state.log).open("a", encoding="utf-8") as log:
                        log.write(printed(text[state.copied : whole]))
                    _JOBS.write(job, replace(state, copied=whole))
        return bool(state.inside)

    def stop(self, job: str) -> None:
        _cluster_of(_JOBS.read(job)).stop(job)

    def cancel(self, job: str) -> None:
        state = _JOBS.read(job)
        cluster = _cluster_of(state)
        if state is not None:
            _JOBS.write(job, replace(state, cancelled=True))
        info = cluster.info(job)
        if info is not None and info.status == "RUNNING" and last_state(cluster.output(job, fresh=True)).get("nodes"):
            self._end_agents(cluster, job, info)
        cluster.stop(job)

    def _end_agents(self, cluster: RayCluster, job: str, info: RayJobInfo) -> None:
        """End the ranks by a small job: a stop alone lets them write a checkpoint first."""
        name = f"{job}-cancel-{secrets.token_hex(2)}"
        cluster.submit(name, entrypoint("cancel", job), dict(info.runtime_env))
        deadline = time.monotonic() + _CANCEL_S
        status = "PENDING"
        while status in ("PENDING", "RUNNING") and time.monotonic() < deadline:
            time.sleep(0.2)
            now = cluster.info(name)
            status = "FAILED" if now is None else now.status
        if status != "SUCCEEDED":
            print(
                f"tutti: the job {name}, which ends ranks at once, is {status.lower()}; they get time for a checkpoint",
                file=sys.stderr,
            )


def _followed(cluster: RayCluster, name: str, show: Callable[[str], None]) -> tuple[int, tuple[str, ...]]:
    """Show what a job prints until it has ended, and return its exit code and the nodes' names.

    Raises:
        LaunchError: it has ended without an exit code of the command.
    """
    shown, reason = 0, ""
    while True:
        info = cluster.info(name)
        ended = info is None or info.status not in ("PENDING", "RUNNING")
        text = "" if info is None or info.status == "PENDING" else cluster.output(name, fresh=ended)
        about = last_state(text)
        lines = printed(text if ended else text[: text.rfind("\n") + 1]).splitlines()
        for line in lines[shown:]:
            show(line)
        shown = len(lines)
        waits = str(about.get("reason") or "") if about.get("state") == "pending" else ""
        if waits and waits != reason:
            print(f"ray job {name}: pending ({waits})", file=sys.stderr)
        reason = waits
        if ended:
            break
        time.sleep(_FOLLOW_S)
    code, why = about.get("code"), str(about.get("reason") or (info.message if info is not None else "") or "no reason")
    if not isinstance(code, int) or code == 2 or about.get("state") != "ended":
        raise LaunchError(f"ray job {name} has failed ({shorten(plain_text(why), 400)}); correct what it names")
    return code, tuple(filter(None, str(about.get("nodes") or "").split(",")))


def status_of(info: RayJobInfo, about: Mapping[str, Any], *, cancelled: bool) -> JobStatus:
    """Return the state of a job from what Ray and its driver say."""
    state = _STATES.get(info.status, "unknown")
    nodes, reason, code = str(about.get("nodes") or ""), str(about.get("reason") or ""), about.get("code")
    if state in ("pending", "running"):
        if state == "pending":
            reason = "Ray starts its driver"
        elif not about:
            state, reason = "pending", "its driver asks for nodes"
        elif about.get("state") == "pending":
            state = "pending"
        elif about.get("state") == "ended":
            reason = ""  # Ray has not noticed it yet
        return JobStatus(state=state, reason=reason, nodes=nodes)
    if code is None:
        code = info.exit_code
    if state == "completed":
        return JobStatus(state=state, nodes=nodes, exit_code=0)
    if cancelled and code not in (0, RESUMABLE):
        return JobStatus(state="cancelled", reason="cancelled by `tutti cancel`", nodes=nodes, exit_code=CANCELLED)
    if code == RESUMABLE:
        return JobStatus(state="cancelled", reason=reason, nodes=nodes, exit_code=RESUMABLE)
    if about.get("state") != "ended":
        reason = _driver_failure(info)
    return JobStatus(state=state, reason=reason, nodes=nodes, exit_code=code if code else 1)


def _driver_failure(info: RayJobInfo) -> str:
    """Return why a driver has ended that did not say so itself."""
    lines = [line for line in info.message.splitlines() if line.startswith("tutti: ")]
    if lines:
        return lines[-1].removeprefix("tutti: ")
    last = next((line for line in reversed(info.message.splitlines()) if line.strip()), "it gave no reason")
    return f"its driver ended: {shorten(plain_text(last), 300)}"


def _dashboard(settings: RaySettings) -> str:
    return checked_address(settings.address or ray_address() or DEFAULT_ADDRESS)


def _cluster_of(state: RayJob | None) -> RayCluster:
    return ray_cluster(state.address if state is not None else checked_address(ray_address() or DEFAULT_ADDRESS))

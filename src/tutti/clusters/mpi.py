"""Runs by mpirun, where a site's MPI knows how to reach the nodes. A driver on this machine is the job."""

import json
import os
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tutti.clusters.cluster_job import JobRequest, JobStatus, interrupts_let_through
from tutti.clusters.driver_job import (
    DRIVERS,
    cancel_driver,
    job_status,
    remove_errors,
    running_driver,
    start_driver,
)
from tutti.clusters.mpi_hosts import (
    MpiSettings,
    chosen_nodes,
    mpi_kind,
    mpirun_command,
    read_mpi_settings,
    stated_variables,
)
from tutti.errors import LaunchError
from tutti.launch.launch_environment import variables

LOG = "mpi.log"

_START_S = 240.0


class Mpi:
    """See `tutti.clusters.cluster_job.Scheduler`."""

    def nodes(self, settings: Mapping[str, Any], nnodes: int | None) -> tuple[int | None, ...]:
        nodes = chosen_nodes(read_mpi_settings(settings), Path.cwd(), nnodes)
        return tuple(None if host is None else host.ranks for host in nodes)

    def preview(self, request: JobRequest) -> str:
        job = _job(request)
        task = job["task"]
        first = task["arguments"] + (["--nnodes", str(job["nodes"]), "--node-rank", "NODE"] if job["nodes"] > 1 else [])
        first += ["--rendezvous", job["rendezvous"] or "HOST:PORT", "--one-screen"] if job["nodes"] > 1 else []
        return "\n".join(
            [
                shlex.join(job["command"]),
                "# and the process on each node then runs:",
                f"cd {shlex.quote(task['directory'])}",
                f"python -m tutti.cli.main {shlex.join([*first, *task['last']])}",
                "",
            ]
        )

    def submit(self, request: JobRequest) -> str:
        remove_errors(request.folder)
        name = ""
        try:
            with interrupts_let_through():
                name = start_driver("tutti.clusters.mpi_driver", _job(request), request.folder / LOG, _START_S)
        except KeyboardInterrupt:
            if name:
                cancel_driver(name, "mpi")
            raise
        state = DRIVERS.read(name)
        if state is not None and not state.began:
            raise LaunchError(state.reason)
        return name

    def log(self, request: JobRequest, job: str) -> str:
        return str(request.folder / LOG)

    def status(self, job: str) -> JobStatus:
        return job_status(job)

    def collect(self, job: str) -> bool:
        return False

    def stop(self, job: str) -> None:
        running_driver(job, "mpi").terminate()

    def cancel(self, job: str) -> None:
        cancel_driver(job, "mpi")

    def command_on_nodes(
        self, words: Sequence[str], nodes: int, tasks_per_node: int | None, settings: Mapping[str, Any]
    ) -> list[str]:
        read = read_mpi_settings(settings)
        task = {"directory": os.getcwd(), "arguments": list(words), "last": [], "tasks": tasks_per_node or 1}
        job = _described(read, nodes, Path.cwd(), 10.0, task)
        number, name = tempfile.mkstemp(prefix="tutti-mpi-", suffix=".json")  # only this user reads it
        with os.fdopen(number, "w", encoding="utf-8") as file:
            json.dump(job, file)
        return [sys.executable, "-m", "tutti.clusters.mpi_driver", name]


def _job(request: JobRequest) -> dict[str, Any]:
    """Return what the driver is to do, as JSON.

    Raises:
        LaunchError: a setting does not exist, there is no mpirun, or fewer hosts are named.
    """
    arguments = ["run", "--on", "local", "--folder", str(request.folder)]
    arguments += ["--resume", str(request.resume)] if request.resume is not None else []
    if request.nproc is not None:
        arguments += ["--nproc", ",".join(map(str, request.nproc))]
    task = {"directory": str(request.directory), "arguments": arguments, "last": list(request.words), "tasks": 0}
    settings = read_mpi_settings(request.settings)
    return _described(settings, request.nodes, request.directory, request.grace_s, task) | {
        "folder": str(request.folder)
    }


def _described(
    settings: MpiSettings, nnodes: int, directory: Path, grace_s: float, task: dict[str, Any]
) -> dict[str, Any]:
    nodes = chosen_nodes(settings, directory, nnodes)
    given = variables() | stated_variables(settings)
    first = nodes[0]
    return {
        "folder": "",
        "grace_s": grace_s,
        "command": mpirun_command(settings, mpi_kind(settings), nodes, given, grace_s),
        "settings": settings.model_dump(mode="json"),
        "nodes": len(nodes),
        "first": "" if first is None else first.name,
        "rendezvous": settings.rendezvous or "",
        "task": task,
    }

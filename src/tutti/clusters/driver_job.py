"""A job whose driver is a process of the submitting machine: its state, which outlives it, its start and its end."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tutti.clusters.cluster_job import JobStatus
from tutti.clusters.job_states import JobStates
from tutti.config.safe_text import plain_text, shorten
from tutti.errors import LaunchError

CANCEL = signal.SIGUSR1
"""The signal that ends a job at once; SIGTERM lets the ranks write a checkpoint first."""

_BEAT_S = 60.0
"""Seconds between two signs of life that a driver gives by touching its state, for machines that share this home."""

_LOST_S = 300.0
"""Seconds without one after which a driver of another machine counts as lost."""

_CANCEL_S = 25.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverState:
    """The state of a job, as its driver writes it.

    Attributes:
        machine: where the driver runs.
        pid, since: its process, and the Unix time at which that was started.
        places: where hosts have a copy of the code for it, as HOST:DIRECTORY.
        began: whether its nodes have started; the reason says why not.
    """

    machine: str
    pid: int
    since: float
    state: str
    reason: str
    nodes: str
    exit_code: int | None
    places: Sequence[str] = ()
    began: bool = True


DRIVERS = JobStates("drivers", DriverState)
"""The jobs of drivers of this user."""


def job_name(pid: int) -> str:
    """Return the name of the job whose driver is this process: a number that is used again names another."""
    return f"{pid}-{int(psutil.Process(pid).create_time())}"


def driver_process(state: DriverState) -> psutil.Process | None:
    """Return a job's driver if it lives on this machine."""
    try:
        process = psutil.Process(state.pid)
        if abs(process.create_time() - state.since) < 1.0 and process.status() != psutil.STATUS_ZOMBIE:
            return process
    except psutil.Error:
        pass
    return None


def job_in(place: str) -> str:
    """Return the name of a job of this machine that runs in a copy of the code; empty if there is none.

    Args:
        place: HOST:DIRECTORY of the copy.
    """
    for file in DRIVERS.folder.glob("*.json"):
        state = DRIVERS.read(file.stem)
        if state is None or place not in state.places or state.exit_code is not None:
            continue
        if state.machine == socket.gethostname() and driver_process(state) is not None:
            return file.stem
    return ""


def job_status(job: str) -> JobStatus:
    """Return the state of a job; "unknown" if this user has none of that name on this machine."""
    state = DRIVERS.read(job)
    if state is None:
        return JobStatus(state="unknown")
    if state.exit_code is None and state.machine == socket.gethostname() and driver_process(state) is None:
        state = DRIVERS.read(job) or state  # it may have ended just now
    if state.exit_code is None and state.machine == socket.gethostname() and driver_process(state) is None:
        reason = "its driver on this machine was killed, so the hosts have ended the ranks"
        return JobStatus(state="failed", reason=reason, nodes=state.nodes, exit_code=1)
    if state.exit_code is None and state.machine != socket.gethostname() and _silent_s(job) > _LOST_S:
        reason = (
            f"its driver on {state.machine} has given no sign of life for {_silent_s(job) / 60:.0f} minutes; ask there"
        )
        return JobStatus(state="unknown", reason=reason, nodes=state.nodes)
    known: Any = state.state
    return JobStatus(state=known, reason=state.reason, nodes=state.nodes, exit_code=state.exit_code)


def _silent_s(job: str) -> float:
    """Return how long ago a driver gave a sign of life, by the clock of the disk that has its state."""
    try:
        with tempfile.TemporaryFile(dir=DRIVERS.file(job).parent) as probe:
            now = os.fstat(probe.fileno()).st_mtime
        return now - DRIVERS.file(job).stat().st_mtime
    except OSError:
        return 0.0


def give_signs_of_life() -> None:
    """Touch the state of the job whose driver is this process each minute, from a thread, until the process ends."""
    file = DRIVERS.file(job_name(os.getpid()))

    def touch() -> None:
        while True:
            time.sleep(_BEAT_S)
            with contextlib.suppress(OSError):
                os.utime(file)

    threading.Thread(target=touch, name="tutti state", daemon=True).start()


def save_state(state: DriverState) -> None:
    """Write the state of the job whose driver is this process."""
    DRIVERS.write(job_name(os.getpid()), state)


def own_state(state: str, reason: str, nodes: str, exit_code: int | None, **further: Any) -> DriverState:
    """Return the state of the job whose driver is this process."""
    process = psutil.Process()
    return DriverState(
        machine=socket.gethostname(), pid=process.pid, since=process.create_time(), state=state, reason=reason,
        nodes=nodes, exit_code=exit_code, **further,
    )  # fmt: skip


def running_driver(job: str, scheduler: str) -> psutil.Process:
    """Return the driver of a job.

    Args:
        job: its name.
        scheduler: the scheduler's name, in messages.

    Raises:
        LaunchError: it runs on another machine, or has ended.
    """
    state = DRIVERS.read(job)
    process = driver_process(state) if state is not None else None
    if process is None:
        place = f" here; it was started on {state.machine}" if state is not None else ""
        raise LaunchError(f"{scheduler} job {job} does not run{place}; `tutti status` shows its state")
    return process


def cancel_driver(job: str, scheduler: str) -> None:
    """Let a job's driver end everything at once.

    Raises:
        LaunchError: it runs on another machine, or has ended.
    """
    process = running_driver(job, scheduler)
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(CANCEL)
        try:
            process.wait(_CANCEL_S)
        except psutil.TimeoutExpired:
            process.kill()  # the hosts end by themselves then


def start_driver(module: str, job: dict[str, Any], log: Path, timeout_s: float) -> str:
    """Start the driver in a session of its own, which no terminal ends, and return the job's name.

    Args:
        module: the driver's, which reads the job from its input.
        job: what it is to do, as JSON.
        log: the file that takes what it prints.
        timeout_s: the longest time until it has written its state.

    Raises:
        LaunchError: it ended at once.
    """
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    try:
        name = job_name(process.pid)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as stream:
            stream.write(json.dumps(job).encode() + b"\n")
        deadline = time.monotonic() + timeout_s
        while DRIVERS.read(name) is None:
            if process.poll() is not None or time.monotonic() > deadline:
                raise LaunchError(f"the driver of the run ended at once; {log} says why")
            time.sleep(0.05)
    except BaseException:  # nobody would know its name; the hosts end by themselves
        process.kill()
        process.wait()
        raise
    return name


def remove_errors(folder: Path) -> None:
    """Remove the failures of an earlier start, which would be taken for those of the next one."""
    for error in folder.glob("ranks/*/error.json"):
        error.unlink(missing_ok=True)


def first_error(folder: Path) -> str:
    """Return the first failure of a rank that did not only lose another one, as a clause; "" if none is recorded."""
    found = []
    for file in folder.glob("ranks/*/error.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            error = json.loads(file.read_text(encoding="utf-8"))
            if error["kind"] != "peer":
                found.append((float(error["time_s"]), f"rank {error['rank']} on {error['host']}: {error['message']}"))
    return shorten(" ".join(plain_text(min(found)[1]).split()), 300) if found else ""

"""Run commands on the hosts of a lab: start them together, read their output, and end them by process id."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import tutti.lab.lab_network as lab_network
from tutti.lab.lab_record import LabRecord

MARK = "TUTTI_LAB_RUN"
"""Environment variable that identifies the processes of one run inside a host, even after their parent has ended."""

SETTLE_S = 10.0
"""Seconds that the other hosts get to end by themselves after a command failed on one host."""

_ENTER = """
{ echo "$1" > /proc/sys/kernel/hostname || hostname "$1"; } 2> /dev/null
mount --bind "$2" /etc/hosts && shift 2 && exec "$@"
"""

_REAP = """
mark=$1 && shift
read -r line && exit
for round in 1 2 3; do
    for host in "$@"; do
        for pid in $(ip netns pids "$host"); do
            tr '\\0' '\\n' < "/proc/$pid/environ" | grep -qxF "$mark" && kill -KILL "$pid"
        done
    done
    sleep 0.2
done
"""
"""Shell script that waits for a line on its input, and kills the run if the pipe closes without one.

A closed pipe means that the process that would have written the line has died.
"""

Stream = Literal["out", "err"]
Sink = Callable[[int, Stream, str], None]
"""A function that takes a host's number, a stream, and one line that the host wrote to it, with its line break."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """How a command ended on one host.

    Attributes:
        code: exit code; -N after signal N.
    """

    host: int
    code: int
    out: str = ""
    err: str = ""


def cores_of(host: int, hosts: int, cores: Sequence[int]) -> list[int]:
    """Return the cores of one host: an equal part of `cores` if there are enough, else one core shared in turn."""
    if len(cores) < hosts:
        return [cores[host % len(cores)]]
    return list(cores[host * len(cores) // hosts : (host + 1) * len(cores) // hosts])


def inside(
    record: LabRecord, host: int, command: Sequence[str], environment: Mapping[str, str] | None = None
) -> list[str]:
    """Return the command line that runs `command` on a host.

    It sets the network, the host name, the names of the other hosts, and the cores.

    Args:
        record: the lab.
        host: number of the host.
        command: the command and its arguments.
        environment: further environment variables.
    """
    cores = cores_of(host, len(record.rates), sorted(os.sched_getaffinity(0)))
    variables = [f"{name}={value}" for name, value in (environment or {}).items()]
    return [
        *("ip", "netns", "exec", record.namespace(host), "unshare", "--uts"),
        *("sh", "-c", _ENTER, "sh", f"host{host}", str(record.hosts_file)),
        *("taskset", "--cpu-list", ",".join(map(str, cores)), "env", *variables, *command),
    ]


def rendezvous_port() -> int:
    """Return a random port for the rendezvous of one run, because runs that share a lab need different ports."""
    return random.SystemRandom().randrange(20000, 30000)  # below the range of ephemeral ports


def place(record: LabRecord, host: int, port: int) -> dict[str, str]:
    """Return the environment variables that tell launchers such as torchrun which host this is.

    No rank is set, because a host has several ranks.
    """
    return {
        "NODE_RANK": str(host),
        "NNODES": str(len(record.rates)),
        "NPROC_PER_NODE": str(record.ranks_per_host),
        "MASTER_ADDR": record.address(0),
        "MASTER_PORT": str(port),
    }


def train_command(record: LabRecord, host: int, port: int, arguments: Sequence[str]) -> list[str]:
    """Return the `tutti run` command for one host of a lab.

    Args:
        record: the lab.
        host: number of the host.
        port: port of the rendezvous on host 0.
        arguments: options of `tutti run`, then the script and its own arguments.
    """
    command = [sys.executable, "-m", "tutti.cli.main", "run"]
    if len(record.rates) > 1:
        meet = f"{record.address(0)}:{port}"
        command += ["--nnodes", str(len(record.rates)), "--node-rank", str(host), "--rendezvous", meet]
    return [*command, *arguments]


class LabCommand:
    """One command on each of several hosts.

    Args:
        record: the lab.
        commands: command by host number.
        sink: called with each line that a host writes.
        environment: further environment variables.
        cwd: working directory.
        ends_with_process: end the commands when this process ends, even if it is killed.
    """

    def __init__(
        self,
        record: LabRecord,
        commands: Mapping[int, Sequence[str]],
        *,
        sink: Sink,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        ends_with_process: bool = False,
    ) -> None:
        self._record, self._sink = record, sink
        self._mark = uuid.uuid4().hex
        self._processes: dict[int, subprocess.Popen[str]] = {}
        self._readers: list[threading.Thread] = []
        self._failed_at: float | None = None
        self._reaper: subprocess.Popen[bytes] | None = None
        port = rendezvous_port()
        try:
            if ends_with_process:
                self._reaper = _reaper(f"{MARK}={self._mark}", [record.namespace(host) for host in commands])
            for host, command in commands.items():
                variables = {**place(record, host, port), **(environment or {}), MARK: self._mark}
                self._start(host, inside(record, host, command, variables), cwd)
        except BaseException:
            self.stop(0)
            raise

    def _start(self, host: int, command: list[str], cwd: Path | None) -> None:
        """Start one host's command, and a thread for each of its output streams."""
        process = subprocess.Popen(
            command,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        self._processes[host] = process
        streams: tuple[tuple[Stream, IO[str] | None], ...] = (("out", process.stdout), ("err", process.stderr))
        for name, stream in streams:
            assert stream is not None
            reader = threading.Thread(target=self._listen, args=(host, name, stream), daemon=True)
            reader.start()
            self._readers.append(reader)

    def _listen(self, host: int, name: Stream, stream: IO[str]) -> None:
        """Pass a stream's lines to the sink."""
        with stream:
            for line in stream:
                self._sink(host, name, line)

    def wait(self, timeout_s: float) -> dict[int, int] | None:
        """Return the exit codes by host once all commands have ended; None after `timeout_s` seconds.

        If one command fails, the others have `SETTLE_S` seconds to end by themselves and are then ended.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            codes = {host: process.poll() for host, process in self._processes.items()}
            if all(code is not None for code in codes.values()):
                self._hear_the_rest()
                self._dismiss_reaper()
                return {host: code for host, code in codes.items() if code is not None}
            if self._failed_at is None and any(codes.values()):
                self._failed_at = time.monotonic()
            if self._failed_at is not None and time.monotonic() > self._failed_at + SETTLE_S:
                self.stop()
                continue
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.02)

    def _hear_the_rest(self) -> None:
        """Read what the commands wrote last, but do not wait for a process that they left behind with the pipe open."""
        for reader in self._readers:
            reader.join(1.0)

    def stop(self, grace_s: float = 5.0) -> None:
        """End the commands, and then every process that they started inside the lab.

        Args:
            grace_s: seconds between SIGTERM and SIGKILL; with 0, the commands are killed at once.
        """
        for process in self._processes.values():
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM if grace_s else signal.SIGKILL)
        deadline = time.monotonic() + grace_s
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        lab_network.end(self.processes, 0)
        for process in self._processes.values():
            process.wait()
        self._dismiss_reaper()

    def _dismiss_reaper(self) -> None:
        """Tell the reaper that the run has ended."""
        if self._reaper is not None:
            self._reaper.communicate(b"done\n")
            self._reaper = None

    def processes(self) -> list[int]:
        """Return the living processes of this run inside the lab: the commands and their descendants."""
        mark = f"{MARK}={self._mark}".encode()
        return [
            pid
            for host in self._processes
            for pid in lab_network.pids(self._record.namespace(host))
            if _marked(pid, mark)
        ]


def _reaper(mark: str, namespaces: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start the shell that ends the run if this process dies.

    It has its own session, so that signals to this process do not reach it.
    """
    command = ("sh", "-c", _REAP, "sh", mark, *namespaces)
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True)


def _marked(pid: int, mark: bytes) -> bool:
    """Return whether a process has the run's mark in its environment."""
    try:
        return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False

"""Commands on the hosts of a lab: started together, listened to, and ended by number."""

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
"""The variable by which processes of one run are found inside a host, whoever their parent is by then."""

SETTLE_S = 10.0
"""How long the other hosts may take to end by themselves once a command has failed on one."""

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
"""Waits for a line; where the pipe ends without one, who would have written it is gone, and the run is ended."""

Stream = Literal["out", "err"]
Sink = Callable[[int, Stream, str], None]
"""Takes a line (with its end) that a host wrote to a stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """How a command ended on one host. `code`: its exit code, -N after signal N."""

    host: int
    code: int
    out: str = ""
    err: str = ""


def cores_of(host: int, hosts: int, cores: Sequence[int]) -> list[int]:
    """The cores of one host: an equal part of `cores` where there are enough, else one that hosts take in turn."""
    if len(cores) < hosts:
        return [cores[host % len(cores)]]
    return list(cores[host * len(cores) // hosts : (host + 1) * len(cores) // hosts])


def inside(
    record: LabRecord, host: int, command: Sequence[str], environment: Mapping[str, str] | None = None
) -> list[str]:
    """The command line that runs `command` on a host: its network, host name, names of the others, and cores."""
    cores = cores_of(host, len(record.rates), sorted(os.sched_getaffinity(0)))
    words = [f"{name}={value}" for name, value in (environment or {}).items()]
    return [
        *("ip", "netns", "exec", record.namespace(host), "unshare", "--uts"),
        *("sh", "-c", _ENTER, "sh", f"host{host}", str(record.hosts_file)),
        *("taskset", "--cpu-list", ",".join(map(str, cores)), "env", *words, *command),
    ]


def rendezvous_port() -> int:
    """A port for one run to meet at: runs that share a lab need different ones."""
    return random.SystemRandom().randrange(20000, 30000)  # below the ports that systems hand out


def place(record: LabRecord, host: int, port: int) -> dict[str, str]:
    """Where a host stands among the others, for launchers such as torchrun. Sets no rank: hosts have several."""
    return {
        "NODE_RANK": str(host),
        "NNODES": str(len(record.rates)),
        "NPROC_PER_NODE": str(record.ranks_per_host),
        "MASTER_ADDR": record.address(0),
        "MASTER_PORT": str(port),
    }


def train_command(record: LabRecord, host: int, port: int, arguments: Sequence[str]) -> list[str]:
    """`tutti run` as it is started on one host of the lab; `arguments` end with the script and its own."""
    command = [sys.executable, "-m", "tutti.cli.main", "run"]
    if len(record.rates) > 1:
        meet = f"{record.address(0)}:{port}"
        command += ["--nnodes", str(len(record.rates)), "--node-rank", str(host), "--rendezvous", meet]
    return [*command, *arguments]


class LabCommand:
    """One command on each of several hosts. Ends with them; `stop` ends them earlier. `ends_with_process`: so does the
    end of this process, even if it is killed.
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
        with stream:
            for line in stream:
                self._sink(host, name, line)

    def wait(self, timeout_s: float) -> dict[int, int] | None:
        """Exit codes by host once all have ended, None when `timeout_s` seconds passed before.

        Where one failed, the others have some seconds to end by themselves, and are ended then.
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
        """What the commands wrote last. A process that they left behind may hold the pipe: it is not waited for."""
        for reader in self._readers:
            reader.join(1.0)

    def stop(self, grace_s: float = 5.0) -> None:
        """End the commands, asked first, and then all that they started inside the lab."""
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
        if self._reaper is not None:
            self._reaper.communicate(b"done\n")
            self._reaper = None

    def processes(self) -> list[int]:
        """Living processes of this run inside the lab: the commands' own and their descendants."""
        mark = f"{MARK}={self._mark}".encode()
        return [
            pid
            for host in self._processes
            for pid in lab_network.pids(self._record.namespace(host))
            if _marked(pid, mark)
        ]


def _reaper(mark: str, namespaces: Sequence[str]) -> subprocess.Popen[bytes]:
    """A shell in a session of its own, so that nothing meant for this process ends it."""
    command = ("sh", "-c", _REAP, "sh", mark, *namespaces)
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True)


def _marked(pid: int, mark: bytes) -> bool:
    try:
        return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False

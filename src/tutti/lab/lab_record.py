"""The record of a lab: its owner and its parts, in one file per lab.

A lab consists of network namespaces whose names contain the lab's id. The file is written before the first namespace is
made and deleted after the last one is gone, so the next command finds whatever an interrupted one left.
"""

import contextlib
import fcntl
import os
import re
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from tutti.config import serialization
from tutti.errors import LabError, TuttiError

FOLDER = Path("/run/tutti-lab")
"""Folder of the records; like namespaces, it does not survive a restart of the machine."""

MOST_HOSTS = 200

PATIENCE_S = 120.0
"""Maximum seconds to wait while another process makes or removes labs, each of which takes a few seconds."""

_NAME = re.compile(r"[\w.-]+", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process, identified by its pid and its start time, because pids are reused.

    Attributes:
        started: clock ticks from boot to the start of the process.
    """

    pid: int
    started: int

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return start_of(self.pid) == self.started


@dataclass(frozen=True, slots=True, kw_only=True)
class LabRecord:
    """One lab.

    Attributes:
        name: "" for a lab to which no command line can refer.
        owner: the process with which the lab ends; None if the lab remains until it is removed.
        subnet: the first three numbers of its addresses.
        rates: rate of each host's link in bits per second, in each direction; None for unlimited.
    """

    id: str
    name: str
    owner: Owner | None
    subnet: str
    rates: tuple[int | None, ...]
    ranks_per_host: int = 1
    made_utc: str
    version: int = 1

    def __post_init__(self) -> None:
        if not 1 <= len(self.rates) <= MOST_HOSTS:
            raise LabError(f"a lab of {len(self.rates)} hosts cannot be made; give 1 to {MOST_HOSTS} hosts")
        if self.ranks_per_host < 1:
            raise LabError(f"a lab cannot have {self.ranks_per_host} ranks per host; give 1 or more")

    @property
    def hosts(self) -> range:
        """The numbers of the hosts."""
        return range(len(self.rates))

    @property
    def switch(self) -> str:
        """The namespace of the bridge."""
        return f"tutti-{self.id}-switch"

    @property
    def namespaces(self) -> tuple[str, ...]:
        """All namespaces of the lab: one per host, then the switch's."""
        return (*(self.namespace(host) for host in self.hosts), self.switch)

    @property
    def stale(self) -> bool:
        """Whether the owner is gone."""
        return self.owner is not None and not self.owner.alive

    @property
    def file(self) -> Path:
        """The file of this record."""
        return FOLDER / f"{self.id}.json"

    @property
    def hosts_file(self) -> Path:
        """The file that the lab's hosts see as /etc/hosts."""
        return FOLDER / f"{self.id}.hosts"

    def namespace(self, host: int) -> str:
        """Return the namespace of a host."""
        return f"tutti-{self.id}-host{host}"

    def address(self, host: int) -> str:
        """Return the IPv4 address of a host."""
        return f"{self.subnet}.{host + 1}"


def new_record(
    rates: tuple[int | None, ...], *, ranks_per_host: int, name: str, owner: Owner, subnet: str
) -> LabRecord:
    """Return the record of a lab that is not made yet, with a new id; parameters are those of `LabRecord`."""
    return LabRecord(
        id=uuid.uuid4().hex[:8],
        name=name,
        owner=owner,
        subnet=subnet,
        rates=rates,
        ranks_per_host=ranks_per_host,
        made_utc=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def check_name(name: str) -> str:
    """Check that a command line can refer to a lab by this name, and return it.

    Raises:
        LabError: the name is empty or has other characters than letters, digits, and ". _ -".
    """
    if not _NAME.fullmatch(name):
        raise LabError(f"{name!r} names no lab; give letters, digits, and any of . _ -, such as --name lab")
    return name


def write(record: LabRecord) -> None:
    """Write the record of a lab."""
    serialization.save(record, record.file)


def records() -> list[LabRecord]:
    """Return the records of all labs, the oldest first; files that are not records are ignored."""
    result = []
    for path in FOLDER.glob("*.json"):
        with contextlib.suppress(TuttiError):
            result.append(serialization.load(LabRecord, path))
    return sorted(result, key=lambda record: (record.made_utc, record.id))


def this_process() -> Owner:
    """Return this process as an owner."""
    pid = os.getpid()
    started = start_of(pid)
    assert started is not None
    return Owner(pid=pid, started=started)


def start_of(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the command name before the ")" may contain spaces
    return None if fields[0] in "ZX" else int(fields[19])  # Z, X: ended, but not reaped yet


@contextlib.contextmanager
def locked(patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Hold the lock under which labs are made and removed; it is released when the process that holds it ends.

    Args:
        patience_s: maximum seconds to wait for the lock.

    Raises:
        LabError: another process holds the lock for longer.
    """
    FOLDER.mkdir(mode=0o755, parents=True, exist_ok=True)
    with (FOLDER / "lock").open("a+", encoding="ascii") as file:
        until = time.monotonic() + patience_s
        while not _taken(file):
            if time.monotonic() >= until:
                file.seek(0)
                raise LabError(
                    f"process {file.read() or 'unknown'} has been making or removing a lab for {patience_s:g} s; "
                    "resume it if it is stopped, or end it, and try again"
                )
            time.sleep(0.05)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _taken(file: TextIO) -> bool:
    """Try to take the lock; return whether it worked."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

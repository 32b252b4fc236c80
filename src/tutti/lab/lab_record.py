"""What is kept of a lab while it stands: whose it is and what it consists of, in a file for each.

Everything a lab makes is a network namespace whose name has the lab's id; the file is written before the first one is
made and removed after the last one is gone, so whatever dies in between is found by the next command.
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
"""Gone after a restart of the machine, as namespaces are."""

MOST_HOSTS = 200

PATIENCE_S = 120.0
"""How long another process may make or remove labs: each takes a few seconds."""

_NAME = re.compile(r"[\w.-]+", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process: its number may be given again, so when it `started` belongs to it (clock ticks since boot)."""

    pid: int
    started: int

    @property
    def alive(self) -> bool:
        return start_of(self.pid) == self.started


@dataclass(frozen=True, slots=True, kw_only=True)
class LabRecord:
    """One lab.

    `name`: "" for one that no command line asks for. `owner`: the process it ends with; None once it stands until it is
    taken down. `subnet`: the first three numbers of its addresses. `rates`: of every host's link, bits a second one
    way, None for unlimited.
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
            raise LabError(f"{self.ranks_per_host} ranks per host; give 1 or more")

    @property
    def hosts(self) -> range:
        return range(len(self.rates))

    @property
    def switch(self) -> str:
        """The namespace of the bridge."""
        return f"tutti-{self.id}-switch"

    @property
    def namespaces(self) -> tuple[str, ...]:
        """All that the lab made: one for each host, and the switch's."""
        return (*(self.namespace(host) for host in self.hosts), self.switch)

    @property
    def stale(self) -> bool:
        """Whether the process it belongs to is gone."""
        return self.owner is not None and not self.owner.alive

    @property
    def file(self) -> Path:
        return FOLDER / f"{self.id}.json"

    @property
    def hosts_file(self) -> Path:
        """What the lab's hosts see as /etc/hosts."""
        return FOLDER / f"{self.id}.hosts"

    def namespace(self, host: int) -> str:
        return f"tutti-{self.id}-host{host}"

    def address(self, host: int) -> str:
        return f"{self.subnet}.{host + 1}"


def new_record(
    rates: tuple[int | None, ...], *, ranks_per_host: int, name: str, owner: Owner, subnet: str
) -> LabRecord:
    """A lab that does not stand yet, with an id of its own."""
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
    """A name by which a command line may ask for a lab. Raises LabError for others: "" is every lab's that no command
    line asks for."""
    if not _NAME.fullmatch(name):
        raise LabError(f"{name!r} names no lab; give letters, digits, and any of . _ -, such as --name lab")
    return name


def write(record: LabRecord) -> None:
    """Keep the record: whole or not at all, so that a reader never sees half of one."""
    beside = record.file.with_suffix(".new")
    serialization.save(record, beside)
    beside.replace(record.file)


def records() -> list[LabRecord]:
    """All labs that are kept, the oldest first; a file that is none is left alone."""
    found = []
    for path in FOLDER.glob("*.json"):
        with contextlib.suppress(TuttiError):
            found.append(serialization.load(LabRecord, path))
    return sorted(found, key=lambda record: (record.made_utc, record.id))


def this_process() -> Owner:
    pid = os.getpid()
    started = start_of(pid)
    assert started is not None
    return Owner(pid=pid, started=started)


def start_of(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None where it is gone or only waits to be collected."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold blanks
    return None if fields[0] in "ZX" else int(fields[19])


@contextlib.contextmanager
def locked(patience_s: float = PATIENCE_S) -> Iterator[None]:
    """One process at a time makes or removes labs; the lock goes with the process that holds it. Raises LabError where
    another holds it for longer than that."""
    FOLDER.mkdir(mode=0o755, parents=True, exist_ok=True)
    with (FOLDER / "lock").open("a+", encoding="ascii") as file:
        until = time.monotonic() + patience_s
        while not _taken(file):
            if time.monotonic() >= until:
                file.seek(0)
                raise LabError(
                    f"process {file.read() or 'unknown'} has been making or removing a lab for {patience_s:g} s; let "
                    "it go on if it is stopped, or end it, and try again"
                )
            time.sleep(0.05)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _taken(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

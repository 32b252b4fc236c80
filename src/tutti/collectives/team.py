"""Teams: the ranks of a process group that all live on one host, and how they signal each other.

Exchanges are numbered; all ranks start them in the same order. The numbers take turns in a ring of slots, each with
semaphores of its own. Of every exchange a rank's record says which of its rooms holds its tensor.
"""

import os
import select
import time
from typing import Any

import torch
import torch.distributed as dist

from tutti.collectives import semaphores
from tutti.collectives.rooms import Memory, Room, attach, host_identity
from tutti.collectives.semaphores import SPACING, Semaphores

SLOTS = 128
"""Exchanges that may be under way at once."""

ROOMS = 1024
"""Rooms of a rank that others may still ask for."""

_PATIENCE_S = 0.05
"""Between looks at whether those we wait for are still there."""

READY, CLAIM, DONE = range(3)
"""Semaphores of a slot: who has started, whose part nobody computes yet, which parts are there."""


class Team:
    """This rank's place among `size` ranks of one host.

    `control`: shared by all: semaphores, then a table of every rank's rooms (file, bytes), then every slot's records
    (room, values). `timeout_s`: how long to wait for others.
    """

    def __init__(self, control: Memory, processes: list[int], rank: int, timeout_s: float, *, create: bool) -> None:
        self.rank, self.size, self.timeout_s = rank, len(processes), timeout_s
        self._processes = processes
        self._watched = [os.pidfd_open(process) for process in processes]
        count = _semaphores(self.size)
        self._semaphores = Semaphores(control, count, create=create)
        tables = torch.frombuffer(control, dtype=torch.int64, offset=count * SPACING)
        rooms, records = torch.tensor_split(tables, [2 * ROOMS * self.size])
        self._rooms = rooms.view(self.size, ROOMS, 2).numpy()
        self._records = records.view(SLOTS, self.size, 2).numpy()
        self._started = 0
        self._mine: list[Room] = []
        self._theirs: dict[tuple[int, int], Memory] = {}

    def start(self, room: int, numel: int) -> int:
        """Begin the next exchange with the first `numel` values of this rank's room; returns its slot."""
        slot = self._started % SLOTS
        self._started += 1
        self._records[slot, self.rank] = room, numel
        self.post(slot, CLAIM, self.rank)
        self.tell(slot, READY)
        return slot

    def tell(self, slot: int, kind: int) -> None:
        """Signal all others."""
        for other in range(self.size):
            if other != self.rank:
                self.post(slot, kind, other)

    def post(self, slot: int, kind: int, rank: int) -> None:
        self._semaphores.post(self._index(slot, kind, rank))

    def take(self, slot: int, kind: int, rank: int) -> bool:
        """Take a signal if there is one."""
        return self._semaphores.take(self._index(slot, kind, rank))

    def wait(self, slot: int, kind: int) -> None:
        """Wait for a signal to this rank. Raises RuntimeError when another rank has ended, or nobody comes in time."""
        index = self._index(slot, kind, self.rank)
        if self._semaphores.take(index):
            return
        end = time.monotonic() + self.timeout_s
        while not self._semaphores.wait(index, _PATIENCE_S):
            gone = self._gone()
            if gone and not self._semaphores.take(index):
                raise RuntimeError(f"Connection closed by peer: the process of rank {gone[0]} of {self.size} has ended")
            if gone:
                return
            if time.monotonic() > end:
                raise RuntimeError(f"Timed out waiting {self.timeout_s:g} s for other ranks of this host")

    def new_room(self, nbytes: int) -> tuple[int, Room]:
        """A room of this rank's for exchanges, with its number. It stays as long as the team."""
        number = len(self._mine)
        if number == ROOMS:
            raise RuntimeError(f"shared memory: a team has at most {ROOMS} rooms; make buckets larger")
        room = Room(nbytes)
        self._mine.append(room)
        self._rooms[self.rank, number] = room.file, room.nbytes
        return number, room

    def tensors(self, slot: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Every rank's tensor of an exchange that all have started. Raises RuntimeError if their sizes differ."""
        records = self._records[slot].tolist()
        sizes = {numel for _, numel in records}
        if len(sizes) > 1:
            raise RuntimeError(f"shared memory: ranks exchange tensors of different sizes: {sorted(sizes)} values")
        return [
            torch.frombuffer(self._memory(rank, room), dtype=dtype, count=numel)
            for rank, (room, numel) in enumerate(records)
        ]

    @property
    def borrowed_nbytes(self) -> int:
        """Bytes of other ranks' rooms that this rank has mapped, and so are resident in it as well."""
        return sum(len(memory) for memory in self._theirs.values())

    def _memory(self, rank: int, room: int) -> Memory:
        if rank == self.rank:
            return self._mine[room].memory
        if (rank, room) not in self._theirs:
            file, nbytes = self._rooms[rank, room].tolist()
            self._theirs[rank, room] = attach(self._processes[rank], file, nbytes)
        return self._theirs[rank, room]

    def _gone(self) -> list[int]:
        """Places of ranks whose process has ended."""
        poll = select.poll()
        for handle in self._watched:
            poll.register(handle, select.POLLIN)
        return [self._watched.index(handle) for handle, _ in poll.poll(0)]

    def _index(self, slot: int, kind: int, rank: int) -> int:
        return (slot * 3 + kind) * self.size + rank

    def __del__(self) -> None:
        for handle in getattr(self, "_watched", ()):
            os.close(handle)


def make_team(group: Any = None) -> Team | None:
    """The team of a process group (None: all ranks); None where its ranks are not all on one host or may not share
    memory. All ranks of the group call it together, and all get the same answer.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    control = _control(size)
    mine = (host_identity(), os.getpid(), control.file if control is not None else -1)
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, mine, group=group)
    team = _join(everyone, rank, control, _timeout_s(group))
    ready: list[Any] = [None] * size
    dist.all_gather_object(ready, team is not None, group=group)
    return team if all(ready) else None


def _control(size: int) -> Room | None:
    """Room for the team's semaphores and tables; of all ranks' the first one's is used."""
    if size < 2 or not semaphores.available():
        return None
    try:
        return Room(_semaphores(size) * SPACING + 8 * 2 * size * (ROOMS + SLOTS))
    except OSError:
        return None


def _join(everyone: list[tuple[str, int, int]], rank: int, control: Room | None, timeout_s: float) -> Team | None:
    hosts, processes, files = zip(*everyone, strict=True)
    if control is None or min(files) < 0 or len(set(hosts)) > 1 or not hosts[0]:
        return None
    try:
        memory = control.memory if rank == 0 else attach(processes[0], files[0], control.nbytes)
        return Team(memory, list(processes), rank, timeout_s, create=rank == 0)
    except OSError:
        return None


def _semaphores(size: int) -> int:
    return SLOTS * 3 * size


def _timeout_s(group: Any) -> float:
    """The process group's own time-out."""
    known: Any = dist.distributed_c10d._get_default_group() if group is None else group
    backend = known._get_backend(torch.device("cpu"))
    return float(backend.options._timeout.total_seconds())

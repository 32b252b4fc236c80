"""Teams: the ranks of a process group that all live on one host, and the tables they share.

Exchanges of all ranks are numbered; every rank starts them in the same order. The numbers take turns in a ring of
slots, each with semaphores of its own. Of every exchange a rank's record says which of its rooms holds its tensor.
"""

from collections.abc import Callable

import torch

from tutti.comm.rooms import Memory, Room, attach, first_values
from tutti.comm.semaphores import SPACING
from tutti.comm.signals import Signals

SLOTS = 128
"""Exchanges, and messages from one rank to another, that may be under way at once."""

ROOMS = 1024
"""Rooms that a rank may have."""

READY, CLAIM, DONE = range(3)
"""Semaphores of a slot: who has started, whose part nobody computes yet, who is done."""

SENT, READ = range(2)
"""Semaphores of the way from one rank to another: messages sent, messages read."""


class Team:
    """This rank's place among `size` ranks of one host.

    `control`: shared by all: semaphores (of slots, of ways between ranks), then tables: every rank's rooms (file,
    bytes), every slot's records (room, values, whether the rank's part came out sound), every way's records (room,
    values). `timeout_s`: how long to wait. `ways`: records of messages, by source, target, and number in a ring of
    SLOTS.
    """

    def __init__(self, control: Memory, processes: list[int], rank: int, timeout_s: float, *, create: bool) -> None:
        self.rank, self.size = rank, len(processes)
        self._processes = processes
        count = semaphores_of(self.size)
        self.signals = Signals(control, count, processes, timeout_s, create=create)
        tables = torch.frombuffer(control, dtype=torch.int64, offset=count * SPACING)
        sizes = (2 * ROOMS * self.size, 3 * SLOTS * self.size, 2 * SLOTS * self.size**2)
        rooms, slots, ways, _ = torch.tensor_split(tables, [sizes[0], sum(sizes[:2]), sum(sizes)])
        self._rooms = rooms.view(self.size, ROOMS, 2).numpy()
        self._slots = slots.view(SLOTS, self.size, 3).numpy()
        self.ways = ways.view(self.size, self.size, SLOTS, 2).numpy()
        self._started = 0
        self._settle: dict[int, Callable[[], None]] = {}
        self._mine: list[Room] = []
        self._theirs: dict[tuple[int, int], Memory] = {}

    @property
    def others(self) -> list[int]:
        """Places of the other ranks, from the next one on."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def new_room(self, nbytes: int) -> tuple[int, Room]:
        """A room of this rank's, with its number. It stays as long as the team."""
        number = len(self._mine)
        if number == ROOMS:
            raise RuntimeError(f"shared memory: a team has at most {ROOMS} rooms; make buckets larger")
        room = Room(nbytes)
        self._mine.append(room)
        self._rooms[self.rank, number] = room.file, room.nbytes
        return number, room

    def start(self, room: int, numel: int, settle: Callable[[], None], *, claim: bool = False) -> int:
        """Begin the next exchange, with the first `numel` values of a room; returns its slot. `settle`: waits until
        this rank has got all signals of the exchange; called before the slot is used again. `claim`: whoever comes
        first may take this rank's part.
        """
        slot = self._started % SLOTS
        self._started += 1
        if slot in self._settle:
            self._settle[slot]()
        self._settle[slot] = settle
        self._slots[slot, self.rank, :2] = room, numel
        if claim:
            self.post(slot, CLAIM, self.rank)
        self.tell(slot, READY)
        return slot

    def forget(self, slot: int, settle: Callable[[], None]) -> None:
        """This rank has got all signals of the exchange that began in `slot` with `settle`."""
        if self._settle.get(slot) == settle:
            del self._settle[slot]

    def post(self, slot: int, kind: int, rank: int) -> None:
        """Signal one rank (CLAIM: whoever comes)."""
        self.signals.post((slot * 3 + kind) * self.size + rank)

    def tell(self, slot: int, kind: int) -> None:
        """Signal all others."""
        for other in self.others:
            self.post(slot, kind, other)

    def take(self, slot: int, kind: int, rank: int) -> bool:
        """Take a signal to `rank` if there is one."""
        return self.signals.take((slot * 3 + kind) * self.size + rank)

    def wait(self, slot: int, kind: int) -> None:
        """Wait for a signal to this rank. Raises RuntimeError when another has ended, or nobody comes in time."""
        self.signals.wait((slot * 3 + kind) * self.size + self.rank, self.others)

    def tensors(self, slot: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Every rank's tensor of an exchange that all have started. Raises RuntimeError if their sizes differ."""
        records = self._slots[slot, :, :2].tolist()
        sizes = {size for _, size in records}
        if len(sizes) > 1:
            raise RuntimeError(f"shared memory: ranks exchange tensors of different sizes: {sorted(sizes)} values")
        return [self.tensor(rank, room, size, dtype) for rank, (room, size) in enumerate(records)]

    def judge(self, slot: int, part: int, *, sound: bool) -> None:
        """Say of a part of an exchange's tensor whether it is sound, before this rank tells that it is done."""
        self._slots[slot, part, 2] = sound

    def all_sound(self, slot: int) -> bool:
        """Whether all parts were said to be, of an exchange that is over and whose slot is not used again yet."""
        return bool(self._slots[slot, :, 2].all())

    def way(self, source: int, target: int, kind: int) -> int:
        """The semaphore of messages from one rank to another."""
        return SLOTS * 3 * self.size + (kind * self.size + source) * self.size + target

    def tensor(self, rank: int, room: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The first values of a room; of another rank's, from then on mapped here. Raises RuntimeError when that rank
        has ended before it was."""
        if rank == self.rank:
            return self._mine[room].tensor(dtype, numel)
        if (rank, room) not in self._theirs:
            file, nbytes = self._rooms[rank, room].tolist()
            try:
                self._theirs[rank, room] = attach(self._processes[rank], file, nbytes)
            except FileNotFoundError as gone:
                words = f"Connection closed by peer: the process of rank {rank} here has ended"
                raise RuntimeError(words) from gone
        return first_values(self._theirs[rank, room], dtype, numel)


def semaphores_of(size: int) -> int:
    """Semaphores of a team."""
    return SLOTS * 3 * size + 2 * size * size


def control_nbytes(size: int) -> int:
    """Shared memory for a team's semaphores and tables."""
    return semaphores_of(size) * SPACING + 8 * size * (2 * ROOMS + 3 * SLOTS + 2 * SLOTS * size)

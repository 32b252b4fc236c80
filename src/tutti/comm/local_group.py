"""Local groups: the ranks of a process group that share a host, and the tables they keep in shared memory.

Collectives are numbered, and every rank starts them in the same order. Their numbers cycle through a ring of slots,
each with its own semaphores. Each slot records which shared segment holds each rank's tensor. `BufferPool` reuses
segments.
"""

from collections.abc import Callable

import torch

from tutti.comm.shared_segment import SPACING, Memory, SharedSegment, Signals, attach_segment, first_values

SLOTS = 128
"""Exchanges that may be in progress at once, and messages from one rank to another that may be unread."""

MAX_SEGMENTS = 1024
"""Largest number of shared segments of one rank."""

READY, CLAIM, DONE = range(3)
"""Semaphores of a slot: who has started, which slices are unclaimed, who is done."""

SENT, READ = range(2)
"""Semaphores of a pair of sender and receiver: messages sent, messages read."""


_NUMBERS: dict[str, int] = {}
"""How many local groups this process has had, by their processes; ranks make their groups in one order."""


class LocalGroup:
    """This rank's membership in a group of `size` ranks on one host.

    Args:
        control: shared memory for semaphores (per slot, per pair of ranks), then tables: each rank's segments
            (file, size), each slot's records (segment, values, slice finite), each pair's message records
            (segment, values).
        processes: process ids in the order of local ranks.
        rank: this process's local rank.
        timeout_s: the longest wait in seconds.
        create: whether this rank initialises the semaphores.

    Attributes:
        mailboxes: message records by source, target and message number modulo `SLOTS`.
        name: the group's, the same on all its ranks: their processes, and which of the groups of these processes it is.
    """

    def __init__(self, control: Memory, processes: list[int], rank: int, timeout_s: float, *, create: bool) -> None:
        self.rank, self.size = rank, len(processes)
        self._processes = processes
        members = ",".join(map(str, processes))
        _NUMBERS[members] = _NUMBERS.get(members, 0) + 1
        self.name = f"pid {members}#{_NUMBERS[members]}"
        count = num_semaphores(self.size)
        self.signals = Signals(control, count, processes, timeout_s, create=create)
        tables = torch.frombuffer(control, dtype=torch.int64, offset=count * SPACING)
        sizes = (2 * MAX_SEGMENTS * self.size, 3 * SLOTS * self.size, 2 * SLOTS * self.size**2)
        segments, slots, mailboxes, _ = torch.tensor_split(tables, [sizes[0], sum(sizes[:2]), sum(sizes)])
        self._segments = segments.view(self.size, MAX_SEGMENTS, 2).numpy()
        self._slots = slots.view(SLOTS, self.size, 3).numpy()
        self.mailboxes = mailboxes.view(self.size, self.size, SLOTS, 2).numpy()
        self._started = 0
        self._synchronize: dict[int, Callable[[], None]] = {}
        self._mine: list[SharedSegment] = []
        self._theirs: dict[tuple[int, int], Memory] = {}

    @property
    def others(self) -> list[int]:
        """The other local ranks, starting with the next one."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def new_segment(self, nbytes: int) -> tuple[int, SharedSegment]:
        """Create a segment of this rank, which lives as long as the group.

        Returns:
            (number, segment).

        Raises:
            RuntimeError: the rank has `MAX_SEGMENTS` segments already.
        """
        number = len(self._mine)
        if number == MAX_SEGMENTS:
            raise RuntimeError(
                f"shared memory: a rank may have at most {MAX_SEGMENTS} segments in a local group; make buckets larger"
            )
        segment = SharedSegment(nbytes)
        self._mine.append(segment)
        self._segments[self.rank, number] = segment.file, segment.nbytes
        return number, segment

    def start(self, segment: int, numel: int, synchronize: Callable[[], None], *, claim: bool = False) -> int:
        """Start the next collective with the first `numel` values of a segment.

        Args:
            segment: number of this rank's segment.
            numel: number of values.
            synchronize: waits for all signals of this collective; called before its slot is used again.
            claim: whether other ranks may reduce this rank's slice.

        Returns:
            The slot of the collective.
        """
        slot = self._started % SLOTS
        self._started += 1
        if slot in self._synchronize:
            self._synchronize[slot]()
        self._synchronize[slot] = synchronize
        self._slots[slot, self.rank, :2] = segment, numel
        if claim:
            self.post(slot, CLAIM, self.rank)
        self.signal(slot, READY)
        return slot

    def forget(self, slot: int, synchronize: Callable[[], None]) -> None:
        """Release `slot`: all signals of the collective that passed `synchronize` have arrived."""
        if self._synchronize.get(slot) == synchronize:
            del self._synchronize[slot]

    def post(self, slot: int, kind: int, rank: int) -> None:
        """Post a signal to one rank. A CLAIM signal is for whichever rank takes it first."""
        self.signals.post((slot * 3 + kind) * self.size + rank)

    def signal(self, slot: int, kind: int) -> None:
        """Post a signal to all other ranks."""
        for other in self.others:
            self.post(slot, kind, other)

    def take(self, slot: int, kind: int, rank: int) -> bool:
        """Take a signal to `rank` if there is one; return whether there was."""
        return self.signals.take((slot * 3 + kind) * self.size + rank)

    def wait(self, slot: int, kind: int) -> None:
        """Wait for a signal to this rank.

        Raises:
            RuntimeError: another rank has ended, or the wait timed out.
        """
        self.signals.wait((slot * 3 + kind) * self.size + self.rank, self.others)

    def tensors(self, slot: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return every rank's tensor, flat, in a slot that all ranks have started.

        Raises:
            RuntimeError: the tensors differ in size, or a rank has ended.
        """
        records = self._slots[slot, :, :2].tolist()
        sizes = {size for _, size in records}
        if len(sizes) > 1:
            raise RuntimeError(
                f"shared memory: ranks started a collective with tensors of different sizes: {sorted(sizes)} values; "
                "start the same collectives in the same order on all ranks"
            )
        return [self.tensor(rank, segment, size, dtype) for rank, (segment, size) in enumerate(records)]

    def record_finite(self, slot: int, part: int, *, finite: bool) -> None:
        """Record whether slice `part` is finite. Call this before this rank signals DONE."""
        self._slots[slot, part, 2] = finite

    def all_finite(self, slot: int) -> bool:
        """Return whether all slices of a completed collective are finite. Call this before the slot is used again."""
        return bool(self._slots[slot, :, 2].all())

    def mailbox_signal(self, source: int, target: int, kind: int) -> int:
        """Return the index of the semaphore `kind` (SENT or READ) of messages from `source` to `target`."""
        return SLOTS * 3 * self.size + (kind * self.size + source) * self.size + target

    def tensor(self, rank: int, segment: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the first `numel` values of a rank's segment, which is mapped on first use.

        Raises:
            RuntimeError: that rank's process has ended.
        """
        if rank == self.rank:
            return self._mine[segment].tensor(dtype, numel)
        if (rank, segment) not in self._theirs:
            file, nbytes = self._segments[rank, segment].tolist()
            try:
                self._theirs[rank, segment] = attach_segment(self._processes[rank], file, nbytes)
            except FileNotFoundError as gone:
                reason = f"Connection closed by peer: the process of rank {rank} in this host's local group has ended"
                raise RuntimeError(reason) from gone
        return first_values(self._theirs[rank, segment], dtype, numel)


def num_semaphores(size: int) -> int:
    """Return the number of semaphores of a local group of `size` ranks."""
    return SLOTS * 3 * size + 2 * size * size


def control_nbytes(size: int) -> int:
    """Return the bytes of shared memory that the semaphores and tables of a local group of `size` ranks need."""
    return num_semaphores(size) * SPACING + 8 * size * (2 * MAX_SEGMENTS + 3 * SLOTS + 2 * SLOTS * size)


class PendingSignals:
    """Signals of one kind that have not arrived yet in a slot.

    Args:
        local_group: the ranks of this host.
        slot: the slot.
        kind: READY or DONE.

    Attributes:
        missing: number of outstanding signals; at first one from each other rank.
    """

    __slots__ = ("_kind", "_local_group", "_slot", "missing")

    def __init__(self, local_group: LocalGroup, slot: int, kind: int) -> None:
        self._local_group, self._slot, self._kind = local_group, slot, kind
        self.missing = local_group.size - 1

    def arrived(self) -> bool:
        """Return whether all signals have arrived, without waiting."""
        while self.missing and self._local_group.take(self._slot, self._kind, self._local_group.rank):
            self.missing -= 1
        return not self.missing

    def wait(self) -> None:
        """Wait until all signals have arrived.

        Raises:
            RuntimeError: another rank has ended, or the wait timed out.
        """
        while self.missing:
            self._local_group.wait(self._slot, self._kind)
            self.missing -= 1


_MIN_SEGMENT_NBYTES = 4096
_MAX_PERSISTENT = MAX_SEGMENTS // 2


class BufferPool:
    """Shared segments of one rank in a local group, reused by size (powers of two).

    Args:
        local_group: the group whose tables list the segments.
    """

    def __init__(self, local_group: LocalGroup) -> None:
        self._local_group = local_group
        self._segments: dict[int, SharedSegment] = {}
        self._free: dict[int, list[int]] = {}
        self._borrowed: dict[int, int] = {}
        self._persistent: dict[int, int] = {}

    def put(self, flat: torch.Tensor) -> int:
        """Return the number of the segment that holds `flat`.

        Tensors from `borrow` and `keep` are in a segment already; others are copied into a free one.
        """
        address = flat.data_ptr()
        if address in self._borrowed:
            return self._borrowed.pop(address)
        if address in self._persistent:
            return self._persistent[address]
        number = self._take(flat.numel() * flat.element_size())
        self._segments[number].tensor(flat.dtype, flat.numel()).copy_(flat)
        return number

    def borrow(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised memory of a free segment, to be filled and then passed to `put`."""
        if not numel:
            return torch.empty(0, dtype=dtype)  # `put` could not recognise it by its address; it takes a segment then
        number = self._take(numel * dtype.itemsize)
        tensor = self._segments[number].tensor(dtype, numel)
        self._borrowed[tensor.data_ptr()] = number
        return tensor

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a flat tensor into a persistent segment, where `put` finds it.

        Returns:
            The copy, or the tensor itself if it is empty, already persistent, or no persistent segment is left.
        """
        if not tensor.numel() or tensor.data_ptr() in self._persistent or len(self._persistent) == _MAX_PERSISTENT:
            return tensor
        number, segment = self._local_group.new_segment(tensor.numel() * tensor.element_size())
        self._segments[number] = segment
        copy = segment.tensor(tensor.dtype, tensor.numel()).copy_(tensor)
        self._persistent[copy.data_ptr()] = number
        return copy

    def _take(self, nbytes: int) -> int:
        nbytes = max(_MIN_SEGMENT_NBYTES, 1 << max(nbytes - 1, 0).bit_length())  # untouched pages take no memory
        free = self._free.setdefault(nbytes, [])
        if free:
            number = free.pop()
        else:
            number, segment = self._local_group.new_segment(nbytes)
            self._segments[number] = segment
        return number

    def give(self, number: int) -> None:
        """Return a segment to the pool once no rank reads it any more."""
        if number not in self._persistent.values():
            self._free[self._segments[number].nbytes].append(number)

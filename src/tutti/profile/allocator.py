"""Simulate torch's caching allocator on CUDA: how much memory it holds beyond the tensors.

Blocks are rounded to 512 bytes. Requests up to 1 MiB come from segments of 2 MiB; requests below 10 MiB from segments
of 20 MiB; larger ones get a segment of their own, rounded to 2 MiB. The smallest free block that is large enough
serves a request and is split. Nothing is given back to the device (torch's CUDACachingAllocator, default options).
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

ROUND_NBYTES, SMALL_NBYTES, MEDIUM_NBYTES = 512, 2**20, 10 * 2**20
SMALL_SEGMENT_NBYTES, LARGE_SEGMENT_NBYTES, SEGMENT_ROUND_NBYTES = 2 * 2**20, 20 * 2**20, 2 * 2**20
STEPS = 3
"""Steps that are simulated: the optimizer's state appears after the first, and blocks are reused from the second on."""


@dataclass(slots=True, eq=False)
class _Block:
    """A block of a segment, with its neighbours in it."""

    nbytes: int
    small: bool
    free: bool = False
    before: "_Block | None" = None
    after: "_Block | None" = None


@dataclass(slots=True)
class CachingAllocator:
    """The state of the allocator.

    Attributes:
        allocated, reserved: bytes in use now, and bytes of all segments.
        peak: the most bytes that were in use.
    """

    allocated: int = 0
    reserved: int = 0
    peak: int = 0
    _free: dict[bool, list[tuple[int, int]]] = field(default_factory=lambda: {True: [], False: []})
    _blocks: dict[int, _Block] = field(default_factory=dict)

    def allocate(self, nbytes: float) -> "_Block":
        """Return a block of at least so many bytes."""
        size = max(ROUND_NBYTES, -(-int(nbytes) // ROUND_NBYTES) * ROUND_NBYTES)
        block = self._best_fit(size) or self._segment(size)
        rest = block.nbytes - size
        if rest >= (ROUND_NBYTES if block.small else SMALL_NBYTES + 1):
            left = _Block(rest, block.small, before=block, after=block.after)
            if block.after is not None:
                block.after.before = left
            block.after, block.nbytes = left, size
            self._release(left)
        self.allocated += block.nbytes
        self.peak = max(self.peak, self.allocated)
        return block

    def free(self, block: "_Block") -> None:
        """Give a block back; it is merged with free neighbours."""
        self.allocated -= block.nbytes
        for other in (block.before, block.after):
            if other is None or not other.free:
                continue
            self._take(other)
            block.nbytes += other.nbytes
            if other is block.before:
                block.before = other.before
                if other.before is not None:
                    other.before.after = block
            else:
                block.after = other.after
                if other.after is not None:
                    other.after.before = block
        self._release(block)

    def _best_fit(self, size: int) -> "_Block | None":
        pool = self._free[size <= SMALL_NBYTES]
        at = bisect_left(pool, (size, 0))
        if at == len(pool):
            return None
        block = self._blocks[pool[at][1]]
        self._take(block)
        return block

    def _segment(self, size: int) -> "_Block":
        if size <= SMALL_NBYTES:
            nbytes = SMALL_SEGMENT_NBYTES
        elif size < MEDIUM_NBYTES:
            nbytes = LARGE_SEGMENT_NBYTES
        else:
            nbytes = -(-size // SEGMENT_ROUND_NBYTES) * SEGMENT_ROUND_NBYTES
        self.reserved += nbytes
        return _Block(nbytes, size <= SMALL_NBYTES)

    def _release(self, block: "_Block") -> None:
        block.free = True
        self._blocks[id(block)] = block
        insort(self._free[block.small], (block.nbytes, id(block)))

    def _take(self, block: "_Block") -> None:
        block.free = False
        pool = self._free[block.small]
        del pool[bisect_left(pool, (block.nbytes, id(block)))]
        del self._blocks[id(block)]


def simulate_step(
    events: Sequence[tuple[int, float]], parameters: Iterable[float], states: Iterable[float]
) -> tuple[float, float]:
    """Return (most bytes of tensors, bytes that the allocator holds) after several steps.

    Args:
        events: (storage, bytes) of each allocation of a step; negative bytes for a release. What is not released
            (gradients of parameters) is released before the next step.
        parameters: bytes of each module's parameters.
        states: bytes of each module's optimizer state, which appears after the first step.
    """
    allocator = CachingAllocator()
    for nbytes in parameters:
        allocator.allocate(nbytes)
    live: dict[int, _Block] = {}
    for step in range(STEPS):
        for block in live.values():
            allocator.free(block)
        live.clear()
        for storage, nbytes in events:
            if nbytes < 0:
                if storage in live:
                    allocator.free(live.pop(storage))
            elif storage not in live:
                live[storage] = allocator.allocate(nbytes)
        if step == 0:
            for nbytes in states:
                allocator.allocate(nbytes)
    return float(allocator.peak), float(allocator.reserved)

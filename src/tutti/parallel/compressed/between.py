"""Compressed sums between hosts: inside each host exact, through the memory that its ranks share.

A host's ranks have the exact sum of their gradients first. Each rank then writes a part of it in few bytes for the same
part of the other hosts, and reads the others' parts from memory. So codes are of a host's sum, not of a rank's: H of
them are added up instead of p, what one loses is H/p of the ranks' number of times and nothing inside a host, and a
host sends what one rank of H sends. What is kept back is a host's: of each part, by the rank that writes it.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from tutti.comm.hierarchical import all_gather_slices, inter_host_slice
from tutti.comm.rendezvous import HostHierarchy
from tutti.comm.shared_memory import SharedMemoryAllReduce
from tutti.compression.exchange import Exchange, Place, Rounds, Span, Wire
from tutti.compression.state import State
from tutti.config.compression import Compression, sum_sent_nbytes

Make = Callable[[int, int], Exchange]
"""(values, part) -> the exchange of a part between hosts."""


class BetweenHosts(Exchange):
    """`make`: the exchange of this rank's part over `tiers.across`; `parts`: in how many a bucket is cut, at most as
    many as `tiers.parts`; `room_of`: the number of the room in which a tensor lies. `turns`: rounds of the exchange: a
    rank without a part takes as many, for exchanges that are under way together take their turns alike on all ranks.
    """

    def __init__(
        self, hierarchy: HostHierarchy, room_of: Callable[[Tensor], int], numel: int, parts: int, turns: int, make: Make
    ) -> None:
        self._hierarchy, self._room_of, self.numel, self._parts, self._turns = hierarchy, room_of, numel, parts, turns
        own = (
            inter_host_slice(torch.arange(numel), parts, hierarchy.local_group.rank)
            if hierarchy.local_group.rank < parts
            else torch.arange(0)
        )
        self._begin = int(own[0]) if own.numel() else 0
        self.inner = make(own.numel(), hierarchy.local_group.rank) if hierarchy.local_group.rank < parts else None
        nothing = State.zeros((), 0, dtype=torch.float32)
        if self.inner is None:
            super().__init__(Wire(lone=True), {"worker": nothing})
        else:
            super().__init__(self.inner.wire, self.inner.states, self.inner.shared)

    @property
    def holders(self) -> int:
        return self._hierarchy.hosts

    @property
    def density(self) -> float | None:
        return None if self.inner is None else self.inner.density

    def sent_nbytes(self, how: Compression | None, shapes: Sequence[Sequence[int]], itemsize: int) -> int:
        """Bytes this rank sends to other hosts in a step, of a bucket of tensors of `shapes`."""
        if self.inner is None:
            return 0
        mine = shapes if self._parts == 1 else [(self.inner.numel,)]
        return sum_sent_nbytes(how, mine, self._hierarchy.hosts, itemsize)

    @property
    def spans(self) -> dict[str, list[Span]]:
        if self.inner is None:
            return {"worker": []}
        shift = self._begin
        return {who: [(a + shift, b + shift) for a, b in some] for who, some in self.inner.spans.items()}

    @property
    def places(self) -> dict[str, list[Place]]:
        return {} if self.inner is None else self.inner.places

    def rounds(self, flat: Tensor) -> Rounds:
        yield from self._in_turn(flat, _idle(self._turns) if self.inner is None else self.inner.rounds)

    def exactly(self, flat: Tensor) -> Rounds:
        yield from self._in_turn(flat, _idle(1) if self.inner is None else self.inner.exactly)

    def settle(self, finite: bool) -> None:
        if self.inner is None:
            super().settle(finite)
        else:
            self.inner.settle(finite)

    def undo(self, start: int, stop: int) -> None:
        if self.inner is not None:
            self.inner.undo(start - self._begin, stop - self._begin)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        if self.inner is None:
            super().load(tensors)
        else:
            self.inner.load(tensors)

    def _in_turn(self, flat: Tensor, between: Callable[[Tensor], Rounds]) -> Rounds:
        """Inside the host, between hosts, inside again."""
        if not flat.numel():
            return
        local_group, room = self._hierarchy.local_group, self._room_of(flat)
        yield [SharedMemoryAllReduce(local_group, room, flat.numel(), flat.dtype)]
        yield from between(
            inter_host_slice(flat, self._parts, local_group.rank) if self.inner is not None else flat[:0]
        )
        all_gather_slices(local_group, room, flat, self._parts)


def _idle(turns: int) -> Callable[[Tensor], Rounds]:
    """So many rounds in which nothing is done."""

    def rounds(_: Tensor) -> Rounds:
        for _turn in range(turns):
            yield []

    return rounds

"""The two exchanges that sharding is made of: everyone's parts to everyone, and sums of which each rank gets its part.

Ranks that share memory use that, and what all of a host need comes to it once. Over sockets alone Gloo's own all-gather
copies its input and output, in memory of its threads that is not given back, its reduce-scatter takes two to three
times as long as an all-to-all and a sum, and its all-to-all mostly sends one way first and then the other (5 MiB each
way between hosts of a lab on 100 Mbit/s: 0.87 s in four of six times, messages 0.44 to 0.49; comm/pairs.py says
why): there both are made of messages, from and into the tensors themselves.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tutti.comm import (
    Desk,
    TieredDesk,
    all_gather,
    all_to_all,
    make_desk_or_tiers,
    ring_nbytes,
    sum_part,
    to_others,
)
from tutti.comm.traffic import Flight, Lane
from tutti.parallel.sharding.rooms import Rooms

_PARTS, _SUMS = 0, 1
"""Tags: ranks begin gathers in the same order, and sums, but not each before the same of the others."""

Rows = Sequence[torch.Tensor] | torch.Tensor
"""A flat tensor of every rank, in their order."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """Something on its way, to be waited for once. `tensors`: what is sent and received, if not in shared memory; they
    must live so long. `then`: what to do with it once it is there.
    """

    flight: Flight | None
    tensors: tuple[torch.Tensor, ...] = ()
    then: Callable[[], None] | None = None

    def wait(self) -> None:
        if self.flight is not None:
            self.flight.wait()
        if self.then is not None:
            self.then()


@dataclass(frozen=True, slots=True)
class Party:
    """Ranks that exchange. `handle`: their process group; `lane`: where exchanges are counted; `desk`: where they are
    made, if ranks share memory: all of them, or those of each host.
    """

    handle: Any
    lane: Lane
    desk: Desk | TieredDesk | None = None

    @classmethod
    def meet(cls, handle: Any, lane: Lane) -> "Party":
        """The ranks of a process group; they call this together."""
        return cls(handle, lane, make_desk_or_tiers(handle))

    def buffer(self, rooms: Rooms, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for a tensor that these ranks exchange next: of the desk, whose it is then again, or of `rooms`."""
        if self.desk is None:
            return rooms.take(numel, dtype, device)
        self.desk.settle(left=1)  # or ranks that are behind would have this one take more and more
        return self.desk.lend(numel, dtype)

    def shown(self, tensor: torch.Tensor) -> torch.Tensor:
        """A flat tensor, moved to where these ranks can read it, if there is such a place for it."""
        return tensor if self.desk is None or tensor.device.type != "cpu" else self.desk.keep(tensor)

    def settle(self) -> None:
        """Wait until all have read what this rank lets them read in place."""
        if self.desk is not None:
            self.desk.settle()

    @property
    def rows(self) -> bool:
        """Whether `scatter_sum` leaves a row for each rank to be summed, not the sum."""
        return self.desk is None and dist.get_backend(self.handle) == "gloo"


def gather(
    mine: torch.Tensor, party: Party, rows: Callable[[], torch.Tensor], read: Callable[[Rows], None]
) -> Exchange:
    """Every rank's `mine`, flat and of one size, to all: `read` is called with them in the order of ranks.

    In shared memory they are read where they lie, those of other hosts where one rank of this one has them: `mine` must
    not change until the party has settled. Elsewhere those of others come into what `rows` makes, (ranks, size), and
    `mine` must not change until they have been waited for.
    """
    lane, group = party.lane, party.handle
    rank, degree = dist.get_rank(group), dist.get_world_size(group)
    nbytes = (degree - 1) * mine.numel() * mine.element_size()
    if party.desk is not None:
        return Exchange(lane.start([party.desk.share(mine, read)], nbytes))
    segments = rows()
    if mine.device.type != "cpu":
        works = [all_gather(segments.view(-1), mine, group)]
        return Exchange(lane.start(works, nbytes), (segments, mine), partial(read, segments))
    flight = lane.start(to_others(segments, [mine] * degree, group, tag=_PARTS), nbytes)
    return Exchange(flight, (segments, mine), partial(read, [*segments[:rank], mine, *segments[rank + 1 :]]))


def scatter_sum(buffer: torch.Tensor, received: torch.Tensor, party: Party) -> Exchange:
    """Rows of `buffer`, (degree, size), to their ranks: the sum of the `addends` is this rank's part of the sum.

    `received` has a row for each rank where `party.rows`, and one elsewhere.
    """
    lane, nbytes = party.lane, buffer[1:].numel() * buffer.element_size()
    if party.desk is not None:
        return Exchange(lane.start([party.desk.scatter_sum(buffer, received[0])], nbytes))
    if not party.rows or buffer.device.type != "cpu":
        if party.rows:
            work = all_to_all(received, buffer, party.handle)
        else:
            work = sum_part(received[0], buffer.view(-1), party.handle)
        return Exchange(lane.start([work], nbytes), (buffer, received))
    flight = lane.start(to_others(received, buffer, party.handle, tag=_SUMS), nbytes)
    return Exchange(flight, (buffer, received))


def addends(buffer: torch.Tensor, received: torch.Tensor, party: Party) -> Rows:
    """What is added up once a `scatter_sum` is there. Of two ranks' rows, this one's own is added where it lies; more
    of them are summed in one pass, which they have to lie together for."""
    if not party.rows or buffer.device.type != "cpu":
        return received
    rank = dist.get_rank(party.handle)
    if len(buffer) == 2:
        return [buffer[rank], received[1 - rank]]
    received[rank].copy_(buffer[rank])
    return received


def start_sum(tensor: torch.Tensor, party: Party) -> tuple[Exchange, int]:
    """The sum of `tensor` over the ranks, in place; with it the bytes that this rank sends for it."""
    nbytes = ring_nbytes(tensor, dist.get_world_size(party.handle))
    if party.desk is not None:
        work: Any = party.desk.start_reduce(tensor)
    else:
        work = dist.all_reduce(tensor, group=party.handle, async_op=True)
    return Exchange(party.lane.start([work], nbytes), (tensor,)), nbytes

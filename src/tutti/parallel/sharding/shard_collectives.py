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

from tutti.comm.hierarchical import HierarchicalCommunicator, make_communicator
from tutti.comm.point_to_point import (
    all_gather,
    all_to_all,
    exchange_with_others,
    reduce_scatter,
    ring_all_reduce_nbytes,
)
from tutti.comm.shared_memory import SharedMemoryCommunicator
from tutti.comm.traffic import CommChannel, CommHandle
from tutti.parallel.sharding.gather_buffers import Rooms

_PARTS, _SUMS = 0, 1
"""Tags: ranks begin gathers in the same order, and sums, but not each before the same of the others."""

Rows = Sequence[torch.Tensor] | torch.Tensor
"""A flat tensor of every rank, in their order."""


@dataclass(frozen=True, slots=True)
class ShardExchange:
    """Something on its way, to be waited for once. `tensors`: what is sent and received, if not in shared memory; they
    must live so long. `then`: what to do with it once it is there.
    """

    handle: CommHandle | None
    tensors: tuple[torch.Tensor, ...] = ()
    then: Callable[[], None] | None = None

    def wait(self) -> None:
        if self.handle is not None:
            self.handle.wait()
        if self.then is not None:
            self.then()


@dataclass(frozen=True, slots=True)
class ShardGroup:
    """Ranks that exchange. `handle`: their process group; `channel`: where exchanges are counted; `communicator`:
    where they are
    made, if ranks share memory: all of them, or those of each host.
    """

    handle: Any
    channel: CommChannel
    communicator: SharedMemoryCommunicator | HierarchicalCommunicator | None = None

    @classmethod
    def meet(cls, handle: Any, channel: CommChannel) -> "ShardGroup":
        """The ranks of a process group; they call this together."""
        return cls(handle, channel, make_communicator(handle))

    def buffer(self, rooms: Rooms, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for a tensor that these ranks exchange next: of the desk, whose it is then again, or of `rooms`."""
        if self.communicator is None:
            return rooms.take(numel, dtype, device)
        self.communicator.synchronize(left=1)  # or ranks that are behind would have this one take more and more
        return self.communicator.borrow(numel, dtype)

    def shown(self, tensor: torch.Tensor) -> torch.Tensor:
        """A flat tensor, moved to where these ranks can read it, if there is such a place for it."""
        return tensor if self.communicator is None or tensor.device.type != "cpu" else self.communicator.keep(tensor)

    def settle(self) -> None:
        """Wait until all have read what this rank lets them read in place."""
        if self.communicator is not None:
            self.communicator.synchronize()

    @property
    def rows(self) -> bool:
        """Whether `scatter_sum` leaves a row for each rank to be summed, not the sum."""
        return self.communicator is None and dist.get_backend(self.handle) == "gloo"


def gather(
    mine: torch.Tensor, shard_group: ShardGroup, rows: Callable[[], torch.Tensor], read: Callable[[Rows], None]
) -> ShardExchange:
    """Every rank's `mine`, flat and of one size, to all: `read` is called with them in the order of ranks.

    In shared memory they are read where they lie, those of other hosts where one rank of this one has them: `mine` must
    not change until the party has settled. Elsewhere those of others come into what `rows` makes, (ranks, size), and
    `mine` must not change until they have been waited for.
    """
    channel, group = shard_group.channel, shard_group.handle
    rank, degree = dist.get_rank(group), dist.get_world_size(group)
    nbytes = (degree - 1) * mine.numel() * mine.element_size()
    if shard_group.communicator is not None:
        return ShardExchange(channel.start([shard_group.communicator.share(mine, read)], nbytes))
    segments = rows()
    if mine.device.type != "cpu":
        works = [all_gather(segments.view(-1), mine, group)]
        return ShardExchange(channel.start(works, nbytes), (segments, mine), partial(read, segments))
    handle = channel.start(exchange_with_others(segments, [mine] * degree, group, tag=_PARTS), nbytes)
    return ShardExchange(handle, (segments, mine), partial(read, [*segments[:rank], mine, *segments[rank + 1 :]]))


def scatter_sum(buffer: torch.Tensor, received: torch.Tensor, shard_group: ShardGroup) -> ShardExchange:
    """Rows of `buffer`, (degree, size), to their ranks: the sum of the `addends` is this rank's part of the sum.

    `received` has a row for each rank where `party.rows`, and one elsewhere.
    """
    channel, nbytes = shard_group.channel, buffer[1:].numel() * buffer.element_size()
    if shard_group.communicator is not None:
        return ShardExchange(channel.start([shard_group.communicator.scatter_sum(buffer, received[0])], nbytes))
    if not shard_group.rows or buffer.device.type != "cpu":
        if shard_group.rows:
            work = all_to_all(received, buffer, shard_group.handle)
        else:
            work = reduce_scatter(received[0], buffer.view(-1), shard_group.handle)
        return ShardExchange(channel.start([work], nbytes), (buffer, received))
    handle = channel.start(exchange_with_others(received, buffer, shard_group.handle, tag=_SUMS), nbytes)
    return ShardExchange(handle, (buffer, received))


def addends(buffer: torch.Tensor, received: torch.Tensor, shard_group: ShardGroup) -> Rows:
    """What is added up once a `scatter_sum` is there. Of two ranks' rows, this one's own is added where it lies; more
    of them are summed in one pass, which they have to lie together for."""
    if not shard_group.rows or buffer.device.type != "cpu":
        return received
    rank = dist.get_rank(shard_group.handle)
    if len(buffer) == 2:
        return [buffer[rank], received[1 - rank]]
    received[rank].copy_(buffer[rank])
    return received


def start_sum(tensor: torch.Tensor, shard_group: ShardGroup) -> tuple[ShardExchange, int]:
    """The sum of `tensor` over the ranks, in place; with it the bytes that this rank sends for it."""
    nbytes = ring_all_reduce_nbytes(tensor, dist.get_world_size(shard_group.handle))
    if shard_group.communicator is not None:
        work: Any = shard_group.communicator.start_reduce(tensor)
    else:
        work = dist.all_reduce(tensor, group=shard_group.handle, async_op=True)
    return ShardExchange(shard_group.channel.start([work], nbytes), (tensor,)), nbytes

"""The two collectives of sharding: all-gather of parameters, reduce-scatter of gradients.

Where all ranks share a host, a gather is no collective at all: a rank reads the others' segments whenever it needs a
unit (`SharedSegments`). So ranks may run different blocks, in different order, and differently often.

Ranks of one host exchange through shared memory, and data from other hosts reaches each host once. Between hosts of one
rank each, both collectives are made of messages, from and into the tensors themselves, because of three costs of Gloo:
its all-gather copies input and output into memory that its threads keep; its reduce-scatter takes two to three times as
long as an all-to-all and a sum; its all-to-all mostly sends in one direction at a time (5 MiB each way between hosts on
100 Mbit/s: 0.87 s in four of six runs, messages 0.44 to 0.49; comm/point_to_point.py says why).
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
from tutti.comm.shared_memory import SharedMemoryCommunicator, SharedMemoryExchange
from tutti.comm.traffic import CommChannel, CommHandle
from tutti.parallel.sharding.gather_buffers import Rooms

_PARTS, _SUMS = 0, 1
"""Tags: ranks begin gathers in the same order, and sums, but not each before the same of the others."""

Rows = Sequence[torch.Tensor] | torch.Tensor
"""One flat tensor of every rank, in rank order."""


@dataclass(frozen=True, slots=True)
class ShardExchange:
    """An asynchronous collective.

    Attributes:
        handle: waits for the communication; None where there is none.
        tensors: sent and received tensors, kept alive until then; empty in shared memory.
        then: called once the communication is complete.
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
    """The ranks along the shard axis.

    Attributes:
        handle: their process group.
        channel: accounting of their communication.
        communicator: exchanges in shared memory, of all ranks or within each host; None without shared memory.
    """

    handle: Any
    channel: CommChannel
    communicator: SharedMemoryCommunicator | HierarchicalCommunicator | None = None

    @classmethod
    def meet(cls, handle: Any, channel: CommChannel) -> "ShardGroup":
        """The ranks of a process group. Collective."""
        return cls(handle, channel, make_communicator(handle))

    def buffer(self, rooms: Rooms, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for the next tensor to exchange: borrowed from the communicator, or taken from `rooms`."""
        if self.communicator is None:
            return rooms.take(numel, dtype, device)
        self.communicator.synchronize(left=1)  # otherwise slower ranks would make this one borrow more and more memory
        return self.communicator.borrow(numel, dtype)

    def shown(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, moved to shared memory where the ranks have it."""
        return tensor if self.communicator is None or tensor.device.type != "cpu" else self.communicator.keep(tensor)

    def settle(self) -> None:
        """Wait until all ranks have read the tensors that this rank shares."""
        if self.communicator is not None:
            self.communicator.synchronize()

    @property
    def rows(self) -> bool:
        """Whether `scatter_sum` delivers one row for each rank, still to be summed, instead of the sum."""
        return self.communicator is None and dist.get_backend(self.handle) == "gloo"


_ALIGNMENT = 64
"""Segments begin at multiples of this many bytes."""


class SharedSegments:
    """The segments of all packs of all ranks of one host, which each rank reads without the others' help.

    Between `open` and `close` no rank changes its segments. Both are called equally often by all ranks; `close` waits
    until all ranks have called it.

    Args:
        communicator: the ranks, which exchange nothing else with it.
    """

    def __init__(self, communicator: SharedMemoryCommunicator) -> None:
        self._communicator = communicator
        self._memory: torch.Tensor | None = None
        self._ranges: list[tuple[int, int, torch.dtype]] = []
        self._exchange: SharedMemoryExchange | None = None
        self._everyone: list[torch.Tensor] | None = None

    def lay(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Move flat tensors, whose sizes are equal on all ranks, to shared memory; returns them there."""
        begin, self._ranges = 0, []
        for flat in flats:
            self._ranges.append((begin, begin + flat.numel() * flat.element_size(), flat.dtype))
            begin = -(-self._ranges[-1][1] // _ALIGNMENT) * _ALIGNMENT
        self._memory = self._communicator.keep(torch.empty(max(begin, _ALIGNMENT), dtype=torch.uint8))
        moved = [self._view(self._memory, index) for index in range(len(flats))]
        for there, flat in zip(moved, flats, strict=True):
            there.copy_(flat)
        return moved

    @property
    def laid(self) -> bool:
        """Whether `lay` has been called."""
        return self._memory is not None

    def open(self) -> None:
        """Let the other ranks read this rank's segments, unless they may already."""
        assert self._memory is not None
        if self._exchange is None:
            self._exchange = self._communicator.put(self._memory)

    def rows(self, index: int) -> list[torch.Tensor]:
        """Every rank's segment number `index`, in rank order. Waits until all ranks have called `open`."""
        self.open()
        if self._everyone is None:
            assert self._exchange is not None
            self._everyone = self._exchange.arrive()
        return [self._view(memory, index) for memory in self._everyone]

    def close(self) -> None:
        """Wait until no rank reads this rank's segments any more, so that they may change."""
        self.open()
        assert self._exchange is not None
        if self._everyone is None:
            self._exchange.arrive()
        self._exchange.leave()
        self._exchange = self._everyone = None
        self._communicator.synchronize()

    def _view(self, memory: torch.Tensor, index: int) -> torch.Tensor:
        start, stop, dtype = self._ranges[index]
        return memory[start:stop].view(dtype)


def gather(
    mine: torch.Tensor, shard_group: ShardGroup, rows: Callable[[], torch.Tensor], read: Callable[[Rows], None]
) -> ShardExchange:
    """Start an all-gather.

    In shared memory, ranks read each other's tensors in place, so `mine` must not change before `ShardGroup.settle`.
    Elsewhere they arrive in a tensor made by `rows`, and `mine` must not change before the exchange has been waited
    for.

    Args:
        mine: this rank's flat tensor; all ranks have the same size.
        shard_group: the ranks.
        rows: makes the receive buffer, (ranks, size).
        read: gets every rank's tensor in rank order, once they have arrived.
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
    """Start a reduce-scatter: row i of `buffer` is this rank's contribution to rank i.

    The sum of `addends` is then this rank's part of the result.

    Args:
        buffer: (ranks, size).
        received: (ranks, size) where `shard_group.rows`, else (1, size).
        shard_group: the ranks.
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
    """The rows to add up after `scatter_sum`.

    With two ranks, this rank's own row is read in place. More rows are summed in one pass, so they must be contiguous.
    """
    if not shard_group.rows or buffer.device.type != "cpu":
        return received
    rank = dist.get_rank(shard_group.handle)
    if len(buffer) == 2:
        return [buffer[rank], received[1 - rank]]
    received[rank].copy_(buffer[rank])
    return received


def start_sum(tensor: torch.Tensor, shard_group: ShardGroup) -> tuple[ShardExchange, int]:
    """Start an all-reduce of `tensor`, in place; also returns the bytes that this rank sends."""
    nbytes = ring_all_reduce_nbytes(tensor, dist.get_world_size(shard_group.handle))
    if shard_group.communicator is not None:
        work: Any = shard_group.communicator.start_reduce(tensor)
    else:
        work = dist.all_reduce(tensor, group=shard_group.handle, async_op=True)
    return ShardExchange(shard_group.channel.start([work], nbytes), (tensor,)), nbytes

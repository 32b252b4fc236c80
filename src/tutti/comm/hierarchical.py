"""Hierarchical collectives: shared memory inside each host, point-to-point messages between hosts.

Each rank's data is sent to every other host once and read there in shared memory. Reductions are made inside each host
before they leave it. A host of g ranks therefore receives (hosts - 1) / hosts of the gathered bytes; direct messages
from each rank to each other rank would bring g times as much. One thread per rank makes the transfers between hosts, in
order.

All-reduce: a reduce inside each host, an all-reduce of one slice per local rank between hosts, then an all-gather
inside each host. A host with a tensor of B bytes sends 2 (hosts - 1) / hosts B, however many ranks it has; a ring of
all ranks sends up to 2 (ranks - 1) / ranks B out of it (BlueConnect, Cho et al. 2019).
"""

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist

from tutti.comm.local_group import DONE, READY, LocalGroup, PendingSignals
from tutti.comm.point_to_point import start_messages
from tutti.comm.rendezvous import HostHierarchy, rendezvous_hosts
from tutti.comm.shared_memory import (
    ReadTensors,
    SharedMemoryAllReduce,
    SharedMemoryCommunicator,
    SharedMemoryExchange,
    copy_rows,
    reduce_tensors,
)

_GATHER_TAG, _REDUCE_TAG = 0, 1
"""Message tags."""


class CommThread:
    """A thread that runs communication calls in the order in which they are submitted."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="tutti-exchanges", daemon=True).start()

    def ask(self, call: Callable[[], None]) -> None:
        """Submit a call."""
        self._asked.put(call)

    def end(self) -> None:
        """Stop the thread once all submitted calls have run."""
        self._asked.put(None)

    def _run(self) -> None:
        while (call := self._asked.get()) is not None:
            call()
            del call  # or an idle thread would keep alive whatever the last call refers to


class ThreadedWork:
    """A call that runs on a `CommThread`, as a work handle.

    Args:
        comm_thread: the thread.
        call: what it runs.
    """

    def __init__(self, comm_thread: CommThread, call: Callable[[], None]) -> None:
        self._call = call
        self._ended = threading.Event()
        self._problem: BaseException | None = None
        comm_thread.ask(self._make)

    def is_completed(self) -> bool:
        """Whether the call has returned or raised."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Wait until the call has returned. Raises what the call raised."""
        self._ended.wait()
        if self._problem is not None:
            raise self._problem

    def _make(self) -> None:
        try:
            self._call()
        except BaseException as problem:  # raised again in `wait`
            self._problem = problem
        finally:
            self._ended.set()


@dataclass(frozen=True)
class RelayRoutes:
    """Which rank of a host relays which data, so that data enters each host once.

    Every rank sends its data to one relay peer on each other host. In a reduction, the relay peer returns its host's
    partial sum to the rank. Ranks of a larger host share the relay peers of a smaller one.

    Attributes:
        hosts: ranks of the process group by host, in local-group order.
        own: this rank.
    """

    hosts: tuple[tuple[int, ...], ...]
    own: int

    @cached_property
    def ranks(self) -> int:
        """Number of ranks on all hosts."""
        return sum(map(len, self.hosts))

    @cached_property
    def host(self) -> int:
        """Index of this rank's host."""
        return next(host for host, places in enumerate(self.hosts) if self.own in places)

    @cached_property
    def others(self) -> list[int]:
        """Indices of the other hosts, starting with the next one, so that hosts begin with different peers."""
        return [(self.host + step) % len(self.hosts) for step in range(1, len(self.hosts))]

    @cached_property
    def relay_peers(self) -> list[int]:
        """This rank's relay peer on each of the `others`."""
        index = self.hosts[self.host].index(self.own)
        return [self.hosts[host][index % len(self.hosts[host])] for host in self.others]

    @cached_property
    def relayed_ranks(self) -> list[int]:
        """Ranks of other hosts whose relay peer is this rank, in the order of `others`."""
        here = self.hosts[self.host]
        local_rank = here.index(self.own)
        return [
            place
            for host in self.others
            for index, place in enumerate(self.hosts[host])
            if index % len(here) == local_rank
        ]

    @cached_property
    def max_relayed_ranks(self) -> int:
        """The largest number of relayed ranks of any rank on this host."""
        here = len(self.hosts[self.host])
        return sum(-(-len(self.hosts[host]) // here) for host in self.others)

    def carried(self, place: int) -> tuple[int, int]:
        """Return where the data of a rank of another host arrives on this host.

        Args:
            place: that rank.

        Returns:
            (local rank that relays the data, row among its relayed ranks).

        Raises:
            ValueError: the rank is on this host.
        """
        here = self.hosts[self.host]
        row = 0
        carrier = self._index(place) % len(here)
        for host in self.others:
            if place in self.hosts[host]:
                return carrier, row + self._index(place) // len(here)
            row += len(range(carrier, len(self.hosts[host]), len(here)))
        raise ValueError(f"rank {place} is on this host, so no rank relays its data; ask for a rank of another host")

    def _index(self, place: int) -> int:
        return next(places.index(place) for places in self.hosts if place in places)


def make_relay_routes(hosts: Sequence[Sequence[int]], own: int) -> RelayRoutes:
    """Return the relay routes of rank `own`, given the ranks on each host."""
    return RelayRoutes(tuple(map(tuple, hosts)), own)


class HierarchicalCommunicator:
    """Collectives over ranks of several hosts, some of which have several ranks.

    Args:
        communicator: the shared-memory communicator of this host.
        routes: which rank relays which data.
        group: the process group. Nobody else may use this module's message tags in it.
    """

    def __init__(self, communicator: SharedMemoryCommunicator, routes: RelayRoutes, group: Any) -> None:
        self.communicator, self.routes, self.group = communicator, routes, group
        self.borrow, self.keep, self.synchronize = communicator.borrow, communicator.keep, communicator.synchronize
        self._comm_thread, self._scratch = CommThread(), torch.empty(0, dtype=torch.uint8)
        weakref.finalize(self, self._comm_thread.end)

    def share(self, mine: torch.Tensor, read: ReadTensors) -> "HierarchicalWork":
        """Let all ranks read this rank's tensor, as `SharedMemoryCommunicator.share` does.

        Args:
            mine: this rank's tensor, contiguous and of the same size on all ranks.
            read: called with the tensors of all ranks, flat and in the group's order.

        Returns:
            The work handle.
        """
        return HierarchicalWork(self, self._comm_thread, mine, read)

    def gather(self, segments: torch.Tensor, mine: torch.Tensor) -> "HierarchicalWork":
        """All-gather `mine` into the rows of `segments`, shape (ranks, values). Returns the work handle."""
        return self.share(mine, partial(copy_rows, segments))

    def scatter_sum(self, buffer: torch.Tensor, out: torch.Tensor) -> ThreadedWork:
        """Reduce-scatter row r of `buffer`, shape (ranks, values), into `out` of rank r. Returns the work handle.

        The hosts' partial sums are added in the order of hosts; in half precision each is rounded first.
        """
        return ThreadedWork(self._comm_thread, lambda: self._scatter_sum(buffer, out.view(-1)))

    def reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """All-reduce a contiguous `tensor` in place (sum or maximum), bit-identical on all ranks."""
        self.start_reduce(tensor, op).wait()

    def start_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> "HierarchicalWork":
        """Start an all-reduce of a contiguous `tensor` in place (sum or maximum). Returns the work handle."""
        flat = tensor.detach().view(-1)
        size = -(-flat.numel() // self.routes.ranks)
        rows, reduced = (self.borrow(numel, flat.dtype) for numel in (self.routes.ranks * size, size))
        rows[: flat.numel()].copy_(flat)  # the padding after them is uninitialised; nobody reads its sum
        return HierarchicalWork(
            self,
            self._comm_thread,
            reduced,
            partial(_concatenate_into, flat),
            lambda: self._scatter_sum(rows, reduced, op),
        )

    def bring(self, mine: torch.Tensor) -> torch.Tensor:
        """Exchange data with the other hosts: send `mine` to each of them. Runs on the communication thread.

        Returns:
            What this rank's relayed ranks sent, in shared memory, shape (rows, values).
        """
        routes = self.routes
        rows = self.borrow(routes.max_relayed_ranks * mine.numel(), mine.dtype).view(
            routes.max_relayed_ranks, mine.numel()
        )
        self._messages(
            list(zip(routes.relayed_ranks, rows, strict=False)), [(to, mine) for to in routes.relay_peers], _GATHER_TAG
        )
        return rows

    def _scatter_sum(self, buffer: torch.Tensor, out: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        routes, numel, count = self.routes, out.numel(), len(self.routes.relayed_ranks)
        sums = self._scratch_rows(1 + count + len(routes.relay_peers), out)
        host_sum, sent, received = sums[0], sums[1 : 1 + count], sums[1 + count :]
        exchange = self.communicator.put(buffer)
        buffers = [tensor.view(routes.ranks, numel) for tensor in exchange.arrive()]  # one per local rank
        for place, row in zip((routes.own, *routes.relayed_ranks), sums, strict=False):
            reduce_tensors([rows[place] for rows in buffers], [row], op)
        exchange.leave()
        relay_peers = list(zip(routes.relay_peers, received, strict=True))
        self._messages(relay_peers, list(zip(routes.relayed_ranks, sent, strict=True)), _REDUCE_TAG)
        by_host = {routes.host: host_sum, **dict(zip(routes.others, received, strict=True))}
        reduce_tensors([by_host[host] for host in sorted(by_host)], [out], op)

    def _messages(
        self,
        received: Sequence[tuple[int, torch.Tensor]],
        sent: Sequence[tuple[int, torch.Tensor]],
        tag: int,
    ) -> None:
        """Exchange rows with ranks of the group; wait for receives first, because they notice an ended rank."""
        for work in start_messages(received, sent, self.group, tag=tag):
            work.wait()

    def _scratch_rows(self, rows: int, like: torch.Tensor) -> torch.Tensor:
        """Return scratch memory of shape (rows, values of `like`), which every exchange of the thread reuses."""
        nbytes = rows * like.numel() * like.element_size()
        if self._scratch.numel() < nbytes:
            self._scratch = torch.empty(nbytes, dtype=torch.uint8)
        return self._scratch[:nbytes].view(like.dtype).view(rows, like.numel())


class HierarchicalWork:
    """A gather in progress: the thread brings the data of other hosts, and `wait` reads all data in shared memory.

    Args:
        communicator: the hierarchical communicator.
        comm_thread: its thread.
        mine: this rank's tensor.
        read: called with the tensors of all ranks, flat and in the group's order.
        first: runs on the thread before the gather, and computes `mine`.
    """

    def __init__(
        self,
        communicator: HierarchicalCommunicator,
        comm_thread: CommThread,
        mine: torch.Tensor,
        read: ReadTensors,
        first: Callable[[], None] | None = None,
    ) -> None:
        self._communicator, self._mine, self._read, self._first = communicator, mine.detach(), read, first
        self._exchanges: tuple[SharedMemoryExchange, SharedMemoryExchange] | None = None
        self._over = False
        self._brought = ThreadedWork(comm_thread, self._bring)

    def is_completed(self) -> bool:
        """Return whether the gather has completed; complete it if all data has arrived."""
        if not self._over and self._brought.is_completed():
            exchanges = self._exchanges
            if exchanges is None or all(exchange.present() for exchange in exchanges):
                self.wait()
        return self._over

    def wait(self) -> None:
        """Wait until the gather has completed.

        Raises:
            RuntimeError: another rank has ended, or the wait timed out.
        """
        if self._over:
            return
        self._brought.wait()
        assert self._exchanges is not None
        self._over = True
        here, brought = (exchange.arrive() for exchange in self._exchanges)
        self._read(self._in_order(here, brought))
        for exchange in self._exchanges:
            exchange.leave()

    def _bring(self) -> None:
        if self._first is not None:
            self._first()
        communicator = self._communicator
        here = communicator.communicator.put(self._mine)
        self._exchanges = here, communicator.communicator.put(communicator.bring(self._mine))

    def _in_order(self, here: list[torch.Tensor], brought: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the data of every rank, in the order of the group."""
        routes, numel = self._communicator.routes, self._mine.numel()
        rows = dict(zip(routes.hosts[routes.host], here, strict=True))
        for host in routes.others:
            for place in routes.hosts[host]:
                carrier, row = routes.carried(place)
                rows[place] = brought[carrier][row * numel : (row + 1) * numel]
        return [rows[place] for place in sorted(rows)]


def _concatenate_into(flat: torch.Tensor, parts: list[torch.Tensor]) -> None:
    """Concatenate equally long `parts` into `flat`, which may be shorter than all of them together."""
    for start, part in zip(range(0, flat.numel(), max(len(parts[0]), 1)), parts, strict=False):
        whole = flat[start : start + len(part)]
        whole.copy_(part[: len(whole)])


def make_communicator(group: Any = None) -> SharedMemoryCommunicator | HierarchicalCommunicator | None:
    """Return the communicator of a process group, or None where shared memory is of no use. Collective.

    It is hierarchical if the group spans hosts and some host has several ranks. It is None where ranks may not share
    memory, or where every host has only one rank.
    """
    rendezvous = rendezvous_hosts(group)
    if rendezvous is None:
        return None
    hosts, local_group = rendezvous
    if len(hosts) > 1 and max(map(len, hosts)) == 1:
        return None
    communicator = SharedMemoryCommunicator(local_group)
    return (
        communicator
        if len(hosts) == 1
        else HierarchicalCommunicator(communicator, make_relay_routes(hosts, dist.get_rank(group)), group)
    )


class HierarchicalAllReduce(ThreadedWork):
    """A hierarchical all-reduce in place, on a communication thread.

    Waiting raises RuntimeError when another rank has ended, or the wait timed out.

    Args:
        hierarchy: the ranks inside hosts and between them.
        comm_thread: the thread.
        segment: number of this rank's shared segment.
        flat: the values in it.
    """

    def __init__(self, hierarchy: HostHierarchy, comm_thread: CommThread, segment: int, flat: torch.Tensor) -> None:
        self._hierarchy, self._room, self._flat = hierarchy, segment, flat
        super().__init__(comm_thread, self._sum)

    def _sum(self) -> None:
        hierarchy, local_group = self._hierarchy, self._hierarchy.local_group
        SharedMemoryAllReduce(local_group, self._room, self._flat.numel(), self._flat.dtype).wait()
        if hierarchy.inter_host_group is not None:
            dist.all_reduce(
                inter_host_slice(self._flat, hierarchy.parts, local_group.rank), group=hierarchy.inter_host_group
            )
        all_gather_slices(local_group, self._room, self._flat, hierarchy.parts)


def inter_host_slice(flat: torch.Tensor, parts: int, part: int) -> torch.Tensor:
    """Return the slice of a flat tensor that local rank `part` all-reduces between hosts."""
    return torch.tensor_split(flat, parts)[part]


def all_gather_slices(local_group: LocalGroup, segment: int, flat: torch.Tensor, parts: int) -> None:
    """All-gather the inter-host slices of the first `parts` local ranks into `flat`.

    Args:
        local_group: the ranks of this host.
        segment: number of the segment in which `flat` lies.
        flat: this rank's tensor, whose own slice is reduced already.
        parts: number of slices.
    """
    slot = local_group.start(segment, flat.numel(), lambda: None)
    PendingSignals(local_group, slot, READY).wait()
    for part, theirs in enumerate(local_group.tensors(slot, flat.dtype)[:parts]):
        if part != local_group.rank:
            inter_host_slice(flat, parts, part).copy_(inter_host_slice(theirs, parts, part))
    local_group.signal(slot, DONE)
    PendingSignals(local_group, slot, DONE).wait()  # the others have read this rank's slice, so it may change

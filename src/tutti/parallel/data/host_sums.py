"""Sums of buckets over ranks that share memory: a bucket lies where all ranks of its host reach it."""

import weakref
from typing import Any

import torch

from tutti.comm.hierarchical import CommThread, HierarchicalAllReduce
from tutti.comm.local_group import LocalGroup
from tutti.comm.rendezvous import HostHierarchy, make_local_group_or_hierarchy
from tutti.comm.shared_memory import SharedMemoryAllReduce
from tutti.comm.traffic import CommHandle
from tutti.parallel.data.buckets import AllReduce, Bucket, Summing


def quickest_sums(group: Any) -> Summing:
    """How the buckets of a process group are summed: in shared memory where its ranks are on one host, in two tiers
    where hosts have several of them, else by the group's all-reduce. Collective.
    """
    found = make_local_group_or_hierarchy(group)
    if isinstance(found, LocalGroup):
        return HostSums(found)
    return AllReduce() if found is None else TieredSums(found)


class _InRooms(Summing):
    """Buckets in rooms of a team."""

    def __init__(self, local_group: LocalGroup) -> None:
        self.local_group = local_group
        self.rooms: dict[int, int] = {}

    def room(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory that the other ranks reach."""
        number, room = self.local_group.new_segment(numel * dtype.itemsize)
        flat = room.tensor(dtype, numel)
        self.rooms[flat.data_ptr()] = number
        return flat


class HostSums(_InRooms):
    """On one host. Of a sum each rank does a part when it comes by, and more while it waits."""

    way = "shared memory"

    def __init__(self, local_group: LocalGroup) -> None:
        super().__init__(local_group)
        self._sums: dict[int, SharedMemoryAllReduce] = {}

    def start(self, bucket: Bucket) -> CommHandle:
        """Say that this rank's bucket is full."""
        flat = bucket.flat
        room = self.rooms[flat.data_ptr()]
        work = self._sums[room] = SharedMemoryAllReduce(self.local_group, room, flat.numel(), flat.dtype, probed=True)
        return bucket.group.channel.start([work], bucket.sent_nbytes)

    def finite(self, bucket: Bucket) -> bool:
        return self._sums[self.rooms[bucket.flat.data_ptr()]].finite

    def poll(self, handle: CommHandle) -> bool:
        return handle.poll()


class TieredSums(_InRooms):
    """On several hosts. A thread makes the sums, one after another."""

    way = "shared memory inside hosts, process group between them"

    def __init__(self, hierarchy: HostHierarchy) -> None:
        super().__init__(hierarchy.local_group)
        self._hierarchy, self._comm_thread = hierarchy, CommThread()
        weakref.finalize(self, self._comm_thread.end)

    def start(self, bucket: Bucket) -> CommHandle:
        """Ask for the bucket's sum."""
        work = HierarchicalAllReduce(
            self._hierarchy, self._comm_thread, self.rooms[bucket.flat.data_ptr()], bucket.flat
        )
        return bucket.group.channel.start([work], bucket.sent_nbytes)

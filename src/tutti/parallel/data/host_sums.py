"""Sums of buckets over ranks that share memory: a bucket lies where all ranks of its host reach it."""

import weakref
from typing import Any

import torch

from tutti.comm import HostSum, Team, TieredSum, Tiers, Worker, make_team_or_tiers
from tutti.comm.traffic import Flight
from tutti.parallel.data.buckets import AllReduce, Bucket, Summing


def quickest_sums(group: Any) -> Summing:
    """How the buckets of a process group are summed: in shared memory where its ranks are on one host, in two tiers
    where hosts have several of them, else by the group's all-reduce. Collective.
    """
    found = make_team_or_tiers(group)
    if isinstance(found, Team):
        return HostSums(found)
    return AllReduce() if found is None else TieredSums(found)


class _InRooms(Summing):
    """Buckets in rooms of a team."""

    def __init__(self, team: Team) -> None:
        self.team = team
        self.rooms: dict[int, int] = {}

    def room(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory that the other ranks reach."""
        number, room = self.team.new_room(numel * dtype.itemsize)
        flat = room.tensor(dtype, numel)
        self.rooms[flat.data_ptr()] = number
        return flat


class HostSums(_InRooms):
    """On one host. Of a sum each rank does a part when it comes by, and more while it waits."""

    way = "shared memory"

    def __init__(self, team: Team) -> None:
        super().__init__(team)
        self._sums: dict[int, HostSum] = {}

    def start(self, bucket: Bucket) -> Flight:
        """Say that this rank's bucket is full."""
        flat = bucket.flat
        room = self.rooms[flat.data_ptr()]
        work = self._sums[room] = HostSum(self.team, room, flat.numel(), flat.dtype, probed=True)
        return bucket.group.lane.start([work], bucket.sent_nbytes)

    def finite(self, bucket: Bucket) -> bool:
        return self._sums[self.rooms[bucket.flat.data_ptr()]].finite

    def go_on(self, flight: Flight) -> bool:
        return flight.go_on()


class TieredSums(_InRooms):
    """On several hosts. A thread makes the sums, one after another."""

    way = "shared memory inside hosts, process group between them"

    def __init__(self, tiers: Tiers) -> None:
        super().__init__(tiers.team)
        self._tiers, self._worker = tiers, Worker()
        weakref.finalize(self, self._worker.end)

    def start(self, bucket: Bucket) -> Flight:
        """Ask for the bucket's sum."""
        work = TieredSum(self._tiers, self._worker, self.rooms[bucket.flat.data_ptr()], bucket.flat)
        return bucket.group.lane.start([work], bucket.sent_nbytes)

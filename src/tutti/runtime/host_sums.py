"""Sums of buckets over ranks that share memory: a bucket lies where all of them reach it."""

import torch

from tutti.collectives import HostSum, Team
from tutti.runtime.buckets import Bucket, Summing
from tutti.runtime.traffic import Flight


class HostSums(Summing):
    """For one group's buckets. Of a sum each rank does a part when it comes by, and more while it waits."""

    def __init__(self, team: Team) -> None:
        self.team = team
        self._rooms: dict[int, int] = {}

    def room(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory that the other ranks reach."""
        number, room = self.team.new_room(numel * dtype.itemsize)
        flat = room.tensor(dtype, numel)
        self._rooms[flat.data_ptr()] = number
        return flat

    def start(self, bucket: Bucket) -> Flight:
        """Say that this rank's bucket is full."""
        flat = bucket.flat
        work = HostSum(self.team, self._rooms[flat.data_ptr()], flat.numel(), flat.dtype)
        return bucket.group.lane.start([work], bucket.sent_nbytes)

    def go_on(self, flight: Flight) -> bool:
        return flight.go_on()

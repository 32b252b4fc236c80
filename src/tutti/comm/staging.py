"""Rooms for what is read in shared memory: copied there and given back, to be taken again; or kept there for good."""

import torch

from tutti.comm.rooms import Room
from tutti.comm.team import ROOMS, Team

_LEAST_NBYTES = 4096
_MOST_KEPT = ROOMS // 2


class Staging:
    """Rooms of one rank in a team, by size: powers of two."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._rooms: dict[int, Room] = {}
        self._free: dict[int, list[int]] = {}
        self._lent: dict[int, int] = {}
        self._kept: dict[int, int] = {}

    def put(self, flat: torch.Tensor) -> int:
        """Copy a flat tensor into a free room, if it is not in one by `lend` or `keep`; returns the room's number."""
        place = flat.data_ptr()
        if place in self._lent:
            return self._lent.pop(place)
        if place in self._kept:
            return self._kept[place]
        number = self._take(flat.numel() * flat.element_size())
        self._rooms[number].tensor(flat.dtype, flat.numel()).copy_(flat)
        return number

    def lend(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A free room's memory with anything in it, to be filled and `put`."""
        if not numel:
            return torch.empty(0, dtype=dtype)  # has no place by which `put` would find it: takes a room there
        number = self._take(numel * dtype.itemsize)
        tensor = self._rooms[number].tensor(dtype, numel)
        self._lent[tensor.data_ptr()] = number
        return tensor

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a flat tensor in a room that lasts, where `put` finds it; itself where that is so, or cannot be."""
        if not tensor.numel() or tensor.data_ptr() in self._kept or len(self._kept) == _MOST_KEPT:
            return tensor
        number, room = self._team.new_room(tensor.numel() * tensor.element_size())
        self._rooms[number] = room
        kept = room.tensor(tensor.dtype, tensor.numel()).copy_(tensor)
        self._kept[kept.data_ptr()] = number
        return kept

    def _take(self, nbytes: int) -> int:
        nbytes = max(_LEAST_NBYTES, 1 << max(nbytes - 1, 0).bit_length())  # what nobody touches takes no memory
        free = self._free.setdefault(nbytes, [])
        if free:
            number = free.pop()
        else:
            number, room = self._team.new_room(nbytes)
            self._rooms[number] = room
        return number

    def give(self, number: int) -> None:
        """Nobody reads this room any more."""
        if number not in self._kept.values():
            self._free[self._rooms[number].nbytes].append(number)

"""Rooms for what is copied into shared memory to be read there: taken, given back, and taken again."""

import torch

from tutti.collectives.rooms import Room
from tutti.collectives.team import Team

_LEAST_NBYTES = 4096


class Staging:
    """Rooms of one rank in a team, by size: powers of two."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._rooms: dict[int, Room] = {}
        self._free: dict[int, list[int]] = {}
        self._lent: dict[int, int] = {}

    def put(self, flat: torch.Tensor) -> int:
        """Copy a flat tensor into a free room, if it is not one that was lent; returns the room's number."""
        if flat.data_ptr() in self._lent:
            return self._lent.pop(flat.data_ptr())
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
        self._free[self._rooms[number].nbytes].append(number)

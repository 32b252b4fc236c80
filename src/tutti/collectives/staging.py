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

    def put(self, flat: torch.Tensor) -> int:
        """Copy a flat tensor into a free room; returns the room's number."""
        nbytes = max(_LEAST_NBYTES, 1 << (flat.numel() * flat.element_size() - 1).bit_length())
        free = self._free.setdefault(nbytes, [])
        if free:
            number = free.pop()
        else:
            number, room = self._team.new_room(nbytes)
            self._rooms[number] = room
        self._rooms[number].tensor(flat.dtype, flat.numel()).copy_(flat)
        return number

    def give(self, number: int) -> None:
        """Nobody reads this room any more."""
        self._free[self._rooms[number].nbytes].append(number)

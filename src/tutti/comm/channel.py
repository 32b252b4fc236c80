"""Messages from one rank to another of its team, in the order they are sent.

The sender copies a message into one of its rooms and goes on; the receiver copies it out and says so, and the room is
free for another message.
"""

import torch

from tutti.comm.staging import Staging
from tutti.comm.team import READ, SENT, SLOTS, Team


class Sending:
    """The way from this rank to place `target` of the team."""

    def __init__(self, team: Team, target: int) -> None:
        self._team, self._target = team, target
        self._staging = Staging(team)
        self._sent = 0
        self._read = 0
        self._rooms: dict[int, int] = {}

    def send(self, tensor: torch.Tensor) -> None:
        """Send a contiguous tensor. Waits only where very many messages have not been received yet."""
        team, target = self._team, self._target
        while self._next_read(wait=self._sent - self._read == SLOTS):
            self._free()
        flat = tensor.detach().reshape(-1)
        number = self._staging.put(flat)
        self._rooms[self._sent] = number
        team.ways[team.rank, target, self._sent % SLOTS] = number, flat.numel()
        team.signals.post(team.way(team.rank, target, SENT))
        self._sent += 1

    def settle(self) -> None:
        """Wait until all messages have been read: a rank must not end before, for they lie in its memory."""
        while self._read < self._sent:
            self._next_read(wait=True)
            self._free()

    def _next_read(self, *, wait: bool) -> bool:
        """Whether one more message has been read; with `wait`, once it has."""
        return _next(self._team, self._team.way(self._team.rank, self._target, READ), self._target, wait=wait)

    def _free(self) -> None:
        """The oldest message has been read."""
        self._staging.give(self._rooms.pop(self._read))
        self._read += 1


class Receiving:
    """The way from place `source` of the team to this rank. Messages fill the tensors given, in order."""

    def __init__(self, team: Team, source: int) -> None:
        self._team, self._source = team, source
        self._expected: list[Letter] = []
        self._read = 0

    def receive(self, tensor: torch.Tensor) -> "Letter":
        """The next message will be put into `tensor`, which is contiguous."""
        letter = Letter(self, tensor)
        self._expected.append(letter)
        return letter

    def deliver(self, *, wait: bool) -> bool:
        """Put the oldest message that is expected where it belongs, if it is there or shall be waited for."""
        team, source = self._team, self._source
        if not _next(team, team.way(source, team.rank, SENT), source, wait=wait):
            return False
        letter = self._expected.pop(0)
        flat = letter.tensor.view(-1)
        room, numel = team.ways[source, team.rank, self._read % SLOTS].tolist()
        sent = team.tensor(source, room, numel, flat.dtype)
        if sent.numel() != flat.numel():
            raise RuntimeError(f"shared memory: a message of {sent.numel()} values came for {flat.numel()}")
        flat.copy_(sent)
        letter.here = True
        self._read += 1
        team.signals.post(team.way(source, team.rank, READ))
        return True


class Letter:
    """One message that is expected."""

    __slots__ = ("_way", "here", "tensor")

    def __init__(self, way: Receiving, tensor: torch.Tensor) -> None:
        self._way, self.tensor, self.here = way, tensor, False

    def is_completed(self) -> bool:
        """Whether it is there, and all that was sent before it."""
        while not self.here and self._way.deliver(wait=False):
            pass
        return self.here

    def wait(self) -> None:
        """Return when it is there. Raises RuntimeError when a rank has ended or does not come in time."""
        while not self.here:
            self._way.deliver(wait=True)


def _next(team: Team, index: int, rank: int, *, wait: bool) -> bool:
    """Whether `rank` has posted a semaphore once more; with `wait`, once it has."""
    if wait:
        team.signals.wait(index, [rank])
    return wait or team.signals.take(index)

"""Messages between two ranks that are part of no collective: sent and received by any thread, whatever others do.

They go through a process group of their own, under Gloo on the host's memory, so that none is ever confused with the
exchanges of training, evaluation or checkpoints.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tutti.environment import read_launch_options
from tutti.errors import TrainingError
from tutti.local_sgd.vectors import Flats, Replicas

_PATIENCE = timedelta(days=365)
"""For what comes when the other rank likes. A rank that has ended is noticed at once all the same."""


class Wire:
    """This replica's messages with the others, by their numbers. All ranks make it together."""

    def __init__(self, replicas: Replicas) -> None:
        self._ranks = replicas.ranks
        self.timeout_s = read_launch_options().timeout_s
        self._group: Any = None
        if replicas.size > 1:
            timeout = timedelta(seconds=self.timeout_s)
            self._group = dist.new_group([*replicas.ranks], timeout=timeout, backend="gloo")

    def start_send(self, peer: int, tensors: Flats, tag: int) -> Callable[[], None]:
        """Begin to send; returns what waits until `tensors` may be changed. Tags: `tag` and those that follow.

        What answers a message is to be waited for before it: where the other rank ends, Gloo tells at once whoever
        waits for something from it, but not always whoever waits for something to go there, who then waits for the
        time-out (gloo/transport/tcp/pair.cc, `signalException` passes over unbound buffers in `tx_`).
        """
        works = self._start(dist.isend, peer, tensors, tag)
        return lambda: _wait(peer, works)

    def start_receive(self, peer: int, tensors: Flats, tag: int, *, patient: bool = False) -> Callable[[], None]:
        """Begin to receive; returns what waits for it. `patient`: for as long as it takes, else for the time-out."""
        works = self._start(dist.irecv, peer, tensors, tag)
        return lambda: _wait(peer, works, _PATIENCE if patient else None)

    def send(self, peer: int, tensors: Flats, tag: int) -> None:
        """Send and wait until it is on its way."""
        self.start_send(peer, tensors, tag)()

    def receive(self, peer: int, tensors: Flats, tag: int) -> None:
        """Wait for something that comes when the other rank likes."""
        self.start_receive(peer, tensors, tag, patient=True)()

    def _start(self, begin: Callable[..., Any], peer: int, tensors: Flats, tag: int) -> list[Any]:
        try:
            return [
                begin(one, self._ranks[peer], group=self._group, tag=tag + place)
                for place, one in enumerate(tensors)
                if one.numel()
            ]
        except (RuntimeError, ValueError):  # its connection is closed, or this rank has left the world
            raise Unreachable(peer, late=False) from None


class Unreachable(Exception):
    """A message could not be sent or received. `late`: the other rank is there, but did not come in time."""

    def __init__(self, peer: int, late: bool) -> None:
        super().__init__(peer)
        self.peer, self.late = peer, late


def ended(mode: str, rank: int) -> TrainingError:
    """What a rank says that cannot go on because another has ended."""
    return _because(
        f"Connection closed by peer: rank {rank}",
        f'rank {rank} has ended while others train with it (sync.mode = "{mode}"); look at what it said, and resume '
        "from the last checkpoint",
    )


def late(mode: str, rank: int, timeout_s: float) -> TrainingError:
    """What a rank says that has waited too long for another."""
    return _because(
        f"Timed out waiting for rank {rank}",
        f'rank {rank} did not come within {timeout_s:g} s (sync.mode = "{mode}"); see what it waits for, or give ranks '
        "more time to wait for each other (--timeout, TUTTI_TIMEOUT_S)",
    )


def _because(cause: str, words: str) -> TrainingError:
    """The error with its cause, by which a launcher knows that it was another rank which failed."""
    error = TrainingError(words)
    error.__cause__ = RuntimeError(cause)
    return error


def _wait(peer: int, works: list[Any], patience: timedelta | None = None) -> None:
    try:
        while works:
            work = works.pop(0)
            work.wait() if patience is None else work.wait(patience)
    except RuntimeError as error:
        raise Unreachable(peer, late="Timed out" in str(error)) from None

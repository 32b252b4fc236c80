"""Sums that travel while updates are made: in parts and rounds, one after another, in the same order on all ranks.

In parts, because what is sent at once fills the queues on its way: small messages of the steps between wait behind it,
and may be dropped where a queue is full.

Where all rounds are messages of pairs of ranks, a thread of their own goes from one to the next as soon as it may.
Collectives must be begun in one order on all ranks, which only the thread knows that begins all others, and what is on
a GPU is in order there: these go on at fixed updates, so that a network carries about as much between any two.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from tutti.comm.traffic import CommChannel, CommHandle, untracked_channel
from tutti.compression.exchange import Rounds, Wire
from tutti.local_sgd.vectors import Flats, Replicas

LEAST, EVEN = 1 << 16, 1 << 12
"""Values of a part at least, unless there are fewer, and what a part's number of values is a multiple of: blocks of a
code then end where parts do."""


WAITED = 8
"""Parts of a sum in a code that is waited for: one is written or read while another travels."""

THREADED_NUMEL, THREADED_NBYTES, MOST_THREADED = (1 << 19, 1 << 20), 1 << 18, 64
"""Of a sum in a thread of its own: values of a part, at least and at most, between them those of a code of so many
bytes; and parts at most. Between four hosts at 100 Mbit/s, 8 M values in 4 bits every 8 updates: in 8 parts, which fill
queues of 50 ms, small messages of the steps between took a tenth of a step; in 16 and 32 nothing. A part takes about a
millisecond of a core besides its values."""


def threaded_parts(numel: int, value_nbytes: float) -> int:
    """Parts of so many values, each of so many bytes in its code, that go in a thread of their own."""
    least, most = THREADED_NUMEL
    own = min(most, max(least, int(THREADED_NBYTES / value_nbytes)))
    return max(1, min(MOST_THREADED, -(-numel // own)))


def parts_for(updates: int, turns: int) -> int:
    """How many parts travel in so many updates, where each takes `turns` rounds: with every update but the last a round
    begins, so that the last has an update's time, too."""
    return max(1, updates - turns)


def parts_of(numel: int, most: int) -> list[slice]:
    """About equal parts of a vector, at most so many."""
    count = max(1, min(most, numel // LEAST))
    length = max(1, EVEN * -(-numel // (count * EVEN)))
    return [slice(start, min(start + length, numel)) for start in range(0, numel, length)]


class Leg:
    """One part's sum, round after round. `rounds`: over `wire`, not begun."""

    def __init__(self, channel: CommChannel, wire: Wire, rounds: Rounds) -> None:
        self._channel, self._wire, self._rounds = channel, wire, rounds
        self._flight = CommHandle(channel, [])

    def next(self) -> bool:
        """Wait for the round that is under way and begin the next; False where that was the last."""
        self._flight.wait()
        since, before = self._channel.traffic.clock.moment(), self._wire.sent_nbytes
        works = next(self._rounds, None)
        self._channel.add_exposed(since)
        if works is not None:
            there = [work for work in works if work is not None]
            self._flight = self._channel.start(there, self._wire.sent_nbytes - before) if there else self._flight
        return works is not None

    def end(self) -> None:
        """No round after the one that is under way."""
        self._flight.wait()
        self._rounds.close()


class Travel(ABC):
    """Sums under way."""

    @abstractmethod
    def go_on(self, update: int, after: CommHandle | None = None) -> None:
        """So many updates were made since it began, the one that computes now among them; `after`: what goes first."""

    @abstractmethod
    def land(self) -> None:
        """Until all sums are there."""

    @abstractmethod
    def drop(self) -> None:
        """Nobody wants the sums any more."""


class InTurns(Travel):
    """For `updates` updates. Each leg takes `turns` rounds; a leg begins with every turn, so each turn has one round of
    several legs, and turns are at even distances of updates."""

    def __init__(self, legs: Sequence[Leg], turns: int, updates: int) -> None:
        self._waiting, self._flying = list(legs), list[Leg]()
        self._slots, self._updates = max(1, len(legs) + turns - 1), updates
        self._turns = 0

    def go_on(self, update: int, after: CommHandle | None = None) -> None:
        if after is not None:  # Gloo's threads begin it when they come to it, perhaps behind what goes on here
            after.wait()
        while self._left and self._turns * self._updates < update * self._slots:
            self._turn()

    def land(self) -> None:
        while self._left:
            self._turn()

    def drop(self) -> None:
        for leg in (*self._flying, *self._waiting):
            leg.end()
        self._waiting, self._flying = [], []

    @property
    def _left(self) -> bool:
        return bool(self._waiting or self._flying)

    def _turn(self) -> None:
        """The first round of one more, then the next of those that have begun: what one sends travels while others are
        read."""
        self._turns += 1
        begun = [leg for leg in self._waiting[:1] if leg.next()]
        self._flying = [*(leg for leg in self._flying if leg.next()), *begun]
        self._waiting = self._waiting[1:]


class InThread(Travel):
    """In a thread of its own, from now on. `parts`: each one's rounds over its wire, `turns` of them, all of them
    messages of pairs, which are in order whatever else a group is used for. What was sent counts when sums land."""

    def __init__(self, parts: Sequence[tuple[Wire, Rounds]], turns: int, channel: CommChannel) -> None:
        own = untracked_channel()  # that of the steps is not for two threads
        self._turns = InTurns([Leg(own, *part) for part in parts], turns, 1)
        self._wires = {wire for wire, _ in parts}
        self._before = self._sent_nbytes
        self._problem: Exception | None = None
        self._channel, self._flight = channel, channel.start([self])
        self._thread = threading.Thread(target=self._run, name="tutti-travel", daemon=True)
        self._thread.start()

    def go_on(self, update: int, after: CommHandle | None = None) -> None:
        """It does so by itself."""

    def land(self) -> None:
        self._flight.wait()
        self._channel.correct_nbytes(self._sent_nbytes - self._before)

    def drop(self) -> None:
        """All ranks send and receive all of it: none knows how far another has come."""
        self.land()

    def wait(self) -> None:
        """As of a work that was started."""
        self._thread.join()
        if self._problem is not None:
            raise self._problem

    def is_completed(self) -> bool:
        return not self._thread.is_alive()

    @property
    def _sent_nbytes(self) -> int:
        return sum(wire.sent_nbytes for wire in self._wires)

    def _run(self) -> None:
        try:
            self._turns.land()
        except Exception as problem:  # raised where it is waited for
            self._problem = problem


def whole_legs(replicas: Replicas, then: Flats, means: Flats, parts: int) -> list[Leg]:
    """That make `means` the mean over the replicas of `then`, of values as they are: each of at most so many parts."""
    wire = Wire(replicas.group, lone=replicas.size == 1)
    own = ((one[part], mean[part]) for one, mean in zip(then, means, strict=True) for part in parts_of(len(one), parts))
    return [Leg(replicas.channel, wire, _whole(wire, *part)) for part in own]


def _whole(wire: Wire, then: torch.Tensor, mean: torch.Tensor) -> Rounds:
    torch.mul(then, 1.0 / wire.size, out=mean)
    yield [wire.all_reduce(mean)]

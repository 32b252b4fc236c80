"""Sums that travel while updates are made: in parts and rounds, one after another, at the same updates on all ranks.

In parts, because what is sent at once fills the queues on its way: small messages of the steps between wait behind it,
and may be dropped where a queue is full. So a network carries about as much between any two updates.
"""

from collections.abc import Sequence

import torch

from tutti.compress.exchange import Rounds, Wire
from tutti.runtime.consistency.vectors import Flats, Replicas
from tutti.runtime.traffic import Flight, Lane

LEAST, EVEN = 1 << 16, 1 << 12
"""Values of a part at least, unless there are fewer, and what a part's number of values is a multiple of: blocks of a
code then end where parts do."""


WAITED = 8
"""Parts of a sum in a code that is waited for: one is written or read while another travels."""


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

    def __init__(self, lane: Lane, wire: Wire, rounds: Rounds) -> None:
        self._lane, self._wire, self._rounds = lane, wire, rounds
        self._flight = Flight(lane, [])

    def next(self) -> bool:
        """Wait for the round that is under way and begin the next; False where that was the last."""
        self._flight.wait()
        since, before = self._lane.traffic.clock.moment(), self._wire.sent_nbytes
        works = next(self._rounds, None)
        self._lane.spent(since)
        if works is not None:
            there = [work for work in works if work is not None]
            self._flight = self._lane.start(there, self._wire.sent_nbytes - before) if there else self._flight
        return works is not None

    def end(self) -> None:
        """No round after the one that is under way."""
        self._flight.wait()
        self._rounds.close()


class Travel:
    """Sums under way for `updates` updates. Each leg takes `turns` rounds; a leg begins with every turn, so each turn
    has one round of several legs, and turns are at even distances of updates."""

    def __init__(self, legs: Sequence[Leg], turns: int, updates: int) -> None:
        self._waiting, self._flying = list(legs), list[Leg]()
        self._slots, self._updates = max(1, len(legs) + turns - 1), updates
        self._turns = 0

    def go_on(self, update: int) -> None:
        """So many updates were made since it began."""
        while self._left and self._turns * self._updates <= update * self._slots:
            self._turn()

    def land(self) -> None:
        """Until all sums are there."""
        while self._left:
            self._turn()

    def drop(self) -> None:
        """Nobody wants the sums any more."""
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


def whole_legs(replicas: Replicas, flats: Flats, parts: int) -> list[Leg]:
    """Of sums of values as they are, in place, each of at most so many parts."""
    wire = Wire(replicas.group, lone=replicas.size == 1)
    own = (flat[one] for flat in flats for one in parts_of(flat.numel(), parts))
    return [Leg(replicas.lane, wire, _whole(wire, part)) for part in own]


def _whole(wire: Wire, part: torch.Tensor) -> Rounds:
    yield [wire.all_reduce(part)]

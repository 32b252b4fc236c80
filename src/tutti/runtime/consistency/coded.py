"""Sums of replicas' flat vectors that travel in a code; what it leaves out is kept and goes with the next sum."""

import torch

from tutti.compress.exchange import Exchange, all_finite
from tutti.runtime.compressed.methods import make_exchange, turns_of
from tutti.runtime.consistency.vectors import Flats, Replicas, Vectors
from tutti.runtime.traffic import Flight, Lane
from tutti.spec.compression import Compression


class CodedSums:
    """Sums of what `vectors` gives, in the code `how`: an exchange for each vector. `count`: how many sums counted."""

    def __init__(self, replicas: Replicas, how: Compression, vectors: Vectors) -> None:
        self.vectors, self.lane, self.turns = vectors, replicas.lane, turns_of(how)
        self.exchanges = [
            make_exchange(how.code, shapes, group=replicas.group, dtype=dtype, device=device, seed=0)
            for shapes, (dtype, device) in zip(vectors.shapes, vectors.kinds, strict=True)
        ]

    def sum(self, flats: Flats) -> None:
        """Leave the sums over the replicas in `flats`, the same bits on each."""
        self.start(flats).land()

    def start(self, flats: Flats, updates: int = 1) -> "Travel":
        """Begin to sum `flats`, in place; it lands `updates` updates later. One at a time."""
        return Travel(self, flats, updates)

    def settle(self, flats: Flats) -> None:
        """The sums are in `flats`: what was left out is kept back, unless a sum is not finite."""
        for one, flat in zip(self.exchanges, flats, strict=True):
            one.settle(all_finite(flat))

    def forget(self) -> None:
        """What began counts for nothing."""
        for one in self.exchanges:
            one.settle(False)

    @property
    def count(self) -> int:
        return max((state.count for one in self.exchanges for state in one.states.values()), default=0)

    @count.setter
    def count(self, count: int) -> None:
        for one in self.exchanges:
            for state in one.states.values():
                state.count = count

    def held(self) -> dict[str, Flats]:
        """What is kept back now, by name: the tensors themselves, for checkpoints."""
        kept = {
            f"{who}-{name}-{place}": [tensor]
            for place, one in enumerate(self.exchanges)
            for who, state in one.states.items()
            for name, tensor in state.old.items()
        }
        shared = {
            f"shared-{name}-{place}": [tensor]
            for place, one in enumerate(self.exchanges)
            for name, tensor in one.shared.items()
        }
        return {**kept, **shared}


class Travel:
    """Sums under way. Their rounds of collectives begin at even distances of updates: what is between two rounds is
    computed when the second begins, which is at the same update on all ranks.
    """

    def __init__(self, sums: CodedSums, flats: Flats, updates: int) -> None:
        self._sums, self._flats, self._updates = sums, flats, updates
        self._legs = [Leg(sums.lane, one, flat) for one, flat in zip(sums.exchanges, flats, strict=True)]
        self._begun = 0
        self.go_on(0)

    def go_on(self, update: int) -> None:
        """So many updates were made since it began."""
        while self._legs and self._begun <= update * self._sums.turns // self._updates:
            self._move()

    def land(self) -> Flats:
        """All rounds: the sums."""
        while self._legs:
            self._move()
        self._sums.settle(self._flats)
        return self._flats

    def drop(self) -> None:
        """Nobody wants the sums any more."""
        for leg in self._legs:
            leg.end()
        self._sums.forget()

    def _move(self) -> None:
        self._begun += 1
        self._legs = [leg for leg in self._legs if leg.next()]


class Leg:
    """One vector's sum under way, round after round."""

    def __init__(self, lane: Lane, exchange: Exchange, flat: torch.Tensor) -> None:
        self._lane, self._wire, self._rounds = lane, exchange.wire, exchange.rounds(flat)
        self._flight = Flight(lane, [])

    def next(self) -> bool:
        """Wait for the round that is under way and begin the next; False where that was the last."""
        self._flight.wait()
        since, before = self._lane.traffic.clock.moment(), self._wire.sent_nbytes
        works = next(self._rounds, None)
        self._lane.spent(since)
        if works is not None:
            self._flight = self._lane.start(works, self._wire.sent_nbytes - before)
        return works is not None

    def end(self) -> None:
        """No round after the one that is under way."""
        self._flight.wait()
        self._rounds.close()

"""Sums of replicas' flat vectors that travel in a code; what it leaves out is kept and goes with the next sum."""

import torch

from tutti.compression.exchange import Exchange, Rounds, all_finite
from tutti.config.compression import Compression
from tutti.local_sgd.travel import (
    LEAST,
    WAITED,
    InThread,
    InTurns,
    Leg,
    Travel,
    parts_for,
    parts_of,
    threaded_parts,
)
from tutti.local_sgd.vectors import Flats, Replicas, Vectors
from tutti.parallel.compressed.methods import by_pairs, code_nbytes, make_exchange, turns_of


class CodedSums:
    """Sums of what `vectors` gives, in the code `how`: an exchange for each of some parts of each vector, or for all of
    it: in one part where the code must see it whole. `updates`: for how many sums travel, 0: they are waited for, None:
    in one part. `count`: how many sums counted."""

    def __init__(self, replicas: Replicas, how: Compression, vectors: Vectors, updates: int | None = None) -> None:
        self.vectors, self.turns, self._channel = vectors, turns_of(how, replicas.size), replicas.channel
        whole = updates is None or how.method == "powersgd" or how.settings.get("sparse")
        parts = 1 if whole else parts_for(updates, self.turns) if updates else WAITED
        self._threaded = bool(updates) and by_pairs(how, replicas.group, [device for _, device in vectors.kinds])
        self.exchanges: list[Exchange] = []
        self._places: list[tuple[int, slice]] = []
        for place, (shapes, (dtype, device)) in enumerate(zip(vectors.shapes, vectors.kinds, strict=True)):
            numel = sum(shape.numel() for shape in shapes)
            own = parts_of(numel, _threaded_parts(how, numel) if self._threaded and not whole else parts)
            for part in own:
                of = shapes if len(own) == 1 else [torch.Size((part.stop - part.start,))]
                exchange = make_exchange(
                    how.code, of, group=replicas.group, dtype=dtype, device=device, seed=len(self.exchanges)
                )
                self.exchanges.append(exchange)
                self._places.append((place, part))
        self._finite = [False] * len(self.exchanges)

    def sum(self, flats: Flats) -> None:
        """Leave the sums over the replicas in `flats`, the same bits on each."""
        parts = [self._sum(number, own) for number, own in enumerate(self._of(flats))]
        self._travel(parts, 1, threaded=False).land()
        self.settle()

    def start(self, then: Flats, equal: Flats, means: Flats, updates: int) -> Travel:
        """Begin to make `means` what was equal and the mean of how far replicas were from there then: they land so many
        updates later. `then` and `equal` stay as they are until; `settle` or `forget` follows."""
        ways = zip(*(self._of(flats) for flats in (then, equal, means)), strict=True)
        parts = [self._mean(number, *way) for number, way in enumerate(ways)]
        return self._travel(parts, updates, threaded=self._threaded)

    def settle(self) -> None:
        """The sums are there: what was left out is kept back, unless a sum is not finite."""
        for one, finite in zip(self.exchanges, self._finite, strict=True):
            one.settle(finite)

    def forget(self) -> None:
        """What began counts for nothing."""
        for one in self.exchanges:
            one.settle(False)

    def _travel(self, parts: list[Rounds], updates: int, *, threaded: bool) -> Travel:
        own = [(one.wire, rounds) for one, rounds in zip(self.exchanges, parts, strict=True)]
        if threaded:
            return InThread(own, self.turns, self._channel)
        return InTurns([Leg(self._channel, *part) for part in own], self.turns, updates)

    def _sum(self, number: int, part: torch.Tensor) -> Rounds:
        yield from self.exchanges[number].rounds(part)
        self._finite[number] = all_finite(part)

    def _mean(self, number: int, then: torch.Tensor, equal: torch.Tensor, mean: torch.Tensor) -> Rounds:
        torch.sub(then, equal, out=mean)
        yield from self._sum(number, mean)
        torch.add(equal, mean, alpha=1.0 / self.exchanges[number].wire.size, out=mean)

    def _of(self, flats: Flats) -> list[torch.Tensor]:
        """Each exchange's part of `flats`."""
        return [flats[place][part] for place, part in self._places]

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


def _threaded_parts(how: Compression, numel: int) -> int:
    return threaded_parts(numel, code_nbytes(how, LEAST) / LEAST)

"""Sums of replicas' flat vectors that travel in a code; what it leaves out is kept and goes with the next sum."""

from tutti.compress.exchange import all_finite
from tutti.runtime.compressed.methods import make_exchange
from tutti.runtime.consistency.vectors import Flats, Replicas, Vectors
from tutti.spec.compression import Compression, sum_sent_nbytes


class CodedSums:
    """Sums of what `vectors` gives, in the code `how`: an exchange for each vector. `count`: how many sums counted."""

    def __init__(self, replicas: Replicas, how: Compression, vectors: Vectors) -> None:
        self.vectors, self._replicas, self._how = vectors, replicas, how
        self.exchanges = [
            make_exchange(how.code, shapes, group=replicas.group, dtype=dtype, device=device, seed=0)
            for shapes, (dtype, device) in zip(vectors.shapes, vectors.kinds, strict=True)
        ]

    def sum(self, flats: Flats) -> None:
        """Leave the sums over the replicas in `flats`, the same bits on each."""
        lane = self._replicas.lane
        for one, flat, shapes in zip(self.exchanges, flats, self.vectors.shapes, strict=True):
            said = sum_sent_nbytes(self._how, shapes, self._replicas.size, flat.element_size())
            before = one.wire.sent_nbytes
            with lane.waiting(said):
                one.run(flat)
            if self._how.settings.get("sparse"):  # how many, the values say
                lane.corrected(one.wire.sent_nbytes - before - said)
            one.settle(all_finite(flat))

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

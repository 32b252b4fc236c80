"""What a rank keeps of a flat gradient between steps: error feedback, in plain tensors that count once a step does."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from tutti.compression.draw import Key, key_of
from tutti.errors import CheckpointError


class State:
    """Tensors by name, in two copies: `old` is read and `new` written by `encode`.

    `commit` makes the new ones count and `discard` leaves the old ones as they were: a step that is skipped, because
    some rank had a value that is not finite, touches no error feedback. `seed`: of this rank's random numbers; give
    each rank its own. `count`: steps that counted.
    """

    __slots__ = ("count", "new", "old", "origin", "seed")

    def __init__(self, old: dict[str, Tensor], new: dict[str, Tensor], *, seed: int, count: int, origin: int) -> None:
        self.old, self.new = old, new
        self.seed, self.count, self.origin = seed, count, origin

    @classmethod
    def zeros(
        cls, names: Iterable[str], numel: int, *, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
    ) -> "State":
        """The state before the first step. float64 is kept in float64, everything else in float32."""
        kept = torch.float64 if dtype is torch.float64 else torch.float32
        names = tuple(names)
        old, new = ({name: torch.zeros(numel, dtype=kept, device=device) for name in names} for _ in range(2))
        return cls(old, new, seed=seed, count=0, origin=0)

    def part(self, start: int, stop: int) -> "State":
        """A view of this state for elements start:stop; it is of this step only."""
        old = {name: tensor[start:stop] for name, tensor in self.old.items()}
        new = {name: tensor[start:stop] for name, tensor in self.new.items()}
        return State(old, new, seed=self.seed, count=self.count, origin=self.origin + start)

    def key(self) -> Key:
        """The stream of random numbers of this step and part."""
        return key_of(self.seed, self.count, self.origin)

    def commit(self) -> None:
        """The step counts: what was encoded has reached everyone."""
        self.old, self.new = self.new, self.old
        self.count += 1

    def discard(self) -> None:
        """The step does not count: the error feedback stays what it was before it."""
        for name, tensor in self.old.items():
            self.new[name].copy_(tensor)

    def tensors(self) -> dict[str, Tensor]:
        """Everything a checkpoint needs, by name; the tensors are this state's own."""
        return {**self.old, "count": torch.tensor(self.count, dtype=torch.int64)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `tensors` gave, of a state of the same names and size."""
        if set(tensors) != {*self.old, "count"}:
            raise CheckpointError(
                f"the compressor's state has {sorted(tensors)}, but {sorted([*self.old, 'count'])} are needed; "
                "go on with the method the checkpoint was written with"
            )
        for name, tensor in self.old.items():
            if tensors[name].shape != tensor.shape:
                raise CheckpointError(
                    f"the compressor's {name} has {tensors[name].numel()} elements in the checkpoint and "
                    f"{tensor.numel()} here; go on with as many ranks and the same buckets, or by tensor"
                )
            tensor.copy_(tensors[name])
        self.count = int(tensors["count"])


def rank_seed(seed: int, rank: int) -> int:
    """The seed of one rank: streams of different ranks are independent, as unbiased rounding needs."""
    low, high = key_of(seed, rank)
    return low | high << 32

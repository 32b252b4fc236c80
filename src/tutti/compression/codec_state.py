"""What a rank keeps of a flat gradient between steps (error feedback), and the codecs' counter-based random numbers."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from tutti.errors import CheckpointError

StreamKey = tuple[int, int]
"""Two words of 32 bits: one stream of random numbers."""


HASH_STEP, HASH_FIRST, HASH_SECOND = 0x9E3779B9, 0x7FEB352D, 0x846CA68B


WORD_MASK = 0xFFFFFFFF


def stream_key(*words: int) -> StreamKey:
    """The stream of these whole numbers (seed, rank, step, ...), by splitmix64 over each in turn."""
    state = 0
    for word in words:
        state = _mix((state ^ (word & (2**64 - 1))) + 0x9E3779B97F4A7C15)
    return state & WORD_MASK, state >> 32


def random_uniform(numel: int, key: StreamKey, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(numel,) numbers of a stream, multiples of 2^-24 in [0, 1): a hash of the place and the key."""
    place = torch.arange(numel, device=device, dtype=torch.int64)
    word = (place * HASH_STEP + key[0]) & WORD_MASK
    word = ((word ^ (word >> 16)) * HASH_FIRST) & WORD_MASK
    word = word ^ key[1]
    word = ((word ^ (word >> 15)) * HASH_SECOND) & WORD_MASK
    word = word ^ (word >> 16)
    return (word >> 8).to(dtype) * 2.0**-24


def _mix(word: int) -> int:
    word &= 2**64 - 1
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return word ^ (word >> 31)


def rank_seed(seed: int, rank: int) -> int:
    """The seed of one rank. Streams of different ranks are independent, as unbiased rounding needs."""
    low, high = stream_key(seed, rank)
    return low | high << 32


class CodecState:
    """Tensors by name, in two copies: `encode` reads `old` and writes `new`.

    `commit` makes the new copies count; `discard` restores the old ones, for a step that is skipped because some rank
    had a value that is not finite.

    Args:
        old: tensors before the step.
        new: tensors after it.
        seed: of this rank's random numbers; ranks need different seeds.
        count: steps that counted.
        origin: place of the first element in the whole gradient.
    """

    __slots__ = ("count", "new", "old", "origin", "seed")

    def __init__(self, old: dict[str, Tensor], new: dict[str, Tensor], *, seed: int, count: int, origin: int) -> None:
        self.old, self.new = old, new
        self.seed, self.count, self.origin = seed, count, origin

    @classmethod
    def zeros(
        cls, names: Iterable[str], numel: int, *, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
    ) -> "CodecState":
        """The state before the first step. It is float64 for float64 gradients, otherwise float32."""
        state_dtype = torch.float64 if dtype is torch.float64 else torch.float32
        names = tuple(names)
        old, new = ({name: torch.zeros(numel, dtype=state_dtype, device=device) for name in names} for _ in range(2))
        return cls(old, new, seed=seed, count=0, origin=0)

    def part(self, start: int, stop: int) -> "CodecState":
        """A view of this state for elements start:stop, valid in this step only."""
        old = {name: tensor[start:stop] for name, tensor in self.old.items()}
        new = {name: tensor[start:stop] for name, tensor in self.new.items()}
        return CodecState(old, new, seed=self.seed, count=self.count, origin=self.origin + start)

    def key(self) -> StreamKey:
        """The random stream of this step and part."""
        return stream_key(self.seed, self.count, self.origin)

    def commit(self) -> None:
        """The step counts: what was encoded has reached all ranks."""
        self.old, self.new = self.new, self.old
        self.count += 1

    def discard(self) -> None:
        """The step does not count: residuals are as they were before it."""
        for name, tensor in self.old.items():
            self.new[name].copy_(tensor)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that a checkpoint needs, by name; they are not copied."""
        return {**self.old, "count": torch.tensor(self.count, dtype=torch.int64)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over `tensors` of a state with the same names and size."""
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

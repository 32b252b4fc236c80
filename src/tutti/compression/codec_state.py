"""State of error feedback between steps, and the codecs' counter-based random numbers."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from tutti.errors import CheckpointError

StreamKey = tuple[int, int]
"""Two 32-bit words that identify one stream of random numbers."""


HASH_STEP, HASH_FIRST, HASH_SECOND = 0x9E3779B9, 0x7FEB352D, 0x846CA68B


WORD_MASK = 0xFFFFFFFF


def stream_key(*words: int) -> StreamKey:
    """Return the stream of these integers (seed, rank, step, ...), by applying splitmix64 to each in turn."""
    state = 0
    for word in words:
        state = _mix((state ^ (word & (2**64 - 1))) + 0x9E3779B97F4A7C15)
    return state & WORD_MASK, state >> 32


def random_uniform(numel: int, key: StreamKey, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return (numel,) numbers of a stream, multiples of 2^-24 in [0, 1): a hash of each index and the key."""
    position = torch.arange(numel, device=device, dtype=torch.int64)
    word = (position * HASH_STEP + key[0]) & WORD_MASK
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
    """Return the seed of one rank. Streams of different ranks are independent, as unbiased rounding needs."""
    low, high = stream_key(seed, rank)
    return low | high << 32


class CodecState:
    """Tensors by name, in two copies: `encode` reads `old` and writes `new`.

    `commit` makes the new copies current. `discard` restores the old ones, for a step that is skipped because some rank
    had a value that is not finite.

    Args:
        old: tensors before the step.
        new: tensors after the step.
        seed: seed of this rank's random numbers; ranks need different seeds.
        count: number of committed steps.
        origin: index of the first element in the whole gradient.
    """

    __slots__ = ("count", "new", "old", "origin", "seed")

    def __init__(self, old: dict[str, Tensor], new: dict[str, Tensor], *, seed: int, count: int, origin: int) -> None:
        self.old, self.new = old, new
        self.seed, self.count, self.origin = seed, count, origin

    @classmethod
    def zeros(
        cls, names: Iterable[str], numel: int, *, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
    ) -> "CodecState":
        """Make the state before the first step: float64 for float64 gradients, otherwise float32.

        Args:
            names: names of the tensors.
            numel: size of each tensor.
            dtype: dtype of the gradient.
            device: device of the gradient.
            seed: seed of this rank's random numbers.
        """
        state_dtype = torch.float64 if dtype is torch.float64 else torch.float32
        names = tuple(names)
        old, new = ({name: torch.zeros(numel, dtype=state_dtype, device=device) for name in names} for _ in range(2))
        return cls(old, new, seed=seed, count=0, origin=0)

    def part(self, start: int, stop: int) -> "CodecState":
        """Return a view of this state for elements start:stop, valid in this step only."""
        old = {name: tensor[start:stop] for name, tensor in self.old.items()}
        new = {name: tensor[start:stop] for name, tensor in self.new.items()}
        return CodecState(old, new, seed=self.seed, count=self.count, origin=self.origin + start)

    def key(self) -> StreamKey:
        """Return the random stream of this step and part."""
        return stream_key(self.seed, self.count, self.origin)

    def commit(self) -> None:
        """Commit the step: what was encoded has reached all ranks."""
        self.old, self.new = self.new, self.old
        self.count += 1

    def discard(self) -> None:
        """Discard the step: restore the tensors as they were before it."""
        for name, tensor in self.old.items():
            self.new[name].copy_(tensor)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint needs, by name. They are not copied."""
        return {**self.old, "count": torch.tensor(self.count, dtype=torch.int64)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load `tensors` of a state with the same names and size.

        Raises:
            CheckpointError: if names or sizes differ.
        """
        if set(tensors) != {*self.old, "count"}:
            raise CheckpointError(
                f"the checkpoint has {sorted(tensors)} of the compressor, but {sorted([*self.old, 'count'])} are "
                "needed; resume with the compression method that wrote the checkpoint"
            )
        for name, tensor in self.old.items():
            if tensors[name].shape != tensor.shape:
                raise CheckpointError(
                    f"the compressor's {name} has {tensors[name].numel()} elements in the checkpoint and "
                    f"{tensor.numel()} here; resume with the same number of ranks and the same buckets, or load by "
                    "tensor (load_states_by_tensor)"
                )
            tensor.copy_(tensors[name])
        self.count = int(tensors["count"])

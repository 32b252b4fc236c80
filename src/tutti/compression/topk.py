"""Top-k with error feedback: the k values of largest magnitude, with their places.

The choice is exact, and among equal magnitudes the first places win; a sample only says where to look.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tutti.compression.codec import Codec, arrays, parts
from tutti.compression.state import State
from tutti.errors import PlanError

SAMPLE = 16384
"""So many values say where to look for the largest."""

Momentum = tuple[float, Tensor, Tensor]
"""(m, old u, new u) of u = m u + values; the tensors are empty where there is none."""


@dataclass(frozen=True, slots=True)
class TopK(Codec):
    """8 bytes each for k = ceil(density n) values: a place of 32 bits and a float32, places rising."""

    density: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise PlanError(f"density = {self.density}; a share of the values that are sent, above 0 and at most 1")

    @property
    def keeps(self) -> tuple[str, ...]:
        return ("residual",)

    def count(self, numel: int) -> int:
        """How many of `numel` values are sent."""
        return min(numel, math.ceil(self.density * numel))

    def nbytes(self, numel: int) -> int:
        return 8 * self.count(numel)

    def pairs(self, message: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """The (places, values) of a message of `numel` values: int32 and float32 views."""
        indices, found = parts(message, *((dtype, self.count(numel)) for dtype in (torch.int32, torch.float32)))
        return indices, found

    def encode_by_torch(self, values: Tensor, state: State, message: Tensor) -> None:
        kept = state.new["residual"]
        torch.add(state.old["residual"], values, out=kept)
        self._take_by_torch(kept, kept[:0], message)

    def encode_by_numba(self, values: Tensor, state: State, message: Tensor) -> None:
        from tutti.compression.kernels import top

        new, (factor, old_u, new_u) = state.new["residual"], self._momentum(values, state)
        one_pass = arrays(values, state.old["residual"], new)
        real = one_pass[0].dtype.type
        places = _search(one_pass, (real(factor), *arrays(old_u, new_u)), self.count(values.numel()))
        if places is None:
            self._take_by_torch(new, new_u, message)
        else:
            top.take(places, *arrays(new, new_u, *self.pairs(message, values.numel())))

    @property
    def in_triton(self) -> bool:
        return True

    def encode_by_triton(self, values: Tensor, state: State, message: Tensor) -> None:
        from tutti.compression.gpu import search, top

        new, momentum = state.new["residual"], self._momentum(values, state)
        places = search.largest_sums(values, state.old["residual"], new, momentum, self.count(values.numel()))
        if places is None:
            self._take_by_torch(new, momentum[2], message)
        else:
            top.take(places, new, momentum[2], *self.pairs(message, values.numel()))

    def decode_add_by_torch(self, message: Tensor, into: Tensor) -> None:
        indices, found = self.pairs(message, into.numel())
        into.index_add_(0, indices, found.to(into.dtype))

    def decode_add_by_numba(self, message: Tensor, into: Tensor) -> None:
        from tutti.compression.kernels import top

        top.decode_add(*arrays(*self.pairs(message, into.numel()), into))

    def decode_add_by_triton(self, message: Tensor, into: Tensor) -> None:
        from tutti.compression.gpu import top

        top.decode_add(*self.pairs(message, into.numel()), into)

    def _momentum(self, values: Tensor, state: State) -> Momentum:
        """What the values are corrected by before they are added to what is kept: here nothing."""
        return 0.0, values[:0], values[:0]

    def _take_by_torch(self, kept: Tensor, momentum: Tensor, message: Tensor) -> None:
        """Move the k largest of `kept` into the message; the momentum, where it has a size, becomes 0 there."""
        indices, found = self.pairs(message, kept.numel())
        places = largest(kept, indices.numel())
        indices.copy_(places)
        found.copy_(kept[places])
        kept[places] -= found.to(kept.dtype)
        if momentum.numel():
            momentum[places] = 0


def largest(x: Tensor, count: int) -> Tensor:
    """The places of the `count` largest magnitudes, rising; of equal ones the first. NaN is larger than infinity."""
    whole, magnitude = (torch.int32, 2**31 - 1) if x.dtype is torch.float32 else (torch.int64, 2**63 - 1)
    keys = x.view(whole) & magnitude
    order = torch.sort(keys, descending=True, stable=True).indices
    return order[:count].sort().values


def threshold_ranks(expected: float) -> list[int]:
    """Ranks in a sample of a threshold that enough values should exceed, where so many of the sample are expected."""
    return [math.ceil(expected + spread * math.sqrt(expected) + 2) for spread in (3, 12)]


def most_above(numel: int, count: int) -> int:
    """For so many places above a threshold there is room; with more of them, the sample told too little."""
    return min(numel, 4 * count + numel // 64 + 4096)


def _search(one_pass: list[Any], momentum: tuple[Any, ...], count: int) -> Any:
    """Places of the `count` largest by a threshold from a sample, rising; None where the sample told too little."""
    import numpy as np

    from tutti.compression.kernels import top
    from tutti.compression.kernels.build import room

    values, n = one_pass[0], one_pass[0].size
    x, bits_of_x, _, magnitude = room(1024, values.dtype)
    sample = np.sort(_sampled(one_pass, momentum) & magnitude)
    equal = np.empty(count, np.int64)
    above = np.empty(most_above(n, count) + x.size, np.int64)
    for rank in threshold_ranks(count / n * sample.size):
        threshold = sample[-rank] if rank <= sample.size else bits_of_x.dtype.type(-1)
        over, same = top.collect(*one_pass, *momentum, threshold, above, equal, x, bits_of_x, magnitude)
        if over < 0:
            return None
        if over + same >= count:
            return _chosen(above[:over], equal[:same], count, one_pass[2].view(bits_of_x.dtype), magnitude)
    return None


def _sampled(one_pass: list[Any], momentum: tuple[Any, ...]) -> Any:
    """What the pass will make of some of the values, as whole numbers."""
    import numpy as np

    values, old, _ = one_pass
    factor, old_u, _ = momentum
    n = values.size
    at = np.arange(min(n, SAMPLE), dtype=np.uint64)
    if n > SAMPLE:
        at = ((at * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(11)) % np.uint64(n)
    x = old[at] + (factor * old_u[at] + values[at] if old_u.size else values[at])
    return x.view(np.int32 if x.itemsize == 4 else np.int64)


def _chosen(above: Any, equal: Any, count: int, kept: Any, magnitude: Any) -> Any:
    """Of the places above a threshold and the first equal to it, those of the `count` largest, rising."""
    import numpy as np

    if above.size <= count:
        return np.sort(np.concatenate([above, equal[: count - above.size]]))
    keys = kept[above] & magnitude
    least = np.partition(keys, keys.size - count)[keys.size - count]
    ties = np.flatnonzero(keys == least)
    take = keys > least
    take[ties[: count - np.count_nonzero(take)]] = True
    return above[take]

"""Top-k with error feedback: sends the k values of largest magnitude, with their positions.

The selection is exact; among equal magnitudes the first positions are chosen. A sample only gives a threshold to start
from.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tutti.compression.codec import Codec, arrays, parts
from tutti.compression.codec_state import CodecState
from tutti.compression.largest_values import SAMPLE, Momentum, above_capacity, largest, threshold_ranks
from tutti.config.compression import Compression
from tutti.errors import PlanError


@dataclass(frozen=True, slots=True)
class TopK(Codec):
    """Sends k = ceil(density n) values, in rising order of positions: 8 bytes each, a 32-bit position and a float32.

    Args:
        density: share of the values that is sent, above 0 and at most 1.
    """

    density: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise PlanError(
                f"density = {self.density}; give the share of the values that is sent, above 0 and at most 1"
            )

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("residual",)

    def count(self, numel: int) -> int:
        """Return how many of `numel` values are sent."""
        return min(numel, math.ceil(self.density * numel))

    def nbytes(self, numel: int) -> int:
        return 8 * self.count(numel)

    def pairs(self, message: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Return the positions (int32) and values (float32) of a message, as views of it.

        Args:
            message: uint8, `nbytes(numel)` or more.
            numel: number of values in the gradient.
        """
        indices, message_values = parts(
            message, *((dtype, self.count(numel)) for dtype in (torch.int32, torch.float32))
        )
        return indices, message_values

    def encode_by_torch(self, values: Tensor, state: CodecState, message: Tensor) -> None:
        residual = state.new["residual"]
        torch.add(state.old["residual"], values, out=residual)
        self._take_by_torch(residual, residual[:0], message)

    def encode_by_numba(self, values: Tensor, state: CodecState, message: Tensor) -> None:
        from tutti.compression import cpu_kernels

        new, (factor, old_u, new_u) = state.new["residual"], self._momentum(values, state)
        one_pass = arrays(values, state.old["residual"], new)
        real = one_pass[0].dtype.type
        positions = _search(one_pass, (real(factor), *arrays(old_u, new_u)), self.count(values.numel()))
        if positions is None:
            self._take_by_torch(new, new_u, message)
        else:
            cpu_kernels.take_values(positions, *arrays(new, new_u, *self.pairs(message, values.numel())))

    @property
    def has_triton_kernels(self) -> bool:
        return True

    def encode_by_triton(self, values: Tensor, state: CodecState, message: Tensor) -> None:
        from tutti.compression.gpu_kernels import sparse_kernels

        new, momentum = state.new["residual"], self._momentum(values, state)
        positions = sparse_kernels.largest_sums(
            values, state.old["residual"], new, momentum, self.count(values.numel())
        )
        if positions is None:
            self._take_by_torch(new, momentum[2], message)
        else:
            sparse_kernels.take_values(positions, new, momentum[2], *self.pairs(message, values.numel()))

    def decode_add_by_torch(self, message: Tensor, into: Tensor) -> None:
        indices, message_values = self.pairs(message, into.numel())
        into.index_add_(0, indices, message_values.to(into.dtype))

    def decode_add_by_numba(self, message: Tensor, into: Tensor) -> None:
        from tutti.compression import cpu_kernels

        cpu_kernels.decode_add_pairs(*arrays(*self.pairs(message, into.numel()), into))

    def decode_add_by_triton(self, message: Tensor, into: Tensor) -> None:
        from tutti.compression.gpu_kernels import sparse_kernels

        sparse_kernels.decode_add_pairs(*self.pairs(message, into.numel()), into)

    def _momentum(self, values: Tensor, state: CodecState) -> Momentum:
        """Return the momentum correction of the values; top-k has none."""
        return 0.0, values[:0], values[:0]

    def _take_by_torch(self, residual: Tensor, momentum: Tensor, message: Tensor) -> None:
        """Move the k largest values of `residual` into the message; zero `momentum`, if given, at their positions."""
        indices, message_values = self.pairs(message, residual.numel())
        positions = largest(residual, indices.numel())
        indices.copy_(positions)
        message_values.copy_(residual[positions])
        residual[positions] -= message_values.to(residual.dtype)
        if momentum.numel():
            momentum[positions] = 0


def _search(one_pass: list[Any], momentum: tuple[Any, ...], count: int) -> Any:
    """Find the positions of the `count` largest sums, in rising order, by a threshold from a sample.

    Returns None if the sample was misleading.
    """
    import numpy as np

    from tutti.compression import cpu_kernels
    from tutti.compression.cpu_kernels import block_buffers

    values, n = one_pass[0], one_pass[0].size
    x, bits_of_x, _, magnitude = block_buffers(1024, values.dtype)
    sample = np.sort(_sampled(one_pass, momentum) & magnitude)
    equal = np.empty(count, np.int64)
    above = np.empty(above_capacity(n, count) + x.size, np.int64)
    for rank in threshold_ranks(count / n * sample.size):
        threshold = sample[-rank] if rank <= sample.size else bits_of_x.dtype.type(-1)
        over, same = cpu_kernels.collect_above(*one_pass, *momentum, threshold, above, equal, x, bits_of_x, magnitude)
        if over < 0:
            return None
        if over + same >= count:
            return _chosen(above[:over], equal[:same], count, one_pass[2].view(bits_of_x.dtype), magnitude)
    return None


def _sampled(one_pass: list[Any], momentum: tuple[Any, ...]) -> Any:
    """Return the bits of the sums that the pass will form at sampled positions, as integers."""
    import numpy as np

    values, old, _ = one_pass
    factor, old_u, _ = momentum
    n = values.size
    at = np.arange(min(n, SAMPLE), dtype=np.uint64)
    if n > SAMPLE:
        at = ((at * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(11)) % np.uint64(n)
    x = old[at] + (factor * old_u[at] + values[at] if old_u.size else values[at])
    return x.view(np.int32 if x.itemsize == 4 else np.int64)


def _chosen(above: Any, equal: Any, count: int, residual: Any, magnitude: Any) -> Any:
    """Return the positions of the `count` largest, in rising order.

    `above` are the positions above a threshold, and `equal` the first ones equal to it.
    """
    import numpy as np

    if above.size <= count:
        return np.sort(np.concatenate([above, equal[: count - above.size]]))
    keys = residual[above] & magnitude
    least = np.partition(keys, keys.size - count)[keys.size - count]
    ties = np.flatnonzero(keys == least)
    take = keys > least
    take[ties[: count - np.count_nonzero(take)]] = True
    return above[take]


def from_compression(compression: Compression) -> TopK:
    """Make the top-k that a plan states."""
    return TopK(compression.settings["density"])

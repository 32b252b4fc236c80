"""TernGrad (Wen et al. 2017): -1, 0 or 1 times a scale that all ranks share, drawn without bias.

Values beyond 2.5 standard deviations of their block are clipped. The scale is the largest clipped magnitude over all
ranks. With shared scales a sum over ranks is a whole number of scales, so sending the sum back loses nothing more.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tutti.compression import blocks
from tutti.compression.codec_state import CodecState
from tutti.compression.qsgd import Levels
from tutti.config.compression import Compression


@dataclass(frozen=True, slots=True)
class TernGrad(Levels):
    """Sends 1/4 + 4/block bytes a value, and 4/block for the shared scales.

    The only level is 1: a sign, and 0 or 1 drawn by Bernoulli(|x|/s).

    Args:
        deviations: standard deviations of its block beyond which a value is clipped.
    """

    bits: int = 2  # type: ignore[assignment]
    block: int = 2048
    deviations: float = 2.5

    def clipped(self, values: Tensor) -> Tensor:
        """Return the values, clipped to `deviations` standard deviations of their block."""
        rows = blocks.in_blocks(values, self.block)
        count = blocks.sizes(values.numel(), self.block, values)
        mean = rows.sum(dim=1) / count
        variance = ((rows * rows).sum(dim=1) / count - mean * mean).clamp(min=0)
        limit = (self.deviations * variance.sqrt())[:, None]
        usable = (limit > 0) & limit.isfinite()  # a block of equal values has no deviation: it stays as it is
        limit = torch.where(usable, limit, torch.full_like(limit, torch.inf))
        return rows.clamp(min=-limit, max=limit).flatten()[: values.numel()]

    def encode_by_torch(self, values: Tensor, state: CodecState, message: Tensor) -> None:
        Levels.encode_by_torch(self, self.clipped(values), state, message)

    def encode_by_numba(self, values: Tensor, state: CodecState, message: Tensor) -> None:
        Levels.encode_by_numba(self, self.clipped(values), state, message)

    def encode_by_triton(self, values: Tensor, state: CodecState, message: Tensor) -> None:
        Levels.encode_by_triton(self, self.clipped(values), state, message)

    def return_codec(self, ranks: int) -> Levels:
        """Return the codec of sums over `ranks` ranks: exact up to 127 ranks, unbiased beyond."""
        if ranks <= 7:
            return Levels(bits=4, block=self.block, rounding="nearest")
        return Levels(bits=8, block=self.block, rounding="nearest" if ranks <= 127 else "unbiased")


def from_compression(compression: Compression) -> TernGrad:
    """Make TernGrad; it has no settings in a plan."""
    return TernGrad()

"""1-bit SGD (Seide et al. 2014): the sign of every value, and the mean magnitude of its block.

C(x) = mean |x| * sign(x). The mean magnitude never makes the residual longer than x; ||x||_2 / sqrt(n) may.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tutti.compression import blocks
from tutti.compression.codec import Codec, arrays, parts, residuals
from tutti.compression.codec_state import CodecState
from tutti.compression.gpu_kernels.launching import fits
from tutti.config.codec_registry import up_to_4
from tutti.config.compression import Compression


@dataclass(frozen=True, slots=True)
class OneBit(Codec):
    """Sends 1/8 + 4/block bytes a value.

    Args:
        block: number of values that share a scale.
        feedback: use error feedback, without which the method does not converge.
    """

    block: int = 2048
    feedback: bool = True

    def __post_init__(self) -> None:
        blocks.check_block(self.block)

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("residual",) if self.feedback else ()

    def nbytes(self, numel: int) -> int:
        return 4 * blocks.count(numel, self.block) + up_to_4(-(-numel // 8))

    def encode_by_torch(self, values: Tensor, state: CodecState, message: Tensor) -> None:
        old, new = residuals(state, values)
        scales, bits = self._parts(message, values.numel())
        x = values + old if self.feedback else values
        rows = blocks.in_blocks(x, self.block)
        count = blocks.sizes(x.numel(), self.block, x)
        scales.copy_((blocks.lane_sum(rows.abs()) / count).to(torch.float32))
        negative = rows < 0
        bits.copy_(blocks.pack(negative, 1)[: bits.numel()])
        if self.feedback:
            scale = scales.to(x.dtype)[:, None]
            new.copy_((rows - torch.where(negative, -scale, scale)).flatten()[: x.numel()])

    def decode_add_by_torch(self, message: Tensor, into: Tensor) -> None:
        scales, bits = self._parts(message, into.numel())
        scale = scales.to(into.dtype).repeat_interleave(self.block)[: into.numel()]
        into += torch.where(blocks.unpack(bits, 1, into.numel()) > 0, -scale, scale)

    def encode_by_numba(self, values: Tensor, state: CodecState, message: Tensor) -> None:
        from tutti.compression import cpu_kernels

        views = self._parts(message, values.numel())
        cpu_kernels.encode_signs(*arrays(values, *residuals(state, values), *views), self.block)

    def decode_add_by_numba(self, message: Tensor, into: Tensor) -> None:
        from tutti.compression import cpu_kernels

        cpu_kernels.decode_add_signs(*arrays(*self._parts(message, into.numel()), into), self.block)

    @property
    def has_triton_kernels(self) -> bool:
        return fits(self.block)

    def encode_by_triton(self, values: Tensor, state: CodecState, message: Tensor) -> None:
        from tutti.compression.gpu_kernels import dense_kernels

        scales, bits = self._parts(message, values.numel())
        dense_kernels.encode_signs(values, *residuals(state, values), scales, bits, self.block)

    def decode_add_by_triton(self, message: Tensor, into: Tensor) -> None:
        from tutti.compression.gpu_kernels import dense_kernels

        scales, bits = self._parts(message, into.numel())
        dense_kernels.decode_add_signs(scales, bits, into, self.block)

    def _parts(self, message: Tensor, numel: int) -> list[Tensor]:
        """Return views of the scales and of the signs; a set bit is a negative value."""
        return parts(message, (torch.float32, blocks.count(numel, self.block)), (torch.uint8, -(-numel // 8)))


def from_compression(compression: Compression) -> OneBit:
    """Make 1-bit SGD; it has no settings in a plan."""
    return OneBit()

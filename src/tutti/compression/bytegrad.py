"""ByteGrad (Bagua): 8 bits a value, between the smallest and the largest value of its block.

The original adds 1e-7 to every range and uses one range for a whole chunk, so small gradients vanish and one outlier
makes all values coarse. Here each block has its own range, however small.
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
class ByteGrad(Codec):
    """Sends 1 + 8/block bytes a value. Rounds to nearest, so the error is at most range/510.

    Args:
        block: number of values that share a range.
        feedback: use error feedback.
    """

    block: int = 2048
    feedback: bool = False

    def __post_init__(self) -> None:
        blocks.check_block(self.block)

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("residual",) if self.feedback else ()

    def nbytes(self, numel: int) -> int:
        return 8 * blocks.count(numel, self.block) + up_to_4(numel)

    def encode_by_torch(self, values: Tensor, state: CodecState, message: Tensor) -> None:
        old, new = residuals(state, values)
        ranges, codes = self._parts(message, values.numel())
        x = values + old if self.feedback else values
        rows = blocks.in_blocks(x, self.block)
        outside = blocks.in_blocks(torch.ones_like(x), self.block) == 0
        rows = torch.where(outside, rows[:, :1], rows)  # padding must not widen the last block's range
        low, high = rows.amin(dim=1).to(torch.float32), rows.amax(dim=1).to(torch.float32)
        bad = ~(rows.isfinite().all(dim=1) & low.isfinite() & high.isfinite())
        ranges.copy_(torch.stack([low, high], dim=1).masked_fill(bad[:, None], torch.nan))
        base, step = _base_and_step(ranges, x.dtype)
        inverse = torch.where(step > 0, 1 / step, torch.zeros_like(step))
        level = ((rows - base) * inverse + 0.5).clamp(max=255).clamp(min=0).floor().masked_fill(bad[:, None], 0)
        codes.copy_(level.flatten()[: x.numel()].to(torch.uint8))
        if self.feedback:
            residual = torch.where(bad[:, None], rows, rows - (base + level * step))
            new.copy_(residual.flatten()[: x.numel()])

    def decode_add_by_torch(self, message: Tensor, into: Tensor) -> None:
        ranges, codes = self._parts(message, into.numel())
        base, step = _base_and_step(ranges, into.dtype)
        rows = blocks.in_blocks(codes.to(into.dtype), self.block)
        into += (base + rows * step).flatten()[: into.numel()]

    def encode_by_numba(self, values: Tensor, state: CodecState, message: Tensor) -> None:
        from tutti.compression import cpu_kernels
        from tutti.compression.cpu_kernels import block_buffers

        views = arrays(values, *residuals(state, values), *self._parts(message, values.numel()))
        cpu_kernels.encode_min_max(*views, self.block, *block_buffers(self.block, views[0].dtype))

    def decode_add_by_numba(self, message: Tensor, into: Tensor) -> None:
        from tutti.compression import cpu_kernels

        cpu_kernels.decode_add_min_max(*arrays(*self._parts(message, into.numel()), into), self.block)

    @property
    def has_triton_kernels(self) -> bool:
        return fits(self.block)

    def encode_by_triton(self, values: Tensor, state: CodecState, message: Tensor) -> None:
        from tutti.compression.gpu_kernels import dense_kernels

        ranges, codes = self._parts(message, values.numel())
        dense_kernels.encode_min_max(values, *residuals(state, values), ranges, codes, self.block)

    def decode_add_by_triton(self, message: Tensor, into: Tensor) -> None:
        from tutti.compression.gpu_kernels import dense_kernels

        ranges, codes = self._parts(message, into.numel())
        dense_kernels.decode_add_min_max(ranges, codes, into, self.block)

    def _parts(self, message: Tensor, numel: int) -> list[Tensor]:
        """Return views of the ranges, (blocks, 2) lowest and highest values, and of the codes, one byte a value."""
        rows = blocks.count(numel, self.block)
        ranges, codes = parts(message, (torch.float32, 2 * rows), (torch.uint8, numel))
        return [ranges.view(rows, 2), codes]


def _base_and_step(ranges: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    low, high = (ranges[:, side, None].to(dtype) for side in (0, 1))
    step = blocks.quotient(high, 255) - blocks.quotient(low, 255)
    return low, step.masked_fill(step <= blocks.SMALLEST_SCALE, 0)


def from_compression(compression: Compression) -> ByteGrad:
    """Make the ByteGrad that a plan states."""
    return ByteGrad(feedback=bool(compression.settings["feedback"]))

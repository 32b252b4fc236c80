"""Bucketed top-k with quantisation (SparCML, Renggli et al. 2019): Top16_Q4 keeps 16 of every 512 values in 4 bits."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tutti.compression import blocks
from tutti.compression.codec import Codec, arrays, parts
from tutti.compression.codec_state import CodecState
from tutti.compression.gpu_kernels.launching import fits
from tutti.compression.qsgd import Levels
from tutti.config.codec_registry import up_to_4
from tutti.config.compression import Compression
from tutti.errors import PlanError

_LEVELS = 7


@dataclass(frozen=True, slots=True)
class BucketedTopK(Codec):
    """Sends the largest values of each bucket: a scale, and for each value a 16-bit position, a sign and a 3-bit level.

    A message takes (4 + 2.5 keep)/block bytes a value: 0.0859 for 16 of 512. Levels are rounded to nearest, relative to
    the bucket's largest magnitude. Error feedback keeps what is not sent.

    Args:
        block: values per bucket.
        keep: values that are sent of each bucket.
    """

    block: int = 512
    keep: int = 16

    def __post_init__(self) -> None:
        blocks.check_block(self.block, max_block=2**15)
        if not 1 <= self.keep <= self.block:
            raise PlanError(f"keep = {self.keep} with buckets of {self.block} values; give 1 to {self.block}")

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("residual",)

    def nbytes(self, numel: int) -> int:
        rows = blocks.count(numel, self.block)
        return 4 * rows + up_to_4(2 * rows * self.keep + rows * -(-self.keep // 2))

    def encode_by_torch(self, values: Tensor, state: CodecState, message: Tensor) -> None:
        scales, indices, packed = self._parts(message, values.numel())
        x = state.old["residual"] + values
        rows, inside = blocks.in_blocks(x, self.block), blocks.in_blocks(torch.ones_like(x), self.block) > 0
        whole, magnitude = (torch.int32, 2**31 - 1) if x.dtype is torch.float32 else (torch.int64, 2**63 - 1)
        keys = torch.where(inside, rows.view(whole) & magnitude, -1)
        order = torch.sort(keys, dim=1, descending=True, stable=True).indices[:, : self.keep]
        valid = torch.gather(inside, 1, order)
        positions = torch.where(valid, order, self.block).sort(dim=1).values
        valid, positions = positions < self.block, positions % self.block
        scale = torch.gather(rows, 1, order[:, :1]).abs()[:, 0].to(torch.float32)
        scale = torch.where(scale.isfinite(), scale, torch.full_like(scale, torch.nan))
        scales.copy_(scale.masked_fill(scale < blocks.SMALLEST_SCALE, 0))
        level, negative, unit = _quantised(torch.gather(rows, 1, positions), scales, valid)
        indices.copy_(positions.flatten())
        codes = level.to(torch.int32) | negative.to(torch.int32) << 3
        padded = torch.nn.functional.pad(codes, (0, self.keep % 2))
        packed.copy_(blocks.pack(padded, 4))
        sent = torch.where(negative, -(level * unit), level * unit)
        left = rows.scatter_add(1, positions, torch.where(valid, -sent, torch.zeros_like(sent)))
        state.new["residual"].copy_(left.flatten()[: x.numel()])

    def decode_add_by_torch(self, message: Tensor, into: Tensor) -> None:
        scales, indices, packed = self._parts(message, into.numel())
        rows, wide = scales.numel(), self.keep + self.keep % 2
        codes = blocks.unpack(packed, 4, rows * wide).view(rows, wide)[:, : self.keep]
        level = (codes & _LEVELS).to(into.dtype) * blocks.quotient(scales.to(into.dtype), _LEVELS)[:, None]
        start = torch.arange(rows, device=into.device)[:, None] * self.block
        positions = start + (indices.to(torch.int32) & 0xFFFF).view(rows, self.keep)
        into.index_add_(0, positions.flatten(), torch.where(codes > _LEVELS, -level, level).flatten())

    def encode_by_numba(self, values: Tensor, state: CodecState, message: Tensor) -> None:
        from tutti.compression import cpu_kernels
        from tutti.compression.cpu_kernels import block_buffers

        views = arrays(values, state.old["residual"], state.new["residual"], *self._parts(message, values.numel()))
        cpu_kernels.encode_buckets(*views, self.block, self.keep, *block_buffers(self.block, views[0].dtype))

    def decode_add_by_numba(self, message: Tensor, into: Tensor) -> None:
        from tutti.compression import cpu_kernels

        cpu_kernels.decode_add_buckets(*arrays(*self._parts(message, into.numel()), into), self.block, self.keep)

    @property
    def has_triton_kernels(self) -> bool:
        return fits(self.block)

    def encode_by_triton(self, values: Tensor, state: CodecState, message: Tensor) -> None:
        from tutti.compression.gpu_kernels import sparse_kernels

        old, new = state.old["residual"], state.new["residual"]
        scales, indices, packed = self._parts(message, values.numel())
        sparse_kernels.encode_buckets(values, old, new, scales, indices, packed, self.block, self.keep)

    def decode_add_by_triton(self, message: Tensor, into: Tensor) -> None:
        from tutti.compression.gpu_kernels import sparse_kernels

        scales, indices, packed = self._parts(message, into.numel())
        sparse_kernels.decode_add_buckets(scales, indices, packed, into, self.block, self.keep)

    def _parts(self, message: Tensor, numel: int) -> list[Tensor]:
        """Return views of the scales, positions and codes."""
        rows = blocks.count(numel, self.block)
        wanted = (torch.float32, rows), (torch.int16, rows * self.keep), (torch.uint8, rows * -(-self.keep // 2))
        return parts(message, *wanted)


def _quantised(x: Tensor, scales: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (level, negative, unit) of (buckets, keep) values; 0 where a slot is empty or the scale is unusable."""
    scale = scales.to(x.dtype)[:, None]
    unit, inverse = blocks.steps(scale, _LEVELS)
    level = (x.abs() * inverse + 0.5).clamp(max=_LEVELS).floor()
    live = (scale > 0) & valid
    return level.masked_fill(~live, 0), (x < 0) & live, unit


TOP16_Q4 = BucketedTopK(block=512, keep=16)
"""SparCML's setting for a multilayer perceptron."""


def from_compression(compression: Compression) -> BucketedTopK:
    """Make Top16_Q4; it has no settings in a plan."""
    return TOP16_Q4


def make_return_codec(compression: Compression) -> Levels:
    """Make the codec in which owners of chunks send sums: 4 bits a value, with error feedback."""
    return Levels(4, feedback=True)

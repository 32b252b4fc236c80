"""QSGD (Alistarh et al. 2017): unbiased sign-and-level codes, and the block codes that TernGrad shares.

C(x) = sign(x) ||b|| / s * floor(s |x| / ||b|| + u) in blocks b of 512 values. The block's largest magnitude is the
default norm, because its variance is far below that of the 2-norm (0.039 against 1.6 of ||x||^2 at 4 bits).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tutti.compression import blocks
from tutti.compression.codec import Codec, arrays, implementation, parts, residuals
from tutti.compression.codec_state import CodecState, random_uniform
from tutti.compression.gpu_kernels.launching import fits
from tutti.config.codec_registry import up_to_4
from tutti.config.compression import Compression
from tutti.errors import PlanError


@dataclass(frozen=True, slots=True)
class Levels(Codec):
    """Sends a sign and a level per value, and a scale per block: bits/8 + 4/block bytes a value.

    code = sign(x) floor(levels |x| / scale + u), with levels = 2^(bits-1) - 1.

    Args:
        bits: size of a code: 2, 4 or 8.
        block: number of values that share a scale.
        norm: the scale is the block's largest magnitude ("max") or its 2-norm ("l2").
        rounding: "unbiased" draws u in [0, 1), which is unbiased where scale >= |x|; "nearest" sets u = 1/2.
        feedback: use error feedback.
    """

    bits: Literal[2, 4, 8] = 4
    block: int = 512
    norm: Literal["max", "l2"] = "max"
    rounding: Literal["unbiased", "nearest"] = "unbiased"
    feedback: bool = False

    def __post_init__(self) -> None:
        blocks.check_block(self.block)
        if self.bits not in (2, 4, 8):
            raise PlanError(f"bits = {self.bits}; give 2, 4 or 8")

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("residual",) if self.feedback else ()

    @property
    def levels(self) -> int:
        """The largest level."""
        return (1 << (self.bits - 1)) - 1

    def nbytes(self, numel: int) -> int:
        return 4 * blocks.count(numel, self.block) + up_to_4(-(-numel * self.bits // 8))

    def scales(self, x: Tensor) -> Tensor:
        """Return the (blocks,) float32 norm of each block."""
        rows = blocks.in_blocks(x, self.block)
        largest = blocks.finite_max(rows)
        if self.norm == "max":
            return largest
        squares = blocks.lane_sum(rows * rows).double()  # a float32 root is not always rounded to nearest
        norm = squares.sqrt().to(torch.float32)
        return torch.where(largest.isnan() | ~norm.isfinite(), torch.full_like(norm, torch.nan), norm)

    def encode_by_torch(self, values: Tensor, state: CodecState, message: Tensor) -> None:
        _by_torch(self, values, state, message, None)

    def encode_by_numba(self, values: Tensor, state: CodecState, message: Tensor) -> None:
        _by_numba(self, values, state, message, None)

    @property
    def has_triton_kernels(self) -> bool:
        return fits(self.block)

    def encode_by_triton(self, values: Tensor, state: CodecState, message: Tensor) -> None:
        _by_triton(self, values, state, message, None)

    def encode_with_scales(self, values: Tensor, state: CodecState, message: Tensor, scales: Tensor) -> None:
        """Encode as `encode` does, but with given scales.

        Args:
            values: (numel,) gradient.
            state: the state of this codec for `numel` values.
            message: uint8, `nbytes(numel)` or more.
            scales: (blocks,) float32, none below its block's largest magnitude.
        """
        if values.numel():
            step = implementation(self, values.device, by_numba=_by_numba, by_triton=_by_triton, by_torch=_by_torch)
            step(self, values, state, message[: self.nbytes(values.numel())], scales)

    def decode_add_by_torch(self, message: Tensor, into: Tensor) -> None:
        scales, packed = self._parts(message, into.numel())
        codes = blocks.unpack(packed, self.bits, into.numel())
        unit = blocks.quotient(scales.to(into.dtype), self.levels).repeat_interleave(self.block)[: into.numel()]
        level = (codes & self.levels).to(into.dtype) * unit
        into += torch.where(codes > self.levels, -level, level)

    def decode_add_by_numba(self, message: Tensor, into: Tensor) -> None:
        from tutti.compression import cpu_kernels

        scales, packed = self._parts(message, into.numel())
        cpu_kernels.decode_add_levels(*arrays(scales, packed, into), self.block, self.bits)

    def decode_add_by_triton(self, message: Tensor, into: Tensor) -> None:
        from tutti.compression.gpu_kernels import dense_kernels

        scales, packed = self._parts(message, into.numel())
        dense_kernels.decode_add_levels(scales, packed, into, self.block, self.bits)

    def _parts(self, message: Tensor, numel: int) -> list[Tensor]:
        """Return views of the scales and of the codes."""
        code_nbytes = -(-numel * self.bits // 8)
        return parts(message, (torch.float32, blocks.count(numel, self.block)), (torch.uint8, code_nbytes))


def _by_torch(codec: Levels, values: Tensor, state: CodecState, message: Tensor, given: Tensor | None) -> None:
    old, new = residuals(state, values)
    scales, packed = codec._parts(message, values.numel())
    x = values + old if codec.feedback else values
    scales.copy_(codec.scales(x) if given is None else given)
    scales.masked_fill_(scales < blocks.SMALLEST_SCALE, 0)
    rows, scale = blocks.in_blocks(x, codec.block), scales.to(x.dtype)[:, None]
    unit, inverse = blocks.steps(scale, codec.levels)
    draws = torch.full_like(rows, 0.5)
    if codec.rounding == "unbiased":
        draws = blocks.in_blocks(random_uniform(x.numel(), state.key(), x.dtype, x.device), codec.block)
    level = (rows.abs() * inverse + draws).clamp(max=codec.levels).floor()
    bad = scale.isnan()
    level, negative = level.masked_fill(bad, 0), (rows < 0) & ~bad
    codes = level.to(torch.int32) | negative.to(torch.int32) << (codec.bits - 1)
    inside = blocks.in_blocks(torch.ones_like(x), codec.block) > 0
    packed.copy_(blocks.pack(codes * inside, codec.bits)[: packed.numel()])
    if codec.feedback:
        sent = torch.where(negative, -(level * unit), level * unit)
        new.copy_(torch.where(bad, rows, rows - sent).flatten()[: x.numel()])


def _by_numba(codec: Levels, values: Tensor, state: CodecState, message: Tensor, given: Tensor | None) -> None:
    import numpy as np

    from tutti.compression import cpu_kernels
    from tutti.compression.cpu_kernels import block_buffers

    scales, packed = codec._parts(message, values.numel())
    if given is not None:
        scales.copy_(given)
    low, high = (np.uint32(word) for word in state.key())
    cpu_kernels.encode_levels(
        *arrays(values, *residuals(state, values), scales),
        given is not None,
        packed.numpy(),
        codec.block,
        codec.bits,
        codec.norm == "l2",
        codec.rounding == "unbiased",
        low,
        high,
        *block_buffers(codec.block, values.numpy().dtype),
    )


def _by_triton(codec: Levels, values: Tensor, state: CodecState, message: Tensor, given: Tensor | None) -> None:
    from tutti.compression.gpu_kernels import dense_kernels

    scales, packed = codec._parts(message, values.numel())
    if given is not None:
        scales.copy_(given)
    dense_kernels.encode_levels(
        values,
        *residuals(state, values),
        scales,
        packed,
        codec.block,
        bits=codec.bits,
        given=given is not None,
        l2=codec.norm == "l2",
        noise=codec.rounding == "unbiased",
        key=state.key(),
    )


def qsgd(bits: Literal[2, 4, 8] = 4, *, block: int = 512, norm: Literal["max", "l2"] = "max") -> Levels:
    """Make QSGD with s = 2^(bits-1) - 1 levels: unbiased, so without error feedback. 4 bits take 0.508 bytes a value.

    Args:
        bits: size of a code: 2, 4 or 8.
        block: number of values that share a scale.
        norm: the scale is the block's largest magnitude ("max") or its 2-norm ("l2").
    """
    return Levels(bits=bits, block=block, norm=norm, rounding="unbiased", feedback=False)


def from_compression(compression: Compression) -> Levels:
    """Make the QSGD that a plan states."""
    return qsgd(compression.settings["bits"])

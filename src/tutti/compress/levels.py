"""Sign and level with a scale a block: the code that QSGD, TernGrad and other fixed-point methods write."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tutti.compress import blocks
from tutti.compress.codec import Codec, arrays, parts, residuals, up_to_4
from tutti.compress.draw import uniform
from tutti.compress.state import State
from tutti.errors import PlanError


@dataclass(frozen=True, slots=True)
class Levels(Codec):
    """code = sign(x) floor(levels |x| / scale + u), levels = 2^(bits-1) - 1; bits/8 + 4/block bytes a value.

    `norm`: scale is the block's largest magnitude or its 2-norm. `rounding`: u is drawn in [0, 1), which makes the
    code unbiased where scale >= |x|, or 1/2. `feedback`: what was not sent is kept.
    """

    bits: Literal[2, 4, 8] = 4
    block: int = 512
    norm: Literal["max", "l2"] = "max"
    rounding: Literal["unbiased", "nearest"] = "unbiased"
    feedback: bool = False

    def __post_init__(self) -> None:
        blocks.check_block(self.block)
        if self.bits not in (2, 4, 8):
            raise PlanError(f"bits = {self.bits}; a level has 2, 4 or 8 bits")

    @property
    def keeps(self) -> tuple[str, ...]:
        return ("residual",) if self.feedback else ()

    @property
    def levels(self) -> int:
        """The largest level."""
        return (1 << (self.bits - 1)) - 1

    def nbytes(self, numel: int) -> int:
        return 4 * blocks.count(numel, self.block) + up_to_4(-(-numel * self.bits // 8))

    def scales(self, x: Tensor) -> Tensor:
        """(blocks,) float32: each block's norm."""
        rows = blocks.in_blocks(x, self.block)
        largest = blocks.finite_max(rows)
        if self.norm == "max":
            return largest
        squares = blocks.lane_sum(rows * rows).double()  # torch's root of float32 is not always the nearest
        norm = squares.sqrt().to(torch.float32)
        return torch.where(largest.isnan() | ~norm.isfinite(), torch.full_like(norm, torch.nan), norm)

    def encode_by_torch(self, values: Tensor, state: State, message: Tensor) -> None:
        self._by_torch(values, state, message, None)

    def encode_by_kernel(self, values: Tensor, state: State, message: Tensor) -> None:
        self._by_kernel(values, state, message, None)

    def encode_with_scales(self, values: Tensor, state: State, message: Tensor, scales: Tensor) -> None:
        """`encode` with given scales, (blocks,) float32, of which none is below its block's largest magnitude."""
        if values.numel():
            step = self._by_kernel if values.device.type == "cpu" else self._by_torch
            step(values, state, message[: self.nbytes(values.numel())], scales)

    def _by_torch(self, values: Tensor, state: State, message: Tensor, given: Tensor | None) -> None:
        old, new = residuals(state, values)
        scales, packed = self._parts(message, values.numel())
        x = values + old if self.feedback else values
        scales.copy_(self.scales(x) if given is None else given)
        scales.masked_fill_(scales < blocks.SMALLEST_SCALE, 0)
        rows, scale = blocks.in_blocks(x, self.block), scales.to(x.dtype)[:, None]
        usable, zero = scale > 0, torch.zeros_like(scale)
        unit = torch.where(usable, scale / self.levels, zero)
        inverse = torch.where(usable, self.levels / scale, zero)
        draws = torch.full_like(rows, 0.5)
        if self.rounding == "unbiased":
            draws = blocks.in_blocks(uniform(x.numel(), state.key(), x.dtype, x.device), self.block)
        level = (rows.abs() * inverse + draws).clamp(max=self.levels).floor()
        bad = scale.isnan()
        level, negative = level.masked_fill(bad, 0), (rows < 0) & ~bad
        codes = level.to(torch.int32) | negative.to(torch.int32) << (self.bits - 1)
        inside = blocks.in_blocks(torch.ones_like(x), self.block) > 0
        packed.copy_(blocks.pack(codes * inside, self.bits)[: packed.numel()])
        if self.feedback:
            sent = torch.where(negative, -(level * unit), level * unit)
            new.copy_(torch.where(bad, rows, rows - sent).flatten()[: x.numel()])

    def _by_kernel(self, values: Tensor, state: State, message: Tensor, given: Tensor | None) -> None:
        import numpy as np

        from tutti.compress.kernels import levels
        from tutti.compress.kernels.build import room

        scales, packed = self._parts(message, values.numel())
        if given is not None:
            scales.copy_(given)
        low, high = (np.uint32(word) for word in state.key())
        levels.encode(
            *arrays(values, *residuals(state, values), scales),
            given is not None,
            packed.numpy(),
            self.block,
            self.bits,
            self.norm == "l2",
            self.rounding == "unbiased",
            low,
            high,
            *room(self.block, values.numpy().dtype),
        )

    def decode_add_by_torch(self, message: Tensor, into: Tensor) -> None:
        scales, packed = self._parts(message, into.numel())
        codes = blocks.unpack(packed, self.bits, into.numel())
        unit = (scales.to(into.dtype) / self.levels).repeat_interleave(self.block)[: into.numel()]
        level = (codes & self.levels).to(into.dtype) * unit
        into += torch.where(codes > self.levels, -level, level)

    def decode_add_by_kernel(self, message: Tensor, into: Tensor) -> None:
        from tutti.compress.kernels import levels

        scales, packed = self._parts(message, into.numel())
        levels.decode_add(*arrays(scales, packed, into), self.block, self.bits)

    def _parts(self, message: Tensor, numel: int) -> list[Tensor]:
        """Scales, then codes."""
        code_nbytes = -(-numel * self.bits // 8)
        return parts(message, (torch.float32, blocks.count(numel, self.block)), (torch.uint8, code_nbytes))

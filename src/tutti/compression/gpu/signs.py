"""Triton kernels of 1-bit codes: a scale a block, a sign an element."""

import triton.language as tl
from torch import Tensor

from tutti.compression.gpu.build import over_blocks, over_values
from tutti.compression.gpu.jit import kernel
from tutti.compression.gpu.parts import flat, places, quotient, store_codes


@kernel(anywhere=("scales", "bits"))
def encode_blocks(  # type: ignore[no-untyped-def]
    values,
    old,
    new,
    scales,
    bits,
    n,
    blocks,
    nbytes,
    block: tl.constexpr,
    rows: tl.constexpr,
    width: tl.constexpr,
    feedback: tl.constexpr,
):
    """x = values + old; scales = mean |x| a block; bits = signs; new = x - its decoded value."""
    row, at, inside = places(n, block, rows, width)
    x = tl.load(values + at, mask=inside, other=0.0)
    if feedback:
        x += tl.load(old + at, mask=inside, other=0.0)
    size = tl.maximum(tl.minimum(n - row * block, block), 1)
    scale = quotient(tl.sum(tl.abs(x), axis=1), size.to(x.dtype)).to(tl.float32)
    tl.store(scales + row, scale, mask=row < blocks)
    negative = x < 0
    store_codes(negative.to(tl.int32), bits, nbytes, row, 1, block, rows, width)
    if feedback:
        sent = scale.to(x.dtype)[:, None]
        tl.store(new + at, x - tl.where(negative, -sent, sent), mask=inside)


@kernel(anywhere=("scales", "bits"))
def decode_values(scales, bits, into, n, block: tl.constexpr, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    """into += the decoded values."""
    at, inside = flat(n, tile)
    x = tl.load(into + at, mask=inside)
    scale = tl.load(scales + at // block, mask=inside).to(x.dtype)
    byte = tl.load(bits + at // 8, mask=inside).to(tl.int32)
    negative = (byte >> (at % 8).to(tl.int32)) & 1
    tl.store(into + at, x + tl.where(negative > 0, -scale, scale), mask=inside)


def encode(values: Tensor, old: Tensor, new: Tensor, scales: Tensor, bits: Tensor, block: int) -> None:
    """As kernels.signs.encode; `old` and `new` of size 0: no error feedback."""
    views, sizes = (values, old, new, scales, bits), (values.numel(), scales.numel(), bits.numel())
    over_blocks(encode_blocks, scales.numel(), block, values, *views, *sizes, feedback=old.numel() > 0)


def decode_add(scales: Tensor, bits: Tensor, into: Tensor, block: int) -> None:
    """into += the decoded values."""
    over_values(decode_values, into.numel(), into, scales, bits, into, into.numel(), block=block)

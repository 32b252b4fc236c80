"""Triton kernels of min-max codes: 8 bits an element between its block's smallest and largest value."""

import triton.language as tl
from torch import Tensor

from tutti.compression.gpu.build import over_blocks, over_values
from tutti.compression.gpu.jit import inline, kernel
from tutti.compression.gpu.parts import (
    INFINITY,
    SMALLEST_SCALE,
    bits_of,
    flat,
    magnitudes,
    places,
    quotient,
    value_of,
)


@inline
def in_order(keys):  # type: ignore[no-untyped-def]
    """Bits of values, as whole numbers that compare as the values do, and back again: -0 is below 0."""
    last: tl.constexpr = 31 if keys.dtype == tl.int32 else 63
    return keys ^ ((keys >> last) & (2**last - 1))


@inline
def range_of(x, inside):  # type: ignore[no-untyped-def]
    """(rows,) float32 each: the smallest and the largest of each row, NaN where one or a value is not finite."""
    largest = value_of(tl.max(magnitudes(x), axis=1))
    keys = in_order(bits_of(x))
    end: tl.constexpr = 2**31 if keys.dtype == tl.int32 else 2**63
    least, most = tl.min(tl.where(inside, keys, end - 1), axis=1), tl.max(tl.where(inside, keys, -end), axis=1)
    low, high = value_of(in_order(least)).to(tl.float32), value_of(in_order(most)).to(tl.float32)
    good = (largest < INFINITY) & (tl.abs(low) < INFINITY) & (tl.abs(high) < INFINITY)
    return tl.where(good, low, float("nan")), tl.where(good, high, float("nan"))


@inline
def step_of(low, high):  # type: ignore[no-untyped-def]
    """(high - low) / 255, 0 where that is too small; NaN stays."""
    whole = tl.full(low.shape, 255, low.dtype)
    step = quotient(high, whole) - quotient(low, whole)
    return tl.where(step <= SMALLEST_SCALE, 0.0, step)


@kernel(anywhere=("scales", "codes"))
def encode_blocks(  # type: ignore[no-untyped-def]
    values,
    old,
    new,
    scales,
    codes,
    n,
    blocks,
    block: tl.constexpr,
    rows: tl.constexpr,
    width: tl.constexpr,
    feedback: tl.constexpr,
):
    """x = values + old; code = floor((x - low) / step + 1/2), step = (high - low) / 255; new = x - what is decoded."""
    row, at, inside = places(n, block, rows, width)
    x = tl.load(values + at, mask=inside, other=0.0)
    if feedback:
        x += tl.load(old + at, mask=inside, other=0.0)
    low, high = range_of(x, inside)
    tl.store(scales + 2 * row, low, mask=row < blocks)
    tl.store(scales + 2 * row + 1, high, mask=row < blocks)
    base = low.to(x.dtype)
    step = step_of(base, high.to(x.dtype))
    inverse = tl.where(step > 0, quotient(tl.full(step.shape, 1, step.dtype), step), 0.0)
    base, step = base[:, None], step[:, None]
    level = (x - base) * inverse[:, None] + 0.5
    level = tl.where(level < 255.0, level, 255.0)
    level = tl.floor(tl.where(level > 0.0, level, 0.0))
    good = (low == low)[:, None]
    level = tl.where(good, level, 0.0)
    tl.store(codes + at, level.to(tl.int32).to(tl.uint8), mask=inside)
    if feedback:
        tl.store(new + at, tl.where(good, x - (base + level * step), x), mask=inside)


@kernel(anywhere=("scales", "codes"))
def decode_values(scales, codes, into, n, block: tl.constexpr, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    """into += low + code * step."""
    at, inside = flat(n, tile)
    x = tl.load(into + at, mask=inside)
    low = tl.load(scales + 2 * (at // block), mask=inside).to(x.dtype)
    high = tl.load(scales + 2 * (at // block) + 1, mask=inside).to(x.dtype)
    level = tl.load(codes + at, mask=inside).to(tl.int32).to(x.dtype)
    tl.store(into + at, x + (low + level * step_of(low, high)), mask=inside)


def encode(values: Tensor, old: Tensor, new: Tensor, scales: Tensor, codes: Tensor, block: int) -> None:
    """As kernels.ranges.encode; `old` and `new` of size 0: no error feedback."""
    views, rows = (values, old, new, scales, codes), scales.shape[0]
    over_blocks(encode_blocks, rows, block, values, *views, values.numel(), rows, feedback=old.numel() > 0)


def decode_add(scales: Tensor, codes: Tensor, into: Tensor, block: int) -> None:
    """into += the decoded values."""
    over_values(decode_values, into.numel(), into, scales, codes, into, into.numel(), block=block)

"""Triton kernels of sign-and-level codes of 2, 4 or 8 bits with a scale a block."""

import triton.language as tl
from torch import Tensor

from tutti.compression.draw import Key
from tutti.compression.gpu.build import over_blocks, over_values
from tutti.compression.gpu.jit import inline, kernel
from tutti.compression.gpu.parts import (
    INFINITY,
    SMALLEST_SCALE,
    flat,
    magnitudes,
    places,
    quotient,
    steps,
    store_codes,
    uniform,
    value_of,
)


@inline
def norm_of(x, l2: tl.constexpr):  # type: ignore[no-untyped-def]
    """(rows,) float32: the largest magnitude of each row or its 2-norm, NaN where it is not finite."""
    largest = value_of(tl.max(magnitudes(x), axis=1))
    found = tl.sqrt(tl.sum(x * x, axis=1).to(tl.float64)) if l2 else largest
    found = found.to(tl.float32)
    return tl.where((largest < INFINITY) & (found < INFINITY), found, float("nan"))


@kernel(anywhere=("scales", "codes"), any_value=("low", "high"))
def encode_blocks(  # type: ignore[no-untyped-def]
    values,
    old,
    new,
    scales,
    codes,
    n,
    blocks,
    nbytes,
    low,
    high,
    block: tl.constexpr,
    rows: tl.constexpr,
    width: tl.constexpr,
    bits: tl.constexpr,
    given: tl.constexpr,
    l2: tl.constexpr,
    noise: tl.constexpr,
    feedback: tl.constexpr,
):
    """x = values + old; code = sign and floor(|x| levels / scale + u); new = x - its decoded value.

    `given`: the scales are there already. `noise`: u is drawn from the stream (low, high), else 1/2.
    """
    row, at, inside = places(n, block, rows, width)
    x = tl.load(values + at, mask=inside, other=0.0)
    if feedback:
        x += tl.load(old + at, mask=inside, other=0.0)
    scale = tl.load(scales + row, mask=row < blocks, other=0.0) if given else norm_of(x, l2)
    scale = tl.where(scale < SMALLEST_SCALE, 0.0, scale)
    tl.store(scales + row, scale, mask=row < blocks)
    levels: tl.constexpr = 2 ** (bits - 1) - 1
    unit, inverse = steps(scale, levels, x)
    level = tl.abs(x) * inverse[:, None]
    if noise:
        level += uniform(at, low, high).to(x.dtype)
    else:
        level += 0.5
    level = tl.floor(tl.where(level < levels, level, levels))
    good = (scale == scale)[:, None]
    level = tl.where(good & inside, level, 0.0)
    negative = (x < 0) & good
    code = level.to(tl.int32) | (negative.to(tl.int32) << (bits - 1))
    store_codes(code, codes, nbytes, row, bits, block, rows, width)
    if feedback:
        sent = level * unit[:, None]
        left = x - tl.where(negative, -sent, sent)
        tl.store(new + at, tl.where(good, left, x), mask=inside)


@kernel(anywhere=("scales", "codes"))
def decode_values(  # type: ignore[no-untyped-def]
    scales, codes, into, n, block: tl.constexpr, bits: tl.constexpr, tile: tl.constexpr
):
    """into += sign * level * (scale / levels)."""
    at, inside = flat(n, tile)
    x = tl.load(into + at, mask=inside)
    levels: tl.constexpr = 2 ** (bits - 1) - 1
    scale = tl.load(scales + at // block, mask=inside).to(x.dtype)
    unit = quotient(scale, tl.full(scale.shape, levels, scale.dtype))
    per: tl.constexpr = 8 // bits
    byte = tl.load(codes + at // per, mask=inside).to(tl.int32)
    code = (byte >> ((at % per) * bits).to(tl.int32)) & (2**bits - 1)
    level = (code & levels).to(x.dtype) * unit
    tl.store(into + at, x + tl.where(code > levels, -level, level), mask=inside)


def encode(
    values: Tensor,
    old: Tensor,
    new: Tensor,
    scales: Tensor,
    packed: Tensor,
    block: int,
    *,
    bits: int,
    given: bool,
    l2: bool,
    noise: bool,
    key: Key,
) -> None:
    """As kernels.levels.encode; `old` and `new` of size 0: no error feedback."""
    views, sizes = (values, old, new, scales, packed), (values.numel(), scales.numel(), packed.numel())
    signed = [word - 2**32 if word >= 2**31 else word for word in key]  # so that a kernel's words have 32 bits
    how = {"bits": bits, "given": given, "l2": l2, "noise": noise, "feedback": old.numel() > 0}
    over_blocks(encode_blocks, scales.numel(), block, values, *views, *sizes, *signed, **how)


def decode_add(scales: Tensor, packed: Tensor, into: Tensor, block: int, bits: int) -> None:
    """into += the decoded values."""
    over_values(decode_values, into.numel(), into, scales, packed, into, into.numel(), block=block, bits=bits)

"""Triton kernels of codes for every value: signs and levels of 2, 4 or 8 bits, bytes in a range, and signs alone."""

import triton.language as tl
from torch import Tensor

from tutti.compression.codec_state import StreamKey
from tutti.compression.gpu_kernels.launching import over_blocks, over_values
from tutti.compression.gpu_kernels.primitives import (
    INFINITY,
    SMALLEST_SCALE,
    bits_of,
    block_positions,
    flat_positions,
    inline,
    kernel,
    magnitudes,
    quotient,
    steps,
    store_codes,
    uniform_at,
    value_of,
)


@inline
def norm_of(x, l2: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the largest magnitude of each row or its 2-norm, (rows,) float32, NaN where it is not finite."""
    largest = value_of(tl.max(magnitudes(x), axis=1))
    norm = tl.sqrt(tl.sum(x * x, axis=1).to(tl.float64)) if l2 else largest
    norm = norm.to(tl.float32)
    return tl.where((largest < INFINITY) & (norm < INFINITY), norm, float("nan"))


@kernel(anywhere=("scales", "codes"), any_value=("low", "high"))
def _encode_levels_kernel(  # type: ignore[no-untyped-def]
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

    `given`: the scales are given, not computed. `noise`: u is drawn from the stream (low, high), otherwise 1/2.
    """
    row, at, inside = block_positions(n, block, rows, width)
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
        level += uniform_at(at, low, high).to(x.dtype)
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
def _decode_levels_kernel(  # type: ignore[no-untyped-def]
    scales, codes, into, n, block: tl.constexpr, bits: tl.constexpr, tile: tl.constexpr
):
    """into += sign * level * (scale / levels)."""
    at, inside = flat_positions(n, tile)
    x = tl.load(into + at, mask=inside)
    levels: tl.constexpr = 2 ** (bits - 1) - 1
    scale = tl.load(scales + at // block, mask=inside).to(x.dtype)
    unit = quotient(scale, tl.full(scale.shape, levels, scale.dtype))
    per: tl.constexpr = 8 // bits
    byte = tl.load(codes + at // per, mask=inside).to(tl.int32)
    code = (byte >> ((at % per) * bits).to(tl.int32)) & (2**bits - 1)
    level = (code & levels).to(x.dtype) * unit
    tl.store(into + at, x + tl.where(code > levels, -level, level), mask=inside)


def encode_levels(
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
    key: StreamKey,
) -> None:
    """As cpu_kernels.encode_levels; `old` and `new` of size 0: no error feedback."""
    views, sizes = (values, old, new, scales, packed), (values.numel(), scales.numel(), packed.numel())
    signed = [word - 2**32 if word >= 2**31 else word for word in key]  # so that the kernel gets words of 32 bits
    constants = {"bits": bits, "given": given, "l2": l2, "noise": noise, "feedback": old.numel() > 0}
    over_blocks(_encode_levels_kernel, scales.numel(), block, values, *views, *sizes, *signed, **constants)


def decode_add_levels(scales: Tensor, packed: Tensor, into: Tensor, block: int, bits: int) -> None:
    """into += the decoded values."""
    over_values(_decode_levels_kernel, into.numel(), into, scales, packed, into, into.numel(), block=block, bits=bits)


@inline
def in_order(keys):  # type: ignore[no-untyped-def]
    """Map bits of values to integers that compare as the values do, and back again; -0 is below 0."""
    last: tl.constexpr = 31 if keys.dtype == tl.int32 else 63
    return keys ^ ((keys >> last) & (2**last - 1))


@inline
def range_of(x, inside):  # type: ignore[no-untyped-def]
    """Return the smallest and the largest value of each row, (rows,) float32 each, NaN where a value is not finite."""
    largest = value_of(tl.max(magnitudes(x), axis=1))
    keys = in_order(bits_of(x))
    end: tl.constexpr = 2**31 if keys.dtype == tl.int32 else 2**63
    least, most = tl.min(tl.where(inside, keys, end - 1), axis=1), tl.max(tl.where(inside, keys, -end), axis=1)
    low, high = value_of(in_order(least)).to(tl.float32), value_of(in_order(most)).to(tl.float32)
    good = (largest < INFINITY) & (tl.abs(low) < INFINITY) & (tl.abs(high) < INFINITY)
    return tl.where(good, low, float("nan")), tl.where(good, high, float("nan"))


@inline
def step_of(low, high):  # type: ignore[no-untyped-def]
    """Return (high - low) / 255; 0 where that is too small, and NaN for NaN."""
    whole = tl.full(low.shape, 255, low.dtype)
    step = quotient(high, whole) - quotient(low, whole)
    return tl.where(step <= SMALLEST_SCALE, 0.0, step)


@kernel(anywhere=("ranges", "codes"))
def _encode_min_max_kernel(  # type: ignore[no-untyped-def]
    values,
    old,
    new,
    ranges,
    codes,
    n,
    blocks,
    block: tl.constexpr,
    rows: tl.constexpr,
    width: tl.constexpr,
    feedback: tl.constexpr,
):
    """x = values + old; code = floor((x - low) / step + 1/2), step = (high - low) / 255; new = x - decoded value."""
    row, at, inside = block_positions(n, block, rows, width)
    x = tl.load(values + at, mask=inside, other=0.0)
    if feedback:
        x += tl.load(old + at, mask=inside, other=0.0)
    low, high = range_of(x, inside)
    tl.store(ranges + 2 * row, low, mask=row < blocks)
    tl.store(ranges + 2 * row + 1, high, mask=row < blocks)
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


@kernel(anywhere=("ranges", "codes"))
def _decode_min_max_kernel(ranges, codes, into, n, block: tl.constexpr, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    """into += low + code * step."""
    at, inside = flat_positions(n, tile)
    x = tl.load(into + at, mask=inside)
    low = tl.load(ranges + 2 * (at // block), mask=inside).to(x.dtype)
    high = tl.load(ranges + 2 * (at // block) + 1, mask=inside).to(x.dtype)
    level = tl.load(codes + at, mask=inside).to(tl.int32).to(x.dtype)
    tl.store(into + at, x + (low + level * step_of(low, high)), mask=inside)


def encode_min_max(values: Tensor, old: Tensor, new: Tensor, ranges: Tensor, codes: Tensor, block: int) -> None:
    """As cpu_kernels.encode_min_max; `old` and `new` of size 0: no error feedback."""
    views, rows = (values, old, new, ranges, codes), ranges.shape[0]
    over_blocks(_encode_min_max_kernel, rows, block, values, *views, values.numel(), rows, feedback=old.numel() > 0)


def decode_add_min_max(ranges: Tensor, codes: Tensor, into: Tensor, block: int) -> None:
    """into += the decoded values."""
    over_values(_decode_min_max_kernel, into.numel(), into, ranges, codes, into, into.numel(), block=block)


@kernel(anywhere=("scales", "bits"))
def _encode_signs_kernel(  # type: ignore[no-untyped-def]
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
    """x = values + old; scales = mean |x| of each block; bits = signs; new = x - its decoded value."""
    row, at, inside = block_positions(n, block, rows, width)
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
def _decode_signs_kernel(scales, bits, into, n, block: tl.constexpr, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    """into += the decoded values."""
    at, inside = flat_positions(n, tile)
    x = tl.load(into + at, mask=inside)
    scale = tl.load(scales + at // block, mask=inside).to(x.dtype)
    byte = tl.load(bits + at // 8, mask=inside).to(tl.int32)
    negative = (byte >> (at % 8).to(tl.int32)) & 1
    tl.store(into + at, x + tl.where(negative > 0, -scale, scale), mask=inside)


def encode_signs(values: Tensor, old: Tensor, new: Tensor, scales: Tensor, bits: Tensor, block: int) -> None:
    """As cpu_kernels.encode_signs; `old` and `new` of size 0: no error feedback."""
    views, sizes = (values, old, new, scales, bits), (values.numel(), scales.numel(), bits.numel())
    over_blocks(_encode_signs_kernel, scales.numel(), block, values, *views, *sizes, feedback=old.numel() > 0)


def decode_add_signs(scales: Tensor, bits: Tensor, into: Tensor, block: int) -> None:
    """into += the decoded values."""
    over_values(_decode_signs_kernel, into.numel(), into, scales, bits, into, into.numel(), block=block)

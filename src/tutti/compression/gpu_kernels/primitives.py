"""Building blocks of kernels: positions, magnitudes as integers, quotients, random numbers, and packing of bits."""

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from tutti.compression import blocks


def kernel(*, anywhere: tuple[str, ...] = (), any_value: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function as a Triton kernel.

    Triton compiles another version for arguments that are a multiple of 16 bytes, or equal to 1. The named parameters
    are excluded from this.

    Args:
        anywhere: parameters that are views into messages, aligned to 4 bytes only.
        any_value: parameters that are arbitrary numbers.
    """

    def made(function: Callable[..., Any]) -> Any:
        return triton.jit(function, do_not_specialize_on_alignment=anywhere, do_not_specialize=any_value)

    return made


def inline(function: Callable[..., Any]) -> Any:
    """Compile a function into the kernels that call it."""
    return triton.jit(function)


SMALLEST_SCALE = tl.constexpr(blocks.SMALLEST_SCALE)
INFINITY = tl.constexpr(float("inf"))
UNIT = tl.constexpr(2.0**-24)
# NaN cannot be such a constant: at every launch Triton checks that constants are equal to what they were.


@inline
def block_positions(n, block: tl.constexpr, rows: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the positions of this program's blocks.

    Returns (rows,) the numbers of the blocks, (rows, width) the positions of their values, and which of these exist.
    """
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    column = tl.arange(0, width)
    at = row[:, None] * block + column[None, :]
    return row, at, (column < block)[None, :] & (at < n)


@inline
def flat_positions(count, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return this program's (tile,) positions of a flat tensor, and which of these exist."""
    at = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    return at, at < count


@inline
def bits_of(x):  # type: ignore[no-untyped-def]
    """Return the bits of floating-point numbers as signed integers."""
    return x.to(tl.int32 if x.dtype == tl.float32 else tl.int64, bitcast=True)


@inline
def magnitudes(x):  # type: ignore[no-untyped-def]
    """Return magnitudes as integers, which compare as the values do, with NaN above infinity.

    A maximum over them does not depend on the order.
    """
    return bits_of(x) & (0x7FFFFFFF if x.dtype == tl.float32 else 0x7FFFFFFFFFFFFFFF)


@inline
def value_of(keys):  # type: ignore[no-untyped-def]
    """Return the floating-point numbers with these bits."""
    return keys.to(tl.float32 if keys.dtype == tl.int32 else tl.float64, bitcast=True)


@inline
def quotient(x, y):  # type: ignore[no-untyped-def]
    """Return x / y rounded to nearest, which `/` of float32 does not guarantee."""
    return tl.div_rn(x, y) if y.dtype == tl.float32 else x / y


@inline
def steps(scale, levels: tl.constexpr, like):  # type: ignore[no-untyped-def]
    """Return (value of a level, levels per unit) for scales, in the dtype of `like`; 0 where a scale is 0 or NaN."""
    real = scale.to(like.dtype)
    most = tl.full(real.shape, levels, real.dtype)
    usable = scale > 0
    return tl.where(usable, quotient(real, most), 0.0), tl.where(usable, quotient(most, real), 0.0)


@inline
def uniform_at(position, low, high):  # type: ignore[no-untyped-def]
    """Return the numbers of a stream at these positions, float32, as codec_state.random_uniform defines them."""
    word = position.to(tl.uint32) * 0x9E3779B9 + low.to(tl.uint32)
    word ^= word >> 16
    word *= 0x7FEB352D
    word ^= high.to(tl.uint32)
    word ^= word >> 15
    word *= 0x846CA68B
    word ^= word >> 16
    return (word >> 8).to(tl.float32) * UNIT


@inline
def packed(codes, bits: tl.constexpr, rows: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pack (rows, width) int32 codes of `bits` into (rows, bits width / 8) bytes, first value in the lowest bits."""
    if bits == 8:
        packed_bytes = codes
    else:
        per: tl.constexpr = 8 // bits
        shifted = tl.reshape(codes, (rows, width // per, per)) << (tl.arange(0, per) * bits)[None, None, :]
        packed_bytes = tl.sum(shifted, axis=2)
    return packed_bytes.to(tl.uint8)


@inline
def store_codes(  # type: ignore[no-untyped-def]
    codes, to, nbytes, row, bits: tl.constexpr, block: tl.constexpr, rows: tl.constexpr, width: tl.constexpr
):
    """Write the (rows, width) codes of whole blocks one after another; `nbytes` is the size of all codes."""
    byte = tl.arange(0, width * bits // 8)
    at = row[:, None] * (block * bits // 8) + byte[None, :]
    inside = (byte < block * bits // 8)[None, :] & (at < nbytes)
    tl.store(to + at, packed(codes, bits, rows, width), mask=inside)

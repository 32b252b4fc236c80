"""What kernels are made of: places, magnitudes as whole numbers, quotients, random numbers, bits in bytes."""

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from tutti.compression import blocks


def kernel(*, anywhere: tuple[str, ...] = (), any_value: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Any]:
    """A kernel. Triton compiles it anew where an argument is a multiple of 16 bytes, or 1, and where it is not, but not
    for those named: `anywhere`, views into messages, which lie at any multiple of 4; `any_value`, numbers.
    """

    def made(function: Callable[..., Any]) -> Any:
        return triton.jit(function, do_not_specialize_on_alignment=anywhere, do_not_specialize=any_value)

    return made


def inline(function: Callable[..., Any]) -> Any:
    """A function that is compiled into the kernels that call it."""
    return triton.jit(function)


SMALLEST_SCALE = tl.constexpr(blocks.SMALLEST_SCALE)
INFINITY = tl.constexpr(float("inf"))
UNIT = tl.constexpr(2.0**-24)
# NaN is none of them: at every launch Triton looks whether a constant is still equal to what it was.


@inline
def block_positions(n, block: tl.constexpr, rows: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """(rows,) this program's blocks; (rows, width) the places of their values, and which of those there are."""
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    column = tl.arange(0, width)
    at = row[:, None] * block + column[None, :]
    return row, at, (column < block)[None, :] & (at < n)


@inline
def flat_positions(count, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    """(tile,) this program's places of a flat tensor, and which of those there are."""
    at = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    return at, at < count


@inline
def bits_of(x):  # type: ignore[no-untyped-def]
    """Floating-point numbers' bits as whole numbers with a sign."""
    return x.to(tl.int32 if x.dtype == tl.float32 else tl.int64, bitcast=True)


@inline
def magnitudes(x):  # type: ignore[no-untyped-def]
    """Magnitudes as whole numbers: they compare as values do, NaN is above infinity, and a maximum has no order."""
    return bits_of(x) & (0x7FFFFFFF if x.dtype == tl.float32 else 0x7FFFFFFFFFFFFFFF)


@inline
def value_of(keys):  # type: ignore[no-untyped-def]
    """The floating-point numbers that whole numbers are the bits of."""
    return keys.to(tl.float32 if keys.dtype == tl.int32 else tl.float64, bitcast=True)


@inline
def quotient(x, y):  # type: ignore[no-untyped-def]
    """x / y, rounded to nearest; `/` of float32 is not."""
    return tl.div_rn(x, y) if y.dtype == tl.float32 else x / y


@inline
def steps(scale, levels: tl.constexpr, like):  # type: ignore[no-untyped-def]
    """(what a level is worth, levels of one) for scales, in the dtype of `like`; 0 where a scale is 0 or NaN."""
    real = scale.to(like.dtype)
    most = tl.full(real.shape, levels, real.dtype)
    usable = scale > 0
    return tl.where(usable, quotient(real, most), 0.0), tl.where(usable, quotient(most, real), 0.0)


@inline
def uniform_at(place, low, high):  # type: ignore[no-untyped-def]
    """Numbers of a stream at these places, float32, as compress.draw.uniform has them."""
    word = place.to(tl.uint32) * 0x9E3779B9 + low.to(tl.uint32)
    word ^= word >> 16
    word *= 0x7FEB352D
    word ^= high.to(tl.uint32)
    word ^= word >> 15
    word *= 0x846CA68B
    word ^= word >> 16
    return (word >> 8).to(tl.float32) * UNIT


@inline
def packed(codes, bits: tl.constexpr, rows: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """(rows, width) codes of `bits`, int32 -> (rows, bits width / 8) bytes, the first value in the lowest bits."""
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
    """Write the codes of whole blocks, (rows, width), behind each other; `nbytes`: of the codes of all values."""
    byte = tl.arange(0, width * bits // 8)
    at = row[:, None] * (block * bits // 8) + byte[None, :]
    inside = (byte < block * bits // 8)[None, :] & (at < nbytes)
    tl.store(to + at, packed(codes, bits, rows, width), mask=inside)

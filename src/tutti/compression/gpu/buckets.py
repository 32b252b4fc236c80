"""Triton kernels of bucketed top-k: of each bucket the largest values, in 4 bits."""

import triton.language as tl
from torch import Tensor

from tutti.compression.gpu.build import SCATTERED, launch, over_blocks, over_values
from tutti.compression.gpu.jit import inline, kernel
from tutti.compression.gpu.parts import INFINITY, SMALLEST_SCALE, flat, magnitudes, places, quotient, steps, value_of


@inline
def bound_of(keys, keep: tl.constexpr):  # type: ignore[no-untyped-def]
    """(rows,) the `keep`-th largest key of each row, bit by bit from the highest; 0 where a row has fewer."""
    one = tl.full([keys.shape[0]], 1, keys.dtype)
    bound = one - one
    highest: tl.constexpr = 30 if keys.dtype == tl.int32 else 62
    for turn in range(highest + 1):
        candidate = bound | (one << (highest - turn))
        reached = tl.sum((keys >= candidate[:, None]).to(tl.int32), axis=1)
        bound = tl.where(reached >= keep, candidate, bound)
    return bound


@kernel(anywhere=("scales", "indices"))
def choose_values(  # type: ignore[no-untyped-def]
    values,
    old,
    new,
    scales,
    indices,
    n,
    blocks,
    block: tl.constexpr,
    rows: tl.constexpr,
    width: tl.constexpr,
    keep: tl.constexpr,
    slots: tl.constexpr,
):
    """new = values + old; the places of each bucket's `keep` largest, rising, of equal ones the first; its scale."""
    row, at, inside = places(n, block, rows, width)
    x = tl.load(values + at, mask=inside, other=0.0) + tl.load(old + at, mask=inside, other=0.0)
    tl.store(new + at, x, mask=inside)
    keys = tl.where(inside, magnitudes(x), -1)
    scale = value_of(tl.max(keys, axis=1)).to(tl.float32)
    scale = tl.where(scale < INFINITY, scale, float("nan"))
    tl.store(scales + row, tl.where(scale < SMALLEST_SCALE, 0.0, scale), mask=row < blocks)
    bound = bound_of(keys, keep)[:, None]
    over, same = (keys > bound).to(tl.int32), (keys == bound).to(tl.int32)
    still = keep - tl.sum(over, axis=1)[:, None]
    chosen = (over > 0) | ((same > 0) & (tl.cumsum(same, axis=1) <= still))
    slot = tl.cumsum(chosen.to(tl.int32), axis=1) - 1
    column = tl.arange(0, width)[None, :] + tl.zeros_like(slot)
    tl.store(indices + row[:, None] * keep + slot, column.to(tl.int16), mask=chosen & inside)
    behind = tl.arange(0, slots)[None, :]  # of a last bucket that is shorter than `keep`
    rest = (behind >= (n - row * block)[:, None]) & (behind < keep) & (row < blocks)[:, None]
    tl.store(indices + row[:, None] * keep + behind, tl.zeros([rows, slots], tl.int16), mask=rest)


@kernel(anywhere=("scales", "indices", "codes"))
def write_values(  # type: ignore[no-untyped-def]
    new,
    scales,
    indices,
    codes,
    n,
    blocks,
    block: tl.constexpr,
    rows: tl.constexpr,
    keep: tl.constexpr,
    pairs: tl.constexpr,
):
    """Of what was chosen, sign and level of the largest, two in a byte; new -= what is sent."""
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    byte = tl.arange(0, pairs)
    slot = 2 * byte[None, :, None] + tl.arange(0, 2)[None, None, :]
    bucket = row[:, None, None]
    live = (slot < keep) & (slot < n - bucket * block) & (bucket < blocks)
    place = tl.load(indices + bucket * keep + slot, mask=live, other=0).to(tl.int64)
    at = bucket * block + place
    x = tl.load(new + at, mask=live, other=0.0)
    scale = tl.load(scales + row, mask=row < blocks, other=0.0)
    unit, inverse = steps(scale, 7, x)
    live = live & (scale > 0)[:, None, None]
    level = tl.abs(x) * inverse[:, None, None] + 0.5
    level = tl.where(live, tl.floor(tl.where(level < 7.0, level, 7.0)), 0.0)
    negative = (x < 0) & live
    code = level.to(tl.int32) | (negative.to(tl.int32) << 3)
    half: tl.constexpr = (keep + 1) // 2
    both = tl.sum(code << (4 * tl.arange(0, 2))[None, None, :], axis=2).to(tl.uint8)
    inside = (byte < half)[None, :] & (row < blocks)[:, None]
    tl.store(codes + row[:, None] * half + byte[None, :], both, mask=inside)
    sent = level * unit[:, None, None]
    tl.store(new + at, x - tl.where(negative, -sent, sent), mask=live)


@kernel(anywhere=("scales", "indices", "codes"))
def decode_values(  # type: ignore[no-untyped-def]
    scales, indices, codes, into, count, block: tl.constexpr, keep: tl.constexpr, tile: tl.constexpr
):
    """into += the decoded values."""
    number, inside = flat(count, tile)
    bucket, slot = number // keep, number % keep
    scale = tl.load(scales + bucket, mask=inside).to(into.dtype.element_ty)
    unit = quotient(scale, tl.full(scale.shape, 7, scale.dtype))
    half: tl.constexpr = (keep + 1) // 2
    byte = tl.load(codes + bucket * half + slot // 2, mask=inside).to(tl.int32)
    code = (byte >> (4 * (slot % 2)).to(tl.int32)) & 15
    level = (code & 7).to(scale.dtype) * unit
    place = tl.load(indices + number, mask=inside).to(tl.int64)
    tl.atomic_add(into + bucket * block + place, tl.where(code > 7, -level, level), mask=inside)


def encode(
    values: Tensor, old: Tensor, new: Tensor, scales: Tensor, indices: Tensor, packed: Tensor, block: int, keep: int
) -> None:
    """As kernels.top.encode_buckets: a pass that chooses, and one over what was chosen."""
    n, blocks = values.numel(), scales.numel()
    pairs = 1 << ((keep + 1) // 2 - 1).bit_length()
    how = {"keep": keep, "slots": 2 * pairs}
    over_blocks(choose_values, blocks, block, values, values, old, new, scales, indices, n, blocks, **how)
    rows = max(1, SCATTERED // (2 * pairs))
    how = {"block": block, "rows": rows, "keep": keep, "pairs": pairs}
    launch(write_values, -(-blocks // rows), values, new, scales, indices, packed, n, blocks, **how)


def decode_add(scales: Tensor, indices: Tensor, packed: Tensor, into: Tensor, block: int, keep: int) -> None:
    """into += the decoded values."""
    views, count = (scales, indices, packed, into), indices.numel()
    over_values(decode_values, count, into, *views, count, tile=SCATTERED, block=block, keep=keep)

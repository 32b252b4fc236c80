"""Triton kernels of sparse codes: the largest values and their positions."""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from tutti.compression.gpu_kernels.launching import SCATTER_TILE, launch, over_blocks, over_values
from tutti.compression.gpu_kernels.primitives import (
    INFINITY,
    SMALLEST_SCALE,
    block_positions,
    flat_positions,
    inline,
    kernel,
    magnitudes,
    quotient,
    steps,
    value_of,
)
from tutti.compression.largest_values import SAMPLE, Momentum, above_capacity, largest, threshold_ranks


@inline
def sum_of(  # type: ignore[no-untyped-def]
    values, old, old_u, new_u, at, inside, momentum: tl.constexpr, corrected: tl.constexpr, keep: tl.constexpr
):
    """Return old + values, or old + u with u = momentum old_u + values; with `keep`, u is stored in new_u."""
    x = tl.load(values + at, mask=inside, other=0.0)
    if corrected:
        x = tl.load(old_u + at, mask=inside, other=0.0) * momentum + x
        if keep:
            tl.store(new_u + at, x, mask=inside)
    return tl.load(old + at, mask=inside, other=0.0) + x


@kernel()
def _sample_kernel(  # type: ignore[no-untyped-def]
    values,
    old,
    old_u,
    keys,
    n,
    count,
    momentum: tl.constexpr,
    corrected: tl.constexpr,
    everything: tl.constexpr,
    tile: tl.constexpr,
):
    """Write the magnitudes of the sums at sampled positions, or at all positions."""
    number, inside = flat_positions(count, tile)
    at = number
    if not everything:
        at = ((number.to(tl.uint64) * 0x9E3779B97F4A7C15) >> 11).to(tl.int64) % n
    x = sum_of(values, old, old_u, old_u, at, inside, momentum, corrected, False)
    tl.store(keys + number, magnitudes(x), mask=inside)


@kernel(anywhere=("threshold",))
def _collect_kernel(  # type: ignore[no-untyped-def]
    values,
    old,
    new,
    old_u,
    new_u,
    threshold,
    above,
    counts,
    n,
    capacity,
    momentum: tl.constexpr,
    corrected: tl.constexpr,
    tile: tl.constexpr,
):
    """new = old + values (or + u); write the positions above the threshold, and count those above and equal to it.

    The positions are in no order.
    """
    at, inside = flat_positions(n, tile)
    x = sum_of(values, old, old_u, new_u, at, inside, momentum, corrected, True)
    tl.store(new + at, x, mask=inside)
    keys, bound = magnitudes(x), tl.load(threshold)
    over = ((keys > bound) & inside).to(tl.int32)
    num_over, same = tl.sum(over), tl.sum(((keys == bound) & inside).to(tl.int32))
    first = tl.atomic_add(counts, num_over)
    tl.atomic_add(counts + 1, same)
    slot = first + tl.cumsum(over) - 1
    tl.store(above + slot, at.to(tl.int32), mask=(over > 0) & (slot < capacity))


@kernel(anywhere=("indices", "message_values"))
def _take_kernel(  # type: ignore[no-untyped-def]
    positions, residual, momentum, indices, message_values, count, corrected: tl.constexpr, tile: tl.constexpr
):
    """Move the values of `residual` at `positions` into the message; the rounding error stays."""
    number, inside = flat_positions(count, tile)
    position = tl.load(positions + number, mask=inside)
    x = tl.load(residual + position, mask=inside)
    value = x.to(tl.float32)
    tl.store(indices + number, position.to(tl.int32), mask=inside)
    tl.store(message_values + number, value, mask=inside)
    tl.store(residual + position, x - value.to(x.dtype), mask=inside)
    if corrected:
        tl.store(momentum + position, tl.zeros_like(x), mask=inside)


@kernel(anywhere=("indices", "message_values"))
def _decode_pairs_kernel(indices, message_values, into, count, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    """into[index] += value; an index that occurs twice is added twice."""
    number, inside = flat_positions(count, tile)
    position = tl.load(indices + number, mask=inside)
    value = tl.load(message_values + number, mask=inside).to(into.dtype.element_ty)
    tl.atomic_add(into + position, value, mask=inside)


def sample_magnitudes(values: Tensor, old: Tensor, momentum: float, old_u: Tensor, keys: Tensor) -> None:
    """Fill `keys` with magnitudes, as integers, of sampled sums that `collect_above` will form."""
    n, count = values.numel(), keys.numel()
    constants: dict[str, Any] = {"momentum": momentum, "corrected": old_u.numel() > 0, "everything": n == count}
    over_values(_sample_kernel, count, values, values, old, old_u, keys, n, count, **constants)


def collect_above(
    values: Tensor,
    old: Tensor,
    new: Tensor,
    momentum: float,
    old_u: Tensor,
    new_u: Tensor,
    threshold: Tensor,
    above: Tensor,
    counts: Tensor,
) -> None:
    """As cpu_kernels.collect_above, except that positions equal to the threshold are only counted.

    `above`: int32 positions in no order, as many as fit. `counts`: (above, equal), int32, zeros before the call.
    """
    views = (values, old, new, old_u, new_u)
    constants: dict[str, Any] = {"momentum": momentum, "corrected": old_u.numel() > 0}
    n = values.numel()
    over_values(_collect_kernel, n, values, *views, threshold, above, counts, n, above.numel(), **constants)


def take_values(positions: Tensor, residual: Tensor, momentum: Tensor, indices: Tensor, message_values: Tensor) -> None:
    """As cpu_kernels.take_values: move the values at `positions` into the message; zero `momentum`, if given, there."""
    count = positions.numel()
    views = (positions, residual, momentum, indices, message_values)
    over_values(_take_kernel, count, residual, *views, count, tile=SCATTER_TILE, corrected=momentum.numel() > 0)


def decode_add_pairs(indices: Tensor, message_values: Tensor, into: Tensor) -> None:
    """into[index] += value, atomically. NVIDIA GPUs treat subnormal numbers as 0 here, as in torch's index_add_."""
    over_values(
        _decode_pairs_kernel, indices.numel(), into, indices, message_values, into, indices.numel(), tile=SCATTER_TILE
    )


@inline
def bound_of(keys, keep: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the `keep`-th largest key of each row, (rows,), found bit by bit; 0 if there are too few keys."""
    unit_bit = tl.full([keys.shape[0]], 1, keys.dtype)
    bound = unit_bit - unit_bit
    highest: tl.constexpr = 30 if keys.dtype == tl.int32 else 62
    for turn in range(highest + 1):
        candidate = bound | (unit_bit << (highest - turn))
        reached = tl.sum((keys >= candidate[:, None]).to(tl.int32), axis=1)
        bound = tl.where(reached >= keep, candidate, bound)
    return bound


@kernel(anywhere=("scales", "indices"))
def _choose_buckets_kernel(  # type: ignore[no-untyped-def]
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
    """new = values + old; write each bucket's scale and the positions of its `keep` largest values, in rising order.

    Of equal values the first are chosen.
    """
    row, at, inside = block_positions(n, block, rows, width)
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
    behind = tl.arange(0, slots)[None, :]  # slots that a short last bucket leaves empty
    rest = (behind >= (n - row * block)[:, None]) & (behind < keep) & (row < blocks)[:, None]
    tl.store(indices + row[:, None] * keep + behind, tl.zeros([rows, slots], tl.int16), mask=rest)


@kernel(anywhere=("scales", "indices", "codes"))
def _write_buckets_kernel(  # type: ignore[no-untyped-def]
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
    """Write sign and level of the chosen values, two in a byte; new -= what is sent."""
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    byte = tl.arange(0, pairs)
    slot = 2 * byte[None, :, None] + tl.arange(0, 2)[None, None, :]
    bucket = row[:, None, None]
    live = (slot < keep) & (slot < n - bucket * block) & (bucket < blocks)
    position = tl.load(indices + bucket * keep + slot, mask=live, other=0).to(tl.int64)
    at = bucket * block + position
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
def _decode_buckets_kernel(  # type: ignore[no-untyped-def]
    scales, indices, codes, into, count, block: tl.constexpr, keep: tl.constexpr, tile: tl.constexpr
):
    """into += the decoded values."""
    number, inside = flat_positions(count, tile)
    bucket, slot = number // keep, number % keep
    scale = tl.load(scales + bucket, mask=inside).to(into.dtype.element_ty)
    unit = quotient(scale, tl.full(scale.shape, 7, scale.dtype))
    half: tl.constexpr = (keep + 1) // 2
    byte = tl.load(codes + bucket * half + slot // 2, mask=inside).to(tl.int32)
    code = (byte >> (4 * (slot % 2)).to(tl.int32)) & 15
    level = (code & 7).to(scale.dtype) * unit
    position = tl.load(indices + number, mask=inside).to(tl.int64)
    tl.atomic_add(into + bucket * block + position, tl.where(code > 7, -level, level), mask=inside)


def encode_buckets(
    values: Tensor, old: Tensor, new: Tensor, scales: Tensor, indices: Tensor, packed: Tensor, block: int, keep: int
) -> None:
    """As cpu_kernels.encode_buckets, in two passes: one chooses values, and one encodes them."""
    n, blocks = values.numel(), scales.numel()
    pairs = 1 << ((keep + 1) // 2 - 1).bit_length()
    constants = {"keep": keep, "slots": 2 * pairs}
    over_blocks(
        _choose_buckets_kernel, blocks, block, values, values, old, new, scales, indices, n, blocks, **constants
    )
    rows = max(1, SCATTER_TILE // (2 * pairs))
    constants = {"block": block, "rows": rows, "keep": keep, "pairs": pairs}
    launch(_write_buckets_kernel, -(-blocks // rows), values, new, scales, indices, packed, n, blocks, **constants)


def decode_add_buckets(scales: Tensor, indices: Tensor, packed: Tensor, into: Tensor, block: int, keep: int) -> None:
    """into += the decoded values."""
    views, count = (scales, indices, packed, into), indices.numel()
    over_values(_decode_buckets_kernel, count, into, *views, count, tile=SCATTER_TILE, block=block, keep=keep)


def largest_sums(values: Tensor, old: Tensor, new: Tensor, momentum: Momentum, count: int) -> Tensor | None:
    """Form new = old + values, or old + u and u with it, and find the positions of the `count` largest.

    It waits for the device once per threshold that it tries, to learn how many positions were found.

    Returns:
        The positions in rising order; None if the sample was misleading.
    """
    n, whole = values.numel(), torch.int32 if values.dtype is torch.float32 else torch.int64
    keys = torch.empty(min(n, SAMPLE), dtype=whole, device=values.device)
    factor, old_u, new_u = momentum
    sample_magnitudes(values, old, factor, old_u, keys)
    keys = keys.sort().values
    above = torch.empty(above_capacity(n, count), dtype=torch.int32, device=values.device)
    for rank in threshold_ranks(count / n * keys.numel()):
        at = keys.numel() - rank
        threshold = keys[at : at + 1] if at >= 0 else torch.full_like(keys[:1], -1)
        counts = torch.zeros(2, dtype=torch.int32, device=values.device)
        collect_above(values, old, new, factor, old_u, new_u, threshold, above, counts)
        over, same = counts.tolist()
        if over > above.numel():
            return None
        if over + same >= count:
            return _chosen(above[:over].sort().values.long(), new, threshold, count)
    return None


def _chosen(above: Tensor, residual: Tensor, threshold: Tensor, count: int) -> Tensor:
    """Return the positions of the `count` largest, in rising order.

    Args:
        above: positions of the values above the threshold.
        residual: the sums.
        threshold: the threshold, as an integer.
        count: number of positions to return; values equal to the threshold fill it up.
    """
    if above.numel() >= count:
        return above[largest(residual[above], count)]
    equal = (residual.view(threshold.dtype) & torch.iinfo(threshold.dtype).max == threshold).nonzero()[:, 0]
    return torch.cat([above, equal[: count - above.numel()]]).sort().values

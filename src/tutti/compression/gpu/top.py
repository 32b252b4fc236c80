"""Triton kernels of sparse codes: the largest values and their places."""

from typing import Any

import triton.language as tl
from torch import Tensor

from tutti.compression.gpu.build import SCATTERED, over_values
from tutti.compression.gpu.jit import inline, kernel
from tutti.compression.gpu.parts import flat, magnitudes


@inline
def sum_of(  # type: ignore[no-untyped-def]
    values, old, old_u, new_u, at, inside, momentum: tl.constexpr, corrected: tl.constexpr, keep: tl.constexpr
):
    """old + values, or old + u with u = momentum old_u + values; `keep`: u goes to new_u."""
    x = tl.load(values + at, mask=inside, other=0.0)
    if corrected:
        x = tl.load(old_u + at, mask=inside, other=0.0) * momentum + x
        if keep:
            tl.store(new_u + at, x, mask=inside)
    return tl.load(old + at, mask=inside, other=0.0) + x


@kernel()
def sample_values(  # type: ignore[no-untyped-def]
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
    """The magnitudes that the pass will see at some places, or at all."""
    number, inside = flat(count, tile)
    at = number
    if not everything:
        at = ((number.to(tl.uint64) * 0x9E3779B97F4A7C15) >> 11).to(tl.int64) % n
    x = sum_of(values, old, old_u, old_u, at, inside, momentum, corrected, False)
    tl.store(keys + number, magnitudes(x), mask=inside)


@kernel(anywhere=("threshold",))
def collect_values(  # type: ignore[no-untyped-def]
    values,
    old,
    new,
    old_u,
    new_u,
    threshold,
    above,
    counts,
    n,
    room,
    momentum: tl.constexpr,
    corrected: tl.constexpr,
    tile: tl.constexpr,
):
    """new = old + values (or + u); the places above the threshold in no order, and how many are above it and equal."""
    at, inside = flat(n, tile)
    x = sum_of(values, old, old_u, new_u, at, inside, momentum, corrected, True)
    tl.store(new + at, x, mask=inside)
    keys, bound = magnitudes(x), tl.load(threshold)
    over = ((keys > bound) & inside).to(tl.int32)
    found, same = tl.sum(over), tl.sum(((keys == bound) & inside).to(tl.int32))
    first = tl.atomic_add(counts, found)
    tl.atomic_add(counts + 1, same)
    slot = first + tl.cumsum(over) - 1
    tl.store(above + slot, at.to(tl.int32), mask=(over > 0) & (slot < room))


@kernel(anywhere=("indices", "found"))
def take_values(  # type: ignore[no-untyped-def]
    where, kept, momentum, indices, found, count, corrected: tl.constexpr, tile: tl.constexpr
):
    """Write the values of `kept` at the places `where` out, and leave there what rounding took away."""
    number, inside = flat(count, tile)
    place = tl.load(where + number, mask=inside)
    x = tl.load(kept + place, mask=inside)
    value = x.to(tl.float32)
    tl.store(indices + number, place.to(tl.int32), mask=inside)
    tl.store(found + number, value, mask=inside)
    tl.store(kept + place, x - value.to(x.dtype), mask=inside)
    if corrected:
        tl.store(momentum + place, tl.zeros_like(x), mask=inside)


@kernel(anywhere=("indices", "found"))
def decode_values(indices, found, into, count, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    """into[index] += value; an index that comes twice adds twice."""
    number, inside = flat(count, tile)
    place = tl.load(indices + number, mask=inside)
    value = tl.load(found + number, mask=inside).to(into.dtype.element_ty)
    tl.atomic_add(into + place, value, mask=inside)


def sample(values: Tensor, old: Tensor, momentum: float, old_u: Tensor, keys: Tensor) -> None:
    """As many magnitudes as `keys` takes, as whole numbers, of what `collect` makes of the values."""
    n, count = values.numel(), keys.numel()
    how: dict[str, Any] = {"momentum": momentum, "corrected": old_u.numel() > 0, "everything": n == count}
    over_values(sample_values, count, values, values, old, old_u, keys, n, count, **how)


def collect(
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
    """As kernels.top.collect, but for places equal to the threshold, which are only counted.

    `above`: int32 places in no order, as many as have room. `counts`: (above, equal), int32, zeros before.
    """
    views = (values, old, new, old_u, new_u)
    how: dict[str, Any] = {"momentum": momentum, "corrected": old_u.numel() > 0}
    n = values.numel()
    over_values(collect_values, n, values, *views, threshold, above, counts, n, above.numel(), **how)


def take(places: Tensor, kept: Tensor, momentum: Tensor, indices: Tensor, found: Tensor) -> None:
    """As kernels.top.take: what is at `places` into the message; the momentum, where it has a size, becomes 0 there."""
    count = places.numel()
    views = (places, kept, momentum, indices, found)
    over_values(take_values, count, kept, *views, count, tile=SCATTERED, corrected=momentum.numel() > 0)


def decode_add(indices: Tensor, found: Tensor, into: Tensor) -> None:
    """into[index] += value: added atomically, which on NVIDIA's takes subnormal numbers for 0, as torch's does."""
    over_values(decode_values, indices.numel(), into, indices, found, into, indices.numel(), tile=SCATTERED)

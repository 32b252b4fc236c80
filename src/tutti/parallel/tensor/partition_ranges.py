"""Which rank holds which ranges of one dim of a whole tensor, and how views change them. Without torch."""

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

from tutti.config.partitioning import cut_units
from tutti.config.refusals import check_parts_not_empty, check_units

Range = tuple[int, int]

MOST_RANGES = 4096
"""If a view would cut a dim into more ranges than this, the tensor is gathered instead."""


@dataclass(frozen=True, slots=True)
class RankRanges:
    """The ranges of a dim that each rank holds.

    Together the ranks hold all `size` positions; several ranks may hold the same position.

    Attributes:
        size: positions of the dim in the whole tensor.
        parts: for each rank, its ranges (start, stop) in ascending order. In the local tensor they are concatenated.
    """

    size: int
    parts: tuple[tuple[Range, ...], ...]

    def local(self, rank: int) -> int:
        """The number of positions that `rank` holds."""
        return sum(stop - start for start, stop in self.parts[rank])

    def scaled(self, inner: int) -> "RankRanges":
        """The ranges if every position becomes `inner` neighbouring positions."""
        parts = tuple(tuple((a * inner, b * inner) for a, b in ranges) for ranges in self.parts)
        return RankRanges(self.size * inner, parts)

    def repeated(self, outer: int) -> "RankRanges":
        """The ranges if the dim is repeated `outer` times (3 for the concatenated q, k and v of a fused layer)."""
        parts = tuple(
            tuple((o * self.size + a, o * self.size + b) for o in range(outer) for a, b in ranges)
            for ranges in self.parts
        )
        return RankRanges(self.size * outer, tuple(_merged(ranges) for ranges in parts))

    def narrowed(self, start: int, stop: int) -> "RankRanges":
        """The ranges within positions start .. stop - 1, counted from start."""
        return RankRanges(stop - start, tuple(_clipped(ranges, start, stop) for ranges in self.parts))

    def before(self, rank: int, position: int) -> int:
        """The number of positions below `position` that the rank holds: the local index at which `position` begins."""
        return sum(min(b, position) - a for a, b in self.parts[rank] if a < position)

    def contains(self, other: "RankRanges") -> bool:
        """Whether every rank holds all positions that it holds in `other`."""
        return self.size == other.size and all(
            all(any(a <= low and high <= b for a, b in ranges) for low, high in wanted)
            for ranges, wanted in zip(self.parts, other.parts, strict=True)
        )

    def inside(self, rank: int, other: "RankRanges") -> tuple[Range, ...]:
        """The local positions, in these ranges, of what `rank` holds in `other`. These ranges must contain `other`."""
        return _merged(tuple((self.before(rank, a), self.before(rank, b)) for a, b in other.parts[rank]))

    def owned(self) -> "RankRanges":
        """The ranges if each position stays only on the first rank that holds it."""
        seen: list[bool] = [False] * self.size
        parts = []
        for ranges in self.parts:
            first_held = [p for a, b in ranges for p in range(a, b) if not seen[p]]
            for p in first_held:
                seen[p] = True
            parts.append(_merged(tuple((p, p + 1) for p in first_held)))
        return RankRanges(self.size, tuple(parts))

    @property
    def disjoint(self) -> bool:
        """Whether no position is held by several ranks."""
        return sum(self.local(rank) for rank in range(len(self.parts))) == self.size

    @property
    def simple(self) -> bool:
        """Whether every rank holds one range, all of equal length and in order of rank."""
        length = self.size // len(self.parts)
        return self.parts == tuple(((r * length, (r + 1) * length),) for r in range(len(self.parts)))


def even(size: int, degree: int) -> RankRanges:
    """Contiguous parts whose sizes differ by at most 1, larger ones first."""
    small, remainder = divmod(size, degree)
    bounds = [rank * small + min(rank, remainder) for rank in range(degree + 1)]
    return RankRanges(size, tuple(((a, b),) if a < b else () for a, b in itertools.pairwise(bounds)))


@dataclass(frozen=True, slots=True)
class Among:
    """The ranks over which layers are divided.

    Attributes:
        degree: number of ranks.
        weights: relative size of each rank's part; empty for equal parts.
    """

    degree: int
    weights: tuple[float, ...] = ()

    def parted(self, size: int) -> RankRanges:
        """Contiguous parts of `size` positions: of equal size, or in proportion to the weights."""
        if not self.weights:
            return even(size, self.degree)
        bounds = cut_units(size, self.degree, self.weights)
        return RankRanges(size, tuple(((a, b),) if a < b else () for a, b in itertools.pairwise(bounds)))

    def fills(self, size: int) -> bool:
        """Whether every rank gets a part of `size` positions, and parts are equal where there are no weights."""
        if not self.weights:
            return size % self.degree == 0
        return all(self.parted(size).parts)

    def units(self, name: str, size: int, what: str) -> RankRanges:
        """Divide the units of a module.

        Args:
            name: the module, for the error.
            size: number of units.
            what: what the units are, in plural, for the error ("outputs", "attention heads").

        Raises:
            PlanError: if a rank would be without units.
        """
        if not self.weights:
            check_units(name, size, self.degree, what)
        spread = self.parted(size)
        if self.weights:
            check_parts_not_empty(name, [spread.local(rank) for rank in range(self.degree)], self.weights, what)
        return spread


def shared_heads(queries: RankRanges, key_heads: int) -> RankRanges:
    """The key and value heads that each rank needs for its query heads; several ranks may need the same head."""
    group = queries.size // key_heads
    parts = []
    for ranges in queries.parts:
        parts.append(tuple((a // group, (b - 1) // group + 1) for a, b in ranges))
    return RankRanges(key_heads, tuple(parts))


@lru_cache(maxsize=4096)
def viewed(
    shape: tuple[int, ...], dim: int, spread: RankRanges, target: tuple[int, ...]
) -> tuple[int, RankRanges] | None:
    """Follow a divided dim through a view.

    Args:
        shape: shape of the whole tensor.
        dim: the dim that is divided.
        spread: the ranges of `dim` that each rank holds.
        target: shape of the whole tensor after the view.

    Returns:
        The divided dim of `target` and its ranges, or None if local views cannot give it, because the cut would run
        through several dims.
    """
    group = _group(shape, dim, target)
    if group is None:
        return None
    (i0, i1), (j0, j1) = group
    inner, outer = math.prod(shape[dim + 1 : i1]), math.prod(shape[i0:dim])
    if outer * max(len(ranges) for ranges in spread.parts) > MOST_RANGES:
        return None
    flat = spread.scaled(inner).repeated(outer)
    for new_dim in range(j0, j1):
        unit, outer = math.prod(target[new_dim + 1 : j1]), math.prod(target[j0:new_dim])
        parts = [_folded(ranges, unit, target[new_dim], outer) for ranges in flat.parts]
        divisible = tuple(part for part in parts if part is not None)
        if len(divisible) == len(parts):
            return new_dim, RankRanges(target[new_dim], divisible)
    return None


def _group(shape: tuple[int, ...], dim: int, target: tuple[int, ...]) -> tuple[Range, Range] | None:
    """The runs of dims in `shape` (around `dim`) and in `target` that the view maps onto each other, or None."""
    if 0 in shape or math.prod(shape) != math.prod(target):
        return None
    i = j = 0
    while i < len(shape) and j < len(target):
        i0, j0, left, right = i, j, shape[i], target[j]
        i, j = i + 1, j + 1
        while left != right:
            if left < right:
                left, i = left * shape[i], i + 1
            else:
                right, j = right * target[j], j + 1
        if i0 <= dim < i:
            return (i0, i), (j0, j)
    return None


def _folded(ranges: tuple[Range, ...], unit: int, size: int, outer: int) -> tuple[Range, ...] | None:
    """Ranges of a flattened (outer, size, unit) as ranges of `size`; None if they cannot be written so."""
    length = size * unit
    folds = {_clipped(ranges, o * length, (o + 1) * length) for o in range(outer)}
    if len(folds) != 1:
        return None
    fold = folds.pop()
    if any(a % unit or b % unit for a, b in fold):
        return None
    return tuple((a // unit, b // unit) for a, b in fold)


def _clipped(ranges: tuple[Range, ...], start: int, stop: int) -> tuple[Range, ...]:
    """The parts of the ranges within start .. stop - 1, counted from start."""
    return tuple((max(a, start) - start, min(b, stop) - start) for a, b in ranges if a < stop and start < b)


def _merged(ranges: tuple[Range, ...]) -> tuple[Range, ...]:
    """Join ranges that touch, and drop empty ones."""
    merged: list[Range] = []
    for a, b in ranges:
        if a == b:
            continue
        if merged and merged[-1][1] == a:
            merged[-1] = (merged[-1][0], b)
        else:
            merged.append((a, b))
    return tuple(merged)

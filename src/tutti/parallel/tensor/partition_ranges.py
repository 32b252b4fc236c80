"""Spread: which rank holds which ranges of one dim of a whole tensor, and what views make of that. No torch."""

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

from tutti.config.partitioning import cut_units
from tutti.config.refusals import check_parts_not_empty

Range = tuple[int, int]

MOST_RANGES = 4096
"""A view that would cut a dim into more ranges than this is not followed; the tensor is gathered instead."""


@dataclass(frozen=True, slots=True)
class RankRanges:
    """`parts[rank]`: ranges (start, stop) in ascending order; locally they lie one behind another.

    Together they cover all `size` positions; ranks may hold the same ones.
    """

    size: int
    parts: tuple[tuple[Range, ...], ...]

    def local(self, rank: int) -> int:
        """Positions that `rank` holds."""
        return sum(stop - start for start, stop in self.parts[rank])

    def scaled(self, inner: int) -> "RankRanges":
        """The same where every position stands for `inner` neighbouring ones."""
        parts = tuple(tuple((a * inner, b * inner) for a, b in ranges) for ranges in self.parts)
        return RankRanges(self.size * inner, parts)

    def repeated(self, outer: int) -> "RankRanges":
        """`outer` such dims one behind another (the q, k and v of a fused layer)."""
        parts = tuple(
            tuple((o * self.size + a, o * self.size + b) for o in range(outer) for a, b in ranges)
            for ranges in self.parts
        )
        return RankRanges(self.size * outer, tuple(_merged(ranges) for ranges in parts))

    def narrowed(self, start: int, stop: int) -> "RankRanges":
        """The spread of positions start .. stop - 1, counted from start."""
        return RankRanges(stop - start, tuple(_clipped(ranges, start, stop) for ranges in self.parts))

    def before(self, rank: int, position: int) -> int:
        """How many positions below `position` the rank holds: where `position` begins locally."""
        return sum(min(b, position) - a for a, b in self.parts[rank] if a < position)

    def contains(self, other: "RankRanges") -> bool:
        """Whether every rank holds all that it holds of `other`."""
        return self.size == other.size and all(
            all(any(a <= low and high <= b for a, b in mine) for low, high in theirs)
            for mine, theirs in zip(self.parts, other.parts, strict=True)
        )

    def inside(self, rank: int, other: "RankRanges") -> tuple[Range, ...]:
        """Local positions, in this spread, of what `rank` holds of `other`, which this one contains."""
        return _merged(tuple((self.before(rank, a), self.before(rank, b)) for a, b in other.parts[rank]))

    def owned(self) -> "RankRanges":
        """Every position on the first rank that holds it, and there only."""
        seen: list[bool] = [False] * self.size
        parts = []
        for ranges in self.parts:
            mine = [p for a, b in ranges for p in range(a, b) if not seen[p]]
            for p in mine:
                seen[p] = True
            parts.append(_merged(tuple((p, p + 1) for p in mine)))
        return RankRanges(self.size, tuple(parts))

    @property
    def disjoint(self) -> bool:
        """Whether no position is held twice."""
        return sum(self.local(rank) for rank in range(len(self.parts))) == self.size

    @property
    def simple(self) -> bool:
        """Whether every rank holds one range, as long as all others', in order of rank."""
        length = self.size // len(self.parts)
        return self.parts == tuple(((r * length, (r + 1) * length),) for r in range(len(self.parts)))


def even(size: int, degree: int) -> RankRanges:
    """Contiguous parts whose sizes differ by at most 1, larger ones first."""
    small, more = divmod(size, degree)
    bounds = [rank * small + min(rank, more) for rank in range(degree + 1)]
    return RankRanges(size, tuple(((a, b),) if a < b else () for a, b in itertools.pairwise(bounds)))


@dataclass(frozen=True, slots=True)
class Among:
    """The ranks that layers are divided among. `weights`: what part each gets, relatively; empty: equal parts."""

    degree: int
    weights: tuple[float, ...] = ()

    def parted(self, size: int) -> RankRanges:
        """Contiguous parts of `size` positions: even ones, or in proportion to the weights."""
        if not self.weights:
            return even(size, self.degree)
        bounds = cut_units(size, self.degree, self.weights)
        return RankRanges(size, tuple(((a, b),) if a < b else () for a, b in itertools.pairwise(bounds)))

    def fills(self, size: int) -> bool:
        """Whether every rank has some of `size` positions, and as many as all others where parts are to be equal."""
        if not self.weights:
            return size % self.degree == 0
        return all(self.parted(size).parts)

    def units(self, name: str, size: int, what: str) -> RankRanges:
        """Parts of the `size` units, called `what`, of the module `name`. Raises PlanError where weights leave a rank
        none of them."""
        spread = self.parted(size)
        if self.weights:
            check_parts_not_empty(name, [spread.local(rank) for rank in range(self.degree)], self.weights, what)
        return spread


def shared_heads(queries: RankRanges, key_heads: int) -> RankRanges:
    """Key and value heads that each rank needs for its part of the query heads; some are needed by several."""
    group = queries.size // key_heads
    parts = []
    for ranges in queries.parts:
        parts.append(tuple((a // group, (b - 1) // group + 1) for a, b in ranges))
    return RankRanges(key_heads, tuple(parts))


@lru_cache(maxsize=4096)
def viewed(
    shape: tuple[int, ...], dim: int, spread: RankRanges, target: tuple[int, ...]
) -> tuple[int, RankRanges] | None:
    """(dim, spread) of a whole tensor of `shape`, cut along `dim`, after it is viewed as `target`.

    None where local views cannot give it: the cut would go through several dims.
    """
    group = _group(shape, dim, target)
    if group is None:
        return None
    (i0, i1), (j0, j1) = group
    inner, outer = math.prod(shape[dim + 1 : i1]), math.prod(shape[i0:dim])
    if outer * max(len(ranges) for ranges in spread.parts) > MOST_RANGES:
        return None
    flat = spread.scaled(inner).repeated(outer)
    for at in range(j0, j1):
        unit, outer = math.prod(target[at + 1 : j1]), math.prod(target[j0:at])
        parts = [_folded(ranges, unit, target[at], outer) for ranges in flat.parts]
        found = tuple(part for part in parts if part is not None)
        if len(found) == len(parts):
            return at, RankRanges(target[at], found)
    return None


def _group(shape: tuple[int, ...], dim: int, target: tuple[int, ...]) -> tuple[Range, Range] | None:
    """The runs of dims, in `shape` around `dim` and in `target`, that a view turns into each other."""
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
    """Ranges over (outer, size, unit), flattened, as ranges over the middle one; None if they are none."""
    length = size * unit
    folds = {_clipped(ranges, o * length, (o + 1) * length) for o in range(outer)}
    if len(folds) != 1:
        return None
    fold = folds.pop()
    if any(a % unit or b % unit for a, b in fold):
        return None
    return tuple((a // unit, b // unit) for a, b in fold)


def _clipped(ranges: tuple[Range, ...], start: int, stop: int) -> tuple[Range, ...]:
    """The ranges' part in start .. stop - 1, counted from start."""
    return tuple((max(a, start) - start, min(b, stop) - start) for a, b in ranges if a < stop and start < b)


def _merged(ranges: tuple[Range, ...]) -> tuple[Range, ...]:
    """Ranges that touch become one; empty ones go."""
    merged: list[Range] = []
    for a, b in ranges:
        if a == b:
            continue
        if merged and merged[-1][1] == a:
            merged[-1] = (merged[-1][0], b)
        else:
            merged.append((a, b))
    return tuple(merged)

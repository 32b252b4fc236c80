"""Ranges: which piece of a stored part goes where in a wanted part, whatever the cuts of either."""

import itertools
from collections.abc import Iterator

from tutti.parallel.layout import Cut, Range

Index = tuple[slice, ...]


def overlaps(shape: tuple[int, ...], stored: tuple[Cut, ...], wanted: tuple[Cut, ...]) -> Iterator[tuple[Index, Index]]:
    """What two parts of one tensor of `shape` have in common: (index in the stored part, index in the wanted part).

    Every common element is in exactly one pair; pairs are as large as the ranges allow.
    """
    along = [_common(_ranges(stored, dim, size), _ranges(wanted, dim, size)) for dim, size in enumerate(shape)]
    for pieces in itertools.product(*along):
        yield (
            tuple(slice(start, start + size) for start, _, size in pieces),
            tuple(slice(start, start + size) for _, start, size in pieces),
        )


def _ranges(cuts: tuple[Cut, ...], dim: int, size: int) -> tuple[Range, ...]:
    return next((cut.ranges for cut in cuts if cut.dim == dim), ((0, size),))


def _common(stored: tuple[Range, ...], wanted: tuple[Range, ...]) -> list[tuple[int, int, int]]:
    """(position in the stored part, position in the wanted part, length) of what both hold along one dim."""
    pieces: list[tuple[int, int, int]] = []
    there = 0
    for low, high in stored:
        here = 0
        for begin, end in wanted:
            first, last = max(low, begin), min(high, end)
            if first < last:
                _append(pieces, (there + first - low, here + first - begin, last - first))
            here += end - begin
        there += high - low
    return pieces


def _append(pieces: list[tuple[int, int, int]], piece: tuple[int, int, int]) -> None:
    """Add a piece, as part of the last one where it goes on from there in both parts."""
    if pieces:
        there, here, size = pieces[-1]
        if (there + size, here + size) == piece[:2]:
            pieces[-1] = (there, here, size + piece[2])
            return
    pieces.append(piece)

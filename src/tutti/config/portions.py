"""How items are cut into contiguous runs: the one rule for batches, parts of layers, rows of tables and cores, run and
predicted."""

from collections.abc import Sequence
from itertools import pairwise

GRAIN, MANY = 16, 256
"""Units of a layer go in multiples of GRAIN where there are MANY: rows of memory then begin where vectors and cache
lines do. Of 2,048 rows by 256 weights, 717 outputs were computed at 47 GFLOP/s and 720 at 91, with their backward at 75
and 90 (by hand, one core, MKL)."""


def cut(total: int, parts: int, weights: Sequence[float] = ()) -> list[int]:
    """Cut `total` items into `parts` contiguous runs in proportion to `weights` (none: equally).

    Returns parts + 1 boundaries from 0 to total. Equal cuts differ by at most one item.
    """
    if not weights:
        return [index * total // parts for index in range(parts + 1)]
    whole, running, bounds = sum(weights), 0.0, [0]
    for weight in weights:
        running += weight
        bounds.append(min(total, int(total * running / whole + 0.5)))
    bounds[-1] = total
    return bounds


def cut_units(total: int, parts: int, weights: Sequence[float]) -> list[int]:
    """Like `cut`, of the heads, units or rows of a layer: in multiples of GRAIN where there are MANY (heads are fewer,
    and each is such a multiple by itself), unless that would leave a part none.
    """
    if total >= MANY and total % GRAIN == 0:
        bounds = [GRAIN * bound for bound in cut(total // GRAIN, parts, weights)]
        if all(start < end for start, end in pairwise(bounds)):
            return bounds
    return cut(total, parts, weights)

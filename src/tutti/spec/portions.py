"""How items are cut into contiguous runs: the one rule for batches, parts of layers, rows of tables and cores, run and
predicted."""

from collections.abc import Sequence


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

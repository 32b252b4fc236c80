"""Which rank holds which table, or which rows of it. Pure arithmetic, the same on every rank."""

from collections.abc import Sequence
from dataclasses import dataclass

from tutti.config.partitioning import cut

BALANCED = 1.2
"""A rank may hold this many times its fair share of bytes before a large table is cut along its rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table to be placed. `by_rows`: cut along rows whatever balance needs."""

    name: str
    rows: int
    nbytes: int
    by_rows: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a table's rows are: rank i has bounds[i] .. bounds[i + 1] - 1. `owner`: the rank that has all of them."""

    bounds: tuple[int, ...]
    owner: int | None = None


def place_tables(tables: Sequence[Table], ranks: int) -> dict[str, Place]:
    """Places for all tables: as few as balance needs are cut along their rows, the largest first; the others go whole
    to the rank that has least, the largest first. A rank's load is its part of all bytes plus its part of all lookups,
    a table's lookups counting alike.
    """
    divisible = sorted((t for t in tables if not t.by_rows and t.rows >= ranks), key=lambda t: -t.nbytes)
    forced = {t.name for t in tables if t.by_rows}
    best: tuple[float, dict[str, Place]] | None = None
    for count in range(len(divisible) + 1):
        chosen = forced | {t.name for t in divisible[:count]}
        places, excess = _place(tables, chosen, ranks)
        if best is None or excess < best[0]:
            best = (excess, places)
        if excess <= BALANCED:
            break
    return best[1] if best else {}


def _place(tables: Sequence[Table], by_rows: set[str], ranks: int) -> tuple[dict[str, Place], float]:
    """Places with these tables cut by rows, and the most bytes a rank holds over the fair share."""
    total = max(sum(table.nbytes for table in tables), 1)
    loads, held, places = [0.0] * ranks, [0.0] * ranks, {}
    for table in sorted(tables, key=lambda t: (-t.nbytes, t.name)):
        if table.name in by_rows:
            places[table.name] = Place(bounds=tuple(cut(table.rows, ranks)))
            held = [nbytes + table.nbytes / ranks for nbytes in held]
            continue
        owner = min(range(ranks), key=loads.__getitem__)
        bounds = (0,) * (owner + 1) + (table.rows,) * (ranks - owner)
        places[table.name] = Place(bounds=bounds, owner=owner)
        loads[owner] += table.nbytes / total + 1 / len(tables)
        held[owner] += table.nbytes
    return places, max(held) * ranks / total

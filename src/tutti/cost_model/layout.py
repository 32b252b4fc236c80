"""Which modules a plan's layout rules touch. Names are dotted; a module contains all names that extend its own."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tutti.config.model import ModelSpec
from tutti.config.plan import LayoutRule, Plan, find_chunks, find_recompute
from tutti.cost_model.table import remembered


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A module whose activations are dropped after forward, and with it all modules inside: indices into modules.

    `selective`: what is dear to compute keeps its outputs; `chunks`: parts of the batch that are run, and computed
    again, one after another.
    """

    root: int
    members: tuple[int, ...]
    selective: bool = False
    chunks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Regions as columns. `member`: modules in regions, and `of` which each is; `root`, `selective`, `chunks`: by
    region."""

    member: NDArray[np.intp]
    of: NDArray[np.intp]
    root: NDArray[np.intp]
    selective: NDArray[np.bool_]
    chunks: NDArray[np.intp]


@lru_cache(maxsize=64)
def marks(regions: tuple[Region, ...]) -> Marks:
    """The columns of `regions`."""
    return Marks(
        member=np.array([index for region in regions for index in region.members], dtype=np.intp),
        of=np.array([at for at, region in enumerate(regions) for _ in region.members], dtype=np.intp),
        root=np.array([region.root for region in regions], dtype=np.intp),
        selective=np.array([region.selective for region in regions], dtype=np.bool_),
        chunks=np.array([region.chunks for region in regions], dtype=np.intp),
    )


def recompute_regions(model: ModelSpec, plan: Plan) -> tuple[Region, ...]:
    """The outermost modules that recompute or run in chunks, each with everything inside it.

    The model itself is no region: a rule for "*" means every module directly inside it.
    """
    if not any(rule.recompute or (rule.chunks or 1) > 1 for rule in plan.layout):
        return ()
    return _regions(model, plan.layout)


@remembered(64)
def _regions(model: ModelSpec, layout: tuple[LayoutRule, ...]) -> tuple[Region, ...]:
    names = [module.name for module in model.modules]
    how = {name: (find_recompute(layout, name), find_chunks(layout, name)) for name in names if name}
    asked = {name for name, (again, chunks) in how.items() if again or chunks > 1}
    roots = [name for name in names if name in asked and not any(parent in asked for parent in _parents(name))]
    members: dict[str, list[int]] = {root: [] for root in roots}
    for index, name in enumerate(names):
        for candidate in (name, *_parents(name)):
            if candidate in members:
                members[candidate].append(index)
                break
    return tuple(
        Region(
            root=names.index(root),
            members=tuple(members[root]),
            selective=how[root] == ("selective", 1),
            chunks=how[root][1],
        )
        for root in roots
    )


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1)]

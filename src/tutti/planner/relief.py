"""Recompute of some blocks only: what memory needs, in the fewest seconds.

Each place on the stage axis has its own budget of bytes for activations, and each of its blocks a form: kept, or
recomputed selectively or in full. Which form each gets is a knapsack with several choices, solved by dynamic
programming over the budget in small units; how large the budget may be is found by predicting.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tutti.config.plan import LayoutRule, Plan
from tutti.cost_model.memory import kept
from tutti.planner.build import block_roots
from tutti.planner.enumerate import RECOMPUTE
from tutti.planner.mixed import state_of
from tutti.planner.room import Room, times_held
from tutti.planner.tables import Array

_UNITS = 400
"""Parts of a budget in which bytes are counted; what a block keeps is rounded up."""

_TRIES = 7
"""Halvings of the interval in which the budget lies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What blocks keep and cost by form, (forms, blocks): `nbytes` at their place's peak, `within` while one is
    computed again, `seconds` of that. `place`: of each block; by place: `fixed` bytes whatever the forms are.
    """

    names: tuple[str, ...]
    nbytes: Array
    within: Array
    seconds: Array
    place: NDArray[np.intp]
    fixed: Array

    def needed(self, form: int) -> Array:
        """Bytes of each place where all of its blocks have the form."""
        sums = self.fixed.copy()
        np.add.at(sums, self.place, self.nbytes[form])
        most = np.zeros(len(sums))
        np.maximum.at(most, self.place, self.within[form])
        return np.asarray(sums + most, dtype=np.float64)


def relieve(room: Room, plan: Plan, samples: int, fits: Callable[[Plan], bool]) -> None:
    """Offer plans to `fits` that recompute less than `plan` does, the largest budget found last.

    Nothing is offered where the model has no blocks, or a block lies on several places.
    """
    load = load_of(room, plan, samples)
    if load is None:
        return
    low, high = float(load.needed(len(RECOMPUTE) - 1).min()), float(load.needed(0).max())
    seen: set[tuple[int, ...]] = set()
    for _ in range(_TRIES):
        budget = (low + high) / 2
        forms = chosen(load, np.full(len(load.fixed), budget))
        if forms is None:
            low = budget
            continue
        key = tuple(forms.tolist())
        if key not in seen and not fits(with_forms(plan, load.names, key)):
            high = budget
        else:
            low = budget
        seen.add(key)


def load_of(room: Room, plan: Plan, samples: int) -> Load | None:
    """The blocks of the model under the mesh and schedule of `plan`."""
    model, work = room.tables.model, room.work
    roots, stage, chunks = block_roots(model), plan.degree("stage"), plan.pipeline.stages_per_rank
    chunks = chunks if stage > 1 else 1
    found = work.stages(stage, chunks)
    degrees = tuple(plan.degree(axis) for axis in ("split", "context", "expert", "table", "space"))
    count = plan.batch.num_microbatches
    each = max(1, -(-(samples // count) // plan.data_parallel_degree))
    passes = work.passes((*degrees, each, room.tables.ground(plan.world_size).best))
    block = np.array([list(roots).index(one.block) if one.block >= 0 else -1 for one in model.modules], dtype=np.intp)
    if not roots or found is None or passes is None or plan.pipeline.cuts or all(not name for name in roots.values()):
        return None
    inside, place = np.flatnonzero(block >= 0), found.stage % stage
    first = np.array([place[np.flatnonzero(block == one)[0]] for one in range(len(roots))], dtype=np.intp)
    if (first[block[inside]] != place[inside]).any():
        return None
    part = work.part(degrees)
    often = times_held(plan.pipeline.schedule, chunks, stage, count).reshape(-1)[found.stage] * each
    keeps = [kept(work.columns, part, regions, half=room.tables.half) for regions in work.regions]
    beside = np.where(block < 0, often * keeps[0].always, 0.0) + state_of(work.columns, part, plan)
    fixed = np.bincount(place, weights=beside, minlength=stage)
    most = np.zeros(stage)
    np.maximum.at(most, place, each * keeps[0].output)

    def by_block(values: Array) -> Array:
        return np.bincount(block[inside], weights=values[inside], minlength=len(roots)).astype(np.float64)

    return Load(
        names=tuple(roots.values()),
        nbytes=np.stack([by_block(often * one.always) for one in keeps]),
        within=np.stack([by_block(each * one.within) for one in keeps]),
        seconds=np.stack([by_block(count * again) for again in passes.again]),
        place=first,
        fixed=np.asarray(fixed + most, dtype=np.float64),
    )


def chosen(load: Load, budget: Array) -> NDArray[np.intp] | None:
    """The form of each block such that every place keeps at most its `budget` of bytes and least is computed again;
    None where nothing does."""
    forms = np.zeros(len(load.names), dtype=np.intp)
    for place, most in enumerate(budget.tolist()):
        mine = np.flatnonzero(load.place == place)
        free = most - float(load.fixed[place])
        if float(load.nbytes[0, mine].sum() + load.within[0, mine].max(initial=0.0)) <= free:
            continue
        picked = _knapsack(load.nbytes[:, mine], load.seconds[:, mine], free - float(load.within[:, mine].max()))
        if picked is None:
            return None
        forms[mine] = picked
    return forms


def _knapsack(nbytes: Array, seconds: Array, capacity: float) -> NDArray[np.intp] | None:
    """One form for each block, (forms, blocks), with the least seconds within the capacity; None where there is none.

    best[j] after block b is the least of best[j - size] + seconds over b's forms, for j units of the capacity.
    """
    if capacity <= 0:
        return None
    sizes = np.ceil(nbytes / (capacity / _UNITS) - 1e-9).astype(np.int64)
    best, picks = np.zeros(_UNITS + 1), []
    for block in range(nbytes.shape[1]):
        options = np.full((len(nbytes), _UNITS + 1), np.inf)
        for form, size in enumerate(sizes[:, block].tolist()):
            if size <= _UNITS:
                options[form, size:] = best[: _UNITS + 1 - size] + seconds[form, block]
        picks.append(options.argmin(axis=0))
        best = options.min(axis=0)
    if not np.isfinite(best[-1]):
        return None
    found, left = np.zeros(nbytes.shape[1], dtype=np.intp), _UNITS
    for block in range(nbytes.shape[1] - 1, -1, -1):
        found[block] = picks[block][left]
        left -= int(sizes[found[block], block])
    return found


def with_forms(plan: Plan, names: tuple[str, ...], forms: tuple[int, ...]) -> Plan:
    """The plan with one rule for every block that recomputes, in place of those that named all blocks."""
    own = tuple(rule for rule in plan.layout if rule.recompute is None)
    rules = tuple(
        LayoutRule(modules=name, recompute=True if RECOMPUTE[form] == "full" else "selective")
        for name, form in zip(names, forms, strict=True)
        if RECOMPUTE[form] != "none"
    )
    return dataclasses.replace(plan, layout=(*own, *rules))

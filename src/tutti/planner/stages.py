"""Where a pipeline is cut when its stages are not alike: dynamic programming over the model's blocks.

The slowest stage's time is made as small as it can be: a stage takes contiguous blocks, its ranks have their own speed
and memory. O(blocks^2 stages), as vector operations.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tutti.config.model import ModelSpec
from tutti.planner.build import block_roots
from tutti.planner.tables import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """What can be cut apart, in order: the first entry has all that comes before the first block, the last all after
    the last one. `names`: of the module with which each begins; `seconds`, `state` and `kept` bytes of each.
    """

    names: tuple[str, ...]
    seconds: Array
    state: Array
    kept: Array


def blocks_of(model: ModelSpec, seconds: Array, state: Array, kept: Array) -> Blocks:
    """The model's blocks with the sums of what their modules have; columns are by module."""
    roots = block_roots(model)
    order = list(dict.fromkeys(module.block for module in model.modules if module.block >= 0))
    place, current = [], 0
    for module in model.modules:
        if module.block >= 0:
            current = order.index(module.block)
        place.append(current)
    where = np.array(place, dtype=np.intp)

    def summed(values: Array) -> Array:
        return np.bincount(where, weights=values, minlength=max(1, len(order))).astype(np.float64)

    return Blocks(
        names=tuple(roots[block] for block in order),
        seconds=summed(seconds),
        state=summed(state),
        kept=summed(kept),
    )


def cut(blocks: Blocks, speeds: Array, room: Array, live: Array) -> tuple[int, ...] | None:
    """The first block of stages 1, 2, ... such that the slowest stage is as fast as it can be; None if none fits.

    `speeds`: of each stage's ranks; `room`: bytes each has for state and activations; `live`: how many microbatches'
    activations each holds. Every stage has a block. Min-max over contiguous cuts:
    best[s][j] = min over i of max(best[s - 1][i], time(i..j) / speed_s).
    """
    count, stages = len(blocks.seconds), len(speeds)
    if stages > count:
        return None
    time, state, kept = (np.concatenate([[0.0], np.cumsum(one)]) for one in (blocks.seconds, blocks.state, blocks.kept))
    best = np.full(count + 1, np.inf)
    best[0] = 0.0
    begins: list[NDArray[np.intp]] = []
    for stage in range(stages):
        own = (time[None, :] - time[:, None]) / speeds[stage]
        held = (state[None, :] - state[:, None]) + live[stage] * (kept[None, :] - kept[:, None])
        valid = (np.arange(count + 1)[None, :] > np.arange(count + 1)[:, None]) & (held <= room[stage])
        reached = np.where(valid, np.maximum(best[:, None], own), np.inf)
        begins.append(np.argmin(reached, axis=0))
        best = np.min(reached, axis=0)
    if not np.isfinite(best[count]):
        return None
    starts, end = [], count
    for stage in range(stages - 1, 0, -1):
        end = int(begins[stage][end])
        starts.append(end)
    return tuple(reversed(starts))


def slowest(blocks: Blocks, speeds: Array, starts: tuple[int, ...]) -> float:
    """Time of the slowest stage for cuts at `starts`."""
    edges = [0, *starts, len(blocks.seconds)]
    return max(
        float(blocks.seconds[first:last].sum() / speed)
        for first, last, speed in zip(edges[:-1], edges[1:], speeds, strict=True)
    )

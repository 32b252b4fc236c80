"""Hold the plans that the search has not predicted yet, and compare predictions with estimates, family by family."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tutti.cost_model.plan_bounds import Bounds
from tutti.cost_model.plan_table import OFFLOADS, SCHEDULES, Array, Ints, MeshTable, Variants

_TOO_LARGE = 8.0
"""Factor on the estimated time of plans that probably do not fit."""


_FAILURES = 4
"""After this many refusals and no success, a family is not tried again."""


@dataclass(slots=True, kw_only=True)
class FamilyRecord:
    """How predictions of a family of plans differed from their estimates.

    Attributes:
        time: sum of log(predicted / estimated) step times.
        memory: sum of log(predicted / estimated) memory.
        count: number of predictions.
        refused: number of plans that could not be predicted.
    """

    time: float = 0.0
    memory: float = 0.0
    count: int = 0
    refused: int = 0

    @property
    def always_refused(self) -> bool:
        """Whether the family is not tried again: only refusals, and several of them."""
        return self.count == 0 and self.refused >= _FAILURES


def family(shapes: MeshTable, variant_rows: Variants) -> Ints:
    """Return a number that encodes what each plan combines: the axes it uses, its sharding, schedule and recompute."""
    axes = (shapes.split, shapes.stage, shapes.context, shapes.expert, shapes.table, shapes.space)
    code = np.zeros(len(variant_rows), dtype=np.int64)
    for axis in axes:
        code = code * 2 + (axis > 1)
    code = code * 2 + (shapes.copies // variant_rows.shard > 1)
    code = code * 4 + variant_rows.level
    code = code * 4 + variant_rows.schedule
    code = code * 3 + variant_rows.recompute
    code = code * len(OFFLOADS) + variant_rows.offload
    return np.asarray(code * 2 + variant_rows.context_kind, dtype=np.int64)


@dataclass(slots=True, kw_only=True)
class Pool:
    """Plans of one SearchBranch (one order of nodes, one precision) that wait to be predicted, as columns.

    Attributes:
        variant_rows: the plans, in the chunks in which they were added.
        least: bound of the objective.
        likely: estimate of the objective.
        memory: least bytes on the fullest rank.
        capacity: bytes of memory of such a rank.
        world: number of ranks.
        family: see `family`.
        chunk: index into `variant_rows`.
        row: row of that chunk.
        done: whether the plan was predicted.
    """

    variant_rows: list[Variants] = field(default_factory=list)
    least: Array = field(default_factory=lambda: np.empty(0))
    likely: Array = field(default_factory=lambda: np.empty(0))
    memory: Array = field(default_factory=lambda: np.empty(0))
    capacity: Array = field(default_factory=lambda: np.empty(0))
    world: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    family: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    chunk: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    row: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    done: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, dtype=np.bool_))

    def __len__(self) -> int:
        return len(self.least)

    def add(
        self, shapes: MeshTable, variant_rows: Variants, keep: NDArray[np.bool_], least: Array, likely: Array,
        bounds: Bounds,
        capacity: Array,
    ) -> None:  # fmt: skip
        """Add the rows of `variant_rows` that `keep` marks."""
        rows = np.flatnonzero(keep)
        taken = variant_rows.take(rows)
        at = shapes.take(taken.shape)
        self.variant_rows.append(taken)
        self.least = np.concatenate([self.least, least[rows]])
        self.likely = np.concatenate([self.likely, likely[rows]])
        self.memory = np.concatenate([self.memory, bounds.fullest_nbytes[rows]])
        self.capacity = np.concatenate([self.capacity, capacity[rows]])
        self.world = np.concatenate([self.world, at.world])
        self.family = np.concatenate([self.family, family(at, taken)])
        self.chunk = np.concatenate([self.chunk, np.full(len(rows), len(self.variant_rows) - 1, dtype=np.int64)])
        self.row = np.concatenate([self.row, np.arange(len(rows), dtype=np.int64)])
        self.done = np.concatenate([self.done, np.zeros(len(rows), dtype=np.bool_)])

    def drop(self, rows: NDArray[np.bool_]) -> None:
        """Drop the marked rows."""
        kept = ~rows
        for name in ("least", "likely", "memory", "capacity", "world", "family", "chunk", "row", "done"):
            setattr(self, name, getattr(self, name)[kept])

    def corrected(self, records: dict[int, FamilyRecord]) -> Array:
        """Return estimates corrected by the predictions of each family; infinite for families that are refused."""
        known = [record for record in records.values() if record.count]
        count = max(1, sum(record.count for record in known))
        overall = (sum(record.time for record in known) / count, sum(record.memory for record in known) / count)
        families, where = np.unique(self.family, return_inverse=True)
        times, sizes = np.ones(len(families)), np.ones(len(families))
        for index, number in enumerate(families.tolist()):
            record = records.get(number, FamilyRecord())
            # The mean over all families counts like one prediction of this family: families differ more than plans do.
            weight = record.count + 1
            times[index] = np.exp((record.time + overall[0]) / weight) if not record.always_refused else np.inf
            sizes[index] = np.exp((record.memory + overall[1]) / weight)
        at = where.reshape(-1)
        too_large = self.memory * sizes[at] > self.capacity
        return np.asarray(self.likely * times[at] * np.where(too_large, _TOO_LARGE, 1.0), dtype=np.float64)


def mechanism_count(code: int) -> int:
    """Return the number of mechanisms that a family combines."""
    axes, level, schedule, recompute, offload = _decoded(code)
    return axes.bit_count() + (level > 0) + (recompute > 0) + (schedule > 0) + (offload > 0)


def slow_to_predict(code: int) -> bool:
    """Return whether prediction is slow for large pipelines, because the schedule's order must be simulated."""
    return SCHEDULES[_decoded(code)[2]] in ("interleaved", "zero-bubble")


def _decoded(code: int) -> tuple[int, int, int, int, int]:
    """Return (axes, level, schedule, recompute, offload) of a family's number."""
    code //= 2
    offload, code = code % len(OFFLOADS), code // len(OFFLOADS)
    recompute, code = code % 3, code // 3
    schedule, code = code % 4, code // 4
    return code // 4, code % 4, schedule, recompute, offload

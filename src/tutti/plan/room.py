"""Memory of a plan's ranks, at least and probably, worked out once for all plans that divide the model alike."""

import numpy as np

from tutti.errors import PlanError
from tutti.plan.enumerate import SCHEDULES
from tutti.plan.tables import Array, Tables
from tutti.plan.work import IMPOSSIBLE, Work
from tutti.predict import constants
from tutti.predict.memory import kept
from tutti.predict.table import model_table
from tutti.spec.plan import Plan

_ZERO_BUBBLE, _GPIPE = SCHEDULES.index("zero-bubble"), SCHEDULES.index("gpipe")


class Room:
    """Bytes on the ranks of plans for the model of `tables`, and with `work` their seconds."""

    def __init__(self, tables: Tables, script: Plan) -> None:
        self.tables, self.work = tables, Work(tables, script)
        self._columns = model_table(tables.model)
        self._sums: dict[tuple[int, ...], Array | None] = {}
        kinds = {tables.cluster.devices[node.device].kind for node in tables.cluster.nodes}
        self.reserve = min(constants.RESERVE_NBYTES[kind] for kind in kinds)
        self.fragments = min(constants.FRAGMENTATION[kind] for kind in kinds)

    def activations(self, *key: int) -> tuple[float, ...]:
        """Bytes for (split, context, expert, table, space, samples, stages, stages per rank, microbatches, schedule,
        recompute): (probably on the fullest rank; at least on it; at least on the emptiest)."""
        *degrees, samples, stage, chunks, count, schedule, again = key
        sums = self._stage_sums((*degrees, stage, chunks, again))
        if sums is None:
            return (IMPOSSIBLE,) * 3
        always, within, output = samples * sums
        passing = (within + output).reshape(chunks, stage).max(axis=0)
        if stage == 1:
            total = float(always.sum() + within.max() + output.max())
            return (total,) * 3
        held = always.reshape(chunks, stage)
        live = np.minimum(count, np.arange(stage, 0, -1)).astype(np.float64)
        if schedule == _GPIPE:
            likely = least = held.sum(axis=0) * count
        elif chunks > 1:
            most = np.minimum(count * chunks, 2 * np.arange(stage - 1, -1, -1) + (chunks - 1) * stage + 1)
            likely, least = held.mean(axis=0) * most, held.max(axis=0)
        elif schedule == _ZERO_BUBBLE:
            likely, least = held[0] * min(count, stage), held[0]
        else:
            likely = least = held[0] * live
        return float((likely + passing).max()), float(least.max()), float(least.min())

    def _stage_sums(self, key: tuple[int, ...]) -> Array | None:
        """(3, stages): what one sample keeps, the most within a region that recomputes, the largest output."""
        if key not in self._sums:
            *degrees, stage, chunks, again = key
            stages = self.work.cut(stage, chunks)
            try:
                part = self.work.part(tuple(degrees))
            except PlanError:
                part = None
            if stages is None or part is None:
                self._sums[key] = None
                return None
            found = kept(self._columns, part, self.work.regions[again], half=self.tables.half)
            sums = np.zeros((3, stage * chunks))
            sums[0] = np.bincount(stages, weights=found.always, minlength=stage * chunks)
            np.maximum.at(sums[1], stages, found.within)
            np.maximum.at(sums[2], stages, found.output)
            self._sums[key] = sums
        return self._sums[key]

    def state(self, split: int, expert: int, table: int, stage: int, chunks: int) -> tuple[float, ...]:
        """Bytes on the fullest rank of each: (parameters, their copies in lower precision, gradients, optimizer state;
        the largest block's parameters; those outside of blocks)."""
        stages = self.work.cut(stage, chunks)
        try:
            part = self.work.part((split, 1, expert, table, 1))
        except PlanError:
            part = None
        if stages is None or part is None:
            return (0.0,) * 6
        columns, place = self._columns, stages % stage
        parameters = columns.parameters * part.weight
        lower = np.where(columns.multiplies & self.tables.half, parameters / 2, 0.0)
        rows = (parameters, lower, columns.gradients * part.weight, columns.optimizer * part.weight)
        most = [float(np.bincount(place, weights=row, minlength=stage).max()) for row in rows]
        blocks = np.bincount(columns.unit[columns.block], weights=parameters[columns.block], minlength=1)
        return (*most, float(blocks.max(initial=0.0)), float(parameters[~columns.block].sum()))

"""Bytes on the ranks of a plan, worked out once for all plans that divide the model alike: what bounds of memory are
made of. It is the arithmetic of predict.memory, row by row; tests hold the two against each other.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tutti.config.plan import Plan
from tutti.config.vocabulary import ScheduleName
from tutti.cost_model import constants
from tutti.cost_model.memory import convolving, kept, kept_by_stage, put_off
from tutti.cost_model.overlap import buckets
from tutti.cost_model.sharding import units_of
from tutti.cost_model.table import model_table
from tutti.cost_model.update import update_temporaries
from tutti.errors import PlanError
from tutti.planner.enumerate import RECOMPUTE, SCHEDULES
from tutti.planner.tables import Array, Tables
from tutti.planner.work import IMPOSSIBLE, Work

PLACES = 4
"""Places on the stage axis that are looked at: the first two, one in the middle, the last. First ones hold the most
microbatches, the ends what lies around the blocks."""


STATES = 9
"""Kinds of bytes that `Room.state` says of each place."""


def looked_at(stages: int) -> tuple[int, ...]:
    """The places of a pipeline of so many ranks that are looked at; some are the same in short ones."""
    return 0, min(1, stages - 1), stages // 2, stages - 1


class Room:
    """Bytes on the ranks of plans for the model of `tables`, and with `work` their seconds. `on_cpu`: whether all ranks
    compute there, where the update may be the peak; `blocks`: that have parameters."""

    def __init__(self, tables: Tables, script: Plan) -> None:
        self.tables, self.work = tables, Work(tables, script)
        self._columns, self._cap_nbytes = model_table(tables.model), float(script.sync.bucket_nbytes)
        self._sums: dict[tuple[int, ...], Array | None] = {}
        self._held: dict[tuple[int, ...], list[list[tuple[float, ...]]]] = {}
        kinds = {tables.cluster.devices[node.device].kind for node in tables.cluster.nodes}
        self.on_cpu = kinds == {"cpu"}
        self.reserve = min(constants.RESERVE_NBYTES[kind] for kind in kinds)
        self.reserve += tables.model.script_nbytes if self.on_cpu else 0.0
        self.blocks = len(set(self._columns.unit[self._columns.block & (self._columns.parameters > 0)].tolist()))
        self.fragments = min(constants.FRAGMENTATION[kind] for kind in kinds)

    def activations(self, *key: int) -> tuple[float, ...]:
        """Bytes for (split, context, expert, table, space, samples, stages, stages per rank, microbatches, schedule,
        recompute) at least on each of the places that are looked at, and on the emptiest of all."""
        *rest, schedule, again = key
        whole = tuple(rest)
        if whole not in self._held:
            self._held[whole] = self._activations(*rest)
        return self._held[whole][again][schedule]

    def _activations(self, *key: int) -> list[list[tuple[float, ...]]]:
        """The same for every form of recompute and schedule."""
        *degrees, samples, stage, chunks, count = key
        forms = [self._stage_sums((*degrees, stage, chunks, again)) for again in range(len(RECOMPUTE))]
        found = [one for one in forms if one is not None]
        if len(found) < len(forms):
            return [[(IMPOSSIBLE,) * (PLACES + 1)] * len(SCHEDULES)] * len(forms)
        always, within, output, off, sent = samples * np.stack(found, axis=1).reshape(5, len(forms), 1, chunks, stage)
        often, pending, back, on = (
            np.stack(each) for each in zip(*(at_most_held(one, chunks, stage, count) for one in SCHEDULES), strict=True)
        )
        came = np.concatenate([np.zeros_like(sent[..., :1]), sent[..., :-1]], axis=-1)
        total = (always * often + off * pending + sent * back + came * on).sum(axis=2)
        total = total + within.max(axis=2) + output.max(axis=2)
        shown = np.concatenate([total[:, :, list(looked_at(stage))], total.min(axis=2, keepdims=True)], axis=2)
        return [[tuple(row) for row in rows] for rows in shown.tolist()]

    def _stage_sums(self, key: tuple[int, ...]) -> Array | None:
        """(5, stages): what one sample keeps, the most within a region that recomputes, the largest output or what else
        its backward holds for a moment, what is held while gradients of weights are put off, and what is sent on."""
        if key not in self._sums:
            *degrees, stage, chunks, again = key
            stages = self.work.stages(stage, chunks)
            try:
                part = self.work.part(tuple(degrees))
            except PlanError:
                part = None
            if stages is None or part is None:
                self._sums[key] = None
                return None
            found = kept(self._columns, part, self.work.regions[again], half=self.tables.half)
            sums = np.zeros((5, stage * chunks))
            sums[0] = kept_by_stage(self._columns, stages, found)
            np.maximum.at(sums[1], stages.stage, found.within)
            np.maximum.at(sums[2], stages.stage, found.output)
            if self.on_cpu:
                space = degrees[-1] > 1
                once = convolving(self._columns, part, stages, found, space=space, half=self.tables.half)
                np.maximum.at(sums[2], stages.stage, once)
            sums[3] = put_off(self._columns, stages, found)
            sums[4, : stage * chunks - 1] = stages.sent
            self._sums[key] = sums
        return self._sums[key]

    def state(self, split: int, expert: int, table: int, stage: int, chunks: int) -> tuple[float, ...]:
        """Bytes on each of the places that are looked at, and the least on any, of: parameters, their copies in lower
        precision, gradients, optimizer state, buffers, what the largest update needs for a moment, the largest bucket
        of gradients that all data-parallel ranks sum, the largest of experts' divided ones, and the largest module's
        gradients where no sums follow from the cuts; then the largest block's parameters, and those outside of blocks
        or tied between them."""
        stages = self.work.stages(stage, chunks)
        try:
            part = self.work.part((split, 1, expert, table, 1))
        except PlanError:
            part = None
        if stages is None or part is None:
            return (0.0,) * (STATES * (PLACES + 1) + 2)
        columns, place = self._columns, stages.stage % stage
        parameters, gradients = columns.parameters * part.weight, columns.gradients * part.weight
        lower = np.where(columns.multiplies & self.tables.half, parameters / 2, 0.0)
        again = {(int(place[index]), owner) for index, owner in stages.ties}
        found: list[float] = []
        for row in (parameters, lower, gradients, columns.optimizer * part.weight, columns.buffers):
            sums = np.bincount(place, weights=row, minlength=stage).astype(np.float64)
            for where, owner in again:
                sums[where] += row[owner]
            found += self._looked_at(sums, stage)
        largest = np.zeros(stage)
        np.maximum.at(largest, place, gradients)
        often = update_temporaries(self.tables.model)
        found += self._looked_at(often * largest, stage)
        apart = (columns.expert & (expert > 1)) | (columns.table & (table > 1)) | (columns.sequence & (split > 1))
        apart |= part.linear
        for mine in (~apart, columns.expert & (expert > 1)):
            found += self._looked_at(self._largest_bucket(np.where(mine, gradients, 0.0), place, stage), stage)
        found += self._looked_at(np.zeros(stage) if stages.ties else largest, stage)
        units = units_of(columns, part)
        return (*found, max(units[1:], default=0.0), units[0])

    def _largest_bucket(self, nbytes: Array, place: NDArray[np.intp], stage: int) -> Array:
        """(places,): bytes of the largest bucket in which gradients of `nbytes` by module are fused."""
        if not nbytes.any():
            return np.zeros(stage)
        fused = [buckets(nbytes[place == one].tolist(), self._cap_nbytes) for one in range(stage)]
        return np.array([max((bucket.nbytes for bucket in some), default=0.0) for some in fused])

    @staticmethod
    def _looked_at(values: Array, stage: int) -> list[float]:
        return [*values[list(looked_at(stage))].tolist(), float(values.min())]


@lru_cache(maxsize=4096)
def at_most_held(schedule: ScheduleName, chunks: int, stage: int, count: int) -> tuple[Array, Array, Array, Array]:
    """(stages per rank, places) each, when a place holds most, at least: `times_held`; of how many microbatches it puts
    gradients of weights off; and of how many it has a message from the stage after it, and from the one before.

    A message is there while it is used, and one action before. Of interleaved schedules none is counted, of those that
    put off those put off and no message: what follows the peak depends on the bytes there.
    """
    often = times_held(schedule, chunks, stage, count)
    pending, back, on = (np.zeros_like(often) for _ in range(3))
    places = np.arange(stage)
    if stage > 1 and schedule == "gpipe":
        back[:] = np.where(places < stage - 1, min(count, 2), 0)
    elif stage > 1 and schedule in ("1f1b", "interleaved") and chunks == 1:
        more = count > often[0]  # after the first backward comes one more forward, else a backward
        back[:] = np.where(places < stage - 1, np.where(more | (count == 1), 1, 2), 0)
        on[:] = np.where(more & (places > 0), 1, 0)
    elif stage > 1 and schedule == "zero-bubble" and count >= stage:
        pending[:] = places
    return often, pending, back, on


@lru_cache(maxsize=4096)
def times_held(schedule: ScheduleName, chunks: int, stage: int, count: int) -> Array:
    """(stages per rank, places): of how many of `count` microbatches each stage holds activations at least, when its
    place holds most.

    1F1B holds one for each place that follows and its own, zero-bubble as many as there are places. An interleaved
    schedule has so many forwards behind it before its first backward as Narayanan et al. 2021 (arXiv 2104.04473) say:
    they come in groups of as many microbatches as there are places, chunk by chunk, and of the second group only the
    first chunk is sure to be there in time.
    """
    places = np.arange(stage)
    if stage == 1:
        return np.ones((chunks, 1))
    if schedule == "gpipe":
        return np.full((chunks, stage), float(count))
    if chunks == 1 and schedule != "interleaved":
        live = np.minimum(count, stage if schedule == "zero-bubble" else stage - places)
        return np.asarray(np.broadcast_to(live, (1, stage)), dtype=np.float64)
    group = min(count, stage)
    sure = group * chunks + min(max(0, count - stage), stage)
    most = np.minimum(2 * (stage - 1 - places) + (chunks - 1) * stage + 1, sure)
    often = np.clip(most - group * np.arange(chunks)[:, None], 0, group)
    often[0] += np.maximum(0, most - group * chunks)
    return often.astype(np.float64)

"""One microbatch's work on one rank, stage by stage, from which bounds and estimates of a step are made.

It uses the cost model's own functions, but runs them once for all plans that divide the model in the same
degrees.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tutti.config.plan import BatchPlan, LayoutRule, PipelinePlan, Plan
from tutti.config.vocabulary import AxisName, Recompute, ScheduleName
from tutti.cost_model import compute_cost, cost_constants
from tutti.cost_model.compute_cost import update_nbytes, update_temporaries
from tutti.cost_model.memory_cost import convolving, kept, kept_by_stage, put_off
from tutti.cost_model.microbatch_cost import at_least
from tutti.cost_model.module_costs import model_table
from tutti.cost_model.overlap import buckets
from tutti.cost_model.sharding_cost import units_of
from tutti.cost_model.stage_cuts import StageCuts, stages_of
from tutti.cost_model.work_division import Division as Part
from tutti.cost_model.work_division import Region, computed_in_pieces, division, mean_division, recompute_regions
from tutti.cost_model.worker_speed import Worker
from tutti.errors import PlanError
from tutti.planner.cost_tables import Array, Tables
from tutti.planner.mesh_enumeration import RECOMPUTE, SCHEDULES, block_globs

Flags = NDArray[np.bool_]

KINDS = ("others", "zero-bubble")
"""Groups of schedules for which the same is known about the time of a step."""

IMPOSSIBLE = math.inf
"""Seconds of a combination that the cost model refuses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePasses:
    """The passes of one microbatch, by module.

    Attributes:
        ahead: seconds of forward, with its least exposed communication.
        back: seconds of backward, with its least exposed communication.
        again: (3, modules), seconds of recompute under each form.
        adding: seconds of adding gradients to those of the microbatch before.
        update: seconds of the optimizer's memory traffic.
        probable: seconds of communication that is probable in addition.
        summed: bytes of the gradients that all data-parallel ranks reduce.
        slack: for all modules, seconds by which forward and backward may be less in the mean over ranks of
            unequal parts along split.
    """

    ahead: Array
    back: Array
    again: Array
    adding: Array
    update: Array
    probable: Array
    summed: Array
    slack: tuple[float, float] = (0.0, 0.0)


def _on_place(values: Array, stage: int) -> Array:
    """Values by stage, (..., stages), summed for each place, (..., places)."""
    return np.asarray(values.reshape(*values.shape[:-1], -1, stage).sum(axis=-2), dtype=np.float64)


def _before(values: Array) -> Array:
    """(..., stages): for each stage the sum over all stages before it."""
    return np.asarray(np.cumsum(values, axis=-1) - values, dtype=np.float64)


class ModelWork:
    """The work of a model on the workers of `tables`."""

    def __init__(self, tables: Tables, script: Plan) -> None:
        self._tables, self._script = tables, script
        self.columns = model_table(tables.model)
        self._known: dict[tuple[int, ...], ModulePasses | None] = {}
        self._stages: dict[tuple[int, int], StageCuts | None] = {}
        self._steps: dict[tuple[int, ...], list[list[tuple[float, ...]]]] = {}
        self._sums: dict[tuple[int, ...], Array] = {}
        self._parts: dict[tuple[int, ...], Part] = {}
        self._largest: dict[tuple[int, ...], Part] = {}
        forms: tuple[bool | Recompute | None, ...] = (None, "selective", True)
        self.regions = tuple(self._recomputed(how) for how in forms)
        self._repeats = np.stack([self._repeated(regions) for regions in self.regions])

    def step(self, *key: int) -> tuple[float, ...]:
        """Least and probable times of a step.

        For every place p of a pipeline, a step lasts m t_p plus the times of the places before it and of the messages
        between, where t_p is forward and backward. The first microbatch passes through these places, and the last
        one's gradient goes back. The same holds for every single stage with all stages before it, and for the link of
        its messages, which carries one after another. With zero-bubble schedules, weight gradients may come last.
        Then only forwards, or gradients of inputs, are sure to come before and after.

        Args:
            key: (split, context, expert, table, space, samples, best worker, stages, stages per rank, microbatches,
                whether stages lie on different hosts, index into KINDS, recompute).

        Returns:
            Seconds of all passes of a step: at least for the place that ends last, at least for any microbatch's
                path, probable, and as a mean over the places. Then, for the place that ends last: seconds of a
                microbatch's forward and backward, bytes of its gradients that all data-parallel ranks reduce, and
                seconds of its update.
        """
        *rest, kind, again = key
        whole = tuple(rest)
        if whole not in self._steps:
            self._steps[whole] = self._step(*rest)
        return self._steps[whole][kind][again]

    def _step(self, *key: int) -> list[list[tuple[float, ...]]]:
        """As `step`, for every kind of schedule and form of recompute."""
        *inner, stage, chunks, count, across_hosts = key
        sums = self._stage_sums((*inner, stage, chunks))
        if sums is None:
            return [[(IMPOSSIBLE,) * 8] * len(self.regions)] * len(KINDS)
        (ahead, back), (adding, update, beside, summed) = sums[:2], sums[5:]
        backward = back + sums[2:5] + (count - 1) / count * adding  # (forms of recompute, stages)
        total = ahead + backward
        message, wire = self._messages(stage, chunks, inner[5] / inner[1], across_hosts, inner[6])
        own, waited = _on_place(total, stage), count * float(_on_place(beside, stage).max())
        lost = (total.sum(axis=1) - total.max(axis=1)) / chunks**2
        forms, late, found = np.arange(len(total)), np.array([not regions for regions in self.regions]), []
        for kind in KINDS:
            # what is recomputed has no weight gradients to put off
            halves = late[:, None] & (kind == "zero-bubble")
            inputs = np.where(halves, backward / 2, backward)
            before = _before(np.where(halves, ahead + message, total + 2 * message))
            ends = count * own + before[:, :stage]
            last = ends.argmax(axis=1)
            once = ahead + inputs
            path = np.max(count * once + _before(once + 2 * message), axis=1)
            path = np.maximum(path, (once + 2 * message).sum(axis=1) + (count - 1) * wire.max())
            likely = count * own.max(axis=1) + (lost / 3 if kind == "zero-bubble" else lost) + waited
            least = ends[forms, last]
            columns = (
                least, path, np.max([least, path, likely], axis=0), count * total.sum(axis=1) / stage,
                _on_place(ahead, stage)[last], _on_place(backward, stage)[forms, last],
                _on_place(summed, stage)[last], _on_place(update, stage)[last],
            )  # fmt: skip
            found.append([tuple(row) for row in np.stack(columns, axis=1).tolist()])
        return found

    def _messages(self, stage: int, chunks: int, samples: float, across_hosts: int, best: int) -> tuple[Array, Array]:
        """(stages,) twice: least seconds of a message from each stage to the next (0 from the last), and of these the
        seconds that occupy only the link.
        """
        stages, tables = self.stages(stage, chunks), self._tables
        message, wire = np.zeros(stage * chunks), np.zeros(stage * chunks)
        if stages is not None and stage > 1:
            latency, bandwidth = tables.across_hosts(best) if across_hosts else tables.fastest(best)
            nbytes = stages.sent * samples + stages.fixed
            wire[:-1] = nbytes / bandwidth
            message[:-1] = np.where(nbytes > 0, latency + wire[:-1], 0.0)
        return message, wire

    def _stage_sums(self, key: tuple[int, ...]) -> Array | None:
        """(9, stages): forward, backward, recompute under each form, adding gradients, the update, probable further
        communication, bytes of gradients that all ranks reduce. None for what is refused.
        """
        if key not in self._sums:
            *inner, stage, chunks = key
            passes, stages = self.passes(tuple(inner)), self.stages(stage, chunks)
            if passes is None or stages is None:
                return None
            rows = np.vstack([passes.ahead, passes.back, passes.again, passes.adding, passes.update, passes.probable,
                              passes.summed])  # fmt: skip
            total = stage * chunks
            self._sums[key] = np.stack([np.bincount(stages.stage, weights=row, minlength=total) for row in rows])
        return self._sums[key]

    def stages(self, stage: int, chunks: int) -> StageCuts | None:
        """The cuts of the model into stages; None where it cannot be cut so."""
        key = (stage, chunks)
        if key not in self._stages:
            pipeline = PipelinePlan(schedule="interleaved" if chunks > 1 else "1f1b", stages_per_rank=chunks,
                                cuts=self._script.pipeline.cuts if stage > 1 else ())  # fmt: skip
            plan = Plan(batch=BatchPlan(global_batch_size=1), mesh={"stage": stage}, pipeline=pipeline)
            try:
                self._stages[key] = stages_of(self._tables.model, plan)
            except PlanError:
                self._stages[key] = None
        return self._stages[key]

    def _recomputed(self, how: bool | Recompute | None) -> tuple[Region, ...]:
        """The regions that are recomputed when the blocks recompute so; None adds nothing to the script's layout."""
        rules = tuple(LayoutRule(modules=glob, recompute=how) for glob in block_globs(self._tables.model))
        layout = (*self._script.layout, *(rules if how is not None else ()))
        return recompute_regions(self._tables.model, Plan(batch=BatchPlan(global_batch_size=1), layout=layout))

    def _repeated(self, regions: tuple[Region, ...]) -> Array:
        """1 for modules that are recomputed in backward."""
        again = np.zeros(len(self.columns))
        for region in regions:
            members = np.array(region.members, dtype=np.intp)
            again[members] = np.where(self.columns.multiplies[members] & region.selective, 0.0, 1.0)
        return again

    def _repeated_waits(self, part: Part, waits: Array) -> Array:
        """(3, modules): communication that recompute repeats. Nothing after a region's last reduction is recomputed."""
        repeated = self._repeats * waits
        for form, regions in enumerate(self.regions):
            for region in regions:
                members = np.array(region.members, dtype=np.intp)
                sums = members[part.split[members] & self.columns.summed[members]]
                if len(sums):
                    repeated[form, sums.max()] = 0.0
        return repeated

    def part(self, degrees: tuple[int, ...]) -> Part:
        """A rank's part of each module for (split, context, expert, table, space). Raises PlanError if refused.

        Where devices are unequal, parts along split may be too; the result is then their mean.
        """
        if degrees not in self._parts:
            split, context, expert, table, space = degrees
            mesh: dict[AxisName, int] = {"table": table, "expert": expert, "context": context, "space": space,
                                         "split": split}  # fmt: skip
            plan = Plan(batch=BatchPlan(global_batch_size=table * expert), mesh=mesh, layout=self._script.layout)
            mean = self._tables.mixed and split > 1
            self._parts[degrees] = (mean_division if mean else division)(self._tables.model, plan)
            self._largest[degrees] = division(self._tables.model, plan)
        return self._parts[degrees]

    def slack(self, *key: int) -> tuple[float, float]:
        """`ModulePasses.slack` for such a key; zero where it is refused."""
        passes = self.passes(key)
        return (0.0, 0.0) if passes is None else passes.slack

    def _slack(
        self, degrees: tuple[int, ...], samples: int, worker: Worker, own: tuple[Array, Array]
    ) -> tuple[float, float]:
        """Seconds that unequal parts may save of what takes `own` seconds in equal parts. Only each part's fraction of
        the whole's time is certain, because rates do not fall with size.
        """
        part, largest, split = self.part(degrees), self._largest[degrees], degrees[0]
        whole, count = self.part((1, *degrees[1:])).ops, len(self.columns)
        less = [
            float(
                np.where(
                    part.split, np.maximum(0.0, each - one(whole, worker, samples, count).seconds / split), 0.0
                ).sum()
            )
            for one, each in zip((compute_cost.forward, compute_cost.backward), own, strict=True)
        ]
        gradients = float((self.columns.gradients * np.maximum(0.0, largest.weight - part.weight)).sum())
        return less[0], less[1] + 3.0 * worker.slowdown / worker.bandwidth_bytes_per_s * gradients

    def passes(self, key: tuple[int, ...]) -> ModulePasses | None:
        """The passes for (split, context, expert, table, space, samples, best worker); None for what is refused."""
        if key not in self._known:
            try:
                self._known[key] = self._worked_out(key[:5], *key[5:])
            except PlanError:
                self._known[key] = None
        return self._known[key]

    def _worked_out(self, degrees: tuple[int, ...], samples: int, best: int) -> ModulePasses:
        self.part(degrees)
        tables, columns, part = self._tables, self.columns, self._largest[degrees]
        split, context, expert, table, space = degrees
        worker, count = tables.worker(best), len(columns)
        bare = (
            at_least(compute_cost.forward, part.ops, worker, samples, count),
            at_least(compute_cost.backward, part.ops, worker, samples, count),
        )
        passes = computed_in_pieces(columns, part, (space,), worker, samples, bare, on_cpu=False, least=True)
        ahead, back = (one.seconds for one in passes)
        slack = self._slack(degrees, samples, worker, (ahead, back)) if tables.mixed and split > 1 else (0.0, 0.0)
        low = np.where(columns.multiplies & tables.half, 0.5, 1.0)
        link = tables.ring(best, split, 1)
        out = np.where(part.split & columns.summed, samples * part.passed * columns.outputs * low, 0.0)
        into = np.where(part.split, samples * part.passed * columns.inputs, 0.0)
        waits_f, waits_b = link(out), link(into)
        inside = split * space * context
        if expert > 1:
            sent = 2 * tables.exchange(best, expert, inside)(samples * part.passed * columns.routed)
            waits_f, waits_b = waits_f + sent, waits_b + sent
        probable = np.zeros(count)
        if table > 1:
            vectors = np.where(columns.table, samples * part.passed * columns.outputs, 0.0)
            probable += 2 * tables.exchange(best, table, inside * expert)(vectors)
            rows = columns.linear * np.where(part.by_outputs, table, 1.0)
            rows += columns.outputs * np.where(part.by_outputs, 1.0, table)
            exchanged = np.where(part.linear, samples * part.passed * tables.width * rows, 0.0)
            probable += 2 * tables.exchange(best, table, inside * expert)(exchanged)
        if context > 1:
            keys = samples * part.work * columns.key_value * tables.width
            probable += 2 * tables.exchange(best, context, split)(keys)
        gradients = columns.gradients * part.weight
        states, on_cpu = columns.optimizer * part.weight, worker.gap_s is None
        rate = worker.slowdown / worker.bandwidth_bytes_per_s
        return ModulePasses(
            ahead=ahead + waits_f,
            back=back + waits_b,
            again=self._repeats * ahead + self._repeated_waits(part, waits_f),
            adding=3.0 * rate * gradients,
            update=rate * update_nbytes(tables.model, gradients, states, on_cpu=on_cpu),
            probable=probable,
            summed=np.where(columns.expert | columns.table | part.linear, 0.0, gradients),
            slack=slack,
        )


PLACES = 4
"""Number of places on the stage axis that are sampled: the first two, one in the middle, the last. The first
ones hold the most microbatches, the ends have the modules around the blocks.
"""


STATES = 9
"""Kinds of bytes that `Room.state` returns for each place."""


def looked_at(stages: int) -> tuple[int, ...]:
    """The sampled places of a pipeline of this many ranks; some are the same in short pipelines."""
    return 0, min(1, stages - 1), stages // 2, stages - 1


class Room:
    """Bytes on the ranks of plans for the model of `tables`, and with `work` their seconds.

    Attributes:
        on_cpu: whether all ranks compute on CPUs, where the update may be the peak.
        blocks: number of blocks with parameters.
    """

    def __init__(self, tables: Tables, script: Plan) -> None:
        self.tables, self.work = tables, ModelWork(tables, script)
        self._columns, self._cap_nbytes = model_table(tables.model), float(script.sync.bucket_nbytes)
        self._sums: dict[tuple[int, ...], Array | None] = {}
        self._held: dict[tuple[int, ...], list[list[tuple[float, ...]]]] = {}
        kinds = {tables.cluster.devices[node.device].kind for node in tables.cluster.nodes}
        self.on_cpu = kinds == {"cpu"}
        self.reserve = min(cost_constants.RESERVE_NBYTES[kind] for kind in kinds)
        self.reserve += tables.model.script_nbytes if self.on_cpu else 0.0
        self.blocks = len(set(self._columns.unit[self._columns.block & (self._columns.parameters > 0)].tolist()))
        self.fragments = min(cost_constants.FRAGMENTATION[kind] for kind in kinds)

    def activations(self, *key: int) -> tuple[float, ...]:
        """Least bytes of activations on each of the sampled places, and on the emptiest of all.

        `key`: (split, context, expert, table, space, samples, stages, stages per rank, microbatches, schedule,
        recompute).
        """
        *rest, schedule, again = key
        whole = tuple(rest)
        if whole not in self._held:
            self._held[whole] = self._activations(*rest)
        return self._held[whole][again][schedule]

    def _activations(self, *key: int) -> list[list[tuple[float, ...]]]:
        """As `activations`, for every form of recompute and schedule."""
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
        """(5, stages) bytes: what one sample holds; the most within a region that recomputes; the largest output, or
        what else its backward holds briefly; what is held while weight gradients are delayed; the message to the next
        stage.
        """
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
        """Bytes of state on each of the sampled places, and the least on any place.

        The kinds are: parameters; their copies in lower precision; gradients; optimizer state; buffers; what the
        largest update needs briefly; the largest bucket of gradients that all data-parallel ranks reduce; the largest
        bucket of experts' divided gradients; the largest module's gradients (0 where stages share tied parameters).
        Two numbers follow: the largest block's parameters, and the parameters outside of blocks or tied between them.
        """
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
        divided = (columns.expert & (expert > 1)) | (columns.table & (table > 1)) | (columns.sequence & (split > 1))
        divided |= part.linear
        for included in (~divided, columns.expert & (expert > 1)):
            found += self._looked_at(self._largest_bucket(np.where(included, gradients, 0.0), place, stage), stage)
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
    """Four arrays (stages per rank, places), at least, at a place's peak: `times_held`; the microbatches whose
    weight gradients it delays; the microbatches of which it holds a message from the next stage; and those with
    one from the stage before.

    A message is there while it is used, and one action before. For interleaved schedules none is counted. For
    those that delay weight gradients, the delayed ones are counted and no message: what follows the peak depends
    on the bytes there.
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
    """(stages per rank, places): of how many of `count` microbatches each stage holds activations, at least, at its
    place's peak.

    1F1B holds one for each place that follows and its own; zero-bubble holds as many as there are places. An
    interleaved schedule runs as many forwards before its first backward as Narayanan et al. 2021 (arXiv
    2104.04473) say. They come in groups of as many microbatches as there are places, chunk by chunk. From the
    second group only the first chunk is sure to be there in time.
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

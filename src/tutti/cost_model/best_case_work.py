"""The least work of a step, stage by stage, from which bounds and estimates of its time are made.

The formulas are the prediction's own. They are evaluated once for all plans that divide the model in the same degrees.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tutti.config.plan import BatchPlan, LayoutRule, PipelinePlan, Plan
from tutti.config.vocabulary import AxisName, Recompute
from tutti.cost_model import compute_cost
from tutti.cost_model.best_case import BestCase
from tutti.cost_model.compute_cost import accumulation_s, traffic_s, update_nbytes
from tutti.cost_model.microbatch_cost import (
    at_least,
    key_value_nbytes,
    last_reduced,
    linear_nbytes,
    repeats,
    routed_nbytes,
    split_nbytes,
    vector_nbytes,
)
from tutti.cost_model.module_costs import model_table
from tutti.cost_model.plan_table import Array
from tutti.cost_model.stage_cuts import StageCuts, stages_of
from tutti.cost_model.work_division import (
    Division,
    Region,
    block_globs,
    computed_in_pieces,
    division,
    mean_division,
    recompute_regions,
)
from tutti.cost_model.worker_speed import Worker
from tutti.errors import PlanError

KINDS = ("others", "zero-bubble")
"""Groups of schedules about whose step time the same is known."""

IMPOSSIBLE = math.inf
"""Seconds of a combination that the cost model refuses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePasses:
    """The passes of one microbatch, by module.

    Attributes:
        ahead: seconds of forward, with its least exposed communication.
        back: seconds of backward, with its least exposed communication.
        again: (3, modules), seconds of recompute in each form.
        adding: seconds of adding gradients to those of the microbatch before.
        update: seconds of the optimizer's memory traffic.
        probable: seconds of further communication that is probable but not certain.
        summed: bytes of the gradients that all data-parallel ranks reduce.
        slack: seconds of (forward, backward) of all modules that unequal parts along split may save, in the mean over
            ranks.
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
    """Sum values by stage, (..., stages), for each place, (..., places)."""
    return np.asarray(values.reshape(*values.shape[:-1], -1, stage).sum(axis=-2), dtype=np.float64)


def _before(values: Array) -> Array:
    """Return for each stage the sum over all stages before it, (..., stages)."""
    return np.asarray(np.cumsum(values, axis=-1) - values, dtype=np.float64)


class StepWork(NamedTuple):
    """The work of a step, for many plans (plans,) each, as `BestCaseWork.step` returns it.

    Attributes:
        least_s: seconds of all passes, at least, for the place that ends last.
        path_s: the same for any microbatch's path.
        estimated_s: estimated seconds of all passes.
        mean_s: seconds of all passes as a mean over the places.
        forward_s: a microbatch's forward on the place that ends last.
        backward_s: its backward there.
        reduced_nbytes: bytes of that place's gradients that all data-parallel ranks reduce.
        update_s: seconds of that place's update.
    """

    least_s: Array
    path_s: Array
    estimated_s: Array
    mean_s: Array
    forward_s: Array
    backward_s: Array
    reduced_nbytes: Array
    update_s: Array


class BestCaseWork:
    """The work of a model on the best workers of a cluster."""

    def __init__(self, best_case: BestCase, script: Plan) -> None:
        self._best_case, self._script = best_case, script
        self.columns = model_table(best_case.model)
        self._known: dict[tuple[int, ...], ModulePasses | None] = {}
        self._stages: dict[tuple[int, int], StageCuts | None] = {}
        self._steps: dict[tuple[int, ...], list[list[tuple[float, ...]]]] = {}
        self._sums: dict[tuple[int, ...], Array] = {}
        self._parts: dict[tuple[int, ...], Division] = {}
        self._largest: dict[tuple[int, ...], Division] = {}
        forms: tuple[bool | Recompute | None, ...] = (None, "selective", True)
        self.regions = tuple(self._recomputed(how) for how in forms)
        self._repeats = np.stack([repeats(self.columns, regions) for regions in self.regions])

    def step(self, *key: int) -> tuple[float, ...]:
        """Return least and probable times of a step.

        Let t_p be the forward and backward of place p in a microbatch, and m the number of microbatches. A step lasts
        at least m t_p, plus the times of the places before p and of the messages between them: the first microbatch
        passes through these places, and the last one's gradient returns. The same holds for every single stage with
        all stages before it, and for the link that carries its messages one after another. A zero-bubble schedule may
        compute weight gradients last. Then only forwards, or gradients of inputs, are sure to come before and after.

        Args:
            key: (split, context, expert, table, space, samples, best worker, stages, stages per rank, microbatches,
                whether stages lie on different hosts, index into KINDS, recompute).

        Returns:
            The values of `StepWork` for one plan.
        """
        *rest, kind, again = key
        whole = tuple(rest)
        if whole not in self._steps:
            self._steps[whole] = self._step(*rest)
        return self._steps[whole][kind][again]

    def _step(self, *key: int) -> list[list[tuple[float, ...]]]:
        """Return `step` for every kind of schedule and form of recompute."""
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
        """Return the least seconds of a message from each stage to the next, and of occupying its link, (stages,) each.

        The last stage sends nothing.
        """
        stages, best_case = self.stages(stage, chunks), self._best_case
        message, wire = np.zeros(stage * chunks), np.zeros(stage * chunks)
        if stages is not None and stage > 1:
            latency, bandwidth = best_case.across_hosts(best) if across_hosts else best_case.fastest(best)
            nbytes = stages.sent * samples + stages.fixed
            wire[:-1] = nbytes / bandwidth
            message[:-1] = np.where(nbytes > 0, latency + wire[:-1], 0.0)
        return message, wire

    def _stage_sums(self, key: tuple[int, ...]) -> Array | None:
        """Return sums by stage, (9, stages); None for what is refused.

        The rows are forward, backward, recompute in each form, adding gradients, the update, probable further
        communication, and bytes of gradients that all ranks reduce.
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
        """Return the cuts of the model into stages; None where it cannot be cut so."""
        key = (stage, chunks)
        if key not in self._stages:
            pipeline = PipelinePlan(schedule="interleaved" if chunks > 1 else "1f1b", stages_per_rank=chunks,
                                cuts=self._script.pipeline.cuts if stage > 1 else ())  # fmt: skip
            plan = Plan(batch=BatchPlan(global_batch_size=1), mesh={"stage": stage}, pipeline=pipeline)
            try:
                self._stages[key] = stages_of(self._best_case.model, plan)
            except PlanError:
                self._stages[key] = None
        return self._stages[key]

    def _recomputed(self, how: bool | Recompute | None) -> tuple[Region, ...]:
        """Return the regions that are recomputed when blocks recompute so; None adds nothing to the script's layout."""
        rules = tuple(LayoutRule(modules=glob, recompute=how) for glob in block_globs(self._best_case.model))
        layout = (*self._script.layout, *(rules if how is not None else ()))
        return recompute_regions(self._best_case.model, Plan(batch=BatchPlan(global_batch_size=1), layout=layout))

    def _repeated_waits(self, part: Division, waits: Array) -> Array:
        """Return the communication that recompute repeats, (3, modules).

        Nothing after a region's last reduction is recomputed.
        """
        last = np.stack([last_reduced(self.columns, part, regions) for regions in self.regions])
        return self._repeats * ~last * waits

    def part(self, degrees: tuple[int, ...]) -> Division:
        """Return a rank's part of each module for (split, context, expert, table, space).

        Where devices are unequal, parts along split may be, too; the result is then their mean. Raises PlanError for
        degrees that the cost model refuses.
        """
        if degrees not in self._parts:
            split, context, expert, table, space = degrees
            mesh: dict[AxisName, int] = {"table": table, "expert": expert, "context": context, "space": space,
                                         "split": split}  # fmt: skip
            plan = Plan(batch=BatchPlan(global_batch_size=table * expert), mesh=mesh, layout=self._script.layout)
            mean = self._best_case.mixed and split > 1
            self._parts[degrees] = (mean_division if mean else division)(self._best_case.model, plan)
            self._largest[degrees] = division(self._best_case.model, plan)
        return self._parts[degrees]

    def slack(self, *key: int) -> tuple[float, float]:
        """Return `ModulePasses.slack` for such a key; zero where it is refused."""
        passes = self.passes(key)
        return (0.0, 0.0) if passes is None else passes.slack

    def _slack(
        self, degrees: tuple[int, ...], samples: int, worker: Worker, own: tuple[Array, Array]
    ) -> tuple[float, float]:
        """Return the seconds that unequal parts may save of the seconds `own` that equal parts take.

        Only each part's fraction of the whole's time is certain, because rates do not fall with size.
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
        gradients = self.columns.gradients * np.maximum(0.0, largest.weight - part.weight)
        return less[0], less[1] + float(accumulation_s(worker, gradients).sum())

    def passes(self, key: tuple[int, ...]) -> ModulePasses | None:
        """Return the passes for (split, context, expert, table, space, samples, best worker).

        They are None for what the cost model refuses.
        """
        if key not in self._known:
            try:
                self._known[key] = self._worked_out(key[:5], *key[5:])
            except PlanError:
                self._known[key] = None
        return self._known[key]

    def _worked_out(self, degrees: tuple[int, ...], samples: int, best: int) -> ModulePasses:
        self.part(degrees)
        best_case, columns, part = self._best_case, self.columns, self._largest[degrees]
        split, context, expert, table, space = degrees
        worker, count = best_case.worker(best), len(columns)
        bare = (
            at_least(compute_cost.forward, part.ops, worker, samples, count),
            at_least(compute_cost.backward, part.ops, worker, samples, count),
        )
        passes = computed_in_pieces(columns, part, (space,), worker, samples, bare, on_cpu=False, least=True)
        ahead, back = (one.seconds for one in passes)
        slack = self._slack(degrees, samples, worker, (ahead, back)) if best_case.mixed and split > 1 else (0.0, 0.0)
        link = best_case.ring(best, split, 1)
        reduced, _, inputs = split_nbytes(columns, part, samples, half=best_case.half)
        waits_f, waits_b = link(reduced), link(inputs)
        inside = split * space * context
        if expert > 1:
            sent = 2 * best_case.exchange(best, expert, inside)(routed_nbytes(columns, part, samples))
            waits_f, waits_b = waits_f + sent, waits_b + sent
        probable = np.zeros(count)
        if table > 1:
            to_holders = best_case.exchange(best, table, inside * expert)
            probable += 2 * to_holders(vector_nbytes(columns, part, samples))
            inputs, outputs = linear_nbytes(columns, part, samples, half=best_case.half)
            probable += 2 * to_holders(inputs + outputs)
        if context > 1:
            keys = key_value_nbytes(columns, part, samples) * best_case.width
            probable += 2 * best_case.exchange(best, context, split)(keys)
        gradients = columns.gradients * part.weight
        states, on_cpu = columns.optimizer * part.weight, worker.gap_s is None
        return ModulePasses(
            ahead=ahead + waits_f,
            back=back + waits_b,
            again=self._repeats * ahead + self._repeated_waits(part, waits_f),
            adding=accumulation_s(worker, gradients),
            update=traffic_s(worker, update_nbytes(best_case.model, gradients, states, on_cpu=on_cpu)),
            probable=probable,
            summed=np.where(columns.expert | columns.table | part.linear, 0.0, gradients),
            slack=slack,
        )

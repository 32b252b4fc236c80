"""The least bytes that ranks of a plan hold, from the prediction's own formulas."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tutti.config.plan import Plan
from tutti.cost_model import cost_constants
from tutti.cost_model.best_case import BestCase
from tutti.cost_model.best_case_work import IMPOSSIBLE, BestCaseWork
from tutti.cost_model.compute_cost import update_temporaries
from tutti.cost_model.memory_cost import beside, convolving, kept, kept_by_stage, put_off, state_by_place
from tutti.cost_model.module_costs import model_table
from tutti.cost_model.overlap import buckets
from tutti.cost_model.pipeline_cost import least_held
from tutti.cost_model.plan_table import RECOMPUTE, SCHEDULES, Array
from tutti.cost_model.sharding_cost import units_of
from tutti.cost_model.work_division import offload_regions
from tutti.errors import PlanError

PLACES = 4
"""Number of places on the stage axis that are sampled: the first two, one in the middle, and the last.

The first places hold the most microbatches; the first and the last have the modules around the blocks.
"""


class PlaceState(NamedTuple):
    """Bytes of state on one place of the stage axis, (plans,) each.

    Attributes:
        parameters: in their own precision.
        lower: copies of parameters in the lower precision.
        gradients: of all parameters that are trained.
        optimizer: the optimizer's state.
        buffers: buffers of modules.
        temporary: temporary tensors of the largest update.
        bucket: the largest bucket of gradients that all data-parallel ranks reduce.
        expert_bucket: the largest bucket of experts' divided gradients.
        largest: the largest module's gradients; 0 where stages share tied parameters.
    """

    parameters: Array
    lower: Array
    gradients: Array
    optimizer: Array
    buffers: Array
    temporary: Array
    bucket: Array
    expert_bucket: Array
    largest: Array


KINDS_OF_STATE = len(PlaceState._fields)


def state_at(columns: tuple[Array, ...], place: int) -> PlaceState:
    """Return the state at a sampled place (`PLACES`: the least of any place) from columns of `BestCaseMemory.state`."""
    return PlaceState(*columns[place :: PLACES + 1][:KINDS_OF_STATE])


def sampled_places(stages: int) -> tuple[int, ...]:
    """Return the sampled places of a pipeline of this many ranks; short pipelines repeat some."""
    return 0, min(1, stages - 1), stages // 2, stages - 1


class BestCaseMemory:
    """The memory of a best case, and its work.

    Attributes:
        best_case: the model on the best devices.
        work: its seconds.
        on_cpu: whether all ranks compute on CPUs, where the update may be the peak.
        blocks: number of blocks with parameters.
    """

    def __init__(self, best_case: BestCase, script: Plan) -> None:
        self.best_case, self.work = best_case, BestCaseWork(best_case, script)
        self._columns, self._cap_nbytes = model_table(best_case.model), float(script.sync.bucket_nbytes)
        regions = offload_regions(best_case.model, script.layout)
        self._sums: dict[tuple[int, ...], Array | None] = {}
        self._held: dict[tuple[int, ...], list[list[tuple[float, ...]]]] = {}
        kinds = {best_case.cluster.devices[node.device].kind for node in best_case.cluster.nodes}
        self.on_cpu = kinds == {"cpu"}
        self._on_host = [] if "cpu" in kinds else [module for region in regions for module in region]
        self.reserve = min(cost_constants.RESERVE_NBYTES[kind] for kind in kinds)
        self.reserve += best_case.model.script_nbytes if self.on_cpu else 0.0
        self.blocks = len(set(self._columns.unit[self._columns.block & (self._columns.parameters > 0)].tolist()))
        self.fragments = min(cost_constants.FRAGMENTATION[kind] for kind in kinds)

    def activations(self, *key: int) -> tuple[float, ...]:
        """Return the least bytes of activations on each sampled place, and on the emptiest of all places.

        Args:
            key: (split, context, expert, table, space, samples, stages, stages per rank, microbatches, schedule,
                recompute).
        """
        *rest, schedule, again = key
        whole = tuple(rest)
        if whole not in self._held:
            self._held[whole] = self._activations(*rest)
        return self._held[whole][again][schedule]

    def _activations(self, *key: int) -> list[list[tuple[float, ...]]]:
        """Return `activations` for every form of recompute and every schedule."""
        *degrees, samples, stage, chunks, count = key
        forms = [self._stage_sums((*degrees, stage, chunks, again)) for again in range(len(RECOMPUTE))]
        found = [one for one in forms if one is not None]
        if len(found) < len(forms):
            return [[(IMPOSSIBLE,) * (PLACES + 1)] * len(SCHEDULES)] * len(forms)
        always, within, output, off, sent = samples * np.stack(found, axis=1).reshape(5, len(forms), 1, chunks, stage)
        often, pending, back, on = (
            np.stack(each) for each in zip(*(least_held(one, chunks, stage, count) for one in SCHEDULES), strict=True)
        )
        came = np.concatenate([np.zeros_like(sent[..., :1]), sent[..., :-1]], axis=-1)
        total = (always * often + off * pending + sent * back + came * on).sum(axis=2)
        total = total + within.max(axis=2) + output.max(axis=2)
        shown = np.concatenate([total[:, :, list(sampled_places(stage))], total.min(axis=2, keepdims=True)], axis=2)
        return [[tuple(row) for row in rows] for rows in shown.tolist()]

    def _stage_sums(self, key: tuple[int, ...]) -> Array | None:
        """Return bytes by stage, (5, stages); None for what is refused.

        The rows are: what one sample keeps for backward; the most within a recomputed region; the largest output, or
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
            found = kept(self._columns, part, self.work.regions[again], half=self.best_case.half)
            if self._on_host:  # as if nothing of what moves were on the device
                found.always[self._on_host] = 0.0
            sums = np.zeros((5, stage * chunks))
            sums[0] = kept_by_stage(self._columns, stages, found)
            np.maximum.at(sums[1], stages.stage, found.within)
            np.maximum.at(sums[2], stages.stage, beside(stages, found))
            if self.on_cpu:
                space = degrees[-1] > 1
                once = convolving(self._columns, part, stages, found, space=space, half=self.best_case.half)
                np.maximum.at(sums[2], stages.stage, once)
            sums[3] = put_off(self._columns, stages, found)
            sums[4, : stage * chunks - 1] = stages.sent
            self._sums[key] = sums
        return self._sums[key]

    def state(self, split: int, expert: int, table: int, stage: int, chunks: int) -> tuple[float, ...]:
        """Return bytes of state on each sampled place, and the least on any place, for each kind of `PlaceState`.

        Two numbers follow: the parameters of the largest block, and those outside of blocks or tied between them.
        `state_at` takes the columns apart.
        """
        stages = self.work.stages(stage, chunks)
        try:
            part = self.work.part((split, 1, expert, table, 1))
        except PlanError:
            part = None
        if stages is None or part is None:
            return (0.0,) * (KINDS_OF_STATE * (PLACES + 1) + 2)
        columns, place = self._columns, stages.stage % stage
        state = state_by_place(
            columns, part, stages, stage, update_temporaries(self.best_case.model), half=self.best_case.half
        )
        divided = (columns.expert & (expert > 1)) | (columns.table & (table > 1)) | (columns.sequence & (split > 1))
        divided |= part.linear
        gradients = columns.gradients * part.weight
        fused, fused_experts = (
            self._largest_bucket(np.where(included, gradients, 0.0), place, stage)
            for included in (~divided, columns.expert & (expert > 1))
        )
        largest = np.zeros(stage) if stages.ties else state.largest
        kinds = PlaceState(
            parameters=state.parameters,
            lower=state.lower,
            gradients=state.gradients,
            optimizer=state.optimizer,
            buffers=state.buffers,
            temporary=state.temporary,
            bucket=fused,
            expert_bucket=fused_experts,
            largest=largest,
        )
        found = [value for kind in kinds for value in self._sampled(kind, stage)]
        units = units_of(columns, part)
        return (*found, max(units[1:], default=0.0), units[0])

    def _largest_bucket(self, nbytes: Array, place: NDArray[np.intp], stage: int) -> Array:
        """Return the bytes of the largest bucket into which gradients of `nbytes` by module are fused, (places,)."""
        if not nbytes.any():
            return np.zeros(stage)
        fused = [buckets(nbytes[place == one].tolist(), self._cap_nbytes) for one in range(stage)]
        return np.array([max((bucket.nbytes for bucket in some), default=0.0) for some in fused])

    @staticmethod
    def _sampled(values: Array, stage: int) -> list[float]:
        """Return the values of the sampled places, then the least of all."""
        return [*values[list(sampled_places(stage))].tolist(), float(values.min())]

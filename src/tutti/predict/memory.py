"""Peak memory of a rank, by what holds it."""

from dataclasses import dataclass

import numpy as np

from tutti.predict import constants
from tutti.predict.compute import Array
from tutti.predict.division import Division, division
from tutti.predict.layout import Region
from tutti.predict.overlap import Bucket
from tutti.predict.pipeline import Stages, held
from tutti.predict.sharding import units_of
from tutti.predict.table import Flags, ModelTable, model_table
from tutti.spec.cluster import DeviceKind
from tutti.spec.model import ModelSpec
from tutti.spec.plan import BatchPlan, Plan
from tutti.spec.prediction import RankMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model as a plan divides it. `kept`: see `Kept`."""

    columns: ModelTable
    division: Division
    stages: Stages
    kept: "Kept"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Bytes of one sample by module. `always`: from forward to backward, the inputs of recomputed regions among them;
    `within`: all that a region holds while its own backward runs, noted at its root; `output`: of a gradient.
    """

    always: Array
    within: Array
    output: Array


def kept(columns: ModelTable, part: Division, regions: tuple[Region, ...], *, half: bool) -> Kept:
    """What is kept for backward. Autocast keeps the inputs of matrix products at half their size, approximately all
    such a module keeps. A region that recomputes selectively keeps the outputs of its matrix products."""
    inside = columns.activations * part.work * np.where(columns.multiplies & half, 0.5, 1.0)
    output = columns.outputs * part.work
    always, within = inside.copy(), np.zeros(len(columns))
    for region in regions:
        members = np.array(region.members, dtype=np.intp)
        within[region.root] = inside[members].sum() / region.chunks
        dear = columns.multiplies[members] & region.selective
        always[members] = np.where(dear, output[members] * (0.5 if half else 1.0), 0.0)
        always[region.root] += columns.outputs[region.root] * part.passed[region.root]
    return Kept(always=always, within=within, output=output)


def rank_memory(
    model: Model, plan: Plan, *, samples: list[int], stage: int, fused: tuple[Bucket, ...], kind: DeviceKind
) -> tuple[RankMemory, str]:
    """Peak bytes of a rank at place `stage` of the stage axis, and when it has them, in words.

    `samples`: of each microbatch. Gradients are views of the buckets they are summed in. One more bucket arrives while
    it is filled; with several microbatches, gradients are added up beside the buckets. Peak is taken at the start of
    backward; with stages, where most microbatches are on their way.
    """
    columns, part = model.columns, model.division
    half = plan.precision in ("bfloat16", "float16")
    own = model.stages.stage % plan.degree("stage") == stage
    held_there = own | _tied(model, own)
    parameters = columns.parameters * part.weight * held_there
    gradients = float((columns.gradients * part.weight * held_there).sum())
    optimizer = float((columns.optimizer * part.weight * held_there).sum())
    lower = float((parameters * columns.multiplies).sum()) / 2 if half else 0.0
    activations, when = _activations(model, plan, samples, stage)
    once = len(samples) == 1 and plan.degree("stage") == 1
    beside = max((one.nbytes for one in fused), default=0.0) if once else gradients
    state = _State(
        parameters=float(parameters.sum()),
        lower=lower,
        gradients=gradients,
        optimizer=optimizer,
        communication=beside if fused else 0.0,
    )
    state = _sharded(state, columns, part, plan, len(samples), kind)
    tensors = state.parameters + state.lower + state.gradients + state.optimizer + activations + state.communication
    memory = RankMemory(
        parameters=state.parameters + state.lower,
        gradients=state.gradients,
        optimizer=state.optimizer,
        activations=activations,
        communication=state.communication,
        buffers=float((columns.buffers * held_there).sum()),
        reserve=constants.RESERVE_NBYTES[kind] + constants.FRAGMENTATION[kind] * tensors,
    )
    return memory, when


def _tied(model: Model, own: Flags) -> Flags:
    """Modules whose parameters a tied module among `own` shares: both ranks hold them."""
    result = np.zeros(len(own), dtype=np.bool_)
    for index, owner in model.stages.ties:
        result[owner] |= own[index]
    return result


def _activations(model: Model, plan: Plan, samples: list[int], stage: int) -> tuple[float, str]:
    """Bytes at the peak, and when that is."""
    ranks = plan.degree("stage")
    stages = model.stages
    always: Array = np.bincount(stages.stage, weights=model.kept.always, minlength=stages.count).astype(np.float64)
    mine = stages.stage % ranks == stage
    once = max(samples) * (
        float((model.kept.within * mine).max(initial=0.0)) + float((model.kept.output * mine).max(initial=0.0))
    )
    if ranks == 1:
        return max(samples) * float(always.sum()) + once, "at the start of backward"
    by_microbatch: Array = always[:, None] * np.array(samples, dtype=np.float64)
    nbytes, count = held(plan, by_microbatch, stage)
    return nbytes + once, f"on stage {stage} of {ranks}, where {count} microbatches are held at once"


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    parameters: float
    lower: float
    gradients: float
    optimizer: float
    communication: float


def _sharded(
    state: _State, columns: ModelTable, part: Division, plan: Plan, microbatches: int, kind: DeviceKind
) -> _State:
    """What the shard axis leaves on a rank, and what passes through it (Rajbhandari et al. 2020, arXiv 1910.02054)."""
    d, level = plan.degree("shard"), plan.sharding.level
    if d == 1:
        return state
    away = kind == "cuda" and plan.sharding.offload != "none"
    optimizer = 0.0 if away else state.optimizer / d
    if level == 1:
        gather = 2 * min(constants.STATE_BUCKET_NBYTES, state.parameters)
        return _State(
            parameters=state.parameters,
            lower=state.lower,
            gradients=state.gradients,
            optimizer=optimizer,
            communication=state.communication + gather,
        )
    units = units_of(columns, part)
    block, outside = max(units[1:], default=0.0), units[0]
    # a sum on its way: what is sent, and what comes (its own part; on the host a part from every rank)
    flight = 2.0 if kind == "cpu" else 1 + 1 / d
    passing = constants.SUMS_IN_FLIGHT * flight * block + block + outside
    if level == 3:  # whole at once: what is outside of blocks, the block, the next one and its way into place
        passing += outside + 3 * block
    whole = state.parameters if level == 2 else 0.0
    added = state.gradients if microbatches > 1 else 0.0  # whole ones, until the last microbatch sums them
    rest = 0.0 if away else 1 / d
    return _State(
        parameters=whole + state.parameters * rest,
        lower=state.lower if level == 2 else min(state.lower, block / 2 + outside / 2),
        gradients=added + state.gradients * rest,
        optimizer=optimizer,
        communication=passing,
    )


def activation_nbytes(model: ModelSpec, regions: tuple[Region, ...], *, half: bool) -> float:
    """Bytes of one sample that live at the start of backward on one device.

    What modules keep for backward, plus the largest output's gradient. A recomputed region keeps only its input
    (taken as large as its output) until its own backward, when it holds everything inside it: the largest region
    counts in full.
    """
    columns = model_table(model)
    alone = division(model, Plan(batch=BatchPlan(global_batch_size=1)))
    found = kept(columns, alone, regions, half=half)
    return float(found.always.sum() + found.within.max(initial=0.0) + found.output.max(initial=0.0))

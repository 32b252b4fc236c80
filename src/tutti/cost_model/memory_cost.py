"""Peak memory of a rank, by what holds it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

import tutti.cost_model.compressed_sync_cost as compressed_sync_cost
import tutti.cost_model.cost_constants as cost_constants
import tutti.cost_model.relaxed_sync_cost as relaxed_sync_cost
from tutti.config.cluster import DeviceKind
from tutti.config.model import CachedMemory, ModelSpec
from tutti.config.plan import BatchPlan, Plan
from tutti.config.prediction import RankMemory
from tutti.cost_model.module_costs import Flags, ModelTable, model_table
from tutti.cost_model.offload_cost import buffered_nbytes, moved_nbytes
from tutti.cost_model.overlap import BucketCost
from tutti.cost_model.pipeline_cost import Besides, most_held
from tutti.cost_model.sharding_cost import units_of
from tutti.cost_model.stage_cuts import StageCuts
from tutti.cost_model.work_division import Division, Region, division, marks
from tutti.cost_model.worker_speed import Array

ArrayOrFloat = Array | np.float64 | float
ArrayOrInt = NDArray[np.int64] | int


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Bytes of one sample's activations, by module.

    Attributes:
        always: kept from forward to backward; includes the inputs of recomputed regions.
        within: at the root of each region, all that the region holds while its own backward runs.
        output: bytes of the output's gradient.
        after: for each row of `columns.flow.after`, its part of `always`.
        again: modules that are recomputed.
        transient: bytes beyond the activations of a module and of those before it while it runs; None where only the
            outputs' gradients are known.
    """

    always: Array
    within: Array
    output: Array
    after: Array
    again: Flags
    transient: Array | None = None


def kept(columns: ModelTable, part: Division, regions: tuple[Region, ...], *, half: bool) -> Kept:
    """Return the activations that are kept for backward.

    Where the memory under autocast was not traced, it is assumed to keep the inputs of matrix products at half their
    size, which is nearly all that such a module keeps. A region with selective recompute keeps the outputs of its
    matrix products.
    """
    low = np.where(columns.multiplies & half, 0.5, 1.0)
    copied = np.where(part.linear, columns.linear * part.passed * np.where(part.by_outputs, part.holders, 1.0), 0.0)
    traced = columns.autocast if half else None
    activations, outputs, ratio = columns.activations * low, columns.outputs, low
    if traced is not None:
        activations, outputs = traced[:2]
        ratio = np.divide(activations, columns.activations, out=np.ones_like(low), where=columns.activations > 0)
    inside = activations * part.saved + copied * low
    output = np.maximum(outputs * part.work, _handed(columns, part) * low)
    always, within, again = inside.copy(), np.zeros(len(columns)), np.zeros(len(columns), dtype=np.bool_)
    containers = columns.flow.after[:, 0]
    after = columns.flow.after_nbytes * (part.saved * ratio)[containers]
    if regions:
        marked = marks(regions)
        member, of = marked.member, marked.of
        within[marked.root] = np.bincount(of, weights=inside[member], minlength=len(regions)) / marked.chunks
        expensive = columns.multiplies[member] & marked.selective[of]
        always[member] = np.where(expensive, output[member] * (0.5 if half else 1.0), 0.0)
        always[marked.root] += outputs[marked.root] * part.passed[marked.root]
        again[member] = True
        after = np.where(again[containers], 0.0, after)
    transient = None if traced is None else traced[2] * np.maximum(part.work, part.saved)
    return Kept(always=always, within=within, output=output, after=after, again=again, transient=transient)


def beside(stages: StageCuts, keeps: Kept) -> Array:
    """Return (modules,): bytes of one sample that exist only while a module runs, beyond those kept by its stage.

    What later modules of its stage keep does not exist yet in forward, and no longer in backward.
    """
    if keeps.transient is None:
        return keeps.output
    held = np.maximum(keeps.transient - _gone(stages, keeps.always), 0.0)
    return np.where(keeps.again, keeps.output, held)


def _gone(stages: StageCuts, always: Array) -> Array:
    """Return (modules,): bytes that later modules of the same stage keep."""
    order = np.argsort(stages.stage, kind="stable")
    ends = np.cumsum(np.bincount(stages.stage, weights=always, minlength=stages.count))
    gone = np.empty(len(always))
    gone[order] = ends[stages.stage[order]] - np.cumsum(always[order])
    return gone


def _handed(columns: ModelTable, part: Division) -> Array:
    """Return the bytes of one sample that the backward of a linear layer divided over `table` holds at once.

    These are the gradients of all ranks' rows, as sent and as received: of the layer's inputs, or of its
    outputs.
    """
    exchanged = np.where(part.by_outputs, columns.linear, columns.outputs)
    return np.where(part.linear, 2.0 * part.holders * part.passed * exchanged, 0.0)


def put_off(columns: ModelTable, stages: StageCuts, keeps: Kept) -> Array:
    """Return (stages,): bytes of one sample's output gradients of modules with weights; 0 for the first stage."""
    weights = np.where((columns.parameters > 0) & (stages.stage > 0), keeps.output, 0.0)
    return np.bincount(stages.stage, weights=weights, minlength=stages.count).astype(np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateByPlace:
    """Bytes of a rank's state by place on the stage axis, (places,) each, before the shard axis divides anything.

    Attributes:
        parameters: parameters in their own precision.
        lower: copies of parameters in the lower precision.
        gradients: gradients of all parameters that are trained.
        optimizer: the optimizer's state.
        buffers: buffers of modules.
        largest: gradients of the largest module.
        temporary: temporary tensors of the largest parameter's update.
    """

    parameters: Array
    lower: Array
    gradients: Array
    optimizer: Array
    buffers: Array
    largest: Array
    temporary: Array


def state_by_place(
    columns: ModelTable, part: Division, stages: StageCuts, places: int, temporaries: float, *, half: bool
) -> StateByPlace:
    """Return the state on each of `places` places of the stage axis. Tied parameters are on every place that uses
    them.

    Args:
        temporaries: number of temporary tensors of a parameter's size that its update needs.
        half: whether matrix products are computed in 16 bits.
    """
    place = stages.stage % places
    again = {(int(place[index]), owner) for index, owner in stages.ties}

    def total(nbytes: Array) -> Array:
        sums = np.bincount(place, weights=nbytes, minlength=places).astype(np.float64)
        for where, owner in again:
            sums[where] += nbytes[owner]
        return sums

    parameters, gradients = columns.parameters * part.weight, columns.gradients * part.weight
    largest = _most_by_place(gradients, place, places)
    return StateByPlace(
        parameters=total(parameters),
        lower=total(np.where(columns.multiplies & half, parameters / 2, 0.0)),
        gradients=total(gradients),
        optimizer=total(columns.optimizer * part.weight),
        buffers=total(columns.buffers),
        largest=largest,
        temporary=temporaries * largest,
    )


def _most_by_place(nbytes: Array, place: NDArray[np.intp], places: int) -> Array:
    """Return (places,): the largest of the modules' bytes on each place."""
    result = np.zeros(places)
    np.maximum.at(result, place, nbytes)
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Bytes that ranks hold.

    Attributes:
        state: state by place on the stage axis.
        kept: (stages,), one sample's activations.
        passing: (places,), activations of which only one set exists at a time.
        copying: (places,), the same on a host, where convolutions need more.
        put_off: (stages,), held while weight gradients are delayed (zero bubble).
        sent: (boundaries,), one sample's values between stages.
        fixed: (boundaries,), the part of a message that does not depend on the samples.
        units: see sharding_cost.units_of; empty without a shard axis and offload.
        moved: one sample's activations by module, for each module whose activations the plan keeps on the host.
    """

    state: StateByPlace
    kept: Array
    passing: Array
    copying: Array
    put_off: Array
    sent: Array
    fixed: Array
    units: tuple[float, ...]
    moved: tuple[tuple[float, ...], ...] = ()


def held_by_stage(
    columns: ModelTable,
    part: Division,
    stages: StageCuts,
    keeps: Kept,
    plan: Plan,
    temporaries: float,
    offloaded: Sequence[Sequence[int]] = (),
) -> Held:
    """Return what each place on the stage axis holds.

    Args:
        columns: the model.
        part: how it is divided.
        stages: its stages.
        keeps: one sample's activations.
        plan: the plan.
        temporaries: as in `state_by_place`.
        offloaded: see work_division.offload_regions.
    """
    places = plan.degree("stage")
    place = stages.stage % places
    within = _most_by_place(keeps.within, place, places)
    half = plan.precision in ("bfloat16", "float16")
    copying = convolving(columns, part, stages, keeps, space=plan.degree("space") > 1, half=half)
    return Held(
        state=state_by_place(columns, part, stages, places, temporaries, half=half),
        kept=kept_by_stage(columns, stages, keeps),
        passing=within + _most_by_place(beside(stages, keeps), place, places),
        copying=within + _most_by_place(np.maximum(beside(stages, keeps), copying), place, places),
        put_off=put_off(columns, stages, keeps),
        sent=stages.sent,
        fixed=stages.fixed,
        units=tuple(units_of(columns, part)) if plan.degree("shard") > 1 or plan.sharding.offload != "none" else (),
        moved=tuple(tuple(keeps.always[list(region)].tolist()) for region in offloaded),
    )


def kept_by_stage(columns: ModelTable, stages: StageCuts, keeps: Kept) -> Array:
    """Return (stages,): bytes of one sample kept from forward to backward, copies of other stages' values included.

    What a container's own code keeps is on the stage of the last module that it needed.
    """
    moved, by_stage = stages.stage[columns.flow.after], arrived(columns, stages, keeps)
    by_stage += np.bincount(stages.stage, weights=keeps.always, minlength=stages.count)
    np.subtract.at(by_stage, moved[:, 0], keeps.after)
    np.add.at(by_stage, moved[:, 1], keeps.after)
    return by_stage


def arrived(columns: ModelTable, stages: StageCuts, keeps: Kept) -> Array:
    """Return (stages,): bytes of one sample that came from earlier stages and that no module counts as its own.

    A module that returns what it keeps (an activation) counts it, and the stage after it holds a copy.
    """
    if columns.flow.known:
        return columns.flow.copies(stages.stage, stages.count, ~keeps.again)
    by_stage = np.zeros(stages.count)
    for stage in range(1, stages.count):
        modules = np.flatnonzero((stages.stage == stage) & (columns.outputs > 0))
        if len(modules):
            by_stage[stage] = max(0.0, float(stages.sent[stage - 1] - keeps.always[modules[0]]))
    return by_stage


def convolving(
    columns: ModelTable, part: Division, stages: StageCuts, keeps: Kept, *, space: bool, half: bool
) -> Array:
    """Return the bytes of one sample that a host holds in the backward of each convolution or recurrent layer,
    beyond those kept at the start of backward.

    What later modules of its stage kept is freed by then.

    Args:
        space: whether samples are divided in space.
        half: whether matrix products are computed in 16 bits.
    """
    share = part.work * (0.5 if half else 1.0)
    both = columns.convolved * share
    held = cost_constants.CONVOLUTION_PASSES * both
    if space:
        cut = cost_constants.CUT_CONVOLUTION_PASSES * both + np.maximum(both - columns.outputs * share, 0.0)
        held = np.where(columns.halo.any(axis=1), cut, held)
    held = np.maximum(held, cost_constants.RECURRENT_PASSES * columns.recurred * share)
    if stages.count > 1:  # gradients of inputs and of outputs
        held = np.maximum(held, np.where(columns.multiplies, 1.0, 2.0) * keeps.output)
    return np.maximum(held - _gone(stages, keeps.always), 0.0)


def rank_memory(
    held: Held,
    plan: Plan,
    *,
    samples: list[int],
    stage: int,
    fused: tuple[BucketCost, ...],
    kind: DeviceKind,
    cached: tuple[CachedMemory, ...] = (),
) -> tuple[RankMemory, str]:
    """Return (peak bytes of a rank at place `stage` of the stage axis, when it reaches them).

    Gradients are views of their buckets from the first microbatch on. One more bucket is assumed to be in
    transit while one is filled. The peak is at the start of backward; with stages, where most microbatches are
    in progress. On a host it is in the backward of a convolution or in the optimizer's update, if that is
    higher.

    Args:
        samples: samples of each microbatch.
        fused: the gradient buckets.
        kind: the kind of device.
        cached: what the allocator of one device with the whole model holds, as simulated.
    """
    here, d = held.state, plan.degree("shard")
    gradients = float(here.gradients[stage])
    activations, when = _activations(held, plan, samples, stage, kind)
    state = RankState(
        parameters=here.parameters[stage],
        lower=here.lower[stage],
        gradients=here.gradients[stage],
        optimizer=here.optimizer[stage],
        communication=np.float64(max((bucket.nbytes for bucket in fused), default=0.0)),
    )
    on_disk = float(state.optimizer) / d if plan.sharding.on_disk else 0.0
    state, host = _left_on_device(held, plan, state, kind, accumulates=len(samples) > 1, stage=stage)
    away, still = _moved_activations(held, samples, kind)
    activations, host = activations - away + still, host + away
    at_rest = state
    if plan.degree("stage") > 1 and len(samples) > 1 and not fused:  # new gradients before they are accumulated
        state = replace(state, gradients=state.gradients + here.largest[stage])
    if kind == "cpu":
        update = in_update(at_rest, here.temporary[stage], d)
        if update.total > state.total + activations:
            state, activations, when = update, 0.0, "in the optimizer's update"
    others = plan.data_parallel_degree // d
    parts = compressed_sync_cost.parts_kept_nbytes(
        plan, gradients, others * plan.degree("context") * plan.degree("space")
    )
    diverged = relaxed_sync_cost.diverged_nbytes(plan.sync, plan.degree("replicate"), gradients)
    residuals = sum(bucket.kept_nbytes for bucket in fused)
    memory = RankMemory(
        parameters=float(state.parameters + state.lower),
        gradients=float(state.gradients),
        optimizer=float(state.optimizer),
        activations=activations,
        communication=float(state.communication) + residuals + parts + diverged,
        buffers=float(here.buffers[stage]),
        reserve=cost_constants.RESERVE_NBYTES[kind]
        + fragmentation(cached, max(samples), kind) * (float(state.total) + activations),
        host=host,
        disk=on_disk,
    )
    return memory, when


def fragmentation(cached: tuple[CachedMemory, ...], samples: int, kind: DeviceKind) -> float:
    """Return what the caching allocator holds beyond the tensors, as a fraction of them.

    It is that of the simulated microbatch whose size is nearest, and at least the constant that is assumed without one.
    """
    least = cost_constants.FRAGMENTATION[kind]
    if kind == "cpu" or not cached:
        return least
    nearest = min(cached, key=lambda point: abs(np.log(point.samples / max(samples, 1))))
    return max(least, nearest.reserved_nbytes / nearest.allocated_nbytes - 1.0)


def _moved_activations(held: Held, samples: list[int], kind: DeviceKind) -> tuple[float, float]:
    """Return (bytes of activations that go to the host, what of them is on the device at once)."""
    if kind == "cpu":  # the same memory
        return 0.0, 0.0
    moved = moved_nbytes(held.moved, max(samples))
    return sum(moved), min(sum(moved), cost_constants.SAVED_CALLS * max(moved, default=0.0))


def _activations(held: Held, plan: Plan, samples: list[int], stage: int, kind: DeviceKind) -> tuple[float, str]:
    """Return (bytes of activations at the peak, when that is)."""
    ranks = plan.degree("stage")
    copying = kind == "cpu" and held.copying[stage] > held.passing[stage]
    once = max(samples) * float(held.copying[stage] if copying else held.passing[stage])
    if ranks == 1:
        when = "in a convolution's backward" if copying else "at the start of backward"
        return max(samples) * float(held.kept.sum()) + once, when
    sizes = np.array(samples, dtype=np.float64)
    besides = Besides(put_off=held.put_off[:, None] * sizes, sent=held.sent[:, None] * sizes + held.fixed[:, None])
    nbytes, count = most_held(plan, held.kept[:, None] * sizes, stage, besides)
    return (
        nbytes + once,
        f"on stage {stage} of {ranks}, where {count} microbatch{'es are' if count != 1 else ' is'} held at once",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """Bytes of state on a rank, or (plans,) of them for many plans at once."""

    parameters: ArrayOrFloat
    lower: ArrayOrFloat
    gradients: ArrayOrFloat
    optimizer: ArrayOrFloat
    communication: ArrayOrFloat

    @property
    def total(self) -> ArrayOrFloat:
        return self.parameters + self.lower + self.gradients + self.optimizer + self.communication


def in_update(state: RankState, temporary: ArrayOrFloat, shard: ArrayOrInt) -> RankState:
    """Return the state during the update.

    Temporary tensors count as the optimizer's. The buffers of a shard axis are kept for the next step; others
    are free.
    """
    return replace(
        state,
        lower=np.zeros_like(state.lower),
        optimizer=state.optimizer + temporary / shard,
        communication=np.where(np.asarray(shard) > 1, state.communication, 0.0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSharding:
    """How the shard axis divides state. Each field is one value or (plans,) of them.

    Attributes:
        degree: ranks of the shard axis.
        level: level of sharding; 0: none.
        offloaded: whether the host's memory holds the sharded state; without a shard axis, all of it.
        resident: whether the device keeps a copy of the parameters all the same.
    """

    degree: ArrayOrInt
    level: ArrayOrInt
    offloaded: Flags | bool
    resident: Flags | bool = False


def host_nbytes(state: RankState, plan: Plan, largest: float = 0.0) -> float:
    """Return the bytes of a rank's state in its host's memory: its part of parameters, gradients and optimizer state,
    copies in half precision, and gradients on their way. State in files has buffers there.

    Args:
        state: what each rank would hold without a shard axis and offload.
        plan: a plan with offload.
        largest: gradients of the largest module.
    """
    shard, optimizer = plan.degree("shard"), float(state.optimizer)
    halves = float(state.lower) if plan.world_size == 1 else 0.0
    rest = (float(state.parameters + state.gradients) + halves) / shard
    if not plan.sharding.on_disk:
        return rest + optimizer / shard
    of_largest = largest * optimizer / max(float(state.gradients), 1.0)
    return rest + buffered_nbytes(optimizer / shard, of_largest / shard)


def sharded(
    state: RankState,
    sharding: StateSharding,
    *,
    block: ArrayOrFloat,
    outside: ArrayOrFloat,
    accumulates: Flags | bool,
    on_cpu: bool,
    one_rank: Flags | bool = False,
) -> RankState:
    """Return what the shard axis and offload leave on a device, and what passes through it (Rajbhandari et al. 2020,
    arXiv 1910.02054).

    Args:
        state: what each rank would hold without it.
        sharding: the sharding of one plan or of many plans.
        block: bytes of the largest block's parameters.
        outside: bytes of the parameters outside of blocks.
        accumulates: whether a step has several microbatches. Gradients then stay whole until the last one.
        on_cpu: whether the ranks compute on CPUs.
        one_rank: whether there is a single rank.
    """
    away = np.asarray(sharding.offloaded) & (np.asarray(sharding.degree) == 1)
    divided = _divided_state(state, sharding, block=block, outside=outside, accumulates=accumulates, on_cpu=on_cpu)
    if not away.any():
        return divided
    unsharded = _unsharded_state(
        state, sharding, block=block, outside=outside, accumulates=accumulates, one_rank=one_rank
    )
    return RankState(
        parameters=np.where(away, unsharded.parameters, divided.parameters),
        lower=np.where(away, unsharded.lower, divided.lower),
        gradients=np.where(away, unsharded.gradients, divided.gradients),
        optimizer=np.where(away, unsharded.optimizer, divided.optimizer),
        communication=np.where(away, unsharded.communication, divided.communication),
    )


def _unsharded_state(
    state: RankState,
    sharding: StateSharding,
    *,
    block: ArrayOrFloat,
    outside: ArrayOrFloat,
    accumulates: Flags | bool,
    one_rank: Flags | bool,
) -> RankState:
    """Return what offload without a shard axis leaves on a device; the arguments are those of `sharded`."""
    one_rank, resident = np.asarray(one_rank), np.asarray(sharding.resident)
    half = one_rank & (np.asarray(state.lower) > 0)  # weights that autocast would convert
    copied = np.where(half, state.parameters - state.lower, state.parameters)
    block = np.where(half, 0.5, 1.0) * block
    # gradients of a block while its backward runs, the buffer that they leave in, and those on their way
    leaving = 4 * block + 2 * outside
    gathered = np.where(resident, 0.0, outside + 3 * block)  # the block and the next two
    lower = np.where(resident, state.lower, np.minimum(state.lower, (block + outside) / 2))
    return RankState(
        parameters=np.where(resident, copied, 0.0),
        lower=np.where(half, 0.0, lower),
        gradients=np.where(np.asarray(accumulates) & ~one_rank, state.gradients, 0.0),
        optimizer=np.zeros_like(np.asarray(state.optimizer)),
        communication=leaving + gathered,
    )


def _divided_state(
    state: RankState,
    sharding: StateSharding,
    *,
    block: ArrayOrFloat,
    outside: ArrayOrFloat,
    accumulates: Flags | bool,
    on_cpu: bool,
) -> RankState:
    """Return what the shard axis leaves on a device; the arguments are those of `sharded`."""
    level, shard = np.asarray(sharding.level), np.asarray(sharding.degree, dtype=np.float64)
    rest = np.where(sharding.offloaded, 0.0, 1 / shard)
    parameters = np.where(np.asarray(sharding.offloaded) & ~np.asarray(sharding.resident), 0.0, 1 / shard)
    # a pending reduction: what is sent, and what arrives (the rank's own part; on the host a part from every rank)
    pending = 2.0 if on_cpu else 1 + 1 / shard
    passing = cost_constants.PENDING_SUMS * pending * block + block + outside
    # whole at the same time: parameters outside of blocks, the block, the next block and its gather buffer
    passing = passing + np.where(level == 3, outside + 3 * block, 0.0)
    gathered = np.where(level == 1, 2 * np.minimum(cost_constants.STATE_BUCKET_NBYTES, state.parameters), 0.0)
    kept_whole = np.where(level == 3, parameters, 1.0 + np.where(level == 2, parameters, 0.0))
    return RankState(
        parameters=kept_whole * state.parameters,
        lower=np.where(level == 3, np.minimum(state.lower, (block + outside) / 2), state.lower),
        gradients=np.where(level >= 2, rest + np.asarray(accumulates), 1.0) * state.gradients,
        optimizer=np.where(level >= 1, rest, 1.0) * state.optimizer,
        communication=np.where(level >= 2, passing, state.communication + gathered),
    )


def activation_nbytes(model: ModelSpec, regions: tuple[Region, ...], *, half: bool) -> float:
    """Return the bytes of one sample at the start of backward on one device.

    This is what modules keep for backward, plus the largest output's gradient. A recomputed region keeps only
    its input (assumed as large as its output) until its own backward, when it holds everything inside it. The
    largest region counts in full.
    """
    columns = model_table(model)
    single_device = division(model, Plan(batch=BatchPlan(global_batch_size=1)))
    keeps = kept(columns, single_device, regions, half=half)
    return float(keeps.always.sum() + keeps.within.max(initial=0.0) + keeps.output.max(initial=0.0))


def _left_on_device(
    held: Held, plan: Plan, state: RankState, kind: DeviceKind, *, accumulates: bool, stage: int
) -> tuple[RankState, float]:
    """Return (what sharding and offload leave on the device, bytes in the memory of its host)."""
    d, offloaded, host = plan.degree("shard"), plan.sharding.offload != "none", 0.0
    if offloaded:
        host = host_nbytes(state, plan, float(held.state.largest[stage]))
    if d > 1 or offloaded:
        sharding = StateSharding(
            degree=d,
            level=plan.sharding.level if d > 1 else 0,
            offloaded=offloaded,
            resident=plan.sharding.offload == "optimizer",
        )
        block, outside = max(held.units[1:], default=0.0), held.units[0]
        state = sharded(
            state,
            sharding,
            block=block,
            outside=outside,
            accumulates=accumulates,
            on_cpu=kind == "cpu",
            one_rank=plan.world_size == 1,
        )
    if offloaded and kind == "cpu":  # the same memory
        state, host = replace(state, optimizer=state.optimizer + host), 0.0
    return state, host

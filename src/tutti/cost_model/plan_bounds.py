"""Lower bounds of predictions, and estimates by which plans are ordered, for many plans at once.

A bound counts what every plan must do: its share of the model's arithmetic and memory traffic at the best rate of any
device, the pipeline's unavoidable filling, the gradients' transfer over the fastest link, the state that must be
stored somewhere. An estimate adds the other communication and is often within a third of the prediction. It decides
only the order.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tutti.cost_model.best_case import BestCase, uneven
from tutti.cost_model.best_case_memory import PLACES, STATES, BestCaseMemory
from tutti.cost_model.loading_time import loader_s
from tutti.cost_model.memory_cost import RankState, StateSharding, in_update, sharded
from tutti.cost_model.plan_table import SCHEDULES, Array, Flags, Ints, MeshTable, Variants, by_kind
from tutti.cost_model.rank_placement import ring_sent_nbytes
from tutti.cost_model.sharding_cost import gathered_nbytes

_ZERO_BUBBLE = SCHEDULES.index("zero-bubble")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Bounds of many plans, (plans,) each.

    Attributes:
        step_s: least seconds of a step.
        memory: least bytes on the fullest rank.
        least_memory: least bytes on any rank.
        likely_s: probable seconds of a step.
    """

    step_s: Array
    memory: Array
    least_memory: Array
    likely_s: Array


def least_samples(shapes: MeshTable, samples: int) -> Ints:
    """Return the least number of samples in every microbatch of the rank that has most, for any shares.

    A rank without samples computes one all the same.
    """
    slices = samples // shapes.microbatches
    return np.asarray(np.maximum(1, -(-slices // shapes.data)), dtype=np.int64)


def whole_slices(shapes: MeshTable, samples: int) -> tuple[Ints, Array]:
    """Return (samples of a microbatch, the mean data-parallel rank's fraction of it), for unequal shares.

    No rank has more than the whole microbatch, and none needs less time per sample than it would for the whole.
    """
    slices = -(-samples // shapes.microbatches)
    part = samples / (shapes.microbatches * shapes.data * slices)
    return np.asarray(slices, dtype=np.int64), np.asarray(part, dtype=np.float64)


def shape_bounds(best_case: BestCase, shapes: MeshTable, samples: int, *, offload: bool = False) -> tuple[Array, Array]:
    """Return lower bounds (seconds, bytes) of every plan on each mesh; `offload`: state lies in the host's memory."""
    best, speed, _ = by_kind((shapes.world,), best_case.facts)

    def both(count: Ints) -> Array:
        return np.asarray(sum(by_kind((count, best.astype(np.int64)), best_case.seconds)), dtype=np.float64)

    if best_case.mixed:  # the rank that has most may be the best, and others have less
        slices, part = whole_slices(shapes, samples)
        each = np.maximum(both(least_samples(shapes, samples)), part * both(slices) / speed)
    else:
        each = both(least_samples(shapes, samples)) / speed
    seconds = shapes.microbatches * each / (shapes.split * shapes.context * shapes.space * shapes.stage)
    parameters, gradients, optimizer, _ = by_kind((shapes.split, shapes.expert, shapes.table), best_case.state)
    # with stages, parameters and gradients stay whole
    whole = np.where(shapes.stage > 1, 1, shapes.copies)
    memory = ((parameters + gradients) / whole + optimizer / shapes.copies) / shapes.stage
    return np.asarray(seconds, dtype=np.float64), np.asarray(memory * (not offload), dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the plans on a mesh have in common, (meshes,) each. Bytes are those of a rank that has all stages.

    Attributes:
        count: least samples of a microbatch on the rank that has most.
        best: index of the best worker.
        speed: the ranks' mean speed relative to the best worker.
        hosts: number of hosts.
        parameters: bytes of parameters.
        gradients: bytes of gradients.
        optimizer: bytes of optimizer state.
        outside: bytes of parameters outside of blocks, or tied.
    """

    count: Array
    best: Array
    speed: Array
    hosts: Array
    parameters: Array
    gradients: Array
    optimizer: Array
    outside: Array

    def take(self, rows: NDArray[np.intp]) -> "Facts":
        return Facts(**{field.name: getattr(self, field.name)[rows] for field in dataclasses.fields(self)})


def _facts(best_case: BestCase, rows: MeshTable, samples: int) -> Facts:
    best, speed, hosts = by_kind((rows.world,), best_case.facts)
    columns = by_kind((rows.split, rows.expert, rows.table), best_case.state)
    return Facts(
        count=least_samples(rows, samples).astype(np.float64),
        best=best,
        speed=speed,
        hosts=hosts,
        parameters=columns[0],
        gradients=columns[1],
        optimizer=columns[2],
        outside=columns[3],
    )


@np.errstate(invalid="ignore")  # meshes that divide nothing take for ever: inf - inf
def variant_bounds(best_memory: BestCaseMemory, found: MeshTable, variant_rows: Variants, samples: int) -> Bounds:
    """Return bounds and estimates of the plans `variant_rows` on the meshes `found`."""
    meshes, place = np.unique(variant_rows.shape, return_inverse=True)
    where = place.reshape(-1)
    each = found.take(meshes)  # what depends on the mesh alone is worked out once for all its variants
    rows, facts = each.take(where), _facts(best_memory.best_case, each, samples).take(where)
    least, likely = _with_data(
        best_memory.best_case, rows, facts, samples, *_seconds(best_memory, rows, variant_rows, facts, samples)
    )
    fullest, emptiest = _memory(best_memory, rows, variant_rows, facts)
    if best_memory.best_case.mixed:  # a rank may have fewer samples than the mean one has
        fewest = np.maximum(1, samples // rows.microbatches // rows.data)
        emptiest = _memory(best_memory, rows, variant_rows, dataclasses.replace(facts, count=fewest))[1]
        # and any part of what split divides
        emptiest = np.where(_uneven(best_memory.best_case, rows) > 0, best_memory.reserve, emptiest)
    return Bounds(step_s=least, memory=fullest, least_memory=emptiest, likely_s=likely)


def _memory(best_memory: BestCaseMemory, rows: MeshTable, variant_rows: Variants, facts: Facts) -> tuple[Array, Array]:
    """Return (bytes on the fullest of the sampled places, bytes that every place has at least)."""
    inner = (rows.split, rows.context, rows.expert, rows.table, rows.space, facts.count.astype(np.int64))
    active = by_kind(
        (*inner, rows.stage, variant_rows.chunks, rows.microbatches, variant_rows.schedule, variant_rows.recompute),
                     best_memory.activations)  # fmt: skip
    columns = by_kind((rows.split, rows.expert, rows.table, rows.stage, variant_rows.chunks), best_memory.state)
    block, outside = columns[-2:]
    sharding = StateSharding(degree=variant_rows.shard, level=variant_rows.level, offloaded=variant_rows.offload > 0)
    reduces = rows.data * rows.context * rows.space > 1
    reduces_experts = rows.copies * rows.table * rows.context * rows.space > 1
    single_device = ~reduces & ~reduces_experts & (rows.split == 1) & (rows.stage > 1) & (rows.microbatches > 1)
    by_place = []
    for place, activations in enumerate(active):
        parameters, lower, gradients, optimizer, buffers, temporary, bucket, expert_bucket, largest = columns[
            place :: PLACES + 1
        ][:STATES]
        bucket_nbytes = np.maximum(np.where(reduces, bucket, 0.0), np.where(reduces_experts, expert_bucket, 0.0))
        state = sharded(
            RankState(
                parameters=parameters,
                lower=lower,
                gradients=gradients,
                optimizer=optimizer,
                communication=bucket_nbytes,
            ),
            sharding,
            block=block,
            outside=outside,
            accumulates=rows.microbatches > 1,
            on_cpu=best_memory.on_cpu,
        )
        peak = state.total + activations + np.where(single_device, largest, 0.0)
        if best_memory.on_cpu:
            peak = np.maximum(peak, in_update(state, temporary, variant_rows.shard).total)
        by_place.append(peak * (1 + best_memory.fragments) + buffers + best_memory.reserve)
    return np.max(by_place[:PLACES], axis=0), np.asarray(by_place[PLACES], dtype=np.float64)


def _seconds(
    best_memory: BestCaseMemory, rows: MeshTable, variant_rows: Variants, facts: Facts, samples: int
) -> tuple[Array, Array]:
    """Return least and probable seconds of a step.

    Passes follow one another. Gradient reduction overlaps the last microbatch's backward, and the excess is waited for.
    Level 3 gathers parameters while the passes run, level 1 gathers updated ones. A rank updates its part of the
    optimizer state.
    """
    kind = (variant_rows.schedule == _ZERO_BUBBLE).astype(np.int64)
    count, best = facts.count.astype(np.int64), facts.best.astype(np.int64)
    inner = (rows.split, rows.context, rows.expert, rows.table, rows.space, count, best)
    best_case, each = best_memory.best_case, best_memory.best_case.per_node
    across_hosts = ((rows.stage > 1) & (rows.world // rows.stage % each == 0) & (not best_case.unequal)).astype(
        np.int64
    )
    outer = (rows.stage, variant_rows.chunks, rows.microbatches, across_hosts, kind, variant_rows.recompute)
    least, path, likely, mean, ahead, back, summed, update = by_kind((*inner, *outer), best_memory.work.step)
    update = update / np.where(variant_rows.level > 0, variant_rows.shard, 1)
    sums, gathers, probable = _exchanged(best_case, rows, variant_rows, facts)
    third, times = variant_rows.level == 3, rows.microbatches.astype(np.float64)
    call = _latency(best_case, facts, variant_rows.shard)
    calls = best_memory.blocks * call
    ahead_s = np.where(third, gathers * facts.parameters + calls, 0.0)
    back_s = np.where(third, gathers * (facts.parameters - facts.outside) + calls, 0.0)
    last_s = back_s + sums * summed + np.where(variant_rows.level >= 2, calls, 0.0)
    waits = times * np.maximum(0.0, ahead_s - ahead) + (times - 1) * np.maximum(0.0, back_s - back)
    waits = waits + np.maximum(0.0, last_s - back) + _statistics(best_case, rows, facts)
    gathered = np.where(variant_rows.level == 1, gathers * summed + call, 0.0)
    bound = np.maximum(least + waits + gathered + update, path)
    # Where ranks differ, the slowest may be one that waits for nothing: only the mean of the work is sure.
    bound = np.where(facts.speed < 1, mean / facts.speed, bound)
    if best_case.mixed:
        slices, part = whole_slices(rows, samples)
        whole = by_kind((*inner[:5], slices, best, *outer), best_memory.work.step)
        slack = part * _slack(best_memory, rows, variant_rows, (*inner[:5], slices, best))
        most = mean - _slack(best_memory, rows, variant_rows, inner)
        bound = _however_cut(best_case, rows, (variant_rows.chunks == 1) & (kind == 0), most, part * whole[3] - slack)
        likely = np.maximum(likely * facts.speed, part * whole[2])
    passing = np.maximum(0.0, probable[0] - 0.8 * back) + np.maximum(0.0, probable[1] - 0.8 * likely) + gathered
    return (
        np.asarray(bound, dtype=np.float64),
        np.maximum(bound, (likely + update) / facts.speed + passing),
    )


def _with_data(
    best_case: BestCase, rows: MeshTable, facts: Facts, samples: int, least: Array, likely: Array
) -> tuple[Array, Array]:
    """Return a step's bound and estimate with the time of the loaders, for the rank with most samples.

    Where ranks differ, that rank may not be the slowest otherwise.
    """
    loading = best_case.model.loading
    if loading is None:
        return least, likely
    shared = np.maximum(facts.count * rows.microbatches, -(-samples // rows.data))  # microbatches may be unequal
    own = np.full(len(least), float(samples)) if loading.stream else shared
    own_s = own * loader_s(loading) / (max(1, loading.workers) * (rows.space if loading.parts else 1))
    if loading.workers:
        return np.maximum(least, own_s), np.maximum(likely, own_s)
    alike = (facts.speed >= 1) & (not best_case.mixed)
    return np.where(alike, least + own_s, np.maximum(least, own_s)), likely + own_s


def _however_cut(best_case: BestCase, rows: MeshTable, plain: Flags, most: Array, mean: Array) -> Array:
    """Return the least seconds of a step whose shares, parts and cuts are by speed.

    Args:
        best_case: the model on the best devices.
        rows: the meshes.
        plain: whether the schedule fills and drains whole stages.
        most: mean work over the places of the pipeline replica with most samples, which may have the best devices.
        mean: mean work over all pipeline replicas.
    """
    count = np.where((rows.stage > 1) & plain, rows.microbatches, 0)
    (relative_speed,) = by_kind(
        (rows.world, rows.stage, rows.context * rows.space, rows.split, count), best_case.relative_speed
    )
    times = np.maximum(count, 1)
    best = np.where(count > 0, (1 - (1 - 1 / times) ** rows.stage) * times / rows.stage, 1.0)
    return np.asarray(np.maximum(mean / relative_speed, most / best), dtype=np.float64)


def _links(best_case: BestCase, facts: Facts) -> tuple[Array, ...]:
    """Return `BestCase.links_of` for each row."""
    return by_kind((facts.best.astype(np.int64),), best_case.links_of)


def _slack(best_memory: BestCaseMemory, rows: MeshTable, variant_rows: Variants, inner: tuple[Ints, ...]) -> Array:
    """Return the most that unequal parts along split may save of a step's work, as a mean over places."""
    ahead, back = by_kind(inner, best_memory.work.slack)
    often = np.where(variant_rows.recompute > 0, 2.0, 1.0)
    return np.asarray(
        _uneven(best_memory.best_case, rows) * rows.microbatches * (often * ahead + back) / rows.stage, dtype=np.float64
    )


def _uneven(best_case: BestCase, rows: MeshTable) -> Array:
    """Return 1 where parts along split may be unequal."""
    return by_kind((rows.world, rows.split), partial(uneven, best_case))[0]


def _latency(best_case: BestCase, facts: Facts, ranks: Ints) -> Array:
    """Return the least seconds of a gather from this many ranks, however small.

    The gather is one ring, or rings within hosts and between them.
    """
    hosts, (_, _, between, least) = -(-ranks // best_case.per_node), _links(best_case, facts)
    return np.where(ranks > 1, np.maximum(np.log2(ranks) * least, (hosts - 1) * between), 0.0)


def _statistics(best_case: BestCase, rows: MeshTable, facts: Facts) -> Array:
    """Return the least seconds of the communication of modules that normalise over the batch.

    Each microbatch has a gather in forward and a reduction in backward, both fully exposed.
    """
    modules = sum(module.batch_statistics for module in best_case.model.modules)
    ranks = rows.data * rows.space
    each = _latency(best_case, facts, ranks) + 2 * np.log2(ranks) * _links(best_case, facts)[3]
    return np.where(rows.stage == 1, rows.microbatches * modules * each, 0.0)


def _exchanged(
    best_case: BestCase, rows: MeshTable, variant_rows: Variants, facts: Facts
) -> tuple[Array, Array, tuple[Array, Array]]:
    """Return seconds of communication along the data-parallel axes, least and probable.

    Levels 2 and 3 reduce-scatter over shard, then reduce the parts over the other copies.

    Returns:
        Least seconds per byte of gradient reduction; least seconds per byte of gathering over shard; and the probable
            seconds of (the reductions, the gathers of level 3).
    """
    stages = rows.stage.astype(np.float64)
    split, shard = rows.split.astype(np.float64), variant_rows.shard.astype(np.float64)
    inner = (rows.table * rows.expert * rows.context * rows.space).astype(np.float64)
    everyone = rows.copies * inner
    whole = _ring(best_case, rows, facts, everyone, split)
    parts = _ring(best_case, rows, facts, shard, split * inner)
    others = everyone / shard
    quickest = np.maximum(*_links(best_case, facts)[:2])
    fastest = np.where(others > 1, ring_sent_nbytes(1 / quickest, others), 0.0)
    divided = variant_rows.level >= 2
    low = np.where(divided, parts[0] / 2 + fastest / shard, whole[0])
    sums = np.where(divided, parts[1] / 2 + whole[1] / shard, whole[1]) * facts.gradients / stages
    gathered = np.where(
        variant_rows.level == 3,
        gathered_nbytes(facts.parameters, facts.outside, rows.microbatches.astype(np.float64)) / stages,
        0.0,
    )
    return low, parts[0] / 2, (sums, parts[1] / 2 * gathered)


def _ring(best_case: BestCase, rows: MeshTable, facts: Facts, degree: Array, inside: Array) -> tuple[Array, Array]:
    """Return least and probable seconds per byte of an all-reduce over `degree` ranks.

    Whatever the algorithm, a host's connection carries 2 (h - 1) / h of the reduced bytes among h hosts, for each group
    that crosses it. Groups too wide for a host all cross, one for each of the `inside` ranks in the axes within. Where
    some may not cross, or hosts are unequal, only the fastest link counts.
    """
    (node, network, *_), each = _links(best_case, facts), best_case.per_node
    reach = np.minimum(rows.world, each).astype(np.float64)
    within = (degree * inside <= reach) & (each % np.maximum(degree * inside, 1) == 0) | (facts.hosts <= 1)
    members = np.clip(reach / inside, 1.0, degree)
    sharing_groups = np.maximum(1.0, reach / members)
    spanned = np.maximum(2.0, degree / members)
    across = ring_sent_nbytes(sharing_groups / network, spanned)
    wide = ((degree - 1) * inside >= each) & (not best_case.unequal)
    hosts = np.maximum(2.0, np.minimum(np.ceil(degree / np.ceil(each / inside)), facts.hosts))  # more ranks than cores
    crossing = ring_sent_nbytes(np.minimum(inside, each) / network, hosts)
    plain = ring_sent_nbytes(np.ones(len(rows)), degree)
    least = np.where(within, plain / node, np.where(wide, crossing, plain / np.maximum(node, network)))
    likely = np.where(within, plain / node, across)
    return np.where(degree > 1, least, 0.0), np.where(degree > 1, likely, 0.0)

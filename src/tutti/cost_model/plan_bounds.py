"""Lower bounds of predictions, and estimates by which plans are ordered, for many plans at once.

A bound counts what every plan must do: its share of the model's arithmetic and memory traffic at the best rate of any
device, the pipeline's unavoidable filling, the gradients' transfer over the fastest link, the state that must be
stored somewhere. An estimate adds the other communication and is often within a third of the prediction. It decides
only the order.

`shape_bounds` bounds all plans of a mesh (its "shape") at once, so that most meshes need not be taken apart.
`variant_bounds` bounds single plans.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tutti.cost_model.best_case import BestCase, uneven
from tutti.cost_model.best_case_memory import PLACES, BestCaseMemory, state_at
from tutti.cost_model.best_case_work import StepWork
from tutti.cost_model.loading_time import loader_s
from tutti.cost_model.memory_cost import RankState, StateSharding, in_update, sharded
from tutti.cost_model.plan_table import RESIDENT, SCHEDULES, Array, Flags, Ints, MeshTable, Variants, by_kind
from tutti.cost_model.rank_placement import ring_sent_nbytes
from tutti.cost_model.sharding_cost import gathered_nbytes

_ZERO_BUBBLE = SCHEDULES.index("zero-bubble")


_OVERLAP = 0.8
"""Fraction of a pass that is taken to hide communication in estimates; a guess that only orders plans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Bounds and estimates of many plans, (plans,) each.

    Attributes:
        step_s: least seconds of a step.
        estimated_s: estimated seconds of a step.
        fullest_nbytes: least bytes on the fullest rank.
        emptiest_nbytes: least bytes on the emptiest rank.
    """

    step_s: Array
    estimated_s: Array
    fullest_nbytes: Array
    emptiest_nbytes: Array


def least_microbatch(meshes: MeshTable, samples: int) -> Ints:
    """Return the least samples in every microbatch of the rank that has most, for any shares.

    A rank without samples still computes one.
    """
    whole = samples // meshes.microbatches
    return np.asarray(np.maximum(1, -(-whole // meshes.data)), dtype=np.int64)


def whole_microbatch(meshes: MeshTable, samples: int) -> tuple[Ints, Array]:
    """Return (samples of a microbatch over all ranks, the mean data-parallel rank's fraction of them).

    They bound plans with unequal shares: a rank has at most the whole microbatch, and larger microbatches take no more
    time per sample.
    """
    whole = -(-samples // meshes.microbatches)
    fraction = samples / (meshes.microbatches * meshes.data * whole)
    return np.asarray(whole, dtype=np.int64), np.asarray(fraction, dtype=np.float64)


def shape_bounds(best_case: BestCase, meshes: MeshTable, samples: int, *, offload: bool = False) -> tuple[Array, Array]:
    """Return lower bounds (seconds, bytes) of every plan on each mesh; `offload`: state lies in the host's memory."""
    best_worker, speed, _ = by_kind((meshes.world,), best_case.facts)

    def microbatch_s(count: Ints) -> Array:
        """Return forward and backward of so many samples on the best worker."""
        return np.asarray(sum(by_kind((count, best_worker.astype(np.int64)), best_case.seconds)), dtype=np.float64)

    least_s = microbatch_s(least_microbatch(meshes, samples))
    if best_case.mixed:  # the rank that has most may be the best, and others have less
        whole, fraction = whole_microbatch(meshes, samples)
        each_s = np.maximum(least_s, fraction * microbatch_s(whole) / speed)
    else:
        each_s = least_s / speed
    seconds = meshes.microbatches * each_s / (meshes.split * meshes.context * meshes.space * meshes.stage)
    parameters, gradients, optimizer, _ = by_kind((meshes.split, meshes.expert, meshes.table), best_case.state)
    # with stages, parameters and gradients stay whole
    shards = np.where(meshes.stage > 1, 1, meshes.copies)
    nbytes = ((parameters + gradients) / shards + optimizer / meshes.copies) / meshes.stage
    return np.asarray(seconds, dtype=np.float64), np.asarray(nbytes * (not offload), dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshFacts:
    """What all plans on a mesh have in common, by mesh or by plan. Bytes are those of a rank that has all stages.

    Attributes:
        count: samples of a microbatch on a rank.
        best_worker: index of the best worker.
        speed: the ranks' mean speed relative to the best worker.
        hosts: number of hosts.
        parameters: bytes of parameters.
        gradients: bytes of gradients.
        optimizer: bytes of optimizer state.
        outside_blocks: bytes of parameters outside of blocks, or tied.
    """

    count: Array
    best_worker: Array
    speed: Array
    hosts: Array
    parameters: Array
    gradients: Array
    optimizer: Array
    outside_blocks: Array

    def take(self, rows: NDArray[np.intp]) -> "MeshFacts":
        return MeshFacts(**{field.name: getattr(self, field.name)[rows] for field in dataclasses.fields(self)})


def _mesh_facts(best_case: BestCase, meshes: MeshTable, samples: int) -> MeshFacts:
    best_worker, speed, hosts = by_kind((meshes.world,), best_case.facts)
    columns = by_kind((meshes.split, meshes.expert, meshes.table), best_case.state)
    return MeshFacts(
        count=least_microbatch(meshes, samples).astype(np.float64),
        best_worker=best_worker,
        speed=speed,
        hosts=hosts,
        parameters=columns[0],
        gradients=columns[1],
        optimizer=columns[2],
        outside_blocks=columns[3],
    )


@np.errstate(invalid="ignore")  # impossible meshes cost inf, and inf - inf is NaN
def variant_bounds(best_memory: BestCaseMemory, meshes: MeshTable, variants: Variants, samples: int) -> Bounds:
    """Return bounds and estimates of the plans `variants` on `meshes`."""
    used, inverse = np.unique(variants.shape, return_inverse=True)
    of_plan = inverse.reshape(-1)
    different = meshes.take(used)  # what depends on the mesh alone is computed once for all its plans
    best_case, rows = best_memory.best_case, different.take(of_plan)
    facts = _mesh_facts(best_case, different, samples).take(of_plan)
    passes = _seconds(best_memory, rows, variants, facts, samples)
    least_s, estimated_s = _with_loading(best_case, rows, facts, samples, *passes)
    fullest, emptiest = _memory(best_memory, rows, variants, facts)
    if best_case.mixed:
        # a rank may have fewer samples than the mean one; with split, it may hold an arbitrarily small part
        fewest = np.maximum(1, samples // rows.microbatches // rows.data)
        emptiest = _memory(best_memory, rows, variants, dataclasses.replace(facts, count=fewest))[1]
        emptiest = np.where(_uneven(best_case, rows) > 0, best_memory.reserve, emptiest)
    return Bounds(step_s=least_s, estimated_s=estimated_s, fullest_nbytes=fullest, emptiest_nbytes=emptiest)


def _memory(
    best_memory: BestCaseMemory, meshes: MeshTable, variants: Variants, facts: MeshFacts
) -> tuple[Array, Array]:
    """Return (bytes on the fullest of the sampled places, bytes that every place has at least)."""
    inner = (meshes.split, meshes.context, meshes.expert, meshes.table, meshes.space, facts.count.astype(np.int64))
    pipeline = (meshes.stage, variants.chunks, meshes.microbatches, variants.schedule, variants.recompute)
    active = by_kind((*inner, *pipeline), best_memory.activations)
    columns = by_kind((meshes.split, meshes.expert, meshes.table, meshes.stage, variants.chunks), best_memory.state)
    block, outside_blocks = columns[-2:]
    sharding = StateSharding(
        degree=variants.shard,
        level=variants.level,
        offloaded=variants.offload > 0,
        resident=np.isin(variants.offload, RESIDENT),
    )
    reduces = meshes.data * meshes.context * meshes.space > 1
    reduces_experts = meshes.copies * meshes.table * meshes.context * meshes.space > 1
    reduces_nothing = ~reduces & ~reduces_experts & (meshes.split == 1)
    accumulates_beside = reduces_nothing & (meshes.stage > 1) & (meshes.microbatches > 1)
    by_place = []
    for place, activations in enumerate(active):  # the sampled places, then the least of every column
        held = state_at(columns, place)
        in_transit = np.maximum(np.where(reduces, held.bucket, 0.0), np.where(reduces_experts, held.expert_bucket, 0.0))
        state = sharded(
            RankState(
                parameters=held.parameters,
                lower=held.lower,
                gradients=held.gradients,
                optimizer=held.optimizer,
                communication=in_transit,
            ),
            sharding,
            block=block,
            outside=outside_blocks,
            accumulates=meshes.microbatches > 1,
            on_cpu=best_memory.on_cpu,
            one_rank=meshes.world == 1,
        )
        peak = state.total + activations + np.where(accumulates_beside, held.largest, 0.0)
        if best_memory.on_cpu:
            peak = np.maximum(peak, in_update(state, held.temporary, variants.shard).total)
        by_place.append(peak * (1 + best_memory.fragments) + held.buffers + best_memory.reserve)
    return np.max(by_place[:PLACES], axis=0), np.asarray(by_place[PLACES], dtype=np.float64)


def _seconds(
    best_memory: BestCaseMemory, meshes: MeshTable, variants: Variants, facts: MeshFacts, samples: int
) -> tuple[Array, Array]:
    """Return least and estimated seconds of a step.

    Passes follow one another. Gradient reduction overlaps the last microbatch's backward, and the excess is waited for.
    Level 3 gathers parameters while the passes run, level 1 gathers updated ones. A rank updates its part of the
    optimizer state.
    """
    zero_bubble = (variants.schedule == _ZERO_BUBBLE).astype(np.int64)  # index into KINDS of best_case_work
    count, best_worker = facts.count.astype(np.int64), facts.best_worker.astype(np.int64)
    inner = (meshes.split, meshes.context, meshes.expert, meshes.table, meshes.space)
    best_case, per_node = best_memory.best_case, best_memory.best_case.per_node
    whole_hosts = (meshes.stage > 1) & (meshes.world // meshes.stage % per_node == 0) & (not best_case.unequal)
    across_hosts = whole_hosts.astype(np.int64)
    outer = (meshes.stage, variants.chunks, meshes.microbatches, across_hosts, zero_bubble, variants.recompute)
    work = StepWork(*by_kind((*inner, count, best_worker, *outer), best_memory.work.step))
    update_s = work.update_s / np.where(variants.level > 0, variants.shard, 1)
    exchange = _exchanged(best_case, meshes, variants, facts)
    latency_s = _latency(best_case, facts, variants.shard)
    waits_s = _waits(best_memory, meshes, variants, facts, work, exchange, best_memory.blocks * latency_s)
    waits_s = waits_s + _batch_statistics_s(best_case, meshes, facts)
    gather_updated_s = np.where(variants.level == 1, exchange.gather_s_per_byte * work.reduced_nbytes + latency_s, 0.0)
    bound_s = np.maximum(work.least_s + waits_s + gather_updated_s + update_s, work.path_s)
    # Where ranks differ in speed, the slowest rank may never wait, so waits are not counted: a step only lasts at
    # least the mean work at the mean speed.
    bound_s = np.where(facts.speed < 1, work.mean_s / facts.speed, bound_s)
    estimated_s = work.estimated_s
    if best_case.mixed:
        whole, fraction = whole_microbatch(meshes, samples)
        of_whole = StepWork(*by_kind((*inner, whole, best_worker, *outer), best_memory.work.step))
        slack_s = fraction * _slack(best_memory, meshes, variants, (*inner, whole, best_worker))
        most_s = work.mean_s - _slack(best_memory, meshes, variants, (*inner, count, best_worker))
        fills = (variants.chunks == 1) & (zero_bubble == 0)
        bound_s = _speed_proportional_bound(best_case, meshes, fills, most_s, fraction * of_whole.mean_s - slack_s)
        estimated_s = np.maximum(estimated_s * facts.speed, fraction * of_whole.estimated_s)
    exposed_s = np.maximum(0.0, exchange.reductions_s - _OVERLAP * work.backward_s)
    exposed_s = exposed_s + np.maximum(0.0, exchange.gathers_s - _OVERLAP * estimated_s) + gather_updated_s
    return (
        np.asarray(bound_s, dtype=np.float64),
        np.maximum(bound_s, (estimated_s + update_s) / facts.speed + exposed_s),
    )


def _waits(
    best_memory: BestCaseMemory,
    meshes: MeshTable,
    variants: Variants,
    facts: MeshFacts,
    work: StepWork,
    exchange: "_Exchange",
    latencies_s: Array,
) -> Array:
    """Return the least seconds of a step in which a rank waits for gathers of parameters and for gradients.

    `latencies_s` is the latency of a gather, for all blocks of the model.
    """
    gathers_parameters, times = variants.level == 3, meshes.microbatches.astype(np.float64)
    in_backward = facts.parameters - facts.outside_blocks
    forward_s = np.where(gathers_parameters, exchange.gather_s_per_byte * facts.parameters + latencies_s, 0.0)
    backward_s = np.where(gathers_parameters, exchange.gather_s_per_byte * in_backward + latencies_s, 0.0)
    last_s = backward_s + exchange.reduce_s_per_byte * work.reduced_nbytes
    last_s = last_s + np.where(variants.level >= 2, latencies_s, 0.0)
    waits_s = times * np.maximum(0.0, forward_s - work.forward_s)
    waits_s = waits_s + (times - 1) * np.maximum(0.0, backward_s - work.backward_s)
    return np.asarray(waits_s + np.maximum(0.0, last_s - work.backward_s), dtype=np.float64)


def _with_loading(
    best_case: BestCase, meshes: MeshTable, facts: MeshFacts, samples: int, least_s: Array, estimated_s: Array
) -> tuple[Array, Array]:
    """Return a step's bound and estimate with the time of the loaders, for the rank with most samples.

    Where ranks differ, that rank may not be the slowest otherwise.
    """
    loading = best_case.model.loading
    if loading is None:
        return least_s, estimated_s
    shared = np.maximum(facts.count * meshes.microbatches, -(-samples // meshes.data))  # microbatches may be unequal
    loaded = np.full(len(least_s), float(samples)) if loading.stream else shared
    loading_s = loaded * loader_s(loading) / (max(1, loading.workers) * (meshes.space if loading.parts else 1))
    if loading.workers:
        return np.maximum(least_s, loading_s), np.maximum(estimated_s, loading_s)
    alike = (facts.speed >= 1) & (not best_case.mixed)
    return np.where(alike, least_s + loading_s, np.maximum(least_s, loading_s)), estimated_s + loading_s


def _speed_proportional_bound(
    best_case: BestCase, meshes: MeshTable, fills: Flags, most_s: Array, mean_s: Array
) -> Array:
    """Return the least seconds of a step whose shares, split parts and stage cuts are proportional to device speed.

    Args:
        best_case: the model on the best devices.
        meshes: the mesh of each plan.
        fills: whether the schedule fills and drains whole stages.
        most_s: mean work over the places of the pipeline replica with most samples, which may have the best devices.
        mean_s: mean work over all pipeline replicas.
    """
    count = np.where((meshes.stage > 1) & fills, meshes.microbatches, 0)
    (relative_speed,) = by_kind(
        (meshes.world, meshes.stage, meshes.context * meshes.space, meshes.split, count), best_case.relative_speed
    )
    times = np.maximum(count, 1)
    best_speed = np.where(count > 0, (1 - (1 - 1 / times) ** meshes.stage) * times / meshes.stage, 1.0)
    return np.asarray(np.maximum(mean_s / relative_speed, most_s / best_speed), dtype=np.float64)


def _links(best_case: BestCase, facts: MeshFacts) -> tuple[Array, ...]:
    """Return `BestCase.links_of` for each row."""
    return by_kind((facts.best_worker.astype(np.int64),), best_case.links_of)


def _slack(best_memory: BestCaseMemory, meshes: MeshTable, variants: Variants, inner: tuple[Ints, ...]) -> Array:
    """Return the most that unequal parts along split may save of a step's work, as a mean over places."""
    forward_s, backward_s = by_kind(inner, best_memory.work.slack)
    forwards = np.where(variants.recompute > 0, 2.0, 1.0)
    saved_s = meshes.microbatches * (forwards * forward_s + backward_s) / meshes.stage
    return np.asarray(_uneven(best_memory.best_case, meshes) * saved_s, dtype=np.float64)


def _uneven(best_case: BestCase, meshes: MeshTable) -> Array:
    """Return 1 where parts along split may be unequal."""
    return by_kind((meshes.world, meshes.split), partial(uneven, best_case))[0]


def _latency(best_case: BestCase, facts: MeshFacts, ranks: Ints) -> Array:
    """Return the least seconds of a gather from this many ranks, however small.

    The gather is one ring, or rings within hosts and between them.
    """
    hosts, (_, _, between_hosts_s, least_s) = -(-ranks // best_case.per_node), _links(best_case, facts)
    return np.where(ranks > 1, np.maximum(np.log2(ranks) * least_s, (hosts - 1) * between_hosts_s), 0.0)


def _batch_statistics_s(best_case: BestCase, meshes: MeshTable, facts: MeshFacts) -> Array:
    """Return the least seconds of the communication of modules that normalise over the batch.

    Each microbatch has a gather in forward and a reduction in backward, both fully exposed.
    """
    modules = sum(module.batch_statistics for module in best_case.model.modules)
    ranks = meshes.data * meshes.space
    each_s = _latency(best_case, facts, ranks) + 2 * np.log2(ranks) * _links(best_case, facts)[3]
    return np.where(meshes.stage == 1, meshes.microbatches * modules * each_s, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exchange:
    """Communication along the data-parallel axes, (plans,) each.

    Attributes:
        reduce_s_per_byte: least seconds per byte of reduced gradients.
        gather_s_per_byte: least seconds per byte that is gathered over shard.
        reductions_s: estimated seconds of all reductions.
        gathers_s: estimated seconds of the gathers of level 3.
    """

    reduce_s_per_byte: Array
    gather_s_per_byte: Array
    reductions_s: Array
    gathers_s: Array


def _exchanged(best_case: BestCase, meshes: MeshTable, variants: Variants, facts: MeshFacts) -> _Exchange:
    """Return the communication along the data-parallel axes.

    Levels 2 and 3 reduce-scatter over shard, then reduce the parts over the other copies.
    """
    stages = meshes.stage.astype(np.float64)
    split, shard = meshes.split.astype(np.float64), variants.shard.astype(np.float64)
    inner_ranks = (meshes.table * meshes.expert * meshes.context * meshes.space).astype(np.float64)
    everyone = meshes.copies * inner_ranks
    whole_least, whole_estimate = _ring(best_case, meshes, facts, everyone, split)
    shard_least, shard_estimate = _ring(best_case, meshes, facts, shard, split * inner_ranks)
    others = everyone / shard
    best_bandwidth = np.maximum(*_links(best_case, facts)[:2])
    over_others = np.where(others > 1, ring_sent_nbytes(1 / best_bandwidth, others), 0.0)
    shards_gradients = variants.level >= 2
    estimate = np.where(shards_gradients, shard_estimate / 2 + whole_estimate / shard, whole_estimate)
    each_pass = gathered_nbytes(facts.parameters, facts.outside_blocks, meshes.microbatches.astype(np.float64))
    return _Exchange(
        reduce_s_per_byte=np.where(shards_gradients, shard_least / 2 + over_others / shard, whole_least),
        gather_s_per_byte=shard_least / 2,
        reductions_s=estimate * facts.gradients / stages,
        gathers_s=shard_estimate / 2 * np.where(variants.level == 3, each_pass / stages, 0.0),
    )


def _ring(
    best_case: BestCase, meshes: MeshTable, facts: MeshFacts, degree: Array, inner_ranks: Array
) -> tuple[Array, Array]:
    """Return least and estimated seconds per byte of an all-reduce over `degree` ranks.

    Whatever the algorithm, a host's connection carries 2 (h - 1) / h of the reduced bytes among h hosts, for each group
    that crosses the connection. Groups that do not fit into a host all cross, one for each of the `inner_ranks` ranks
    in the axes within. Where some may not cross, or hosts are unequal, only the fastest link counts.
    """
    (node, network, *_), per_node = _links(best_case, facts), best_case.per_node
    per_host = np.minimum(meshes.world, per_node).astype(np.float64)
    span = degree * inner_ranks
    within_host = (span <= per_host) & (per_node % np.maximum(span, 1) == 0) | (facts.hosts <= 1)
    members = np.clip(per_host / inner_ranks, 1.0, degree)
    sharing_groups = np.maximum(1.0, per_host / members)
    across_s = ring_sent_nbytes(sharing_groups / network, np.maximum(2.0, degree / members))
    all_cross = ((degree - 1) * inner_ranks >= per_node) & (not best_case.unequal)
    # at least 2 hosts; no more than there are, where more ranks than cores share them
    hosts = np.maximum(2.0, np.minimum(np.ceil(degree / np.ceil(per_node / inner_ranks)), facts.hosts))
    crossing_s = ring_sent_nbytes(np.minimum(inner_ranks, per_node) / network, hosts)
    ring_nbytes = ring_sent_nbytes(np.ones(len(meshes)), degree)
    least = np.where(all_cross, crossing_s, ring_nbytes / np.maximum(node, network))
    least, estimate = (np.where(within_host, ring_nbytes / node, other) for other in (least, across_s))
    return np.where(degree > 1, least, 0.0), np.where(degree > 1, estimate, 0.0)

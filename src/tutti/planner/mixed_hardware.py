"""Plans for devices of unequal speed or memory.

This module chooses each rank's number of samples, the cuts of a pipeline, the parts of layers that are split, and the
order of the nodes.
"""

import dataclasses
import math
from dataclasses import dataclass
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from tutti.config.cluster import ClusterSpec, DeviceSpec, NodeSpec
from tutti.config.model import Loading, ModelSpec
from tutti.config.plan import Plan
from tutti.config.prediction import Prediction, RankMemory
from tutti.config.refusals import check_plan
from tutti.config.vocabulary import DATA_AXES, AxisName
from tutti.cost_model import compute_cost
from tutti.cost_model.best_case import BestCase, is_mixed
from tutti.cost_model.best_case_memory import BestCaseMemory
from tutti.cost_model.compute_cost import traffic_s, update_nbytes
from tutti.cost_model.memory_cost import kept
from tutti.cost_model.module_costs import ModelTable
from tutti.cost_model.pipeline_cost import by_place, times_held
from tutti.cost_model.plan_table import Array
from tutti.cost_model.rank_placement import HostGroup, place_ranks
from tutti.cost_model.work_division import Division, block_roots, parts, recompute_regions
from tutti.cost_model.worker_speed import worker_at
from tutti.errors import PlanError
from tutti.planner.candidates import ROUNDS, listed, speeds
from tutti.planner.plan_request import Objective

MOST_ORDERS = 6
MOST_SHARES = 4096
"""Largest number of data-parallel ranks for which shares are chosen; a plan lists every one of them."""


def orders(
    cluster: ClusterSpec, loading: Loading | None = None, objective: Objective = "throughput"
) -> tuple[ClusterSpec, ...]:
    """Return the cluster with its nodes in each order that is worth trying.

    Ranks are placed in the order of the nodes, so the first nodes get the first stages and the last may stay idle.
    The orders are: the fastest first; the fastest data loading first; the fastest network first; the most computation
    for its price or power first (for the objectives cost and energy); the most memory first; each kind of node first
    once; the slowest first. At most `MOST_ORDERS` of them are returned. The result does not depend on the order in
    which the cluster file lists its nodes, unless a job fixes the order and the ranks of the nodes.

    Args:
        cluster: the machines.
        loading: how samples are loaded, or None where that is unknown.
        objective: what the best plan minimises.
    """
    if cluster.fixed_ranks is not None:
        return (cluster,)
    loading_limits = [_loading_limits(node, loading) for node in cluster.nodes]
    network = [cluster.link_at(node, "network") for node in cluster.nodes]
    network_rates = [0.0 if link is None else link.bandwidth_bytes_per_s for link in network]
    equal_loading, equal_networks = len(set(loading_limits)) == 1, len(set(network_rates)) == 1
    if equal_loading and equal_networks and not is_mixed(cluster):
        return (cluster,)
    kinds = [_kind(cluster, node) for node in cluster.nodes]
    fastest_first = sorted(
        range(len(kinds)), key=lambda i: (kinds[i], loading_limits[i], -network_rates[i], cluster.nodes[i].name)
    )
    wanted = [fastest_first]
    if not equal_loading:
        wanted.append(sorted(fastest_first, key=lambda i: loading_limits[i], reverse=True))
    if not equal_networks:
        wanted.append(sorted(fastest_first, key=lambda i: -network_rates[i]))
    prices = [_price_per_rate(cluster, node, objective) for node in cluster.nodes]
    wanted.append(sorted(fastest_first, key=lambda i: prices[i]))
    wanted.append(sorted(fastest_first, key=lambda i: -cluster.devices[cluster.nodes[i].device].memory_nbytes))
    for kind in dict.fromkeys(kinds[i] for i in wanted[-2]):
        wanted.append(sorted(fastest_first, key=lambda i: kinds[i] != kind))
    wanted.append(fastest_first[::-1])
    distinct = list(dict.fromkeys(map(tuple, wanted)))[:MOST_ORDERS]
    return tuple(dataclasses.replace(cluster, nodes=tuple(cluster.nodes[i] for i in order)) for order in distinct)


def _peak(device: DeviceSpec) -> float:
    """Return the highest rate of a device in any number format, in FLOPs per second."""
    return max([*device.peak_flops_per_s.values(), *(rate.flops_per_s for rate in device.gemm)], default=0.0)


def _kind(cluster: ClusterSpec, node: NodeSpec) -> tuple[float | str, ...]:
    """Return a sort key that is equal for nodes of one kind and least for the fastest kind."""
    device = cluster.devices[node.device]
    prices = (device.price_per_device_hour or 0.0, device.power_w or 0.0)
    return (-_peak(device), -device.memory_nbytes, *prices, -node.devices_per_node, -node.memory_nbytes, node.device)


def _price_per_rate(cluster: ClusterSpec, node: NodeSpec, objective: Objective) -> float:
    """Return the price or power per FLOP/s under an objective that counts it, else 0."""
    device = cluster.devices[node.device]
    rate = {"cost": device.price_per_device_hour, "energy": device.power_w}.get(objective)
    return (rate or 0.0) / max(_peak(device), 1.0)


def _loading_limits(node: NodeSpec, loading: Loading | None) -> tuple[float, int]:
    """Return what limits data loading on a host: its disk's read rate and its cores; 0 for what does not matter."""
    stored = loading is not None and loading.stored_nbytes > 0
    worked = loading is not None and loading.core_s > 0 and loading.workers > 0
    return (node.disk_read_bytes_per_s or math.inf) if stored else 0.0, node.cores if worked else 0


def by_axes(values: Array, plan: Plan, keep: tuple[AxisName, ...], how: np.ufunc) -> Array:
    """Reduce a value of every rank over all axes but `keep`.

    Args:
        values: one value per rank, (ranks,).
        plan: the plan that has these ranks.
        keep: axes that remain.
        how: the reduction, such as `np.minimum`.

    Returns:
        (product of the degrees of `keep`,), row-major in the order of the mesh.
    """
    axes = list(plan.mesh)
    grid = values.reshape([plan.mesh[axis] for axis in axes])
    reduced_axes = tuple(position for position, axis in enumerate(axes) if axis not in keep)
    reduced = reduce(lambda left, axis: how.reduce(left, axis=axis, keepdims=True), reduced_axes, grid)
    return np.asarray(reduced, dtype=np.float64).reshape(-1)


def improved(
    best_memory: BestCaseMemory, cluster: ClusterSpec, equal_plan: Plan, prediction: Prediction, samples: int
) -> list[Plan]:
    """Return variants of a plan that suit unequal devices better; empty where none differs from it.

    Samples and the parts along split are divided by speed. Stages are cut by speed and memory.

    Args:
        best_memory: the memory and work of the model on this cluster.
        cluster: the machines, in the order in which ranks are placed.
        equal_plan: the plan, with equal shares.
        prediction: the prediction for that plan.
        samples: samples in the global batch.
    """
    host_groups, plan, best_case = place_ranks(cluster, equal_plan.world_size), equal_plan, best_memory.best_case
    rank_samples = max(1, round(samples / plan.batch.num_microbatches / plan.data_parallel_degree))
    rates = speeds(best_case.model, host_groups, best_case.precision, np.full(plan.world_size, float(rank_samples)))
    plans: list[Plan] = []
    if plan.mesh.get("stage", 1) > 1 and not plan.pipeline.cuts:
        cuts = uneven_cuts(best_memory, plan, host_groups, rates, rank_samples)
        if cuts:
            plan = dataclasses.replace(plan, pipeline=dataclasses.replace(plan.pipeline, cuts=cuts))
            plans.append(plan)
    share = shares(best_case, plan, prediction.memory, host_groups, samples)
    if share:
        plans.append(dataclasses.replace(plan, shares=share))
    parts_by_speed = split_shares(best_memory, plan, prediction.memory, host_groups, rank_samples)
    if parts_by_speed:
        plan = dataclasses.replace(plan, split_shares=parts_by_speed)
        share = shares(best_case, plan, prediction.memory, host_groups, samples)
        plans += [plan, dataclasses.replace(plan, shares=share)] if share else [plan]
    return plans


def shares(
    best_case: BestCase, plan: Plan, memory: RankMemory, host_groups: tuple[HostGroup, ...], samples: int
) -> tuple[float, ...]:
    """Return a share for each data-parallel rank such that all finish together; empty if the shares are equal.

    Shares are limited by memory. A data-parallel rank of several devices has the memory of the smallest one.

    Args:
        best_case: the model at the best rates of this cluster.
        plan: the plan, with equal shares.
        memory: memory of the fullest rank with equal shares. Only its activations grow with the number of samples.
        host_groups: where the ranks run.
        samples: samples in the global batch.
    """
    degree = plan.data_parallel_degree
    if degree == 1 or degree > MOST_SHARES:
        return ()
    slices = samples / plan.batch.num_microbatches
    free = by_axes(_memory(host_groups), plan, DATA_AXES, np.minimum) - (memory.total - memory.activations)
    most = np.floor(free / max(memory.activations / np.ceil(slices / degree), 1.0))
    loads = np.full(degree, slices / degree)
    data_degrees = [plan.mesh[axis] if axis in DATA_AXES else 1 for axis in plan.mesh]
    for _ in range(ROUNDS):
        rank_loads = np.broadcast_to(loads.reshape(data_degrees), list(plan.mesh.values())).reshape(-1)
        rates = _data_parallel_rates(plan, speeds(best_case.model, host_groups, best_case.precision, rank_loads))
        # rounding to whole samples may give a rank one more than its share
        loads = balanced(rates, np.maximum(1.0, most - 1), slices)
    return listed(loads)


def _data_parallel_rates(plan: Plan, rates: Array) -> Array:
    """Return the speed of each data-parallel rank, (data-parallel degree,), from that of every rank.

    If it has several devices, the slowest one counts; along stages and parts of layers that are cut by speed, the mean.
    """
    if plan.split_weights:
        grid, at = rates.reshape(list(plan.mesh.values())), list(plan.mesh).index("split")
        rates = np.broadcast_to(grid.mean(axis=at, keepdims=True), grid.shape).reshape(-1)
    device_rates = by_axes(rates, plan, (*DATA_AXES, "stage"), np.minimum)
    if plan.mesh.get("stage", 1) == 1:
        return device_rates
    axes = tuple(axis for axis in plan.mesh if axis in (*DATA_AXES, "stage"))
    grid, over = device_rates.reshape([plan.mesh[axis] for axis in axes]), axes.index("stage")
    return np.asarray((grid.mean(axis=over) if plan.pipeline.cuts else grid.min(axis=over)).reshape(-1))


def balanced(rates: Array, capacity: Array, total: float) -> Array:
    """Return loads in proportion to `rates` that sum to `total`, each at most its `capacity`.

    What exceeds one rank's capacity is divided among the others, again in proportion to their rates. If all ranks
    together have too little capacity, loads are in proportion to the capacity instead.

    Args:
        rates: speed of each rank, (ranks,).
        capacity: largest load of each rank, (ranks,).
        total: the sum of all loads.
    """
    if capacity.sum() <= total:
        return np.asarray(capacity * (total / capacity.sum()), dtype=np.float64)
    loads, full = np.zeros(len(rates)), np.zeros(len(rates), dtype=bool)
    while True:
        rest = total - capacity[full].sum()
        loads = np.where(full, capacity, rates * (rest / rates[~full].sum()))
        over = ~full & (loads > capacity)
        if not over.any():
            return np.asarray(loads, dtype=np.float64)
        full |= over


def uneven_cuts(
    best_memory: BestCaseMemory, plan: Plan, host_groups: tuple[HostGroup, ...], rates: Array, samples: int
) -> tuple[str, ...]:
    """Return the names of the modules at which stages begin, cut by the speed and memory of the stages.

    The result is empty where no such cut exists.

    Args:
        best_memory: the memory and work of the model on this cluster.
        plan: a plan with pipeline stages.
        host_groups: where the ranks run.
        rates: speed of each rank, (ranks,).
        samples: samples of a data-parallel rank in a microbatch.
    """
    degree, chunks = plan.mesh["stage"], plan.pipeline.stages_per_rank
    best_case, columns = best_memory.best_case, best_memory.work.columns
    degrees = tuple(plan.degree(axis) for axis in ("split", "context", "expert", "table", "space"))
    part = best_memory.work.part(degrees)
    keeps = kept(columns, part, recompute_regions(best_case.model, plan), half=best_case.half)
    passes = best_memory.work.passes((*degrees, samples, best_case.ground(plan.world_size).best))
    if passes is None:
        return ()
    blocks = blocks_of(
        best_case.model, passes.ahead + passes.back, state_of(columns, part, plan), samples * keeps.always
    )
    passing = samples * (keeps.within.max(initial=0.0) + keeps.output.max(initial=0.0))
    memory = by_axes(_memory(host_groups), plan, ("stage",), np.minimum)
    free = (memory - best_memory.reserve) / (1 + best_memory.fragments) - passing
    live = times_held(plan.pipeline.schedule, chunks, degree, plan.batch.num_microbatches).reshape(-1)
    stage_rates = by_axes(rates, plan, ("stage",), np.minimum)
    starts = (
        cut(blocks, np.tile(stage_rates, chunks), np.tile(free / chunks, chunks), live)
        if len(blocks.names) > 1
        else None
    )
    return tuple(blocks.names[start] for start in starts or ())


def state_of(columns: ModelTable, part: Division, plan: Plan) -> Array:
    """Return the bytes of parameters, gradients and optimizer state that a rank holds of each module, (modules,).

    Args:
        columns: the model's modules.
        part: the fraction of each module that a rank has.
        plan: the plan, whose sharding level says which state is sharded.
    """
    shard = plan.mesh.get("shard", 1)
    level = plan.sharding.level if shard > 1 else 0
    held, reduced, updated = (1.0 / shard if level >= least else 1.0 for least in (3, 2, 1))
    return part.weight * (held * columns.parameters + reduced * columns.gradients + updated * columns.optimizer)


def _memory(host_groups: tuple[HostGroup, ...]) -> Array:
    """Return the memory of each rank in bytes, (ranks,)."""
    return np.array([host_group.memory_nbytes for host_group in host_groups for _ in range(host_group.ranks)])


_BISECTION_STEPS = 60


def split_shares(
    best_memory: BestCaseMemory, plan: Plan, memory: RankMemory, host_groups: tuple[HostGroup, ...], samples: int
) -> tuple[float, ...]:
    """Return the part of the divided layers for each split rank such that all finish together.

    Parts are limited by memory, and each has at least one head or unit. The result is empty where the split ranks
    are alike, or the model or the plan needs equal parts. All ranks of one split index count as the weakest of them.

    Args:
        best_memory: the memory and work of the model on this cluster.
        plan: the plan, with equal parts.
        memory: memory of the fullest rank with equal parts.
        host_groups: where the ranks run.
        samples: samples of a data-parallel rank in a microbatch.
    """
    degree = plan.mesh.get("split", 1)
    if degree == 1 or len(host_groups) == 1:
        return ()
    microbatch_times = [_microbatch_time(best_memory, plan, host_group, samples) for host_group in host_groups]
    groups_by_split_rank = by_place(plan, host_groups)
    slowest = [
        max(
            (microbatch_times[host_group] for host_group in members),
            key=lambda microbatch_time: microbatch_time.total_s(1 / degree),
        )
        for members in groups_by_split_rank
    ]
    free = np.array(
        [min(host_groups[host_group].memory_nbytes for host_group in members) for members in groups_by_split_rank],
        dtype=np.float64,
    )
    if len(set(slowest)) == 1 and len(set(free.tolist())) == 1:
        return ()
    divided_nbytes = max(1.0, _divided_nbytes(best_memory, plan, memory))
    least, most = _least(best_memory, plan), np.maximum(0.0, 1 + (free - memory.total) / divided_nbytes) / degree
    whole = np.floor(most / least) * least  # parts are rounded to whole heads, possibly upwards
    new_shares = listed(parts_finishing_together(slowest, whole if whole.sum() > 1 else most, least))
    if not new_shares or min(new_shares) <= 0:
        return ()
    divided = dataclasses.replace(plan, split_shares=new_shares)
    try:
        check_plan(divided)
        parts(best_memory.best_case.model, divided)
    except PlanError:
        return ()
    return new_shares


@dataclass(frozen=True, slots=True)
class MicrobatchTime:
    """Seconds that a rank needs for one microbatch.

    Attributes:
        whole_s: what does not depend on the rank's part of the divided layers.
        part_s: what is proportional to the part, for a part of 1.
    """

    whole_s: float
    part_s: float

    def total_s(self, part: float) -> float:
        """Return the seconds with this part of the divided layers."""
        return self.whole_s + part * self.part_s


def parts_finishing_together(microbatch_times: list[MicrobatchTime], most: Array, least: float) -> Array:
    """Return parts that add up to 1 with which all split ranks take the same time, as far as the limits allow.

    Each part is (T - a) / b, at least `least` and at most the rank's `most`. Here a is the time that does not depend on
    the part, and b the time that is proportional to it. The sum of the parts grows with T, so T is found by bisection.
    If the ranks together have too little memory, parts are in proportion to `most` instead.

    Args:
        microbatch_times: time of each split rank.
        most: largest part of each split rank, (split,).
        least: smallest part of any rank.
    """
    if most.sum() <= 1:
        return np.asarray(most / max(most.sum(), 1e-300), dtype=np.float64)
    a = np.array([microbatch_time.whole_s for microbatch_time in microbatch_times])
    b = np.maximum(np.array([microbatch_time.part_s for microbatch_time in microbatch_times]), 1e-300)
    low, high = float(a.min()), float((a + b).max())

    def within(until_s: float) -> Array:
        return np.asarray(np.minimum(np.maximum((until_s - a) / b, least), most), dtype=np.float64)

    for _ in range(_BISECTION_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if within(middle).sum() > 1 else (middle, high)
    result = within(high)
    return np.asarray(result / result.sum(), dtype=np.float64)


def _divided_nbytes(best_memory: BestCaseMemory, plan: Plan, memory: RankMemory) -> float:
    """Return the bytes of `memory` that are proportional to a rank's part of the divided layers.

    A layer divided by its outputs keeps its whole input, whatever its part is.
    """
    columns, part = best_memory.work.columns, best_memory.work.part(_degrees(plan))
    state = (columns.parameters + columns.gradients + columns.optimizer) * part.weight
    keeps = kept(
        columns, part, recompute_regions(best_memory.best_case.model, plan), half=best_memory.best_case.half
    ).always
    divided, saves_divided = part.split, part.split & (part.saved < part.passed)
    held = memory.parameters + memory.gradients + memory.optimizer
    of_state, of_kept = state[divided].sum() / max(1.0, state.sum()), keeps[saves_divided].sum() / max(1.0, keeps.sum())
    return (1 + best_memory.fragments) * float(held * of_state + memory.activations * of_kept)


def _least(best_memory: BestCaseMemory, plan: Plan) -> float:
    """Return the part that has one head or unit of the layer with the fewest; a small part where that is unknown."""
    limits = best_memory.work.columns.limit[best_memory.work.part(_degrees(plan)).split]
    return 1.0 / int(limits[limits > 0].min(initial=1000 * plan.degree("split")))


def _degrees(plan: Plan) -> tuple[int, ...]:
    """Return the degrees of the axes that divide a model's work, in the order in which BestCaseWork takes them."""
    return tuple(plan.degree(axis) for axis in ("split", "context", "expert", "table", "space"))


def _microbatch_time(best_memory: BestCaseMemory, plan: Plan, host_group: HostGroup, samples: int) -> MicrobatchTime:
    """Estimate the time of a microbatch for a rank on `host_group`: forward, backward and its part of the update.

    The update happens once per step, so each microbatch counts a fraction of it.
    """
    model, columns = best_memory.best_case.model, best_memory.work.columns
    part = best_memory.work.part(_degrees(plan))
    worker = worker_at(host_group, model.dtype, plan.precision, channels_last=model.channels_last)
    ahead, back = (
        cost_of_pass(part.ops, worker, samples, len(columns))
        for cost_of_pass in (compute_cost.forward, compute_cost.backward)
    )
    updated = update_nbytes(model, columns.gradients, columns.optimizer, on_cpu=host_group.device.kind == "cpu")
    updated = updated * part.weight / plan.degree("shard")
    times = plan.batch.num_microbatches
    seconds = ahead.seconds + back.seconds + traffic_s(worker, updated) / times
    divided = float(seconds[part.split].sum())
    return MicrobatchTime(float(seconds.sum()) - divided, divided * plan.degree("split"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """The blocks between which a pipeline can be cut, in order.

    The first entry includes all modules before the first block, the last all modules after the last block.

    Attributes:
        names: module with which each block begins.
        seconds: forward and backward of a microbatch, (blocks,).
        state: bytes of parameters, gradients and optimizer state, (blocks,).
        kept: bytes of activations saved for backward, (blocks,).
    """

    names: tuple[str, ...]
    seconds: Array
    state: Array
    kept: Array


def blocks_of(model: ModelSpec, seconds: Array, state: Array, kept: Array) -> Blocks:
    """Sum values of the modules over the model's blocks.

    Args:
        model: what is trained.
        seconds: seconds of each module, (modules,).
        state: bytes of parameters, gradients and optimizer state of each module, (modules,).
        kept: bytes of activations that each module saves, (modules,).
    """
    roots = block_roots(model)
    order = list(dict.fromkeys(module.block for module in model.modules if module.block >= 0))
    positions, current = [], 0
    for module in model.modules:
        if module.block >= 0:
            current = order.index(module.block)
        positions.append(current)
    where = np.array(positions, dtype=np.intp)

    def summed(values: Array) -> Array:
        return np.bincount(where, weights=values, minlength=max(1, len(order))).astype(np.float64)

    return Blocks(
        names=tuple(roots[block] for block in order),
        seconds=summed(seconds),
        state=summed(state),
        kept=summed(kept),
    )


def cut(blocks: Blocks, speeds: Array, capacity: Array, live: Array) -> tuple[int, ...] | None:
    """Return the first block of stages 1, 2, ... such that the slowest stage is as fast as possible; None if none fits.

    Every stage has at least one block. This is dynamic programming over contiguous cuts:
    best[s][j] = min over i of max(best[s - 1][i], time(i..j) / speed_s).

    Args:
        blocks: time and memory of each block.
        speeds: speed of each stage's ranks, (stages,).
        capacity: bytes that each stage has for state and activations, (stages,).
        live: number of microbatches whose activations each stage holds at once, (stages,).
    """
    count, stages = len(blocks.seconds), len(speeds)
    if stages > count:
        return None
    time, state, kept = (
        np.concatenate([[0.0], np.cumsum(values)]) for values in (blocks.seconds, blocks.state, blocks.kept)
    )
    best = np.full(count + 1, np.inf)
    best[0] = 0.0
    begins: list[NDArray[np.intp]] = []
    for stage in range(stages):
        stage_s = (time[None, :] - time[:, None]) / speeds[stage]
        held = (state[None, :] - state[:, None]) + live[stage] * (kept[None, :] - kept[:, None])
        valid = (np.arange(count + 1)[None, :] > np.arange(count + 1)[:, None]) & (held <= capacity[stage])
        reached = np.where(valid, np.maximum(best[:, None], stage_s), np.inf)
        begins.append(np.argmin(reached, axis=0))
        best = np.min(reached, axis=0)
    if not np.isfinite(best[count]):
        return None
    starts, end = [], count
    for stage in range(stages - 1, 0, -1):
        end = int(begins[stage][end])
        starts.append(end)
    return tuple(reversed(starts))


def slowest(blocks: Blocks, speeds: Array, starts: tuple[int, ...]) -> float:
    """Return the time of the slowest stage.

    Args:
        blocks: time of each block.
        speeds: speed of each stage's ranks.
        starts: first block of stages 1, 2, ...
    """
    edges = [0, *starts, len(blocks.seconds)]
    return max(
        float(blocks.seconds[first:last].sum() / speed)
        for first, last, speed in zip(edges[:-1], edges[1:], speeds, strict=True)
    )

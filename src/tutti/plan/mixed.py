"""Devices of unequal speed and memory: who computes how many samples, where a pipeline is cut, who sits first."""

import dataclasses
from functools import reduce

import numpy as np

from tutti.plan.stages import Blocks, blocks_of, cut
from tutti.plan.tables import Array, Tables, is_mixed, multiplies, split_of
from tutti.predict import compute
from tutti.predict.placement import Seat, place
from tutti.spec.cluster import ClusterSpec
from tutti.spec.plan import Plan
from tutti.spec.words import DATA_AXES, AxisName

MOST_ORDERS = 4
MOST_SHARES = 4096
"""Data-parallel ranks beyond which shares are not listed one by one."""


def orders(cluster: ClusterSpec) -> tuple[ClusterSpec, ...]:
    """The cluster with its nodes in the orders worth trying: as written, the fastest first, the roomiest first, and the
    reverse. Ranks are seated in this order, so first ones get the first stages and the last are left idle.
    """
    if not is_mixed(cluster):
        return (cluster,)

    def peak(index: int) -> float:
        device = cluster.devices[cluster.nodes[index].device]
        rates = [*device.peak_flops_per_s.values(), *(rate.flops_per_s for rate in device.gemm)]
        return max(rates, default=0.0)

    def memory(index: int) -> float:
        return cluster.devices[cluster.nodes[index].device].memory_nbytes

    own = list(range(len(cluster.nodes)))
    wanted = [own, sorted(own, key=lambda i: -peak(i)), sorted(own, key=lambda i: -memory(i)), own[::-1]]
    distinct = list(dict.fromkeys(map(tuple, wanted)))[:MOST_ORDERS]
    return tuple(dataclasses.replace(cluster, nodes=tuple(cluster.nodes[i] for i in order)) for order in distinct)


def speeds(tables: Tables, seats: tuple[Seat, ...], samples: float) -> Array:
    """Samples a second of every rank on the whole model, relative to the fastest."""
    found: list[float] = []
    count, table = len(tables.model.modules), compute.op_table(tables.model)
    known: dict[object, float] = {}
    for seat in seats:
        key = (seat.device.name, seat.sharing, seat.threads)
        if key not in known:
            worker = compute.worker(seat, tables.model.dtype, tables.precision)
            passes = (compute.forward, compute.backward)
            whole = sum(float(one(table, worker, max(1, round(samples)), count).seconds.sum()) for one in passes)
            known[key] = 1.0 / whole if whole > 0 else 1.0
        found += [known[key]] * seat.ranks
    rates = np.array(found)
    return np.asarray(rates / rates.max(), dtype=np.float64)


def by_axes(values: Array, plan: Plan, keep: tuple[AxisName, ...], how: np.ufunc) -> Array:
    """Values of all ranks, reduced by `how` over all axes but `keep`; row-major in the mesh's order."""
    axes = list(plan.mesh)
    grid = values.reshape([plan.mesh[axis] for axis in axes])
    gone = tuple(position for position, axis in enumerate(axes) if axis not in keep)
    reduced = reduce(lambda left, axis: how.reduce(left, axis=axis, keepdims=True), gone, grid)
    return np.asarray(reduced, dtype=np.float64).reshape(-1)


def improved(tables: Tables, cluster: ClusterSpec, plan: Plan, samples: int) -> list[Plan]:
    """The plan with shares by speed and with stages cut by speed and memory, where these change anything."""
    seats = place(cluster, plan.world_size)
    each = max(1.0, samples / plan.batch.num_microbatches / plan.data_parallel_degree)
    rates = speeds(tables, seats, each)
    found: list[Plan] = []
    stages = plan.mesh.get("stage", 1)
    if stages > 1 and not plan.pipeline.cuts:
        cuts = uneven_cuts(tables, plan, seats, rates, each)
        if cuts:
            plan = dataclasses.replace(plan, pipeline=dataclasses.replace(plan.pipeline, cuts=cuts))
            found.append(plan)
    share = shares(tables, plan, seats, rates, samples)
    if share:
        found.append(dataclasses.replace(plan, shares=share))
    return found


def shares(tables: Tables, plan: Plan, seats: tuple[Seat, ...], rates: Array, samples: int) -> tuple[float, ...]:
    """A share for each data-parallel rank such that all finish together, clipped where memory ends; empty if equal.

    A data-parallel rank that is itself several devices is as fast as its slowest, or, along stages cut by speed, as
    their mean; its room is its tightest device's.
    """
    degree = plan.data_parallel_degree
    if degree == 1 or degree > MOST_SHARES:
        return ()
    own = by_axes(rates, plan, (*DATA_AXES, "stage"), np.minimum)
    if plan.mesh.get("stage", 1) > 1:
        data_first = tuple(axis for axis in plan.mesh if axis in (*DATA_AXES, "stage"))
        grid = own.reshape([plan.mesh[axis] for axis in data_first])
        over = data_first.index("stage")
        own = (grid.mean(axis=over) if plan.pipeline.cuts else grid.min(axis=over)).reshape(-1)
    memory = by_axes(_memory(seats), plan, DATA_AXES, np.minimum)
    state, kept = _held(tables, plan)
    room = np.maximum(1.0, (memory * 0.9 - state) / max(kept, 1.0))
    loads = balanced(own, room, samples / plan.batch.num_microbatches)
    relative = tuple(round(float(load), 3) for load in loads / loads.max())
    return relative if min(relative) < 1 else ()


def balanced(rates: Array, room: Array, total: float) -> Array:
    """Loads in proportion to `rates` that sum to `total`, none above its `room`.

    What one cannot hold goes to the others in proportion, so always to those least loaded for their speed that have
    room. Where all together have too little room, loads are in proportion to it.
    """
    if room.sum() <= total:
        return np.asarray(room * (total / room.sum()), dtype=np.float64)
    loads, full = np.zeros(len(rates)), np.zeros(len(rates), dtype=bool)
    while True:
        rest = total - room[full].sum()
        loads = np.where(full, room, rates * (rest / rates[~full].sum()))
        over = ~full & (loads > room)
        if not over.any():
            return np.asarray(loads, dtype=np.float64)
        full |= over


def uneven_cuts(tables: Tables, plan: Plan, seats: tuple[Seat, ...], rates: Array, samples: float) -> tuple[str, ...]:
    """Names at which stages begin, cut by the stages' speeds and memory; empty where it cannot be cut so."""
    degree, chunks = plan.mesh["stage"], plan.pipeline.stages_per_rank
    own = by_axes(rates, plan, ("stage",), np.minimum)
    memory = 0.9 * by_axes(_memory(seats), plan, ("stage",), np.minimum)
    blocks = _blocks(tables, plan, seats[0], samples)
    live = np.minimum(plan.batch.num_microbatches, np.arange(degree, 0, -1)).astype(np.float64)
    if plan.pipeline.schedule == "gpipe":
        live = np.full(degree, float(plan.batch.num_microbatches))
    if chunks > 1:
        own, memory, live = np.tile(own, chunks), np.tile(memory, chunks), np.tile(live, chunks)
    starts = cut(blocks, own, memory, live) if len(blocks.names) > 1 else None
    return tuple(blocks.names[start] for start in starts or ())


def _blocks(tables: Tables, plan: Plan, seat: Seat, samples: float) -> Blocks:
    model = tables.model
    worker = compute.worker(seat, model.dtype, tables.precision)
    table, count = compute.op_table(model), max(1, round(samples))
    modules = len(model.modules)
    passes = (compute.forward, compute.backward)
    seconds = sum(one(table, worker, count, modules).seconds for one in passes)
    split, expert, tabled = (plan.mesh.get(axis, 1) for axis in ("split", "expert", "table"))
    parts = [
        1.0 / (split_of(module, split) * (expert if module.expert else 1) * (tabled if module.table else 1))
        for module in model.modules
    ]
    bytes_of = state_weights(plan)
    state = np.array(
        [
            part * sum(weight * getattr(module, name) for name, weight in bytes_of.items())
            for part, module in zip(parts, model.modules, strict=True)
        ]
    )
    kept = np.array([
        count * module.activation_nbytes * (tables.width if multiplies(module) else 1.0)
        / (split if module.split or module.sequence else 1) / plan.degree("context", "space")
        for module in model.modules
    ])  # fmt: skip
    if any(rule.recompute is True for rule in plan.layout):
        kept = kept * 0.1
    return blocks_of(model, np.asarray(seconds, dtype=np.float64), state, kept)


def state_weights(plan: Plan) -> dict[str, float]:
    """What part of each kind of state a rank keeps."""
    shard = plan.mesh.get("shard", 1)
    level = plan.sharding.level if shard > 1 else 0
    return {
        "parameter_nbytes": 1.0 / shard if level >= 3 else 1.0,
        "gradient_nbytes": 1.0 / shard if level >= 2 else 1.0,
        "optimizer_nbytes": 1.0 / shard if level >= 1 else 1.0,
    }


def _held(tables: Tables, plan: Plan) -> tuple[float, float]:
    """Bytes of a rank that do not depend on its samples, and those that each sample of a slice adds."""
    split, expert, tabled = (plan.mesh.get(axis, 1) for axis in ("split", "expert", "table"))
    parameters, gradients, optimizer, _ = tables.state(split, expert, tabled)
    weights = state_weights(plan)
    stages = plan.mesh.get("stage", 1)
    state = (
        parameters * weights["parameter_nbytes"]
        + gradients * weights["gradient_nbytes"]
        + optimizer * weights["optimizer_nbytes"]
    ) / stages
    kept, small, largest = tables.activations(split, plan.mesh.get("context", 1), plan.mesh.get("space", 1))
    again = any(rule.recompute is True for rule in plan.layout)
    live = min(plan.batch.num_microbatches, stages)
    return state + 1e9, (small * live / stages + largest if again else kept * live / stages)


def _memory(seats: tuple[Seat, ...]) -> Array:
    return np.array([seat.memory_nbytes for seat in seats for _ in range(seat.ranks)])

"""Bounds that no prediction is below, and estimates in whose order plans are costed; row by row, without predicting.

A bound counts what every plan must do: its share of the model's arithmetic and memory traffic at the best rate there
is, the pipeline's unavoidable filling, the gradients' way over the fastest link, the state that must lie somewhere.
An estimate adds the exchanges and is often within a third of the prediction; it decides nothing but the order.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tutti.plan.enumerate import SCHEDULES, Shapes, Variants
from tutti.plan.tables import Array, Ints, Tables, by_kind
from tutti.spec.cluster import LinkSpec

_INTERLEAVED, _ZERO_BUBBLE = SCHEDULES.index("interleaved"), SCHEDULES.index("zero-bubble")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """By row: at least so many seconds a step, at least so many bytes on the fullest rank; what both probably are."""

    step_s: Array
    memory: Array
    likely_s: Array
    likely_memory: Array


def least_samples(shapes: Shapes, samples: int) -> Ints:
    """Samples that every rank has in every microbatch, at least; a rank without any computes one all the same."""
    return np.asarray(np.maximum(1, samples // (shapes.data * shapes.microbatches)), dtype=np.int64)


def filling(microbatches: Ints, stages: Ints) -> Array:
    """Time of a 1F1B or GPipe step, at least, in times of one microbatch through all stages on one rank.

    For every stage s the step lasts m t_s plus the times of the stages before it, t_s being forward and backward: the
    first microbatch comes through them and the last one's gradient goes back. However the model is cut, the largest of
    these is at least 1 / (1 - (1 - 1/m)^p), reached where all are equal.
    """
    part = 1.0 - 1.0 / microbatches.astype(np.float64)
    return np.asarray(1.0 / (1.0 - part ** stages.astype(np.float64)), dtype=np.float64)


def shape_bounds(tables: Tables, shapes: Shapes, samples: int) -> tuple[Array, Array]:
    """(seconds, bytes) that no way to run a mesh is below."""
    count = least_samples(shapes, samples)
    ahead, back, _ = by_kind((count, shapes.expert, shapes.table, shapes.world), tables.seconds)
    (speed,) = by_kind((shapes.world,), lambda world: (tables.ground(world).speed,))
    divided = shapes.split * shapes.context * shapes.space * shapes.stage
    seconds = shapes.microbatches * (ahead + back) / divided / speed
    parameters, gradients, optimizer = by_kind((shapes.split, shapes.expert, shapes.table), tables.state)
    memory = (parameters + gradients + optimizer) / shapes.stage / shapes.copies
    return np.asarray(seconds, dtype=np.float64), np.asarray(memory, dtype=np.float64)


def variant_bounds(tables: Tables, found: Shapes, ways: Variants, samples: int) -> Bounds:
    """Bounds and estimates of the variants `ways` of the meshes `found`."""
    rows = found.take(ways.shape)
    count = least_samples(rows, samples)
    ahead, back, calls = by_kind((count, rows.expert, rows.table, rows.world), tables.seconds)
    speed, hosts = by_kind((rows.world,), lambda world: (tables.ground(world).speed, tables.ground(world).hosts))
    inner = (rows.split * rows.context * rows.space).astype(np.float64)
    again = np.where(ways.recompute == 2, ahead, 0.0)
    whole = ahead + back + (again if _has_blocks(tables) else 0.0)
    plain = np.where(
        (ways.schedule == _INTERLEAVED) | (ways.schedule == _ZERO_BUBBLE) | (rows.stage == 1),
        rows.microbatches / rows.stage,
        filling(rows.microbatches, rows.stage),
    )
    least = np.where(ways.recompute == 2, ahead + back, whole) * plain / inner / speed
    state, held = _state(tables, rows, ways)
    kept, small, largest = by_kind((rows.split, rows.context, rows.space), tables.activations)
    memory = np.maximum(
        state / rows.stage + count * np.where(ways.recompute == 0, kept, 0.0) / rows.stage,
        _of_first(rows, ways) * np.where(ways.recompute == 0, kept, 0.0) * count / rows.stage,
    )
    likely = _likely_seconds(tables, rows, ways, (whole, calls, inner, speed, plain, hosts), count)
    activations = np.where(ways.recompute == 2, small, np.where(ways.recompute == 1, 0.6 * kept + 0.4 * small, kept))
    live = np.where(
        ways.schedule == SCHEDULES.index("gpipe"), rows.microbatches, np.minimum(rows.microbatches, rows.stage)
    )
    live = live * np.where(ways.chunks > 1, 1 + (rows.stage - 1) / (rows.stage * ways.chunks), 1.0)
    busy = count * (activations * live / rows.stage + np.where(ways.recompute == 2, largest, 0.0))
    return Bounds(
        step_s=np.asarray(least, dtype=np.float64),
        memory=np.asarray(memory, dtype=np.float64),
        likely_s=np.asarray(likely, dtype=np.float64),
        likely_memory=np.asarray(1.05 * (held / rows.stage + busy) + 1e9, dtype=np.float64),
    )


def _has_blocks(tables: Tables) -> bool:
    return any(module.name for module in tables.model.modules)


def _of_first(rows: Shapes, ways: Variants) -> Array:
    """Microbatches that the fullest stage holds at least, times stages: 1F1B's stage s holds min(m, p - s).

    The fullest is least full where the stages' sizes make all equal: one over the mean of 1 / min(m, p - s).
    """

    def held(stages: int, microbatches: int) -> tuple[float]:
        counts = np.minimum(microbatches, np.arange(1, stages + 1))
        return (float(stages / np.sum(1.0 / counts)),)

    (full,) = by_kind((rows.stage, rows.microbatches), held)
    plain = (ways.schedule == 0) & (ways.chunks == 1)
    return np.where(plain, full, 1.0)


def _state(tables: Tables, rows: Shapes, ways: Variants) -> tuple[Array, Array]:
    """Bytes of parameters, gradients and optimizer state of a rank, times stages: at least, and probably."""
    parameters, gradients, optimizer = by_kind((rows.split, rows.expert, rows.table), tables.state)
    shard = ways.shard.astype(np.float64)
    host = ways.offload
    own = np.where(ways.level >= 3, parameters / shard, parameters)
    summed = np.where(ways.level >= 2, gradients / shard, gradients)
    kept = np.where(ways.level >= 1, optimizer / shard, optimizer)
    least = np.where(host == 2, 0.0, own) + np.where(host > 0, 0.0, summed + kept)
    copies = np.where(ways.level >= 3, 0.1, 0.5) * parameters if tables.half else 0.0
    return least, own * np.where(host == 2, 0.1, 1.0) + summed + np.where(host > 0, 0.0, kept) + copies


def _likely_seconds(tables: Tables, rows: Shapes, ways: Variants, times: tuple[Array, ...], count: Ints) -> Array:
    """The estimate of a step: compute with its calls undivided, the pipeline's filling, the exchanges."""
    whole, calls, inner, speed, plain, hosts = times
    fill = np.where(
        rows.stage == 1,
        rows.microbatches.astype(np.float64),
        (rows.microbatches + _bubble(rows, ways)) / rows.stage,
    )
    passes = (np.maximum(whole - calls, 0.0) / inner + calls) / speed
    sums, keys, routed, lookups, halos, boundary = by_kind((rows.split, rows.context, rows.space), tables.traffic)
    per_node = _per_node(tables)
    reach = np.minimum(rows.world, per_node)
    each = count.astype(np.float64)
    inside: Array = rows.split.astype(np.float64)
    exchange = _ring(tables, rows.split, np.ones_like(inside), reach, hosts) * each * sums
    for degree, nbytes in ((rows.space, halos), (rows.context, keys), (rows.expert, routed), (rows.table, lookups)):
        exchange = exchange + _ring(tables, degree, inside, reach, hosts) * each * nbytes / 2
        inside = inside * degree
    messages = np.where(rows.stage > 1, each * boundary * ways.chunks * rows.stage, 0.0) / _network(tables, hosts)
    parameters, gradients, _ = by_kind((rows.split, rows.expert, rows.table), tables.state)
    shared = rows.copies.astype(np.float64)
    sums_s = _ring(tables, rows.copies, inside, reach, hosts) * gradients / rows.stage
    gathers = np.where(
        ways.level == 3,
        _ring(tables, ways.shard, inside, reach, hosts) * parameters / rows.stage * tables.width * rows.microbatches,
        0.0,
    )
    compute_s = fill * passes
    hidden = np.minimum(0.7 * (sums_s + gathers), 0.6 * compute_s)
    del shared, plain
    return np.asarray(compute_s + fill * (exchange + messages) + sums_s + gathers - hidden, dtype=np.float64)


def _bubble(rows: Shapes, ways: Variants) -> Array:
    lost = (rows.stage - 1) / np.maximum(ways.chunks, 1)
    return np.asarray(np.where(ways.schedule == _ZERO_BUBBLE, lost / 3, lost), dtype=np.float64)


def _ring(tables: Tables, degree: Ints, inside: Array, reach: Ints, hosts: Array) -> Array:
    """Seconds for each byte of an all-reduce over an axis with `inside` ranks in the axes within it."""
    span = degree * inside
    node, network = _link(tables, "node"), _link(tables, "network")
    members = np.maximum(1.0, reach / inside)
    across = np.where(span > reach, 1.0 / (network * np.minimum(members, reach) / reach), 1.0 / node)
    across = np.where(hosts > 1, across, 1.0 / node)
    return np.asarray(np.where(degree > 1, 2 * (degree - 1) / degree * across, 0.0), dtype=np.float64)


def _network(tables: Tables, hosts: Array) -> Array:
    return np.where(hosts > 1, _link(tables, "network"), _link(tables, "node"))


def _link(tables: Tables, tier: str) -> float:
    """The tier's bandwidth, or the other's where it has none: an estimate needs some number."""
    links: tuple[LinkSpec, ...] = tables.cluster.links
    found = [link.bandwidth_bytes_per_s for link in links if link.tier == tier]
    return found[0] if found else max((link.bandwidth_bytes_per_s for link in links), default=1e9)


def _per_node(tables: Tables) -> int:
    return max(node.devices_per_node for node in tables.cluster.nodes)


def chunked(rows: NDArray[np.intp], size: int) -> list[NDArray[np.intp]]:
    """Rows in runs of at most `size`."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]

"""Bounds that no prediction is below, and estimates in whose order plans are costed; row by row, without predicting.

A bound counts what every plan must do: its share of the model's arithmetic and memory traffic at the best rate there
is, the pipeline's unavoidable filling, the gradients' way over the fastest link, the state that must lie somewhere.
An estimate adds the exchanges and is often within a third of the prediction; it decides nothing but the order.
"""

import dataclasses
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tutti.plan.enumerate import SCHEDULES, Shapes, Variants
from tutti.plan.room import Room
from tutti.plan.tables import Array, Ints, Tables, by_kind

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


def shape_bounds(tables: Tables, shapes: Shapes, samples: int) -> tuple[Array, Array]:
    """(seconds, bytes) that no way to run a mesh is below."""
    best, speed, _ = by_kind((shapes.world,), tables.facts)
    ahead, back = by_kind((least_samples(shapes, samples), best.astype(np.int64)), tables.seconds)
    divided = shapes.split * shapes.context * shapes.space * shapes.stage
    parameters, gradients, optimizer, _, _ = by_kind((shapes.split, shapes.expert, shapes.table), tables.state)
    seconds = shapes.microbatches * (ahead + back) / divided / speed
    memory = (parameters + gradients + optimizer) / shapes.stage / shapes.copies
    return np.asarray(seconds, dtype=np.float64), np.asarray(memory, dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Columns over meshes: what their variants have in common. `speed`: of the ranks, as a part of the best worker's;
    bytes are whole, of a rank that has all stages, as Tables has them.
    """

    count: Array
    best: Array
    speed: Array
    hosts: Array
    parameters: Array
    gradients: Array
    optimizer: Array
    shared: Array
    outside: Array

    def take(self, rows: NDArray[np.intp]) -> "Facts":
        return Facts(**{field.name: getattr(self, field.name)[rows] for field in dataclasses.fields(self)})


def _facts(tables: Tables, rows: Shapes, samples: int) -> Facts:
    best, speed, hosts = by_kind((rows.world,), tables.facts)
    columns = by_kind((rows.split, rows.expert, rows.table), tables.state)
    return Facts(
        count=least_samples(rows, samples).astype(np.float64),
        best=best,
        speed=speed,
        hosts=hosts,
        parameters=columns[0],
        gradients=columns[1],
        optimizer=columns[2],
        shared=columns[3],
        outside=columns[4],
    )


def variant_bounds(room: Room, found: Shapes, ways: Variants, samples: int) -> Bounds:
    """Bounds and estimates of the variants `ways` of the meshes `found`."""
    meshes, place = np.unique(ways.shape, return_inverse=True)
    where = place.reshape(-1)
    each = found.take(meshes)  # what depends on the mesh alone is worked out once for all its variants
    rows, facts = each.take(where), _facts(room.tables, each, samples).take(where)
    least, likely = _seconds(room, rows, ways, facts)
    least_memory, likely_memory = _memory(room, rows, ways, facts)
    return Bounds(step_s=least, memory=least_memory, likely_s=likely, likely_memory=likely_memory)


def _memory(room: Room, rows: Shapes, ways: Variants, facts: Facts) -> tuple[Array, Array]:
    """Bytes on the fullest rank, at least and probably.

    At least: the fullest stage's activations with the least state, or the mean of all states with the least
    activations. With several microbatches gradients are added up beside what is summed.
    """
    inner = (rows.split, rows.context, rows.expert, rows.table, rows.space, facts.count.astype(np.int64))
    outer = (rows.stage, ways.chunks, rows.microbatches, ways.schedule, ways.recompute)
    busy, fullest, emptiest = by_kind((*inner, *outer), room.activations)
    several = (rows.microbatches > 1) | (rows.stage > 1)
    summed = (rows.data * rows.context * rows.space > 1) & several
    mean = _state(ways, facts.parameters, facts.gradients, facts.optimizer) + np.where(summed, facts.gradients, 0.0)
    least = np.maximum(fullest, mean / rows.stage + emptiest)
    own, lower, gradients, optimizer, block, outside = by_kind(
        (rows.split, rows.expert, rows.table, rows.stage, ways.chunks), room.state
    )
    shared, away = ways.level >= 2, ways.offload > 0
    beside = np.where(summed, gradients, 0.0)
    passing = np.where(shared, np.where(ways.level == 3, 9 * block + 2 * outside, 5 * block + outside), 0.0)
    copies = np.where(ways.level == 3, np.minimum(lower, (block + outside) / 2), lower)
    states = _state(ways, own, gradients, optimizer) + copies + beside + passing
    likely = (states + np.where(away & shared, block, 0.0) + busy) * (1 + room.fragments) + room.reserve
    return (
        np.asarray(least * (1 + room.fragments) + room.reserve, dtype=np.float64),
        np.asarray(likely, dtype=np.float64),
    )


def _state(ways: Variants, parameters: Array, gradients: Array, optimizer: Array) -> Array:
    """Of these bytes what a rank keeps on its device."""
    shard = ways.shard.astype(np.float64)
    host = ways.offload
    own = np.where(ways.level >= 3, parameters / shard, parameters)
    summed = np.where(ways.level >= 2, gradients / shard, gradients)
    kept = np.where(ways.level >= 1, optimizer / shard, optimizer)
    own = np.where((host > 0) & (ways.level >= 2), own - parameters / shard, own)
    summed = np.where((host > 0) & (ways.level >= 2), 0.0, summed)
    return np.asarray(np.maximum(own, 0.0) + summed + np.where(host > 0, 0.0, kept), dtype=np.float64)


def _seconds(room: Room, rows: Shapes, ways: Variants, facts: Facts) -> tuple[Array, Array]:
    """Seconds of a step, at least and probably.

    Passes come one after another; sums of gradients run behind the last microbatch's backward, so a step lasts at least
    all that comes before it and then the longer of the two. A rank updates its part of the optimizer's state.
    """
    kind = np.where(ways.schedule == _ZERO_BUBBLE, 2, np.where(ways.schedule == _INTERLEAVED, 0, 1))
    count, best = facts.count.astype(np.int64), facts.best.astype(np.int64)
    inner = (rows.split, rows.context, rows.expert, rows.table, rows.space, count, best)
    outer = (rows.stage, ways.chunks, rows.microbatches, kind, ways.recompute)
    least, likely, before, last, update = by_kind((*inner, *outer), room.work.step)
    update = update / np.where(ways.level > 0, ways.shard, 1)
    low, probable, gathers, probably = _exchanged(room.tables, rows, ways, facts)
    bound = np.maximum(np.maximum(least, before + np.maximum(last, low)) + update, gathers)
    # Where ranks differ, the slowest may be one that waits for nothing: only the mean of the work is sure.
    bound = np.where(facts.speed < 1, (before + last) / facts.speed, bound)
    waiting = np.maximum(probable - 0.8 * last, 0.0) + np.maximum(probably - 0.8 * likely, 0.0)
    return (
        np.asarray(bound, dtype=np.float64),
        np.asarray((likely + update) / facts.speed + waiting, dtype=np.float64),
    )


def _exchanged(tables: Tables, rows: Shapes, ways: Variants, facts: Facts) -> tuple[Array, Array, Array, Array]:
    """Seconds of summing gradients, at least and probably, and of gathering parameters at level 3, at least and
    probably. Levels 2 and 3 sum into parts over shard, and the parts over the other copies."""
    stages = rows.stage.astype(np.float64)
    split, shard = rows.split.astype(np.float64), ways.shard.astype(np.float64)
    inner = (rows.table * rows.expert * rows.context * rows.space).astype(np.float64)
    everyone = rows.copies * inner
    whole = _ring(tables, rows, facts, everyone, split)
    parts = _ring(tables, rows, facts, shard, split * inner)
    others = everyone / shard
    fastest = np.where(others > 1, 2 * (others - 1) / others / max(tables.link("node"), tables.link("network")), 0.0)
    divided = ways.level >= 2
    low = np.where(divided, parts[0] / 2 + fastest / shard, whole[0]) * facts.shared / stages
    probable = np.where(divided, parts[1] / 2 + whole[1] / shard, whole[1]) * facts.gradients / stages
    gathered = np.where(ways.level == 3, rows.microbatches * (2 * facts.parameters - facts.outside) / stages, 0.0)
    return low, probable, parts[0] / 2 * gathered, parts[1] / 2 * gathered


def _ring(tables: Tables, rows: Shapes, facts: Facts, degree: Array, inside: Array) -> tuple[Array, Array]:
    """Seconds a byte of sums over `degree` ranks with `inside` ranks in the axes within: at least, and probably.

    A host's connection carries, for each group that crosses it, 2 (h - 1) / h of the sum among h hosts, however the
    sum is arranged. Where hosts are unequal or groups do not lie evenly on them, only the fastest link counts.
    """
    node, network, each = tables.link("node"), tables.link("network"), tables.per_node
    reach = np.minimum(rows.world, each).astype(np.float64)
    within = (degree * inside <= reach) & (each % np.maximum(degree * inside, 1) == 0) | (facts.hosts <= 1)
    members = np.clip(reach / inside, 1.0, degree)
    meeting = np.maximum(1.0, reach / members)
    spanned = np.maximum(2.0, degree / members)
    across = 2 * (spanned - 1) / spanned * meeting / network
    even = (each % inside == 0) & ((degree * inside) % each == 0) | (inside % each == 0)
    sure = even & (rows.world % each == 0) & (not tables.unequal)
    plain = 2 * (degree - 1) / degree
    least = np.where(within, plain / node, np.where(sure, across, plain / max(node, network)))
    likely = np.where(within, plain / node, across)
    return np.where(degree > 1, least, 0.0), np.where(degree > 1, likely, 0.0)

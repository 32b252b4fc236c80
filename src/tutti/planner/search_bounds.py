"""Lower bounds of predictions, and estimates in whose order plans are predicted; row by row, without predicting.

A bound counts what every plan must do: its share of the model's arithmetic and memory traffic at the best
rate of any device, the pipeline's unavoidable filling, the gradients' transfer over the fastest link, the
state that must be stored somewhere. An estimate adds the other communication and is often within a third of
the prediction. It decides only the order.
"""

import dataclasses
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tutti.cost_model import cost_constants
from tutti.planner.cost_tables import Array, Ints, Tables, by_kind, uneven
from tutti.planner.mesh_enumeration import SCHEDULES, MeshTable, Variants
from tutti.planner.plan_work import PLACES, STATES, Flags, Room

_ZERO_BUBBLE = SCHEDULES.index("zero-bubble")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Columns by row: least and probable seconds of a step; least bytes on the fullest rank, and on any rank."""

    step_s: Array
    memory: Array
    least_memory: Array
    likely_s: Array


def least_samples(shapes: MeshTable, samples: int) -> Ints:
    """Least number of samples in every microbatch of the rank that has most, for any shares. A rank without samples
    computes one all the same.
    """
    slices = samples // shapes.microbatches
    return np.asarray(np.maximum(1, -(-slices // shapes.data)), dtype=np.int64)


def whole_slices(shapes: MeshTable, samples: int) -> tuple[Ints, Array]:
    """(samples of a microbatch, the mean data-parallel rank's fraction of it), for unequal shares.

    No rank has more than the whole microbatch, and none needs less time per sample than with the whole
    microbatch.
    """
    slices = -(-samples // shapes.microbatches)
    part = samples / (shapes.microbatches * shapes.data * slices)
    return np.asarray(slices, dtype=np.int64), np.asarray(part, dtype=np.float64)


def shape_bounds(tables: Tables, shapes: MeshTable, samples: int, *, offload: bool = False) -> tuple[Array, Array]:
    """Lower bounds (seconds, bytes) of every variant of a mesh; `offload`: with state in the host's memory."""
    best, speed, _ = by_kind((shapes.world,), tables.facts)

    def both(count: Ints) -> Array:
        return np.asarray(sum(by_kind((count, best.astype(np.int64)), tables.seconds)), dtype=np.float64)

    if tables.mixed:  # the rank that has most may be the best, and others have less
        slices, part = whole_slices(shapes, samples)
        each = np.maximum(both(least_samples(shapes, samples)), part * both(slices) / speed)
    else:
        each = both(least_samples(shapes, samples)) / speed
    seconds = shapes.microbatches * each / (shapes.split * shapes.context * shapes.space * shapes.stage)
    parameters, gradients, optimizer, _ = by_kind((shapes.split, shapes.expert, shapes.table), tables.state)
    # with stages, parameters and gradients stay whole
    whole = np.where(shapes.stage > 1, 1, shapes.copies)
    memory = ((parameters + gradients) / whole + optimizer / shapes.copies) / shapes.stage
    return np.asarray(seconds, dtype=np.float64), np.asarray(memory * (not offload), dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Columns over meshes: what their variants have in common.

    `speed` is the ranks' speed relative to the best worker. Bytes are whole, of a rank that has all stages, as in
    Tables.
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


def _facts(tables: Tables, rows: MeshTable, samples: int) -> Facts:
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
        outside=columns[3],
    )


@np.errstate(invalid="ignore")  # meshes that divide nothing take for ever: inf - inf
def variant_bounds(room: Room, found: MeshTable, variant_rows: Variants, samples: int) -> Bounds:
    """Bounds and estimates of the variants `variant_rows` of the meshes `found`."""
    meshes, place = np.unique(variant_rows.shape, return_inverse=True)
    where = place.reshape(-1)
    each = found.take(meshes)  # what depends on the mesh alone is worked out once for all its variants
    rows, facts = each.take(where), _facts(room.tables, each, samples).take(where)
    least, likely = _with_data(room.tables, rows, facts, samples, *_seconds(room, rows, variant_rows, facts, samples))
    fullest, emptiest = _memory(room, rows, variant_rows, facts)
    if room.tables.mixed:  # a rank may have fewer samples than the mean one has
        fewest = np.maximum(1, samples // rows.microbatches // rows.data)
        emptiest = _memory(room, rows, variant_rows, dataclasses.replace(facts, count=fewest))[1]
        # and any part of what split divides
        emptiest = np.where(_uneven(room.tables, rows) > 0, room.reserve, emptiest)
    return Bounds(step_s=least, memory=fullest, least_memory=emptiest, likely_s=likely)


def _memory(room: Room, rows: MeshTable, variant_rows: Variants, facts: Facts) -> tuple[Array, Array]:
    """(bytes on the fullest of the sampled places, bytes that every place has at least)."""
    inner = (rows.split, rows.context, rows.expert, rows.table, rows.space, facts.count.astype(np.int64))
    active = by_kind(
        (*inner, rows.stage, variant_rows.chunks, rows.microbatches, variant_rows.schedule, variant_rows.recompute),
                     room.activations)  # fmt: skip
    columns = by_kind((rows.split, rows.expert, rows.table, rows.stage, variant_rows.chunks), room.state)
    units = _Units(block=columns[-2], outside=columns[-1], count=rows.microbatches > 1)
    summing = rows.data * rows.context * rows.space > 1
    summing_experts = rows.copies * rows.table * rows.context * rows.space > 1
    single_device = ~summing & ~summing_experts & (rows.split == 1) & (rows.stage > 1) & (rows.microbatches > 1)
    found = []
    for place, activations in enumerate(active):
        own, lower, gradients, optimizer, buffers, temporary, bucket, routed, fresh = columns[place :: PLACES + 1][
            :STATES
        ]
        beside = np.maximum(np.where(summing, bucket, 0.0), np.where(summing_experts, routed, 0.0))
        state = _StateBounds(own=own, lower=lower, gradients=gradients, optimizer=optimizer)
        kept, passing = _sharded(variant_rows, state, units, beside, room.on_cpu)
        backward = kept.total + activations + passing + np.where(single_device, fresh, 0.0)
        if room.on_cpu:
            shard = variant_rows.shard
            update = kept.total - kept.lower + temporary / shard + np.where(shard > 1, passing, 0.0)
            backward = np.maximum(backward, update)
        found.append(backward * (1 + room.fragments) + buffers + room.reserve)
    return np.max(found[:PLACES], axis=0), np.asarray(found[PLACES], dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Units:
    """Bytes of the largest block's parameters and of those outside; `count`: whether there are several microbatches."""

    block: Array
    outside: Array
    count: Flags


@dataclass(frozen=True, slots=True, kw_only=True)
class _StateBounds:
    own: Array
    lower: Array
    gradients: Array
    optimizer: Array

    @property
    def total(self) -> Array:
        return self.own + self.lower + self.gradients + self.optimizer


def _sharded(
    variant_rows: Variants, state: _StateBounds, units: _Units, beside: Array, on_cpu: bool
) -> tuple[_StateBounds, Array]:
    """A rank's state after sharding, and the buffers that sharding needs; see the cost model's memory prediction."""
    shard = variant_rows.shard.astype(np.float64)
    level, away = variant_rows.level, variant_rows.offload > 0
    block, outside = units.block, units.outside
    rest = np.where(away, 0.0, 1 / shard)
    pending = 2.0 if on_cpu else 1 + 1 / shard
    through = cost_constants.PENDING_SUMS * pending * block + block + outside
    through = through + np.where(level == 3, outside + 3 * block, 0.0)
    gathered = np.where(level == 1, 2 * np.minimum(cost_constants.STATE_BUCKET_NBYTES, state.own), 0.0)
    left = _StateBounds(
        own=np.where(level == 3, rest * state.own, np.where(level == 2, (1 + rest) * state.own, state.own)),
        lower=np.where(level == 3, np.minimum(state.lower, (block + outside) / 2), state.lower),
        gradients=np.where(level >= 2, (rest + units.count) * state.gradients, state.gradients),
        optimizer=np.where(level >= 1, rest * state.optimizer, state.optimizer),
    )
    return left, np.asarray(np.where(level >= 2, through, beside + gathered), dtype=np.float64)


def _seconds(room: Room, rows: MeshTable, variant_rows: Variants, facts: Facts, samples: int) -> tuple[Array, Array]:
    """Least and probable seconds of a step.

    Passes follow one another. Gradient reduction overlaps the last microbatch's backward; the excess is waited
    for. Level 3 gathers the parameters behind each pass, level 1 what was updated. A rank updates its part of the
    optimizer's state.
    """
    kind = (variant_rows.schedule == _ZERO_BUBBLE).astype(np.int64)
    count, best = facts.count.astype(np.int64), facts.best.astype(np.int64)
    inner = (rows.split, rows.context, rows.expert, rows.table, rows.space, count, best)
    tables, each = room.tables, room.tables.per_node
    across_hosts = ((rows.stage > 1) & (rows.world // rows.stage % each == 0) & (not tables.unequal)).astype(np.int64)
    outer = (rows.stage, variant_rows.chunks, rows.microbatches, across_hosts, kind, variant_rows.recompute)
    least, path, likely, mean, ahead, back, summed, update = by_kind((*inner, *outer), room.work.step)
    update = update / np.where(variant_rows.level > 0, variant_rows.shard, 1)
    sums, gathers, probable = _exchanged(tables, rows, variant_rows, facts)
    third, times = variant_rows.level == 3, rows.microbatches.astype(np.float64)
    call = _latency(tables, facts, variant_rows.shard)
    calls = room.blocks * call
    ahead_s = np.where(third, gathers * facts.parameters + calls, 0.0)
    back_s = np.where(third, gathers * (facts.parameters - facts.outside) + calls, 0.0)
    last_s = back_s + sums * summed + np.where(variant_rows.level >= 2, calls, 0.0)
    waits = times * np.maximum(0.0, ahead_s - ahead) + (times - 1) * np.maximum(0.0, back_s - back)
    waits = waits + np.maximum(0.0, last_s - back) + _statistics(tables, rows, facts)
    gathered = np.where(variant_rows.level == 1, gathers * summed + call, 0.0)
    bound = np.maximum(least + waits + gathered + update, path)
    # Where ranks differ, the slowest may be one that waits for nothing: only the mean of the work is sure.
    bound = np.where(facts.speed < 1, mean / facts.speed, bound)
    if tables.mixed:
        slices, part = whole_slices(rows, samples)
        whole = by_kind((*inner[:5], slices, best, *outer), room.work.step)
        slack = part * _slack(room, rows, variant_rows, (*inner[:5], slices, best))
        most = mean - _slack(room, rows, variant_rows, inner)
        bound = _however_cut(tables, rows, (variant_rows.chunks == 1) & (kind == 0), most, part * whole[3] - slack)
        likely = np.maximum(likely * facts.speed, part * whole[2])
    passing = np.maximum(0.0, probable[0] - 0.8 * back) + np.maximum(0.0, probable[1] - 0.8 * likely) + gathered
    return (
        np.asarray(bound, dtype=np.float64),
        np.maximum(bound, (likely + update) / facts.speed + passing),
    )


def _with_data(
    tables: Tables, rows: MeshTable, facts: Facts, samples: int, least: Array, likely: Array
) -> tuple[Array, Array]:
    """A step's bound and estimate with the time of the loaders, for the rank with most samples. Where ranks differ,
    that rank may not be the slowest otherwise.
    """
    loading = tables.model.loading
    if loading is None:
        return least, likely
    shared = np.maximum(facts.count * rows.microbatches, -(-samples // rows.data))  # microbatches may be unequal
    own = np.full(len(least), float(samples)) if loading.stream else shared
    part = rows.space if loading.parts else 1
    own_s = own * (loading.core_s + loading.wait_s) / (max(1, loading.workers) * part)
    if loading.workers:
        return np.maximum(least, own_s), np.maximum(likely, own_s)
    alike = (facts.speed >= 1) & (not tables.mixed)
    return np.where(alike, least + own_s, np.maximum(least, own_s)), likely + own_s


def _however_cut(tables: Tables, rows: MeshTable, plain: Flags, most: Array, mean: Array) -> Array:
    """Least seconds where shares, parts and cuts are by speed.

    Args:
        tables: totals of the model.
        rows: the meshes.
        plain: whether the schedule fills and drains whole stages.
        most: mean work over the places of the pipeline replica with most samples, which may be of the best
            devices.
        mean: mean work over all pipeline replicas.
    """
    count = np.where((rows.stage > 1) & plain, rows.microbatches, 0)
    (relative_speed,) = by_kind(
        (rows.world, rows.stage, rows.context * rows.space, rows.split, count), tables.relative_speed
    )
    times = np.maximum(count, 1)
    best = np.where(count > 0, (1 - (1 - 1 / times) ** rows.stage) * times / rows.stage, 1.0)
    return np.asarray(np.maximum(mean / relative_speed, most / best), dtype=np.float64)


def _links(tables: Tables, facts: Facts) -> tuple[Array, ...]:
    """`Tables.links_of`, by row."""
    return by_kind((facts.best.astype(np.int64),), tables.links_of)


def _slack(room: Room, rows: MeshTable, variant_rows: Variants, inner: tuple[Ints, ...]) -> Array:
    """The most by which a step's work, as a mean over places, may be less where parts along split may be unequal."""
    ahead, back = by_kind(inner, room.work.slack)
    often = np.where(variant_rows.recompute > 0, 2.0, 1.0)
    return np.asarray(
        _uneven(room.tables, rows) * rows.microbatches * (often * ahead + back) / rows.stage, dtype=np.float64
    )


def _uneven(tables: Tables, rows: MeshTable) -> Array:
    """1 where parts along split may be unequal."""
    return by_kind((rows.world, rows.split), partial(uneven, tables))[0]


def _latency(tables: Tables, facts: Facts, ranks: Ints) -> Array:
    """Least seconds of a gather from this many ranks, however small: of a ring, or of rings within and between
    hosts.
    """
    hosts, (_, _, between, least) = -(-ranks // tables.per_node), _links(tables, facts)
    return np.where(ranks > 1, np.maximum(np.log2(ranks) * least, (hosts - 1) * between), 0.0)


def _statistics(tables: Tables, rows: MeshTable, facts: Facts) -> Array:
    """Least seconds of the communication of modules that normalise over the batch. Each microbatch has a gather in
    forward and a reduction in backward, both fully exposed.
    """
    modules = sum(module.batch_statistics for module in tables.model.modules)
    ranks = rows.data * rows.space
    each = _latency(tables, facts, ranks) + 2 * np.log2(ranks) * _links(tables, facts)[3]
    return np.where(rows.stage == 1, rows.microbatches * modules * each, 0.0)


def _exchanged(
    tables: Tables, rows: MeshTable, variant_rows: Variants, facts: Facts
) -> tuple[Array, Array, tuple[Array, Array]]:
    """Seconds of communication along the data-parallel axes. Least: seconds per byte of gradient reduction, and of
    gathering over shard. Probable: seconds of the reductions, and of the gathers at level 3.

    Levels 2 and 3 reduce-scatter over shard, then reduce the parts over the other copies.
    """
    stages = rows.stage.astype(np.float64)
    split, shard = rows.split.astype(np.float64), variant_rows.shard.astype(np.float64)
    inner = (rows.table * rows.expert * rows.context * rows.space).astype(np.float64)
    everyone = rows.copies * inner
    whole = _ring(tables, rows, facts, everyone, split)
    parts = _ring(tables, rows, facts, shard, split * inner)
    others = everyone / shard
    quickest = np.maximum(*_links(tables, facts)[:2])
    fastest = np.where(others > 1, 2 * (others - 1) / others / quickest, 0.0)
    divided = variant_rows.level >= 2
    low = np.where(divided, parts[0] / 2 + fastest / shard, whole[0])
    sums = np.where(divided, parts[1] / 2 + whole[1] / shard, whole[1]) * facts.gradients / stages
    gathered = np.where(
        variant_rows.level == 3, rows.microbatches * (2 * facts.parameters - facts.outside) / stages, 0.0
    )
    return low, parts[0] / 2, (sums, parts[1] / 2 * gathered)


def _ring(tables: Tables, rows: MeshTable, facts: Facts, degree: Array, inside: Array) -> tuple[Array, Array]:
    """Least and probable seconds per byte of an all-reduce over `degree` ranks with `inside` ranks in the axes
    within.

    For each group that crosses it, a host's connection carries 2 (h - 1) / h of the reduced bytes among h hosts,
    for any algorithm. Groups too wide for a host all cross, one for each of the ranks `inside`. Where some may
    not, or hosts are unequal, only the fastest link counts.
    """
    (node, network, *_), each = _links(tables, facts), tables.per_node
    reach = np.minimum(rows.world, each).astype(np.float64)
    within = (degree * inside <= reach) & (each % np.maximum(degree * inside, 1) == 0) | (facts.hosts <= 1)
    members = np.clip(reach / inside, 1.0, degree)
    sharing_groups = np.maximum(1.0, reach / members)
    spanned = np.maximum(2.0, degree / members)
    across = 2 * (spanned - 1) / spanned * sharing_groups / network
    wide = ((degree - 1) * inside >= each) & (not tables.unequal)
    hosts = np.maximum(2.0, np.minimum(np.ceil(degree / np.ceil(each / inside)), facts.hosts))  # more ranks than cores
    crossing = 2 * (hosts - 1) / hosts * np.minimum(inside, each) / network
    plain = 2 * (degree - 1) / degree
    least = np.where(within, plain / node, np.where(wide, crossing, plain / np.maximum(node, network)))
    likely = np.where(within, plain / node, across)
    return np.where(degree > 1, least, 0.0), np.where(degree > 1, likely, 0.0)


_TOO_LARGE = 8.0
"""Factor on the estimated time of candidates that probably do not fit."""

_FAILURES = 4
"""After this many refusals and no success a family is not tried again."""


@dataclass(slots=True, kw_only=True)
class Lesson:
    """What predictions of a family showed: sums of log(predicted / estimated) of time and memory, and their number."""

    time: float = 0.0
    memory: float = 0.0
    count: int = 0
    refused: int = 0

    @property
    def hopeless(self) -> bool:
        return self.count == 0 and self.refused >= _FAILURES


def family(shapes: MeshTable, variant_rows: Variants) -> Ints:
    """A number for what a plan combines: the axes it uses, its sharding, schedule and recompute."""
    axes = (shapes.split, shapes.stage, shapes.context, shapes.expert, shapes.table, shapes.space)
    code = np.zeros(len(variant_rows), dtype=np.int64)
    for axis in axes:
        code = code * 2 + (axis > 1)
    code = code * 2 + (shapes.copies // variant_rows.shard > 1)
    code = code * 4 + variant_rows.level
    code = code * 4 + variant_rows.schedule
    code = code * 3 + variant_rows.recompute
    code = code * 3 + variant_rows.offload
    return np.asarray(code * 2 + variant_rows.context_kind, dtype=np.int64)


@dataclass(slots=True, kw_only=True)
class Pool:
    """Rows of one SearchBranch (one order of nodes, one precision). `variant_rows` and `bounds` are columns over all
    rows so far.
    """

    variant_rows: list[Variants] = field(default_factory=list)
    least: Array = field(default_factory=lambda: np.empty(0))
    likely: Array = field(default_factory=lambda: np.empty(0))
    memory: Array = field(default_factory=lambda: np.empty(0))
    room: Array = field(default_factory=lambda: np.empty(0))
    world: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    family: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    part: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    row: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    done: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, dtype=np.bool_))

    def __len__(self) -> int:
        return len(self.least)

    def add(
        self, shapes: MeshTable, variant_rows: Variants, keep: NDArray[np.bool_], least: Array, likely: Array,
        bounds: Bounds,
        room: Array,
    ) -> None:  # fmt: skip
        """Add the rows of `variant_rows` that `keep` marks."""
        rows = np.flatnonzero(keep)
        taken = variant_rows.take(rows)
        at = shapes.take(taken.shape)
        self.variant_rows.append(taken)
        self.least = np.concatenate([self.least, least[rows]])
        self.likely = np.concatenate([self.likely, likely[rows]])
        self.memory = np.concatenate([self.memory, bounds.memory[rows]])
        self.room = np.concatenate([self.room, room[rows]])
        self.world = np.concatenate([self.world, at.world])
        self.family = np.concatenate([self.family, family(at, taken)])
        self.part = np.concatenate([self.part, np.full(len(rows), len(self.variant_rows) - 1, dtype=np.int64)])
        self.row = np.concatenate([self.row, np.arange(len(rows), dtype=np.int64)])
        self.done = np.concatenate([self.done, np.zeros(len(rows), dtype=np.bool_)])

    def drop(self, rows: NDArray[np.bool_]) -> None:
        """Drop the marked rows."""
        kept = ~rows
        for name in ("least", "likely", "memory", "room", "world", "family", "part", "row", "done"):
            setattr(self, name, getattr(self, name)[kept])

    def corrected(self, lessons: dict[int, Lesson]) -> Array:
        """Estimates corrected by the families' own predictions; infinite for families that are refused."""
        known = [lesson for lesson in lessons.values() if lesson.count]
        count = max(1, sum(lesson.count for lesson in known))
        overall = (sum(lesson.time for lesson in known) / count, sum(lesson.memory for lesson in known) / count)
        families, where = np.unique(self.family, return_inverse=True)
        times, sizes = np.ones(len(families)), np.ones(len(families))
        for index, one in enumerate(families.tolist()):
            lesson = lessons.get(one, Lesson())
            # One prediction of the family counts as much as all others together: families differ more than plans do.
            weight = lesson.count + 1
            times[index] = np.exp((lesson.time + overall[0]) / weight) if not lesson.hopeless else np.inf
            sizes[index] = np.exp((lesson.memory + overall[1]) / weight)
        at = where.reshape(-1)
        too_large = self.memory * sizes[at] > self.room
        return np.asarray(self.likely * times[at] * np.where(too_large, _TOO_LARGE, 1.0), dtype=np.float64)


def plainness(code: int) -> int:
    """The number of mechanisms that a family combines."""
    axes, level, schedule, recompute, offload = _parts(code)
    return axes.bit_count() + (level > 0) + (recompute > 0) + (schedule > 0) + (offload > 0)


def takes_long(code: int) -> bool:
    """Whether prediction is slow for large pipelines, because the schedule's order must be simulated."""
    return SCHEDULES[_parts(code)[2]] in ("interleaved", "zero-bubble")


def _parts(code: int) -> tuple[int, int, int, int, int]:
    """(axes, level, schedule, recompute, offload) of a family's number."""
    code //= 2
    offload, code = code % 3, code // 3
    recompute, code = code % 3, code // 3
    schedule, code = code % 4, code // 4
    return code // 4, code % 4, schedule, recompute, offload

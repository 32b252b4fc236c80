"""Exchanges of divided modules in a microbatch, by module: seconds waited, seconds of links, and bytes sent.

- split: outputs are reduced in forward and gradients of inputs in backward (Shoeybi et al. 2019, arXiv 1909.08053).
  Sequence parallelism takes as long (Korthikanti et al. 2022, arXiv 2205.05198).
- context: keys and values go around a ring (Liu et al. 2023, arXiv 2310.01889), or heads are exchanged for tokens
  (Jacobs et al. 2023, arXiv 2309.14509).
- expert: four all-to-alls per layer.
- table: vectors and their gradients; rows of divided linear layers in both directions.
- space: halos.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

import tutti.cost_model.compute_cost as compute_cost
import tutti.cost_model.cost_constants as cost_constants
from tutti.config.model import ModelSpec, ModuleSpec
from tutti.config.plan import Plan
from tutti.config.vocabulary import DATA_AXES
from tutti.cost_model.compute_cost import OpTable, PassCost
from tutti.cost_model.group_links import Network, RankGroup
from tutti.cost_model.module_costs import Flags, ModelTable, remembered
from tutti.cost_model.overlap import TIERS
from tutti.cost_model.work_division import Division, Region, computed_in_pieces, interior, marks
from tutti.cost_model.worker_speed import KINDS, Array, Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """Exchanges of one microbatch by module: seconds waited and bytes sent, in forward and in backward.

    Attributes:
        forward_link_s: (tiers, modules), seconds in which links of each of `overlap.TIERS` are in use in
            forward, hidden or not.
        backward_link_s: the same in backward.
    """

    forward_s: Array
    backward_s: Array
    forward_nbytes: Array
    backward_nbytes: Array
    forward_link_s: Array
    backward_link_s: Array

    def plus(self, other: "Exchanged") -> "Exchanged":
        """Return both exchanges, one after the other."""
        return Exchanged(
            forward_s=self.forward_s + other.forward_s,
            backward_s=self.backward_s + other.backward_s,
            forward_nbytes=self.forward_nbytes + other.forward_nbytes,
            backward_nbytes=self.backward_nbytes + other.backward_nbytes,
            forward_link_s=self.forward_link_s + other.forward_link_s,
            backward_link_s=self.backward_link_s + other.backward_link_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Wires:
    """What the exchanges of a plan depend on besides the number of samples.

    Attributes:
        half: whether matrix products are computed in 16 bits.
        on_cpu: whether the ranks compute on CPUs.
    """

    model: ModelSpec
    plan: Plan
    columns: ModelTable
    division: Division
    network: Network
    half: bool
    on_cpu: bool

    def statistics_group(self) -> RankGroup:
        """Return the ranks that share batch statistics; a group of one rank where the model has none."""
        shared = self.model.batch_statistics and self.plan.sync.mode == "synchronous"
        return self.network.group(*(*DATA_AXES, "space") if shared else ())

    def hidden(self, group: RankGroup, room: Array, seconds: Callable[[RankGroup], Array]) -> Array:
        """Return the seconds that a rank waits for exchanges of `group` that run beside its own work.

        Between ranks on a CPU, transfers take cores from that work.

        Args:
            room: (modules,) seconds of the rank's own work that can hide the exchanges.
            seconds: (group) -> (modules,) seconds of the exchanges.
        """
        whole, on_cores = seconds(group), seconds(group.on_cores(self.network.host_groups[0]))
        behind = np.minimum(whole, room)
        return whole - behind + on_cores * behind / np.where(whole > 0, whole, 1.0)


def exchanged(wires: Wires, samples: float, forward_s: Array, backward_s: Array) -> Exchanged:
    """Return the exchanges of a microbatch of `samples`, beside the given seconds of the modules' own work."""
    zero = np.zeros(len(wires.columns))
    result = _waited(wires.network.group(), (zero, zero), (zero, zero))
    plan = wires.plan
    group = wires.statistics_group()
    if group.ranks > 1:
        result = _waited(group, statistics_s(wires.model, group), (zero, zero))
    if plan.degree("split") > 1:
        result = result.plus(_split(wires, samples))
    if plan.degree("context") > 1:
        form = _ring if plan.context == "ring" else _heads
        result = result.plus(form(wires, samples, forward_s, backward_s))
    if wires.columns.routed.any() and plan.data_parallel_degree > 1:
        result = result.plus(_experts(wires, samples))
    if plan.degree("table") > 1:
        if wires.columns.table.any():
            result = result.plus(_tables(wires, samples))
        if wires.division.linear.any():
            result = result.plus(_linears(wires, samples))
    if plan.degree("space") > 1:
        result = result.plus(_halos(wires, samples, forward_s, backward_s))
    return result


def _waited(group: RankGroup, seconds: tuple[Array, Array], nbytes: tuple[Array, Array]) -> Exchanged:
    """Return exchanges of `group` that are not hidden; `seconds` and `nbytes` are (in forward, in backward)."""
    return Exchanged(
        forward_s=seconds[0],
        backward_s=seconds[1],
        forward_nbytes=nbytes[0],
        backward_nbytes=nbytes[1],
        forward_link_s=_on(group, seconds[0]),
        backward_link_s=_on(group, seconds[1]),
    )


def _on(group: RankGroup, seconds: Array) -> Array:
    """Return (tiers, modules): `seconds` on the links that the group crosses."""
    return np.array([seconds if tier == group.tier else np.zeros(len(seconds)) for tier in TIERS])


def each_of(seconds: Callable[[float], float], nbytes: Array) -> Array:
    """Return `seconds` of every entry, computed once for equal entries; 0 bytes take no time."""
    result = np.zeros(len(nbytes))
    at = np.flatnonzero(nbytes)
    if len(at):
        different, back = np.unique(nbytes[at], return_inverse=True)
        result[at] = np.array([seconds(float(entry)) for entry in different])[back]
    return result


def split_nbytes(columns: ModelTable, part: Division, samples: float, *, half: bool) -> tuple[Array, Array, Array]:
    """Return (modules,) bytes over split: outputs that are reduced, outputs that are gathered, gradients of inputs."""
    low = np.where(columns.multiplies & half, 0.5, 1.0)
    outputs = samples * part.passed * columns.outputs * low
    inputs = np.where(part.split, samples * part.passed * columns.inputs, 0.0)
    reduced, gathered = part.split & columns.summed, part.split & columns.gathered
    return np.where(reduced, outputs, 0.0), np.where(gathered, outputs, 0.0), inputs


def _split(wires: Wires, samples: float) -> Exchanged:
    """Return the exchanges of tensor parallelism."""
    division, group = wires.division, wires.network.group("split")
    t = group.ranks
    sums, gathers, into = split_nbytes(wires.columns, division, samples, half=wires.half)
    if division.padded is None:
        ahead = each_of(group.summed, sums) + each_of(group.divided, gathers)
        back = each_of(group.summed, into) + each_of(group.divided, gathers)
        sent = ((2 * sums + gathers) * (t - 1) / t, (2 * into + gathers) * (t - 1) / t)
    else:  # unequal parts take as long as the largest, and reductions give every rank the whole result
        padded = gathers * division.padded
        ahead = each_of(group.summed, sums) + each_of(group.divided, padded)
        back = each_of(group.summed, into) + each_of(group.summed, gathers)
        sent = ((2 * sums + padded) * (t - 1) / t, 2 * (into + gathers) * (t - 1) / t)
    return _waited(group, (ahead, back), sent)


def key_value_nbytes(columns: ModelTable, part: Division, samples: float) -> Array:
    """Return (modules,) bytes of the keys and values of a rank's part of each sequence, in full precision."""
    return samples * part.work * columns.key_value


def _ring(wires: Wires, samples: float, forward_s: Array, backward_s: Array) -> Exchanged:
    """Return the exchanges of ring attention.

    A transfer runs while the block before it is computed. In backward the gradients go around as well, in full
    precision.
    """
    group = wires.network.group("context")
    c = group.ranks
    full = key_value_nbytes(wires.columns, wires.division, samples)
    part = full * (0.5 if wires.half else 1.0)
    rounds = np.where(part > 0, (c - 1.0) / c, 0.0)

    def ahead(over: RankGroup) -> Array:
        return (c - 1) * each_of(over.pass_on, part)

    def back(over: RankGroup) -> Array:
        return ahead(over) + c * each_of(over.pass_on, full)

    return Exchanged(
        forward_s=wires.hidden(group, rounds * forward_s, ahead),
        backward_s=wires.hidden(group, rounds * backward_s, back),
        forward_nbytes=(c - 1) * part,
        backward_nbytes=(c - 1) * part + c * full,
        forward_link_s=_on(group, ahead(group)),
        backward_link_s=_on(group, back(group)),
    )


def _heads(wires: Wires, samples: float, forward_s: Array, backward_s: Array) -> Exchanged:
    """Return the exchanges of queries, keys, values and results for context parallelism by heads."""
    group = wires.network.group("context")
    c = group.ranks
    attends = wires.columns.key_value > 0
    low = samples * wires.division.work * (0.5 if wires.half else 1.0)
    keys = key_value_nbytes(wires.columns, wires.division, samples) * (0.5 if wires.half else 1.0) / 2
    queries = np.where(attends, low * wires.columns.outputs, 0.0)
    seconds = 2 * each_of(group.all_to_all, keys) + 2 * each_of(group.all_to_all, queries)
    sent = 2 * (keys + queries) * (c - 1) / c
    return _waited(group, (seconds, seconds), (sent, sent))


def routed_nbytes(columns: ModelTable, part: Division, samples: float) -> Array:
    """Return (modules,) bytes of the tokens that a rank sends to experts; as many bytes return."""
    return samples * part.passed * columns.routed


def _experts(wires: Wires, samples: float) -> Exchanged:
    """Return the exchanges of experts.

    Tokens are sent and returned twice. Before that, all ranks exchange how many tokens chose which expert.
    """
    group, sharers = wires.network.group("expert"), wires.network.group(*DATA_AXES)
    e = group.ranks
    routed = routed_nbytes(wires.columns, wires.division, samples)
    sent = routed * (e - 1) / e * 2
    counted = np.where(routed > 0, sharers.scatter(cost_constants.LOSS_NBYTES), 0.0)
    seconds = 2 * each_of(group.all_to_all, routed) + counted
    return _waited(group, (seconds, seconds + counted), (sent, sent))


def vector_nbytes(columns: ModelTable, part: Division, samples: float) -> Array:
    """Return (modules,) bytes of the vectors that are looked up in divided embedding tables."""
    return np.where(columns.table, samples * part.passed * columns.outputs, 0.0)


def _tables(wires: Wires, samples: float) -> Exchanged:
    """Return the exchanges of embedding tables. Consecutive tables share their exchanges.

    They exchange sizes, rows (both small), and vectors.
    """
    group = wires.network.group("table")
    columns = wires.columns
    vectors = vector_nbytes(columns, wires.division, samples)
    moved = np.flatnonzero(columns.table)
    runs = np.split(moved, np.flatnonzero(np.diff(moved) > 1) + 1)
    seconds, small = np.zeros(len(columns)), group.all_to_all(1.0)
    for run in runs:
        seconds[run[0]] = group.all_to_all(float(vectors[run].sum()))
    sent = vectors * (group.ranks - 1) / group.ranks
    asked = np.where(seconds > 0, 2 * small, 0.0)
    return _waited(group, (seconds + asked, seconds), (sent, sent))


def linear_nbytes(columns: ModelTable, part: Division, samples: float, *, half: bool) -> tuple[Array, Array]:
    """Return (modules,) bytes that a rank exchanges for linear layers divided over table: (of their inputs, of
    their outputs).
    """
    values = np.where(part.linear, samples * part.passed * (0.5 if half else 1.0), 0.0)
    inputs = values * columns.linear * np.where(part.by_outputs, part.holders, 1.0)
    return inputs, values * columns.outputs * np.where(part.by_outputs, 1.0, part.holders)


def _linears(wires: Wires, samples: float) -> Exchanged:
    """Return the exchanges of divided linear layers.

    By columns, inputs go to all ranks and parts of outputs return. By rows, parts of inputs go, and all ranks'
    partial outputs return. Gradients take the same routes. Each rank first announces its number of rows.
    """
    group, part = wires.network.group("table"), wires.division
    columns, n = wires.columns, wires.network.group("table").ranks
    into, out = linear_nbytes(columns, part, samples, half=wires.half)
    trained = np.where(columns.first, 0.0, 1.0)
    there, back = each_of(group.all_to_all, into), each_of(group.all_to_all, out)
    announced = np.where(part.linear, group.all_to_all(1.0), 0.0)
    sent = ((into + out) * (n - 1) / n, (trained * into + out) * (n - 1) / n)
    return _waited(group, (there + back + announced, trained * there + back), sent)


def _halos(wires: Wires, samples: float, forward_s: Array, backward_s: Array) -> Exchanged:
    """Return the exchanges of halos: a rank inside the grid sends to both sides of every dim that is cut.

    The interior is computed while the first dim's halos are in transit, and its gradients while the last dim's
    return. The dims are exchanged one after the other. Each dim also carries the halos that came before it, or
    padding, so that corners arrive: 2 h rows beside a rank's N / parts. 2 h / N is the halo's fraction of a
    module's input, which is taken as the activations that it keeps.
    """
    group, columns = wires.network.group("space"), wires.columns
    grid = wires.plan.space_grid or (wires.plan.degree("space"),)
    sent, grown = np.zeros(len(columns)), np.ones(len(columns))
    dims: list[tuple[RankGroup, Array]] = []
    whole = np.where(columns.activations > 0, columns.activations, np.inf)
    for dim, parts in enumerate(grid[:3]):
        if parts > 1:
            others = group.ranks / parts  # the other dims are cut too, so the plane that is sent is smaller
            halo = columns.halo[:, dim]
            side = samples * halo / 2 / others * grown
            grown = grown * (1 + parts * halo / whole)
            dims.append((wires.network.along_grid(grid, dim), side))
            sent += min(2, parts - 1) * side
    inside = interior(columns, grid)
    piecewise = np.where(inside >= cost_constants.LEAST_INTERIOR, inside, 0.0)
    by_dim = [_sides(*dim_transfer) for dim_transfer in dims]
    seconds = np.sum(by_dim, axis=0)
    return Exchanged(
        forward_s=seconds
        - by_dim[0]
        + wires.hidden(dims[0][0], piecewise * forward_s, partial(_sides, side=dims[0][1])),
        backward_s=seconds
        - by_dim[-1]
        + wires.hidden(dims[-1][0], piecewise * backward_s, partial(_sides, side=dims[-1][1])),
        forward_nbytes=sent,
        backward_nbytes=sent,
        forward_link_s=_on(group, seconds),
        backward_link_s=_on(group, seconds),
    )


def _sides(group: RankGroup, side: Array) -> Array:
    """Return the seconds in which each rank sends `side` bytes to its neighbours on both sides."""
    return each_of(group.to_neighbours, side)


_STATISTIC_NBYTES = 4  # float32
_STATE_VALUES = 2  # running mean and variance of a channel
_COUNTER_NBYTES = 8  # batches tracked


def statistics_s(model: ModelSpec, group: RankGroup) -> tuple[Array, Array]:
    """Return the seconds of a microbatch's exchanges of batch statistics over `group`, by module: (in forward, in
    backward).

    Forward gathers count, mean and squared deviations of every channel from all ranks. Backward reduces two
    vectors.
    """
    channels = _channels_of(model)
    forward, backward = np.zeros(len(channels)), np.zeros(len(channels))
    for index in np.flatnonzero(channels) if group.ranks > 1 else ():
        gathered = group.ranks * (2 * channels[index] + 1) * _STATISTIC_NBYTES
        forward[index] = group.scatter(gathered)  # an all-gather takes as long as a reduce-scatter
        backward[index] = group.all_reduce(2 * channels[index] * _STATISTIC_NBYTES)
    return forward, backward


def taken_in_passes(ops: OpTable) -> OpTable:
    """Return the operators of a CPU rank whose batch statistics are shared by several ranks.

    A BatchNorm then reads its values in passes, as a norm of rows does, and takes `SHARED_NORM` times as long.
    """
    batch, rows = KINDS.index("batch_norm"), KINDS.index("norm")
    those = ops.kind == batch
    if not those.any():
        return ops
    longer = np.where(those, cost_constants.SHARED_NORM, 1.0)
    return replace(
        ops,
        kind=np.where(those, rows, ops.kind),
        flops_forward=ops.flops_forward * longer,
        flops_backward=ops.flops_backward * longer,
    )


def at_least(
    one: Callable[..., PassCost], ops: OpTable, worker: Worker, samples: int, modules: int, *, weights: bool = True
) -> PassCost:
    """Return the cost of a pass with batch statistics of one rank or of several ranks, whichever is less for each
    module.

    Args:
        one: `compute_cost.forward` or `compute_cost.backward`.
    """
    per_rank = one(ops, worker, samples, modules, weights=weights)
    shared_ops = taken_in_passes(ops) if worker.gap_s is None else ops
    if shared_ops is ops:
        return per_rank
    shared = one(shared_ops, worker, samples, modules, weights=weights)
    limits = np.where(shared.seconds < per_rank.seconds, shared.limits, per_rank.limits)
    return PassCost(seconds=np.minimum(shared.seconds, per_rank.seconds), limits=limits)


@remembered(16)
def _channels_of(model: ModelSpec) -> Array:
    return np.array([_channels(module) if module.batch_statistics else 0.0 for module in model.modules])


def _channels(module: ModuleSpec) -> float:
    """Return the channels of a BatchNorm: from its running statistics, or from weight and bias where it has none."""
    if module.buffer_nbytes:
        return (module.buffer_nbytes - _COUNTER_NBYTES) / (_STATE_VALUES * _STATISTIC_NBYTES)
    return module.parameters / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """Seconds of a microbatch by module; recompute counts as backward.

    Attributes:
        waits: seconds waited and bytes sent; recompute repeats exchanges.
        limits: (3, modules), seconds of both passes by what limits them.
    """

    forward_s: Array
    backward_s: Array
    waits: Exchanged
    limits: Array

    @property
    def total_s(self) -> float:
        """Seconds of all modules in both passes."""
        return float((self.forward_s + self.backward_s + self.waits.forward_s + self.waits.backward_s).sum())


def passed(wires: Wires, worker: Worker, regions: tuple[Region, ...], samples: int) -> Passed:
    """Return the cost of a microbatch of `samples` samples on a rank with the speed of `worker`."""
    ops, modules = wires.division.ops, len(wires.columns)
    if wires.on_cpu and wires.statistics_group().ranks > 1:
        ops = taken_in_passes(ops)
    ahead = compute_cost.forward(ops, worker, samples, modules)
    back = compute_cost.backward(ops, worker, samples, modules)
    for chunks in {region.chunks for region in regions} - {1}:
        inside = np.zeros(modules, dtype=np.bool_)
        inside[[index for region in regions if region.chunks == chunks for index in region.members]] = True
        part = -(-samples // chunks)
        ahead = _chunked(ahead, compute_cost.forward(ops, worker, part, modules), inside, chunks)
        back = _chunked(back, compute_cost.backward(ops, worker, part, modules), inside, chunks)
    grid = (wires.plan.space_grid or (wires.plan.degree("space"),))[:3]
    ahead, back = computed_in_pieces(
        wires.columns, wires.division, grid, worker, samples, (ahead, back), on_cpu=wires.on_cpu
    )
    again = repeats(wires.columns, regions)
    waits = exchanged(wires, samples, ahead.seconds, back.seconds)
    if regions:
        repeated = again * ~last_reduced(wires.columns, wires.division, regions)
        waits = Exchanged(
            forward_s=waits.forward_s,
            backward_s=waits.backward_s + repeated * waits.forward_s,
            forward_nbytes=waits.forward_nbytes,
            backward_nbytes=waits.backward_nbytes + repeated * waits.forward_nbytes,
            forward_link_s=waits.forward_link_s,
            backward_link_s=waits.backward_link_s + repeated * waits.forward_link_s,
        )
    return Passed(
        forward_s=ahead.seconds,
        backward_s=back.seconds + again * ahead.seconds,
        waits=waits,
        limits=ahead.limits * (1.0 + again) + back.limits,
    )


def repeats(columns: ModelTable, regions: tuple[Region, ...]) -> Array:
    """Return 1 for modules whose forward is computed again in backward, else 0."""
    again = np.zeros(len(columns))
    if regions:
        marked = marks(regions)
        expensive = columns.multiplies[marked.member] & marked.selective[marked.of]
        again[marked.member] = np.where(expensive, 0.0, 1.0)
    return again


def last_reduced(columns: ModelTable, part: Division, regions: tuple[Region, ...]) -> Flags:
    """Return a mask of the last module of each region whose output is reduced.

    Backward needs nothing that comes after that module, so the region is not recomputed beyond it.
    """
    result = np.zeros(len(columns), dtype=np.bool_)
    if not regions:
        return result
    marked = marks(regions)
    summed = part.split[marked.member] & columns.summed[marked.member]
    last = np.zeros(len(regions), dtype=np.intp) - 1
    np.maximum.at(last, marked.of[summed], marked.member[summed])
    result[last[last >= 0]] = True
    return result


def _chunked(
    whole: compute_cost.PassCost, part: compute_cost.PassCost, inside: Flags, chunks: int
) -> compute_cost.PassCost:
    """Return `whole`, where the modules in the mask `inside` run `part` that many times."""
    return compute_cost.PassCost(
        seconds=np.where(inside, chunks * part.seconds, whole.seconds),
        limits=np.where(inside, chunks * part.limits, whole.limits),
    )

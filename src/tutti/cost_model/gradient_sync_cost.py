"""Communication that happens once a step: the reduction of gradients, and the gathers of the shard axis."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

import tutti.cost_model.sharding_cost as sharding_cost
from tutti.config.cluster import DeviceKind
from tutti.config.compression import (
    FACTORS,
    ZERO_ONE,
    Compression,
    all_reduce_sent_nbytes,
    factors_pay,
    factors_sent_nbytes,
)
from tutti.config.model import ModelSpec
from tutti.config.plan import Plan
from tutti.config.vocabulary import DATA_AXES, AxisName
from tutti.cost_model.compressed_sync_cost import (
    VALUE_NBYTES,
    PartsWritten,
    Written,
    changes_written,
    kept_nbytes,
    kernel_s,
    parts_written,
    written,
)
from tutti.cost_model.group_links import Network, RankGroup
from tutti.cost_model.module_costs import Flags, ModelTable, model_table
from tutti.cost_model.offload_cost import copied_fraction, is_offloaded, leaves_early, level_of, load_s_per_nbyte
from tutti.cost_model.overlap import TIERS, BucketCost, CommCost, Taken, buckets, exchange
from tutti.cost_model.rank_placement import HostGroup
from tutti.cost_model.relaxed_sync_cost import CompressedExchange, Trained, diverged_exchange, waited_parts
from tutti.cost_model.sharding_cost import Costs
from tutti.cost_model.work_division import Division
from tutti.cost_model.worker_speed import Array, best_rate, rank_bandwidth

SUMMED: tuple[AxisName, ...] = (*DATA_AXES, "context", "space")
"""Axes along which ranks have different gradients, because they saw other samples or other parts of samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsOf:
    """The weight of a linear layer that is reduced by sufficient factors.

    Attributes:
        rows: rows of its factors in a step, over all ranks.
        width: bytes of one value of a factor.
    """

    module: int
    rows: float
    out_features: float
    in_features: float
    ranks: int
    width: int

    @property
    def nbytes(self) -> float:
        """Bytes of the weight's gradient."""
        return self.out_features * self.in_features * _VALUE_NBYTES

    @property
    def sent_nbytes(self) -> float:
        """Bytes that one rank sends in a step, if all ranks have equally many rows."""
        return factors_sent_nbytes(self.rows / self.ranks, self.out_features, self.in_features, self.ranks, self.width)

    def sum_s(self, plan: Plan, group: RankGroup, host_group: HostGroup) -> tuple[float, float]:
        """Return (seconds, seconds of one thread among them) of the reduction over `group`.

        Every rank receives all rows, and multiplies those of the other ranks as well as its own.
        """
        device = host_group.device
        share = min(1.0, host_group.threads / max(1, device.cores)) if device.kind == "cpu" else 1.0
        rate = (best_rate(device, "float32") or max(device.peak_flops_per_s.values(), default=0.0)) * share
        others = self.rows * (self.ranks - 1) / self.ranks
        product = host_group.slowdown * 2 * others * self.out_features * self.in_features / rate if rate else 0.0
        return self.wire_s(group) + product, product * (host_group.threads if device.kind == "cpu" else 1)

    def wire_s(self, group: RankGroup) -> float:
        """Return the seconds in which `group` exchanges the rows, after the number of rows."""
        values = self.rows * (self.out_features + self.in_features)
        return group.all_to_all(8 * self.ranks) + group.all_to_all(values * self.width)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summed:
    """Gradients that one group reduces: bytes by module, and the buckets they are fused in.

    Attributes:
        written: how a codec encodes them; None without a codec.
        factors: the linear layer's weight that is reduced by factors.
    """

    group: RankGroup
    nbytes: Array
    buckets: tuple[BucketCost, ...]
    written: Written | None = None
    factors: RowsOf | None = None

    @property
    def sent_nbytes(self) -> float:
        """Bytes that one rank sends in a step."""
        if self.factors is not None:
            return self.factors.sent_nbytes
        if self.written is not None:
            return self.written.sent_nbytes
        return 2 * (self.group.ranks - 1) / self.group.ranks * float(self.nbytes.sum())


def summed(
    columns: ModelTable, part: Division, net: Network, plan: Plan, own: Flags, updates: int | None = None
) -> list[Summed]:
    """Return the gradients of the modules `own` by the group that reduces them, after `updates` updates.

    Groups of one rank are left out.
    """
    nbytes = (columns.gradients * part.weight)[own]
    divided_by = {
        "expert": columns.expert[own] & (plan.degree("expert") > 1),
        "table": (columns.table | part.linear)[own] & (plan.degree("table") > 1),
        "split": columns.sequence[own] & (plan.degree("split") > 1),
    }
    kinds: list[tuple[tuple[AxisName, ...], Flags]] = [
        (tuple(axis for axis in SUMMED if axis != "expert"), divided_by["expert"]),
        (tuple(axis for axis in SUMMED if axis != "table"), divided_by["table"]),
        ((*SUMMED, "split"), divided_by["split"]),
        (SUMMED, ~(divided_by["expert"] | divided_by["table"] | divided_by["split"])),
    ]
    reductions = []
    for axes, mask in kinds:
        group, own_nbytes = net.group(*axes), np.where(mask, nbytes, 0.0)
        places = np.flatnonzero(own)
        whole = (own_nbytes > 0) & (part.weight[own] == 1)
        for rows in by_factors(columns, plan, group.ranks, axes, places[whole].tolist()):
            place = int(np.flatnonzero(places == rows.module)[0])
            own_nbytes[place] = max(0.0, own_nbytes[place] - rows.nbytes)
            bucket_cost = BucketCost(nbytes=rows.nbytes, last=len(nbytes) - 1 - place)
            factor_nbytes = np.where(places == rows.module, rows.nbytes, 0.0)
            reductions.append(Summed(group=group, nbytes=factor_nbytes, buckets=(bucket_cost,), factors=rows))
        if group.ranks > 1 and own_nbytes.any():
            filled = buckets(own_nbytes.tolist(), plan.sync.bucket_nbytes)
            how = written(plan, group, axes, own_nbytes, [bucket.nbytes for bucket in filled], updates)
            kept = (
                tuple(
                    replace(bucket_cost, kept_nbytes=kept_nbytes(plan, how, bucket_cost.nbytes))
                    for bucket_cost in filled
                )
                if how
                else filled
            )
            reductions.append(Summed(group=group, nbytes=own_nbytes, buckets=kept, written=how))
    return reductions


def fused(sums: list[Summed]) -> list[tuple[BucketCost, Summed]]:
    """Return all buckets in the order in which backward fills them, each with its reduction."""
    pairs = [(bucket, reduction) for reduction in sums for bucket in reduction.buckets]
    return sorted(pairs, key=lambda pair: pair[0].last)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync:
    """What a rank of one stage exchanges once a step: times, bytes sent, and gradient buckets."""

    exchange: CommCost
    sent_nbytes: float
    buckets: tuple[BucketCost, ...]


def synchronise(
    columns: ModelTable,
    part: Division,
    net: Network,
    plan: Plan,
    own: Flags,
    passes: tuple[Array, Array],
    taken: Taken,
    updates: int | None,
    update_s: float,
) -> Sync:
    """Return the cost of reducing the gradients of the modules `own`, which begins in the last microbatch's
    backward.

    Args:
        passes: (forward, backward) seconds of a microbatch by module, exchanges included.
        taken: when those exchanges use the links.
        updates: updates made before this step.
        update_s: seconds of the optimizer's update.
    """
    kind, microbatches = net.host_groups[0].device.kind, plan.batch.num_microbatches
    if plan.sync.mode != "synchronous":
        return _diverged(columns, net, plan, microbatches * float(passes[0].sum() + passes[1].sum()) + update_s)
    taken = taken.in_turns(*passes, net.host_groups[0].node.turns)
    unsharded = plan.degree("shard") == 1
    if is_offloaded(plan, kind) if unsharded else plan.sharding.level > 1:
        return _divided(columns, part, net, plan, passes, microbatches, taken)
    if diverges_between_updates(plan, updates):
        agreement = agreed(plan, net.group("replicate"), net.host_groups[0], float(columns.gradients[own].sum()))
        kept = BucketCost(nbytes=0.0, last=0, kept_nbytes=agreement.kept_nbytes)
        return Sync(exchange=agreement.exchange, sent_nbytes=agreement.sent_nbytes, buckets=(kept,))
    sums = summed(columns, part, net, plan, own, updates)
    pairs = fused(sums)
    backward = passes[1][own][::-1]
    busy = taken.backward[:, own][:, ::-1]
    host_group = net.host_groups[0]
    # equal blocks make equal buckets
    different = {(bucket.nbytes, id(reduction)): reduction for bucket, reduction in pairs}
    times = {key: _sum_s(plan, reduction, host_group, key[0]) for key, reduction in different.items()}
    bucket_times = [times[bucket.nbytes, id(reduction)] for bucket, reduction in pairs]
    on_cores = [_cores_s(reduction, host_group, bucket.nbytes) for bucket, reduction in pairs]
    done = exchange(
        backward.tolist(),
        [bucket for bucket, _ in pairs],
        [seconds for seconds, _ in bucket_times],
        cores_s=on_cores,
        taken=[busy[TIERS.index(reduction.group.tier)] for _, reduction in pairs],
        after=[float(taken.after[TIERS.index(reduction.group.tier)]) for _, reduction in pairs],
    )
    sent, kernels = sum(reduction.sent_nbytes for reduction in sums), sum(inside for _, inside in bucket_times)
    gathered = _states(columns, part, net, plan, own, kind)
    copied_s = gathered[0] + _fused_s(sums, host_group)
    taken_s = copied_s + _beside(done, kernels, 1 if kind == "cuda" else host_group.threads)
    return Sync(
        exchange=CommCost(total_s=done.total_s + copied_s, exposed_s=done.exposed_s + taken_s),
        sent_nbytes=sent + gathered[1],
        buckets=tuple(bucket for bucket, _ in pairs),
    )


def _fused_s(sums: list[Summed], host_group: HostGroup) -> float:
    """Return the seconds in which a rank's cores copy gradients into their buckets.

    It is 0 on GPUs, whose memory is far faster than links.
    """
    if host_group.device.kind != "cpu":
        return 0.0
    return (
        2 * _pass_s(host_group) * sum(float(reduction.nbytes.sum()) for reduction in sums if reduction.factors is None)
    )


def _sum_s(plan: Plan, one: Summed, host_group: HostGroup, nbytes: float) -> tuple[float, float]:
    """Return (seconds, seconds of kernels among them) of the reduction of one bucket."""
    if one.factors is not None:
        return one.factors.sum_s(plan, one.group, host_group)
    if one.written is None:
        return one.group.summed(nbytes), 0.0
    return one.written.sum_s(plan, one.group, host_group, nbytes)


def _cores_s(one: Summed, host_group: HostGroup, nbytes: float) -> float:
    """Return the seconds of a rank's cores that the exchange of a bucket takes, without kernels."""
    group = one.group.on_cores(host_group)
    if one.factors is not None:
        return one.factors.wire_s(group)
    return group.summed(nbytes) if one.written is None else one.written.wire_s(group, nbytes)


def _beside(done: CommCost, kernels_s: float, cores: int) -> float:
    """Return the seconds by which hidden kernels lengthen backward, because they take one of the rank's `cores`
    threads.
    """
    return (done.total_s - done.exposed_s) * kernels_s / done.total_s / cores if kernels_s else 0.0


def _diverged(columns: ModelTable, net: Network, plan: Plan, behind_s: float) -> Sync:
    """Return the exchange of replicas that diverge: parameters instead of gradients."""
    trained = Trained(
        parameters=float(columns.gradients.sum()),
        optimizer=float(columns.optimizer.sum()),
        statistics=float(columns.buffers.sum()),
    )
    group, host_group = net.group("replicate"), net.host_groups[0]
    how, coded = changes_written(plan, group, columns.gradients), None
    if how is not None:
        seconds, kernels_s = how.sum_s(plan, group, host_group, trained.parameters)
        assert plan.sync.compress is not None
        parts = waited_parts(plan.sync.compress, trained.parameters)
        coded = CompressedExchange(
            seconds=seconds,
            kernels_s=kernels_s,
            cores_s=how.wire_s(group.on_cores(host_group), trained.parameters),
            sent_nbytes=how.sent_nbytes,
            parts=parts,
        )
    done = diverged_exchange(plan.sync, group, host_group, trained, behind_s, coded)
    return Sync(exchange=done.exchange, sent_nbytes=done.sent_nbytes, buckets=())


def _states(
    columns: ModelTable, part: Division, net: Network, plan: Plan, own: Flags, kind: DeviceKind
) -> tuple[float, float]:
    """Return (seconds, bytes sent) of gathering updated parameters, where the optimizer state is sharded."""
    group = net.group("shard")
    if group.ranks == 1:
        return 0.0, 0.0
    nbytes = float((np.where(own, columns.gradients, 0.0) * part.weight).sum())  # of trained parameters
    loads = 2 * nbytes / group.ranks * load_s_per_nbyte(net.host_groups[0]) if is_offloaded(plan, kind) else 0.0
    if kind == "cpu":  # packed and unpacked; in shared memory the link's time includes the copies of others' parts
        unpacked = (group.span.hosts if group.node is not None else group.ranks) / group.ranks
        loads += 2 * (1 / group.ranks + unpacked) * nbytes * _pass_s(net.host_groups[0])
    return group.divided(nbytes) + loads, (group.ranks - 1) / group.ranks * nbytes


def _pass_s(host_group: HostGroup) -> float:
    """Return the seconds in which a rank's cores read or write one byte."""
    return host_group.slowdown / rank_bandwidth(host_group)


def _divided(
    columns: ModelTable,
    part: Division,
    net: Network,
    plan: Plan,
    passes: tuple[Array, Array],
    microbatches: int,
    taken: Taken,
) -> Sync:
    """Return the exchanges of a step with sharded gradients (levels 2 and 3)."""
    kind = net.host_groups[0].device.kind
    group = net.group("shard")
    others = net.group(*(axis for axis in SUMMED if axis != "shard"))
    busy = TIERS.index(group.tier)
    host_group = net.host_groups[0]
    copied = columns.parameters * copied_fraction(columns, plan)
    work = sharding_cost.unit_work(columns, part, *passes, taken.forward[busy], taken.backward[busy], copied)
    load = load_s_per_nbyte(host_group) if is_offloaded(plan, kind) else 0.0

    def coded(nbytes: float) -> tuple[PartsWritten, float]:
        how = parts_written(plan, group.ranks, others.ranks, nbytes)
        return how, host_group.slowdown * how.kernels_s(plan, host_group.device, nbytes)

    gathered, summed = sharding_cost.copied(group) if kind == "cpu" else (0.0, 0.0)
    pass_s = _pass_s(net.host_groups[0])
    costs = Costs(
        group=group,
        others=others,
        load_s_per_nbyte=load,
        gathered_s=gathered * pass_s,
        summed_s=summed * pass_s,
        coded=None if plan.sync.compress is None else coded,
    )
    level = level_of(plan)
    return Sync(
        exchange=sharding_cost.parameters_step(
            work, costs, level, microbatches, host_group, every_backward=leaves_early(plan)
        ),
        sent_nbytes=sharding_cost.sent_nbytes(work.nbytes, costs, level, microbatches),
        buckets=(),
    )


_VALUE_NBYTES = 4

_NOT_OVER: tuple[AxisName, ...] = ("split", "stage", "space")
"""Over these axes gradients are reduced, never factors (parallel/compressed/factor_buckets.py)."""


def by_factors(
    columns: ModelTable, plan: Plan, ranks: int, axes: tuple[AxisName, ...], modules: Iterable[int]
) -> list[RowsOf]:
    """Return the modules whose weights `ranks` ranks along `axes` reduce by factors under `plan`."""
    how = plan.sync.compress
    if how is None or how.method != FACTORS or ranks == 1:
        return []
    if any(plan.degree(axis) > 1 for axis in axes if axis in _NOT_OVER):
        return []
    samples = plan.batch.global_batch_size / (max(columns.tokens, 1) if plan.batch.unit == "tokens" else 1)
    half = 2 if plan.precision in ("bfloat16", "float16") else _VALUE_NBYTES
    weights = []
    for module in modules:
        shape = _shape(columns, module)
        if shape is None:
            continue
        rows, out_features, in_features = shape
        if factors_pay(rows * samples, out_features, in_features, _VALUE_NBYTES, half):
            weights.append(
                RowsOf(
                    module=module,
                    rows=rows * samples,
                    out_features=out_features,
                    in_features=in_features,
                    ranks=ranks,
                    width=half,
                )
            )
    return weights


def may_pay(model: ModelSpec, plan: Plan) -> bool:
    """Return whether factors would take fewer bytes for any layer, on any number of ranks."""
    columns = model_table(model)
    sync = replace(plan.sync, compress=Compression(method=FACTORS))
    wanted = replace(plan, sync=sync, mesh={"replicate": 2}, shares=(), split_shares=())
    return bool(by_factors(columns, wanted, 2, ("replicate",), range(len(columns))))


def _shape(columns: ModelTable, module: int) -> tuple[float, float, float] | None:
    """Return (rows per sample, outputs, inputs) of a linear layer with a weight of its own; None for other modules."""
    gradient = columns.gradients[module] / _VALUE_NBYTES
    outputs, flops = columns.outputs[module] / _VALUE_NBYTES, columns.flops[module]
    if columns.classes[module] != "Linear" or min(gradient, outputs, flops) <= 0:
        return None
    if any(columns.classes[other] != "Linear" for other in (columns.owner == module).nonzero()[0]):
        return None  # the gradient of a tied embedding has more than the factors' product
    in_features = flops / 2 / outputs
    biased = gradient / (in_features + 1)
    out_features = biased if abs(biased - round(biased)) < 1e-6 else gradient / in_features
    return float(outputs / out_features), float(out_features), float(in_features)


PASSES: Final = 14.0
"""Bytes of memory traffic for each byte of displacements when ranks synchronise, counted in the code.

Displacements, base parameters, parameters and momentum are read and written, and copied into one vector and
back.
"""

OWN_PASSES: Final = 3.0
"""The same traffic in every update: the displacement is read and written, and the momentum is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """The exchange of 0/1 Adam, averaged over steps. None of it is hidden behind backward.

    Attributes:
        kept_nbytes: memory of displacements, base parameters and the codec's residuals, old and new.
    """

    exchange: CommCost
    sent_nbytes: float
    kept_nbytes: float


def diverges_between_updates(plan: Plan, updates: int | None) -> bool:
    """Return whether ranks make updates of their own after `updates` updates; None: the schedule has ended."""
    how = plan.sync.compress
    return (
        how is not None
        and how.method == ZERO_ONE
        and plan.degree("replicate") > 1
        and (updates is None or updates >= (how.freeze_step or 0))
    )


def agreed(plan: Plan, group: RankGroup, host_group: HostGroup, nbytes: float) -> Agreed:
    """Return what replicas along `group` exchange of `nbytes` of parameters."""
    how = plan.sync.compress
    assert how is not None
    sent = all_reduce_sent_nbytes(how, [(round(nbytes / VALUE_NBYTES),)], group.ranks, VALUE_NBYTES)
    share = sent / (2 * (group.ranks - 1) / group.ranks * nbytes) if nbytes else 0.0
    copies_s = host_group.slowdown * nbytes / rank_bandwidth(host_group)
    kernels_s = host_group.slowdown * kernel_s(plan, host_group.device, group.ranks, share, nbytes)
    together_s = kernels_s + PASSES * copies_s
    longest = how.settings["longest"]
    each_s = (group.all_reduce(nbytes * share) + together_s) / longest + OWN_PASSES * copies_s
    return Agreed(
        exchange=CommCost(total_s=each_s, exposed_s=each_s), sent_nbytes=sent / longest, kept_nbytes=4 * nbytes
    )

"""Sums of gradients over the ranks that saw other samples, and what the shard axis gathers: once a step."""

from dataclasses import dataclass, replace

import numpy as np

from tutti.config.cluster import DeviceKind
from tutti.config.plan import Plan
from tutti.config.vocabulary import DATA_AXES, AxisName
from tutti.cost_model import constants, sharding
from tutti.cost_model.compressed import PartsWritten, Written, changes_written, kept_nbytes, parts_written, written
from tutti.cost_model.division import Division
from tutti.cost_model.factors import RowsOf, by_factors
from tutti.cost_model.groups import Group, Network
from tutti.cost_model.overlap import TIERS, Bucket, Exchange, Taken, buckets, exchange
from tutti.cost_model.placement import Seat
from tutti.cost_model.relaxed import Coded, Trained, exchanged_apart, waited_parts
from tutti.cost_model.sharding import Costs
from tutti.cost_model.table import Flags, ModelTable
from tutti.cost_model.worker import Array, rank_bandwidth
from tutti.cost_model.zero_one import agreed, step_alone

SUMMED: tuple[AxisName, ...] = (*DATA_AXES, "context", "space")
"""Axes over whose ranks a gradient differs, because they saw other samples or other parts of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summed:
    """Gradients that one group sums: bytes by module, the buckets they are fused in. `written`: by a code, None where
    the plan has none for them; `factors`: of a linear layer's weight that goes by them."""

    group: Group
    nbytes: Array
    buckets: tuple[Bucket, ...]
    written: Written | None = None
    factors: RowsOf | None = None

    @property
    def sent_nbytes(self) -> float:
        """Of one rank in a step."""
        if self.factors is not None:
            return self.factors.sent_nbytes
        if self.written is not None:
            return self.written.sent_nbytes
        return 2 * (self.group.ranks - 1) / self.group.ranks * float(self.nbytes.sum())


def summed(
    columns: ModelTable, part: Division, net: Network, plan: Plan, own: Flags, updates: int | None = None
) -> list[Summed]:
    """Gradients of the modules `own` (the others are left out) by the group that sums them, as they are written after
    so many updates; none where a group has one rank."""
    nbytes = (columns.gradients * part.weight)[own]
    apart = {
        "expert": columns.expert[own] & (plan.degree("expert") > 1),
        "table": (columns.table | part.linear)[own] & (plan.degree("table") > 1),
        "split": columns.sequence[own] & (plan.degree("split") > 1),
    }
    kinds: list[tuple[tuple[AxisName, ...], Flags]] = [
        (tuple(axis for axis in SUMMED if axis != "expert"), apart["expert"]),
        (tuple(axis for axis in SUMMED if axis != "table"), apart["table"]),
        ((*SUMMED, "split"), apart["split"]),
        (SUMMED, ~(apart["expert"] | apart["table"] | apart["split"])),
    ]
    found = []
    for axes, mask in kinds:
        group, own_nbytes = net.group(*axes), np.where(mask, nbytes, 0.0)
        places = np.flatnonzero(own)
        whole = (own_nbytes > 0) & (part.weight[own] == 1)
        for rows in by_factors(columns, plan, group.ranks, axes, places[whole].tolist()):
            place = int(np.flatnonzero(places == rows.module)[0])
            own_nbytes[place] = max(0.0, own_nbytes[place] - rows.nbytes)
            one = Bucket(nbytes=rows.nbytes, last=len(nbytes) - 1 - place)
            alone = np.where(places == rows.module, rows.nbytes, 0.0)
            found.append(Summed(group=group, nbytes=alone, buckets=(one,), factors=rows))
        if group.ranks > 1 and own_nbytes.any():
            some = buckets(own_nbytes.tolist(), plan.sync.bucket_nbytes)
            how = written(plan, group, axes, own_nbytes, [bucket.nbytes for bucket in some], updates)
            kept = tuple(replace(one, kept_nbytes=kept_nbytes(plan, how, one.nbytes)) for one in some) if how else some
            found.append(Summed(group=group, nbytes=own_nbytes, buckets=kept, written=how))
    return found


def fused(sums: list[Summed]) -> list[tuple[Bucket, Summed]]:
    """Buckets in the order in which backward fills them, each with what it is of."""
    found = [(bucket, one) for one in sums for bucket in one.buckets]
    return sorted(found, key=lambda pair: pair[0].last)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync:
    """What a rank of one stage exchanges once a step: times, bytes it sends, the buckets of gradients."""

    exchange: Exchange
    sent_nbytes: float
    buckets: tuple[Bucket, ...]


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
    """The sums of the modules `own`, which begin in the last microbatch's backward, after so many `updates`. `passes`:
    seconds by module of a microbatch's forward and backward, its exchanges included; `taken`: when those have the
    links; `update_s`: seconds of the optimizers' update."""
    kind, microbatches = net.seats[0].device.kind, plan.batch.num_microbatches
    if plan.sync.mode != "synchronous":
        return _apart(columns, net, plan, microbatches * float(passes[0].sum() + passes[1].sum()) + update_s)
    taken = taken.in_turns(*passes, net.seats[0].node.turns)
    if plan.degree("shard") > 1 and plan.sharding.level > 1:
        return _divided(columns, part, net, plan, passes, microbatches, taken)
    if step_alone(plan, updates):
        ways = agreed(plan, net.group("replicate"), net.seats[0], float(columns.gradients[own].sum()))
        kept = Bucket(nbytes=0.0, last=0, kept_nbytes=ways.kept_nbytes)
        return Sync(exchange=ways.exchange, sent_nbytes=ways.sent_nbytes, buckets=(kept,))
    sums = summed(columns, part, net, plan, own, updates)
    pairs = fused(sums)
    backward = passes[1][own][::-1]
    busy = taken.backward[:, own][:, ::-1]
    seat = net.seats[0]
    different = {(bucket.nbytes, id(one)): one for bucket, one in pairs}  # equal blocks make equal buckets
    times = {key: _sum_s(plan, one, seat, key[0]) for key, one in different.items()}
    each = [times[bucket.nbytes, id(one)] for bucket, one in pairs]
    on_cores = [_cores_s(one, seat, bucket.nbytes) for bucket, one in pairs]
    done = exchange(
        backward.tolist(),
        [bucket for bucket, _ in pairs],
        [seconds for seconds, _ in each],
        cores_s=on_cores,
        taken=[busy[TIERS.index(one.group.tier)] for _, one in pairs],
        after=[float(taken.after[TIERS.index(one.group.tier)]) for _, one in pairs],
    )
    sent, kernels = sum(one.sent_nbytes for one in sums), sum(inside for _, inside in each)
    gathered = _states(columns, part, net, plan, own, kind)
    copied_s = gathered[0] + _fused_s(sums, seat)
    taken_s = copied_s + _beside(done, kernels, 1 if kind == "cuda" else seat.threads)
    return Sync(
        exchange=Exchange(total_s=done.total_s + copied_s, exposed_s=done.exposed_s + taken_s),
        sent_nbytes=sent + gathered[1],
        buckets=tuple(bucket for bucket, _ in pairs),
    )


def _fused_s(sums: list[Summed], seat: Seat) -> float:
    """Seconds in which a rank's cores read gradients and write them to their buckets, once a step. GPUs do so in their
    own memory, far quicker than links."""
    if seat.device.kind != "cpu":
        return 0.0
    return 2 * _pass_s(seat) * sum(float(one.nbytes.sum()) for one in sums if one.factors is None)


def _sum_s(plan: Plan, one: Summed, seat: Seat, nbytes: float) -> tuple[float, float]:
    """(seconds, those of them in kernels) in which a bucket is summed."""
    if one.factors is not None:
        return one.factors.sum_s(plan, one.group, seat)
    if one.written is None:
        return one.group.summed(nbytes), 0.0
    return one.written.sum_s(plan, one.group, seat, nbytes)


def _cores_s(one: Summed, seat: Seat, nbytes: float) -> float:
    """Seconds that the exchange of a bucket takes of a rank's cores, without what kernels do."""
    group = one.group.on_cores(seat)
    if one.factors is not None:
        return one.factors.wire_s(group)
    return group.summed(nbytes) if one.written is None else one.written.wire_s(group, nbytes)


def _beside(done: Exchange, kernels_s: float, cores: int) -> float:
    """Seconds that kernels hidden behind backward take from it: of one thread's time, one of the rank's `cores`."""
    return (done.total_s - done.exposed_s) * kernels_s / done.total_s / cores if kernels_s else 0.0


def _apart(columns: ModelTable, net: Network, plan: Plan, behind_s: float) -> Sync:
    """What replicas that differ exchange, none of it gradients."""
    trained = Trained(
        parameters=float(columns.gradients.sum()),
        optimizer=float(columns.optimizer.sum()),
        statistics=float(columns.buffers.sum()),
    )
    group, seat = net.group("replicate"), net.seats[0]
    how, coded = changes_written(plan, group, columns.gradients), None
    if how is not None:
        seconds, kernels_s = how.sum_s(plan, group, seat, trained.parameters)
        assert plan.sync.compress is not None
        parts = waited_parts(plan.sync.compress, trained.parameters)
        coded = Coded(
            seconds=seconds,
            kernels_s=kernels_s,
            cores_s=how.wire_s(group.on_cores(seat), trained.parameters),
            sent_nbytes=how.sent_nbytes,
            parts=parts,
        )
    done = exchanged_apart(plan.sync, group, seat, trained, behind_s, coded)
    return Sync(exchange=done.exchange, sent_nbytes=done.sent_nbytes, buckets=())


def _states(
    columns: ModelTable, part: Division, net: Network, plan: Plan, own: Flags, kind: DeviceKind
) -> tuple[float, float]:
    """(seconds, bytes sent) of gathering what a rank's part of the optimizer state has updated."""
    group = net.group("shard")
    if group.ranks == 1:
        return 0.0, 0.0
    nbytes = float((np.where(own, columns.gradients, 0.0) * part.weight).sum())  # of what is trained
    loads = 2 * nbytes / group.ranks / constants.HOST_LINK_BYTES_PER_S if _away(plan, kind) else 0.0
    if kind == "cpu":  # packed and unpacked; in shared memory others' parts are the link's time
        unpacked = (group.span.hosts if group.node is not None else group.ranks) / group.ranks
        loads += 2 * (1 / group.ranks + unpacked) * nbytes * _pass_s(net.seats[0])
    return group.divided(nbytes) + loads, (group.ranks - 1) / group.ranks * nbytes


def _pass_s(seat: Seat) -> float:
    """Seconds in which a rank's cores read or write a byte."""
    return seat.slowdown / rank_bandwidth(seat)


def _away(plan: Plan, kind: DeviceKind) -> bool:
    return kind == "cuda" and plan.sharding.offload != "none"


def _divided(
    columns: ModelTable,
    part: Division,
    net: Network,
    plan: Plan,
    passes: tuple[Array, Array],
    microbatches: int,
    taken: Taken,
) -> Sync:
    kind = net.seats[0].device.kind
    group = net.group("shard")
    others = net.group(*(axis for axis in SUMMED if axis != "shard"))
    busy = TIERS.index(group.tier)
    work = sharding.unit_work(columns, part, *passes, taken.forward[busy], taken.backward[busy])
    load = 1 / constants.HOST_LINK_BYTES_PER_S if _away(plan, kind) else 0.0
    seat = net.seats[0]

    def coded(nbytes: float) -> tuple[PartsWritten, float]:
        how = parts_written(plan, group.ranks, others.ranks, nbytes)
        return how, seat.slowdown * how.kernels_s(plan, seat.device, nbytes)

    gathered, summed = sharding.copied(group) if kind == "cpu" else (0.0, 0.0)
    pass_s = _pass_s(net.seats[0])
    costs = Costs(
        group=group,
        others=others,
        load_s_per_nbyte=load,
        gathered_s=gathered * pass_s,
        summed_s=summed * pass_s,
        coded=None if plan.sync.compress is None else coded,
    )
    level = plan.sharding.level
    return Sync(
        exchange=sharding.parameters_step(work, costs, level, microbatches, seat),
        sent_nbytes=sharding.sent_nbytes(work.nbytes, costs, level, microbatches),
        buckets=(),
    )

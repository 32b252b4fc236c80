"""Sums of gradients over the ranks that saw other samples, and what the shard axis gathers: once a step."""

from dataclasses import dataclass

import numpy as np

from tutti.predict import constants, sharding
from tutti.predict.compressed import kernel_s, ratio
from tutti.predict.compute import Array
from tutti.predict.division import Division
from tutti.predict.groups import Group, Network
from tutti.predict.overlap import TIERS, Bucket, Exchange, Taken, buckets, exchange
from tutti.predict.relaxed import Trained, exchanged_apart
from tutti.predict.sharding import Costs
from tutti.predict.table import Flags, ModelTable
from tutti.spec.cluster import DeviceKind
from tutti.spec.plan import Plan
from tutti.spec.words import DATA_AXES, AxisName

SUMMED: tuple[AxisName, ...] = (*DATA_AXES, "context", "space")
"""Axes over whose ranks a gradient differs, because they saw other samples or other parts of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summed:
    """Gradients that one group sums: bytes by module. `written`: bytes sent for a byte that an exact sum sends."""

    group: Group
    nbytes: Array
    written: float = 1.0


def summed(columns: ModelTable, part: Division, net: Network, plan: Plan, own: Flags) -> list[Summed]:
    """Gradients of the modules `own` (the others are left out) by the group that sums them; none where a group has one
    rank."""
    nbytes = (columns.gradients * part.weight)[own]
    apart = {
        "expert": columns.expert[own] & (plan.degree("expert") > 1),
        "table": columns.table[own] & (plan.degree("table") > 1),
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
        if group.ranks > 1 and own_nbytes.any():
            found.append(Summed(group=group, nbytes=own_nbytes, written=ratio(plan, group, axes, own_nbytes)))
    return found


def fused(sums: list[Summed], plan: Plan) -> list[tuple[Bucket, Group]]:
    """Buckets in the order in which backward fills them, each with the ranks that sum it."""
    found = [(bucket, one.group) for one in sums for bucket in buckets(one.nbytes.tolist(), plan.sync.bucket_nbytes)]
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
    microbatches: int,
    taken: Taken,
) -> Sync:
    """The sums of the modules `own`, which begin in the last microbatch's backward. `passes`: seconds by module of a
    microbatch's forward and backward, its exchanges included; `taken`: when those have the links."""
    kind = net.seats[0].device.kind
    if plan.sync.mode != "synchronous":
        return _apart(columns, net, plan, microbatches * float(passes[0].sum() + passes[1].sum()))
    if plan.degree("shard") > 1 and plan.sharding.level > 1:
        return _divided(columns, part, net, plan, passes, microbatches, taken)
    sums = summed(columns, part, net, plan, own)
    pairs = fused(sums, plan)
    backward = passes[1][own][::-1]
    busy = taken.backward[:, own][:, ::-1]
    device, written = net.seats[0].device, {id(one.group): one.written for one in sums}
    times = {(bucket.nbytes, id(group)): 0.0 for bucket, group in pairs}  # equal blocks make equal buckets
    for bucket, group in pairs:
        share, nbytes = written[id(group)], bucket.nbytes
        seconds = times[bucket.nbytes, id(group)]
        if not seconds:
            seconds = kernel_s(plan, device, group.ranks, share, nbytes)
            seconds += group.gradient_sum(nbytes) if share == 1.0 else group.all_reduce(nbytes * share)
        times[bucket.nbytes, id(group)] = seconds
    done = exchange(
        backward.tolist(),
        [bucket for bucket, _ in pairs],
        [times[bucket.nbytes, id(group)] for bucket, group in pairs],
        compute_share=_share(kind, *(group for _, group in pairs)),
        taken=[busy[TIERS.index(group.tier)] for _, group in pairs],
        after=[float(taken.after[TIERS.index(group.tier)]) for _, group in pairs],
    )
    sent = sum(2 * (one.group.ranks - 1) / one.group.ranks * float(one.nbytes.sum()) * one.written for one in sums)
    kernels = sum(kernel_s(plan, device, group.ranks, written[id(group)], bucket.nbytes) for bucket, group in pairs)
    gathered = _states(columns, part, net, plan, own, kind)
    taken_s = gathered[0] + _beside(done, kernels, 1 if kind == "cuda" else net.seats[0].threads)
    return Sync(
        exchange=Exchange(total_s=done.total_s + gathered[0], exposed_s=done.exposed_s + taken_s),
        sent_nbytes=sent + gathered[1],
        buckets=tuple(bucket for bucket, _ in pairs),
    )


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
    done = exchanged_apart(plan.sync, net.group("replicate"), net.seats[0], trained, behind_s)
    return Sync(exchange=done.exchange, sent_nbytes=done.sent_nbytes, buckets=())


def _share(kind: DeviceKind, *groups: Group) -> float:
    """Part of hidden communication that costs work all the same, on the slowest links among `groups`."""
    if kind != "cpu" or not groups:
        return 0.0
    tier = "network" if any(group.tier == "network" for group in groups) else "node"
    return constants.CPU_COMMUNICATION_SHARE[tier]


def _states(
    columns: ModelTable, part: Division, net: Network, plan: Plan, own: Flags, kind: DeviceKind
) -> tuple[float, float]:
    """(seconds, bytes sent) of gathering what a rank's part of the optimizer state has updated."""
    group = net.group("shard")
    if group.ranks == 1:
        return 0.0, 0.0
    nbytes = float((np.where(own, columns.gradients, 0.0) * part.weight).sum())  # of what is trained
    loads = 2 * nbytes / group.ranks / constants.HOST_LINK_BYTES_PER_S if _away(plan, kind) else 0.0
    return group.scatter(nbytes) + loads, (group.ranks - 1) / group.ranks * nbytes


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
    costs = Costs(group=group, others=others, load_s_per_nbyte=load)
    share = _share(kind, group, *([others] if others.ranks > 1 else []))
    level = plan.sharding.level
    return Sync(
        exchange=sharding.parameters_step(work, costs, level, microbatches, share),
        sent_nbytes=sharding.sent_nbytes(work.nbytes, group, others, level, microbatches),
        buckets=(),
    )

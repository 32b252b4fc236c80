"""Exchanges of replicas that may diverge: memory, and the bytes and seconds of a step, averaged over a period.

Each mode's traffic is in its registry entry (config.consistency_modes). docs/consistency.md has the equations
and papers from which the bytes follow. `n` is the bytes of the trained parameters, and `p` the number of
replicas. Parameters in half precision are exchanged in half precision here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tutti.config.compression import Compression
from tutti.config.consistency_modes import (
    CONSISTENCY_MODES,
    ReplicaTraffic,
    TrafficPattern,
    adasum_distances,
    doubling_distances,
    ring_neighbours,
    ring_share,
    with_mode_defaults,
)
from tutti.config.plan import Plan, SyncPlan
from tutti.cost_model.group_links import Network, RankGroup
from tutti.cost_model.overlap import CommCost
from tutti.cost_model.rank_placement import HostGroup, message
from tutti.cost_model.worker_speed import rank_bandwidth
from tutti.errors import PlanError


def _sum_s(group: RankGroup, nbytes: float) -> float:
    """Return the seconds of an all-reduce."""
    return group.all_reduce(nbytes)


def _neighbours_s(group: RankGroup, nbytes: float) -> float:
    """Return the seconds of sending to both neighbours on a ring; two replicas have one neighbour each."""
    return ring_neighbours(group.ranks) * group.pass_on(nbytes)


def _at_distance_s(group: RankGroup, nbytes: float, distance: int) -> float:
    """Return the seconds in which every replica sends to the replica `distance` further on.

    Up to `distance` ranks of a host send to other hosts at once.
    """
    span = group.span
    if group.network is None:
        return message(group.link, nbytes)
    away = min(distance, span.per_host)
    outside = message(group.network, nbytes * away)
    return max(outside, message(group.node, nbytes)) if group.node is not None and away < span.per_host else outside


def _other_half_s(group: RankGroup, nbytes: float) -> float:
    """Return the seconds of sending to a partner in the other half of the replicas.

    The partner is on another host where each host is wholly in one half.
    """
    return _at_distance_s(group, nbytes, group.ranks // 2)


def _push_s(group: RankGroup, nbytes: float) -> float:
    """Return the mean seconds of sending to a replica at distance 1, 2, 4, ..."""
    times = [_at_distance_s(group, nbytes, distance) for distance in doubling_distances(group.ranks)]
    return sum(times) / len(times)


def _adasum_s(group: RankGroup, nbytes: float) -> float:
    """Return the seconds of Adasum's recursive doubling."""
    return sum(_at_distance_s(group, nbytes, distance) for distance in adasum_distances(group.ranks))


def _served_s(group: RankGroup, nbytes: float) -> float:
    """Return the seconds of sending parts of a change to the parameter servers, and of receiving parameters."""
    return 2 * group.all_to_all(nbytes)


def _pairs_s(group: RankGroup, nbytes: float) -> float:
    """Return the seconds of an exchange between any two replicas, in both directions.

    Half of a host's ranks ask at the same time, and as many answer.
    """
    if group.network is None:
        return 2 * message(group.link, nbytes)
    return 2 * message(group.network, nbytes * max(1.0, group.span.per_host / 2))


_SECONDS: Mapping[TrafficPattern, Callable[[RankGroup, float], float]] = {
    "all-reduce": _sum_s,
    "neighbours": _neighbours_s,
    "other-half": _other_half_s,
    "exponential": _push_s,
    "adasum": _adasum_s,
    "parameter-servers": _served_s,
    "pairs": _pairs_s,
    "none": lambda group, nbytes: 0.0,
}
"""By traffic pattern: (group, bytes) -> seconds of one exchange."""


def _traffic(mode: str) -> ReplicaTraffic:
    """Return the traffic of a mode in which replicas diverge."""
    traffic = CONSISTENCY_MODES[mode].traffic
    assert traffic is not None
    return traffic


CODED_PASSES, RENEWED_PASSES = 1.0, 2.0
"""Further memory passes of a mean of compressed changes.

`CODED_PASSES`: the last common values are read, to compute the changes. `RENEWED_PASSES`: where the mode does not do
so anyway, they are read again, to add the mean change, and written.
"""

WAITED_PARTS, LEAST_PART_NBYTES = 8, 4 * 2**16
"""The most parts of a compressed reduction that is waited for, and the fewest bytes of a part.

They are `BLOCKING_CHUNKS` and `MIN_CHUNK_NUMEL` float32 values of local_sgd/delayed_reduction.py.
"""

CORRECTED_PASSES = 3.0
"""Memory passes of correcting second moments in every step: gradients are read, moments are read and written."""

DELAYED_PASSES, DELAYED_CODED_PASSES = 2.0, 6.0
"""Further memory passes of a mean that is applied some updates later, without and with a codec. The values from which
it was computed are kept.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Bytes of trained parameters, of optimizer state, and of running statistics on one rank."""

    parameters: float
    optimizer: float
    statistics: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedExchange:
    """One compressed reduction of replicas' changes.

    Attributes:
        seconds: duration, kernels included.
        kernels_s: seconds of kernels.
        cores_s: seconds of a rank's cores that the transfer takes.
        sent_nbytes: bytes that a rank sends.
        parts: number of parts of a reduction that is waited for; one part is encoded or decoded while another is
            sent.
    """

    seconds: float
    kernels_s: float
    cores_s: float
    sent_nbytes: float
    parts: int = 1

    @property
    def meanwhile_s(self) -> float:
        """Seconds in which kernels run while a part is sent, less the core time of sending."""
        transfer_s = self.seconds - self.kernels_s
        together_s = (1 - 1 / self.parts) * min(self.kernels_s, transfer_s)
        return together_s * (1 - self.cores_s / transfer_s) if transfer_s > 0 else 0.0


def waited_parts(how: Compression, nbytes: float) -> int:
    """Return the number of parts of a compressed reduction of `nbytes`: 1 where the codec needs the whole vector."""
    if how.entry.whole_vectors(how.settings):
        return 1
    return max(1, min(WAITED_PARTS, int(nbytes // LEAST_PART_NBYTES)))


@dataclass(frozen=True, slots=True, kw_only=True)
class DivergedExchange:
    """The exchange of diverged replicas in an average step: its time, and the bytes that a rank sends."""

    exchange: CommCost
    sent_nbytes: float


def diverged_exchange(
    sync: SyncPlan,
    group: RankGroup,
    host_group: HostGroup,
    trained: Trained,
    behind_s: float,
    coded: CompressedExchange | None = None,
) -> DivergedExchange:
    """Return the exchanges of an average step of the replicas along `group`.

    Args:
        sync: the mode. A mode that starts synchronously is costed in its later phase.
        group: the replicas.
        host_group: where they are placed.
        trained: bytes that are exchanged.
        behind_s: seconds of a step's passes and update, which hide the exchanges of some modes. On a CPU, the
            exchange takes cores from them. Delayed averages are hidden behind several steps.
        coded: the compressed reduction; None without compression.
    """
    if group.ranks == 1:
        return DivergedExchange(exchange=CommCost(total_s=0.0, exposed_s=0.0), sent_nbytes=0.0)
    how, told, period = _traffic(sync.mode), with_mode_defaults(sync.mode, sync.relaxed), _period(sync)
    if period is None:
        return DivergedExchange(exchange=CommCost(total_s=0.0, exposed_s=0.0), sent_nbytes=0.0)
    n, statistics = trained.parameters, 0.0 if CONSISTENCY_MODES[sync.mode].asynchronous else trained.statistics
    state = trained.optimizer if told.optimizer_state == "averaged" else 0.0
    behind_s *= _behind_updates(sync, host_group)
    passes = how.passes(group.ranks) + _more_passes(how, bool(told.delay), coded is not None)
    copies_s = host_group.slowdown * passes * n / rank_bandwidth(host_group)
    wire_s, kernels_s = (_SECONDS[how.pattern](group, n), 0.0) if coded is None else (coded.seconds, coded.kernels_s)
    besides_s = group.all_reduce(state) + group.all_reduce(statistics)  # every mode waits for these
    cores_s = _SECONDS[how.pattern](group.on_cores(host_group), n) if coded is None else coded.cores_s
    waited_s, often = wire_s, 1.0
    if how.skipped_when_late:
        often = min(1.0, behind_s / wire_s) if wire_s else 1.0
        wire_s, cores_s = often * wire_s, often * cores_s
        waited_s = wire_s
    if how.overlapped or told.delay:
        transfer_s = wire_s - kernels_s
        if coded is not None and threaded(sync, host_group):  # kernels work on one part while another is sent
            behind_s += (1 - 1 / coded.parts) * (kernels_s + cores_s)
        hidden_s = min(transfer_s, behind_s)
        waited_s = wire_s - hidden_s + (cores_s * hidden_s / transfer_s if transfer_s > 0 else 0.0)
    elif coded is not None:
        waited_s -= coded.meanwhile_s
    changes_nbytes = often * how.sent_vectors(group.ranks) * n if coded is None else coded.sent_nbytes
    sent = changes_nbytes + ring_share(group.ranks) * (state + statistics)
    corrected_s = 0.0
    if told.optimizer_state == "corrected":  # in every step; the statistics that are exchanged are as small as losses
        corrected_s = host_group.slowdown * CORRECTED_PASSES * n / rank_bandwidth(host_group)
    done = CommCost(
        total_s=(wire_s + besides_s + copies_s) / period + corrected_s,
        exposed_s=(waited_s + besides_s + copies_s) / period + corrected_s,
    )
    return DivergedExchange(exchange=done, sent_nbytes=sent / period)


def threaded(sync: SyncPlan, host_group: HostGroup) -> bool:
    """Return whether averages are exchanged in a thread of their own (local_sgd/delayed_reduction.py)."""
    return sync.compress is not None and sync.compress.pairwise and host_group.device.kind == "cpu"


def _behind_updates(sync: SyncPlan, host_group: HostGroup) -> int:
    """Return the number of updates that hide an average.

    Where parts are exchanged at fixed updates, the last part arrives in the last update. A thread can use all of
    them.
    """
    delay = sync.relaxed.delay or 1
    return delay if threaded(sync, host_group) else max(1, delay - 1)


def _more_passes(how: ReplicaTraffic, delayed: bool, coded: bool) -> float:
    """Return the memory passes that delay and compression add to a mode's own passes."""
    if delayed:
        return DELAYED_CODED_PASSES if coded else DELAYED_PASSES
    return CODED_PASSES + (0.0 if how.held else RENEWED_PASSES) if coded else 0.0


def check_diverged(plan: Plan, network: Network) -> None:
    """Raise PlanError for replicas that cannot run where the cluster places them."""
    if not CONSISTENCY_MODES[plan.sync.mode].shares_memory or plan.degree("replicate") == 1:
        return
    remedy = 'use ranks of one host, or sync.mode = "asynchronous"'
    kind = network.host_groups[0].device.kind
    if kind != "cpu":
        raise PlanError(f'sync.mode = "{plan.sync.mode}" with {kind} devices, which share no memory; {remedy}')
    if network.group("replicate").network is not None:
        raise PlanError(
            f'sync.mode = "{plan.sync.mode}" with {plan.degree("replicate")} ranks on several hosts of cluster '
            f"{network.cluster.name!r}, which share no memory; {remedy}"
        )


def _period(sync: SyncPlan) -> int | None:
    """Return the number of updates between two exchanges; None where nothing is exchanged before training ends."""
    if CONSISTENCY_MODES[sync.mode].never_exchanges:
        return None
    return with_mode_defaults(sync.mode, sync.relaxed).period or 1


def diverged_nbytes(sync: SyncPlan, replicas: int, parameters_nbytes: float) -> float:
    """Return the memory of a rank's copies of `parameters_nbytes`: those that it keeps, and those of an exchange.

    A codec also needs the last common values, which DiLoCo keeps anyway, and twice the residuals. A delayed
    average needs the values from which it was computed.
    """
    how = CONSISTENCY_MODES[sync.mode].traffic
    if how is None or replicas == 1:
        return 0.0
    copies = how.held + how.transient + (1 if sync.relaxed.delay else 0)
    if sync.compress is not None:
        copies += max(0, 1 - how.held) + (2 if sync.compress.keeps else 0)
    return copies * parameters_nbytes


def diverged_notes(sync: SyncPlan) -> tuple[str, ...]:
    """Describe what the prediction of a plan with diverging replicas assumes."""
    how = CONSISTENCY_MODES[sync.mode].traffic
    if how is None:
        return ()
    told = with_mode_defaults(sync.mode, sync.relaxed)
    notes = [
        "replicas diverge, which is another algorithm than synchronous training; assumed: it needs as many samples"
    ]
    period = _period(sync)
    if period is None:
        notes.append("replicas exchange no parameters before training ends")
    elif period > 1:
        notes.append(f"these are averages over steps: replicas exchange parameters in one of {period} steps")
    if told.delay:
        notes.append(f"averages are in transit during {told.delay} updates, and are applied after them")
    if told.optimizer_state == "corrected":
        notes.append("second moments are corrected after every update")
    if how.skipped_when_late:
        notes.append("at most one exchange per step, and fewer where an exchange takes longer than a step's passes")
    if CONSISTENCY_MODES[sync.mode].shares_memory:
        notes.append("assumed: ranks that write to the same memory do not slow each other down")
    if CONSISTENCY_MODES[sync.mode].asynchronous:
        notes.append("the step time is that of the slowest rank; other ranks do not wait for it")
    if told.after:
        notes.append(f"the first {told.after} updates are synchronous, and these numbers leave them out")
    return tuple(notes)

"""Latency and bandwidth of the links between ranks, from real collectives and messages of several sizes."""

import statistics
import time
from collections.abc import Callable

from tutti.config.cluster import LinkPoint, LinkSpec, LinkTier
from tutti.machine import Stolen
from tutti.profile.probe import timing
from tutti.profile.probe.effort import Effort
from tutti.profile.probe.fit import Transfer, fit_bent, unlengthened
from tutti.profile.probe.ways import ITEM_NBYTES, Party, Ways


def measure(party: Party, tier: LinkTier, effort: Effort, where: str) -> tuple[LinkSpec, ...]:
    """The tier's links: fitted to all-reduces of all its ranks first, then to messages between the first two.

    Called by every rank of `party`. `where`: in words, which hosts. Ranks of one host exchange as runs do: through
    memory that they share, where they may.
    """
    ways = Ways(party)
    return (
        _link(ways, tier, effort, "all_reduce", f"all-reduce of {len(party.ranks)} ranks {where}, ring formula"),
        _link(ways, tier, effort, "send", f"half a round trip between two ranks {where}"),
    )


def _link(ways: Ways, tier: LinkTier, effort: Effort, transfer: Transfer, what: str) -> LinkSpec:
    party = ways.party
    points, core_s = _points(party, effort, ways.all_reduce if transfer == "all_reduce" else ways.round_trip)
    ranks = len(party.ranks) if transfer == "all_reduce" else 2
    if transfer == "send":
        points = tuple(LinkPoint(nbytes=point.nbytes, time_s=point.time_s / 2) for point in points)
    sent = points[-1].nbytes * (2 * (ranks - 1) / ranks if transfer == "all_reduce" else 1.0)
    fitted = fit_bent(unlengthened(points), transfer=transfer, ranks=ranks)
    return LinkSpec(
        tier=tier,
        latency_s=fitted.latency_s,
        bandwidth_bytes_per_s=fitted.bandwidth_bytes_per_s,
        large_nbytes=fitted.large_nbytes,
        large_bandwidth_bytes_per_s=fitted.large_bandwidth_bytes_per_s,
        backend="shared memory" if ways.team is not None else party.backend,
        residual=fitted.residual,
        ranks=ranks,
        fitted_to=transfer,
        points=points,
        core_s_per_nbyte=core_s / sent if party.device.type == "cpu" else None,
        source=f"tutti probe: {what}",
        evidence="measured",
    )


def _points(
    party: Party, effort: Effort, transfer: Callable[[int], Callable[[], object]]
) -> tuple[tuple[LinkPoint, ...], float]:
    """Times by size, the slowest rank's, and seconds of a core that the largest takes a rank. Sizes predicted to exceed
    the budget are left out, never the first two. Every rank takes the same decisions, because they rest on agreed
    times."""
    points: list[LinkPoint] = []
    core_s = 0.0
    for nbytes in effort.link_nbytes:
        if len(points) > 1:
            last = points[-1]
            if last.time_s * nbytes / last.nbytes > effort.link_budget_s:
                break
        samples, core_s = _samples(party, effort, transfer(nbytes // ITEM_NBYTES))
        points.append(LinkPoint(nbytes=nbytes, time_s=timing.quartile(samples), median_s=statistics.median(samples)))
    return tuple(points), core_s


def _samples(party: Party, effort: Effort, call: Callable[[], object]) -> tuple[list[float], float]:
    """Seconds of the call on the slowest rank, time after time; more of them as long as they disagree. And seconds of
    a core in each: the busiest rank's, with all its threads."""
    call()  # connections are made, memory is touched
    estimate = max(min(party.largest([timing.once(call, party.device) for _ in range(3)])), 1e-7)
    inner = max(1, min(50, int(timing.SAMPLE_S / estimate)))
    sample = estimate * inner
    repeats = max(2, min(effort.link_repeats, int(effort.link_budget_s / sample)), timing.cheap_samples(sample))
    rounds, busy, calls = timing.Rounds(), time.process_time(), 0
    while not rounds.samples or timing.again(rounds.samples, inner * sum(rounds.samples), effort.link_budget_s):
        stolen = Stolen()
        some = [timing.once(lambda: _in_a_row(call, inner), party.device) / inner for _ in range(repeats)]
        calls += repeats * inner
        *some, share = party.largest([*some, stolen.share()])
        rounds.take(some, share)
    return rounds.samples, party.largest([(time.process_time() - busy) / calls])[0]


def _in_a_row(call: Callable[[], object], count: int) -> None:
    for _ in range(count):
        call()

"""Latency and bandwidth of the links between ranks, from collectives and messages of several sizes."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

import tutti.profile.probe.probe_timing as probe_timing
from tutti.comm.rendezvous import make_local_group
from tutti.comm.shared_memory import MessageReceiver, MessageSender, SharedMemoryAllReduce
from tutti.config.cluster import LinkPoint, LinkSpec, LinkTier
from tutti.machine import StolenTime
from tutti.profile.probe.probe_timing import Effort


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeGroup:
    """Ranks that share a tier of links, from the view of one of them.

    Attributes:
        group: their process group.
        ranks: their numbers in the world.
        device: the device of this rank.
        backend: backend of the process group.
    """

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    device: torch.device
    backend: str

    @property
    def position(self) -> int:
        return self.ranks.index(dist.get_rank())

    def largest(self, values: Sequence[float]) -> list[float]:
        """Return the largest value of all ranks for each element, so that all ranks use the same values."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return [float(value) for value in tensor.tolist()]


def measure(group: ProbeGroup, tier: LinkTier, effort: Effort, where: str) -> tuple[LinkSpec, ...]:
    """Measure the links of a tier. Collective.

    Ranks of one host communicate as in runs: through shared memory if they can.

    Args:
        group: the ranks.
        tier: tier of the links.
        effort: how much to measure.
        where: which hosts, as text.

    Returns:
        A link fitted to all-reduces of all ranks, then one fitted to messages between the first two ranks.
    """
    transfers = ProbedTransfers(group)
    return (
        _link(transfers, tier, effort, "all_reduce", f"all-reduce of {len(group.ranks)} ranks {where}, ring formula"),
        _link(transfers, tier, effort, "send", f"half a round trip between two ranks {where}"),
    )


class ProbedTransfers:
    """Make the transfers to time between the ranks of a group.

    They go through shared memory if the ranks have it, else through their process group.
    """

    def __init__(self, group: ProbeGroup) -> None:
        self.group = group
        self.local_group = local_group = make_local_group(group.group)
        if local_group is not None:
            other = 1 - min(group.position, 1)
            self._sending, self._receiving = MessageSender(local_group, other), MessageReceiver(local_group, other)

    def all_reduce(self, numel: int) -> Callable[[], object]:
        """Return a call that sums `numel` float32 values over all ranks, in place."""
        local_group, group = self.local_group, self.group
        if local_group is not None:
            room, _ = local_group.new_segment(numel * ITEM_NBYTES)
            return lambda: SharedMemoryAllReduce(local_group, room, numel, torch.float32).wait()
        tensor = torch.zeros(numel, dtype=torch.float32, device=group.device)
        return lambda: dist.all_reduce(tensor, group=group.group)

    def round_trip(self, numel: int) -> Callable[[], object]:
        """Return a call that sends `numel` float32 values from the first rank to the second and back; other ranks do
        nothing.
        """
        tensor = torch.zeros(numel, dtype=torch.float32, device=self.group.device)
        first, second = self.group.ranks[:2]

        def send(rank: int) -> None:
            if self.local_group is not None:
                self._sending.send(tensor)
            else:
                dist.send(tensor, rank, group=self.group.group)

        def receive(rank: int) -> None:
            if self.local_group is not None:
                self._receiving.receive(tensor).wait()
            else:
                dist.recv(tensor, rank, group=self.group.group)

        def there() -> None:
            send(second)
            receive(second)

        def back() -> None:
            receive(first)
            send(first)

        return (there, back, lambda: None)[min(self.group.position, 2)]


Transfer = Literal["all_reduce", "send"]


def _link(transfers: ProbedTransfers, tier: LinkTier, effort: Effort, transfer: Transfer, what: str) -> LinkSpec:
    """Measure one transfer at all sizes and fit a link to its times."""
    group = transfers.group
    points, core_s = _points(group, effort, transfers.all_reduce if transfer == "all_reduce" else transfers.round_trip)
    ranks = len(group.ranks) if transfer == "all_reduce" else 2
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
        backend="shared memory" if transfers.local_group is not None else group.backend,
        residual=fitted.residual,
        ranks=ranks,
        fitted_to=transfer,
        points=points,
        core_s_per_nbyte=core_s / sent if group.device.type == "cpu" else None,
        source=f"tutti probe: {what}",
        evidence="measured",
    )


def _points(
    group: ProbeGroup, effort: Effort, transfer: Callable[[int], Callable[[], object]]
) -> tuple[tuple[LinkPoint, ...], float]:
    """Return the times by size on the slowest rank, and the core seconds of the largest size on the busiest rank.

    Sizes predicted to exceed the budget are left out, but never the first two. Every rank makes the same decisions,
    because they depend on agreed times.
    """
    points: list[LinkPoint] = []
    core_s = 0.0
    for nbytes in effort.link_nbytes:
        if len(points) > 1:
            last = points[-1]
            if last.time_s * nbytes / last.nbytes > effort.link_budget_s:
                break
        samples, core_s = _samples(group, effort, transfer(nbytes // ITEM_NBYTES))
        points.append(
            LinkPoint(nbytes=nbytes, time_s=probe_timing.quartile(samples), median_s=statistics.median(samples))
        )
    return tuple(points), core_s


def _samples(group: ProbeGroup, effort: Effort, call: Callable[[], object]) -> tuple[list[float], float]:
    """Return the seconds of the call on the slowest rank, and its core seconds on the busiest rank, with all its
    threads.

    The call is repeated for as long as its times disagree.
    """
    call()  # warm-up: opens connections, touches memory
    estimate = max(min(group.largest([probe_timing.once(call, group.device) for _ in range(3)])), 1e-7)
    inner = max(1, min(50, int(probe_timing.SAMPLE_S / estimate)))
    sample = estimate * inner
    repeats = max(2, min(effort.link_repeats, int(effort.link_budget_s / sample)), probe_timing.cheap_samples(sample))
    rounds, busy, calls = probe_timing.Rounds(), time.process_time(), 0
    while not rounds.samples or probe_timing.worth_more_samples(
        rounds.samples, inner * sum(rounds.samples), effort.link_budget_s
    ):
        stolen = StolenTime()
        seconds = [probe_timing.once(lambda: _in_a_row(call, inner), group.device) / inner for _ in range(repeats)]
        calls += repeats * inner
        *seconds, share = group.largest([*seconds, stolen.share()])
        rounds.take(seconds, share)
    return rounds.samples, group.largest([(time.process_time() - busy) / calls])[0]


def _in_a_row(call: Callable[[], object], count: int) -> None:
    for _ in range(count):
        call()


ITEM_NBYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class AlphaBeta:
    """The fit of a link.

    Attributes:
        residual: root mean square of (fitted - measured) / measured.
        large_nbytes: the part of a vector beyond this size goes at `large_bandwidth_bytes_per_s`; None if one line
            fits.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    residual: float
    large_nbytes: int | None = None
    large_bandwidth_bytes_per_s: float | None = None


def fit_link(points: Sequence[LinkPoint], *, transfer: Transfer, ranks: int) -> AlphaBeta:
    """Fit latency and bandwidth to two or more points.

    An all-reduce of n bytes among p ranks in a ring takes 2 (p - 1) alpha + 2 (p - 1) / p n / bandwidth (Thakur,
    Rabenseifner and Gropp 2005, section 5.2); one message takes alpha + n / bandwidth. The fit minimises the squared
    relative error, so that a small message counts as much as a large one. Neither constant is negative. If times do not
    grow with the size, the bandwidth is that of the fastest point.

    Args:
        points: times by size.
        transfer: what was timed.
        ranks: number of ranks that took part.
    """
    nbytes = np.array([point.nbytes for point in points], dtype=np.float64)
    times = np.array([point.time_s for point in points], dtype=np.float64)
    assert len(set(nbytes)) > 1, "fitting a line needs two sizes"
    start, slope = _line(nbytes, times)
    residual = float(np.sqrt(np.mean(((start + slope * nbytes) / times - 1.0) ** 2)))
    steps = 2 * (ranks - 1) if transfer == "all_reduce" else 1
    part = 2 * (ranks - 1) / ranks if transfer == "all_reduce" else 1.0
    bandwidth = part / slope if slope > 0 else part * float(np.max(nbytes / times))
    return AlphaBeta(latency_s=start / steps, bandwidth_bytes_per_s=bandwidth, residual=residual)


BEND_FROM, BEND_BY = 2**20, 1.15
"""Smallest size at which a line may bend, and smallest factor by which it must steepen. Reductions on CPUs slow down
when their vectors outgrow caches (16 MiB took 30 to 40 % longer than a line through smaller sizes predicts). Smaller
bends cannot be distinguished from noise.
"""


def fit_bent(points: Sequence[LinkPoint], *, transfer: Transfer, ranks: int) -> AlphaBeta:
    """Fit like `fit_link`, but let the line bend upwards at the best of the measured sizes.

    If the largest size is far slower than the fit says, the line is drawn through the shortest time and the largest
    size.

    Args:
        points: times by size.
        transfer: what was timed.
        ranks: number of ranks that took part.
    """
    nbytes = np.array([point.nbytes for point in points], dtype=np.float64)
    times = np.array([point.time_s for point in points], dtype=np.float64)
    steps = 2 * (ranks - 1) if transfer == "all_reduce" else 1
    part = 2 * (ranks - 1) / ranks if transfer == "all_reduce" else 1.0
    best = fit_link(points, transfer=transfer, ranks=ranks)
    for knee in sorted(set(nbytes[nbytes >= BEND_FROM]))[:-1]:
        start, slope, more, residual = _bent(nbytes, times, knee)
        if min(start, slope, more) > 0 and slope + more >= BEND_BY * slope and residual < best.residual:
            best = AlphaBeta(
                latency_s=start / steps,
                bandwidth_bytes_per_s=part / slope,
                residual=residual,
                large_nbytes=int(knee),
                large_bandwidth_bytes_per_s=part / (slope + more),
            )
    slowest = float(np.max(times[nbytes == np.max(nbytes)]))
    if best.large_nbytes is None and steps * best.latency_s + part * np.max(nbytes) / best.bandwidth_bytes_per_s < (
        slowest / BEND_BY
    ):
        return _through_ends(nbytes, times, steps, part)
    return best


def _through_ends(x: NDArray[np.float64], t: NDArray[np.float64], steps: int, part: float) -> AlphaBeta:
    """Return the line from the shortest time to that of the largest size.

    A rate-limited connection lets short bursts pass at once, so small vectors alone do not measure its rate.
    """
    start, largest = float(np.min(t)), float(np.max(x))
    slope = (float(np.max(t[x == largest])) - start) / largest
    residual = float(np.sqrt(np.mean(((start + slope * x) / t - 1.0) ** 2)))
    return AlphaBeta(latency_s=start / steps, bandwidth_bytes_per_s=part / slope, residual=residual)


def _bent(x: NDArray[np.float64], t: NDArray[np.float64], knee: float) -> tuple[float, float, float, float]:
    """Return a, b, c that minimise the mean of ((a + b x + c max(0, x - knee)) / t - 1)^2, and that mean's root."""
    scale = float(np.max(x))
    rows = np.stack([1.0 / t, x / scale / t, np.maximum(0.0, x - knee) / scale / t], axis=1)
    column = np.linalg.norm(rows, axis=0)
    solution, *_ = np.linalg.lstsq(rows / column, np.ones_like(t), rcond=None)
    residual = float(np.sqrt(np.mean((rows / column @ solution - 1.0) ** 2)))
    start, slope, more = (solution / column).tolist()
    return start, slope / scale, more / scale, residual


def unlengthened(points: Sequence[LinkPoint]) -> tuple[LinkPoint, ...]:
    """Return the points with the times of sizes that are slower than a larger size lowered to that size's time.

    Other work lengthened these. An idle machine may wake up late for each of many small messages, unlike a busy one.
    """
    lowered, least = [], np.inf
    for point in sorted(points, key=lambda measured_point: -measured_point.nbytes):
        least = min(least, point.time_s)
        lowered.append(replace(point, time_s=least))
    return tuple(lowered[::-1])


def _line(x: NDArray[np.float64], t: NDArray[np.float64]) -> tuple[float, float]:
    """Return a, b >= 0 that minimise sum(((a + b x) / t - 1)^2)."""
    scale = float(np.max(x))  # columns of one magnitude keep the small intercept's digits
    rows = np.stack([1.0 / t, (x / scale) / t], axis=1)
    column = np.linalg.norm(rows, axis=0)
    (start, slope), *_ = np.linalg.lstsq(rows / column, np.ones_like(t), rcond=None)
    start, slope = float(start / column[0]), float(slope / column[1] / scale)
    if start < 0:
        return 0.0, float(np.sum(x / t) / np.sum((x / t) ** 2))
    if slope < 0:
        return float(np.sum(1.0 / t) / np.sum(1.0 / t**2)), 0.0
    return start, slope

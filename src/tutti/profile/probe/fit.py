"""The alpha-beta model of a link, fitted to times.

All-reduce of n bytes among p ranks in a ring: t = 2 (p - 1) alpha + 2 (p - 1) / p n / bandwidth (Thakur, Rabenseifner
and Gropp 2005, section 5.2); one message: t = alpha + n / bandwidth. A measured line may bend once: what lies beyond a
size then has a lower bandwidth.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tutti.config.cluster import LinkPoint

Transfer = Literal["all_reduce", "send"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlphaBeta:
    """`residual`: root mean square of (fitted - measured) / measured. `large_nbytes`: what lies beyond goes at
    `large_bandwidth_bytes_per_s`; None where one line fits."""

    latency_s: float
    bandwidth_bytes_per_s: float
    residual: float
    large_nbytes: int | None = None
    large_bandwidth_bytes_per_s: float | None = None


def fit_link(points: Sequence[LinkPoint], *, transfer: Transfer, ranks: int) -> AlphaBeta:
    """Fit latency and bandwidth to points of two sizes or more.

    Least squares of the relative error, so that a small message counts as much as a large one. Neither constant
    comes out negative; where the times do not grow with the size, the bandwidth is that of the fastest point.
    """
    nbytes = np.array([point.nbytes for point in points], dtype=np.float64)
    times = np.array([point.time_s for point in points], dtype=np.float64)
    assert len(set(nbytes)) > 1, "a line needs two sizes"
    start, slope = _line(nbytes, times)
    residual = float(np.sqrt(np.mean(((start + slope * nbytes) / times - 1.0) ** 2)))
    steps = 2 * (ranks - 1) if transfer == "all_reduce" else 1
    part = 2 * (ranks - 1) / ranks if transfer == "all_reduce" else 1.0
    bandwidth = part / slope if slope > 0 else part * float(np.max(nbytes / times))
    return AlphaBeta(latency_s=start / steps, bandwidth_bytes_per_s=bandwidth, residual=residual)


BEND_FROM, BEND_BY = 2**20, 1.15
"""Where a line may bend, and by how much it must: sums on CPUs slow down where their vectors outgrow caches (16 MiB
took 30 to 40 % longer than a line through smaller sizes says), and nothing smaller is told from noise."""


def fit_bent(points: Sequence[LinkPoint], *, transfer: Transfer, ranks: int) -> AlphaBeta:
    """As `fit_link`, but with a line that bends upwards at the best of the sizes measured, where one does, and none on
    which the largest size is much quicker than it was.
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
    """The line from the quickest time to that of the largest size. A limited connection lets short bursts pass at once:
    of small vectors alone they are no measure of what it carries in a row."""
    start, largest = float(np.min(t)), float(np.max(x))
    slope = (float(np.max(t[x == largest])) - start) / largest
    residual = float(np.sqrt(np.mean(((start + slope * x) / t - 1.0) ** 2)))
    return AlphaBeta(latency_s=start / steps, bandwidth_bytes_per_s=part / slope, residual=residual)


def _bent(x: NDArray[np.float64], t: NDArray[np.float64], knee: float) -> tuple[float, float, float, float]:
    """a, b, c that minimise the mean of ((a + b x + c max(0, x - knee)) / t - 1)^2, and the root of that mean."""
    scale = float(np.max(x))
    rows = np.stack([1.0 / t, x / scale / t, np.maximum(0.0, x - knee) / scale / t], axis=1)
    column = np.linalg.norm(rows, axis=0)
    found, *_ = np.linalg.lstsq(rows / column, np.ones_like(t), rcond=None)
    residual = float(np.sqrt(np.mean((rows / column @ found - 1.0) ** 2)))
    start, slope, more = (found / column).tolist()
    return start, slope / scale, more / scale, residual


def unlengthened(points: Sequence[LinkPoint]) -> tuple[LinkPoint, ...]:
    """The points with no size slower than a larger one: where it was, something else lengthened its time. An idle
    machine may wake up late for each of many small messages, which is nothing that a busy one pays."""
    found, least = [], np.inf
    for point in sorted(points, key=lambda one: -one.nbytes):
        least = min(least, point.time_s)
        found.append(replace(point, time_s=least))
    return tuple(found[::-1])


def _line(x: NDArray[np.float64], t: NDArray[np.float64]) -> tuple[float, float]:
    """a, b >= 0 that minimise sum(((a + b x) / t - 1)^2)."""
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

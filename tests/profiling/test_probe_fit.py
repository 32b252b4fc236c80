"""The alpha-beta fit: exact on exact times, best in its own measure on noisy ones, never negative."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.config.cluster import LinkPoint, LinkSpec
from tutti.cost_model.rank_placement import link_of, ring_all_reduce
from tutti.profile.probe.link_rates import Transfer, fit_bent, fit_link, unlengthened

SIZES = (1024, 16384, 262144, 2097152, 16777216)


def times(latency_s: float, bandwidth: float, transfer: Transfer, ranks: int) -> list[LinkPoint]:
    """Points of the model itself: a ring all-reduce, or one message."""
    steps = 2 * (ranks - 1) if transfer == "all_reduce" else 1
    part = 2 * (ranks - 1) / ranks if transfer == "all_reduce" else 1
    return [LinkPoint(nbytes=n, time_s=steps * latency_s + part * n / bandwidth) for n in SIZES]


@given(
    latency_s=st.floats(1e-6, 1e-3),
    bandwidth=st.floats(1e7, 1e12),
    transfer=st.sampled_from(["all_reduce", "send"]),
    ranks=st.integers(2, 9),
)
def test_constants_of_the_model_come_back(latency_s: float, bandwidth: float, transfer: Transfer, ranks: int) -> None:
    fitted = fit_link(times(latency_s, bandwidth, transfer, ranks), transfer=transfer, ranks=ranks)
    assert fitted.latency_s == pytest.approx(latency_s, rel=1e-9)
    assert fitted.bandwidth_bytes_per_s == pytest.approx(bandwidth, rel=1e-9)
    assert fitted.residual < 1e-9


@given(st.lists(st.floats(0.7, 1.4), min_size=len(SIZES), max_size=len(SIZES)))
def test_no_nearby_line_has_a_smaller_residual(noise: list[float]) -> None:
    exact = times(2e-5, 2e9, "send", 2)
    points = [LinkPoint(nbytes=p.nbytes, time_s=p.time_s * factor) for p, factor in zip(exact, noise, strict=True)]
    fitted = fit_link(points, transfer="send", ranks=2)

    def residual(latency_s: float, bandwidth: float) -> float:
        errors = [(latency_s + p.nbytes / bandwidth) / p.time_s - 1 for p in points]
        return math.sqrt(sum(error**2 for error in errors) / len(errors))

    best = residual(fitted.latency_s, fitted.bandwidth_bytes_per_s)
    assert fitted.residual == pytest.approx(best, rel=1e-6, abs=1e-12)
    for latency in (0.99, 1.0, 1.01):
        for bandwidth in (0.99, 1.0, 1.01):
            nearby = residual(fitted.latency_s * latency, fitted.bandwidth_bytes_per_s * bandwidth)
            assert nearby >= best * (1 - 1e-9)


def test_the_residual_is_the_relative_error() -> None:
    # Two sizes measured twice, 10 % above and 10 % below one line: the fit cannot do better than about 10 %.
    line = [1.0, 2.0]
    points = [LinkPoint(nbytes=1000 * (i + 1), time_s=t * f) for i, t in enumerate(line) for f in (0.9, 1.1)]
    assert fit_link(points, transfer="send", ranks=2).residual == pytest.approx(0.1, rel=0.02)


def test_a_line_below_the_origin_gets_no_negative_latency() -> None:
    points = [LinkPoint(nbytes=n, time_s=t) for n, t in ((1000, 1e-7), (2000, 1e-5), (3000, 2e-5))]
    fitted = fit_link(points, transfer="send", ranks=2)
    assert fitted.latency_s == 0
    assert 0 < fitted.bandwidth_bytes_per_s < math.inf


def test_a_small_message_that_took_longer_than_a_large_one_counts_as_that() -> None:
    """Seen between hosts of a laboratory: 2 KB took three times as long as 256 KB, and the line went by that."""
    seen = dict(zip(SIZES, (1.37e-3, 1.62e-3, 0.53e-3, 2.11e-3, 18.84e-3), strict=True))
    points = [LinkPoint(nbytes=n, time_s=t, median_s=t) for n, t in seen.items()]
    cleared = unlengthened(points[::-1])
    assert [p.nbytes for p in cleared] == list(SIZES)
    assert [p.time_s for p in cleared] == [0.53e-3, 0.53e-3, 0.53e-3, 2.11e-3, 18.84e-3]
    assert [p.median_s for p in cleared] == list(seen.values())
    fitted = fit_link(cleared, transfer="all_reduce", ranks=2)
    raw = fit_link(points, transfer="all_reduce", ranks=2)
    assert fitted.latency_s < 0.85 * raw.latency_s
    assert fitted.bandwidth_bytes_per_s < 0.95 * raw.bandwidth_bytes_per_s


def test_times_that_fall_with_size_still_give_a_bandwidth() -> None:
    points = [LinkPoint(nbytes=n, time_s=t) for n, t in ((1000, 3e-5), (2000, 2e-5), (4000, 1e-5))]
    fitted = fit_link(points, transfer="all_reduce", ranks=2)
    assert fitted.bandwidth_bytes_per_s == pytest.approx(4000 / 1e-5)
    assert 0 < 2 * fitted.latency_s < 3e-5


@given(
    latency_s=st.floats(1e-6, 1e-3),
    bandwidth=st.floats(1e8, 1e11),
    slower=st.floats(0.1, 0.85),
    transfer=st.sampled_from(["all_reduce", "send"]),
    ranks=st.integers(2, 9),
)
def test_a_bend_comes_back(latency_s: float, bandwidth: float, slower: float, transfer: Transfer, ranks: int) -> None:
    """Beyond 2 MiB each byte takes longer: found from times of that kind, where it begins and by how much."""
    part = 2 * (ranks - 1) / ranks if transfer == "all_reduce" else 1
    knee, more = SIZES[3], (1 / slower - 1) / bandwidth
    points = [
        LinkPoint(nbytes=p.nbytes, time_s=p.time_s + part * max(0, p.nbytes - knee) * more)
        for p in times(latency_s, bandwidth, transfer, ranks)
    ]
    fitted = fit_bent(points, transfer=transfer, ranks=ranks)
    assert fitted.large_nbytes == knee
    assert fitted.large_bandwidth_bytes_per_s == pytest.approx(slower * bandwidth, rel=1e-6)
    assert fitted.bandwidth_bytes_per_s == pytest.approx(bandwidth, rel=1e-6)
    assert fitted.latency_s == pytest.approx(latency_s, rel=1e-6)


@pytest.mark.parametrize("largest_ms", [17.53, 18.44, 21.19])
def test_a_large_sum_is_as_long_as_it_was_measured(largest_ms: float) -> None:
    """Three probes of one laboratory: a line through all sizes had 16 MiB a quarter too short."""
    small = {17.53: (0.62, 2.25), 18.44: (0.91, 2.17), 21.19: (0.965, 2.35)}[largest_ms]
    seen = dict(zip(SIZES, (small[0], small[0], *small, largest_ms), strict=True))
    points = [LinkPoint(nbytes=n, time_s=t / 1e3) for n, t in seen.items()]
    fitted = fit_bent(points, transfer="all_reduce", ranks=2)
    link = LinkSpec(
        tier="network",
        latency_s=fitted.latency_s,
        bandwidth_bytes_per_s=fitted.bandwidth_bytes_per_s,
        large_nbytes=fitted.large_nbytes,
        large_bandwidth_bytes_per_s=fitted.large_bandwidth_bytes_per_s,
    )
    assert 1e3 * ring_all_reduce(link_of(link), SIZES[-1], 2) == pytest.approx(largest_ms, rel=0.05)
    line = fit_link(points, transfer="all_reduce", ranks=2)
    straight = LinkSpec(tier="network", latency_s=line.latency_s, bandwidth_bytes_per_s=line.bandwidth_bytes_per_s)
    assert 1e3 * ring_all_reduce(link_of(straight), SIZES[-1], 2) < 0.9 * largest_ms


def test_a_line_stays_one() -> None:
    points = times(1e-4, 2e9, "send", 2)
    assert fit_bent(points, transfer="send", ranks=2) == fit_link(points, transfer="send", ranks=2)
    quicker = [LinkPoint(nbytes=p.nbytes, time_s=p.time_s * (0.7 if p.nbytes == SIZES[-1] else 1)) for p in points]
    assert fit_bent(quicker, transfer="send", ranks=2).large_nbytes is None


@pytest.mark.parametrize("transfer", ["all_reduce", "send"])
def test_bursts_that_pass_at_once_are_no_bandwidth(transfer: Transfer) -> None:
    """Two probes of a connection of 100 Mbit/s: 16 KiB went through at 23 MB/s or more, and in a row nothing does."""
    seen = {"all_reduce": (0.646, 0.646, 20.83, 174.96), "send": (0.106, 0.69, 16.7, 170.2)}[transfer]
    points = [LinkPoint(nbytes=n, time_s=t / 1e3) for n, t in zip(SIZES, seen, strict=False)]
    fitted = fit_bent(points, transfer=transfer, ranks=2)
    assert fitted.bandwidth_bytes_per_s <= 12.5e6
    assert fitted.large_nbytes is None
    assert fit_link(points, transfer=transfer, ranks=2).bandwidth_bytes_per_s > 1.5 * 12.5e6

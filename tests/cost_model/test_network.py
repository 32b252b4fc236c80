"""Collectives: laws that hold for every algorithm, and values worked out by hand."""

import dataclasses
import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tutti.config.cluster import LinkSpec, scale_bandwidth
from tutti.cost_model import rank_placement
from tutti.cost_model.group_links import RankGroup, Span
from tutti.cost_model.rank_placement import Link
from tutti.errors import SpecError

ALGORITHMS = [
    rank_placement.ring_all_reduce,
    rank_placement.ring_reduce_scatter,
    rank_placement.tree_all_reduce,
]
LINK = Link(latency_s=1e-3, bandwidth_bytes_per_s=1e6)
Collective = Callable[[Link, float, int], float]


@pytest.mark.parametrize("collective", ALGORITHMS)
def test_one_rank_has_nothing_to_exchange(collective: Collective) -> None:
    assert collective(LINK, 1e9, 1) == 0.0


@pytest.mark.parametrize("collective", ALGORITHMS)
@settings(deadline=None)
@given(
    ranks=st.integers(2, 300),
    nbytes=st.floats(0, 1e12),
    latency_s=st.floats(0, 1),
    bandwidth=st.floats(1e3, 1e12),
    factor=st.floats(1, 1e3),
)
def test_more_bytes_or_latency_never_faster_more_bandwidth_never_slower(
    collective: Collective, ranks: int, nbytes: float, latency_s: float, bandwidth: float, factor: float
) -> None:
    def time(latency_s: float, bandwidth: float, nbytes: float) -> float:
        return collective(Link(latency_s=latency_s, bandwidth_bytes_per_s=bandwidth), nbytes, ranks)

    base = time(latency_s, bandwidth, nbytes)
    assert time(latency_s, bandwidth * factor, nbytes) <= base
    assert time(latency_s * factor, bandwidth, nbytes) >= base
    assert time(latency_s, bandwidth, nbytes * factor) >= base


@pytest.mark.parametrize("ranks", range(1, 10))
def test_ring_time_is_that_of_its_messages(ranks: int) -> None:
    elements = 5040
    chunk = 4 * elements / ranks
    steps = sum(rank_placement.message(LINK, chunk) for _ in range(2 * (ranks - 1)))
    assert rank_placement.ring_all_reduce(LINK, 4 * elements, ranks) == pytest.approx(steps, rel=1e-12)


def test_half_of_the_ring() -> None:
    assert rank_placement.ring_reduce_scatter(LINK, 1000, 4) == pytest.approx(3 * 1e-3 + 0.75 * 1e-3, rel=1e-12)


def test_the_tree_by_hand() -> None:
    assert rank_placement.tree_all_reduce(LINK, 1000, 9) == pytest.approx(8e-3 + 2e-3, rel=1e-12)


def test_hierarchical_is_its_parts_and_degenerates_to_either() -> None:
    outer = Link(latency_s=1e-2, bandwidth_bytes_per_s=1e5)
    whole = rank_placement.hierarchical_all_reduce(LINK, outer, 8000, per_node=4, nodes=2)
    scatter = 2 * rank_placement.ring_reduce_scatter(LINK, 8000, 4)
    between = 2 * 1e-2 + 2 / 2 * 2000 / (1e5 / 4)
    assert whole == pytest.approx(scatter + between, rel=1e-12)
    assert rank_placement.hierarchical_all_reduce(LINK, outer, 8000, 4, 1) == rank_placement.ring_all_reduce(
        LINK, 8000, 4
    )
    assert rank_placement.hierarchical_all_reduce(LINK, outer, 8000, 1, 4) == rank_placement.ring_all_reduce(
        outer, 8000, 4
    )


def test_hierarchical_beats_a_flat_ring_where_latency_between_hosts_counts() -> None:
    outer = Link(latency_s=1e-2, bandwidth_bytes_per_s=1e6)
    flat = rank_placement.ring_all_reduce(outer, 100, 64)
    assert rank_placement.hierarchical_all_reduce(LINK, outer, 100, 8, 8) < flat
    assert math.isfinite(flat)


@given(
    nbytes=st.floats(1, 1e9),
    more=st.floats(1, 100),
    factor=st.floats(1, 100),
    large=st.floats(0.1, 1),
)
def test_a_link_that_bends(nbytes: float, more: float, factor: float, large: float) -> None:
    """The time is continuous at the bend, never falls with more bytes, and never grows with a higher bandwidth."""
    spec = LinkSpec(
        tier="network",
        latency_s=1e-4,
        bandwidth_bytes_per_s=1e9,
        large_nbytes=2_000_000,
        large_bandwidth_bytes_per_s=1e9 * large,
    )

    def time(spec: LinkSpec, nbytes: float) -> float:
        return rank_placement.ring_all_reduce(rank_placement.link_of(spec), nbytes, 3)

    base = time(spec, nbytes)
    assert time(spec, nbytes * more) >= base * (1 - 1e-12)
    assert time(scale_bandwidth(spec, factor), nbytes) <= base * (1 + 1e-12)
    assert time(dataclasses.replace(spec, bandwidth_bytes_per_s=1e9 * factor), nbytes) <= base * (1 + 1e-12)
    if nbytes <= 2e6:
        assert base == pytest.approx(4e-4 + 4 / 3 * nbytes / 1e9, rel=1e-12)
    else:
        assert base == pytest.approx(4e-4 + 4 / 3 * (2e6 / 1e9 + (nbytes - 2e6) / (large * 1e9)), rel=1e-9)


def test_flows_share_both_parts_of_a_link_that_bends() -> None:
    spec = LinkSpec(
        tier="network",
        latency_s=1e-4,
        bandwidth_bytes_per_s=1e9,
        large_nbytes=1000,
        large_bandwidth_bytes_per_s=5e8,
    )
    alone = rank_placement.link_of(spec)
    assert alone.shared(4).carry(8000, 8000) == pytest.approx(4 * alone.carry(8000, 8000), rel=1e-12)
    assert alone.carry(8000, 8000) == pytest.approx(1000 / 1e9 + 7000 / 5e8, rel=1e-12)
    with pytest.raises(SpecError, match="one of large_nbytes and large_bandwidth_bytes_per_s"):
        dataclasses.replace(spec, large_nbytes=None)


def test_no_exchange_is_quicker_than_the_wire_that_a_large_vector_sees() -> None:
    """A connection of 1 Gbit/s lets small vectors through faster in bursts, as measured in a lab."""
    wire = LinkSpec(
        tier="network",
        latency_s=0.0,
        bandwidth_bytes_per_s=1.7e8,
        large_nbytes=2**21,
        large_bandwidth_bytes_per_s=1.15e8,
    )
    link, nbytes = rank_placement.link_of(wire), 2.0**27
    group = RankGroup(span=Span(ranks=2, hosts=2, per_host=1, sharing_groups=1, leaving=1), network=link)
    least = nbytes / 1.25e8
    assert rank_placement.message(link, nbytes) > least
    assert group.pass_on(nbytes) > least
    assert group.all_to_all(nbytes) > least / 2
    assert group.all_reduce(nbytes) > least

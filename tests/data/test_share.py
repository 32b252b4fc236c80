"""Shares: every sample of a global batch exactly once, in proportion, for any number of ranks and slices."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tutti.config.partitioning import cut
from tutti.config.plan import BatchPlan, Plan
from tutti.data.batches import share_of

sizes = st.integers(1, 200)
degrees = st.integers(1, 9)


@given(sizes, degrees)
def test_equal_cuts_differ_by_at_most_one(total: int, parts: int) -> None:
    bounds = cut(total, parts)
    counts = [b - a for a, b in itertools.pairwise(bounds)]
    assert sum(counts) == total
    assert max(counts) - min(counts) <= 1


@given(sizes, st.lists(st.floats(0, 10), min_size=1, max_size=6).filter(lambda w: sum(w) > 0.1))
def test_weighted_cuts_are_in_proportion_to_within_one(total: int, weights: list[float]) -> None:
    bounds = cut(total, len(weights), weights)
    assert bounds[0] == 0
    assert bounds[-1] == total
    for index, weight in enumerate(weights):
        count = bounds[index + 1] - bounds[index]
        assert count >= 0
        assert abs(count - total * weight / sum(weights)) <= 1 + 1e-9


@given(sizes, degrees, st.integers(1, 5), st.booleans())
def test_ranks_share_every_sample_once(size: int, degree: int, slices: int, unequal: bool) -> None:
    shares = tuple(float(rank % 3) for rank in range(1, degree + 1)) if unequal else ()
    batch = BatchPlan(global_batch_size=max(size, slices), num_microbatches=slices)
    plan = Plan(batch=batch, mesh={"replicate": degree}, shares=shares)
    everyone = [share_of(size, rank, plan) for rank in range(degree)]
    counted = [p.start + k for share in everyone for p in share.parts for k in range(p.count)]
    assert sorted(counted) == list(range(size))
    for share in everyone:
        assert len(share.parts) == min(size, slices)  # every rank takes part in every slice that is not empty
        for part in share.parts:
            assert part.loaded >= 1
            assert part.slice_start <= part.start < part.slice_start + part.slice_size
        assert len(share.positions) == sum(share.sizes)


def test_shares_3_to_1_take_three_quarters() -> None:
    plan = Plan(batch=BatchPlan(global_batch_size=64), mesh={"replicate": 2}, shares=(3.0, 1.0))
    assert share_of(64, 0, plan).sizes == [48]
    assert share_of(64, 1, plan).sizes == [16]

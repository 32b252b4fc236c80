"""The order of an epoch and its batches: from the seed alone, whatever reads it."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import WeightedRandomSampler

from tutti.config.plan import BatchPlan
from tutti.config.vocabulary import LastBatch
from tutti.data.batches import batch_bounds, epoch_order, sampler_order
from tutti.errors import DataError, PlanError


def test_order_is_a_permutation_that_depends_on_seed_and_epoch() -> None:
    orders = {(s, e): epoch_order(100, s, e, shuffle=True).tolist() for s in (0, 1) for e in (0, 1)}
    assert all(sorted(order) == list(range(100)) for order in orders.values())
    assert len({tuple(order) for order in orders.values()}) == 4
    assert orders[0, 1] == epoch_order(100, 0, 1, shuffle=True).tolist()
    assert epoch_order(5, 3, 4, shuffle=False).tolist() == [0, 1, 2, 3, 4]


def test_a_users_sampler_gives_one_order_and_disturbs_nothing() -> None:
    sampler = WeightedRandomSampler([1.0, 5.0, 1.0, 1.0], 20)
    before = np.random.get_state()[1].tolist()
    first, again = sampler_order(sampler, 0, 0), sampler_order(sampler, 0, 0)
    assert first.tolist() == again.tolist()
    assert first.tolist() != sampler_order(sampler, 0, 1).tolist()
    assert np.random.get_state()[1].tolist() == before


@given(st.integers(1, 300), st.integers(1, 50))
def test_batches_of_samples_cover_the_epoch(samples: int, size: int) -> None:
    order = np.arange(samples)
    kept = batch_bounds(order, BatchPlan(global_batch_size=size), None)
    assert np.diff(kept).tolist() == [size] * (samples // size) + ([samples % size] if samples % size else [])
    dropped = batch_bounds(order, BatchPlan(global_batch_size=size, last_batch="drop"), None)
    if samples >= size:
        assert np.diff(dropped).tolist() == [size] * (samples // size)


def test_1000_samples_in_batches_of_500_are_2_iterations() -> None:
    assert len(batch_bounds(np.arange(1000), BatchPlan(global_batch_size=500), None)) - 1 == 2


@given(st.lists(st.integers(1, 30), min_size=1, max_size=80), st.integers(30, 100))
def test_batches_of_tokens_are_as_full_as_they_can_be(lengths: list[int], size: int) -> None:
    order = np.random.default_rng(0).permutation(len(lengths))
    bounds = batch_bounds(order, BatchPlan(global_batch_size=size, unit="tokens"), lengths)
    taken = [[lengths[i] for i in order[a:b]] for a, b in itertools.pairwise(bounds)]
    assert sum(map(len, taken)) == len(lengths)
    assert all(sum(batch) <= size for batch in taken)
    for batch, following in itertools.pairwise(taken):
        assert sum(batch) + following[0] > size


def test_tokens_of_one_length_make_equal_batches() -> None:
    plan = BatchPlan(global_batch_size=1000, unit="tokens")
    assert np.diff(batch_bounds(np.arange(10), plan, 128)).tolist() == [7, 3]


def test_a_batch_of_tokens_needs_to_know_them() -> None:
    plan = BatchPlan(global_batch_size=100, unit="tokens")
    with pytest.raises(DataError, match=r"tokens of a sample are unknown; pass prepare\(..., tokens=N\)"):
        batch_bounds(np.arange(10), plan, None)
    with pytest.raises(DataError, match="sample 3 has 101 tokens, more than the global batch of 100"):
        batch_bounds(np.arange(5), plan, [1, 1, 1, 101, 1])


RAMP = ((3, 4), (5, 10))


@pytest.mark.parametrize("last_batch", ["keep", "drop"])
@pytest.mark.parametrize("before", [0, 2, 4, 9])
def test_a_batch_that_grows_cuts_the_same_order(before: int, last_batch: LastBatch) -> None:
    """Batches 0 to 2 have 4 samples, 3 and 4 have 10, then 25; numbers run on through epochs."""
    batch = BatchPlan(global_batch_size=25, ramp=RAMP, last_batch=last_batch)
    sizes = np.diff(batch_bounds(np.arange(90), batch, None, before)).tolist()
    expected = [4, 4, 4, 10, 10, 25, 25, 25, 25, 25, 25, 25, 25][before:]
    whole = [size for size, total in zip(expected, itertools.accumulate(expected), strict=True) if total <= 90]
    rest = 90 - sum(whole)
    assert sizes == whole + ([rest] if rest and last_batch == "keep" else [])


def test_a_batch_of_tokens_grows_too() -> None:
    batch = BatchPlan(global_batch_size=100, unit="tokens", ramp=((2, 20), (4, 50)))
    assert np.diff(batch_bounds(np.arange(40), batch, 10)).tolist() == [2, 2, 5, 5, 10, 10, 6]
    assert np.diff(batch_bounds(np.arange(40), batch, [10] * 40)).tolist() == [2, 2, 5, 5, 10, 10, 6]
    with pytest.raises(DataError, match="more than the global batch of 20 tokens"):
        batch_bounds(np.arange(5), batch, [1, 1, 1, 30, 1])


@pytest.mark.parametrize("ramp", [((0, 4),), ((3, 4), (3, 5)), ((3, 5), (6, 4)), ((3, 25),), ((3, 0),)])
def test_what_does_not_grow_is_refused(ramp: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(PlanError, match="whose steps and sizes both grow"):
        BatchPlan(global_batch_size=25, ramp=ramp)

"""Buckets, and communication that overlaps with backward."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tutti.cost_model.overlap import BucketCost, buckets, exchange

durations = st.lists(st.floats(0, 10), min_size=1, max_size=30)


@settings(deadline=None)
@given(
    gradients=st.lists(st.integers(0, 1000), max_size=40),
    cap=st.integers(1, 3000),
)
def test_buckets_hold_every_gradient_once_in_order_of_backward(gradients: list[int], cap: int) -> None:
    fused = buckets([float(nbytes) for nbytes in gradients], cap)
    assert sum(bucket.nbytes for bucket in fused) == sum(gradients)
    assert [bucket.last for bucket in fused] == sorted({bucket.last for bucket in fused})
    assert all(bucket.nbytes >= cap for bucket in fused[1:])  # only the remainder, which is sent first, may be smaller
    start = 0
    for bucket in fused:
        backwards = gradients[::-1][start : bucket.last + 1]
        assert sum(backwards) == bucket.nbytes
        start = bucket.last + 1


@settings(deadline=None)
@given(seconds=durations, data=st.data(), share=st.floats(0, 1))
def test_exposed_is_never_more_than_all_communication(seconds: list[float], data: st.DataObject, share: float) -> None:
    fused = buckets([1.0] * len(seconds), 3)
    times = data.draw(st.lists(st.floats(0, 20), min_size=len(fused), max_size=len(fused)))
    done = exchange(seconds, fused, times, cores_s=[share * lasts for lasts in times])
    assert 0 <= done.exposed_s <= done.total_s * (1 + 1e-12)
    assert done.total_s == pytest.approx(sum(times))
    # The last bucket is ready only when backward has ended, so nothing can hide it.
    assert done.exposed_s >= times[-1] * (1 - 1e-9) - 1e-9
    assert exchange(seconds, fused, times, cores_s=times).exposed_s == pytest.approx(sum(times))


def test_recurrence_by_hand() -> None:
    fused = (BucketCost(nbytes=1, last=0), BucketCost(nbytes=1, last=1), BucketCost(nbytes=1, last=2))
    # Ready at 1, 2, 4; on the link 1..4, 4..5, 5..6; backward ends at 4.
    done = exchange([1.0, 1.0, 2.0], fused, [3.0, 1.0, 1.0])
    assert (done.total_s, done.exposed_s) == (5.0, 2.0)
    # Three of the five seconds are hidden. For these, compute loses three fifths of the core time of all five.
    assert exchange([1.0, 1.0, 2.0], fused, [3.0, 1.0, 1.0], cores_s=[1.5, 0.5, 0.5]).exposed_s == 3.5
    assert exchange([1.0, 1.0, 2.0], fused, [3.0, 1.0, 1.0], cores_s=[0.0, 0.0, 1.0]).exposed_s == 2.6


def test_one_bucket_hides_nothing() -> None:
    fused = buckets([5.0, 5.0], 1e9)
    assert fused == (BucketCost(nbytes=10.0, last=1),)
    assert exchange([1.0, 1.0], fused, [0.5]).exposed_s == 0.5


def test_no_gradients_no_communication() -> None:
    assert buckets([0.0, 0.0], 10) == ()
    assert exchange([1.0], (), []).total_s == 0.0

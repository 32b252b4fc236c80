"""Exact counts against brute force and against worked examples."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_model.examples import plan
from tutti.cost_model.rank_placement import (
    RingCounts,
    cut_sizes,
    global_batch_of,
    iterations_per_epoch,
    naive_all_reduce_sent,
    rank_samples,
    ring_counts,
    ring_sent_nbytes,
    samples_of,
)
from tutti.data.batches import share_of
from tutti.errors import PlanError

# Sedona, Distributed Deep Learning, IGARSS tutorial 2021, recomputed by simulation. A ring and a root send the same.
RING_CASES = [
    {"N": 16, "P": 4, "sent": 24, "additions": [12] * 4, "messages": 6, "chunks": [4] * 4, "total": 96},
    {"N": 1000, "P": 8, "sent": 1750, "additions": [875] * 8, "messages": 14, "chunks": [125] * 8, "total": 14000},
    {"N": 10, "P": 4, "sent": 15, "additions": [8, 7, 8, 7], "messages": 6, "chunks": [2, 3, 2, 3], "total": 60},
]


def simulate_ring(elements: int, ranks: int) -> tuple[RingCounts, bool]:
    """Run the ring all-reduce message by message on integers; return the counts, and whether every rank has the sum."""
    chunks = cut_sizes(elements, ranks)
    ends = np.cumsum([0, *chunks])
    vectors = [np.arange(elements) * (rank + 1) + rank for rank in range(ranks)]
    expected = np.sum(vectors, axis=0)
    sent, additions, messages = [0] * ranks, [0] * ranks, [0] * ranks
    for phase in ("reduce-scatter", "all-gather"):
        for step in range(ranks - 1):
            first = 0 if phase == "reduce-scatter" else 1
            moved = []
            for rank in range(ranks):
                chunk = (rank + first - step) % ranks
                moved.append((chunk, vectors[rank][ends[chunk] : ends[chunk + 1]].copy()))
                sent[rank] += chunks[chunk]
                messages[rank] += 1
            for rank in range(ranks):
                chunk, values = moved[(rank - 1) % ranks]
                here = slice(ends[chunk], ends[chunk + 1])
                if phase == "reduce-scatter":
                    vectors[rank][here] += values
                    additions[rank] += chunks[chunk]
                else:
                    vectors[rank][here] = values
    counted = RingCounts(chunks=chunks, sent=tuple(sent), additions=tuple(additions), messages=messages[0])
    return counted, all((vector == expected).all() for vector in vectors)


@pytest.mark.parametrize("ranks", range(1, 10))
@pytest.mark.parametrize("elements", [1, 7, 8, 16, 23, 71, 72])
def test_ring_counts_equal_a_ring_that_is_run(elements: int, ranks: int) -> None:
    counted, summed = simulate_ring(elements, ranks)
    assert summed
    assert ring_counts(elements, ranks) == counted


@pytest.mark.parametrize("case", RING_CASES, ids=lambda case: f"N{case['N']}-P{case['P']}")
def test_ring_counts_of_the_worked_example(case: dict[str, Any]) -> None:
    counts = ring_counts(case["N"], case["P"])
    assert set(counts.sent) == {case["sent"]}
    assert counts.messages == case["messages"]
    assert list(counts.additions) == case["additions"]
    assert list(counts.chunks) == case["chunks"]
    assert counts.total_sent == case["total"] == naive_all_reduce_sent(case["N"], case["P"])


def test_ring_bytes_are_the_exact_counts_where_ranks_divide_the_vector() -> None:
    for ranks in range(1, 10):
        assert ring_sent_nbytes(4 * 720 * ranks, ranks) == 4 * ring_counts(720 * ranks, ranks).sent[0]


def test_iterations_of_an_epoch() -> None:
    assert iterations_per_epoch(1000, 500) == 2  # the tutorial's example
    assert iterations_per_epoch(1001, 500) == 3
    assert iterations_per_epoch(1001, 500, "drop") == 2
    assert iterations_per_epoch(499, 500, "drop") == 0
    assert global_batch_of(125, 4) == 500
    assert global_batch_of(25, 4, num_microbatches=5) == 500


@settings(deadline=None)
@given(
    total=st.integers(0, 500),
    parts=st.integers(1, 17),
    weights=st.none() | st.lists(st.floats(0.01, 100), min_size=17, max_size=17),
)
def test_cuts_add_up_and_equal_ones_differ_by_at_most_one(total: int, parts: int, weights: list[float] | None) -> None:
    sizes = cut_sizes(total, parts, weights[:parts] if weights else ())
    assert sum(sizes) == total
    assert len(sizes) == parts
    assert min(sizes) >= 0
    if not weights:
        assert max(sizes) - min(sizes) <= 1


@settings(deadline=None)
@given(
    batch=st.integers(1, 60),
    ranks=st.integers(1, 5),
    microbatches=st.integers(1, 4),
    shares=st.none() | st.lists(st.floats(0, 9), min_size=5, max_size=5),
)
def test_samples_of_ranks_are_those_a_run_computes(
    batch: int, ranks: int, microbatches: int, shares: list[float] | None
) -> None:
    weights = tuple(shares[:ranks]) if shares and sum(shares[:ranks]) > 0 else ()
    microbatches = min(microbatches, batch)
    intended = plan(batch, ranks, microbatches, shares=weights)
    predicted = rank_samples(batch, microbatches, ranks, weights)
    for rank in range(ranks):
        run = share_of(batch, rank, intended).sizes
        assert sorted(size for size, times in predicted[rank] for _ in range(times)) == sorted(run)
        assert predicted[rank][-1][0] == run[-1]


def test_samples_of_a_batch_in_tokens() -> None:
    assert samples_of(4096, "tokens", 512) == 8
    assert samples_of(100, "tokens", 512) == 1
    assert samples_of(100, "samples", 512) == 100
    with pytest.raises(PlanError, match="tokens_per_sample is unknown"):
        samples_of(4096, "tokens", 0)

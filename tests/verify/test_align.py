"""Ranks' tensors beside one device's: every way samples may lie in a tensor is found, and nothing else passes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tutti.config.plan import BatchPlan, Plan
from tutti.data.batches import MicrobatchShare, share_of
from tutti.verification.alignment import RankTensor, batch_alignments
from tutti.verification.compare_forward import smallest_gap
from tutti.verification.tolerance import ToleranceChecker, difference, rms

GAUGE = ToleranceChecker(1e-8, 1e-2)


def shares(batch: int, weights: tuple[float, ...], microbatches: int, index: int) -> list[MicrobatchShare]:
    plan = Plan(
        batch=BatchPlan(global_batch_size=batch, num_microbatches=microbatches),
        mesh={"replicate": len(weights)},
        shares=weights,
    )
    return [share_of(batch, rank, plan).parts[index] for rank in range(len(weights))]


def gap(whole: torch.Tensor, values: list[torch.Tensor], parts: list[MicrobatchShare]) -> float | None:
    pieces = [RankTensor(rank=r, share=p, value=v) for r, (p, v) in enumerate(zip(parts, values, strict=True))]
    found = smallest_gap(whole, pieces, rms([whole]), GAUGE)
    return None if found is None else found.largest


LAYOUTS = ("first", "second", "flattened", "sequence first", "tokens of samples")


@settings(max_examples=60, deadline=None)
@given(
    layout=st.sampled_from(LAYOUTS),
    weights=st.lists(st.integers(0, 3), min_size=1, max_size=4).filter(any),
    batch=st.integers(2, 13),
    seed=st.integers(0, 100),
)
def test_every_layout_of_samples_is_found(layout: str, weights: list[int], batch: int, seed: int) -> None:
    parts = shares(batch, tuple(map(float, weights)), 2, 1)
    size = parts[0].slice_size
    generator = torch.Generator().manual_seed(seed)
    samples = torch.randn(size, 3, 4, generator=generator)
    lengths = torch.randint(1, 4, (size,), generator=generator).tolist()

    def laid_out(begin: int, count: int) -> torch.Tensor:
        rows = samples[begin : begin + count]
        if layout == "first":
            return rows
        if layout == "second":
            return rows.transpose(0, 1)
        if layout == "flattened":
            return rows.flatten(0, 1)
        if layout == "sequence first":
            return rows.transpose(0, 1).flatten(0, 1)
        return torch.cat([row[:n] for row, n in zip(rows, lengths[begin : begin + count], strict=True)])

    values = [laid_out(part.start - part.slice_start, part.loaded) for part in parts]
    whole = laid_out(0, size)
    assert gap(whole, values, parts) == 0.0
    counting = next(rank for rank, part in enumerate(parts) if part.count)
    values[counting] = values[counting].contiguous().clone()
    values[counting].view(-1)[0] += 1.0
    found = gap(whole, values, parts)
    assert found is not None
    assert found > 0.01


def test_a_rank_that_only_takes_part_is_left_out() -> None:
    parts = shares(4, (1.0, 0.0), 1, 0)
    rows = torch.randn(4, 2)
    assert gap(rows, [rows, torch.full((1, 2), math.nan)], parts) == 0.0


def test_ranks_that_pad_less_are_compared_as_far_as_they_go() -> None:
    parts = shares(4, (1.0, 1.0), 1, 0)
    rows = torch.randn(4, 5, 3)
    assert gap(rows, [rows[:2, :4], rows[2:]], parts) == 0.0
    assert gap(rows, [rows[:2, 1:], rows[2:]], parts) == 0.0  # padded in front
    assert (gap(rows, [rows[:2, [0, 2, 3, 4]], rows[2:]], parts) or 0.0) > 0.01
    assert (gap(rows, [rows[:2, 1:], rows[2:].roll(1, 1)], parts) or 0.0) > 0.01


@pytest.mark.parametrize("kind", ["each", "mean", "sum"])
def test_values_without_samples_agree_as_equal_mean_or_sum(kind: str) -> None:
    parts = shares(8, (3.0, 1.0), 1, 0)
    one, two = torch.tensor(1.0), torch.tensor(5.0)
    whole = {"each": one, "mean": torch.tensor(2.0), "sum": torch.tensor(6.0)}[kind]
    values = [one, one] if kind == "each" else [one, two]
    assert gap(whole, values, parts) == 0.0
    assert gap(torch.tensor(77.0), values, parts) is None
    assert len(list(batch_alignments(whole, []))) == 0


def test_a_mean_is_compared_with_the_mean_although_each_rank_is_within_the_tolerance() -> None:
    parts = shares(8, (1.0, 1.0), 1, 0)
    near = 0.5 * GAUGE.tolerance
    whole, low, high = torch.tensor([1.0, 1 - near, 1 + near], dtype=torch.float64)
    assert gap(whole, [low, high], parts) < 0.01 * GAUGE.tolerance


def test_differences_are_relative_to_the_scale_and_honest_about_what_is_not_finite() -> None:
    one = torch.tensor([1.0, -2.0, math.inf, math.nan])
    assert difference(one, one.clone(), 2.0) == 0.0
    assert difference(one, torch.tensor([1.0, -1.0, math.inf, math.nan]), 2.0) == 0.5
    assert difference(one, torch.tensor([1.0, -2.0, 3.0, math.nan]), 2.0) == math.inf
    assert difference(one, torch.tensor([math.nan, -2.0, math.inf, math.nan]), 2.0) == math.inf
    assert difference(one, one[:3], 2.0) == math.inf
    assert rms([torch.tensor([3.0, 4.0]), torch.tensor([math.inf])]) == pytest.approx(math.sqrt(12.5))

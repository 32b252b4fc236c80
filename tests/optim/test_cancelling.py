"""What a rule of momenta makes of ranks' parts that cancel in their sum."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from tutti.config.compression import STATISTICS_UPDATES
from tutti.optim.frozen_second_moment import (
    CHANCE_MARGIN,
    PARTS,
    SUM,
    FrozenAdam,
    FrozenLAMB,
    FrozenSecondMoment,
    accumulate_squares,
    cancellation_excess,
    squared_norms,
)
from tutti.optim.large_batch import LAMB
from tutti.optim.zero_one_adam import ZeroOneAdam


def test_parts_in_excess_of_their_sum_are_counted_beyond_chance_only() -> None:
    assert cancellation_excess({}) == cancellation_excess({PARTS: 0.0, SUM: 0.0}) == 1
    assert cancellation_excess({PARTS: CHANCE_MARGIN**2, SUM: 1.0}) == 1
    assert math.isclose(cancellation_excess({PARTS: (30 * CHANCE_MARGIN) ** 2, SUM: 1.0}), 30)
    assert 1e15 < cancellation_excess({PARTS: 4.0, SUM: 0.0}) < math.inf


def test_what_is_not_finite_is_not_remembered() -> None:
    w = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([w])
    accumulate_squares({w: (1.0, 1.0)}, optimizer)
    assert not optimizer.state[w], "Adam begins with an empty state"
    w.grad = torch.ones(2)
    optimizer.step()
    for squares in ((1.0, 2.0), (math.inf, 1.0), (1.0, math.nan), (3.0, 4.0)):
        accumulate_squares({w: squares}, optimizer)
    assert (optimizer.state[w][PARTS], optimizer.state[w][SUM]) == (4.0, 6.0)


def trained(kind: Any, rule: Any, length: float, steps: int = 12) -> tuple[Any, torch.optim.Optimizer, nn.Parameter]:
    """A vector of gradients of rms 1e-6 whose parts on two ranks have rms `length`."""
    draw = torch.Generator().manual_seed(0)
    w = nn.Parameter(torch.ones(50, dtype=torch.float64))
    optimizer = kind([w], lr=0.01, betas=(0.9, 0.999), eps=1e-12)
    made = rule(optimizer)
    for step in range(steps):
        total, apart = (torch.randn(50, generator=draw, dtype=torch.float64) for _ in range(2))
        parts = [1e-6 * total / 2 + sign * length * apart for sign in (1, -1)]
        w.grad = sum(parts)  # type: ignore[assignment]
        if made.wants_statistics:
            own = float(sum(squared_norms([part]) for part in parts))
            made.observed_norms = {w: (own, float(squared_norms([w.grad])))}  # type: ignore[list-item]
        elif isinstance(made, FrozenSecondMoment):
            assert step < 12 - STATISTICS_UPDATES or made.frozen
        optimizer.step()
    return made, optimizer, w


@pytest.mark.parametrize("length", [1e-6, 1e-2])
def test_no_part_is_longer_than_twenty_times_what_it_is_divided_by(length: float) -> None:
    """Where parts do not cancel the floor is a tenth of what their sum was like, as before."""
    rules = [
        (torch.optim.Adam, lambda optimizer: FrozenAdam(optimizer, 12)),
        (LAMB, lambda optimizer: FrozenLAMB(optimizer, 12)),
        (torch.optim.Adam, lambda optimizer: ZeroOneAdam(optimizer, 13, 13)),
    ]
    for kind, rule in rules:
        made, optimizer, w = trained(kind, rule, length)
        moment = None if isinstance(made, ZeroOneAdam) else made.moment(w)
        divisor = made.divisor(w) if isinstance(made, ZeroOneAdam) else made._divisor(w)
        v = optimizer.state[w]["exp_avg_sq"] / (1 - 0.999**12)
        rms = float(v.mean().sqrt())
        if length == 1e-6:
            torch.testing.assert_close(divisor, v.sqrt().clamp(min=0.1 * rms) + 1e-12, rtol=1e-12, atol=0)
            continue
        assert rms < 1e-5
        least = float(divisor.min())
        assert 10 * least < math.sqrt(2) * length < 40 * least
        if kind is LAMB:
            assert moment is not None
            assert 0.5 < 0.1 * math.sqrt(2) * length / float(moment.divisor.mean()) < 2, "of the size of other layers'"


def test_where_nobody_has_looked_all_is_as_it_was() -> None:
    w = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.Adam([w], lr=0.01)
    rule = FrozenAdam(optimizer, 2)
    for value in (1.0, 2.0):
        w.grad = torch.full((4,), value)
        optimizer.step()
    assert rule.frozen
    assert not rule.wants_statistics
    assert cancellation_excess(optimizer.state[w]) == 1

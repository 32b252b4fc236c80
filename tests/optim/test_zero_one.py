"""0/1 Adam's updates, beside its equations written once more, on values."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from tutti.config.compression import parse_compression
from tutti.config.zero_one_schedule import learns, local_updates
from tutti.errors import PlanError
from tutti.optim.zero_one_adam import ZeroOneAdam, zero_one_adam_of

RANKS, FREEZE, KAPPA = 3, 7, 2


def test_the_schedule_is_the_papers() -> None:
    """kappa times in every update, kappa times in every second, in every fourth; ranks agree the other way round."""
    assert [count for count in range(40) if learns(count, 2)] == [0, 1, 2, 4, 8, 12, 16, 24, 32]
    assert [local_updates(agreed, 2, 6) for agreed in range(9)] == [1, 1, 2, 2, 4, 4, 6, 6, 6]
    assert local_updates(10**6, 1, 16) == 16
    how = parse_compression("zero-one-adam,freeze_step=7,kappa=2")
    assert [how.at(step) is None for step in range(8)] == [True, True, True, False, True, False, False, False]


def test_while_the_second_moment_always_learns_it_is_adam() -> None:
    torch.manual_seed(0)
    start, given = torch.randn(5).double(), torch.randn(6, 5).double()
    ends = []
    for rule in (False, True):
        w = nn.Parameter(start.clone())
        optimizer = torch.optim.AdamW([w], lr=0.1)
        if rule:
            ZeroOneAdam(optimizer, 6, 6)
        for gradient in given:
            w.grad = gradient.clone()
            optimizer.step()
        ends.append(w.detach())
    assert torch.equal(*ends)


Gradients = Callable[[int, list[torch.Tensor]], torch.Tensor]
"""(step, parameters of every rank) -> (ranks, n): a rank's gradient of the mean over its own samples."""


def equations(
    start: torch.Tensor,
    gradients: Gradients,
    steps: int,
    *,
    decay: float,
    decoupled: bool,
    lr: float = 0.1,
    sizes: Sequence[int] = (),
    clip_norm: float | None = None,
) -> list[torch.Tensor]:
    """Parameters of every rank in the end, by the equations, where ranks agree exactly; `sizes`: of tensors that lie in
    them one behind the other. What enters the optimizer is clipped: the mean, or a rank's own where ranks step alone.
    """
    b1, b2, eps, sizes = 0.9, 0.999, 1e-8, sizes or [start.numel()]

    def clipped(g: torch.Tensor) -> torch.Tensor:
        return g if clip_norm is None else g * min(1.0, clip_norm / (float(g.norm()) + 1e-6))

    def floored(root: torch.Tensor) -> torch.Tensor:
        return torch.cat([one.clamp(min=0.1 * one.square().mean().sqrt()) for one in root.split(list(sizes))])

    m, v, learned = torch.zeros_like(start), torch.zeros_like(start), 0
    w, t = start.clone(), 0
    for step in range(FREEZE):
        g = clipped(gradients(step, [w] * RANKS).mean(0)) + (0 if decoupled else decay * w)
        w = w * (1 - lr * decay) if decoupled else w
        if learns(t, KAPPA):
            v, learned = b2 * v + (1 - b2) * g * g, learned + 1
        m, t = b1 * m + (1 - b1) * g, t + 1
        root = (v / (1 - b2**learned)).sqrt()
        w = w - lr * m / (1 - b1**t) / ((floored(root) if t > KAPPA else root) + eps)
    d = floored((v / (1 - b2**learned)).sqrt()) + eps
    own, momenta = [w.clone() for _ in range(RANKS)], [m.clone() for _ in range(RANKS)]
    base, since, agreed, rates = w, 0, 0, 0.0
    for step in range(FREEZE, steps):
        t, since = t + 1, since + 1
        for rank, found in enumerate(gradients(step, own)):
            g = clipped(found) + (0 if decoupled else decay * own[rank])
            momenta[rank] = b1 * momenta[rank] + (1 - b1) * g
            own[rank] = own[rank] * (1 - lr * decay if decoupled else 1)
            own[rank] = own[rank] - lr * momenta[rank] / (1 - b1**t) / d
        rates += lr / (1 - b1**t)
        if since == local_updates(agreed, 2, 4):
            mean = torch.stack(own).mean(0)
            displacement = base * (1 - lr * decay if decoupled else 1) ** since - mean
            base, own = mean, [mean.clone() for _ in range(RANKS)]
            momenta = [displacement * d / rates for _ in range(RANKS)]
            since, agreed, rates = 0, agreed + 1, 0.0
    return own


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_ranks_that_step_alone_are_the_equations(kind: Any) -> None:
    """The mean of ways leads where the mean of ranks' parameters is, decay and all; a coordinate without gradients."""
    torch.manual_seed(1)
    start, given = torch.randn(6).double(), torch.randn(FREEZE + 13, RANKS, 6).double()
    given[:, :, 2] = 0
    weights = [nn.Parameter(start.clone()) for _ in range(RANKS)]
    optimizers = [kind([w], lr=0.1, weight_decay=0.05) for w in weights]
    rules = [ZeroOneAdam(optimizer, FREEZE, KAPPA) for optimizer in optimizers]
    assert zero_one_adam_of(optimizers[1]) is rules[1]
    since = agreed = 0
    for step, gradients in enumerate(given):
        assert all(rule.exact == (step < FREEZE and learns(step, KAPPA)) for rule in rules)
        assert all(rule.frozen == (step >= FREEZE) for rule in rules)
        if step == FREEZE:
            for rule in rules:
                rule.rebase()
        for rank, (w, optimizer) in enumerate(zip(weights, optimizers, strict=True)):
            w.grad = (gradients[rank] if step >= FREEZE else gradients.mean(0)).clone()
            optimizer.step()
            assert w.grad is not None
        since += step >= FREEZE
        if since == local_updates(agreed, 2, 4):
            ways = [optimizer.state[w]["displacement"] for w, optimizer in zip(weights, optimizers, strict=True)]
            mean = torch.stack(ways).mean(0)
            for displacement, rule in zip(ways, rules, strict=True):
                displacement.copy_(mean)
                rule.agree()
            since, agreed = 0, agreed + 1
            assert all(torch.equal(w, weights[0]) for w in weights)
    decoupled = kind is torch.optim.AdamW
    expected = equations(start, lambda step, _: given[step], len(given), decay=0.05, decoupled=decoupled)
    for w, one in zip(weights, expected, strict=True):
        torch.testing.assert_close(w.detach(), one, rtol=1e-12, atol=1e-13)


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(PlanError, match="needs freeze_step"):
        parse_compression("zero-one-adam")
    with pytest.raises(PlanError, match="longest = 0"):
        parse_compression("zero-one-adam,freeze_step=3,longest=0")
    with pytest.raises(PlanError, match="kappa is a setting of zero-one-adam"):
        parse_compression("one-bit,kappa=3")
    with pytest.raises(PlanError, match="SGD is not Adam's"):
        ZeroOneAdam(torch.optim.SGD([nn.Parameter(torch.zeros(2))]), 3, 1)

"""Adam and LAMB whose second moment stands still, beside their equations written out."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tutti.errors import PlanError
from tutti.optim.frozen_second_moment import FROZEN_AFTER, FrozenAdam, FrozenLAMB, FrozenSecondMoment
from tutti.optim.large_batch import LAMB

SHAPES = ((3, 4), (5,), (2, 2))


def weights() -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(shape, dtype=torch.float64, generator=draw)) for shape in SHAPES]


def gradient(step: int, place: int) -> Tensor:
    found = torch.randn(SHAPES[place], dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + place))
    found.view(-1)[0] = 0  # a coordinate that never has a gradient
    return found


def floored(root: Tensor) -> Tensor:
    return root.clamp(min=0.1 * float(root.square().mean().sqrt()))


def divisor(v: Tensor, count: int, eps: float) -> Tensor:
    return floored((v / (1 - 0.999**count)).sqrt()) + eps


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_adam_is_torchs_until_its_second_moment_stands_and_goes_on_with_it(kind: type[torch.optim.Optimizer]) -> None:
    live, plain, expected = weights(), weights(), [p.detach().clone() for p in weights()]
    optimizer, reference = (kind(some, lr=0.01, weight_decay=0.1) for some in (live, plain))  # type: ignore[call-arg]
    frozen = FrozenAdam(optimizer, 5)
    m, v = ([torch.zeros(shape).double() for shape in SHAPES] for _ in range(2))
    for step in range(1, 13):
        assert frozen.frozen == (step > 5)
        for place, (p, q) in enumerate(zip(live, plain, strict=True)):
            p.grad, q.grad = gradient(step, place), gradient(step, place)
        optimizer.step()
        assert all(p.grad is not None for p in live)
        if step <= 5:
            reference.step()
        for place, w in enumerate(expected):
            g, decay = gradient(step, place), 0.1
            if kind is torch.optim.AdamW:
                w.mul_(1 - 0.01 * decay)
            else:
                g = g + decay * w
            m[place] = 0.9 * m[place] + 0.1 * g
            if step <= 5:
                v[place] = 0.999 * v[place] + 0.001 * g * g
            d = divisor(v[place], 5, 1e-8) if step > 5 else (v[place] / (1 - 0.999**step)).sqrt() + 1e-8
            w.sub_(0.01 * m[place] / (1 - 0.9**step) / d)
            torch.testing.assert_close(live[place].detach(), w, rtol=0, atol=1e-12)
            if step <= 5:
                torch.testing.assert_close(live[place], plain[place], rtol=0, atol=0)
    moment = frozen.moment(live[0])
    assert moment is not None
    torch.testing.assert_close(moment.m, m[0], rtol=0, atol=1e-14)
    torch.testing.assert_close(moment.divisor, divisor(v[0], 5, 1e-8), rtol=0, atol=1e-14)


def test_lambs_ratios_follow_the_second_moment_that_goes_on() -> None:
    live, expected = weights(), [p.detach().clone() for p in weights()]
    optimizer = LAMB(live, lr=0.01)
    frozen = FrozenLAMB(optimizer, 6)
    m, v, fresh = ([torch.zeros(shape).double() for shape in SHAPES] for _ in range(3))
    ratios, factors = [0.0] * 3, [1.0] * 3
    for step in range(1, 21):
        assert frozen.frozen == (step > 6)
        for place, p in enumerate(live):
            p.grad = gradient(step, place) * (3.0 if step > 12 else 1.0)
        optimizer.step()
        for place, w in enumerate(expected):
            g = gradient(step, place) * (3.0 if step > 12 else 1.0)
            m[place], fresh[place] = 0.9 * m[place] + 0.1 * g, 0.999 * fresh[place] + 0.001 * g * g
            if step <= 6:
                v[place] = fresh[place].clone()
                d = (v[place] / (1 - 0.999**step)).sqrt() + 1e-6
            else:
                d = divisor(v[place], 6, 1e-6)
                wanted = min(max(float((d / divisor(fresh[place], step, 1e-6)).max()), 0.5), 4.0)
                factors[place] = min(max(wanted, 0.9 * factors[place]), 1.1 * factors[place])
            update = m[place] / (1 - 0.9**step) / d + 0.01 * w
            if step <= 6:
                ratio = float(w.norm() / update.norm())
                ratios[place] = ratio if step == 1 else 0.9 * ratios[place] + 0.1 * ratio
            else:
                ratio = ratios[place] * factors[place]
            w.sub_(0.01 * ratio * update)
            torch.testing.assert_close(live[place].detach(), w, rtol=0, atol=1e-12)
    assert all(factor < 0.95 for factor in factors), "gradients grew, so the ratios had to fall"


def test_momenta_of_layers_are_sent_in_one_magnitude() -> None:
    live = weights()
    optimizer = LAMB(live, lr=0.01)
    frozen = FrozenLAMB(optimizer, 3)
    for step in range(3):
        for place, p in enumerate(live):
            p.grad = gradient(step, place) * 10.0 ** (-3 * place)
        optimizer.step()
    assert frozen.frozen
    for p in live:
        moment = frozen.moment(p)
        assert moment is not None
        assert math.isclose(float((moment.m / moment.divisor).square().mean().sqrt()), 1.0)


def test_what_had_no_gradient_has_no_moment_and_stays_where_it_is() -> None:
    live = weights()
    optimizer = torch.optim.Adam(live, lr=0.01)
    frozen = FrozenAdam(optimizer, 2)
    for step in range(6):
        live[0].grad = gradient(step, 0)
        live[1].grad = torch.zeros(SHAPES[1]).double() if step < 2 else gradient(step, 1)
        optimizer.step()
    assert frozen.moment(live[0]) is not None
    assert frozen.moment(live[1]) is None
    assert frozen.moment(live[2]) is None
    assert torch.equal(live[1].detach(), weights()[1].detach())


@pytest.mark.parametrize(("kind", "rule"), [(torch.optim.Adam, FrozenAdam), (LAMB, FrozenLAMB)])
def test_whether_it_stands_goes_with_the_optimizers_state(kind: Any, rule: type[FrozenSecondMoment]) -> None:
    live = weights()
    optimizer = kind(live, lr=0.01)
    rule(optimizer, 2)
    for step in range(4):
        for place, p in enumerate(live):
            p.grad = gradient(step, place)
        optimizer.step()
    again = weights()
    other = kind(again, lr=0.01)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    later = rule(other, 100)
    assert later.frozen
    assert all(other.state[p][FROZEN_AFTER] == 2 for p in again)
    for p, q in zip(live, again, strict=True):
        q.data.copy_(p.data)
    for step in range(9, 12):
        for place, (p, q) in enumerate(zip(live, again, strict=True)):
            p.grad, q.grad = gradient(step, place), gradient(step, place)
        optimizer.step()
        other.step()
        for p, q in zip(live, again, strict=True):
            assert torch.equal(p, q)


def test_other_optimizers_are_refused_with_the_reason() -> None:
    live = weights()
    for frozen, optimizer, words in (
        (FrozenAdam, torch.optim.SGD(live, lr=0.1), "SGD is not Adam's"),
        (FrozenAdam, torch.optim.NAdam(live), "NAdam is not Adam's"),
        (FrozenAdam, torch.optim.AdamW(live, amsgrad=True), "leave amsgrad out"),
        (FrozenLAMB, torch.optim.AdamW(live), "AdamW is not LAMB's"),
        (FrozenLAMB, LAMB(live, lr=0.1, normalise=True), "NVLAMB divides"),
    ):
        with pytest.raises(PlanError, match=words):
            frozen(optimizer, 5)


def test_a_second_moment_needs_steps() -> None:
    with pytest.raises(PlanError, match="freeze_step = 0"):
        FrozenAdam(torch.optim.Adam(weights()), 0)

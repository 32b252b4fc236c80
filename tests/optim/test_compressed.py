"""Adam and LAMB with compressed momentum: by their equations with nothing compressed, and on digits with one bit."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness import run_ranks
from tutti.compress.bytegrad import ByteGrad
from tutti.compress.onebit import OneBit
from tutti.compress.two_phase import TwoPhase
from tutti.errors import PlanError
from tutti.optim.compressed import CompressedAdam, OneBitLAMB
from tutti.runtime.world import join


class Plain:
    """An exchange of one rank that changes nothing."""

    def run(self, flat: Tensor) -> None:
        self.last = flat.clone()

    def settle(self, finite: bool) -> None:
        self.settled = finite


def gradient(step: int, numel: int = 6, rank: int = 0) -> Tensor:
    found = torch.randn(numel, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + rank))
    found[-1] = 0  # a coordinate that never has a gradient
    return found


def start(numel: int = 6) -> Tensor:
    return torch.linspace(-1, 1, numel, dtype=torch.float64)


def test_uncompressed_it_is_adam_with_a_frozen_second_moment() -> None:
    made = CompressedAdam([4, 2], Plain(), ranks=1, freeze_step=5, weight_decay=0.1, floor=0.0, dtype=torch.float64)
    weights, plain = start(), start()
    m, v, frozen = torch.zeros(6).double(), torch.zeros(6).double(), torch.zeros(6).double()
    for step in range(1, 15):
        g = gradient(step)
        m = 0.9 * m + 0.1 * g
        if step <= 5:
            v = 0.999 * v + 0.001 * g * g
            frozen = (v / (1 - 0.999**step)).sqrt() + 1e-8
        plain = plain - 0.01 * (m / (1 - 0.9**step) / frozen + 0.1 * plain)
        assert made.warm == (step <= 5)
        assert made.step(weights, g, 0.01)
        torch.testing.assert_close(weights, plain, rtol=0, atol=1e-12)


def test_before_the_freeze_it_is_adamw_of_torch() -> None:
    made = CompressedAdam([4, 2], Plain(), ranks=1, freeze_step=20, weight_decay=0.1, dtype=torch.float64)
    weights, parameter = start(), nn.Parameter(start())
    reference = torch.optim.AdamW([parameter], 0.01, weight_decay=0.1)
    for step in range(10):
        parameter.grad = gradient(step)
        reference.step()
        made.step(weights, gradient(step), 0.01)
    # AdamW decays before it steps: the difference is of second order in the rate
    torch.testing.assert_close(weights, parameter.detach(), rtol=0, atol=10 * 0.01 * 0.1 * 0.01 * 1.1)


def test_one_bit_lamb_uncompressed_is_lamb_until_the_freeze_and_bounded_after() -> None:
    made = OneBitLAMB([4, 2], Plain(), ranks=1, freeze_step=6, weight_decay=0.01, floor=0.0, dtype=torch.float64)
    weights, plain = start(), start()
    m, v = torch.zeros(6).double(), torch.zeros(6).double()
    for step in range(20):
        g, before = gradient(step), weights.clone()
        assert made.step(weights, g, 0.01)
        if step < 6:
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            update = m / (v.sqrt() + 1e-6) + 0.01 * plain
            for part, change in zip(plain.split([4, 2]), update.split([4, 2]), strict=True):
                part -= 0.01 * part.norm() / change.norm() * change
            torch.testing.assert_close(weights, plain, rtol=0, atol=1e-12)
            continue
        m = 0.9 * m + 0.1 * g
        torch.testing.assert_close(made.m, m, rtol=0, atol=1e-12)
        update = m / (v.sqrt() + 1e-6) + 0.01 * before
        expected = before - 0.01 * update * (made.ratios * made.factors).repeat_interleave(torch.tensor([4, 2]))
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-12)
        assert ((made.factors >= 0.5) & (made.factors <= 4)).all()
    assert weights.isfinite().all()


@pytest.mark.parametrize("kind", ["adam", "lamb"])
def test_a_step_that_is_not_finite_changes_nothing_and_checkpoints_go_on(kind: str) -> None:
    make: dict[str, Any] = {
        "adam": lambda: CompressedAdam([4, 2], Plain(), ranks=1, freeze_step=3, dtype=torch.float64),
        "lamb": lambda: OneBitLAMB([4, 2], Plain(), ranks=1, freeze_step=3, dtype=torch.float64),
    }
    made, weights = make[kind](), start()
    for step in range(8):
        before, state = weights.clone(), copy.deepcopy(made.tensors())
        assert not made.step(weights, gradient(step) * torch.nan, 0.01)
        assert torch.equal(weights, before)
        if step != 3:  # at the freeze, what follows is prepared
            assert all(torch.equal(tensor, state[name]) for name, tensor in made.tensors().items())
        assert made.step(weights, gradient(step), 0.01)
    other, again = make[kind](), weights.clone()
    other.load(copy.deepcopy(made.tensors()))
    for step in range(8, 12):
        made.step(weights, gradient(step), 0.01)
        other.step(again, gradient(step), 0.01)
    assert torch.equal(weights, again)


def ranks_together() -> dict[str, Tensor]:
    """Two ranks with parts of the gradient: the weights of each optimizer after the same steps."""
    world, found = join(), {}
    ranks = world.world_size
    coded = [TwoPhase(OneBit(block=16), 48, dtype=torch.float64) for _ in range(2)]
    made = {
        "adam": CompressedAdam([30, 18], coded[0], ranks=ranks, freeze_step=4, dtype=torch.float64),
        "lamb": OneBitLAMB([30, 18], coded[1], ranks=ranks, freeze_step=4, dtype=torch.float64),
    }
    for name, optimizer in made.items():
        weights = start(48)
        for step in range(12):
            parts = [gradient(step, 48, rank) for rank in range(ranks)]
            assert optimizer.step(weights, sum(parts, torch.zeros(48)) if optimizer.warm else parts[world.rank], 0.01)
        found[name] = weights
    return found


def test_ranks_stay_bit_for_bit_the_same() -> None:
    one, other = run_ranks(ranks_together, 2)
    for name, weights in one.items():
        assert torch.equal(weights, other[name]), name
        assert weights.isfinite().all()


@pytest.mark.parametrize("kind", ["1-bit", pytest.param("8-bit", marks=pytest.mark.long)])
def test_digits_train_although_some_pixels_are_always_zero(kind: str) -> None:
    """Three pixels never have a gradient: there the published 1-bit Adam divides its scale by eps, and goes to NaN."""
    from sklearn.datasets import load_digits

    torch.manual_seed(0)
    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    images = (images / 16).float()
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    sizes = [parameter.numel() for parameter in model.parameters()]
    exchange = TwoPhase(ByteGrad() if kind == "8-bit" else OneBit(), weights.numel())
    made = CompressedAdam(sizes, exchange, ranks=1, freeze_step=66)
    for step in range(440):
        assert weights.isfinite().all()
        nn.utils.vector_to_parameters(weights, model.parameters())
        batch = torch.randint(1437, (128,))
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        rate = 3e-3 * (0.1 if step > 352 else 1)
        assert made.step(weights, torch.cat([g.flatten() for g in gradients]), rate)
    nn.utils.vector_to_parameters(weights, model.parameters())
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(images[:1437]), labels[:1437])
        right = (model(images[:1437]).argmax(1) == labels[:1437]).float().mean()
    assert loss < 2e-2
    assert right > 0.99


def test_a_second_moment_needs_steps() -> None:
    with pytest.raises(PlanError, match="freeze_step"):
        CompressedAdam([3], Plain(), ranks=1, freeze_step=0)

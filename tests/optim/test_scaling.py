"""The factor composes with torch's optimizers and schedulers, and leaves no trace in them."""

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, MultiStepLR

from tutti.errors import PlanError
from tutti.optim.learning_rate import LRRule, initial_learning_rate, learning_rate_factor, scaled_learning_rate
from worked.examples import EXAMPLES


def parameter(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=torch.float64))


def step_sgd(weight: nn.Parameter, optimizer: Optimizer, gradient: Tensor, by: float) -> None:
    weight.grad = gradient.clone()
    with scaled_learning_rate(optimizer, by):
        optimizer.step()


def test_sedonas_schedule_composes_with_a_multistep_decay() -> None:
    """5 warm-up epochs, then x0.1, x0.01, x0.001 of the original rate from epochs 30, 60, 80."""
    entry = EXAMPLES["lr_schedule_sedona"]
    steps_per_epoch, batch, base = 3, 8192, 0.1
    rule = LRRule(base_batch_size=256, warmup="gradual", warmup_epochs=entry["warmup_epochs"])
    weight = parameter(0.0)
    optimizer = SGD([weight], lr=base)
    scheduler = MultiStepLR(optimizer, [epoch for epoch, _ in entry["multistep"]], gamma=0.1)
    start, target, warm = base, base * batch / 256, entry["warmup_epochs"] * steps_per_epoch
    for step in range(90 * steps_per_epoch):
        epoch = step // steps_per_epoch
        decay = next((by for since, by in reversed(entry["multistep"]) if epoch >= since), 1.0)
        expected = decay * (start + (target - start) * step / warm if step < warm else target)
        before = weight.item()
        by = learning_rate_factor(
            rule,
            initial_learning_rate(optimizer),
            step,
            global_batch_size=batch,
            steps_per_epoch=steps_per_epoch,
        )
        step_sgd(weight, optimizer, torch.ones(1, dtype=torch.float64), by)
        assert before - weight.item() == pytest.approx(expected, rel=1e-9), step
        if (step + 1) % steps_per_epoch == 0:
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(base * 0.001)


def test_k_small_steps_at_the_same_weights_equal_one_large_step() -> None:
    """The linear rule's premise (worked example linear_rule_equivalence), which needs the same weights."""
    torch.manual_seed(0)
    k, n, eta = 4, 8, 0.05
    inputs = torch.randn(k, n, 3, dtype=torch.float64)
    targets = torch.randn(k, n, dtype=torch.float64)
    start = torch.randn(3, dtype=torch.float64)

    def gradient(weight: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return 2 * x.T @ (x @ weight - y) / len(y)

    at_same_weights = start - sum(eta * gradient(start, inputs[i], targets[i]) for i in range(k))
    weight = nn.Parameter(start.clone())
    optimizer = SGD([weight], lr=eta)
    by = learning_rate_factor(LRRule(base_batch_size=n), eta, 0, global_batch_size=k * n, steps_per_epoch=None)
    step_sgd(weight, optimizer, gradient(start, inputs.reshape(-1, 3), targets.reshape(-1)), by)
    torch.testing.assert_close(weight.data, at_same_weights, rtol=1e-13, atol=1e-13)

    moving = start.clone()
    for i in range(k):
        moving -= eta * gradient(moving, inputs[i], targets[i])
    assert (moving - at_same_weights).abs().max() > 1e-3


def test_every_group_is_scaled_and_restored_even_after_an_error() -> None:
    a, b = parameter(1.0), parameter(1.0)
    optimizer = SGD([{"params": [a]}, {"params": [b], "lr": 0.01}], lr=0.1)
    a.grad, b.grad = torch.ones_like(a), torch.ones_like(b)
    with scaled_learning_rate(optimizer, 3.0):
        optimizer.step()
    assert (a.item(), b.item()) == (pytest.approx(0.7), pytest.approx(0.97))
    with pytest.raises(RuntimeError, match="stop"), scaled_learning_rate(optimizer, 3.0):
        raise RuntimeError("stop")
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.01]


def test_a_tensor_rate_stays_the_same_tensor_and_is_scaled_once() -> None:
    a, b = parameter(1.0), parameter(1.0)
    rate = torch.tensor(0.1, dtype=torch.float64)
    optimizer = AdamW([{"params": [a]}, {"params": [b]}], lr=rate, foreach=False)
    for group in optimizer.param_groups:
        group["lr"] = rate
    with scaled_learning_rate(optimizer, 3.0):
        assert all(group["lr"] is rate for group in optimizer.param_groups)
        assert rate.item() == pytest.approx(0.3)
    assert all(group["lr"] is rate for group in optimizer.param_groups)
    assert rate.item() == 0.1


def test_a_factor_of_one_changes_no_bit() -> None:
    weights = [parameter(0.3, -1.7), parameter(0.3, -1.7)]
    for weight, by in zip(weights, (None, 1.0), strict=True):
        optimizer = AdamW([weight], lr=0.0123)
        for step in range(5):
            weight.grad = torch.full_like(weight, 0.1 * step - 0.2)
            if by is None:
                optimizer.step()
            else:
                with scaled_learning_rate(optimizer, by):
                    optimizer.step()
    assert torch.equal(weights[0], weights[1])


def test_the_initial_rate_is_the_one_before_any_scheduler() -> None:
    optimizer = SGD([parameter(0.0)], lr=0.2)
    LambdaLR(optimizer, lambda step: 0.01 * (step + 1))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.002)
    assert initial_learning_rate(optimizer) == 0.2


def test_an_optimizer_without_a_rate_is_refused() -> None:
    class Plain(Optimizer):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            return None

    with pytest.raises(PlanError, match="remove lr_rule"):
        initial_learning_rate(Plain([parameter(0.0)], {}))

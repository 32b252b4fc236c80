"""The remote-sensing recipe: its rates in closed form over 90 epochs, whatever the batch."""

import pytest
import torch
from torch import nn

from tutti.errors import PlanError
from tutti.optim.large_batch import LARS
from tutti.optim.learning_rate import learning_rate_factor
from tutti.optim.recipes import recipe_named


@pytest.mark.parametrize(("ranks", "each", "steps"), [(1, 256, 4), (8, 32, 4), (64, 128, 3)])
def test_rates_of_90_epochs(ranks: int, each: int, steps: int) -> None:
    """0.1 k n / 256 after 5 epochs from 0.1, a tenth of it from epochs 30, 60 and 80 on."""
    recipe = recipe_named("remote-sensing")
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = recipe.optimizer(model)
    scheduler = recipe.scheduler(optimizer)
    target, got, expected = 0.1 * ranks * each / 256, [], []
    for epoch in range(90):
        for index in range(steps):
            step = epoch * steps + index
            times = learning_rate_factor(
                recipe.lr_rule, 0.1, step, global_batch_size=ranks * each, steps_per_epoch=steps
            )
            got.append(optimizer.param_groups[0]["lr"] * times)
            rate = 0.1 + (target - 0.1) * min(step / (5 * steps), 1.0)
            expected.append(rate * 0.1 ** sum(epoch >= end for end in (30, 60, 80)))
        optimizer.step()
        scheduler.step()
    assert got == pytest.approx(expected, rel=1e-12)


def test_lars_with_nesterov_and_exclusions() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = recipe_named("remote-sensing").optimizer(model)
    assert isinstance(optimizer, LARS)
    adapted, plain = optimizer.param_groups
    assert [tuple(p.shape) for p in adapted["params"]] == [(3, 3)]
    assert (adapted["adapt"], adapted["weight_decay"], adapted["nesterov"]) == (True, 1e-4, True)
    assert (plain["adapt"], plain["weight_decay"], len(plain["params"])) == (False, 0.0, 3)
    model(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_a_recipe_that_is_not_there() -> None:
    with pytest.raises(PlanError, match="remote-sensing"):
        recipe_named("remote-sensign")

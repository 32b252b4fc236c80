"""Momenta of tensors whose second moment is small beside their neighbours': a bias before a BatchNorm, of which ranks'
gradients are like others' and their sum is rounding, and a layer that matters little.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import tutti
from harness import run_ranks
from tutti.config import serialization
from tutti.config.plan import BatchPlan, Plan
from tutti.optim.large_batch import LAMB

BATCH, EPOCHS, FREEZE = 32, 15, 30

KINDS: dict[str, Any] = {
    "one-bit-adam": torch.optim.Adam,
    "byte-adam": torch.optim.Adam,
    "zero-one-adam": torch.optim.Adam,
    "one-bit-lamb": LAMB,
}
RATES = {torch.optim.Adam: 3e-3, LAMB: 2e-2}


def train(model: nn.Module, kind: Any, words: str | None) -> list[float]:
    """Losses of the last epoch's steps."""
    plan = Plan(batch=BatchPlan(global_batch_size=BATCH), mesh={"replicate": int(os.environ["WORLD_SIZE"])})
    os.environ["TUTTI_PLAN"] = str(serialization.save(plan, Path.cwd() / f"plan-{os.getpid()}.json"))
    os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / f"run-{words or kind.__name__}")
    os.environ.pop("TUTTI_COMPRESS", None)
    if words is not None:
        os.environ["TUTTI_COMPRESS"] = words
    job = tutti.Job(global_batch_size=BATCH, seed=3, on_nonfinite="stop")
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(320, 13, generator=draw)
    data = TensorDataset(x, (x @ torch.randn(13, 4, generator=draw)).argmax(1))
    model, _, loader = job.prepare(model, kind(model.parameters(), lr=RATES[kind]), data, F.cross_entropy)
    found: list[float] = []
    for _ in job.epochs(EPOCHS):
        found = [job.step(batch) for batch in loader]
    return found


def normalised() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(13, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))


def several() -> dict[str, float]:
    cases: dict[str, tuple[Any, str | None]] = {kind.__name__: (kind, None) for kind in RATES}
    cases |= {method: (kind, f"{method},freeze_step={FREEZE}") for method, kind in KINDS.items()}
    return {name: sum(train(normalised(), *one)) / 10 for name, one in cases.items()}


@pytest.mark.long
def test_a_bias_before_a_batchnorm_does_not_lead_astray() -> None:
    for found in run_ranks(several, 2):
        for method, kind in KINDS.items():
            assert found[method] < 2 * found[kind.__name__], found


class Beside(nn.Module):
    """A layer, and one whose gradients are 1e-6 of its."""

    def __init__(self) -> None:
        super().__init__()
        self.much, self.little = nn.Linear(13, 4), nn.Linear(13, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.much(x) + 1e-6 * self.little(x)
        return found


def far() -> float:
    """How far the layer of small gradients has gone, most of the way with v that does not learn in every update."""
    torch.manual_seed(0)
    model = Beside()
    start = model.little.weight.detach().clone()
    train(model, torch.optim.Adam, "zero-one-adam,freeze_step=140,kappa=2")
    return float((model.little.weight.detach() - start).abs().max())


def test_what_zero_one_adam_loses_of_large_gradients_does_not_go_into_small_ones() -> None:
    """150 updates of Adam's go at most about 150 times its rate."""
    for found in run_ranks(far, 2):
        assert 0 < found < 2 * 150 * RATES[torch.optim.Adam], found

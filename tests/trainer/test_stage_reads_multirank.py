"""What scripts read of optimizers and buffers between steps, and modules that stages share or hand on."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import tutti
from harness import preload, run_ranks

preload("tutti.trainer.job")

SHARD_1 = {"mesh": {"shard": 2}, "sharding": {"level": 1}}
SHARD_3 = {"mesh": {"shard": 2}, "sharding": {"level": 3}}
STAGE = {"mesh": {"stage": 2}}


class Shared(nn.Module):
    """A layer under two names, and norms with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.alias = nn.Linear(6, 6)
        self.body = nn.Sequential(self.alias, nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)  # type: ignore[no-any-return]


class Scale(nn.Module):
    def forward(self, x: torch.Tensor, norm: nn.Module) -> torch.Tensor:
        return norm(x) * 2  # type: ignore[no-any-return]


class HandsOn(nn.Module):
    """A module that gives one of its layers to another's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.scale, self.last = nn.Linear(6, 6), nn.LayerNorm(6), Scale(), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.scale(self.first(x), self.norm))  # type: ignore[no-any-return]


def batches() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(24, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return x, torch.arange(24) % 3


def built(kind: type[nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = kind().double()
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def on_ranks(kind: type[nn.Module], plan: dict[str, Any], reads: Callable[[nn.Module, Any], Any] | None) -> Any:
    """The weights after a few steps, or what was said."""
    path = Path.cwd() / f"plan-{os.getpid()}.json"
    path.write_text(json.dumps({"batch": {"global_batch_size": 8}, **plan}))
    os.environ["TUTTI_PLAN"] = str(path)
    job = tutti.Job(global_batch_size=8, folder=Path(f"run-{kind.__name__}"), keep_checkpoints=0)
    model, optimizer = built(kind)
    try:
        model, optimizer, loader = job.prepare(
            model, optimizer, TensorDataset(*batches()), F.cross_entropy, shuffle=False
        )
        for batch in loader:
            job.step(batch)
            if reads is not None:
                reads(model, optimizer)
        return {name: value.clone() for name, value in job.state_dict().items()}
    except (tutti.TuttiError, RuntimeError) as error:  # the latter: the other rank has ended
        return str(error)


def norms_of_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    return sum(float(state["momentum_buffer"].norm()) for state in optimizer.state.values())


def sum_of_buffers(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    return sum(float(buffer.sum()) for buffer in model.buffers())


@pytest.mark.parametrize("plan", [SHARD_1, SHARD_3, STAGE])
def test_parts_of_an_optimizers_state_are_refused(plan: dict[str, Any]) -> None:
    said = [text for text in run_ranks(on_ranks, 2, Shared, plan, norms_of_state) if "between steps" in text]
    assert said
    assert all("norm would see only this rank's part of the optimizer's state of '" in text for text in said)


def test_buffers_of_other_stages_are_refused() -> None:
    said = [text for text in run_ranks(on_ranks, 2, Shared, STAGE, sum_of_buffers) if "between steps" in text]
    assert said
    assert all("the buffers of Shared are not all on this rank" in text for text in said)


def test_a_layer_with_two_names_trains_in_stages() -> None:
    model, optimizer = built(Shared)
    x, y = batches()
    for start in range(0, 24, 8):
        optimizer.zero_grad()
        F.cross_entropy(model(x[start : start + 8]), y[start : start + 8]).backward()
        optimizer.step()
    for state in run_ranks(on_ranks, 2, Shared, STAGE, None):
        assert not isinstance(state, str), state
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12, msg=name)


def test_a_module_that_is_handed_on_is_refused() -> None:
    for said in run_ranks(on_ranks, 2, HandsOn, STAGE, None):
        assert "mesh.stage: a call of scale takes a module (LayerNorm) as an argument" in said

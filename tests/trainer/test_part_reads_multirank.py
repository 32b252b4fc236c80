"""Losses that read parameters themselves, under plans that divide them: as on one device, or refused by name.

Kinds: deepspeedai/DeepSpeed#7464 (penalties over all parameters), pytorch/pytorch#103682 (methods other than forward).
"""

import functools
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
from harness import run_ranks
from tutti.config import serialization
from tutti.config.plan import BatchPlan, LayoutRule, Plan, ShardingPlan

BATCH = BatchPlan(global_batch_size=8, num_microbatches=2)
SPLIT = (LayoutRule(modules="body.2", placement="column"),)
PLANS = {
    "one": Plan(batch=BATCH),
    "zero2": Plan(batch=BATCH, mesh={"shard": 2}, sharding=ShardingPlan(level=2)),
    "zero3": Plan(batch=BATCH, mesh={"shard": 3}, sharding=ShardingPlan(level=3)),
    "split": Plan(batch=BATCH, mesh={"split": 3}, layout=SPLIT),
    "split and zero3": Plan(batch=BATCH, mesh={"split": 2, "shard": 2}, layout=SPLIT, sharding=ShardingPlan(level=3)),
    "stage": Plan(batch=BATCH, mesh={"stage": 2}),
    "stage and split": Plan(batch=BATCH, mesh={"stage": 2, "split": 2}, layout=SPLIT),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 5))
        self.body = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh())
        self.head = nn.Linear(7, 5)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x * self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encode(x))


class Penalty(nn.Module):
    """A penalty as a module that is no part of the model."""

    def forward(self, model: nn.Module) -> torch.Tensor:
        return sum(torch.norm(parameter) for parameter in model.parameters())


def entropy(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


KEPT: dict[str, list[nn.Parameter]] = {}

LOSSES: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "squares": lambda m, b: entropy(m, b) + 0.05 * sum(p.square().sum() for p in m.parameters()),
    "squares first": lambda m, b: 0.05 * sum((p**2).sum() for p in m.parameters()) + entropy(m, b),
    "norms": lambda m, b: entropy(m, b) + 0.1 * Penalty()(m),
    "vector": lambda m, b: entropy(m, b) + 0.1 * nn.utils.parameters_to_vector(m.parameters()).norm(p=3),
    "scaled by a norm": lambda m, b: entropy(m, b) * (1 + m.body[2].weight.detach().norm()),
    "kept before": lambda m, b: entropy(m, b) + 0.05 * sum(p.abs().sum() for p in KEPT["before"]),
    "kept after": lambda m, b: entropy(m, b) + 0.05 * sum(p.square().sum() for p in KEPT["after"]),
    "encode": lambda m, b: F.cross_entropy(m.head(m.encode(b[0])), b[1]) + m.encode(b[0]).square().mean(),
    "tied": lambda m, b: F.cross_entropy(F.linear(m.encode(b[0]), m.head.weight), b[1]) + m.body[2].weight.mean(),
    "count": lambda m, b: entropy(m, b) / sum(p.numel() for p in m.parameters()),
    "shape": lambda m, b: entropy(m, b) + (m.body[2].weight - torch.eye(m.body[2].weight.shape[0])).square().sum(),
}


def net() -> Net:
    torch.manual_seed(3)
    return Net().double()


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(4)
    return TensorDataset(torch.randn(24, 5, generator=generator, dtype=torch.float64), torch.arange(24) % 5)


def one_device(name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, losses = net(), []
    KEPT.update(before=list(model.parameters()), after=list(model.parameters()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = data().tensors
    for start in range(0, 24, 8):
        optimizer.zero_grad()
        parts = [LOSSES[name](model, (x[s : s + 4], y[s : s + 4])) / 2 for s in (start, start + 4)]
        sum(parts).backward()
        optimizer.step()
        losses.append(sum(parts).item())
    return losses, model.state_dict()


def trained(plan: Plan, folder: str) -> dict[str, Any]:
    file = Path(folder) / f"plan-{os.environ['RANK']}.json"
    serialization.save(plan, file)
    os.environ["TUTTI_PLAN"] = str(file)
    results = {}
    for name, loss in LOSSES.items():
        job = tutti.Job(global_batch_size=8, keep_checkpoints=0)
        model = net()
        KEPT["before"] = list(model.parameters())
        model, _, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data(), shuffle=False)
        KEPT["after"] = list(model.parameters())
        try:
            losses = []
            for batch in loader:
                losses.append(job.forward_backward(loss, batch))
                job.update()
            results[name] = (losses, job.state_dict())
        except tutti.TuttiError as error:
            results[name] = str(error)
    # Under stage the rank that has the output refuses, and the run ends.
    results["evaluated"] = [evaluated(job, model, samples) for samples in EVALUATED if "stage" not in plan.mesh]
    return results


EVALUATED = (19, 21)
"""Samples of evaluations, of which some ranks get one batch more than others."""


def evaluated(job: tutti.Job, model: nn.Module, samples: int) -> tuple[float, float]:
    """Metrics that read parameters, of batches and of the whole data set."""
    subset = TensorDataset(*(tensor[:samples] for tensor in data().tensors))
    penalised = functools.partial(metric, model)
    values = job.evaluate(subset, {"batches": penalised}, whole={"whole": penalised}, batch_size=2)
    return values["batches"], values["whole"]


def metric(model: nn.Module, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target) + 0.05 * sum(p.square().sum() for p in model.parameters())


QUICK = ("zero3", "split", "stage")
"""Plans of the quick suite."""


@pytest.mark.parametrize("plan", [p if p in QUICK else pytest.param(p, marks=pytest.mark.long) for p in PLANS])
def test_a_loss_that_reads_parameters_is_that_of_one_device(plan: str, tmp_path: Path) -> None:
    for results in run_ranks(trained, PLANS[plan].world_size, PLANS[plan], str(tmp_path)):
        values = results.pop("evaluated")
        for name, result in results.items():
            if plan.startswith("stage") and name.startswith("kept"):
                assert "mesh.stage: the loss reads parameter" in result
                continue
            losses, state = one_device(name)
            assert isinstance(result, tuple), (name, result)
            assert result[0] == pytest.approx(losses, rel=1e-12), name
            for key, value in state.items():
                torch.testing.assert_close(result[1][key], value, rtol=1e-12, atol=1e-12, msg=f"{name} {key}")
        model = net()
        model.load_state_dict(one_device([*LOSSES][-1])[1])
        for samples, value in zip(EVALUATED, values, strict=not plan.startswith("stage")):
            x, y = (tensor[:samples] for tensor in data().tensors)
            assert value == pytest.approx([metric(model, model(x), y).item()] * 2, rel=1e-12), (samples, value)

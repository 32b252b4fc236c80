"""Optimizers that step by norms of whole tensors: the same on one device and where ranks hold parts of them."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import tutti
from harness import run_ranks
from tutti.config import serialization
from tutti.config.plan import BatchPlan, Plan, ShardingPlan
from tutti.nn import MixtureOfExperts
from tutti.optim.large_batch import LAMB, LARS, NovoGrad, nvlamb, parameter_groups
from tutti.parallel.layout import gather_whole
from tutti.parallel.part_guards import reading_parts

MAKE: dict[str, Any] = {
    "lars": lambda p: LARS(p, 0.5, weight_decay=0.01, trust=0.1, nesterov=True),
    "lamb": lambda p: LAMB(p, 0.05),
    "nvlamb": lambda p: nvlamb(p, 0.05),
    "novograd": lambda p: NovoGrad(p, 0.05),
}


class Mlp(nn.Module):
    """Pairs of linear layers that split divides, sizes that do not divide evenly, norms that stay whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6)) for _ in range(4))
        )
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.moe, self.head = nn.Linear(6, 8), MixtureOfExperts(8, 8, 4), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.moe(self.first(x)))


PLANS: dict[str, dict[str, Any]] = {
    "split 2": {"mesh": {"split": 2}},
    "split 3, replicate 1": {"mesh": {"replicate": 1, "split": 3}},
    "replicate 2, split 2": {"mesh": {"replicate": 2, "split": 2}},
    "stage 2": {"mesh": {"stage": 2}},
    "shard 2, level 1": {"mesh": {"shard": 2}, "sharding": ShardingPlan(level=1)},
    "shard 2, level 1, split 2": {"mesh": {"shard": 2, "split": 2}, "sharding": ShardingPlan(level=1)},
    "shard 2, level 2": {"mesh": {"shard": 2}, "sharding": ShardingPlan(level=2)},
    "shard 3, level 3": {"mesh": {"shard": 3}, "sharding": ShardingPlan(level=3)},
    "shard 4, level 2": {"mesh": {"shard": 4}, "sharding": ShardingPlan(level=2)},
    "replicate 2, shard 2, level 3, offloaded": {
        "mesh": {"replicate": 2, "shard": 2},
        "sharding": ShardingPlan(level=3, offload="parameters"),
    },
    "shard 2, level 3, split 2": {"mesh": {"shard": 2, "split": 2}, "sharding": ShardingPlan(level=3)},
    "shard 2, level 2, expert 2": {"mesh": {"shard": 2, "expert": 2}, "sharding": ShardingPlan(level=2)},
    "expert 2": {"mesh": {"expert": 2}},
}


@reading_parts()
def train(plan: Plan | None, names: list[str], experts: bool) -> dict[str, dict[str, Tensor]]:
    results = {}
    for name in names:
        os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / name)
        if plan is not None:
            os.environ["TUTTI_PLAN"] = str(serialization.save(plan, Path.cwd() / f"plan-{os.environ['RANK']}.json"))
        job = tutti.Job(global_batch_size=8, num_microbatches=2, seed=2, keep_checkpoints=0)
        torch.manual_seed(0)
        model: nn.Module = (Experts() if experts else Mlp()).double()
        draw = torch.Generator().manual_seed(1)
        x = torch.randn(24, 5, 6, generator=draw, dtype=torch.float64)
        data = TensorDataset(x, torch.randint(0, 3, (24, 5), generator=draw))
        optimizer = MAKE[name](parameter_groups(model, 0.01))
        model, optimizer, loader = job.prepare(
            model, optimizer, data, lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten())
        )
        for _ in job.epochs(2):
            for batch in loader:
                job.step(batch)
        run = job._run()
        results[name] = gather_whole(
            run.parallel.layout, run.parallel.world, dict(run.parallel.model.named_parameters())
        )
    return results


QUICK = ("replicate 2, split 2", "stage 2", "shard 2, level 1, split 2", "shard 4, level 2")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.long) for name in PLANS]
)
def test_parts_step_as_the_whole_does(name: str) -> None:
    plan = Plan(batch=BatchPlan(global_batch_size=8, num_microbatches=2), **PLANS[name])
    experts = "expert" in name
    one = run_ranks(train, 1, None, list(MAKE), experts)[0]
    many = run_ranks(train, plan.world_size, plan, list(MAKE), experts)
    for kind, whole in one.items():
        for rank in many:
            assert rank[kind].keys() == whole.keys()
            for tensor, value in whole.items():
                torch.testing.assert_close(
                    rank[kind][tensor], value, rtol=1e-10, atol=1e-12, msg=lambda m, t=tensor, k=kind: f"{k} {t}: {m}"
                )

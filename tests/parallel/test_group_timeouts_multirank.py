"""Every process group that a plan opens waits as long as `--timeout` says, not torch's default of 30 minutes."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from against_one import Subject, train
from harness import run_ranks
from parallel import shard_subjects as subjects
from tutti.config.plan import ShardingPlan


def stacked() -> Subject:
    return Subject(model=stack, data=subjects.images(), loss_fn=F.cross_entropy, batch=8)


def stack() -> torch.nn.Module:
    layers = [torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.BatchNorm2d(4), torch.nn.ReLU()]
    head = [torch.nn.Linear(144, 8), torch.nn.ReLU(), torch.nn.Linear(8, subjects.WORDS)]
    return torch.nn.Sequential(*layers, torch.nn.Flatten(), *head)


def timeouts(plans: list[dict[str, Any]]) -> list[float]:
    os.environ["TUTTI_TIMEOUT_S"] = "37"
    found = set()
    for number, plan in enumerate(plans):
        os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / f"run-{number}")
        train(stacked, plan, 1, torch.float64)
        groups = [*dist.distributed_c10d._world.pg_map]
        assert len(groups) > 1, plan
        found |= {group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups}
    return sorted(found)


@pytest.mark.parametrize("shared", ["on", "off"])
def test_groups_of_every_plan_keep_the_timeout(shared: str) -> None:
    plans: list[dict[str, Any]] = [
        *({"mesh": {"shard": 2}, "sharding": ShardingPlan(level=level)} for level in (1, 2, 3)),
        {"mesh": {"stage": 2}},
        {"mesh": {"split": 2}},
        {"mesh": {"space": 2}},
    ]
    for found in run_ranks(timeouts_with, 2, shared, plans):
        assert found == [37.0]


def timeouts_with(shared: str, plans: list[dict[str, Any]]) -> list[float]:
    os.environ["TUTTI_SHARED_MEMORY"] = shared
    return timeouts(plans)

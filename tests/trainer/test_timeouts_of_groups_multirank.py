"""Every group that a run opens waits no longer than the launch says, whatever the plan divides."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.utils.data import TensorDataset

import tutti
from harness import run_ranks
from tutti.config import serialization
from tutti.config.compression import parse_compression
from tutti.config.plan import BatchPlan, Plan, ShardingPlan, SyncPlan
from tutti.config.sync_notation import parse_sync
from tutti.trainer.out_of_memory import _host_group

TIMEOUT_S = 47.0

PLANS: dict[str, dict[str, Any]] = {
    "replicate": {"mesh": {"replicate": 2}},
    "compressed": {
        "mesh": {"replicate": 2},
        "sync": SyncPlan(mode="synchronous", compress=parse_compression("top-k,density=0.5")),
    },
    "local SGD": {"mesh": {"replicate": 2}, "sync": parse_sync("local:2")},
    "ZeRO-1": {"mesh": {"shard": 2}, "sharding": ShardingPlan(level=1)},
    "ZeRO-3": {"mesh": {"shard": 2}, "sharding": ShardingPlan(level=3)},
    "FSDP2": {"mesh": {"shard": 2}, "sharding": ShardingPlan(level=3, engine="fsdp2")},
    "hybrid": {"mesh": {"replicate": 2, "shard": 2}, "sharding": ShardingPlan(level=2)},
    "split": {"mesh": {"split": 2}},
    "stage": {"mesh": {"stage": 2}},
    "all": {"mesh": {"replicate": 2, "stage": 2}},
}


def _timeouts(plan: dict[str, Any]) -> dict[str, float]:
    """Train two steps; return each group's ranks and its time-out in seconds."""
    os.environ["TUTTI_TIMEOUT_S"] = str(TIMEOUT_S)
    os.environ["TUTTI_PLAN"] = "plan.json"
    serialization.save(Plan(batch=BatchPlan(global_batch_size=8), **plan), Path("plan.json"))
    job = tutti.Job(global_batch_size=8, seed=3)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    data = TensorDataset(torch.randn(32, 6), torch.arange(32) % 3)
    model, _, loader = job.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.01), data, nn.functional.cross_entropy
    )
    for batch in loader:
        job.step(batch)
    _host_group(dist.group.WORLD)
    found = {}
    for number, group in enumerate(distributed_c10d._world.pg_map):
        timeout = group._get_backend(torch.device("cpu")).options._timeout
        assert isinstance(timeout, timedelta)
        found[f"{number}: {dist.get_process_group_ranks(group)}"] = timeout.total_seconds()
    return found


@pytest.mark.parametrize("plan", PLANS)
def test_every_group_has_the_time_out_of_the_launch(plan: str) -> None:
    size = 1
    for degree in PLANS[plan]["mesh"].values():
        size *= degree
    for found in run_ranks(_timeouts, size, PLANS[plan]):
        assert len(found) >= 2
        assert found == dict.fromkeys(found, TIMEOUT_S)


def _in_two_worlds() -> bool:
    """Whether a group for the hosts' messages is made anew for another world."""
    from tutti.comm.world import join_world, leave_world

    groups = []
    for number in range(2):
        os.environ["TUTTI_RENDEZVOUS"] += str(number)
        join_world()
        groups.append(_host_group(dist.group.WORLD))
        assert _host_group(dist.group.WORLD) is groups[-1]
        dist.all_reduce(torch.ones(1), group=groups[-1])
        leave_world()
    return groups[0] is not groups[1]


def test_the_hosts_group_is_made_anew_for_a_new_world() -> None:
    assert run_ranks(_in_two_worlds, 2) == [True, True]

"""Gloo's network threads do not interrupt the threads that they serve, whichever group they are of."""

import os
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tutti
from harness import run_ranks
from tutti.comm import world
from tutti.comm import world as threads
from tutti.config import serialization
from tutti.config.plan import BatchPlan, Plan, ShardingPlan

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="this system has no policy for batch threads")

Policies = tuple[int, list[int]]
"""Of the thread that computes, and of the network's."""


def policies() -> Policies:
    return os.sched_getscheduler(0), sorted(map(os.sched_getscheduler, threads.gloo_thread_ids()))


def of_a_job(plan: Plan) -> Policies:
    os.environ["TUTTI_PLAN"] = str(serialization.save(plan, Path(f"plan-{os.environ['RANK']}.json")))
    os.environ["TUTTI_SHARED_MEMORY"] = "off"
    job = tutti.Job(global_batch_size=4, seed=0, keep_checkpoints=0)
    model = nn.Linear(3, 2)
    data = torch.utils.data.TensorDataset(torch.ones(8, 3), torch.ones(8, 2))
    job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data, nn.functional.mse_loss)
    return policies()


def test_of_all_groups_of_a_job() -> None:
    """One of the world, and more of what divided gradients and parameters go through."""
    plan = Plan(mesh={"shard": 2}, batch=BatchPlan(global_batch_size=4), sharding=ShardingPlan(level=3))
    for own, network in run_ranks(of_a_job, 2, plan):
        assert own == os.SCHED_OTHER
        assert len(network) > 1
        assert set(network) == {os.SCHED_BATCH}


def of_a_world(policy: int) -> Policies:
    """The policies in a world whose threads were started with `policy`."""
    with mock.patch.object(world, "deprioritise_gloo_threads"):
        world.join_world()
    for thread in threads.gloo_thread_ids():
        os.sched_setscheduler(thread, policy, os.sched_param(0))
    threads.deprioritise_gloo_threads()
    total = torch.ones(3)
    dist.all_reduce(total)
    assert total.tolist() == [2.0] * 3
    found = policies()
    world.leave_world()
    return found


def test_a_policy_that_somebody_chose_stays() -> None:
    assert run_ranks(of_a_world, 2, os.SCHED_IDLE) == [(os.SCHED_OTHER, [os.SCHED_IDLE])] * 2
    assert run_ranks(of_a_world, 2, os.SCHED_OTHER) == [(os.SCHED_OTHER, [os.SCHED_BATCH])] * 2


def test_where_it_is_forbidden_ranks_go_on() -> None:
    with (
        mock.patch.object(os, "sched_setscheduler", side_effect=PermissionError),
        mock.patch.object(threads, "gloo_thread_ids", return_value=[os.getpid()]),
    ):
        threads.deprioritise_gloo_threads()

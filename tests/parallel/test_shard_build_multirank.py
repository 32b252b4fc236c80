"""job.build: what a rank holds of a model built without memory are parts of what one device initialises."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import tutti
from harness import run_ranks
from parallel import shard_subjects as subjects
from tutti.config import serialization
from tutti.config.plan import BatchPlan, Plan, ShardingPlan
from tutti.parallel.layout import gather_whole, local_tensors, to_local

pytestmark = pytest.mark.long

PLANS: dict[str, dict[str, Any]] = {
    "level 3": {"mesh": {"shard": 4}, "sharding": ShardingPlan(level=3)},
    "level 3, replicated": {"mesh": {"replicate": 2, "shard": 2}, "sharding": ShardingPlan(level=3)},
    "FSDP2": {"mesh": {"shard": 4}, "sharding": ShardingPlan(level=3, engine="fsdp2")},
    "FSDP2, replicated": {"mesh": {"replicate": 2, "shard": 2}, "sharding": ShardingPlan(level=2, engine="fsdp2")},
    "level 1": {"mesh": {"shard": 4}, "sharding": ShardingPlan(level=1)},
    "split": {"mesh": {"shard": 2, "split": 2}, "sharding": ShardingPlan(level=3)},
}


def built(plan: Plan) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Initial values, whole, and the losses of four steps."""
    os.environ["TUTTI_PLAN"] = str(serialization.save(plan, Path.cwd() / f"plan-{os.getpid()}.json"))
    job = tutti.Job(global_batch_size=8, seed=3)
    model = job.build(subjects.Repeating)
    assert job.world_size == 1 or all(p.is_meta for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, _, loader = job.prepare(model, optimizer, subjects.words(), F.cross_entropy)
    run = job._run()
    values = gather_whole(
        run.parallel.layout, run.parallel.world, {name: to_local(t) for name, t in local_tensors(model)}
    )
    return values, [job.step(batch) for _ in job.epochs(2) for batch in loader]


def built_by_all(names: list[str]) -> list[tuple[dict[str, torch.Tensor], list[float]]]:
    results = []
    for name in names:
        os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / f"run-{len(results)}")
        fields = PLANS.get(name, {"mesh": {"replicate": 1}})
        results.append(built(Plan(batch=BatchPlan(global_batch_size=8), **fields)))
    return results


@pytest.fixture(scope="module")
def one() -> tuple[dict[str, torch.Tensor], list[float]]:
    return run_ranks(built_by_all, 1, ["one"])[0][0]


@pytest.fixture(scope="module")
def many() -> list[list[tuple[dict[str, torch.Tensor], list[float]]]]:
    return run_ranks(built_by_all, 4, list(PLANS))


@pytest.mark.parametrize("index", range(len(PLANS)), ids=list(PLANS))
def test_initial_values_are_equal_bit_for_bit(index: int, one: Any, many: Any) -> None:
    expected, losses = one
    for rank, results in enumerate(many):
        values, trained = results[index]
        assert values.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(values[name], value), f"rank {rank}: {name}"
        assert trained == pytest.approx(losses, rel=1e-5)

"""What scripts change on a model after prepare: followed, with the values of a plain loop, or refused by name."""

import functools
from typing import Any

import pytest
import torch

from against_one import close
from harness import run_ranks
from parallel import changed_models
from parallel.changed_models import HABITS
from tutti.config.plan import BatchPlan, Plan, ShardingPlan

PLANS: dict[str, dict[str, Any]] = {
    "one": {"mesh": {"replicate": 1}},
    "replicas": {"mesh": {"replicate": 2}},
    "replicas, 2 microbatches": {"mesh": {"replicate": 2}, "batch": {"num_microbatches": 2}},
    "sharding level 1": {"mesh": {"shard": 2}, "sharding": ShardingPlan(level=1)},
    "sharding level 2": {"mesh": {"shard": 2}, "sharding": ShardingPlan(level=2)},
    "sharding level 3": {"mesh": {"shard": 2}, "sharding": ShardingPlan(level=3)},
    "split": {"mesh": {"split": 2}},
    "three replicas": {"mesh": {"replicate": 3}},
}
DIVIDED = ("sharding level 2", "sharding level 3", "split")

FOLLOWED = [
    "hook collects, unit",
    "hook changes output",
    "hook inside changes output",
    "gradients clamped",
    "gradient masked",
    "gradual unfreezing",
    "freezing and back",
    "curriculum",
    "skip",
    "forward patched",
    "activation replaced",
    "data assigned",
    "buffer replaced",
    "block in evaluation mode",
]
REFUSED = {
    "head replaced": "parameter 'head.weight' was replaced by another tensor",
    "layer added": "parameter 'blocks.1.adapter.bias' was added to the model",
    "parameter reassigned": "parameter 'head.weight' was replaced by another tensor",
    "state assigned": "parameter 'stem.weight' was replaced by another tensor",
    "parametrized": "parameter 'blocks.0.inner.weight' was removed from the model",
    "pruned": "parameter 'blocks.0.inner.weight' was removed from the model",
    "buffer added": "buffer 'other' was added to the model",
}
REFUSED_UNDER = {("gradients clamped", plan): "parameter 'stem.weight' has a gradient hook" for plan in DIVIDED} | {
    ("gradient masked", plan): "parameter 'head.weight' has a gradient hook" for plan in DIVIDED
}


@functools.cache
def plain(name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    default = torch.get_default_dtype()
    try:
        return changed_models.plain(name)
    finally:
        torch.set_default_dtype(default)


@functools.cache
def ranks(world_size: int) -> list[dict[tuple[str, str], Any]]:
    plans = {
        name: fields
        for name, fields in PLANS.items()
        if Plan(batch=BatchPlan(global_batch_size=8), mesh=fields["mesh"]).world_size == world_size
    }
    return run_ranks(changed_models.outcomes, world_size, [*FOLLOWED, *REFUSED, "to float"], plans, timeout_s=110)


def each_rank(name: str, plan: str) -> list[Any]:
    size = Plan(batch=BatchPlan(global_batch_size=8), mesh=PLANS[plan]["mesh"]).world_size
    return [results[name, plan] for results in ranks(size)]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", FOLLOWED)
def test_what_may_change_is_followed(name: str, plan: str) -> None:
    losses, state = plain(name)
    for rank, got in enumerate(each_rank(name, plan)):
        if (name, plan) in REFUSED_UNDER:
            assert REFUSED_UNDER[name, plan] in got
            continue
        assert not isinstance(got, str), got
        close(torch.tensor(got[0]), torch.tensor(losses), 1e-12, f"rank {rank}: losses")
        for key, value in state.items():
            close(got[1][key], value, 1e-12, f"rank {rank}: {key}")


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", REFUSED)
def test_what_may_not_change_is_refused_by_name(name: str, plan: str) -> None:
    for got in each_rank(name, plan):
        assert isinstance(got, str), "it trained"
        assert got.startswith("ScriptError"), got
        assert REFUSED[name] in got


@pytest.mark.parametrize("plan", PLANS)
def test_a_model_converted_after_prepare(plan: str) -> None:
    """pytorch/pytorch#104336: with DistributedDataParallel, gradients are then reduced wrongly without a word."""
    losses, state = plain("to float")
    for got in each_rank("to float", plan):
        if "replica" not in plan and plan != "one":
            assert "'stem.weight' is float32 of shape" in got, got
            continue
        close(torch.tensor(got[0]), torch.tensor(losses), 2e-6, "losses in float32")
        for key, value in state.items():
            close(got[1][key], value, 2e-6, key)


def frozen_on_one_rank(microbatches: int) -> str:
    return changed_models.refusal_of(
        "frozen on rank 0", {"mesh": {"replicate": 2}, "batch": {"num_microbatches": microbatches}}
    )


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_change_on_one_rank_only_is_refused_instead_of_waiting(microbatches: int) -> None:
    said = run_ranks(frozen_on_one_rank, 2, microbatches)
    assert "rank 0 has frozen, unfrozen or converted parameters after prepare, but rank 1 has not" in said[0]


def test_every_habit_is_tested() -> None:
    assert {*FOLLOWED, *REFUSED, *changed_models.ELSEWHERE} == set(HABITS)

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
QUICK = ("one", "replicas", "sharding level 3", "split")
"""Plans of the quick suite."""
EACH_PLAN = [plan if plan in QUICK else pytest.param(plan, marks=pytest.mark.long) for plan in PLANS]
DIVIDED = ("sharding level 2", "sharding level 3", "split")

FOLLOWED = [
    "hook collects, unit",
    "hook changes output",
    "hook inside changes output",
    "gradients clamped",
    "gradient masked",
    "gradual unfreezing",
    "freezing and back",
    "frozen in the second step",
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
REFUSED_WHERE_DIVIDED = {
    "state assigned": "Net.load_state_dict(assign=True) would replace this rank's parts of the weights",
    "pruned": "parameter 'blocks.0.inner.weight', since the plan divides it",
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
def ranks(world_size: int, quick: bool) -> list[dict[tuple[str, str], Any]]:
    plans = {name: fields for name, fields in PLANS.items() if size_of(name) == world_size and (name in QUICK) == quick}
    return run_ranks(changed_models.outcomes, world_size, [*FOLLOWED, *REFUSED, "to float"], plans)


def each_rank(name: str, plan: str) -> list[Any]:
    return [results[name, plan] for results in ranks(size_of(plan), plan in QUICK)]


def size_of(plan: str) -> int:
    return Plan(batch=BatchPlan(global_batch_size=8), mesh=PLANS[plan]["mesh"]).world_size


@pytest.mark.parametrize("plan", EACH_PLAN)
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


@pytest.mark.parametrize("plan", EACH_PLAN)
@pytest.mark.parametrize("name", REFUSED)
def test_what_may_not_change_is_refused_by_name(name: str, plan: str) -> None:
    for got in each_rank(name, plan):
        assert isinstance(got, str), "it trained"
        assert got.startswith("ScriptError"), got
        assert REFUSED[name] in got or REFUSED_WHERE_DIVIDED.get(name, REFUSED[name]) in got, got


@pytest.mark.parametrize("plan", EACH_PLAN)
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


STAGES: dict[str, dict[str, Any]] = {
    "2 stages": {"mesh": {"stage": 2}},
    "3 stages, 2 microbatches": {"mesh": {"stage": 3}, "batch": {"num_microbatches": 2}},
}
FOLLOWED_BY_STAGES = [
    *(name for name in FOLLOWED if name != "gradient masked"),
    "hook collects, inside",
    "hook collects, early",
    "hook collects, early inside",
    "hook changes output of all",
    "hook changes input",
    "backward hook",
    "forward of all patched",
    "counter in forward",
    "another structure",
]


@functools.cache
def staged(plan: str) -> list[dict[tuple[str, str], Any]]:
    size = 3 if plan.startswith("3") else 2
    return run_ranks(changed_models.outcomes, size, FOLLOWED_BY_STAGES, {plan: STAGES[plan]})


@pytest.mark.parametrize("plan", ["2 stages", pytest.param("3 stages, 2 microbatches", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", FOLLOWED_BY_STAGES)
def test_stages_follow_what_changes(name: str, plan: str) -> None:
    losses, state = plain(name)
    if name == "counter in forward" and "microbatches" in plan:
        pytest.skip("each microbatch is a forward, on one device too")
    for rank, results in enumerate(staged(plan)):
        got = results[name, plan]
        assert not isinstance(got, str), got
        close(torch.tensor(got[0]), torch.tensor(losses), 1e-12, f"rank {rank}: losses")
        for key, value in state.items():
            close(got[1][key], value, 1e-12, f"rank {rank}: {key}")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("backward hook of all", "mesh.stage: the model has a backward hook"),
        ("head replaced", "after prepare"),
        ("to float", "is float32 of shape"),
        ("first half unfrozen", "unfrozen"),
    ],
)
def test_stages_refuse_what_they_cannot_follow(name: str, said: str) -> None:
    refusals = run_ranks(changed_models.refusal_of, 2, name, STAGES["2 stages"])
    assert any(said in refusal for refusal in refusals), refusals
    assert "trained" not in refusals


def test_a_wrapped_model_is_refused_with_the_remedy() -> None:
    said = run_ranks(changed_models.wrapped, 1)[0]
    assert "'the model' is in torch's DataParallel" in said
    assert "inside it (its .module)" in said


@pytest.mark.parametrize("mesh", [{"replicate": 2}, {"stage": 2}])
def test_two_networks_in_one_module(mesh: dict[str, int]) -> None:
    """A generator and a discriminator whose losses call one part or both, with an optimizer each."""
    losses, state = _plain_gan()
    for got in run_ranks(changed_models.gan, 2, {"mesh": mesh}):
        close(torch.tensor(got[0]), torch.tensor(losses), 1e-12, "losses")
        for key, value in state.items():
            close(got[1][key], value, 1e-12, key)


def test_a_model_without_forward_is_refused_under_stages() -> None:
    said = run_ranks(changed_models.gan, 2, {"mesh": {"stage": 2}}, False)
    assert all("Gan has no forward; write one that calls all its parts" in refusal for refusal in said)


def test_noise_drawn_in_the_loss_function_is_the_same_in_all_stages() -> None:
    one = run_ranks(changed_models.denoised, 1, {"mesh": {"replicate": 1}})[0]
    for got in run_ranks(changed_models.denoised, 2, {"mesh": {"stage": 2}}):
        close(torch.tensor(got), torch.tensor(one), 1e-12, "losses")


def _plain_gan() -> tuple[list[float], dict[str, torch.Tensor]]:
    default = torch.get_default_dtype()
    try:
        return changed_models.plain_gan()
    finally:
        torch.set_default_dtype(default)

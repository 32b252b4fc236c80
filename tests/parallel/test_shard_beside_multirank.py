"""Shards beside tables and experts, whose ranks hold other parameters: as one device computes, each state kept once."""

import functools
from typing import Any

import pytest

from against_one import Trained, assert_agree
from parallel import shard_subjects as subjects
from parallel.test_embedding_tables import apart, together
from parallel.test_expert import stacked, top2
from trainer.several import Case, on_ranks, once
from tutti.config.plan import ShardingPlan

pytestmark = pytest.mark.long


def counted(run: Any) -> dict[str, Any]:
    """Elements of every parameter's first moment that this rank writes into a checkpoint."""
    elements: dict[str, int] = {}
    for number, names in run.parallel.layout.state_names(run.parallel.model, run.parallel.optimizers).items():
        for parameter, name in names.items():
            if run.parallel.layout.counts_state(name) and parameter in run.parallel.optimizers[number].state:
                elements[name] = run.parallel.optimizers[number].state[parameter]["exp_avg"].numel()
    return elements


CASES: dict[str, Case] = {
    "tables x shard": (together, {"mesh": {"table": 2, "shard": 2}}),
    "shard x tables": (apart, {"mesh": {"shard": 2, "table": 2}}),
    "experts x shard": (top2, {"mesh": {"expert": 2, "shard": 2}}),
    "shard x stacked experts": (stacked, {"mesh": {"shard": 2, "expert": 2}}),
    "split x shard": (subjects.tied, {"mesh": {"split": 2, "shard": 2}}),
    "stages x shard, tied": (subjects.tied, {"mesh": {"stage": 2, "shard": 2}}),
}
LEVELS = (1, 2, 3)


def runnable(name: str, level: int) -> bool:
    return level == 1 or "stages" not in name


@functools.cache
def results() -> list[dict[str, Trained]]:
    plans = {
        f"{name}, level {level}": (
            make,
            {**plan, "sharding": ShardingPlan(level=level), "batch": {"num_microbatches": 2}},
        )  # type: ignore[arg-type]
        for name, (make, plan) in CASES.items()
        for level in LEVELS
        if runnable(name, level)
    }
    return on_ranks(plans, 4, look=counted)


@pytest.mark.parametrize(("name", "level"), [(n, level) for n in CASES for level in LEVELS if runnable(n, level)])
def test_same_as_one_device_and_every_state_is_kept_once(name: str, level: int) -> None:
    one = once(CASES[name][0])
    many = [result[f"{name}, level {level}"] for result in results()]
    assert_agree(one, many)
    kept: dict[str, int] = {}
    for trained in many:
        for parameter, elements in trained.facts.items():
            kept[parameter] = kept.get(parameter, 0) + elements
    trained_ones = {parameter for step in one.gradients for parameter in step}
    assert kept == {parameter: one.state[parameter].numel() for parameter in trained_ones}

"""Pipelines against one device: schedules, numbers of stages and microbatches, compositions, families of models."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from against_one import Trained, assert_agree
from parallel import pipeline_subjects as subjects
from trainer.several import on_ranks
from tutti.config.plan import LayoutRule, PipelinePlan, ShardingPlan

pytestmark = pytest.mark.long

STEPS = 3


def staged(make: Callable[[], Any], schedule: str, microbatches: int, *, ranks: int, **more: Any) -> Any:
    """A case: (subject, the plan's fields)."""
    chunks = 2 if schedule == "interleaved" else 1
    mesh = {**more.pop("outside", {}), "stage": ranks}
    pipeline = PipelinePlan(schedule=schedule, stages_per_rank=chunks, cuts=more.pop("cuts", ()))  # type: ignore[arg-type]
    return make, {"mesh": mesh, "pipeline": pipeline, "batch": {"num_microbatches": microbatches}, **more}


CASES: dict[int, dict[str, Any]] = {
    2: {
        "gpt: gpipe, one microbatch": staged(subjects.gpt, "gpipe", 1, ranks=2),
        "gpt: 1f1b": staged(subjects.gpt, "1f1b", 4, ranks=2),
        "gpt: zero-bubble": staged(subjects.gpt, "zero-bubble", 3, ranks=2),
        "gpt: interleaved, clipped": staged(subjects.clipped, "interleaved", 4, ranks=2),
        "gpt: uneven stages by name": staged(subjects.gpt, "1f1b", 4, ranks=2, cuts=("blocks.3.mlp",)),
        "gpt: recompute": staged(
            subjects.gpt, "zero-bubble", 3, ranks=2, layout=(LayoutRule(modules="blocks.*", recompute=True),)
        ),
        "gpt: a stage without anything to train": staged(subjects.frozen, "1f1b", 2, ranks=2, cuts=("blocks.2",)),
        "u-net: gpipe": staged(subjects.unet, "gpipe", 2, ranks=2),
        "tagger: zero-bubble": staged(subjects.tagger, "zero-bubble", 2, ranks=2),
        "tagger: interleaved": staged(subjects.tagger, "interleaved", 3, ranks=2),
    },
    3: {
        "gpt: fewer microbatches than stages": staged(subjects.gpt, "1f1b", 2, ranks=3),
        "gpt: interleaved": staged(subjects.gpt, "interleaved", 5, ranks=3),
        "u-net: zero-bubble": staged(subjects.unet, "zero-bubble", 3, ranks=3),
        "tagger: 1f1b": staged(subjects.tagger, "1f1b", 3, ranks=3),
    },
    4: {
        "gpt: 1f1b": staged(subjects.gpt, "1f1b", 6, ranks=4),
        "gpt: zero-bubble": staged(subjects.gpt, "zero-bubble", 5, ranks=4),
        "u-net: 1f1b": staged(subjects.unet, "1f1b", 2, ranks=4),
        "gpt: beside replicas, clipped": staged(subjects.clipped, "1f1b", 3, ranks=2, outside={"replicate": 2}),
        "u-net: beside replicas": staged(subjects.unet, "zero-bubble", 3, ranks=2, outside={"replicate": 2}),
        "tagger: beside replicas, one without samples": staged(
            subjects.tagger, "gpipe", 3, ranks=2, outside={"replicate": 2}, shares=(1.0, 0.0)
        ),
        "gpt: beside sharded state": staged(
            subjects.gpt, "1f1b", 4, ranks=2, outside={"shard": 2}, sharding=ShardingPlan(level=1)
        ),
    },
}


@functools.cache
def many(world_size: int) -> list[dict[str, Trained]]:
    return on_ranks(CASES[world_size], world_size, steps=STEPS)


@functools.cache
def ones() -> dict[str, Trained]:
    """Each subject and number of microbatches on one device."""
    wanted = {}
    for cases in CASES.values():
        for make, plan in cases.values():
            wanted[key(make, plan)] = (make, {"batch": plan["batch"]})
    return on_ranks(wanted, 1, steps=STEPS)[0]


def key(make: Callable[[], Any], plan: dict[str, Any]) -> str:
    return f"{make.__name__}, {plan['batch']['num_microbatches']} microbatches"


@pytest.mark.parametrize(("world_size", "name"), [(size, name) for size, cases in CASES.items() for name in cases])
def test_stages_compute_what_one_device_does(world_size: int, name: str) -> None:
    make, plan = CASES[world_size][name]
    assert_agree(ones()[key(make, plan)], [results[name] for results in many(world_size)])


def test_stages_hold_only_their_part() -> None:
    make, plan = CASES[2]["gpt: 1f1b"]
    ranks = on_ranks({"gpt": (make, plan)}, 2, steps=1, look=held)
    names = [results["gpt"].facts["names"] for results in ranks]
    assert {"embed.weight"} == names[0] & names[1], "the tied weight is on both, nothing else is"
    whole = ones()[key(make, plan)].state
    assert names[0] | names[1] == set(whole)


def held(run: Any) -> dict[str, Any]:
    return {"names": {name for name, _ in run.parallel.model.named_parameters()}}


def test_half_precision_agrees_as_far_as_it_can() -> None:
    for precision in ("bfloat16", "float16"):
        plan = {"mesh": {"stage": 2}, "precision": precision, "batch": {"num_microbatches": 2}}
        one = on_ranks({"gpt": (subjects.gpt, {**plan, "mesh": {"replicate": 1}})}, 1, steps=STEPS)[0]["gpt"]
        two = on_ranks({"gpt": (subjects.gpt, plan)}, 2, steps=STEPS)[1]["gpt"]
        torch.testing.assert_close(torch.tensor(two.losses), torch.tensor(one.losses), rtol=2e-3, atol=0)

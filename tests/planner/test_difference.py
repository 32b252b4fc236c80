"""Every change to a plan shows in the difference between the two plans."""

import dataclasses
from typing import Any

import pytest

from tutti.config.compression import Compression
from tutti.config.consistency_modes import Relaxed
from tutti.config.plan import BatchPlan, LayoutRule, PipelinePlan, Plan, ShardingPlan, SyncPlan
from tutti.planner import difference

BASE = Plan(
    batch=BatchPlan(global_batch_size=64),
    mesh=dict.fromkeys(("stage", "replicate", "shard", "context", "space", "split"), 2),  # type: ignore[misc]
    layout=(LayoutRule(modules="blocks.5", recompute=True), LayoutRule(modules="head", placement="column")),
    sync=SyncPlan(compress=Compression(method="top-k")),
    made_for={"embed": "Linear 32"},
)

CHANGES: dict[str, Any] = {
    "batch.global_batch_size": 32,
    "batch.unit": "tokens",
    "batch.num_microbatches": 2,
    "batch.last_batch": "drop",
    "batch.ramp": ((10, 8),),
    "mesh": {**BASE.mesh, "shard": 4},
    "layout.modules": "blocks.2",
    "layout.placement": "row",
    "layout.recompute": "selective",
    "layout.chunks": 2,
    "layout.offload": True,
    "shares": (1.0, 2.0, 1.0, 1.0),
    "split_shares": (2.0, 1.0),
    "precision": "bfloat16",
    "sync.mode": "one-shot",
    "sync.bucket_nbytes": 2**20,
    "sync.bucket_sizes": "measured",
    "sync.compress": None,
    "sync.relaxed": Relaxed(period=4),
    "sharding.level": 1,
    "sharding.offload": "optimizer",
    "sharding.engine": "fsdp2",
    "sharding.offload_device": "nvme",
    "sharding.nvme_path": "/nvme",
    "pipeline.schedule": "gpipe",
    "pipeline.stages_per_rank": 2,
    "pipeline.cuts": ("head",),
    "space_grid": (2, 1),
    "context": "all-to-all",
    "share_device": True,
    "made_for": {"embed": "Linear 64"},
    "version": 2,
}


def fields(value: Any, name: str = "") -> list[str]:
    """Return the dotted names of all fields of a plan. Those of a layout are the fields of its rules."""
    names = []
    for field in dataclasses.fields(value):
        content, dotted = getattr(value, field.name), f"{name}{field.name}"
        if field.name == "layout":
            names += fields(content[0], f"{dotted}.")
        elif field.name in ("batch", "sync", "sharding", "pipeline"):
            names += fields(content, f"{dotted}.")
        else:
            names.append(dotted)
    return names


def changed(plan: Plan, name: str) -> Plan:
    """Return the plan with one field changed."""
    part, _, inner = name.partition(".")
    if not inner:
        return dataclasses.replace(plan, **{part: CHANGES[name]})
    if part == "layout":
        return dataclasses.replace(
            plan, layout=(dataclasses.replace(plan.layout[0], **{inner: CHANGES[name]}), *plan.layout[1:])
        )
    whole = getattr(plan, part)
    return dataclasses.replace(plan, **{part: dataclasses.replace(whole, **{inner: CHANGES[name]})})


def test_every_field_is_tried() -> None:
    assert set(fields(BASE)) == set(CHANGES)


@pytest.mark.parametrize("name", CHANGES)
def test_every_field_that_is_changed_is_told(name: str) -> None:
    base = BASE
    if name == "sync.relaxed":
        base = dataclasses.replace(BASE, sync=SyncPlan(mode="local", relaxed=Relaxed(period=8)))
    if name == "pipeline.stages_per_rank":
        base = dataclasses.replace(BASE, pipeline=PipelinePlan(schedule="interleaved"))
    differences = difference(base, changed(base, name), ("old", "new"))
    assert differences
    assert all(("old" in sentence and "new" in sentence) or "Only" in sentence for sentence in differences)
    assert difference(base, base) == ()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("batch.ramp", "Batch ramp: none in A; 8 until batch 10 in B (changes results)"),
        ("layout.modules", "Only B has a rule for modules blocks.2: recompute"),
        ("layout.recompute", "Recompute: full in A, selective in B"),
        ("made_for", "Only B's model has embed (Linear 64)"),
        ("sync.bucket_sizes", "26,214,400 bytes in A, 26,214,400 bytes at first, then of the size measured as fastest"),
        ("sharding.offload", "Sharding: level 3 in A, level 3; offload optimizer in B"),
        ("sharding.engine", "Sharding: level 3 in A, level 3; engine fsdp2 in B"),
        ("sharding.offload_device", "Sharding: level 3 in A, level 3; offload device nvme in B"),
    ],
)
def test_what_once_went_unsaid_is_said_in_words(name: str, words: str) -> None:
    assert any(words in sentence for sentence in difference(BASE, changed(BASE, name)))


def test_the_order_of_rules_is_told_where_the_last_one_counts() -> None:
    turned = dataclasses.replace(BASE, layout=BASE.layout[::-1])
    assert difference(BASE, turned)
    silent = dataclasses.replace(BASE, layout=(LayoutRule(), *BASE.layout))
    assert difference(BASE, silent) == ()


def test_offload_is_told_without_a_shard_axis_and_a_level_that_nothing_follows_at_last() -> None:
    plain = Plan(batch=BatchPlan(global_batch_size=8))
    assert difference(plain, dataclasses.replace(plain, sharding=ShardingPlan(offload="optimizer")))
    assert difference(plain, dataclasses.replace(plain, sharding=ShardingPlan(level=1))) == (
        "sharding.level: 3 in A, 1 in B",
    )

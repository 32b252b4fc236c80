"""The verdict is right under layouts: correct scripts pass under every kind of plan, and what differs is named."""

from typing import Any

import pytest
import torch

from tutti.config.plan import BatchPlan, LayoutRule, PipelinePlan, Plan, ShardingPlan
from tutti.parallel.layout import TensorShard
from tutti.verification import alignment
from tutti.verification.alignment import covers_whole, sample_columns, sample_elements, sampled_columns, sampled_part
from verify.running import verdict_on


def plan(batch: int, num_microbatches: int = 1, **fields: Any) -> Plan:
    return Plan(batch=BatchPlan(global_batch_size=batch, num_microbatches=num_microbatches), **fields)


PLANS = {
    "split": ("decoder", plan(8, mesh={"split": 2})),
    "split in unequal parts": ("mlp", plan(16, mesh={"split": 2}, split_shares=(3.0, 1.0))),
    "split in 3 unequal parts": ("mlp", plan(16, mesh={"split": 3}, split_shares=(2.0, 1.0, 3.0))),
    "replicate x split": ("decoder", plan(8, mesh={"replicate": 2, "split": 2})),
    "ZeRO-1": ("mlp", plan(16, mesh={"shard": 3}, sharding=ShardingPlan(level=1))),
    "ZeRO-3": ("decoder", plan(8, mesh={"shard": 2}, num_microbatches=2)),
    "stage": ("decoder", plan(8, 4, mesh={"stage": 2}, pipeline=PipelinePlan(schedule="1f1b"))),
    "stage, of images": ("cnn", plan(9, 3, mesh={"stage": 2})),
    "context": ("decoder", plan(8, mesh={"context": 2})),
    "replicate x context": ("decoder", plan(8, mesh={"replicate": 2, "context": 2})),
    "space": ("cnn", plan(9, mesh={"space": 2})),
    "table, a linear layer": ("cnn", plan(9, mesh={"table": 3}, layout=(LayoutRule(modules="9", placement="row"),))),
}


QUICK = ("replicate x split", "split in 3 unequal parts", "ZeRO-3", "stage", "stage, of images")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in PLANS]
)
def test_a_correct_script_passes_under_every_kind_of_plan(name: str) -> None:
    script, spread = PLANS[name]
    verdict = verdict_on(f"correct/{script}.py", plan=spread)
    assert verdict.passed, verdict.sentence
    assert verdict.world_size == spread.world_size
    assert verdict.arithmetic == "float64"
    assert (verdict.largest.relative_difference or 0.0) < 1e-10  # type: ignore[union-attr]
    assert verdict.compared > 50


@pytest.mark.parametrize("axis", ["split", "shard", "replicate"])
def test_what_one_rank_changes_of_its_part_is_named(axis: Any) -> None:
    verdict = verdict_on("layouts/gradient_by_rank.py", plan=plan(8, mesh={axis: 2}))
    assert not verdict.passed
    assert verdict.first is not None
    assert (verdict.first.stage, verdict.first.module) == ("gradient used", "2"), verdict.sentence


DIVIDED = (LayoutRule(), LayoutRule(modules="0", placement="split"), LayoutRule(modules="2", placement="split"))


def test_a_forward_that_knows_its_rank_is_named_under_split() -> None:
    verdict = verdict_on("broken/rank_in_forward.py", plan=plan(12, mesh={"replicate": 2, "split": 2}, layout=DIVIDED))
    assert not verdict.passed
    assert verdict.first is not None
    assert (verdict.first.stage, verdict.first.module) == ("forward", "1"), verdict.sentence
    assert verdict.first.ranks == (1, 2, 3)


HELD = {
    "rows": TensorShard(shape=(6, 8)).cut(0, (2, 5)),
    "columns in two ranges": TensorShard(shape=(6, 8)).cut(1, (0, 2), (4, 6)),
    "a block": TensorShard(shape=(6, 8)).cut(0, (3, 6)).cut(1, (4, 8)),
    "nothing": TensorShard(shape=(6, 8)).cut(0, (0, 0)),
}


@pytest.mark.parametrize("name", HELD)
@pytest.mark.parametrize("most", [2**20, 20])
def test_the_kept_part_is_the_part_of_what_is_kept(name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alignment, "MAX_ELEMENTS", most)
    monkeypatch.setattr(alignment, "MAX_COLUMNS", most // 4)
    held, whole = HELD[name], torch.arange(48.0).reshape(6, 8)
    mine = sample_elements(held.take(whole), held)
    assert torch.equal(sampled_part(sample_elements(whole), held, mine), mine)
    columns = sampled_columns(sample_columns(whole), held)
    assert columns is not None
    assert torch.equal(columns, sample_columns(held.take(whole), held))


def test_parts_are_known_to_cover_the_whole_or_not() -> None:
    first, second, late = (TensorShard(shape=(6,)).cut(0, some) for some in ((0, 3), (3, 6), (4, 6)))
    assert covers_whole((6,), [first, second])
    assert covers_whole((6,), [first, None])
    assert not covers_whole((6,), [first, late])
    assert not covers_whole((6,), [first])

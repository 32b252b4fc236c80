"""Plans that no model can run under: refused alike by what costs plans, what explains them and what runs them."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from against_one import Subject
from harness import run_ranks
from trainer.several import assert_refused, refusals
from tutti.config.compression import parse_compression
from tutti.config.plan import BatchPlan, LayoutRule, Plan, ShardingPlan, SyncPlan
from tutti.config.refusals import check_plan
from tutti.config.sync_notation import parse_sync
from tutti.errors import PlanError
from tutti.parallel.preview import explain_layout

REFUSED: dict[str, dict[str, Any]] = {
    "parameters cannot be gathered": {"mesh": {"stage": 2, "shard": 2}, "sharding": ShardingPlan(level=3)},
    "use offload = optimizer, or more stages": {
        "mesh": {"stage": 2, "shard": 2},
        "sharding": ShardingPlan(level=1, offload="parameters"),
    },
    "a stage cannot tell whether what it receives is cut": {"mesh": {"space": 2, "stage": 2}},
    "space cannot be cut as sequences too": {"mesh": {"context": 2, "space": 2}},
    "split ranks have unequal numbers of heads": {
        "mesh": {"split": 2, "context": 2},
        "split_shares": (1.0, 3.0),
        "context": "all-to-all",
    },
    "needs sharding level 2 or 3": {"mesh": {"shard": 4}, "sharding": ShardingPlan(level=1, offload="parameters")},
    "parameters cannot be copied to the device": {"mesh": {"stage": 4}, "sharding": ShardingPlan(offload="optimizer")},
    "host are reduced over all replicas": {
        "mesh": {"replicate": 4},
        "sync": parse_sync("local:8"),
        "sharding": ShardingPlan(offload="optimizer"),
    },
    "host are reduced exactly": {
        "mesh": {"replicate": 4},
        "sync": SyncPlan(compress=parse_compression("one-bit")),
        "sharding": ShardingPlan(offload="optimizer"),
    },
    "would come back out of order": {"mesh": {"stage": 4}, "layout": (LayoutRule(modules="0", offload=True),)},
}


def plan_of(fields: dict[str, Any]) -> Plan:
    return Plan(batch=BatchPlan(global_batch_size=4), **fields)


def layers() -> Subject:
    data = TensorDataset(torch.randn(8, 3), torch.randn(8, 3))
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    return Subject(model=lambda: model, data=data, loss_fn=F.mse_loss, batch=4)


@pytest.mark.parametrize("words", REFUSED)
def test_the_table_and_the_explanation_say_so(words: str) -> None:
    plan = plan_of(REFUSED[words])
    with pytest.raises(PlanError, match=words):
        check_plan(plan)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with pytest.raises(PlanError, match=words):
        explain_layout(model, plan, sample=lambda: ((torch.empty(1, 3, device="meta"),), {}))


def test_every_rank_says_so_before_training() -> None:
    ranks = run_ranks(refusals, 4, [(layers, fields) for fields in REFUSED.values()])
    assert_refused(ranks, list(REFUSED))


@pytest.mark.parametrize(
    "fields",
    [
        {"mesh": {"stage": 2, "shard": 2}, "sharding": ShardingPlan(level=1)},
        {"mesh": {"shard": 2, "space": 2}, "sharding": ShardingPlan(level=3, offload="parameters")},
        {"mesh": {"context": 2, "stage": 2}},
        {"sharding": ShardingPlan(level=1, offload="parameters")},
    ],
)
def test_others_pass(fields: dict[str, Any]) -> None:
    check_plan(plan_of(fields))

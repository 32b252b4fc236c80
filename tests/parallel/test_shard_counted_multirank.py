"""A loss that is a mean over something else than samples, at every level: gradients become that mean where they lie."""

from typing import Any

import pytest

from against_one import assert_agree
from parallel import shard_subjects as subjects
from trainer.several import on_ranks, once
from tutti.config.plan import ShardingPlan

LEVELS = (1, 2, 3)


@pytest.mark.parametrize("mesh", [{"shard": 2}, pytest.param({"shard": 2, "replicate": 2}, marks=pytest.mark.long)])
def test_a_mean_over_what_counts_is_one_devices_at_every_level(mesh: Any) -> None:
    plans = {str(level): (subjects.counted, {"mesh": mesh, "sharding": ShardingPlan(level=level)}) for level in LEVELS}  # type: ignore[arg-type]
    many = on_ranks(plans, 2 * mesh.get("replicate", 1))
    for level in plans:
        assert_agree(once(subjects.counted), [rank[level] for rank in many])

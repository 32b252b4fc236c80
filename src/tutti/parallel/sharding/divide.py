"""Sharding chosen by level."""

from torch import nn

from tutti.config.plan import ShardingPlan
from tutti.parallel.layout import Layout
from tutti.parallel.sharding.parameters import Parameters
from tutti.parallel.sharding.shards import Shards
from tutti.parallel.sharding.states import States


def shard(model: nn.Module, sharding: ShardingPlan, layout: Layout) -> Shards:
    """Divide what the plan says among the ranks of the `shard` axis; call it when all else is in place."""
    if layout.mesh.degree("shard") == 1:
        return Shards()
    if sharding.level == 1:
        return States(model, layout, sharding)
    return Parameters(model, layout, sharding)

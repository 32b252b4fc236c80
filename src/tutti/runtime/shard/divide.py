"""Sharding chosen by level."""

from torch import nn

from tutti.runtime.layout import Layout
from tutti.runtime.shard.parameters import Parameters
from tutti.runtime.shard.shards import Shards
from tutti.runtime.shard.states import States
from tutti.spec.plan import Sharding


def shard(model: nn.Module, sharding: Sharding, layout: Layout) -> Shards:
    """Divide what the plan says among the ranks of the `shard` axis; call it when all else is in place."""
    if layout.mesh.degree("shard") == 1:
        return Shards()
    if sharding.level == 1:
        return States(model, layout, sharding)
    return Parameters(model, layout, sharding)

"""Sharding chosen by level."""

from torch import nn

from tutti.errors import PlanError
from tutti.runtime.layout import Layout
from tutti.runtime.shard.parameters import Parameters
from tutti.runtime.shard.shards import Shards
from tutti.runtime.shard.states import States
from tutti.spec.plan import Sharding


def shard(model: nn.Module, sharding: Sharding, layout: Layout) -> Shards:
    """Divide what the plan says among the ranks of the `shard` axis; call it when all else is in place.

    Raises PlanError where parameters shall live on the host but are not divided.
    """
    if layout.mesh.degree("shard") == 1:
        return Shards()
    if sharding.level == 1:
        if sharding.offload == "parameters":
            raise PlanError(
                'sharding.offload = "parameters" needs sharding level 2 or 3, which divide parameters; level 1 keeps '
                'them whole on the device: use offload = "optimizer"'
            )
        return States(model, layout, sharding)
    return Parameters(model, layout, sharding)

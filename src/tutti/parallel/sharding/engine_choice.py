"""Which engine runs the `shard` axis: tutti's own, or torch's fully_shard (docs/decisions/fsdp.md)."""

from dataclasses import replace

from torch import nn

from tutti.comm.world import World
from tutti.config.plan import Plan
from tutti.config.shard_engine import unsupported_by_fsdp2
from tutti.errors import PlanError
from tutti.parallel.layout import Layout
from tutti.parallel.mesh import Mesh


def with_engine(plan: Plan, model: nn.Module, world: World) -> Plan:
    """Return the plan with the engine that shards this model on these ranks.

    Args:
        plan: the plan; its engine may be "auto".
        model: the undivided model, on its device or without memory.
        world: the ranks.

    Raises:
        PlanError: the plan states fsdp2, which cannot shard the model here.
    """
    stated = plan.sharding.engine
    if plan.degree("shard") == 1 or stated == "tutti":
        return plan
    if stated == "auto" and (world.backend != "nccl" or unsupported_by_fsdp2(plan) is not None):
        return _with(plan, fsdp2=False)
    from tutti.parallel.sharding.fsdp2_units import obstacle  # torch's FSDP takes long to import

    reason = obstacle(model, Layout.of(model, Mesh(plan.mesh, world.rank)), world.device, world.backend)
    if reason is not None and stated == "fsdp2":
        raise PlanError(f"sharding.engine = fsdp2: {reason}; use sharding.engine = tutti, or leave it out")
    return _with(plan, fsdp2=reason is None)


def _with(plan: Plan, *, fsdp2: bool) -> Plan:
    return replace(plan, sharding=replace(plan.sharding, engine="fsdp2" if fsdp2 else "tutti"))

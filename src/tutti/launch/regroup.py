"""The plan of a smaller generation: which mesh fewer ranks make, with the meaning of the run unchanged.

The global batch, the learning rate and the order of the data belong to the run, not to its ranks. So only axes may
shrink whose degree changes no result: `replicate`, then `shard`. Pure: nothing is read or written.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from tutti.config.plan import Plan, ShardingPlan
from tutti.config.vocabulary import AxisName
from tutti.errors import LaunchError

_SHRINKING: tuple[AxisName, ...] = ("replicate", "shard")


def shrink_mesh(mesh: Mapping[AxisName, int], most: int, least: int = 1) -> dict[AxisName, int]:
    """Return the largest mesh of `least` to `most` ranks that `mesh` shrinks to.

    `replicate` shrinks first, and `shard` only once no replica is left; an axis that ends with 1 rank is left out.

    Args:
        mesh: degree of each axis, outermost first.
        most: number of ranks that there are.
        least: smallest number of ranks to go on with.

    Raises:
        LaunchError: there is no such mesh.

    Examples:
        >>> shrink_mesh({"replicate": 4, "split": 2}, most=7)
        {'replicate': 3, 'split': 2}
        >>> shrink_mesh({"replicate": 2, "shard": 4}, most=3)
        {'shard': 3}
    """
    shrunk = dict(mesh)
    for axis in _SHRINKING:
        if axis in shrunk:
            others = math.prod(degree for name, degree in shrunk.items() if name != axis)
            shrunk[axis] = max(1, min(shrunk[axis], most // others))
    ranks = math.prod(shrunk.values())
    stated = ", ".join(f"{axis} = {degree}" for axis, degree in mesh.items())
    if ranks > most:
        raise LaunchError(
            f"a mesh of {stated} does not fit on {most} rank{'s' if most > 1 else ''}: only replicate and shard can "
            "shrink; free the place that is missing, and resume the run"
        )
    if ranks < least:
        raise LaunchError(
            f"a mesh of {stated} leaves {ranks} of {most} ranks in use, and {least} or more are asked for; ask for "
            "fewer, or free the place that is missing, and resume the run"
        )
    return {axis: degree for axis, degree in shrunk.items() if degree > 1} or {"replicate": 1}


def shrink_plan(plan: Plan, most: int, least: int = 1) -> Plan:
    """Return the plan on the largest mesh of `least` to `most` ranks. See `shrink_mesh`.

    Raises:
        LaunchError: the plan means something else on fewer ranks, or there is no such mesh.
    """
    if plan.sync.mode != "synchronous":
        raise LaunchError(
            f'sync.mode = "{plan.sync.mode}" trains otherwise on fewer ranks, as each has a replica of its own; '
            "leave --on-failure and --min-ranks out"
        )
    if plan.shares:
        raise LaunchError(
            f"shares = {list(plan.shares)} states a load for each rank, so no rank can be left out; leave --on-failure "
            "and --min-ranks out"
        )
    mesh = shrink_mesh(plan.mesh, most, least)
    sharding = plan.sharding if "shard" in mesh else ShardingPlan(offload=plan.sharding.offload)
    return replace(plan, mesh=mesh, sharding=sharding)

"""Small changes to the best plans that enumeration leaves out: the order of axes, cuts, microbatches between powers,
blocks that need not recompute.
"""

import dataclasses
from collections.abc import Iterator

from tutti.config.cluster import ClusterSpec
from tutti.config.plan import Plan
from tutti.config.vocabulary import AxisName
from tutti.planner.explore import Costed, Explorer
from tutti.planner.relief import relieve
from tutti.planner.wide import widen

_BEST = 4
"""Plans whose neighbours are costed."""

_ROUNDS = 3

_RELIEVED = 6
"""Meshes of which it is tried how few blocks may recompute."""


def polish(explorer: Explorer) -> None:
    """Cost data-parallel plans with wide layers divided, then the neighbours of the best plans, and theirs again, while
    that brings anything."""
    widen(explorer)
    seen = {_key(one.plan) for one in explorer.costed}
    for _ in range(_ROUNDS):
        good = sorted((one for one in explorer.costed if one.good), key=lambda one: one.value)[:_BEST]
        before = good[0].value if good else 0.0
        for one in good:
            for plan in neighbours(one, explorer):
                if _key(plan) not in seen and not explorer.over():
                    seen.add(_key(plan))
                    explorer.cost(plan, one.cluster)
        if not good or min(one.value for one in explorer.costed if one.good) >= before:
            break
    _relieve(explorer)


def _relieve(explorer: Explorer) -> None:
    """Of the best plans that recompute all blocks, those with which only some do, where without any they would win."""
    if len(explorer.limits.recompute) == 1:
        return
    again = [one for one in explorer.costed if one.good and any(rule.recompute for rule in one.plan.layout)]
    ranked = sorted(again, key=lambda one: one.value)
    meshes = {tuple(one.plan.mesh.items()): one for one in reversed(ranked)}  # the best of each mesh
    for one in sorted(meshes.values(), key=lambda one: one.value)[:_RELIEVED]:
        best = min(each.value for each in explorer.costed if each.good)
        bare = explorer.cost(dataclasses.replace(one.plan, layout=explorer.request.script.layout), one.cluster)
        if bare is None or bare.value >= best or explorer.over():
            continue

        def fits(plan: Plan, cluster: ClusterSpec = one.cluster) -> bool:
            found = None if explorer.over() else explorer.cost(plan, cluster)
            return found is not None and found.good

        alike = (lane for lane in explorer.lanes if lane.precision == one.plan.precision)
        room = next((lane.room for lane in alike if lane.cluster is one.cluster), None)
        if room is not None:  # what a part of the cluster computes in, all of it may not
            relieve(room, one.plan, explorer.samples, fits)


def _key(plan: Plan) -> tuple[object, ...]:
    """What tells plans apart, the order of the mesh's axes too."""
    return (tuple(plan.mesh.items()), plan.batch, plan.layout, plan.shares, plan.split_shares,
            plan.precision, plan.sharding,
            plan.pipeline, plan.space_grid, plan.context)  # fmt: skip


def neighbours(one: Costed, explorer: Explorer) -> Iterator[Plan]:
    """Plans that differ in one thing."""
    plan = one.plan
    if explorer.limits.microbatches is None:
        most = explorer.samples // plan.data_parallel_degree
        own = plan.batch.num_microbatches
        wanted = {own + plan.mesh.get("stage", 1), 2 * own, own // 2, own * 3 // 2, own * 3 // 4}
        for count in sorted(count for count in wanted if 1 <= count <= most and count != own):
            yield dataclasses.replace(plan, batch=dataclasses.replace(plan.batch, num_microbatches=count))
    if explorer.request.mesh is None:
        for mesh in _orders(plan.mesh):
            yield dataclasses.replace(plan, mesh=mesh)
    yield from (dataclasses.replace(plan, space_grid=grid) for grid in _grids(plan, explorer))


def _orders(mesh: dict[AxisName, int]) -> Iterator[dict[AxisName, int]]:
    """The mesh with two neighbouring axes changed about."""
    axes = list(mesh)
    for at in range(len(axes) - 1):
        changed = [*axes[:at], axes[at + 1], axes[at], *axes[at + 2 :]]
        yield {axis: mesh[axis] for axis in changed}


def _grids(plan: Plan, explorer: Explorer) -> Iterator[tuple[int, ...]]:
    """Ways to cut space in two or three dims at once."""
    degree = plan.mesh.get("space", 1)
    dims = max((len(module.halo_nbytes_by_dim) for module in explorer.model.modules), default=0)
    if plan.space_grid or degree < 4 or dims < 2:
        return
    for first in range(2, degree):
        if degree % first == 0:
            rest = degree // first
            yield (first, rest) + (1,) * (dims - 2)
            if dims == 3:
                yield from ((first, second, rest // second) for second in range(2, rest) if rest % second == 0)

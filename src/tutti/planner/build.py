"""From a row of numbers to a Plan: the order of the mesh's axes and what the ways to run it are in a Plan."""

import dataclasses

from tutti.config.model import ModelSpec
from tutti.config.plan import LayoutRule, PipelinePlan, Plan, ShardingPlan
from tutti.config.vocabulary import AxisName, Precision, ShardLevel
from tutti.planner.choice import Request
from tutti.planner.enumerate import CONTEXTS, OFFLOADS, RECOMPUTE, SCHEDULES, Shapes, Variants

ORDER: tuple[AxisName, ...] = ("stage", "replicate", "shard", "table", "expert", "context", "space", "split")
"""Axes by how much their ranks exchange, least first. The outermost lie across nodes, the innermost within one: a split
rank sums activations in every layer, a stage hands on one activation in each microbatch."""

_LEVELS: dict[int, ShardLevel] = {1: 1, 2: 2, 3: 3}


def plan_of(model: ModelSpec, request: Request, shapes: Shapes, ways: Variants, row: int, precision: Precision) -> Plan:
    """The plan that a row of `ways` means."""
    at, script = int(ways.shape[row]), request.script
    shard = int(ways.shard[row])
    degrees: dict[AxisName, int] = {
        "stage": int(shapes.stage[at]),
        "replicate": int(shapes.copies[at]) // shard,
        "shard": shard,
        "table": int(shapes.table[at]),
        "expert": int(shapes.expert[at]),
        "context": int(shapes.context[at]),
        "space": int(shapes.space[at]),
        "split": int(shapes.split[at]),
    }
    level, stage = int(ways.level[row]), degrees["stage"]
    sharding, pipeline = script.sharding, script.pipeline
    if level:
        sharding = ShardingPlan(level=_LEVELS[level], offload=OFFLOADS[int(ways.offload[row])])
    if stage > 1:
        pipeline = PipelinePlan(
            schedule=SCHEDULES[int(ways.schedule[row])],
            stages_per_rank=int(ways.chunks[row]),
            cuts=script.pipeline.cuts,
        )
    return dataclasses.replace(
        script,
        batch=dataclasses.replace(script.batch, num_microbatches=int(shapes.microbatches[at])),
        mesh=mesh_of(request, degrees),
        layout=(*script.layout, *recompute_rules(model, RECOMPUTE[int(ways.recompute[row])])),
        shares=(),
        split_shares=(),
        precision=precision,
        sharding=sharding,
        pipeline=pipeline,
        context=CONTEXTS[int(ways.context_kind[row])] if degrees["context"] > 1 else script.context,
        space_grid=script.space_grid if request.mesh is not None else (),
    )


def mesh_of(request: Request, degrees: dict[AxisName, int]) -> dict[AxisName, int]:
    """The axes above one in their order; a mesh that was asked for as it was written."""
    if request.mesh is not None:
        return dict(request.mesh)
    return {axis: degrees[axis] for axis in ORDER if degrees[axis] > 1} or {"replicate": 1}


def recompute_rules(model: ModelSpec, how: str) -> tuple[LayoutRule, ...]:
    """Layout rules that make every block recompute, or every module right in the model where it has no blocks."""
    if how == "none":
        return ()
    return tuple(
        LayoutRule(modules=glob, recompute=True if how == "full" else "selective") for glob in block_globs(model)
    )


def block_globs(model: ModelSpec) -> tuple[str, ...]:
    """Globs over the names of the model's repeated blocks: layers.* for layers.0, layers.1, ...; "*" without blocks."""
    roots = block_roots(model)
    return tuple(dict.fromkeys(f"{root.rpartition('.')[0]}.*" if "." in root else "*" for root in roots.values())) or (
        "*",
    )


def block_roots(model: ModelSpec) -> dict[int, str]:
    """Block -> the dotted name that all of its modules have in common."""
    members: dict[int, list[list[str]]] = {}
    for module in model.modules:
        if module.block >= 0:
            members.setdefault(module.block, []).append(module.name.split("."))
    roots = {}
    for block, names in members.items():
        common = []
        for parts in zip(*names, strict=False):
            if len(set(parts)) > 1:
                break
            common.append(parts[0])
        roots[block] = ".".join(common)
    return roots

"""Every plan worth predicting, as columns of numbers: meshes first, then the variants of each mesh.

A row of a `MeshTable` has the degree of every axis (replicate and shard as one product) and the number of
microbatches. A row of `Variants` says how the plan on one such mesh is sharded, scheduled and recomputed. Both are
made by vector operations, so hundreds of thousands of rows take less than a second.
"""

import dataclasses
from itertools import product

import numpy as np
from numpy.typing import NDArray

from tutti.config.model import ModelSpec
from tutti.config.plan import LayoutRule, PipelinePlan, Plan, ShardingPlan
from tutti.config.vocabulary import AxisName, Precision, ShardLevel
from tutti.cost_model.plan_table import (
    CONTEXTS,
    OFFLOAD_TIERS,
    OFFLOADS,
    RECOMPUTE,
    RESIDENT,
    SCHEDULES,
    MeshTable,
    Variants,
)
from tutti.cost_model.work_division import block_globs
from tutti.errors import PlanError
from tutti.planner.candidates import Limits
from tutti.planner.plan_request import PlanRequest

SMALL = 64
"""Up to this many ranks every data-parallel degree is tried. Above it, only powers of two, whole nodes, the
largest degree and the largest one that divides the batch are.
"""

CHUNKS = (1, 2, 3, 4, 6, 8)
"""Stages per rank that are tried with the interleaved schedule. With one stage per rank it is 1F1B with up to twice as
many microbatches in flight, which hides slow messages.
"""


def shapes(limits: Limits, request: PlanRequest) -> MeshTable:
    """Return all meshes that a request allows.

    Args:
        limits: degrees to try along each axis.
        request: what was asked.

    Raises:
        PlanError: no mesh serves the request.
    """
    parts = []
    for inner in product(limits.splits, limits.stages, limits.contexts, limits.experts, limits.tables, limits.spaces):
        _, stage, context, _, _, space = inner
        if request.mesh is None and (stage > 1) + (context > 1) + (space > 1) > 1:
            continue  # these axes exclude each other (refusals.check_plan)
        parts.append(_of_inner(limits, request, inner))
    if limits.single_device:
        parts.append(_of_inner(dataclasses.replace(limits, most_ranks=1, must_shard=False), request, (1,) * 6))
    rows = np.concatenate([part for part in parts if len(part)] or [np.empty((0, 8), dtype=np.int64)])
    if not len(rows):
        raise PlanError(
            f"no mesh of {limits.least_ranks} to {limits.most_ranks} ranks fits the request with a global batch of "
            f"{limits.samples} samples; ask for another number of ranks or another global_batch_size"
        )
    names = [field.name for field in dataclasses.fields(MeshTable)]
    return MeshTable(**{name: np.ascontiguousarray(rows[:, column]) for column, name in enumerate(names)})


def _of_inner(limits: Limits, request: PlanRequest, inner: tuple[int, ...]) -> NDArray[np.int64]:
    """Return rows of (inner degrees, copies, microbatches) for one setting of the inner axes, (meshes, 8)."""
    split, stage, context, expert, table, space = inner
    whole = split * stage * context * space
    rows = [
        (*inner, copies, slices)
        for copies in _copies(limits, whole, expert * table)
        for slices in _slices(limits, copies * expert * table, stage)
    ]
    return np.array(rows, dtype=np.int64).reshape(-1, 8)


def _copies(limits: Limits, whole: int, divided: int) -> list[int]:
    """Return the degrees of replicate times shard to try.

    Args:
        limits: what restricts the search.
        whole: ranks that hold one copy of the model without its experts and tables.
        divided: the product of the expert and table degrees, whose ranks are data parallel too.
    """
    ranks_per_copy = whole * divided
    most = min(limits.most_ranks // ranks_per_copy, limits.samples // divided)
    least = max(2 if limits.must_shard else 1, -(-limits.least_ranks // ranks_per_copy))
    if most < least:
        return []
    if limits.least_ranks == limits.most_ranks:
        return [most] if most * ranks_per_copy == limits.most_ranks else []
    wanted = {most} | {2**power for power in range(most.bit_length())}
    if limits.most_ranks <= SMALL:
        wanted |= set(range(1, most + 1))
    even = next((many for many in range(most, 0, -1) if limits.samples % (many * divided) == 0), 1)
    node = limits.per_node * (most * ranks_per_copy // limits.per_node) // ranks_per_copy  # whole nodes
    wanted |= {even, max(1, node), max(1, min(most, limits.devices // ranks_per_copy))}
    if limits.axes is not None:
        wanted = {many for many in wanted if many == limits.axes.get("copies", many)}
    return sorted(many for many in wanted if least <= many <= most)


def _slices(limits: Limits, data: int, stages: int) -> list[int]:
    """Return the numbers of microbatches to try for a data-parallel degree."""
    if limits.microbatches is not None:
        # with a single microbatch, one stage computes while all others wait
        return [limits.microbatches] if limits.microbatches > 1 or stages == 1 or limits.staged else []
    rank_samples = limits.samples // data
    wanted = {2**power for power in range(rank_samples.bit_length())}
    if limits.samples % data == 0:
        wanted |= set(_thinned([count for count in range(1, min(rank_samples, 4096) + 1) if rank_samples % count == 0]))
        wanted.add(rank_samples)
    if limits.own_microbatches <= rank_samples:
        wanted.add(limits.own_microbatches)
    return sorted(
        count for count in wanted if count <= rank_samples and (stages == 1 or count > 1 or rank_samples == 1)
    )


def _thinned(counts: list[int]) -> list[int]:
    """Return those of the increasing numbers that are at least a quarter larger than the one returned before them."""
    kept: list[int] = []
    for count in counts:
        if not kept or count >= 1.25 * kept[-1]:
            kept.append(count)
    return kept


def variants(limits: Limits, meshes: MeshTable, rows: NDArray[np.intp], *, offload: int = 0) -> Variants:
    """Return all combinations of sharding, schedule, recompute and attention for some meshes.

    Args:
        limits: what restricts the search.
        meshes: all meshes.
        rows: the rows of `meshes` to combine.
        offload: where the plans keep state, an index into OFFLOAD_TIERS.
    """
    parts: list[NDArray[np.int64]] = []
    if not len(rows):
        return _variants(np.empty((0, 8), dtype=np.int64))
    keys = np.stack([meshes.stage[rows], meshes.copies[rows], meshes.context[rows]], axis=1)
    kinds, where = np.unique(keys, axis=0, return_inverse=True)
    order = np.argsort(where.reshape(-1), kind="stable")
    ends = np.cumsum(np.bincount(where.reshape(-1), minlength=len(kinds)))
    for kind, members in zip(kinds.tolist(), np.split(rows[order], ends[:-1]), strict=True):
        variant_rows = _variant_columns(limits, tuple(kind), offload=offload)
        block = np.empty((len(members), len(variant_rows), 8), dtype=np.int64)
        block[:, :, 0] = members[:, None]
        block[:, :, 1:] = variant_rows[None, :, :]
        parts.append(block.reshape(-1, 8))
    return _variants(np.concatenate(parts))


def _variants(table: NDArray[np.int64]) -> Variants:
    """Name the columns of a table: mesh, shard, level, schedule, chunks, recompute, attention, offload."""
    return Variants(
        shape=table[:, 0].astype(np.intp),
        shard=table[:, 1],
        level=table[:, 2],
        schedule=table[:, 3],
        chunks=table[:, 4],
        recompute=table[:, 5],
        context_kind=table[:, 6],
        offload=table[:, 7],
    )


def _variant_columns(limits: Limits, kind: tuple[int, ...], *, offload: int) -> NDArray[np.int64]:
    """Return the rows of a `Variants` table, without the mesh, for this (stages, copies, context degree)."""
    stage, copies, context = kind
    sharding = [pair for pair in _shardings(limits, copies) if stage == 1 or pair[1] <= 1]
    recompute = limits.recompute
    contexts = range(len(CONTEXTS)) if context > 1 else (0,)
    rows = [
        (shard, level, schedule, chunks, again, how, where)
        for (shard, level), (schedule, chunks), again, how, where in product(
            sharding, _pipelines(limits, stage), recompute, contexts, OFFLOAD_TIERS[offload]
        )
        if where == 0 or (stage == 1 if shard == 1 else level > 0 and (where in RESIDENT or level == 3))
    ]
    return np.array(rows, dtype=np.int64).reshape(-1, 7)


def _shardings(limits: Limits, copies: int) -> list[tuple[int, int]]:
    """Return pairs (shard degree, level): all copies, those within a node, and for level 3 also degrees in between."""
    pairs = [] if limits.must_shard else [(1, 0)]
    if copies == 1 or not limits.may_shard:
        return [(1, 0)]
    degrees = {copies} | {2**power for power in range(1, copies.bit_length()) if copies % 2**power == 0}
    near = {copies, max((many for many in degrees if many <= limits.per_node), default=copies)}
    for level in limits.levels:
        pairs += [(many, level) for many in sorted(degrees if level == 3 else near)]
    if limits.axes is not None and "shard" in limits.axes:
        pairs = [(many, level) for many, level in pairs if many == limits.axes["shard"]]
        if not pairs:
            pairs = [(limits.axes["shard"], level) for level in (limits.levels if limits.axes["shard"] > 1 else (0,))]
    return pairs


def _pipelines(limits: Limits, stage: int) -> list[tuple[int, int]]:
    """Return pairs (schedule, stages per rank) of all possible schedules.

    GPipe and interleaved schedules hold more activations than 1F1B, but wait less for slow messages.
    """
    if stage == 1:
        return [(0, 1)]
    asked = limits.pipeline
    if asked is not None:
        return [(SCHEDULES.index(asked.schedule), asked.stages_per_rank)]
    pairs = [(index, 1) for index, name in enumerate(SCHEDULES) if name != "interleaved"]
    chunks = [many for many in CHUNKS if many == 1 or (stage * many <= limits.blocks and limits.cuts == 0)]
    return pairs + [(SCHEDULES.index("interleaved"), many) for many in chunks]


ORDER: tuple[AxisName, ...] = ("stage", "replicate", "shard", "table", "expert", "context", "space", "split")
"""Axes by how much their ranks communicate, the least first. The first axes reach across nodes, the last stay within
one: a split rank reduces activations in every layer, a stage sends one activation in each microbatch.
"""

_LEVELS: dict[int, ShardLevel] = {1: 1, 2: 2, 3: 3}


def plan_of(
    model: ModelSpec,
    request: PlanRequest,
    shapes: MeshTable,
    variant_rows: Variants,
    row: int,
    precision: Precision,
    nvme_path: str = "",
) -> Plan:
    """Return the plan that a row of `variant_rows` stands for.

    Args:
        model: what is trained.
        request: what was asked; the script's plan supplies what a row does not say.
        shapes: the meshes.
        variant_rows: the plans on these meshes.
        row: row of `variant_rows`.
        precision: precision of the plan.
        nvme_path: folder for optimizer state on a disk.
    """
    at, script = int(variant_rows.shape[row]), request.script
    shard = int(variant_rows.shard[row])
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
    level, stage = int(variant_rows.level[row]), degrees["stage"]
    sharding, pipeline = script.sharding, script.pipeline
    offload, offload_device = OFFLOADS[int(variant_rows.offload[row])]
    path = (script.sharding.nvme_path or nvme_path) if offload_device == "nvme" else ""
    if level:
        sharding = ShardingPlan(
            level=_LEVELS[level],
            offload=offload,
            engine=script.sharding.engine,
            offload_device=offload_device,
            nvme_path=path,
        )
    elif offload != "none":
        sharding = dataclasses.replace(sharding, offload=offload, offload_device=offload_device, nvme_path=path)
    if stage > 1:
        pipeline = PipelinePlan(
            schedule=SCHEDULES[int(variant_rows.schedule[row])],
            stages_per_rank=int(variant_rows.chunks[row]),
            cuts=script.pipeline.cuts,
        )
    return dataclasses.replace(
        script,
        batch=dataclasses.replace(script.batch, num_microbatches=int(shapes.microbatches[at])),
        mesh=mesh_of(request, degrees),
        layout=(*script.layout, *recompute_rules(model, RECOMPUTE[int(variant_rows.recompute[row])])),
        shares=(),
        split_shares=(),
        precision=precision,
        sharding=sharding,
        pipeline=pipeline,
        context=CONTEXTS[int(variant_rows.context_kind[row])] if degrees["context"] > 1 else script.context,
        space_grid=script.space_grid if request.mesh is not None else (),
    )


def mesh_of(request: PlanRequest, degrees: dict[AxisName, int]) -> dict[AxisName, int]:
    """Return a mesh of the axes above degree one in link order, or the mesh that was asked for as it was written."""
    if request.mesh is not None:
        return dict(request.mesh)
    return {axis: degrees[axis] for axis in ORDER if degrees[axis] > 1} or {"replicate": 1}


def recompute_rules(model: ModelSpec, how: str) -> tuple[LayoutRule, ...]:
    """Return layout rules that recompute every block, or every direct child of a model without blocks.

    Args:
        model: what is trained.
        how: "none", "selective" or "full".
    """
    if how == "none":
        return ()
    return tuple(
        LayoutRule(modules=glob, recompute=True if how == "full" else "selective") for glob in block_globs(model)
    )

"""The plans that the plan benchmark measures: all feasible plans of the planner, with equivalent ones folded.

A plan is folded into another one if it does the same work, or the same and more:

1. Recompute repeats work to save memory, which none of these models lacks.
2. Some schedules have the same actions on every rank.
3. Without stages, more microbatches send as much or more and compute in smaller pieces, so the smallest number stands
   for all; for one-axis meshes without sharding the next number is measured as well. With stages, 1F1B is measured with
   one, two and four microbatches for each stage, and other schedules and meshes of two axes with two.
4. On two axes, interleaved schedules are measured only with the fewest stages of each rank.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tutti.config.cluster import ClusterSpec
from tutti.config.mesh_axes import format_mesh
from tutti.config.model import ModelSpec
from tutti.config.pipeline_schedule import build_orders
from tutti.config.plan import LayoutRule, Plan
from tutti.config.vocabulary import AxisName
from tutti.cost_model import predict
from tutti.cost_model.module_costs import model_table
from tutti.cost_model.rank_placement import samples_of
from tutti.errors import PlanError
from tutti.planner import PlanRequest
from tutti.planner.candidates import limits_of
from tutti.planner.mesh_enumeration import plan_of, shapes, variants
from tutti.planner.plan_refinement import wide_plans

BATCHES = {"mlp": 128, "cnn": 16, "gpt": 8}
"""The global batch of each model in samples, for any number of ranks."""

STAGE_MICROBATCHES = (1, 2, 4)
"""Numbers of microbatches for each stage that are measured."""

LEFT_OUT: dict[str, tuple[dict[AxisName, int], ...]] = {"gpt": ({"context": 2}, {"context": 4})}
"""Meshes that run but that the planner does not try, because it does not divide so few tokens. If one of them were the
best plan, that would count as a loss, too.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A plan to be measured.

    Attributes:
        plan: the plan.
        stands_for: number of feasible plans of the planner for which it stands, itself included; 0 if the planner
            does not try it.
    """

    plan: Plan
    stands_for: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What is measured.

    Attributes:
        plans: by name.
        enumerated: number of plans in the planner's enumeration.
        feasible: number of those that are predicted to run and to fit.
        orders: plans added with another order of axes, another grid, or divided wide layers; the planner tries
            these for its best plans.
        reasons: why the other plans are infeasible, with their numbers.
    """

    plans: dict[str, Measured]
    enumerated: int
    feasible: int
    orders: int
    reasons: dict[str, int] = field(default_factory=dict)

    def words(self) -> dict[str, Any]:
        """Return the entry of the result file that describes the space, without the plans."""
        return {
            "enumerated": self.enumerated,
            "feasible": self.feasible,
            "not_feasible": self.reasons,
            "folded_to": sum(entry.stands_for > 0 for entry in self.plans.values()) - self.orders,
            "other_orders": self.orders,
            "not_tried_by_the_planner": sum(entry.stands_for == 0 for entry in self.plans.values()),
        }


def space(model: ModelSpec, cluster: ClusterSpec, script: Plan, workload: str, ranks: int) -> Space:
    """Return all that is measured of one model on `ranks` ranks of `cluster`. `script` is the plan that its script
    implies.
    """
    candidates = list(enumerated(model, cluster, script, ranks))
    able, reasons = feasible(model, cluster, candidates)
    folded = fold(able)
    plain = [
        entry.plan for entry in folded if entry.plan.pipeline == script.pipeline
    ]  # schedules are compared in one order of axes
    turned = [plan for plan in map(other_order, plain) if plan is not None]
    extra = [
        dataclasses.replace(script, mesh=dict(mesh)) for mesh in LEFT_OUT.get(workload, ()) if _ranks(mesh) == ranks
    ]
    wide = list(divided(model, cluster, plain, ranks))
    grids = [dataclasses.replace(entry.plan, space_grid=(2, 2)) for entry in folded if entry.plan.mesh == {"space": 4}]
    rows = [*folded, *(Measured(plan=plan, stands_for=1) for plan in (*turned, *grids, *wide))]
    rows += [Measured(plan=plan, stands_for=0) for plan in extra]
    return Space(
        plans={name_of(row.plan): row for row in rows},
        enumerated=len(candidates),
        feasible=len(able),
        orders=len(turned) + len(grids) + len(wide),
        reasons=reasons,
    )


def _ranks(mesh: dict[AxisName, int]) -> int:
    return int(np.prod(list(mesh.values())))


def enumerated(model: ModelSpec, cluster: ClusterSpec, script: Plan, ranks: int) -> Iterator[Plan]:
    """Yield every plan of exactly these ranks in the planner's enumeration, feasible or not."""
    request = PlanRequest(script=script, degree=ranks, scope="all")
    limits = limits_of(model, cluster, request)
    meshes = shapes(limits, request)
    strategies = variants(limits, meshes, np.arange(len(meshes)))
    for row in range(len(strategies)):
        yield plan_of(model, request, meshes, strategies, row, script.precision)


def feasible(model: ModelSpec, cluster: ClusterSpec, plans: Iterable[Plan]) -> tuple[list[Plan], dict[str, int]]:
    """Return the plans that are predicted to run and to fit, and how often each reason excludes one."""
    able: list[Plan] = []
    reasons: dict[str, int] = {}
    for plan in plans:
        try:
            reason = "" if predict(model, cluster, plan).fits else "does not fit in memory"
        except PlanError as error:
            reason = str(error)
        if reason:
            reasons[reason] = reasons.get(reason, 0) + 1
        else:
            able.append(plan)
    return able, reasons


def fold(plans: Iterable[Plan]) -> list[Measured]:
    """Return one plan for all that do the same, or the same and more."""
    families: dict[str, list[Plan]] = {}
    for plan in plans:
        families.setdefault(_family(plan), []).append(plan)
    kept: dict[str, list[Plan]] = {}
    for family in families.values():
        counts = chosen_counts(family[0], {plan.batch.num_microbatches for plan in family})
        for plan in family:
            number = plan.batch.num_microbatches
            stands = max((count for count in counts if count <= number), default=counts[0])
            for_it = [candidate for candidate in family if candidate.batch.num_microbatches == stands]
            plainest = min(for_it, key=lambda candidate: (len(_again(candidate)), candidate.pipeline.stages_per_rank))
            kept.setdefault(_same(plainest), []).extend([plainest, plan])
    return [Measured(plan=equivalent[0], stands_for=len(equivalent) // 2) for equivalent in kept.values()]


def chosen_counts(plan: Plan, counts: set[int]) -> list[int]:
    """Return the numbers of microbatches that are measured of a family; `plan` is one of it, `counts` are all its
    numbers.
    """
    stages, ordered, uncontended = plan.degree("stage"), sorted(counts), len(plan.mesh) == 1
    if stages == 1:
        return ordered[: 2 if uncontended and "shard" not in plan.mesh else 1]
    wanted = STAGE_MICROBATCHES if uncontended and plan.pipeline.schedule == "1f1b" else STAGE_MICROBATCHES[1:2]
    near = {min(ordered, key=lambda number: abs(number - per_stage * stages)) for per_stage in wanted}
    return sorted(near)


def _family(plan: Plan) -> str:
    """Return equal text for plans that differ only in recompute or microbatches; on two axes, also in stages of each
    rank.
    """
    pipeline = plan.pipeline
    if len(plan.mesh) > 1 and pipeline.schedule == "interleaved":
        pipeline = dataclasses.replace(pipeline, stages_per_rank=2)
    batch = dataclasses.replace(plan.batch, num_microbatches=1)
    return repr(dataclasses.replace(plan, layout=(LayoutRule(),), batch=batch, pipeline=pipeline))


def _again(plan: Plan) -> list[LayoutRule]:
    return [rule for rule in plan.layout if rule.recompute]


def _same(plan: Plan) -> str:
    """Return equal text for plans whose ranks do the same in the same order."""
    stages = plan.degree("stage")
    if stages == 1:
        return repr(plan)
    pipeline, count = plan.pipeline, plan.batch.num_microbatches
    actions = build_orders(pipeline.schedule, stages, pipeline.stages_per_rank, count)
    return repr((dataclasses.replace(plan, pipeline=dataclasses.replace(pipeline, schedule="1f1b", stages_per_rank=1)),
                 pipeline.stages_per_rank, actions))  # fmt: skip


def other_order(plan: Plan) -> Plan | None:
    """Return the plan with its two axes exchanged, so that other ranks share a host. The planner tries this for its
    best plans.
    """
    if len(plan.mesh) < 2:
        return None
    return dataclasses.replace(plan, mesh=dict(reversed(plan.mesh.items())))


def divided(model: ModelSpec, cluster: ClusterSpec, plans: Iterable[Plan], ranks: int) -> Iterator[Plan]:
    """Yield the replicated plan with its wide linear layers divided over all ranks."""
    base = next((plan for plan in plans if plan.mesh == {"replicate": ranks}), None)
    if base is not None:
        samples = samples_of(base.batch.global_batch_size, base.batch.unit, model.tokens_per_sample)
        yield from wide_plans(base, cluster, model_table(model), samples, ranks)


def name_of(plan: Plan) -> str:
    """Return a name that distinguishes the plan from the others: its mesh and how it runs."""
    words = [format_mesh(plan.mesh)]
    if plan.degree("shard") > 1:
        words.append(f"level {plan.sharding.level}")
    if plan.degree("stage") > 1:
        per_rank = plan.pipeline.stages_per_rank
        words.append(plan.pipeline.schedule + (f" of {per_rank}" if per_rank > 1 else ""))
    if plan.degree("context") > 1:
        words.append(plan.context)
    if plan.space_grid:
        words.append("in " + " x ".join(map(str, plan.space_grid)))
    wide = sum(rule.placement in ("column", "row") for rule in plan.layout)
    if plan.degree("table") > 1 and wide:
        words.append(f"{wide} wide layers")
    if plan.batch.num_microbatches > 1:
        words.append(f"{plan.batch.num_microbatches} microbatches")
    if _again(plan):
        words.append("recomputes")
    return ", ".join(words)

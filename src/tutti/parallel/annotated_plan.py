"""Combine the annotations in a script with a plan into one plan. Contradictions are refused."""

from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from torch import nn

from tutti.config.plan import LayoutRule, Plan
from tutti.config.vocabulary import AxisName, Placement
from tutti.errors import PlanError
from tutti.nn.annotations import Annotation, annotations

_PLACED: dict[str, Placement] = {"replicate": "replicate", "split": "split", "column": "column", "row": "row"}


@dataclass(slots=True)
class ModelAnnotations:
    """A model's annotations by module name.

    Attributes:
        placed: annotations that place a module over the split axis.
        stages: names of modules that begin a pipeline stage.
        sharded: annotations of the shard axis.
    """

    placed: dict[str, Annotation] = field(default_factory=dict)
    stages: list[str] = field(default_factory=list)
    sharded: dict[str, Annotation] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.placed or self.stages or self.sharded)

    @property
    def splits(self) -> bool:
        return any(annotation.kind != "replicate" for annotation in self.placed.values())


def read_annotations(model: nn.Module) -> ModelAnnotations:
    """Read the annotations of all modules.

    Raises:
        PlanError: one module has two annotations that contradict each other.
    """
    marks = ModelAnnotations()
    for name, module in model.named_modules():
        for annotation in annotations(module):
            if annotation.kind == "stage":
                marks.stages.append(name)
                continue
            target = marks.sharded if annotation.kind == "shard" else marks.placed
            before = target.get(name)
            if before is not None and before != annotation:
                raise PlanError(
                    f"module {name or 'the model'!r} is annotated with both {_call(before)} and {_call(annotation)}; "
                    "keep one"
                )
            target[name] = annotation
    return marks


def with_annotations(plan: Plan, model: nn.Module, *, stated_mesh: bool) -> Plan:
    """Return `plan` with the model's annotations.

    Args:
        plan: the plan.
        model: the annotated model.
        stated_mesh: whether the user stated the mesh; otherwise it is derived from the annotations.

    Raises:
        PlanError: plan and annotations contradict each other; the message names both places.
    """
    marks = read_annotations(model)
    if not marks:
        return plan
    mesh = plan.mesh if stated_mesh else _mesh(marks, plan.world_size)
    _check_degrees(marks, mesh)
    cuts, rules = _cuts(marks, plan), _rules(marks, plan)
    levels = {annotation.level for annotation in marks.sharded.values() if annotation.level is not None}
    if len(levels) > 1:
        raise PlanError(f"tutti.shard asks for levels {sorted(levels)} on {', '.join(marks.sharded)}; use one level")
    sharding = replace(plan.sharding, level=levels.pop()) if levels else plan.sharding
    return replace(
        plan, mesh=mesh, layout=(*plan.layout, *rules), pipeline=replace(plan.pipeline, cuts=cuts), sharding=sharding
    )


def _mesh(marks: ModelAnnotations, world_size: int) -> dict[AxisName, int]:
    """Derive the mesh: stages first, then split (the stated degree, or all ranks left), then shard or replicate."""
    stages = len(marks.stages) + 1 if marks.stages else 1
    if world_size == 1:
        return {"replicate": 1}
    if world_size % stages:
        raise PlanError(
            f"tutti.stage marks {stages} stages (new ones begin at {', '.join(marks.stages)}), a number that does not "
            f"divide {world_size} ranks; start a multiple of {stages} ranks, or state a plan"
        )
    rest = world_size // stages
    split, shard = _degree(marks.placed), _degree(marks.sharded)
    split = (split or (2 if marks.sharded else rest)) if marks.splits else 1
    if rest % split:
        raise PlanError(f"tutti.split over {split} ranks does not divide the {rest} ranks left; change one of them")
    rest //= split
    shard = (shard or rest) if marks.sharded else 1
    if rest % shard:
        raise PlanError(f"tutti.shard over {shard} ranks does not divide the {rest} ranks left; change one of them")
    degrees: dict[AxisName, int] = {"stage": stages, "replicate": rest // shard, "shard": shard, "split": split}
    return {axis: degree for axis, degree in degrees.items() if degree > 1} or {"replicate": 1}


def _degree(marked: dict[str, Annotation]) -> int | None:
    stated = {annotation.degree for annotation in marked.values() if annotation.degree is not None}
    if len(stated) > 1:
        raise PlanError(f"annotations of {', '.join(marked)} state different degrees {sorted(stated)}; use one degree")
    return stated.pop() if stated else None


def _check_degrees(marks: ModelAnnotations, mesh: dict[AxisName, int]) -> None:
    pairs: list[tuple[AxisName, dict[str, Annotation]]] = [("split", marks.placed), ("shard", marks.sharded)]
    for axis, marked in pairs:
        stated, degree = _degree(marked), mesh.get(axis, 1)
        if stated is not None and stated != degree and sum(mesh.values()) > len(mesh):
            place = next(name for name, annotation in marked.items() if annotation.degree is not None)
            raise PlanError(
                f"the plan has mesh.{axis} = {degree}, but tutti.{axis} on module {place!r} states degree={stated}; "
                "make them agree"
            )


def _cuts(marks: ModelAnnotations, plan: Plan) -> tuple[str, ...]:
    marked = tuple(marks.stages)
    if plan.pipeline.cuts and marked and plan.pipeline.cuts != marked:
        raise PlanError(
            f"the plan says pipeline.cuts = {list(plan.pipeline.cuts)}, but tutti.stage marks {list(marked)}; keep one"
        )
    return plan.pipeline.cuts or marked


def _rules(marks: ModelAnnotations, plan: Plan) -> list[LayoutRule]:
    """Make a rule for each annotated module and all modules in it; those of inner modules come later, so they win."""
    given = [rule for rule in plan.layout if rule not in _all_rules(marks)]
    for name, annotation in marks.placed.items():
        placement = _PLACED[annotation.kind]
        for rule in given:
            if rule.placement not in ("auto", placement) and fnmatchcase(name, rule.modules):
                raise PlanError(
                    f"layout rule {rule.modules!r} of the plan says {rule.placement!r}, but the script marks module "
                    f"{name!r} with {_call(annotation)}; make them agree"
                )
    return [rule for rule in _all_rules(marks) if rule not in plan.layout]


def _all_rules(marks: ModelAnnotations) -> list[LayoutRule]:
    rules = []
    for name, annotation in marks.placed.items():
        rules.append(LayoutRule(modules=name or "*", placement=_PLACED[annotation.kind]))
        if name:
            rules.append(LayoutRule(modules=f"{name}.*", placement=_PLACED[annotation.kind]))
    return rules


def _call(one: Annotation) -> str:
    how = f"how={one.kind!r}" if one.kind in ("column", "row") else ""
    degree = f"degree={one.degree}" if one.degree is not None else ""
    level = f"level={one.level}" if one.level is not None else ""
    return f"{one.words}({', '.join(part for part in (how, degree, level) if part)})"

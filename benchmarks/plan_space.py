"""The plans that the plan benchmark measures: every mesh of 2 or 4 ranks that a model can use, and ways to run it."""

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any

from tutti.plan.build import ORDER
from tutti.spec.plan import BatchPlan, Pipeline, Plan, Sharding
from tutti.spec.words import AxisName

AXES: dict[str, tuple[AxisName, ...]] = {
    "mlp": ("replicate", "shard", "split", "stage"),
    "cnn": ("replicate", "shard", "split", "stage", "space"),
    "gpt": ("replicate", "shard", "split", "stage", "context"),
}
"""Axes that may divide a workload."""

BATCHES = {"mlp": 128, "cnn": 16, "gpt": 8}
"""The global batch of each, in samples, whatever the ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A way to run a mesh: microbatches, and fields of the plan."""

    words: str
    microbatches: int = 1
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)


def plans(workload: str, ranks: int, *, every_order: bool = False) -> dict[str, Plan]:
    """Every plan by its name, such as "replicate 2 x split 2": the outermost axis, the one across hosts, first.

    `every_order`: also the orders of axes that the planner does not consider.
    """
    found = {}
    for mesh in meshes(AXES[workload], ranks, every_order=every_order):
        words = " x ".join(f"{axis} {degree}" for axis, degree in mesh.items())
        for variant in variants(mesh):
            batch = BatchPlan(global_batch_size=BATCHES[workload], num_microbatches=variant.microbatches)
            plan = Plan(batch=batch, mesh=mesh, **variant.fields)
            found[f"{words}{', ' if variant.words else ''}{variant.words}"] = plan
    return found


def meshes(axes: tuple[AxisName, ...], ranks: int, *, every_order: bool) -> list[dict[AxisName, int]]:
    """All ways to write 2 or 4 ranks as a product of axes' degrees, in the planner's order of axes or in every one."""
    ordered = sorted(axes, key=ORDER.index)
    found: list[dict[AxisName, int]] = [{axis: ranks} for axis in ordered]
    if ranks == 4:
        pairs = itertools.permutations(ordered, 2) if every_order else itertools.combinations(ordered, 2)
        found += [{one: 2, other: 2} for one, other in pairs]
    return found


def variants(mesh: dict[AxisName, int]) -> list[Variant]:
    """Ways to run one mesh: all of an axis alone, the usual ones of two together."""
    alone = len(mesh) == 1
    ways = [Variant(words="")]
    if "stage" in mesh:
        ways = [Variant(words="1f1b, 4 microbatches", microbatches=4)]
        if alone:
            ways += [
                Variant(words=f"{schedule}, 4 microbatches", microbatches=4, fields={"pipeline": pipeline})
                for schedule, pipeline in (
                    ("gpipe", Pipeline(schedule="gpipe")),
                    ("zero-bubble", Pipeline(schedule="zero-bubble")),
                )
            ]
            ways.append(Variant(words="1f1b, 8 microbatches", microbatches=8))
    if mesh.get("replicate", 1) > 1 and alone:
        ways.append(Variant(words="2 microbatches", microbatches=2))
    if "shard" in mesh:
        ways = [
            dataclasses.replace(
                way,
                words=", ".join(filter(None, (f"level {level}", way.words))),
                fields={**way.fields, "sharding": Sharding(level=level)},
            )
            for way in ways
            for level in ((1, 2, 3) if alone else (1, 3))
        ]
    if "context" in mesh:
        ways = [
            dataclasses.replace(
                way, words=", ".join(filter(None, (kind, way.words))), fields={**way.fields, "context": kind}
            )
            for way in ways
            for kind in (("ring", "all-to-all") if alone else ("ring",))
        ]
    if mesh.get("space", 1) == 4:
        ways += [dataclasses.replace(way, words="2 x 2", fields={**way.fields, "space_grid": (2, 2)}) for way in ways]
    return ways

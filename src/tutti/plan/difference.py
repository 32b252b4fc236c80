"""Two plans side by side, in plain words."""

import dataclasses
from typing import Any, get_args

from tutti.plan.words import parts_words, recompute_words, settings_words
from tutti.spec.compression import compression_in_words
from tutti.spec.plan import LayoutRule, Plan
from tutti.spec.sync_words import way_in_words
from tutti.spec.words import AxisName


def difference(first: Plan, second: Plan, names: tuple[str, str] = ("A", "B")) -> tuple[str, ...]:
    """What differs between two plans, a sentence each; empty where they mean the same."""
    a, b = names
    said = []
    if first.world_size != second.world_size:
        said.append(f"Ranks: {first.world_size} in {a}, {second.world_size} in {b}")
    axes: tuple[AxisName, ...] = get_args(AxisName)
    for axis in axes:
        one, other = first.mesh.get(axis, 1), second.mesh.get(axis, 1)
        if one != other:
            said.append(f"{axis.capitalize()}: {_degree(one)} in {a}, {_degree(other)} in {b}")
    shared = [axis for axis in first.mesh if first.mesh[axis] > 1 and second.mesh.get(axis, 1) > 1]
    turned = [axis for axis in second.mesh if axis in shared]
    if shared != turned:
        said.append(f"Order of axes, outermost first: {', '.join(shared)} in {a}, {', '.join(turned)} in {b}")
    said += _batches(first, second, a, b)
    said += _ways(first, second, a, b)
    if first.shares != second.shares:
        said.append(f"Shares of the data-parallel ranks: {_shares(first)} in {a}, {_shares(second)} in {b}")
    if first.split_weights != second.split_weights:
        said.append(f"Parts of layers along split: {parts_words(first)} in {a}, {parts_words(second)} in {b}")
    if _replicas(first) != _replicas(second):
        said.append(f"Replicas: {_replicas(first)} in {a}, {_replicas(second)} in {b}")
    if first.sync.gradient_code != second.sync.gradient_code:
        said.append(f"Gradients are summed {_written(first)} in {a}, {_written(second)} in {b}")
    if first.sync.bucket_nbytes != second.sync.bucket_nbytes:
        said.append(
            f"Gradients are fused into buckets of {first.sync.bucket_nbytes:,} bytes in {a}, "
            f"{second.sync.bucket_nbytes:,} in {b}"
        )
    return (*said, *_rules(first, second, a, b))


def _replicas(plan: Plan) -> str:
    return plan.sync.mode if plan.sync.mode == "synchronous" else way_in_words(plan.sync)


def _written(plan: Plan) -> str:
    code = plan.sync.gradient_code
    return "exactly" if code is None else f"as {compression_in_words(code)}"


def _degree(degree: int) -> str:
    return str(degree) if degree > 1 else "none"


def _batches(first: Plan, second: Plan, a: str, b: str) -> list[str]:
    said = []
    for field, words in (
        ("global_batch_size", "The global batch"),
        ("unit", "The batch counts"),
        ("num_microbatches", "Microbatches"),
        ("last_batch", "A short last batch"),
    ):
        one, other = getattr(first.batch, field), getattr(second.batch, field)
        if one != other:
            changes = ": this changes what is computed" if field != "num_microbatches" else ""
            said.append(f"{words}: {one} in {a}, {other} in {b}{changes}")
    return said


def _ways(first: Plan, second: Plan, a: str, b: str) -> list[str]:
    """What the mesh does not say, where it matters for both or either."""
    said = []
    if first.precision != second.precision:
        said.append(f"Precision: {first.precision} in {a}, {second.precision} in {b}: this changes the numbers")
    if recompute_words(first) != recompute_words(second):
        said.append(f"Recompute: {recompute_words(first)} in {a}, {recompute_words(second)} in {b}")
    if first.degree("shard") > 1 and second.degree("shard") > 1 and first.sharding != second.sharding:
        said.append(f"Sharding: {_words(first.sharding)} in {a}, {_words(second.sharding)} in {b}")
    if first.degree("stage") > 1 and second.degree("stage") > 1 and first.pipeline != second.pipeline:
        said.append(f"Pipeline: {_words(first.pipeline)} in {a}, {_words(second.pipeline)} in {b}")
    if first.degree("context") > 1 and second.degree("context") > 1 and first.context != second.context:
        said.append(f"Attention over the context axis: {first.context} in {a}, {second.context} in {b}")
    if first.space_grid != second.space_grid:
        said.append(f"Space is cut as {list(first.space_grid)} in {a}, {list(second.space_grid)} in {b}")
    lone = [
        (plan, name)
        for plan, other, name in ((first, second, a), (second, first, b))
        if settings_words(plan) and {axis for axis, degree in plan.mesh.items() if degree > 1}
        != {axis for axis, degree in other.mesh.items() if degree > 1}
    ]  # fmt: skip
    return said + [f"{name} runs as {settings_words(plan)}" for plan, name in lone]


def _words(value: Any) -> str:
    parts = []
    for field in dataclasses.fields(value):
        own = getattr(value, field.name)
        if own not in ((), "none"):
            shown = ", ".join(own) if isinstance(own, tuple) else own
            parts.append(f"{field.name.replace('_', ' ')} {shown}")
    return "; ".join(parts)


def _shares(plan: Plan) -> str:
    if not plan.shares:
        return "equal"
    shown = ", ".join(f"{share:g}" for share in plan.shares[:8])
    return shown + (", ..." if len(plan.shares) > 8 else "")


def _rules(first: Plan, second: Plan, a: str, b: str) -> list[str]:
    """Layout rules that only one of the plans has; recompute of whole plans is said above."""

    def told(rule: LayoutRule) -> bool:
        return rule.placement != "auto" or rule.chunks is not None

    said = []
    for plan, other, name in ((first, second, a), (second, first, b)):
        for rule in plan.layout:
            if rule not in other.layout and told(rule):
                parts = [f"chunks {rule.chunks}"] if rule.chunks is not None else []
                parts += [rule.placement] if rule.placement != "auto" else []
                said.append(f"Only {name} says of modules {rule.modules}: {', '.join(parts)}")
    return said

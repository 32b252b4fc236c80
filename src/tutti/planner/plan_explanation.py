"""Turn a Choice into sentences and table rows, and describe how two plans differ."""

import dataclasses
from dataclasses import dataclass
from typing import Any, get_args

from tutti.config.compression import format_compression
from tutti.config.plan import LayoutRule, Plan, SyncPlan
from tutti.config.prediction import Prediction
from tutti.config.sync_notation import format_relaxation
from tutti.config.vocabulary import AxisName, Offload
from tutti.cost_model.cost_notes import count, nbytes, seconds
from tutti.planner.objectives import duration, money, shown_value
from tutti.planner.plan_description import mesh_words, parts_words, recompute_words, settings_words
from tutti.planner.plan_request import Alternative, Choice, Coverage, Totals


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """One row of the table of plans. Texts that need a prediction are empty where there is none.

    Attributes:
        chosen: whether this is the chosen plan.
        ranks: number of ranks.
        mesh: the mesh as text.
        settings: what the mesh does not say, as text.
        microbatches: number of microbatches.
        precision: number format of the computation.
        shares: "by speed" or "equal".
        step: predicted step time.
        exposed: predicted time of exposed communication.
        memory: predicted memory of the fullest rank.
        value: the quantity that the objective compares.
        fits: whether the plan fits into memory; False without a prediction.
        reason: why the plan was or was not chosen.
    """

    chosen: bool
    ranks: int
    mesh: str
    settings: str
    microbatches: int
    precision: str
    shares: str
    step: str
    exposed: str
    memory: str
    value: str
    fits: bool
    reason: str


def rows(choice: Choice) -> tuple[PlanRow, ...]:
    """Return a row for the chosen plan and one for each alternative, in the order of the choice."""
    chosen = Alternative(plan=choice.best, prediction=choice.prediction, reason="chosen", totals=choice.totals)
    return (
        _row(choice, chosen, chosen=True),
        *(_row(choice, other, chosen=False) for other in choice.alternatives),
    )


def _row(choice: Choice, alternative: Alternative, *, chosen: bool) -> PlanRow:
    """Return the table row of one plan."""
    plan, prediction = alternative.plan, alternative.prediction
    value = shown_value(choice.request, alternative.totals, prediction) if alternative.totals and prediction else ""
    return PlanRow(
        chosen=chosen,
        ranks=plan.world_size,
        mesh=mesh_words(plan),
        settings=settings_words(plan),
        microbatches=plan.batch.num_microbatches,
        precision=plan.precision,
        shares="by speed" if plan.shares or plan.split_shares else "equal",
        step=seconds(prediction.step_time_s.value) if prediction else "",
        exposed=seconds(prediction.phases["exposed_communication"]) if prediction else "",
        memory=nbytes(prediction.memory.total) if prediction else "",
        value=value,
        fits=prediction.fits if prediction else False,
        reason=alternative.reason,
    )


def explain(choice: Choice) -> str:
    """Describe a choice in lines of text: what was chosen, what it is predicted to cost, and why."""
    plan, prediction = choice.best, choice.prediction
    time = prediction.step_time_s
    batch = plan.batch
    lines = [
        f"{choice.model} on {choice.cluster}: {_ranks(plan)}, "
        f"{count(batch.num_microbatches, 'microbatch')}, precision {plan.precision}, global batch "
        f"{batch.global_batch_size} {batch.unit}",
        f"Predicted step {seconds(time.value)} ({seconds(time.low)} to {seconds(time.high)}), "
        f"{prediction.throughput_per_s:,.0f} {batch.unit}/s; memory {nbytes(prediction.memory.total)} "
        f"{_of_ranks(plan)}",
        *_offload_text(plan, prediction),
        *training_cost_text(choice.totals),
        *choice.remarks,
        *choice.changes,
        *([_coverage_text(choice.coverage)] if choice.coverage is not None and choice.coverage.left else []),
    ]
    return "\n".join(lines) + "\n"


_ON_HOST: dict[Offload, str] = {
    "none": "nothing",
    "optimizer": "gradients and optimizer state",
    "parameters": "parameters, gradients and optimizer state",
}


def _offload_text(plan: Plan, prediction: Prediction) -> tuple[str, ...]:
    """Return a sentence on what is in the host's memory, and what that costs; nothing without offload."""
    if not (prediction.memory.host or prediction.memory.disk):
        return ()
    if prediction.memory.disk:
        return _disk_text(plan, prediction)
    update_s, exposed_s = prediction.phases["optimizer"], prediction.phases["exposed_communication"]
    return (
        f"On the host: {_ON_HOST[plan.sharding.offload]}, {nbytes(prediction.memory.host)} for each rank; a step takes "
        f"{seconds(update_s)} to update there, and waits {seconds(exposed_s)} for what moves",
    )


def _disk_text(plan: Plan, prediction: Prediction) -> tuple[str, ...]:
    """Return a sentence on what is on the host's disk and in its memory, and what that costs."""
    memory, update_s = prediction.memory, prediction.phases["optimizer"]
    folder = plan.sharding.nvme_path or "the run folder"
    return (
        f"On the host's disk ({folder}): optimizer state, {nbytes(memory.disk)} for each rank, which an update reads "
        f"and writes; with that it takes {seconds(update_s)}",
        *((f"In the host's memory: {nbytes(memory.host)} for each rank",) if memory.host else ()),
    )


def _of_ranks(plan: Plan) -> str:
    """Say whose memory is predicted: the fullest rank's where ranks hold unequal parts, else every rank's."""
    unequal = plan.shares or plan.split_weights or plan.degree("stage") > 1
    return "on the fullest rank" if unequal else "for each rank"


def _ranks(plan: Plan) -> str:
    """Describe the number of ranks, the mesh and its settings."""
    settings, mesh = settings_words(plan), mesh_words(plan)
    if mesh in ("1 rank", f"replicate {plan.world_size}"):
        told = settings and (plan.sync != SyncPlan() or plan.sharding.offload != "none")
        return count(plan.world_size, "rank") + (f" ({settings})" if told else "")
    named = mesh_words(plan, common_names=True)
    return f"{count(plan.world_size, 'rank')} as {named}" + (f" ({settings})" if settings else "")


def training_cost_text(totals: Totals | None) -> tuple[str, ...]:
    """Return a sentence with the cost of the whole training, or nothing where no cost is known.

    Where the length of training is unknown, the sentence gives the cost of one step, if prices or powers are known.
    """
    if totals is None or (totals.steps is None and totals.cost is None and totals.energy_kwh is None):
        return ()
    parts = [f"{totals.device_hours:,.4g} device-hours"]
    if totals.steps is not None:
        parts.insert(0, f"{duration(totals.time_s)} for {count(totals.steps, 'step')}")
    if totals.cost is not None:
        parts.append(f"a cost of {money(totals.cost)}")
    if totals.energy_kwh is not None:
        parts.append(f"{totals.energy_kwh:,.4g} kWh at the devices' full power")
    notes = {"predicted": "", "measured": "; the number of steps follows from a run's measured noise scale"}
    note = notes.get(totals.evidence, f"; the number of steps is {totals.evidence}")
    if totals.steps is None:
        return (f"A step: {', '.join(parts)}; give --samples or --epochs for the whole training",)
    return (f"The whole training: {', '.join(parts)}{note}",)


def _coverage_text(coverage: Coverage) -> str:
    """Say how many plans the search predicted, ruled out and left open."""
    return (
        f"{coverage.costed:,} plans were predicted, {coverage.too_slow + coverage.too_large:,} ruled out by bounds, "
        f"{coverage.left:,} not examined: none of those can be better by more than {coverage.gap:.0%}"
    )


_MAX_SHOWN = 8
"""Largest number of entries of a list that are printed."""


def difference(first: Plan, second: Plan, names: tuple[str, str] = ("A", "B")) -> tuple[str, ...]:
    """Return the differences between two plans, a sentence each; empty where the plans mean the same.

    Settings without effect in either plan, such as those of an axis that neither has, are named only where nothing
    else differs.

    Args:
        first: one plan.
        second: the other plan.
        names: what the sentences call the two plans.
    """
    sentences = _effective_differences(first, second, *names)
    return sentences or tuple(_ineffective_differences(_leaves(first), _leaves(second), *names))


def _effective_differences(first: Plan, second: Plan, a: str, b: str) -> tuple[str, ...]:
    """Return the differences that have an effect, a sentence each."""
    sentences = []
    if first.world_size != second.world_size:
        sentences.append(f"Ranks: {first.world_size} in {a}, {second.world_size} in {b}")
    axes: tuple[AxisName, ...] = get_args(AxisName)
    for axis in axes:
        degree, other = first.mesh.get(axis, 1), second.mesh.get(axis, 1)
        if degree != other:
            sentences.append(f"{axis.capitalize()}: {_degree(degree)} in {a}, {_degree(other)} in {b}")
    common = [axis for axis in first.mesh if first.mesh[axis] > 1 and second.mesh.get(axis, 1) > 1]
    common_in_second = [axis for axis in second.mesh if axis in common]
    if common != common_in_second:
        sentences.append(
            f"Order of axes, outermost first: {', '.join(common)} in {a}, {', '.join(common_in_second)} in {b}"
        )
    sentences += _batches(first, second, a, b)
    sentences += _compared_settings(first, second, a, b)
    if first.shares != second.shares:
        sentences.append(f"Shares of the data-parallel ranks: {_shares(first)} in {a}, {_shares(second)} in {b}")
    if first.split_weights != second.split_weights:
        sentences.append(f"Parts of layers along split: {parts_words(first)} in {a}, {parts_words(second)} in {b}")
    if _replicas(first) != _replicas(second):
        sentences.append(f"Replicas: {_replicas(first)} in {a}, {_replicas(second)} in {b}")
    if first.sync.gradient_code != second.sync.gradient_code:
        sentences.append(f"Gradients are reduced {_gradient_code(first)} in {a}, {_gradient_code(second)} in {b}")
    if _buckets(first) != _buckets(second):
        sentences.append(f"Gradients are fused into buckets of {_buckets(first)} in {a}, {_buckets(second)} in {b}")
    return (*sentences, *_rules(first, second, a, b), *_models(first, second, a, b))


def _buckets(plan: Plan) -> str:
    """Describe the size of the gradient buckets."""
    measured = " at first, then of the size measured as fastest" if plan.sync.bucket_sizes == "measured" else ""
    return f"{plan.sync.bucket_nbytes:,} bytes{measured}"


def _replicas(plan: Plan) -> str:
    """Describe how replicas are kept together."""
    return plan.sync.mode if plan.sync.mode == "synchronous" else format_relaxation(plan.sync)


def _gradient_code(plan: Plan) -> str:
    """Describe how gradients are encoded."""
    code = plan.sync.gradient_code
    return "exactly" if code is None else f"as {format_compression(code)}"


def _degree(degree: int) -> str:
    """Return a degree as text; "none" where the axis has one rank."""
    return str(degree) if degree > 1 else "none"


def _batches(first: Plan, second: Plan, a: str, b: str) -> list[str]:
    """Return the differences between the two batches."""
    sentences = []
    for field, label in (
        ("global_batch_size", "The global batch"),
        ("unit", "The batch counts"),
        ("num_microbatches", "Microbatches"),
        ("last_batch", "A short last batch"),
    ):
        value, other = getattr(first.batch, field), getattr(second.batch, field)
        if value != other:
            changes = " (changes results)" if field != "num_microbatches" else ""
            sentences.append(f"{label}: {value} in {a}, {other} in {b}{changes}")
    if first.batch.ramp != second.batch.ramp:
        sentences.append(f"Batch ramp: {_ramp(first)} in {a}; {_ramp(second)} in {b} (changes results)")
    return sentences


def _ramp(plan: Plan) -> str:
    """Describe how the global batch grows; "none" where it does not."""
    sizes = [f"{size} until batch {until}" for until, size in plan.batch.ramp[:_MAX_SHOWN]]
    return ", ".join([*sizes, *(["..."] if len(plan.batch.ramp) > _MAX_SHOWN else [])]) or "none"


def _compared_settings(first: Plan, second: Plan, a: str, b: str) -> list[str]:
    """Return the differences that the mesh does not show, where they have an effect in at least one of the plans."""
    sentences = []
    if first.precision != second.precision:
        sentences.append(f"Precision: {first.precision} in {a}, {second.precision} in {b} (changes results)")
    if recompute_words(first) != recompute_words(second):
        sentences.append(f"Recompute: {recompute_words(first)} in {a}, {recompute_words(second)} in {b}")
    both = first.degree("shard") > 1 and second.degree("shard") > 1
    if (both or first.sharding.offload != second.sharding.offload) and first.sharding != second.sharding:
        sentences.append(f"Sharding: {_settings_text(first.sharding)} in {a}, {_settings_text(second.sharding)} in {b}")
    if first.degree("stage") > 1 and second.degree("stage") > 1 and first.pipeline != second.pipeline:
        sentences.append(f"Pipeline: {_settings_text(first.pipeline)} in {a}, {_settings_text(second.pipeline)} in {b}")
    if first.degree("context") > 1 and second.degree("context") > 1 and first.context != second.context:
        sentences.append(f"Attention over the context axis: {first.context} in {a}, {second.context} in {b}")
    if first.share_device != second.share_device:
        words = {False: "have devices of their own", True: "may share devices"}
        sentences.append(f"Ranks {words[first.share_device]} in {a}, and {words[second.share_device]} in {b}")
    if first.space_grid != second.space_grid:
        sentences.append(f"Space is cut as {list(first.space_grid)} in {a}, {list(second.space_grid)} in {b}")
    lone = [
        (plan, name)
        for plan, other, name in ((first, second, a), (second, first, b))
        if settings_words(plan) and {axis for axis, degree in plan.mesh.items() if degree > 1}
        != {axis for axis, degree in other.mesh.items() if degree > 1}
    ]  # fmt: skip
    return sentences + [f"{name} uses {settings_words(plan)}" for plan, name in lone]


def _settings_text(value: Any) -> str:
    """Return the settings of a dataclass as text, without those that are empty or usual."""
    parts = []
    for field in dataclasses.fields(value):
        setting = getattr(value, field.name)
        if setting not in ((), "", "none", "auto", "cpu"):
            shown = ", ".join(setting) if isinstance(setting, tuple) else setting
            parts.append(f"{field.name.replace('_', ' ')} {shown}")
    return "; ".join(parts)


def _shares(plan: Plan) -> str:
    """Describe the shares of the data-parallel ranks."""
    if not plan.shares:
        return "equal"
    shown = ", ".join(f"{share:.12g}" for share in plan.shares[:_MAX_SHOWN])
    return shown + (", ..." if len(plan.shares) > _MAX_SHOWN else "")


def _rules(first: Plan, second: Plan, a: str, b: str) -> list[str]:
    """Return the layout rules that only one of the plans has.

    Recompute is left out of the rules where it was already compared for the whole plan.
    """
    recompute_compared = recompute_words(first) != recompute_words(second)
    pairs = ((first, second, a), (second, first, b))
    sentences = [
        f"Only {name} has a rule for modules {rule.modules}: {', '.join(parts)}"
        for plan, other, name in pairs
        for rule in plan.layout
        if rule not in other.layout and (parts := _rule_settings(rule, recompute=not recompute_compared))
    ]
    if not sentences and not recompute_compared:
        rules = [[rule for rule in plan.layout if _rule_settings(rule, recompute=True)] for plan in (first, second)]
        if rules[0] != rules[1]:
            sentences.append(f"Layout rules, of which the last match counts, are in different orders in {a} and {b}")
    return sentences


def _rule_settings(rule: LayoutRule, *, recompute: bool) -> list[str]:
    """Return the settings of a layout rule, as text."""
    parts = [f"chunks {rule.chunks}"] if rule.chunks is not None else []
    parts += [rule.placement] if rule.placement != "auto" else []
    if recompute and rule.recompute is not None:
        parts.append({True: "recompute", False: "no recompute", "selective": "selective recompute"}[rule.recompute])
    return parts


def _models(first: Plan, second: Plan, a: str, b: str) -> list[str]:
    """Return the modules that only one of the two models has, or describes differently."""
    pairs = ((first, second, a), (second, first, b))
    return [
        f"Only {name}'s model has {modules}"
        for plan, other, name in pairs
        if (modules := _changed_modules(plan.made_for, other.made_for))
    ]


def _changed_modules(modules: dict[str, str], other: dict[str, str]) -> str:
    """Return the modules that `other` does not have or describes differently, as text; empty for none."""
    changed = [f"{name} ({kind})" for name, kind in modules.items() if other.get(name) != kind]
    return ", ".join(changed[:_MAX_SHOWN]) + (
        f" and {len(changed) - _MAX_SHOWN} more" if len(changed) > _MAX_SHOWN else ""
    )


def _leaves(value: Any, name: str = "") -> dict[str, Any]:
    """Return all fields by dotted names, without the mesh and the parts along split, which are compared elsewhere."""
    if not dataclasses.is_dataclass(value):
        return {name: value}
    fields = [field.name for field in dataclasses.fields(value) if field.name not in ("mesh", "split_shares")]
    parts = [_leaves(getattr(value, field), f"{name}.{field}" if name else field) for field in fields]
    return {leaf: content for part in parts for leaf, content in part.items()}


def _ineffective_differences(first: dict[str, Any], second: dict[str, Any], a: str, b: str) -> list[str]:
    """Return the differences between fields that have no effect, a sentence each."""
    names = [*first, *(name for name in second if name not in first)]
    return [
        f"{name}: {first.get(name)} in {a}, {second.get(name)} in {b}"
        for name in names
        if name != "layout" and first.get(name) != second.get(name)
    ]

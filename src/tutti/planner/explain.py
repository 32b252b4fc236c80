"""A Choice for a reader: sentences, and the rows of a table."""

from dataclasses import dataclass

from tutti.config.plan import Plan, SyncPlan
from tutti.cost_model.words import count, nbytes, seconds
from tutti.planner.choice import Alternative, Choice, Coverage, Totals
from tutti.planner.objectives import duration, money, shown_value
from tutti.planner.words import mesh_words, settings_words


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table of plans. Empty texts where there is no prediction.

    `mesh` and `settings`: the plan in words; `value`: what the objective compares, in words.
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


def rows(choice: Choice) -> tuple[Row, ...]:
    """The chosen plan, then the others in the order of the choice."""
    chosen = Alternative(plan=choice.best, prediction=choice.prediction, reason="chosen", totals=choice.totals)
    return (
        _row(choice, chosen, chosen=True),
        *(_row(choice, other, chosen=False) for other in choice.alternatives),
    )


def _row(choice: Choice, one: Alternative, *, chosen: bool) -> Row:
    plan, prediction = one.plan, one.prediction
    value = shown_value(choice.request, one.totals, prediction) if one.totals and prediction else ""
    return Row(
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
        reason=one.reason,
    )


def explain(choice: Choice) -> str:
    """The choice in plain words: what was chosen, what it is predicted to cost, and what the remarks say."""
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
        *whole_words(choice.totals),
        *choice.remarks,
        *choice.changes,
        *([_searched(choice.coverage)] if choice.coverage is not None and choice.coverage.left else []),
    ]
    return "\n".join(lines) + "\n"


def _of_ranks(plan: Plan) -> str:
    """Whose memory a prediction's is: of stages, or of ranks with unequal shares or parts, that of the fullest one."""
    unequal = plan.shares or plan.split_weights or plan.degree("stage") > 1
    return "on the fullest rank" if unequal else "for each rank"


def _ranks(plan: Plan) -> str:
    settings, mesh = settings_words(plan), mesh_words(plan)
    if mesh in ("1 rank", f"replicate {plan.world_size}"):
        return count(plan.world_size, "rank") + (f" ({settings})" if plan.sync != SyncPlan() and settings else "")
    return f"{count(plan.world_size, 'rank')} as {mesh}" + (f" ({settings})" if settings else "")


def whole_words(totals: Totals | None) -> tuple[str, ...]:
    """The whole training in one sentence; one step where nobody said how long training is, and prices or powers are
    known; else nothing."""
    if totals is None or (totals.steps is None and totals.cost is None and totals.energy_kwh is None):
        return ()
    parts = [f"{totals.device_hours:,.4g} device-hours"]
    if totals.steps is not None:
        parts.insert(0, f"{duration(totals.time_s)} for {count(totals.steps, 'step')}")
    if totals.cost is not None:
        parts.append(f"a cost of {money(totals.cost)}")
    if totals.energy_kwh is not None:
        parts.append(f"{totals.energy_kwh:,.4g} kWh at the devices' full power")
    said = {"predicted": "", "measured": "; the number of steps follows from a run's measured noise scale"}
    note = said.get(totals.evidence, f"; the number of steps is {totals.evidence}")
    if totals.steps is None:
        return (f"A step: {', '.join(parts)}; --samples or --epochs say how long training is",)
    return (f"The whole training: {', '.join(parts)}{note}",)


def _searched(coverage: Coverage) -> str:
    """What the search left open."""
    return (
        f"{coverage.costed:,} plans were predicted, {coverage.too_slow + coverage.too_large:,} ruled out by bounds, "
        f"{coverage.left:,} left: none of those can be better by more than {coverage.gap:.0%}"
    )

"""A Choice for a reader: sentences, and the rows of a table."""

from dataclasses import dataclass

from tutti.plan.choice import Choice
from tutti.predict.words import count, nbytes, seconds
from tutti.spec.plan import Plan
from tutti.spec.prediction import Prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table of plans. Empty texts where there is no prediction."""

    chosen: bool
    ranks: int
    microbatches: int
    precision: str
    shares: str
    step: str
    exposed: str
    memory: str
    fits: bool
    reason: str


def rows(choice: Choice) -> tuple[Row, ...]:
    """The chosen plan, then the others in the order of the choice."""
    return (
        _row(choice.best, choice.prediction, "chosen", chosen=True),
        *(_row(other.plan, other.prediction, other.reason, chosen=False) for other in choice.alternatives),
    )


def _row(plan: Plan, prediction: Prediction | None, reason: str, *, chosen: bool) -> Row:
    return Row(
        chosen=chosen,
        ranks=plan.world_size,
        microbatches=plan.batch.num_microbatches,
        precision=plan.precision,
        shares="by speed" if plan.shares else "equal",
        step=seconds(prediction.step_time_s.value) if prediction else "",
        exposed=seconds(prediction.phases["exposed_communication"]) if prediction else "",
        memory=nbytes(prediction.memory.total) if prediction else "",
        fits=prediction.fits if prediction else False,
        reason=reason,
    )


def explain(choice: Choice) -> str:
    """The choice in plain words: what was chosen, what it is predicted to cost, and what the remarks say."""
    plan, prediction = choice.best, choice.prediction
    time = prediction.step_time_s
    batch = plan.batch
    lines = [
        f"{choice.model} on {choice.cluster}: {count(plan.world_size, 'rank')}, "
        f"{count(batch.num_microbatches, 'microbatch')}, precision {plan.precision}, global batch "
        f"{batch.global_batch_size} {batch.unit}",
        f"Predicted step {seconds(time.value)} ({seconds(time.low)} to {seconds(time.high)}), "
        f"{prediction.throughput_per_s:,.0f} {batch.unit}/s; memory {nbytes(prediction.memory.total)} for each rank",
        *choice.remarks,
    ]
    return "\n".join(lines) + "\n"

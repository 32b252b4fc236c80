"""Checks the loss of a step on all ranks: it is finite, and not far above those before it.

All ranks read the same totals, so all of them decide the same without a message.
"""

import statistics
from collections.abc import Sequence
from types import CodeType

from tutti.errors import TrainingError
from tutti.trainer.finite_gradients import REMEDY, nonfinite_kind, note_skipped, parameters_as_after
from tutti.trainer.guard.findings import code_of
from tutti.trainer.nonfinite_origin import Origin, find_origins, named_samples
from tutti.trainer.run_state import Run
from tutti.trainer.step_message import StepMessage

_WINDOW, _FEWEST = 50, 10
"""Losses whose median is compared with, and how many there must be before a loss is judged."""

_MOST_IN_A_ROW = 20
"""Skipped in a row, so many losses above the limit come from the parameters, not from batches."""


def check_loss_total(run: Run, message: StepMessage, totals: Sequence[float]) -> bool:
    """Return whether the loss of the global batch is finite on all ranks, and below the Job's limit. Collective.

    Args:
        run: the run.
        message: what this rank has said of itself in the totals.
        totals: the all-reduced loss, what it is a mean over, and whether each rank's part is not finite.

    Raises:
        TrainingError: it is not and the Job says on_nonfinite = "stop", or it has nothing to average over.
    """
    (total, count), step = totals[:2], message.place.step
    bad = [rank for rank, flag in enumerate(message.flags(totals)) if flag % 2]
    if not bad and count <= 0:
        raise TrainingError(
            f"step {step}: the loss of the global batch has nothing to average over (its count is {count}); leave out "
            "samples in which no token counts"
        )
    mean = total / count if count > 0 else float("nan")
    above = "" if bad else _above_limit(run, message, mean)
    if not bad and not above:
        return True
    stops = run.settings.on_nonfinite == "stop"
    origins = find_origins(run, message, of_gradients=False) if stops or run.loop.guard.may_locate() else []
    if above:
        sentence, cause = _describe_above(message, above, origins), "Lower the learning rate, or raise loss_limit"
    else:
        sentence, cause = _describe_nonfinite(message, mean, bad, origins), REMEDY
    if stops:
        run.loop.statistics.restore()
        raise TrainingError(f"{sentence}; {parameters_as_after(step - 1)}. {cause}")
    note_skipped(run, message.place.step, sentence)
    return False


def _describe_nonfinite(message: StepMessage, loss: float, bad: list[int], origins: Sequence[Origin]) -> str:
    """Name the step, the ranks, the module and the samples of a loss that is not finite."""
    where = f"rank {bad[0]}" if len(bad) == 1 else f"ranks {', '.join(map(str, bad))}"
    located = next((rank for rank in bad if origins and origins[rank].words), bad[0])
    located = next((rank for rank in bad if origins and origins[rank].samples), located)  # norms spread it over ranks
    origin = origins[located] if origins else Origin()
    samples = origin.samples or message.samples_of(located)
    of_rank = f" of rank {located}" if len(bad) > 1 else ""
    words = f"; {origin.words}" if origin.words else ""
    named = f"; samples{of_rank}: {named_samples(samples)}" if samples else ""
    return f"the loss is {nonfinite_kind(loss != loss)} at step {message.place.step} on {where}{words}{named}"


def _describe_above(message: StepMessage, above: str, origins: Sequence[Origin]) -> str:
    """Name the step, the rank with the largest loss, and its samples."""
    means = {rank: sum(each.losses) / len(each.losses) for rank, each in enumerate(origins) if each.losses}
    sentence = f"the loss at step {message.place.step} {above}"
    if not means:
        batch = [int(number) for number in message.indices]
        return f"{sentence}; samples of the batch: {named_samples(batch)}" if batch else sentence
    rank = max(means, key=means.__getitem__)
    samples = message.samples_of(rank)
    named = f"; samples of rank {rank}: {named_samples(samples)}" if samples else ""
    return f"{sentence}; it is largest on rank {rank} ({means[rank]:.4g}){named}"


def _above_limit(run: Run, message: StepMessage, loss: float) -> str:
    """Return a clause that says how far a loss is above the limit; empty if it is not, and then note it.

    Raises:
        TrainingError: so many losses in a row were above it that batches cannot be the cause.
    """
    factor = run.settings.loss_limit
    if factor is None:
        return ""
    name = _name_of(message)
    recent = run.state.progress.recent_losses.setdefault(name, [])
    above, loss_of_step = run.loop.guard.above_limit, f"{name}#{message.place.call}"  # a step may have several
    if len(recent) >= _FEWEST:
        median = statistics.median(recent)
        if loss > median + (factor - 1) * abs(median):
            above[loss_of_step] = above.get(loss_of_step, 0) + 1
            if above[loss_of_step] > _MOST_IN_A_ROW:
                run.loop.statistics.restore()
                raise TrainingError(
                    f"the loss was above loss_limit in {above[loss_of_step]} steps in a row, the last of which is step "
                    f"{message.place.step} ({loss:.4g}, the median before them is {median:.4g}), so the parameters "
                    "are the cause, not the batches; resume from an earlier checkpoint with a lower learning rate"
                )
            return f"is {loss:.4g}, above {factor:g} times the median of the {len(recent)} before it ({median:.4g})"
    above.pop(loss_of_step, None)
    recent.append(loss)
    del recent[:-_WINDOW]
    return ""


def _name_of(message: StepMessage) -> str:
    """A name of the loss function, the same after a resume; a script may alternate between several."""
    code = code_of(message.computed.loss) if message.computed is not None else None
    return f"{code.co_qualname}:{code.co_firstlineno}" if isinstance(code, CodeType) else str(message.place.call)

"""Find the likely cause of the first difference, from what was recorded around it: one small rule per cause.

Rules are tried in order. Most rules look for specific evidence: losses that add up, moments that are equal on every
rank, a learning rate in the ratio of the numbers of ranks. Some only look at the stage, because it allows one cause, or
because all more specific rules of this stage come before them. A difference that no rule explains gets a general cause
that depends only on its stage.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from tutti.config.verdict import Cause, TensorDifference
from tutti.verification.alignment import in_double
from tutti.verification.compare_inputs import differing_samples, ranks_padded_otherwise, samples_equal
from tutti.verification.compare_recordings import FirstDifference, StepRecordings
from tutti.verification.recording import LossRecord, MicrobatchRecord
from tutti.verification.tolerance import number_difference, rms


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferenceCase:
    """The evidence that the rules examine.

    Attributes:
        first_difference: the first tensor that differs.
        recordings: recordings of the step of the difference; None if the difference is not in a step.
        world_size: number of ranks that were compared with one device.
        later: the first difference of each later step.
        repeated: whether both recordings are runs of one device.
    """

    first_difference: FirstDifference
    recordings: StepRecordings | None
    world_size: int
    later: tuple[FirstDifference, ...] = ()
    repeated: bool = False

    @property
    def difference(self) -> TensorDifference:
        """The tensor that differs first."""
        return self.first_difference.difference

    @property
    def stage(self) -> str:
        return self.difference.stage

    @property
    def where(self) -> str:
        """The module that differs, as text."""
        return f"module {self.difference.module!r}" if self.difference.module else "the script"

    @property
    def microbatches(self) -> Iterator[MicrobatchRecord]:
        """All microbatches of the step, on one device and on every rank."""
        if self.recordings is not None:
            for step in (self.recordings.reference, *self.recordings.ranks):
                yield from step.microbatches

    @property
    def precedes_draws(self) -> bool:
        """Whether the difference is in a module call that ended before random numbers were drawn that may differ."""
        call = self.first_difference.call
        drawing = [microbatch for microbatch in self.microbatches if microbatch.draw_at is not None]
        return call is not None and all(
            call in [other.key for other in microbatch.calls[: microbatch.draw_at]] for microbatch in drawing
        )


Rule = Callable[[DifferenceCase], Cause | None]

INCOMPARABLE = frozenset({"random_outside_torch", "random_not_comparable", "collate_draws", "batch_draws"})
"""Kinds of causes that make no program wrong: ranks and one device draw different random numbers."""


def diagnose(case: DifferenceCase) -> Cause:
    """Return the likely cause: that of the first rule that finds its evidence, or else a general one for the stage."""
    causes = (rule(case) for rule in RULES)
    cause = next((cause for cause in causes if cause is not None), _unexplained(case))
    unread = case.first_difference.unread
    if case.stage not in ("forward", "loss", "gradient") or not unread or cause.kind in INCOMPARABLE:
        return cause
    return replace(
        cause,
        sentence=f"{cause.sentence}. It may also be collate_fn, or what the script does to a batch before the step: "
        f"{', '.join(unread[:3])} could not be compared, though the samples are equal",
    )


def _unexplained(case: DifferenceCase) -> Cause:
    kind, sentence, remedy = _BY_STAGE.get(case.stage, _BY_STAGE["forward"])
    return Cause(kind=kind, sentence=sentence.format(where=case.where), remedy=remedy)


_DETERMINISM_REMEDY = (
    "make forward, loss and update depend only on the samples, the parameters and torch's random numbers"
)


_BY_STAGE: dict[str, tuple[str, str, str]] = {
    "forward": (
        "forward_differs",
        "{where} computes different values on ranks than on one device",
        _DETERMINISM_REMEDY,
    ),
    "loss": ("loss_differs", "the loss differs though the model's outputs agree", _DETERMINISM_REMEDY),
    "gradient": (
        "gradient_changed_locally",
        "a rank's gradient of {where} depends on its share of the samples although outputs and losses agree: a custom "
        "backward or hooks change gradients before they are reduced",
        "leave gradients to autograd, and clip with Job(clip_norm=...)",
    ),
    "gradient used": (
        "gradient_changed_after_averaging",
        "the script changes gradients between forward_backward and update, in a way that depends on the rank or on "
        "the number of ranks, first in {where}",
        "do not scale or reduce gradients: tutti has already reduced them to the mean over the global batch",
    ),
    "hyper-parameter": (
        "settings_depend_on_ranks",
        "a setting of the optimizer depends on the rank or on the number of ranks",
        "use the same optimizer settings on every rank; choose them for the global batch",
    ),
    "parameter": (
        "update_differs",
        "gradients and settings agree, but {where} differs after the update: the optimizer itself depends on the "
        "rank, or is not deterministic",
        "make the optimizer's step depend only on gradients and settings",
    ),
    "optimizer state": (
        "optimizer_state_differs",
        "the optimizer's state for {where} differs between ranks and one device",
        "make the optimizer's state depend only on gradients and settings",
    ),
    "between steps": (
        "changed_between_steps",
        "between two steps the script changes {where} in a way that depends on the rank or on the number of ranks",
        "make such changes equally on every rank, from the same numbers",
    ),
    "evaluation": (
        "evaluation_differs",
        "the result of an evaluation depends on how samples are divided into batches: a metric or loss that is not a "
        "mean over samples, padding that changes outputs, or a forward that mixes samples in evaluation mode",
        "return one value per sample or tutti.Weighted(total, count) from metrics, pass those of all samples as "
        "whole={...}, and mask padding",
    ),
}


def foreign_random(case: DifferenceCase) -> Cause | None:
    """Find random numbers that forward or loss drew from generators other than torch's default."""
    sources = dict.fromkeys(source for microbatch in case.microbatches for source in microbatch.foreign)
    if case.stage not in ("forward", "loss", "gradient") or not sources or case.precedes_draws:
        return None
    return Cause(
        kind="random_outside_torch",
        sentence=f"forward draws random numbers from {' and '.join(sources)}, which tutti does not seed "
        f"for each sample: ranks draw other numbers than one device; the first effect is in {case.where}",
        remedy="draw them with torch's own functions and without a generator argument (torch.rand_like, torch.randn)",
    )


def not_repeatable(case: DifferenceCase) -> Cause | None:
    """Find results that differ between two runs on one device."""
    if not case.repeated:
        return None
    if case.stage in ("seed", "initial state"):
        return Cause(
            kind="different_seed",
            sentence=f"{case.where} starts from different values in every run of the script, even on one device: they "
            "are drawn from a generator that is not seeded, or is seeded from the clock or the process id",
            remedy="build the model after the Job, which seeds torch, and draw its initial values with torch",
        )
    if case.stage in ("batch size", "data order", "input"):
        return Cause(
            kind="unseeded_data",
            sentence="the samples differ when the script is run again on one device: the data set, sampler or "
            "collate_fn draws from a generator that is not seeded, or depends on the clock or the process",
            remedy="draw with random, numpy.random or torch's functions inside __getitem__: tutti seeds those for "
            "each sample; do not make generators without a seed",
        )
    return Cause(
        kind="non_deterministic_op",
        sentence=f"non-deterministic op in {case.where}: two runs on one device give different results (random "
        "numbers from a generator that is not seeded, the clock, or a kernel that adds in no fixed order)",
        remedy="draw random numbers with torch's functions and no generator of your own; find such kernels with "
        "torch.use_deterministic_algorithms(True)",
    )


def different_seed(case: DifferenceCase) -> Cause | None:
    """Blame the seed, where seeds or initial values differ."""
    ranks = format_ranks(case.difference.ranks)
    if case.stage == "seed":
        return Cause(
            kind="different_seed",
            sentence=f"the Job's seed depends on the rank: on {ranks} it differs from one device's, and so do the "
            "order of samples and the initial values",
            remedy="give every rank the same Job(seed=...); dropout and augmentation are independent on ranks anyway",
        )
    if case.stage != "initial state":
        return None
    return Cause(
        kind="different_seed",
        sentence=f"different seed: on {ranks} the initial values of {case.where} differ from one device's",
        remedy="do not seed by rank before the model is built; build it after the Job, which seeds torch equally on "
        "every rank",
    )


def batch_size(case: DifferenceCase) -> Cause | None:
    """Blame a global batch size that depends on the number of ranks, where batch sizes differ."""
    if case.stage != "batch size":
        return None
    return Cause(
        kind="batch_depends_on_ranks",
        sentence=f"global_batch_size depends on the number of ranks: on {case.world_size} ranks it differs from one "
        "device's, so the two runs train differently",
        remedy="give the size of the whole batch, not a rank's share times the number of ranks; tutti divides it",
    )


def data_order(case: DifferenceCase) -> Cause | None:
    """Blame the sampler or the data set, where ranks disagree on the samples of the global batch or their order."""
    if case.stage != "data order":
        return None
    return Cause(
        kind="data_order",
        sentence=f"data order: on {format_ranks(case.difference.ranks)} the samples of the global batch, or their "
        "order, differ from one device's",
        remedy="pass the whole data set, and no sampler that divides it among ranks or depends on the rank; tutti "
        "divides the data",
    )


def collate_draws(case: DifferenceCase) -> Cause | None:
    """Find a collate_fn that draws random numbers, where the samples agree and the batches do not."""
    if case.stage not in ("input", "forward", "loss", "gradient") or case.recordings is None or case.repeated:
        return None
    steps = (case.recordings.reference, *case.recordings.ranks)
    records = [step.collated for step in steps if step.collated is not None and step.collated.draws]
    equal = samples_equal(case.recordings.reference, case.recordings.ranks)
    if not records or not equal or (case.stage != "input" and not case.first_difference.unread):
        return None
    name, sources = records[0].collate, " and ".join(dict.fromkeys(draw for r in records for draw in r.draws))
    return Cause(
        kind="collate_draws",
        sentence=f"the samples are equal, but collate_fn ({name}) draws random numbers from {sources} for a whole "
        "batch, and ranks collate other groups of samples than one device, so they draw other numbers; what is "
        "computed of the batches cannot be compared",
        remedy="draw in the data set's __getitem__, which tutti seeds for each sample, or verify with a collate_fn "
        "that draws nothing",
    )


def batch_draws(case: DifferenceCase) -> Cause | None:
    """Find a script that draws random numbers between the loader and the step, where samples agree but not batches."""
    if case.stage not in ("input", "forward", "loss", "gradient") or case.recordings is None or case.repeated:
        return None
    steps = (case.recordings.reference, *case.recordings.ranks)
    sources = dict.fromkeys(source for step in steps for source in step.draws)
    equal = samples_equal(case.recordings.reference, case.recordings.ranks)
    if not sources or not equal or (case.stage != "input" and not case.first_difference.unread):
        return None
    return Cause(
        kind="batch_draws",
        sentence=f"the samples are equal, but between the loader and the step the script draws random numbers from "
        f"{' and '.join(sources)} for a whole batch (noise, mixing of samples), and ranks draw other numbers than one "
        "device; what is computed of the batches cannot be compared",
        remedy="draw in the data set's __getitem__, or with torch's functions in the model or the loss, where ranks "
        "get their samples' numbers; or verify without that randomness",
    )


def sample_values(case: DifferenceCase) -> Cause | None:
    """Blame the data set or `collate_fn`, where samples with equal indices have different values."""
    if case.stage != "input" or case.recordings is None:
        return None
    where, tensor = format_ranks(case.difference.ranks), case.difference.tensor
    differing = differing_samples(case.recordings.reference, case.recordings.ranks)
    if differing:
        index = case.recordings.reference.indices[differing[0]]
        return Cause(
            kind="samples_depend_on_rank",
            sentence=f"the same samples have different values on {where} than on one device ({tensor}), first sample "
            f"{index} of the data set, before collate_fn: the data set depends on the rank or on the process",
            remedy="make a sample depend only on its index and on the seeds that tutti sets for it",
        )
    if samples_equal(case.recordings.reference, case.recordings.ranks):
        return Cause(
            kind="samples_depend_on_rank",
            sentence=f"the samples are equal, but collate_fn, or what the script does to a batch before the step, "
            f"gives them different values on {where} than on one device ({tensor}): it depends on the rank, on the "
            "process, or on the other samples of the batch",
            remedy="make collate_fn depend only on each sample; move work on whole batches into the model",
        )
    return Cause(
        kind="samples_depend_on_rank",
        sentence=f"the same samples have different values on {where} than on one "
        f"device ({tensor}): the data set or collate_fn depends on the rank, on the process, or on "
        "the other samples of the batch",
        remedy="make a sample depend only on its index and on the seeds that tutti sets for it; move work on whole "
        "batches into the model",
    )


def unaligned_random(case: DifferenceCase) -> Cause | None:
    """Find random operators whose draws verification cannot match between ranks and one device."""
    names = dict.fromkeys(name for microbatch in case.microbatches for name in microbatch.unaligned)
    if case.stage not in ("forward", "loss", "gradient") or not names or case.precedes_draws:
        return None
    return Cause(
        kind="random_not_comparable",
        sentence=f"{', '.join(names)} draw{'s' if len(names) == 1 else ''} random numbers that cannot be made to agree "
        f"between one device and ranks; from {case.where} onwards, values cannot be compared",
        remedy="verify with that randomness turned off, or draw numbers for each sample with torch.rand",
    )


def rows_differ(case: DifferenceCase) -> Cause | None:
    """Blame a module whose rows are not samples, where they differ in any order and change the module around it."""
    if case.stage != "forward" or case.first_difference.of_samples:
        return None
    return Cause(
        kind="rows_differ",
        sentence=f"{case.where} computes other rows on ranks than on one device, in whatever order they are compared "
        "(its rows are not samples: tokens grouped by expert, say)",
        remedy="make each row depend only on its token and the parameters, not on the rank or on the other rows",
    )


def padding(case: DifferenceCase) -> Cause | None:
    """Find padding that changes the result, where each rank pads to its own longest sample."""
    if case.stage not in ("forward", "loss", "gradient") or case.recordings is None:
        return None
    otherwise_padded = ranks_padded_otherwise(case.recordings.reference, case.recordings.ranks)
    differing = case.difference.ranks
    if not otherwise_padded or (case.stage == "forward" and not set(differing) <= set(otherwise_padded)):
        return None
    return Cause(
        kind="padding",
        sentence=f"samples are padded less on {format_ranks(otherwise_padded)} than on one device (to the longest of "
        f"fewer samples), and {case.where} computes different values for real tokens when there is more padding",
        remedy="mask padding wherever tokens are mixed or averaged (attention masks, packed sequences, masked "
        "means), or pad every sample to one length",
    )


def control_flow(case: DifferenceCase) -> Cause | None:
    """Find ranks that call other modules than one device, or a fixed set of ranks that differs while others agree."""
    if case.stage != "forward" or case.recordings is None:
        return None
    pairs = case.first_difference.alignment or []
    agreeing = [pair.rank for pair in pairs if pair.rank not in case.difference.ranks]
    calls = [{call.key for call in microbatch.calls} for microbatch in case.microbatches if microbatch.share.count]
    same_calls = all(keys == calls[0] for keys in calls)
    same_ranks_later = all(
        later.difference.ranks == case.difference.ranks for later in case.later if later.difference.stage == "forward"
    )
    if same_calls and not (agreeing and same_ranks_later):
        return None
    ranks = format_ranks(case.difference.ranks)
    skipped = next((key[0] for keys in calls for key in sorted(calls[0] - keys)), None)
    if skipped is not None:
        return Cause(
            kind="rank_dependent_forward",
            sentence=f"forward takes another branch on some ranks than on one device (module {skipped!r} is not called "
            f"there), and {case.where} computes other values on {ranks}: the branch depends on the rank, or on which "
            "samples are in the batch",
            remedy="choose for each sample (torch.where, or rows by index), not for all samples of a batch at once, "
            "nor by the rank",
        )
    return Cause(
        kind="rank_dependent_forward",
        sentence=f"forward computes something different on {ranks} than on the other ranks and on one device, first "
        f"in {case.where}: its control flow or values depend on the rank",
        remedy="make the model's forward independent of the rank, the environment and the world size",
    )


def local_statistics(case: DifferenceCase) -> Cause | None:
    """Find ranks that normalised their own rows: the mean or mean square of the rows is then equal on every rank."""
    if case.stage != "forward" or not case.first_difference.alignment or not moments_agree(case):
        return None
    return Cause(
        kind="local_batch_statistics",
        sentence=f"local BatchNorm statistics: {case.where} normalises over the samples of each rank's share, not "
        "over the whole batch",
        remedy="use torch.nn.BatchNorm*, whose statistics tutti computes over all ranks, or normalise each sample on "
        "its own (LayerNorm, GroupNorm)",
    )


def buffer_in_forward(case: DifferenceCase) -> Cause | None:
    """Find a module whose output uses a buffer that each rank updates from its local batch."""
    if case.stage != "forward" or case.recordings is None:
        return None
    names = [
        name
        for name in case.recordings.reference.after.buffers
        if case.recordings.owner(name) == case.difference.module
    ]
    for name in names:
        expected = case.recordings.reference.after.buffers[name]
        others = [step.after.buffers.get(name) for step in case.recordings.ranks]
        if any(other is None or not buffers_equal(expected, other) for other in others):
            return _buffer_cause(case, name)
    return None


def buffer(case: DifferenceCase) -> Cause | None:
    """Blame a buffer that differs after the update: each rank updates it from its own samples."""
    return _buffer_cause(case, case.difference.tensor) if case.stage == "buffer" else None


def coupled_forward(case: DifferenceCase) -> Cause | None:
    """Blame an output that depends on the other samples of the batch, where no earlier rule explains the difference."""
    if case.stage != "forward" or case.first_difference.alignment is None:
        return None
    return Cause(
        kind="coupled_samples",
        sentence=f"in {case.where} the output for a sample depends on the other samples of the rank's share "
        "(statistics, attention or ranking over the batch)",
        remedy="compute a sample's output only from that sample, or gather what is needed from all ranks",
    )


def sum_loss(case: DifferenceCase) -> Cause | None:
    """Find a loss that is a sum, or is divided by the number of ranks: the ranks' losses add up to one device's."""
    if case.stage != "loss":
        return None
    losses = mean_losses(case)
    divided = not losses
    if divided:  # torch's own functions have taken the means, so that the loss is no sum over samples
        losses = mean_losses(case, counted=True)
    add_up = all(number_difference(expected, sum(ranks)) < LOSS_TOLERANCE for expected, ranks in losses)
    several = any(len(ranks) > 1 for _, ranks in losses)
    if not (losses and add_up and several):
        return None
    if divided:
        return Cause(
            kind="loss_divided_by_ranks",
            sentence="the loss is divided by the number of ranks: the ranks' losses add up to one device's",
            remedy="return the mean over samples, undivided: tutti averages over the samples of all ranks",
        )
    return Cause(
        kind="loss_is_a_sum",
        sentence="the loss is a sum over samples, or is divided by the number of ranks: the ranks' losses add up to "
        "one device's, where a mean was expected, so the loss and the step depend on how the batch is divided",
        remedy="return the mean over samples (reduction='mean'), undivided, or tutti.Weighted(total=sum, count=number "
        "of terms)",
    )


def weighted_loss(case: DifferenceCase) -> Cause | None:
    """Blame the total or count of a `Weighted`, where the loss differs and is one."""
    weighted = case.recordings is not None and any(
        microbatch.loss is not None and microbatch.loss.count is not None and microbatch.loss.stated
        for microbatch in case.recordings.reference.microbatches
    )
    if case.stage != "loss" or not weighted:
        return None
    return Cause(
        kind="weighted_does_not_add_up",
        sentence="the loss is a tutti.Weighted whose total or count over the whole batch is not the sum over its parts",
        remedy="return total=sum over this part's tokens, count=number of those tokens",
    )


def mean_of_means(case: DifferenceCase) -> Cause | None:
    """Find a loss that is a mean over items whose number differs between ranks.

    One device's loss then lies among the ranks' losses, but is not their mean by samples.
    """
    if case.stage != "loss":
        return None
    pairs = [(expected, ranks) for expected, ranks in mean_losses(case) if len(ranks) > 1]
    slack = [LOSS_TOLERANCE * abs(expected) for expected, _ in pairs]
    inside = [min(r) - s <= expected <= max(r) + s for (expected, r), s in zip(pairs, slack, strict=True)]
    if not pairs or not all(inside):
        return None
    return Cause(
        kind="mean_over_ranks",
        sentence="mean over ranks instead of samples: the loss is a mean over items (tokens, masked entries, ...) "
        "whose number differs between ranks, so the mean of the ranks' means is not the global mean",
        remedy="return tutti.Weighted(total=sum of the losses, count=number of items) instead of the mean; for a sum "
        "of several means, call job.forward_backward once for each",
    )


def coupled_loss(case: DifferenceCase) -> Cause | None:
    """Blame a loss that couples samples, where no earlier rule explains the difference."""
    if case.stage != "loss":
        return None
    return Cause(
        kind="coupled_samples",
        sentence="the loss couples samples: over the whole batch it is not the mean of the losses of the ranks' "
        "shares (contrastive pairs, a term squared after averaging, a ranking within the batch, several means over "
        "different rows)",
        remedy="compare each sample with those of all ranks (gather the features), or choose a loss that is a mean "
        "over samples; num_microbatches=1 alone does not help; for a sum of several means, call job.forward_backward "
        "once for each",
    )


def local_clipping(case: DifferenceCase) -> Cause | None:
    """Find hooks on gradients, or operators of gradient clipping that ran within backward."""
    if case.stage != "gradient" or case.recordings is None:
        return None
    operators = dict.fromkeys(name for microbatch in case.microbatches for name in microbatch.backward_ops)
    hooked = case.recordings.head.hooked
    if not operators and not hooked:
        return None
    what = f"hooks on {', '.join(hooked[:3])}" if hooked else f"clipping operators in backward ({', '.join(operators)})"
    return Cause(
        kind="local_clipping",
        sentence=f"gradients are changed on each rank (hooks or clipping) before they are reduced: {what}; outputs and "
        f"loss agree, but the gradient of {case.where} does not",
        remedy="let the Job clip the reduced gradient, Job(clip_norm=...), and remove the hooks",
    )


def learning_rate(case: DifferenceCase) -> Cause | None:
    """Find a learning rate that differs between ranks and one device: set differently, or by a scheduler."""
    if case.stage != "learning rate" or case.recordings is None:
        return None
    reference, rank_record = case.recordings.reference, case.recordings.ranks[(case.difference.ranks or (0,))[0]]
    for name, rate in reference.hyper_parameters.items():
        rank_rate = rank_record.hyper_parameters.get(name, 0.0)
        if not name.endswith(".lr") or not rate or rate == rank_rate:
            continue
        if reference.step == 0:
            return Cause(
                kind="learning_rate_depends_on_ranks",
                sentence=f"the learning rate is {rank_rate:g} on {case.world_size} ranks and {rate:g} on one device, "
                f"{rank_rate / rate:g} times as large: it depends on the number of ranks, but the global batch does "
                "not",
                remedy="give the learning rate of the global batch; state how it scales with the batch in "
                "Job(lr_rule=...)",
            )
        return Cause(
            kind="scheduler_depends_on_ranks",
            sentence=f"the learning rate of step {reference.step + 1} is {rank_rate:g} on {case.world_size} ranks and "
            f"{rate:g} on one device: the scheduler advances a different number of times per step",
            remedy="pass the scheduler to job.prepare(scheduler=...), which advances it once per step, and do not "
            "step it yourself",
        )
    return None


RULES: tuple[Rule, ...] = (
    foreign_random,
    not_repeatable,
    different_seed,
    batch_size,
    data_order,
    collate_draws,
    batch_draws,
    sample_values,
    unaligned_random,
    rows_differ,
    padding,
    local_statistics,
    buffer_in_forward,
    control_flow,
    coupled_forward,
    sum_loss,
    weighted_loss,
    mean_of_means,
    coupled_loss,
    local_clipping,
    learning_rate,
    buffer,
)


def _buffer_cause(case: DifferenceCase, name: str) -> Cause:
    return Cause(
        kind="unsynchronised_buffer",
        sentence=f"unsynchronised buffer: {name.rpartition('.')[2]!r} of {case.where} is updated from each rank's "
        "own samples, so its values already differ between ranks",
        remedy='compute the module on the samples of all ranks with tutti.synchronized(module, "gather"), or combine '
        'what it writes with "mean" or "sum"; torch.nn.BatchNorm* is synchronised anyway',
    )


LOSS_TOLERANCE = 1e-4
"""Largest relative difference of equal losses. The rules distinguish losses that differ by percents."""

MOMENT_TOLERANCE = 1e-3
"""Largest difference of equal moments of a module's output, relative to the output's root mean
square (for the mean square: its square).
"""

BUFFER_TOLERANCE = 1e-6
"""Largest relative difference of equal buffers."""


def mean_losses(case: DifferenceCase, *, counted: bool = False) -> list[tuple[float, list[float]]]:
    """Return the recorded losses of every microbatch whose loss is a mean.

    Args:
        case: the difference.
        counted: also return means whose count tutti knows, rather than plain ones only.

    Returns:
        Pairs of one device's loss and the losses of the ranks that have samples.
    """
    if case.recordings is None:
        return []
    losses = []
    heads = case.recordings.heads
    for step, microbatches in enumerate(case.recordings.head.losses):
        for index, (_, loss) in enumerate(microbatches):
            others = [
                head.losses[step][index] for head in heads if step < len(head.losses) and index < len(head.losses[step])
            ]
            expected = _mean_of(loss, counted)
            ranks = [_mean_of(other, counted) for share, other in others if share.count]
            if expected is not None and None not in ranks:
                losses.append((expected, [number for number in ranks if number is not None]))
    return losses


def _mean_of(loss: LossRecord | None, counted: bool) -> float | None:
    """The value of a plain mean, or also of one that is `counted` by tutti itself; None for other losses."""
    if loss is None or (loss.count is not None and (loss.stated or not counted)):
        return None
    return loss.total / loss.count if loss.count else loss.total


def moments_agree(case: DifferenceCase) -> bool:
    """Return whether the mean or mean square over a rank's rows is equal on all ranks although the rows differ."""
    pairs = case.first_difference.alignment or []
    parts = [torch.view_as_real(p.got.resolve_conj()) if p.got.is_complex() else p.got for p in pairs]
    tensors = [part.double() for part in parts if part.dim() and part.numel() > part.shape[-1]]
    if len(tensors) < len(pairs) or any(tensor.isnan().any() for tensor in tensors):
        return False
    scale = rms(tensors)
    for channel in (1, -1, None):
        for power in (1, 2):
            moments = [_moment(tensor, channel, power) for tensor in tensors]
            if all(_moments_equal(moments[0], other, scale**power) for other in moments[1:]) and len(moments) > 1:
                return True
    return False


def _moment(tensor: torch.Tensor, channel: int | None, power: int) -> torch.Tensor:
    """Return the mean of a power of the values, over all dims except the channel dim."""
    if channel is None or tensor.dim() < 2:
        return (tensor**power).mean()
    channel_dim = channel % tensor.dim()
    return (tensor**power).mean([dim for dim in range(tensor.dim()) if dim != channel_dim])


def _moments_equal(first: torch.Tensor, second: torch.Tensor, scale: float) -> bool:
    return first.shape == second.shape and float((first - second).abs().max()) <= MOMENT_TOLERANCE * scale


def buffers_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two buffers agree up to rounding."""
    return first.shape == second.shape and torch.allclose(
        in_double(first), in_double(second), rtol=BUFFER_TOLERANCE, atol=1e-12
    )


def format_ranks(ranks: Sequence[int]) -> str:
    """Format ranks as "rank 1", "ranks 0, 2", or "the ranks" for none."""
    if not ranks:
        return "the ranks"
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"

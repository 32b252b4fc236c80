"""Compare the batches that ranks compute with one device's.

A tensor whose rows are samples is compared row by row. Others depend on which samples are collated together: they are
compared in other readings if the samples themselves are known to be equal, and else left to what is computed of them.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

import torch

from tutti.verification.alignment import AlignedPair, RankShard, RankTensor, having_samples
from tutti.verification.batch_readings import collated_alignments
from tutti.verification.compare_forward import BatchLayout, MicrobatchRecords, TensorGap, measured, smallest_gap
from tutti.verification.grouped_rows import has_row_per_sample
from tutti.verification.recording import StepRecord
from tutti.verification.tolerance import ToleranceChecker, rms

Reading = Literal["rows", "collated", "unread"]
"""How a tensor was compared.

- rows: its rows are samples.
- collated: as indices that count from a rank's first sample, or as rows in another order.
- unread: not compared, because no reading fits and the samples are equal; or because it has no rows.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputComparison:
    """The comparison of one tensor of the batch, in one microbatch.

    Attributes:
        name: its name.
        reading: how it was compared.
        gap: its difference; None if it could not be compared.
        samples_equal: whether the samples are known to be equal before collate_fn.
    """

    name: str
    reading: Reading
    gap: TensorGap | None
    samples_equal: bool = False


def layout_of(comparisons: Sequence[InputComparison], reference: StepRecord) -> BatchLayout:
    """Return what the comparison of the inputs says about the layout of what is computed of them."""
    other = [c for c in comparisons if c.samples_equal and c.reading != "rows"]
    values = (reference.inputs.get(name) for name in dict.fromkeys(comparison.name for comparison in other))
    in_any_order = (c.gap is not None and any(pair.rank is None for pair in c.gap.alignment) for c in other)
    return BatchLayout(
        values=tuple(value for value in values if value is not None and value.dim()), reordered=any(in_any_order)
    )


def compare_inputs(
    reference: StepRecord, ranks: Sequence[StepRecord], rank_shards: Sequence[RankShard], checker: ToleranceChecker
) -> Iterator[InputComparison]:
    """Compare every tensor of the batch, microbatch by microbatch.

    Args:
        reference: the step on one device.
        ranks: the step on every rank.
        rank_shards: what each rank holds of the model.
        checker: holds the tolerance.
    """
    equal, differing = samples_equal(reference, ranks), _ranks_with_other_samples(reference, ranks)
    lists = _lists_of_samples(reference, ranks)
    if differing and not reference.inputs:
        yield InputComparison(name="batch", reading="rows", gap=_infinite(differing))
    for name, whole in reference.inputs.items():
        if _pattern(name) in lists:
            comparison = _listed(name, reference, ranks, checker, equal=equal)
            other = comparison.reading == "unread" and bool(differing)
            yield replace(comparison, reading="rows", gap=_infinite(differing)) if other else comparison
            continue
        for index, microbatch in enumerate(reference.microbatches):
            if microbatch.share.count == 0 or any(name not in r.inputs or index >= len(r.microbatches) for r in ranks):
                yield InputComparison(name=name, reading="unread", gap=None, samples_equal=equal)
                continue
            for group in MicrobatchRecords.of([step.microbatches[index] for step in ranks], rank_shards):
                comparison = _compared(name, index, reference, ranks, group, checker, equal=equal)
                other = comparison.gap is None and whole.dim() > 0 and bool(differing)
                yield replace(comparison, reading="rows", gap=_infinite(differing)) if other else comparison


def samples_equal(reference: StepRecord, ranks: Sequence[StepRecord]) -> bool:
    """Return whether every sample that a rank loaded is known to be one device's sample at its position."""
    expected = reference.digests
    return bool(expected) and all(
        bool(step.digests)
        and all(digest is not None and expected.get(position) == digest for position, digest in step.digests.items())
        for step in ranks
    )


def differing_samples(reference: StepRecord, ranks: Sequence[StepRecord]) -> list[int]:
    """Return the positions in the global batch of samples that are known to differ before collate_fn."""
    expected = reference.digests
    return sorted(
        {
            position
            for step in ranks
            for position, digest in step.digests.items()
            if digest is not None and expected.get(position) not in (None, digest)
        }
    )


def ranks_padded_otherwise(reference: StepRecord, ranks: Sequence[StepRecord]) -> tuple[int, ...]:
    """Return the ranks whose batch has a tensor whose samples have another shape than one device's."""
    return tuple(
        rank
        for rank, step in enumerate(ranks)
        if any(
            name in step.inputs
            and f"{name}.lengths" not in reference.inputs  # packed
            and _is_padded_otherwise(expected, reference, step.inputs[name], step)
            for name, expected in reference.inputs.items()
        )
    )


def _is_padded_otherwise(expected: torch.Tensor, reference: StepRecord, got: torch.Tensor, step: StepRecord) -> bool:
    if got.dim() != expected.dim() or expected.dim() < 2:
        return False
    samples = [sum(m.share.loaded for m in one.microbatches) for one in (reference, step)]
    return any(
        [expected.shape[dim], got.shape[dim]] == samples
        and (*expected.shape[:dim], *expected.shape[dim + 1 :]) != (*got.shape[:dim], *got.shape[dim + 1 :])
        for dim in range(2)
    )


def _ranks_with_other_samples(reference: StepRecord, ranks: Sequence[StepRecord]) -> list[int]:
    return [rank for rank, step in enumerate(ranks) if differing_samples(reference, [step])]


def _infinite(ranks: Sequence[int]) -> TensorGap:
    return TensorGap(gaps=dict.fromkeys(ranks, math.inf), alignment=[])


def _compared(
    name: str,
    index: int,
    reference: StepRecord,
    ranks: Sequence[StepRecord],
    group: MicrobatchRecords,
    checker: ToleranceChecker,
    *,
    equal: bool,
) -> InputComparison:
    """Compare one microbatch of a tensor on the ranks of one mesh position."""
    whole = _rows(reference.inputs[name], reference, index)
    tensors = [
        RankTensor(rank=rank, share=record.share, value=_rows(ranks[rank].inputs[name], ranks[rank], index))
        for rank, record in zip(group.ranks, group.records, strict=True)
    ]
    gap = smallest_gap(whole, tensors, rms([whole]), checker, group.rank_shard)
    near = gap is not None and gap.largest <= checker.tolerance
    if near or not equal:
        reading: Reading = "unread" if gap is None else "rows"
        return InputComparison(name=name, reading=reading, gap=gap, samples_equal=equal)
    loaded = having_samples(tensors)
    sizes = _counted_before([tensor.rank for tensor in loaded], reference, ranks)
    shares = reference.inputs[name], [replace(tensor, value=ranks[tensor.rank].inputs[name]) for tensor in tensors]
    for alignment in chain(collated_alignments(whole, loaded, sizes), collated_alignments(*shares, sizes)):
        other = measured(alignment, rms([whole]))
        if other.largest <= checker.tolerance:
            return InputComparison(name=name, reading="collated", gap=other, samples_equal=True)
    if gap is not None and _has_rows(whole, tensors):
        return InputComparison(name=name, reading="rows", gap=gap, samples_equal=True)
    return InputComparison(name=name, reading="unread", gap=None, samples_equal=True)


def _has_rows(whole: torch.Tensor, tensors: Sequence[RankTensor]) -> bool:
    """Return whether a tensor of real or complex numbers has one row for each sample; integers may be indices."""
    return (whole.is_floating_point() or whole.is_complex()) and has_row_per_sample(whole, tensors)


def _counted_before(order: Sequence[int], reference: StepRecord, ranks: Sequence[StepRecord]) -> list[frozenset[int]]:
    """Return, for each rank, the sizes that the batches of the ranks before it have together: what an index may count.

    Args:
        order: the ranks in order of their samples.
        reference: the step on one device.
        ranks: the step on every rank.
    """
    dims = [(name, dim) for name, tensor in reference.inputs.items() for dim in range(tensor.dim())]
    totals = dict.fromkeys([*dims, ("", 0)], 0)
    sizes = []
    for rank in order:
        sizes.append(frozenset({0, *totals.values()}))
        totals["", 0] += sum(microbatch.share.loaded for microbatch in ranks[rank].microbatches)
        for name, dim in dims:
            tensor = ranks[rank].inputs.get(name)
            if tensor is not None and dim < tensor.dim():
                totals[name, dim] += tensor.shape[dim]
    return sizes


def _pattern(name: str) -> str:
    """Return a name without its positions in lists."""
    return re.sub(r"\[\d+\]", "[]", name)


def _lists_of_samples(reference: StepRecord, ranks: Sequence[StepRecord]) -> frozenset[str]:
    """Return the patterns of names that ranks have in other numbers than one device: lists with entries of samples."""

    def counts(step: StepRecord) -> dict[str, int]:
        patterns = [_pattern(name) for name in step.inputs]
        return {pattern: patterns.count(pattern) for pattern in dict.fromkeys(patterns)}

    expected = counts(reference)
    return frozenset(p for p, count in expected.items() if any(counts(step).get(p, 0) != count for step in ranks))


def _listed(
    name: str, reference: StepRecord, ranks: Sequence[StepRecord], checker: ToleranceChecker, *, equal: bool
) -> InputComparison:
    """Compare a tensor of a list with one entry for each sample with that of the ranks that have the sample."""
    unread = InputComparison(name=name, reading="unread", gap=None, samples_equal=equal)
    names = [other for other in reference.inputs if _pattern(other) == _pattern(name)]
    expected, position = reference.inputs[name], names.index(name)
    pairs = []
    for rank, step in enumerate(ranks):
        own = [other for other in step.inputs if _pattern(other) == _pattern(name)]
        shares = [microbatch.share for microbatch in step.microbatches]
        if len(names) != reference.batch_size or len(shares) != 1 or len(own) != shares[0].loaded:
            return unread
        if 0 <= (index := position - shares[0].start) < shares[0].count:
            pairs.append(AlignedPair(rank=rank, expected=expected, got=step.inputs[own[index]]))
    gap = measured(pairs, rms([expected]))
    padded = any(pair.expected.shape != pair.got.shape for pair in pairs)
    if gap.largest > checker.tolerance and (padded or not equal):
        return unread
    return InputComparison(name=name, reading="rows", gap=gap, samples_equal=equal)


def _rows(value: torch.Tensor, step: StepRecord, index: int) -> torch.Tensor:
    """Return one microbatch's rows of a batch tensor; the whole tensor if it has no row per sample."""
    sizes = [microbatch.share.loaded for microbatch in step.microbatches]
    if value.dim() == 0 or value.shape[0] != sum(sizes):
        return value
    return value.narrow(0, sum(sizes[:index]), sizes[index])

"""Compare the tensors of one device's forward pass with those of the ranks, module call by module call."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch

from tutti.verification.alignment import (
    Alignment,
    MeshPosition,
    RankShard,
    RankTensor,
    batch_alignments,
    guessed_alignments,
    having_samples,
    part_alignments,
    sample_alignments,
)
from tutti.verification.grouped_rows import has_row_per_sample, module_values, row_set_alignments, rows_follow_samples
from tutti.verification.recording import MicrobatchRecord, ModuleCall
from tutti.verification.tolerance import ToleranceChecker, difference, rms

UNSHARDED = RankShard()
"""The shard of a rank whose samples no other rank computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorGap:
    """The difference of one tensor by rank, in the alignment in which it is smallest.

    Attributes:
        gaps: relative difference by rank; the key None stands for all ranks together.
        alignment: the pairs that were compared.
    """

    gaps: dict[int | None, float]
    alignment: Alignment

    @property
    def largest(self) -> float:
        return max(self.gaps.values(), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardTensor:
    """A tensor of the forward pass.

    Attributes:
        module: the module to blame if the tensor differs; "" is the model itself.
        tensor: name of the tensor.
        of_samples: whether its rows may be those of samples; tokens grouped by expert are not.
        call: the call of which it is an output, or an input.
    """

    module: str
    tensor: str
    of_samples: bool = True
    call: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLayout:
    """How a batch depends on which samples are collated together.

    Attributes:
        values: one device's tensors of the batch whose rows are not samples, or are in another order.
        reordered: whether collate_fn sorts the samples.
    """

    values: tuple[torch.Tensor, ...] = ()
    reordered: bool = False

    def has(self, value: torch.Tensor) -> bool:
        """Return whether a tensor is one of the batch that cannot be compared row by row, or may be made of one."""
        if not self.values:
            return False
        indices = not (value.is_floating_point() or value.is_complex())
        return indices or any(value.shape == other.shape and torch.equal(value, other) for other in self.values)


ROWS_OF_SAMPLES = BatchLayout()
"""The layout of a batch whose rows are samples."""


@dataclass(frozen=True, slots=True)
class MicrobatchRecords:
    """One microbatch on the ranks of one mesh position, in order of their samples.

    Attributes:
        ranks, records: the ranks' numbers and their records.
        calls: each rank's module calls by key; the key matches one device's call.
        rank_shard: what the first rank holds of the model.
    """

    ranks: tuple[int, ...]
    records: tuple[MicrobatchRecord, ...]
    calls: tuple[dict[tuple[str, int], ModuleCall], ...]
    rank_shard: RankShard

    @classmethod
    def of(cls, records: Sequence[MicrobatchRecord], rank_shards: Sequence[RankShard]) -> "list[MicrobatchRecords]":
        """Group the records of one microbatch by mesh position.

        Args:
            records: the microbatch on every rank, in order of rank.
            rank_shards: what each rank holds of the model.
        """
        ranks_at: dict[MeshPosition, list[int]] = {}
        for rank, rank_shard in enumerate(rank_shards):
            ranks_at.setdefault(rank_shard.mesh_position, []).append(rank)
        groups = [tuple(sorted(ranks, key=lambda rank: rank_shards[rank].data_index)) for ranks in ranks_at.values()]
        return [
            cls(
                ranks,
                tuple(records[rank] for rank in ranks),
                tuple({call.key: call for call in records[rank].calls} for rank in ranks),
                rank_shards[ranks[0]],
            )
            for ranks in groups
        ]

    def tensors(self, call: ModuleCall, attribute: str, position: int) -> list[RankTensor] | None:
        """Return one tensor of a call on every rank whose samples count.

        Args:
            call: one device's call.
            attribute: "inputs" or "outputs".
            position: index of the tensor among them.

        Returns:
            The tensors in order of rank; None if a rank did not make this call.
        """
        per_sample = self._lists_samples(call, attribute)
        tensors = []
        for rank, record, calls in zip(self.ranks, self.records, self.calls, strict=True):
            if record.share.count == 0:
                continue
            values = getattr(calls[call.key], attribute) if call.key in calls else ()
            index = position - (record.share.start - record.share.slice_start if per_sample else 0)
            if per_sample and not 0 <= index < record.share.count:
                continue
            if index >= len(values) or (not per_sample and self._has_other_count(call, calls[call.key], attribute)):
                return None
            shard = calls[call.key].shards.get((attribute, index))
            tensors.append(RankTensor(rank=rank, share=record.share, value=values[index], shard=shard))
        return tensors

    def _has_other_count(self, call: ModuleCall, other: ModuleCall, attribute: str) -> bool:
        """Return whether a call has another number of tensors than one device's, of which it shares the samples."""
        return not self.rank_shard.mesh_position and call.counts.get(attribute) != other.counts.get(attribute)

    def is_longer_list(self, call: ModuleCall, attribute: str) -> bool:
        """Return whether some rank has another number of tensors in this call: equal positions are other things."""
        others = [calls[call.key] for calls in self.calls if call.key in calls]
        return any(self._has_other_count(call, other, attribute) for other in others)

    def _lists_samples(self, call: ModuleCall, attribute: str) -> bool:
        """Return whether the tensors are a list with one for each sample: more on one device than on every rank."""
        pairs = [(record.share, calls.get(call.key)) for record, calls in zip(self.records, self.calls, strict=True)]
        return all(
            other is not None
            and call.counts.get(attribute) == share.slice_size
            and other.counts.get(attribute) == share.loaded < share.slice_size
            for share, other in pairs
        )

    def has_samples(
        self, reference: MicrobatchRecord, call: ModuleCall, attribute: str, position: int, layout: BatchLayout
    ) -> bool:
        """Return whether a tensor's rows may be those of samples.

        They are not where their number does not follow the samples, or where the module was called more or less often
        than on one device.

        Args:
            reference: the microbatch on one device.
            call: one device's call.
            attribute: "inputs" or "outputs".
            position: index of the tensor among them.
            layout: of the batch; unless its rows are samples, a module's tensor must have exactly one row a sample.
        """
        tensors = self.tensors(call, attribute, position)
        often = sum(other.module == call.module for other in reference.calls)
        calls = [sum(key[0] == call.module for key in c) for c, r in zip(self.calls, self.records, strict=True)
                 if r.share.count]  # fmt: skip
        if tensors is None or any(number != often for number in calls):
            return False
        whole = getattr(call, attribute)[position]
        if layout.values and (layout.reordered or (call.module and not has_row_per_sample(whole, tensors))):
            return False
        return rows_follow_samples(whole, tensors)


def is_padded_otherwise(reference: MicrobatchRecord, groups: Sequence[MicrobatchRecords]) -> bool:
    """Return whether some rank calls the model with samples of another shape than one device's."""
    for call in reference.calls:
        if call.module or call.number:
            continue
        for group in groups:
            for position, expected in enumerate(call.inputs):
                tensors = group.tensors(call, "inputs", position) or []
                rows = bool(tensors) and has_row_per_sample(expected, tensors)
                if rows and any(tensor.value.shape[1:] != expected.shape[1:] for tensor in tensors):
                    return True
    return False


def compare_forward(
    reference: MicrobatchRecord,
    groups: Sequence[MicrobatchRecords],
    checker: ToleranceChecker,
    layout: BatchLayout = ROWS_OF_SAMPLES,
) -> Iterator[tuple[ForwardTensor, TensorGap | None]]:
    """Compare every recorded output, in order of execution.

    Args:
        reference: the microbatch on one device.
        groups: the microbatch on the ranks, by mesh position.
        checker: holds the tolerance.
        layout: of the batch.

    Yields:
        (tensor, gap) for each output; the gap is None where the output could not be compared.
    """
    for call in reference.calls:
        for position, expected in enumerate(call.outputs):
            forward_tensor = ForwardTensor(
                module=call.module,
                tensor="output" if len(call.outputs) == 1 else f"output {position + 1}",
                call=call.key,
            )
            scale = max(rms([expected]), checker.floor * rms(call.inputs))
            gaps: list[tuple[MicrobatchRecords, TensorGap]] = []
            for group in groups:
                gap = _call_gap(reference, group, call, "outputs", position, scale, checker)
                gaps += [(group, gap)] if gap is not None else []
            far = next((group for group, gap in gaps if gap.largest > checker.tolerance), None)
            blamed = _blamed(reference, call, far, checker, layout) if far is not None else None
            if far is not None and not far.has_samples(reference, call, "outputs", position, layout):
                forward_tensor = replace(forward_tensor, of_samples=False)
            yield blamed or (forward_tensor, _merged([gap for _, gap in gaps]))


def _call_gap(
    reference: MicrobatchRecord,
    group: MicrobatchRecords,
    call: ModuleCall,
    attribute: str,
    position: int,
    scale: float,
    checker: ToleranceChecker,
) -> TensorGap | None:
    """Return the gap of one tensor of a call: row by row, or else as a set of rows; None if it cannot be compared."""
    expected = getattr(call, attribute)[position]
    tensors = group.tensors(call, attribute, position)
    gap = smallest_gap(expected, tensors, scale, checker, group.rank_shard) if tensors else None
    if group.rank_shard.mesh_position or (gap is not None and gap.largest <= checker.tolerance):
        return gap
    if group.is_longer_list(call, attribute):
        return gap
    whole = module_values(reference.calls, call.module, attribute, position)
    parts = [
        value
        for record in group.records
        if record.share.count
        for value in module_values(record.calls, call.module, attribute, position)
    ]
    sets = [measured(alignment, scale) for alignment in row_set_alignments(whole, parts)]
    best = min(sets, key=lambda one: one.largest, default=None)
    return best if best is not None and (gap is None or best.largest <= checker.tolerance) else gap


def _merged(gaps: Sequence[TensorGap]) -> TensorGap | None:
    """Merge the gaps of all mesh positions, with the alignment of the largest gap; None for no gaps."""
    if not gaps:
        return None
    worst = max(gaps, key=lambda gap: gap.largest)
    by_rank = sorted(
        (pair for gap in gaps for pair in gap.gaps.items()), key=lambda pair: -1 if pair[0] is None else pair[0]
    )
    return TensorGap(gaps=dict(by_rank), alignment=worst.alignment)


def _blamed(
    reference: MicrobatchRecord,
    call: ModuleCall,
    group: MicrobatchRecords,
    checker: ToleranceChecker,
    layout: BatchLayout,
) -> tuple[ForwardTensor, TensorGap] | None:
    """Return the input of a call that already differs, with the surrounding module, which computed it; or None."""
    parent = call.module.rpartition(".")[0]
    for position, expected in enumerate(call.inputs):
        if layout.has(expected):
            continue
        gap = _call_gap(reference, group, call, "inputs", position, rms([expected]), checker)
        if gap is not None and gap.largest > checker.tolerance:
            of_samples = group.has_samples(reference, call, "inputs", position, layout)
            tensor = f"input of {call.module}" if call.module else "input"
            return ForwardTensor(module=parent, tensor=tensor, of_samples=of_samples, call=call.key), gap
    return None


def smallest_gap(
    expected: torch.Tensor,
    rank_tensors: Sequence[RankTensor],
    scale: float,
    checker: ToleranceChecker,
    rank_shard: RankShard = UNSHARDED,
) -> TensorGap | None:
    """Return the gap in the first alignment within the tolerance, or else in the best one.

    Values without rows of samples (a mean inside the model) may rightly differ between ranks, and so may values of
    which each rank has a part. For these the result is None unless they agree.

    Args:
        expected: one device's tensor.
        rank_tensors: the ranks' tensors.
        scale: the size that differences are relative to.
        checker: holds the tolerance.
        rank_shard: what these ranks hold of the model.

    Returns:
        The gap, or None if the tensors cannot be compared.
    """
    with_samples = having_samples(rank_tensors)
    if not with_samples:
        return None
    best: TensorGap | None = None
    divided = bool(rank_shard.mesh_position)
    alignments = (
        part_alignments(expected, with_samples, rank_shard.order)
        if divided
        else sample_alignments(expected, with_samples)
    )
    for alignment in alignments:
        best = _better(best, measured(alignment, scale))
        if best.largest <= checker.tolerance:
            return best
    if best is None:
        guesses = chain(
            guessed_alignments(expected, with_samples, rank_shard.order), batch_alignments(expected, with_samples)
        )
        gaps = [gap for gap in (measured(guess, scale) for guess in guesses) if gap.largest <= checker.tolerance]
        return min(gaps, key=lambda gap: gap.largest, default=None)
    return best


def _better(best: TensorGap | None, gap: TensorGap) -> TensorGap:
    return gap if best is None or gap.largest < best.largest else best


def measured(alignment: Alignment, scale: float) -> TensorGap:
    """Return the difference of an alignment's pairs by rank, relative to `scale`."""
    return TensorGap(gaps={p.rank: difference(p.expected, p.got, scale) for p in alignment}, alignment=alignment)

"""Compare the batches that ranks compute with one device's."""

from collections.abc import Iterator, Sequence

import torch

from tutti.verify.alignment import RankShard, RankTensor
from tutti.verify.compare_forward import MicrobatchRecords, TensorGap, smallest_gap
from tutti.verify.recording import StepRecord
from tutti.verify.tolerance import ToleranceChecker, rms


def compare_inputs(
    reference: StepRecord, ranks: Sequence[StepRecord], rank_shards: Sequence[RankShard], checker: ToleranceChecker
) -> Iterator[tuple[str, TensorGap | None]]:
    """Compare every tensor of the batch, microbatch by microbatch.

    Args:
        reference: the step on one device.
        ranks: the step on every rank.
        rank_shards: what each rank holds of the model.
        checker: holds the tolerance.

    Yields:
        (name, gap) for each tensor and microbatch; the gap is None where the tensor could not be compared.
    """
    for name, expected in reference.inputs.items():
        for index, microbatch in enumerate(reference.microbatches):
            whole = _rows(expected, reference, index)
            if microbatch.share.count == 0 or any(name not in r.inputs or index >= len(r.microbatches) for r in ranks):
                yield name, None
                continue
            for group in MicrobatchRecords.of([step.microbatches[index] for step in ranks], rank_shards):
                tensors = [
                    RankTensor(rank=rank, share=record.share, value=_rows(ranks[rank].inputs[name], ranks[rank], index))
                    for rank, record in zip(group.ranks, group.records, strict=True)
                ]
                yield name, smallest_gap(whole, tensors, rms([whole]), checker, group.rank_shard)


def _rows(value: torch.Tensor, step: StepRecord, index: int) -> torch.Tensor:
    """Return one microbatch's rows of a batch tensor; the whole tensor if it has no row per sample."""
    sizes = [microbatch.share.loaded for microbatch in step.microbatches]
    if value.dim() == 0 or value.shape[0] != sum(sizes):
        return value
    return value.narrow(0, sum(sizes[:index]), sizes[index])

"""Readings of a batch's tensor whose values depend on which samples are collated together.

A batch that concatenates its samples (bags of words, graphs, packed sequences) says where each begins: offsets,
boundaries, numbers of graphs. Such integers count from a rank's first sample. Other batches sort their samples.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from tutti.verification.alignment import AlignedPair, Alignment, RankTensor
from tutti.verification.grouped_rows import row_set_alignments

_PADDING = (0, -100, 1, -1)
"""Values with which collate functions pad: zeros, ignored targets, usual ids of a padding token."""


def collated_alignments(
    whole: torch.Tensor, rank_tensors: Sequence[RankTensor], sizes: Sequence[frozenset[int]]
) -> Iterator[Alignment]:
    """Yield alignments of one device's tensor with the ranks', for equal samples that are collated in groups.

    Args:
        whole: one device's tensor.
        rank_tensors: the ranks' tensors, in order of their samples.
        sizes: for each rank, what an index may count in the batches of the ranks before it (samples, rows of tensors).
    """
    if not rank_tensors or any(rank_tensor.value.dim() != whole.dim() for rank_tensor in rank_tensors):
        return
    if _are_integers([whole, *(rank_tensor.value for rank_tensor in rank_tensors)]):
        for dim in range(whole.dim()):
            yield from _shifted(whole, rank_tensors, sizes, dim, shared=0)
            yield from _shifted(whole, rank_tensors, sizes, dim, shared=1)
    yield from _reordered(whole, rank_tensors)


def _are_integers(tensors: Sequence[torch.Tensor]) -> bool:
    return all(not (t.is_floating_point() or t.is_complex() or t.dtype is torch.bool) for t in tensors)


def _shifted(
    whole: torch.Tensor, rank_tensors: Sequence[RankTensor], sizes: Sequence[frozenset[int]], dim: int, *, shared: int
) -> Iterator[Alignment]:
    """Align indices that count from each rank's first sample: all of a rank's are less by one number.

    Args:
        whole: one device's tensor.
        rank_tensors: the ranks' tensors.
        sizes: the numbers that may be meant.
        dim: dim along which the tensors are joined.
        shared: entries that neighbouring ranks have in common: 1 for boundaries, which have one more than the samples.
    """
    lengths = [rank_tensor.value.shape[dim] for rank_tensor in rank_tensors]
    whole = whole.long()
    if min(lengths) < shared or sum(lengths) - shared * (len(lengths) - 1) != whole.shape[dim]:
        return
    pairs: Alignment = []
    begin = 0
    for rank_tensor, length, allowed in zip(rank_tensors, lengths, sizes, strict=True):
        expected = whole.narrow(dim, begin, length)
        begin += length - shared
        if expected.shape != rank_tensor.value.shape:
            return
        value = rank_tensor.value.long()
        shift = int((expected - value).reshape(-1)[0]) if expected.numel() else 0
        if shift not in allowed:
            return
        pairs.append(AlignedPair(rank=rank_tensor.rank, expected=expected, got=value + shift))
    yield pairs


def _reordered(whole: torch.Tensor, rank_tensors: Sequence[RankTensor]) -> Iterator[Alignment]:
    """Align rows in any order, padded to one device's length: collate functions that sort by length."""
    values = [rank_tensor.value for rank_tensor in rank_tensors]
    if whole.dim() == 0 or sum(len(value) for value in values) != len(whole):
        return
    if any(size > most for value in values for size, most in zip(value.shape[1:], whole.shape[1:], strict=True)):
        return
    if whole.dim() == 1:
        whole, values = whole[:, None], [value[:, None] for value in values]
    for padding in _PADDING if any(value.shape[1:] != whole.shape[1:] for value in values) else (0,):
        yield from row_set_alignments([whole], [_padded(value, tuple(whole.shape[1:]), padding) for value in values])


def _padded(value: torch.Tensor, shape: tuple[int, ...], padding: int) -> torch.Tensor:
    """Return rows of `shape`, with padding behind the values."""
    missing = [entry for size, most in zip(value.shape[:0:-1], shape[::-1], strict=True) for entry in (0, most - size)]
    return F.pad(value.double() if value.dtype is torch.bool else value, missing, value=padding)

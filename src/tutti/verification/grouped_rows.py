"""Compare rows that are not samples: tokens that a mixture of experts groups by expert, in an order of its own.

One device groups the tokens of the whole microbatch, each rank those of its share. Together the ranks have the same
rows, in another order. A module that serves several experts is called once for each expert that has tokens, so its
calls on ranks need not be one device's; the rows of all its calls together are still the same.
"""

from collections.abc import Sequence

import torch

from tutti.verification.alignment import AlignedPair, Alignment, RankTensor
from tutti.verification.recording import ModuleCall

_PROJECTIONS = 3
"""Rows are put in order by their product with a random vector. Rounding may swap rows whose products are nearly equal,
so other vectors are tried too.
"""


def rows_follow_samples(whole: torch.Tensor, rank_tensors: Sequence[RankTensor]) -> bool:
    """Return whether some dim has as many entries for each sample on one device as on every rank.

    Args:
        whole: one device's tensor.
        rank_tensors: the ranks' tensors.
    """
    if any(rank_tensor.value.dim() != whole.dim() for rank_tensor in rank_tensors):
        return True  # another computation, not another order
    return any(
        all(
            rank_tensor.value.shape[dim] * rank_tensor.share.slice_size == whole.shape[dim] * rank_tensor.share.loaded
            for rank_tensor in rank_tensors
        )
        for dim in range(whole.dim())
    )


def has_row_per_sample(whole: torch.Tensor, rank_tensors: Sequence[RankTensor]) -> bool:
    """Return whether some dim has exactly one entry for each sample, on one device and on every rank."""
    return any(
        all(
            whole.shape[dim] == rank_tensor.share.slice_size
            and rank_tensor.value.dim() == whole.dim()
            and rank_tensor.value.shape[dim] == rank_tensor.share.loaded
            for rank_tensor in rank_tensors
        )
        for dim in range(whole.dim())
    )


def row_set_alignments(whole: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> list[Alignment]:
    """Return alignments of one device's rows with the ranks' rows in any order; none if the numbers of rows differ.

    Args:
        whole: one device's tensors; the rows of all of them count.
        parts: the tensors of all ranks.
    """
    widths = {tuple(tensor.shape[1:]) for tensor in (*whole, *parts) if tensor.dim() > 1}
    if not whole or not parts or len(widths) != 1 or any(tensor.dim() < 2 for tensor in (*whole, *parts)):
        return []
    expected = torch.cat([_real(tensor) for tensor in whole])
    got = torch.cat([_real(tensor) for tensor in parts])
    if expected.shape != got.shape or not expected.numel():
        return []
    generator = torch.Generator().manual_seed(0)
    alignments: list[Alignment] = []
    for _ in range(_PROJECTIONS):
        direction = torch.randn(expected.shape[1], generator=generator, dtype=torch.float64)
        pair = AlignedPair(
            rank=None, expected=expected[(expected @ direction).argsort()], got=got[(got @ direction).argsort()]
        )
        alignments.append([pair])
    return alignments


def module_values(calls: Sequence[ModuleCall], module: str, attribute: str, position: int) -> list[torch.Tensor]:
    """Return one tensor of every call of a module.

    Args:
        calls: the calls of a microbatch.
        module: dotted name.
        attribute: "inputs" or "outputs".
        position: index of the tensor among them.
    """
    values = [getattr(call, attribute) for call in calls if call.module == module]
    return [tensors[position] for tensors in values if position < len(tensors)]


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Return the rows of a tensor as vectors of real numbers."""
    value = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return value.detach().double().flatten(1) if value.shape[0] else value.detach().double().reshape(0, -1)

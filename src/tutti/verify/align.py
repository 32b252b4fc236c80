"""Ranks' tensors placed beside one device's: which rows of the one are which rows of the other."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from tutti.data.share import Part
from tutti.parallel.context.order import Order
from tutti.parallel.layout import Held
from tutti.verify.parts import columns_of
from tutti.verify.randomness import rows_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One rank's tensor, for its part of a slice. `held`: which part of a whole tensor it is, None for a whole one."""

    rank: int
    part: Part
    value: torch.Tensor
    held: Held | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two tensors of one shape that should be equal. `rank`: whose it is, None where it is made of all ranks'."""

    rank: int | None
    expected: torch.Tensor
    got: torch.Tensor


Alignment = list[Pair]


def counted(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces whose samples count; a rank that only takes part computes one sample that is another rank's."""
    return [piece for piece in pieces if piece.part.count]


def sample_alignments(whole: torch.Tensor, pieces: Sequence[Piece]) -> Iterator[Alignment]:
    """Ways in which the pieces may be rows of `whole`, the likeliest first; none if it holds no rows of samples."""
    if not pieces or any(piece.value.dim() != whole.dim() for piece in pieces):
        return
    if len(pieces) == 1 and pieces[0].value.shape == whole.shape:
        yield [Pair(rank=pieces[0].rank, expected=whole, got=pieces[0].value)]
        return
    for dim in range(whole.dim()):
        yield from _joined(whole, pieces, dim)
    yield from _cut(whole, pieces)
    yield from _samples_last(whole, pieces)


def part_alignments(whole: torch.Tensor, pieces: Sequence[Piece], order: Order | None) -> Iterator[Alignment]:
    """How pieces that are parts of samples, as stated, or of sequences (dim 1), lie in `whole`; none if that is not
    known."""
    held = pieces[0].held
    if held is not None:
        part = columns_of(whole, held)
        if part is not None and all(piece.held is not None and piece.held.cuts == held.cuts for piece in pieces):
            yield from _rows_of_samples(part, pieces)
    elif order is None:
        yield from _rows_of_samples(whole, pieces)
    elif _is_cut(whole, pieces, order, 1):
        yield from _rows_of_samples(order.take(whole, 1), pieces)


def guessed_alignments(whole: torch.Tensor, pieces: Sequence[Piece], order: Order | None) -> Iterator[Alignment]:
    """Ways in which pieces may agree with `whole` where sequences are cut, but not along its dim 1."""
    if order is None or pieces[0].held is not None:
        return
    yield from _rows_of_samples(whole, pieces)
    for dim in range(whole.dim()):
        if _is_cut(whole, pieces, order, dim):
            part = order.take(whole, dim)
            yield from _rows_of_samples(part, pieces)
            if all(piece.value.shape == part.shape for piece in pieces):
                yield [Pair(rank=piece.rank, expected=part, got=piece.value) for piece in pieces]


def _is_cut(whole: torch.Tensor, pieces: Sequence[Piece], order: Order, dim: int) -> bool:
    mine = pieces[0].value
    fits = mine.dim() == whole.dim() > dim and whole.shape[dim] % order.unit == 0
    return fits and whole.shape[dim] == mine.shape[dim] * order.degree


def _rows_of_samples(whole: torch.Tensor, pieces: Sequence[Piece]) -> Iterator[Alignment]:
    if len(pieces) == 1 and pieces[0].value.shape == whole.shape:
        yield [Pair(rank=pieces[0].rank, expected=whole, got=pieces[0].value)]
    elif len(pieces) > 1:
        for dim in range(whole.dim()):
            yield from _joined(whole, pieces, dim)


def batch_alignments(whole: torch.Tensor, pieces: Sequence[Piece]) -> Iterator[Alignment]:
    """Ways in which values without rows of samples may agree: each rank's alone, their mean over samples, their sum."""
    if not pieces or any(piece.value.shape != whole.shape for piece in pieces):
        return
    yield [Pair(rank=piece.rank, expected=whole, got=piece.value) for piece in pieces]
    total = sum(piece.part.count for piece in pieces)
    values = [piece.value.double() for piece in pieces]
    mean = torch.stack([v * (p.part.count / total) for v, p in zip(values, pieces, strict=True)]).sum(0)
    yield [Pair(rank=None, expected=whole, got=mean)]
    yield [Pair(rank=None, expected=whole, got=torch.stack(values).sum(0))]


def _joined(whole: torch.Tensor, pieces: Sequence[Piece], dim: int) -> Iterator[Alignment]:
    """The pieces one after the other along `dim` (samples, or tokens of samples with any number each)."""
    sizes = [piece.value.shape[dim] for piece in pieces]
    others = [(*piece.value.shape[:dim], *piece.value.shape[dim + 1 :]) for piece in pieces]
    if sum(sizes) != whole.shape[dim] or any(
        other != (*whole.shape[:dim], *whole.shape[dim + 1 :]) for other in others
    ):
        return
    parts = torch.split(whole, sizes, dim)
    yield [Pair(rank=p.rank, expected=e, got=p.value) for p, e in zip(pieces, parts, strict=True)]


def _cut(whole: torch.Tensor, pieces: Sequence[Piece]) -> Iterator[Alignment]:
    """Rows of each rank's samples, as far as both are long where ranks pad to their own longest sample."""
    cuts: list[Callable[[torch.Tensor], torch.Tensor] | None] = [
        rows_of(tuple(whole.shape), tuple(piece.value.shape), piece.part) for piece in pieces
    ]
    if all(piece.value.shape == whole.shape for piece in pieces) or any(cut is None for cut in cuts):
        return
    yield [
        Pair(rank=piece.rank, expected=cut(whole), got=piece.value)
        for piece, cut in zip(pieces, cuts, strict=True)
        if cut is not None
    ]


def _samples_last(whole: torch.Tensor, pieces: Sequence[Piece]) -> Iterator[Alignment]:
    """Rows flattened as (sequence, samples), samples the inner."""
    size = pieces[0].part.slice_size
    if whole.dim() == 0 or whole.shape[0] % size or whole.shape[0] == size:
        return
    each = whole.shape[0] // size
    if any(piece.value.shape != (each * piece.part.count, *whole.shape[1:]) for piece in pieces):
        return
    rows = whole.reshape(each, size, *whole.shape[1:])
    parts = torch.split(rows, [piece.part.count for piece in pieces], dim=1)
    yield [
        Pair(rank=piece.rank, expected=part, got=piece.value.reshape(part.shape))
        for piece, part in zip(pieces, parts, strict=True)
    ]

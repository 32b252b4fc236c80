"""Align the tensors of ranks with one device's: find which rows of the one are which rows of the other.

A rank may hold a part of a parameter, as its layout says, and modules may return a part of an activation. Elements are
sampled by their position in the whole tensor, so that samples of the whole and of a part match.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from tutti.checkpoint.training_state import TrainingState
from tutti.config.vocabulary import DATA_AXES, AxisName
from tutti.data.batches import MicrobatchShare
from tutti.parallel.context.sequence_order import SequenceOrder
from tutti.parallel.divided_tensor import local
from tutti.parallel.layout import TensorShard, to_local
from tutti.parallel.spatial import spatial_tensor as space
from tutti.parallel.tensor import tensor_activation as split
from tutti.verify.matched_randomness import rows_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTensor:
    """One rank's tensor for its part of a microbatch.

    Attributes:
        part: the samples that the rank computes.
        value: the tensor.
        held: which part of the whole tensor it is; None for all of it.
    """

    rank: int
    part: MicrobatchShare
    value: torch.Tensor
    held: TensorShard | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignedPair:
    """Two tensors of one shape that should be equal.

    Attributes:
        rank: the rank that computed `got`; None if it is computed from all ranks' tensors.
        expected: one device's values.
        got: the ranks' values.
    """

    rank: int | None
    expected: torch.Tensor
    got: torch.Tensor


Alignment = list[AlignedPair]


def counted(pieces: Sequence[RankTensor]) -> list[RankTensor]:
    """Return the tensors whose samples count; a rank without samples computes another's sample, with weight 0."""
    return [piece for piece in pieces if piece.part.count]


def sample_alignments(whole: torch.Tensor, pieces: Sequence[RankTensor]) -> Iterator[Alignment]:
    """Yield the ways in which the ranks' tensors may be rows of one device's, the likeliest first.

    Args:
        whole: one device's tensor.
        pieces: the ranks' tensors, in order of their samples.

    Yields:
        Alignments; none if the tensor has no rows of samples.
    """
    if not pieces or any(piece.value.dim() != whole.dim() for piece in pieces):
        return
    if len(pieces) == 1 and pieces[0].value.shape == whole.shape:
        yield [AlignedPair(rank=pieces[0].rank, expected=whole, got=pieces[0].value)]
        return
    for dim in range(whole.dim()):
        yield from _joined(whole, pieces, dim)
    yield from _cut(whole, pieces)
    yield from _samples_last(whole, pieces)


def part_alignments(
    whole: torch.Tensor, pieces: Sequence[RankTensor], order: SequenceOrder | None
) -> Iterator[Alignment]:
    """Yield alignments of tensors that are known parts of samples, or parts of sequences (dim 1).

    Args:
        whole: one device's tensor.
        pieces: the ranks' tensors, in order of their samples.
        order: how sequences lie over ranks; None if they are not divided.

    Yields:
        Alignments; none if the parts are not known.
    """
    held = pieces[0].held
    if held is not None:
        part = sampled_columns(whole, held)
        if part is not None and all(piece.held is not None and piece.held.cuts == held.cuts for piece in pieces):
            yield from _rows_of_samples(part, pieces)
    elif order is None:
        yield from _rows_of_samples(whole, pieces)
    elif _is_cut(whole, pieces, order, 1):
        yield from _rows_of_samples(order.take(whole, 1), pieces)


def guessed_alignments(
    whole: torch.Tensor, pieces: Sequence[RankTensor], order: SequenceOrder | None
) -> Iterator[Alignment]:
    """Yield the ways in which tensors may agree with `whole` where sequences are divided, but not along its dim 1.

    Args:
        whole: one device's tensor.
        pieces: the ranks' tensors, in order of their samples.
        order: how sequences lie over ranks; None if they are not divided.
    """
    if order is None or pieces[0].held is not None:
        return
    yield from _rows_of_samples(whole, pieces)
    for dim in range(whole.dim()):
        if _is_cut(whole, pieces, order, dim):
            part = order.take(whole, dim)
            yield from _rows_of_samples(part, pieces)
            if all(piece.value.shape == part.shape for piece in pieces):
                yield [AlignedPair(rank=piece.rank, expected=part, got=piece.value) for piece in pieces]


def _is_cut(whole: torch.Tensor, pieces: Sequence[RankTensor], order: SequenceOrder, dim: int) -> bool:
    first = pieces[0].value
    fits = first.dim() == whole.dim() > dim and whole.shape[dim] % order.unit == 0
    return fits and whole.shape[dim] == first.shape[dim] * order.degree


def _rows_of_samples(whole: torch.Tensor, pieces: Sequence[RankTensor]) -> Iterator[Alignment]:
    if len(pieces) == 1 and pieces[0].value.shape == whole.shape:
        yield [AlignedPair(rank=pieces[0].rank, expected=whole, got=pieces[0].value)]
    elif len(pieces) > 1:
        for dim in range(whole.dim()):
            yield from _joined(whole, pieces, dim)


def batch_alignments(whole: torch.Tensor, pieces: Sequence[RankTensor]) -> Iterator[Alignment]:
    """Yield the ways in which values without rows of samples may agree.

    Either each rank's value equals one device's, or their mean over samples does, or their sum.
    """
    if not pieces or any(piece.value.shape != whole.shape for piece in pieces):
        return
    yield [AlignedPair(rank=piece.rank, expected=whole, got=piece.value) for piece in pieces]
    total = sum(piece.part.count for piece in pieces)
    values = [piece.value.double() for piece in pieces]
    mean = torch.stack([v * (p.part.count / total) for v, p in zip(values, pieces, strict=True)]).sum(0)
    yield [AlignedPair(rank=None, expected=whole, got=mean)]
    yield [AlignedPair(rank=None, expected=whole, got=torch.stack(values).sum(0))]


def _joined(whole: torch.Tensor, pieces: Sequence[RankTensor], dim: int) -> Iterator[Alignment]:
    """Align the tensors one after the other along `dim`: samples, or tokens of samples with any number each."""
    sizes = [piece.value.shape[dim] for piece in pieces]
    others = [(*piece.value.shape[:dim], *piece.value.shape[dim + 1 :]) for piece in pieces]
    if sum(sizes) != whole.shape[dim] or any(
        other != (*whole.shape[:dim], *whole.shape[dim + 1 :]) for other in others
    ):
        return
    parts = torch.split(whole, sizes, dim)
    yield [AlignedPair(rank=p.rank, expected=e, got=p.value) for p, e in zip(pieces, parts, strict=True)]


def _cut(whole: torch.Tensor, pieces: Sequence[RankTensor]) -> Iterator[Alignment]:
    """Align each rank's samples with their rows of the whole, shortened to the length that the rank pads to."""
    cuts: list[Callable[[torch.Tensor], torch.Tensor] | None] = [
        rows_of(tuple(whole.shape), tuple(piece.value.shape), piece.part) for piece in pieces
    ]
    if all(piece.value.shape == whole.shape for piece in pieces) or any(cut is None for cut in cuts):
        return
    yield [
        AlignedPair(rank=piece.rank, expected=cut(whole), got=piece.value)
        for piece, cut in zip(pieces, cuts, strict=True)
        if cut is not None
    ]


def _samples_last(whole: torch.Tensor, pieces: Sequence[RankTensor]) -> Iterator[Alignment]:
    """Align rows flattened from (sequence, samples), with the samples inside."""
    size = pieces[0].part.slice_size
    if whole.dim() == 0 or whole.shape[0] % size or whole.shape[0] == size:
        return
    length = whole.shape[0] // size
    if any(piece.value.shape != (length * piece.part.count, *whole.shape[1:]) for piece in pieces):
        return
    rows = whole.reshape(length, size, *whole.shape[1:])
    parts = torch.split(rows, [piece.part.count for piece in pieces], dim=1)
    yield [
        AlignedPair(rank=piece.rank, expected=part, got=piece.value.reshape(part.shape))
        for piece, part in zip(pieces, parts, strict=True)
    ]


MAX_ELEMENTS = 2**20
"""At most this many evenly spread elements of a parameter, gradient or buffer are compared."""
MAX_COLUMNS = 1024
"""At most this many evenly spread entries of the last dim of a module output are compared."""

MeshPosition = tuple[tuple[AxisName, int], ...]
"""A rank's position along the axes whose ranks compute the same samples. Ranks at one position divide the samples of
every microbatch among them.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShard:
    """What one rank holds of the model.

    Attributes:
        place: its position along the axes whose ranks compute the same samples.
        data_index: its index among the ranks at that position.
        tensors, states: shards of the parameters and buffers, and of the optimizer state, that it holds in part.
        names, state_names: parameters and buffers, and parameters with optimizer state, that it holds in part or whole.
        counts: names whose part on this rank counts in norms, because no other rank counts the same part.
        order: how sequences lie over ranks; None if they are not divided.
    """

    place: MeshPosition = ()
    data_index: int = 0
    tensors: dict[str, TensorShard] = field(default_factory=dict)
    states: dict[str, TensorShard] = field(default_factory=dict)
    names: frozenset[str] = frozenset()
    state_names: frozenset[str] = frozenset()
    counts: frozenset[str] = frozenset()
    order: SequenceOrder | None = None

    @classmethod
    def of(cls, training: TrainingState) -> "RankShard":
        """Return what this rank of a prepared run holds, under the names of one device's model."""
        layout, mesh = training.parallel.layout, training.parallel.mesh
        first_names = {name: layout.first_name(name) for name, _ in named_tensors(training) if name in layout.names}
        states = {
            name
            for parameter_names in layout.state_names(training.parallel.model, training.parallel.optimizers).values()
            for name in parameter_names.values()
        }
        return cls(
            place=tuple((axis, mesh.index(axis)) for axis in mesh.degrees if axis not in DATA_AXES),
            data_index=mesh.data_index,
            tensors={first: layout.shard_of(name) for name, first in first_names.items() if layout.shard_of(name).cuts},
            states={
                layout.first_name(name): layout.state_shard_of(name)
                for name in states
                if layout.state_shard_of(name).cuts
            },
            names=frozenset(first_names.values()),
            state_names=frozenset(layout.first_name(name) for name in states),
            counts=frozenset(first for name, first in first_names.items() if layout.counts(name)),
            order=SequenceOrder(
                kind=training.parallel.plan.context, degree=mesh.degree("context"), index=mesh.index("context")
            )
            if mesh.degree("context") > 1
            else None,
        )


def named_tensors(training: TrainingState) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, this rank's part) of every parameter and buffer; tied ones once."""
    for name, tensor in (*training.parallel.model.named_parameters(), *training.parallel.model.named_buffers()):
        yield name, to_local(tensor)


def sample_elements(tensor: torch.Tensor, held: TensorShard | None = None) -> torch.Tensor:
    """Return a copy of a tensor on the CPU; of a large tensor, only evenly spread elements.

    Args:
        tensor: this rank's tensor.
        held: which part of the whole tensor it is; None for all of it.
    """
    value = tensor.detach()
    if value.layout != torch.strided:
        value = value.to_dense()
    if held is not None and tuple(value.shape) != held.local_shape:
        held = None
    stride = _stride(math.prod(held.shape) if held is not None else value.numel())
    if stride > 1:
        flat = value.reshape(-1)
        value = flat[::stride] if held is None else flat[_positions(held) % stride == 0]
    return value.to("cpu", copy=True)


def sampled_part(whole: torch.Tensor, held: TensorShard, got: torch.Tensor) -> torch.Tensor:
    """Return the part of one device's sampled tensor that matches a rank's sample.

    Args:
        whole: one device's tensor, sampled by `sample_elements`.
        held: which part of the whole tensor the rank holds.
        got: the rank's sample.

    Returns:
        The part; `whole` itself if the shapes say nothing else.
    """
    stride = _stride(math.prod(held.shape))
    if got.shape == whole.shape or (stride == 1 and tuple(whole.shape) != held.shape):
        return whole
    if stride == 1:
        return held.take(whole)
    positions = _positions(held)
    return whole[positions[positions % stride == 0] // stride]


def covers_whole(shape: tuple[int, ...], parts: Sequence[TensorShard | None]) -> bool:
    """Return whether parts of a tensor of `shape` cover the whole; a part of None is all of it."""
    if any(held is None or not held.cuts for held in parts):
        return True
    there = torch.zeros(shape, dtype=torch.bool)
    for held in parts:
        if held is not None:
            held.put(there, torch.ones(held.local_shape, dtype=torch.bool))
    return bool(there.all())


def _stride(elements: int) -> int:
    return max(-(-elements // MAX_ELEMENTS), 1)


def _positions(held: TensorShard) -> torch.Tensor:
    """Return the flat position in the whole tensor of every element of a part."""
    return held.take(torch.arange(math.prod(held.shape)).reshape(held.shape)).reshape(-1)


def sample_columns(tensor: torch.Tensor, held: TensorShard | None = None) -> torch.Tensor:
    """Return a copy of a tensor on the CPU; of a wide tensor, only evenly spread entries of the last dim.

    Rows stay whole samples.

    Args:
        tensor: this rank's tensor.
        held: which part of the whole tensor it is; None for all of it.
    """
    value = tensor.detach()
    stride = _column_stride(held.shape if held is not None else tuple(value.shape))
    if stride > 1:
        value = value[..., ::stride] if held is None else value[..., _columns(held) % stride == 0]
    return value.to("cpu", copy=True)


def sampled_columns(whole: torch.Tensor, held: TensorShard) -> torch.Tensor | None:
    """Return the part `held` of a whole tensor that `sample_columns` sampled; None if the sizes do not fit.

    Dims that are not divided may be larger than those of `held` (more samples).
    """
    stride = _column_stride(held.shape)
    if whole.dim() != len(held.shape):
        return None
    for cut in held.cuts:
        last = cut.dim == len(held.shape) - 1 and stride > 1
        places = torch.cat([torch.arange(start, stop) for start, stop in cut.ranges] or [torch.arange(0)])
        places = places[places % stride == 0] // stride if last else places
        if places.numel() and int(places.max()) >= whole.shape[cut.dim]:
            return None
        whole = whole.index_select(cut.dim, places)
    return whole


def _column_stride(shape: tuple[int, ...]) -> int:
    return -(-shape[-1] // MAX_COLUMNS) if len(shape) > 1 and shape[-1] > MAX_COLUMNS else 1


def _columns(held: TensorShard) -> torch.Tensor:
    """Return the position in the whole tensor's last dim of every column of a part."""
    cut = next((cut for cut in held.cuts if cut.dim == len(held.shape) - 1), None)
    return torch.cat([torch.arange(a, b) for a, b in (cut.ranges if cut else ((0, held.shape[-1]),))])


def local_activation(value: torch.Tensor) -> tuple[torch.Tensor, TensorShard | None]:
    """Return an activation as a plain local tensor, and the part of the whole that it is; None for a whole one."""
    held = TensorShard(shape=tuple(value.shape))
    with torch._C.DisableTorchFunctionSubclass():
        if isinstance(value, split.SplitTensor):
            place = value.place
            return local(value), held.cut(place.dim, *place.spread.parts[place.group.rank])
        if isinstance(value, space.SpatialTensor):
            for dim, along in enumerate(space.where_of(value)):
                if along is not None:
                    held = held.cut(dim, space.rows_of(along, space.space_of([value])))
            return local(value), held
    return value, None

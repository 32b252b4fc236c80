"""Align the tensors of ranks with one device's: find which rows of one are which rows of the other.

A rank may hold a shard of a parameter, as its layout says, and modules may return a shard of an activation. Elements
are sampled by their position in the whole tensor, so that samples of the whole and of a shard match.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from tutti.checkpoint.training_state import TrainingState
from tutti.config.vocabulary import DATA_AXES, AxisName
from tutti.data.batches import MicrobatchShare
from tutti.parallel.context.sequence_order import SequenceOrder
from tutti.parallel.divided_tensor import local
from tutti.parallel.layout import TensorShard, to_local
from tutti.parallel.spatial import spatial_tensor as space
from tutti.parallel.tensor import tensor_activation as split
from tutti.verification.matched_randomness import rows_of


def in_double(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in float64, or in complex128 if it is complex."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTensor:
    """One rank's tensor for its share of a microbatch.

    Attributes:
        rank: the rank.
        share: the samples that the rank computes.
        value: the tensor.
        shard: which part of the whole tensor it is; None for all of it.
    """

    rank: int
    share: MicrobatchShare
    value: torch.Tensor
    shard: TensorShard | None = None


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


def having_samples(rank_tensors: Sequence[RankTensor]) -> list[RankTensor]:
    """Return the tensors of ranks that have samples. A rank without any computes another's sample, with weight 0."""
    return [rank_tensor for rank_tensor in rank_tensors if rank_tensor.share.count]


def sample_alignments(whole: torch.Tensor, rank_tensors: Sequence[RankTensor]) -> Iterator[Alignment]:
    """Yield alignments in which the ranks' tensors are rows of one device's, the likeliest first.

    Args:
        whole: one device's tensor.
        rank_tensors: the ranks' tensors, in order of their samples.

    Yields:
        Alignments; none if the tensor has no rows of samples.
    """
    if not rank_tensors or any(rank_tensor.value.dim() != whole.dim() for rank_tensor in rank_tensors):
        return
    if len(rank_tensors) == 1 and rank_tensors[0].value.shape == whole.shape:
        yield [AlignedPair(rank=rank_tensors[0].rank, expected=whole, got=rank_tensors[0].value)]
        return
    for dim in range(whole.dim()):
        yield from _joined(whole, rank_tensors, dim)
    yield from _shortened(whole, rank_tensors)
    yield from _shortened_in_front(whole, rank_tensors)
    yield from _samples_last(whole, rank_tensors)


def part_alignments(
    whole: torch.Tensor, rank_tensors: Sequence[RankTensor], order: SequenceOrder | None
) -> Iterator[Alignment]:
    """Yield alignments of tensors that are known parts of samples, or parts of sequences (dim 1).

    Args:
        whole: one device's tensor.
        rank_tensors: the ranks' tensors, in order of their samples.
        order: how sequences lie over ranks; None if they are not divided.

    Yields:
        Alignments; none if the parts are not known.
    """
    shard = rank_tensors[0].shard
    if shard is not None:
        part = sampled_columns(whole, shard)
        if part is not None and all(
            rank_tensor.shard is not None and rank_tensor.shard.cuts == shard.cuts for rank_tensor in rank_tensors
        ):
            yield from _rows_of_samples(part, rank_tensors)
    elif order is None:
        yield from _rows_of_samples(whole, rank_tensors)
    elif _is_divided(whole, rank_tensors, order, 1):
        yield from _rows_of_samples(order.take(whole, 1), rank_tensors)


def guessed_alignments(
    whole: torch.Tensor, rank_tensors: Sequence[RankTensor], order: SequenceOrder | None
) -> Iterator[Alignment]:
    """Yield alignments for tensors of divided sequences that are not divided along dim 1: whole, or along another dim.

    Args:
        whole: one device's tensor.
        rank_tensors: the ranks' tensors, in order of their samples.
        order: how sequences lie over ranks; None if they are not divided.
    """
    if order is None or rank_tensors[0].shard is not None:
        return
    yield from _rows_of_samples(whole, rank_tensors)
    for dim in range(whole.dim()):
        if _is_divided(whole, rank_tensors, order, dim):
            part = order.take(whole, dim)
            yield from _rows_of_samples(part, rank_tensors)
            if all(rank_tensor.value.shape == part.shape for rank_tensor in rank_tensors):
                yield [
                    AlignedPair(rank=rank_tensor.rank, expected=part, got=rank_tensor.value)
                    for rank_tensor in rank_tensors
                ]


def _is_divided(whole: torch.Tensor, rank_tensors: Sequence[RankTensor], order: SequenceOrder, dim: int) -> bool:
    """Return whether each rank's tensor has an equal part of `dim`, as large as the order of sequences says."""
    first = rank_tensors[0].value
    fits = first.dim() == whole.dim() > dim and whole.shape[dim] % order.unit == 0
    return fits and whole.shape[dim] == first.shape[dim] * order.degree


def _rows_of_samples(whole: torch.Tensor, rank_tensors: Sequence[RankTensor]) -> Iterator[Alignment]:
    """Yield alignments in which the ranks' tensors, one after the other, are the whole."""
    if len(rank_tensors) == 1 and rank_tensors[0].value.shape == whole.shape:
        yield [AlignedPair(rank=rank_tensors[0].rank, expected=whole, got=rank_tensors[0].value)]
    elif len(rank_tensors) > 1:
        for dim in range(whole.dim()):
            yield from _joined(whole, rank_tensors, dim)


def batch_alignments(whole: torch.Tensor, rank_tensors: Sequence[RankTensor]) -> Iterator[Alignment]:
    """Yield alignments of values without rows of samples.

    Either each rank's value equals one device's, or their mean over samples does, or their sum.
    """
    if not rank_tensors or any(rank_tensor.value.shape != whole.shape for rank_tensor in rank_tensors):
        return
    yield [AlignedPair(rank=rank_tensor.rank, expected=whole, got=rank_tensor.value) for rank_tensor in rank_tensors]
    total = sum(rank_tensor.share.count for rank_tensor in rank_tensors)
    values = [in_double(rank_tensor.value) for rank_tensor in rank_tensors]
    mean = torch.stack([v * (p.share.count / total) for v, p in zip(values, rank_tensors, strict=True)]).sum(0)
    yield [AlignedPair(rank=None, expected=whole, got=mean)]
    yield [AlignedPair(rank=None, expected=whole, got=torch.stack(values).sum(0))]


def _joined(whole: torch.Tensor, rank_tensors: Sequence[RankTensor], dim: int) -> Iterator[Alignment]:
    """Align the tensors one after the other along `dim`: samples, or tokens of samples with any number each."""
    sizes = [rank_tensor.value.shape[dim] for rank_tensor in rank_tensors]
    others = [(*rank_tensor.value.shape[:dim], *rank_tensor.value.shape[dim + 1 :]) for rank_tensor in rank_tensors]
    if sum(sizes) != whole.shape[dim] or any(
        other != (*whole.shape[:dim], *whole.shape[dim + 1 :]) for other in others
    ):
        return
    parts = torch.split(whole, sizes, dim)
    yield [AlignedPair(rank=p.rank, expected=e, got=p.value) for p, e in zip(rank_tensors, parts, strict=True)]


def _shortened(whole: torch.Tensor, rank_tensors: Sequence[RankTensor]) -> Iterator[Alignment]:
    """Align each rank's samples with their rows of the whole, shortened to the length that the rank pads to."""
    cuts: list[Callable[[torch.Tensor], torch.Tensor] | None] = [
        rows_of(tuple(whole.shape), tuple(rank_tensor.value.shape), rank_tensor.share) for rank_tensor in rank_tensors
    ]
    if all(rank_tensor.value.shape == whole.shape for rank_tensor in rank_tensors) or any(cut is None for cut in cuts):
        return
    yield [
        AlignedPair(rank=rank_tensor.rank, expected=cut(whole), got=rank_tensor.value)
        for rank_tensor, cut in zip(rank_tensors, cuts, strict=True)
        if cut is not None
    ]


def _shortened_in_front(whole: torch.Tensor, rank_tensors: Sequence[RankTensor]) -> Iterator[Alignment]:
    """Align samples whose padding is in front: each rank's are the last entries of their rows of the whole."""
    shares = [(whole.shape[:1], rank_tensor.value.shape[:1], rank_tensor.share) for rank_tensor in rank_tensors]
    if not all(rows == (share.slice_size,) and own == (share.loaded,) for rows, own, share in shares):
        return
    dims = [
        dim
        for dim in range(1, whole.dim())
        if any(rank_tensor.value.shape[dim] < whole.shape[dim] for rank_tensor in rank_tensors)
    ]
    flipped = [replace(rank_tensor, value=rank_tensor.value.flip(dims)) for rank_tensor in rank_tensors]
    if dims:
        yield from _shortened(whole.flip(dims), flipped)


def _samples_last(whole: torch.Tensor, rank_tensors: Sequence[RankTensor]) -> Iterator[Alignment]:
    """Align rows flattened from (sequence, samples), with the samples inside."""
    size = rank_tensors[0].share.slice_size
    if whole.dim() == 0 or whole.shape[0] % size or whole.shape[0] == size:
        return
    length = whole.shape[0] // size
    if any(
        rank_tensor.value.shape != (length * rank_tensor.share.count, *whole.shape[1:]) for rank_tensor in rank_tensors
    ):
        return
    rows = whole.reshape(length, size, *whole.shape[1:])
    parts = torch.split(rows, [rank_tensor.share.count for rank_tensor in rank_tensors], dim=1)
    yield [
        AlignedPair(rank=rank_tensor.rank, expected=part, got=rank_tensor.value.reshape(part.shape))
        for rank_tensor, part in zip(rank_tensors, parts, strict=True)
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
        mesh_position: its position along the axes whose ranks compute the same samples.
        data_index: its index among the ranks at that position.
        tensors, states: shards of the parameters and buffers, and of the optimizer state, that it holds in part.
        names, state_names: parameters and buffers, and parameters with optimizer state, that it holds in part or whole.
        counts: names whose part on this rank counts in norms, because no other rank counts the same part.
        order: how sequences lie over ranks; None if they are not divided.
    """

    mesh_position: MeshPosition = ()
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
            mesh_position=tuple((axis, mesh.index(axis)) for axis in mesh.degrees if axis not in DATA_AXES),
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


def sample_elements(tensor: torch.Tensor, shard: TensorShard | None = None) -> torch.Tensor:
    """Return a copy of a tensor on the CPU; of a large tensor, only evenly spread elements.

    Args:
        tensor: this rank's tensor.
        shard: which part of the whole tensor it is; None for all of it.
    """
    value = tensor.detach()
    if value.layout != torch.strided:
        value = value.to_dense()
    if shard is not None and tuple(value.shape) != shard.local_shape:
        shard = None
    stride = _element_stride(math.prod(shard.shape) if shard is not None else value.numel())
    if stride > 1:
        flat = value.reshape(-1)
        value = flat[::stride] if shard is None else flat[_positions(shard) % stride == 0]
    return value.to("cpu", copy=True)


def sampled_part(whole: torch.Tensor, shard: TensorShard, got: torch.Tensor) -> torch.Tensor:
    """Return the part of one device's sampled tensor that matches a rank's sample.

    Args:
        whole: one device's tensor, sampled by `sample_elements`.
        shard: which part of the whole tensor the rank holds.
        got: the rank's sample.

    Returns:
        The part; `whole` itself if the shapes say nothing else.
    """
    stride = _element_stride(math.prod(shard.shape))
    if got.shape == whole.shape or (stride == 1 and tuple(whole.shape) != shard.shape):
        return whole
    if stride == 1:
        return shard.take(whole)
    positions = _positions(shard)
    return whole[positions[positions % stride == 0] // stride]


def covers_whole(shape: tuple[int, ...], shards: Sequence[TensorShard | None]) -> bool:
    """Return whether the shards of a tensor of `shape` cover the whole; a shard of None is all of it."""
    if any(shard is None or not shard.cuts for shard in shards):
        return True
    covered = torch.zeros(shape, dtype=torch.bool)
    for shard in shards:
        if shard is not None:
            shard.put(covered, torch.ones(shard.local_shape, dtype=torch.bool))
    return bool(covered.all())


def _element_stride(elements: int) -> int:
    """Return n so that every n-th element is sampled."""
    return max(-(-elements // MAX_ELEMENTS), 1)


def _positions(shard: TensorShard) -> torch.Tensor:
    """Return the flat position in the whole tensor of every element of a part."""
    return shard.take(torch.arange(math.prod(shard.shape)).reshape(shard.shape)).reshape(-1)


def sample_columns(tensor: torch.Tensor, shard: TensorShard | None = None) -> torch.Tensor:
    """Return a copy of a tensor on the CPU; of a wide tensor, only evenly spread entries of the last dim.

    Rows stay whole samples.

    Args:
        tensor: this rank's tensor.
        shard: which part of the whole tensor it is; None for all of it.
    """
    value = tensor.detach()
    stride = _column_stride(shard.shape if shard is not None else tuple(value.shape))
    if stride > 1:
        value = value[..., ::stride] if shard is None else value[..., _columns(shard) % stride == 0]
    return value.to("cpu", copy=True)


def sampled_columns(whole: torch.Tensor, shard: TensorShard) -> torch.Tensor | None:
    """Return the part `shard` of a whole tensor that `sample_columns` sampled; None if the sizes do not fit.

    Dims that are not divided may be larger than those of `shard` (more samples).
    """
    stride = _column_stride(shard.shape)
    if whole.dim() != len(shard.shape):
        return None
    for cut in shard.cuts:
        last = cut.dim == len(shard.shape) - 1 and stride > 1
        positions = torch.cat([torch.arange(start, stop) for start, stop in cut.ranges] or [torch.arange(0)])
        positions = positions[positions % stride == 0] // stride if last else positions
        if positions.numel() and int(positions.max()) >= whole.shape[cut.dim]:
            return None
        whole = whole.index_select(cut.dim, positions)
    return whole


def _column_stride(shape: tuple[int, ...]) -> int:
    """Return n so that every n-th column is sampled."""
    return -(-shape[-1] // MAX_COLUMNS) if len(shape) > 1 and shape[-1] > MAX_COLUMNS else 1


def _columns(shard: TensorShard) -> torch.Tensor:
    """Return the position in the whole tensor's last dim of every column of a part."""
    cut = next((cut for cut in shard.cuts if cut.dim == len(shard.shape) - 1), None)
    return torch.cat([torch.arange(a, b) for a, b in (cut.ranges if cut else ((0, shard.shape[-1]),))])


def local_activation(value: torch.Tensor) -> tuple[torch.Tensor, TensorShard | None]:
    """Return an activation as a plain local tensor, and which part of the whole it is; None for a whole one."""
    shard = TensorShard(shape=tuple(value.shape))
    with torch._C.DisableTorchFunctionSubclass():
        if isinstance(value, split.SplitTensor):
            placement = value.place
            return local(value), shard.cut(placement.dim, *placement.spread.parts[placement.group.rank])
        if isinstance(value, space.SpatialTensor):
            for dim, along in enumerate(space.where_of(value)):
                if along is not None:
                    shard = shard.cut(dim, space.rows_of(along, space.space_of([value])))
            return local(value), shard
    return value, None

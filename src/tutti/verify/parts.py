"""Parts: what of a tensor is kept for comparison, and the same part of what one device kept.

A rank may hold a part of a parameter (its layout says which), and modules may return a part of an activation. What is
kept of the whole and of a part is chosen by position in the whole, so that they can be laid over each other.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from tutti.config.words import DATA_AXES, AxisName
from tutti.parallel.context.order import Order
from tutti.parallel.layout import Held, local
from tutti.parallel.spatial import tensor as space
from tutti.parallel.tensor import parted as split
from tutti.trainer.state import Run

KEEP_ELEMENTS = 2**20
"""Of a larger parameter, gradient or buffer, evenly spread elements are compared, at most this many."""
KEEP_COLUMNS = 1024
"""Of a wider module output, evenly spread entries of its last dim are compared, at most this many."""

Place = tuple[tuple[AxisName, int], ...]
"""A rank's position along the axes whose ranks compute the same samples; ranks of one place share every slice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What a rank holds of the model.

    `names`, `state_names`: parameters and buffers, and parameters whose optimizer state it holds; `tensors`, `states`:
    those of them that are cut; `counts`: whose part counts on this rank. `data_index`: among the ranks of one place;
    `order`: how sequences lie over ranks, if they are cut.
    """

    place: Place = ()
    data_index: int = 0
    tensors: dict[str, Held] = field(default_factory=dict)
    states: dict[str, Held] = field(default_factory=dict)
    names: frozenset[str] = frozenset()
    state_names: frozenset[str] = frozenset()
    counts: frozenset[str] = frozenset()
    order: Order | None = None

    @classmethod
    def of(cls, run: Run) -> "Holding":
        """What this rank of a prepared run holds, by the names one device knows."""
        layout, mesh = run.layout, run.mesh
        own = {name: layout.first_name(name) for name, _ in named_tensors(run) if name in layout.names}
        states = {name for some in layout.state_names(run.model, run.optimizers).values() for name in some.values()}
        return cls(
            place=tuple((axis, mesh.index(axis)) for axis in mesh.degrees if axis not in DATA_AXES),
            data_index=mesh.data_index,
            tensors={first: layout.of_name(name) for name, first in own.items() if layout.of_name(name).cuts},
            states={layout.first_name(name): layout.state_of(name) for name in states if layout.state_of(name).cuts},
            names=frozenset(own.values()),
            state_names=frozenset(layout.first_name(name) for name in states),
            counts=frozenset(first for name, first in own.items() if layout.counts(name)),
            order=Order(kind=run.plan.context, degree=mesh.degree("context"), index=mesh.index("context"))
            if mesh.degree("context") > 1
            else None,
        )


def named_tensors(run: Run) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, this rank's part) of every parameter and buffer, tied ones once."""
    for name, tensor in (*run.model.named_parameters(), *run.model.named_buffers()):
        yield name, local(tensor)


def kept(tensor: torch.Tensor, held: Held | None = None) -> torch.Tensor:
    """A copy on the CPU; of a large whole tensor, evenly spread elements. `held`: which part of it `tensor` is."""
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


def part_of(whole: torch.Tensor, held: Held, got: torch.Tensor) -> torch.Tensor:
    """The part of a kept whole tensor that a rank kept as `got`; the whole where nothing else is known."""
    stride = _stride(math.prod(held.shape))
    if got.shape == whole.shape or (stride == 1 and tuple(whole.shape) != held.shape):
        return whole
    if stride == 1:
        return held.take(whole)
    positions = _positions(held)
    return whole[positions[positions % stride == 0] // stride]


def covered(shape: tuple[int, ...], parts: Sequence[Held | None]) -> bool:
    """Whether parts of a tensor of `shape` (None: all of it) make the whole."""
    if any(held is None or not held.cuts for held in parts):
        return True
    there = torch.zeros(shape, dtype=torch.bool)
    for held in parts:
        if held is not None:
            held.put(there, torch.ones(held.local_shape, dtype=torch.bool))
    return bool(there.all())


def _stride(elements: int) -> int:
    return max(-(-elements // KEEP_ELEMENTS), 1)


def _positions(held: Held) -> torch.Tensor:
    """Of every element of a part: its place in the whole, flattened."""
    return held.take(torch.arange(math.prod(held.shape)).reshape(held.shape)).reshape(-1)


def kept_columns(tensor: torch.Tensor, held: Held | None = None) -> torch.Tensor:
    """A copy on the CPU; of a wide tensor, evenly spread entries of its last dim, so that rows stay whole samples."""
    value = tensor.detach()
    stride = _column_stride(held.shape if held is not None else tuple(value.shape))
    if stride > 1:
        value = value[..., ::stride] if held is None else value[..., _columns(held) % stride == 0]
    return value.to("cpu", copy=True)


def columns_of(whole: torch.Tensor, held: Held) -> torch.Tensor | None:
    """The part `held` of a whole tensor of which `kept_columns` are kept; None where sizes do not fit. Dims that are
    not cut may have other sizes than the held one's (more samples)."""
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
    return -(-shape[-1] // KEEP_COLUMNS) if len(shape) > 1 and shape[-1] > KEEP_COLUMNS else 1


def _columns(held: Held) -> torch.Tensor:
    """Of every column of a part: its place in the whole's last dim."""
    cut = next((cut for cut in held.cuts if cut.dim == len(held.shape) - 1), None)
    return torch.cat([torch.arange(a, b) for a, b in (cut.ranges if cut else ((0, held.shape[-1]),))])


def activation(value: torch.Tensor) -> tuple[torch.Tensor, Held | None]:
    """An activation as a plain local tensor, and which part of the whole it is; None for a whole one."""
    held = Held(shape=tuple(value.shape))
    with torch._C.DisableTorchFunctionSubclass():
        if isinstance(value, split.Parted):
            place = value.place
            return split.local(value), held.cut(place.dim, *place.spread.parts[place.group.rank])
        if isinstance(value, space.CutTensor):
            for dim, along in enumerate(space.where_of(value)):
                if along is not None:
                    held = held.cut(dim, space.rows_of(along, space.space_of([value])))
            return space.local(value), held
    return value, None

"""Convolution and transposed convolution of parts; what layers that look at neighbours share."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from tutti.errors import PlanError
from tutti.parallel.spatial.halo_exchange import HaloRoute, HaloTransfer, SpatialGroup, fetch
from tutti.parallel.spatial.halo_geometry import Rows, TransposedWindow, Window, bounds_of, idle, inner, owned
from tutti.parallel.spatial.spatial_tensor import (
    Along,
    CutTensor,
    Where,
    cut,
    handles,
    local,
    rows_of,
    space_of,
    where_of,
    whole,
)

Function = Callable[..., Any]
_CONVOLUTIONS = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}
_TRANSPOSED = {1: torch.conv_transpose1d, 2: torch.conv_transpose2d, 3: torch.conv_transpose3d}


def many(value: Any, count: int) -> tuple[int, ...]:
    """A number or a sequence of `count` numbers, as a tuple."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * count if len(values) == 1 else values


def rank_of(name: str, tensor: Any, digits: str) -> int:
    """Number of spatial dims of a layer; checks that the tensor is a batch whose other dims are whole."""
    rank = int(digits)
    if not isinstance(tensor, CutTensor):
        raise PlanError(f"{name}: a weight that mesh.space cuts; only activations may be cut")
    where = where_of(tensor)
    if len(where) != rank + 2 or any(where[:2]):
        raise PlanError(
            f"{name} on a tensor of {len(where)} dims of which mesh.space cuts {[i for i, a in enumerate(where) if a]};"
            f" give it (batch, channels, {rank} spatial dims), with batch and channels whole"
        )
    return rank


def spread_enough(
    tensor: torch.Tensor, windows: Sequence[Window | TransposedWindow], ceil: bool = False
) -> torch.Tensor:
    """The tensor, whole along the spatial dims whose outputs have fewer rows than parts."""
    where = where_of(tensor)
    few = []
    for i, window in enumerate(windows):
        along = where[2 + i]
        if along is not None:
            extent = (
                window.extent(along.extent)
                if isinstance(window, TransposedWindow)
                else window.extent(along.extent, ceil=ceil)
            )
            if extent < along.parts:
                few.append(2 + i)
    return whole(tensor, few) if few else tensor


def after(where: Where, windows: Sequence[Window | TransposedWindow], ceil: bool = False) -> Where:
    """How a layer's output is cut."""
    result: list[Along | None] = [None, None]
    for along, window in zip(where[2:], windows, strict=True):
        if along is None:
            result.append(None)
            continue
        extent = (
            window.extent(along.extent)
            if isinstance(window, TransposedWindow)
            else window.extent(along.extent, ceil=ceil)
        )
        result.append(Along(along.axis, bounds_of(extent, along.parts)))
    return tuple(result)


# Convolution


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """Arguments of a convolution of `rank` spatial dims, one number a dim."""

    rank: int
    windows: tuple[Window, ...]
    groups: int


def _convolution(
    rank: int, kernel: Sequence[int], stride: Any, padding: Any, dilation: Any, groups: int
) -> Convolution:
    strides, dilations = many(stride, rank), many(dilation, rank)
    if padding == "valid":
        padding = 0
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(dilations, kernel, strict=True)]
        before = [t // 2 for t in total]
        behind = [t - b for t, b in zip(total, before, strict=True)]
    else:
        before = behind = list(many(padding, rank))
    windows = tuple(
        Window(kernel=k, stride=s, dilation=d, before=b, after=a)
        for k, s, d, b, a in zip(kernel, strides, dilations, before, behind, strict=True)
    )
    return Convolution(rank=rank, windows=windows, groups=groups)


@handles("conv1d", "conv2d", "conv3d")
def _conv(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return convolve(rank_of(func.__name__, (*args, *kwargs.values())[0], func.__name__[4]), *args, **kwargs)


def convolve(
    rank: int,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> torch.Tensor:
    """Convolution of parts: halos come from the neighbours, zeros stand outside the whole tensor."""
    layer = _convolution(rank, weight.shape[2:], stride, padding, dilation, groups)
    tensor = spread_enough(input, layer.windows)
    where, space, part = where_of(tensor), space_of([input]), local(tensor)
    if part.device.type != "meta" and torch.is_autocast_enabled(part.device.type):  # halos travel in the narrow type
        dtype = torch.get_autocast_dtype(part.device.type)
        part, weight = part.to(dtype), weight.to(dtype)
        bias = bias if bias is None else bias.to(dtype)
    result = after(where, layer.windows)
    routes = routes_of(where, layer.windows, result)
    cut_dims = [i for i in range(rank) if where[2 + i] is not None]
    part, beside = _pad_uneven(part, layer.windows, cut_dims)
    strides, dilations = [w.stride for w in layer.windows], [w.dilation for w in layer.windows]
    if space.overlap and routes:
        rows = [rows_of(along, space) if (along := result[2 + i]) else None for i in range(rank)]
        made = convolve_overlapped(part, weight, bias, layer.windows, rows, beside, groups, routes, space)
        return cut(made, result, space)
    for route in routes:
        part = fetch(part, route.dim, route.axis, route.bounds, route.needs, 0.0, space)
    made = _CONVOLUTIONS[rank](part, weight, bias, strides, beside, dilations, groups)
    return cut(made, result, space)


def _pad_uneven(part: torch.Tensor, windows: Sequence[Window], skip: list[int]) -> tuple[torch.Tensor, list[int]]:
    """(input, padding of the convolution) with what differs between the ends of whole dims already padded."""
    beside, pads = [], []
    for i, window in enumerate(windows):
        even = min(window.before, window.after)
        beside.append(0 if i in skip else even)
        pads.append((0, 0) if i in skip else (window.before - even, window.after - even))
    if any(pad != (0, 0) for pad in pads):
        part = F.pad(part, [value for pad in reversed(pads) for value in pad])
    return part, beside


# Transposed convolution


@handles("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _conv_transpose(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return spread(rank_of(func.__name__, (*args, *kwargs.values())[0], func.__name__[14]), *args, **kwargs)


def spread(
    rank: int,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> torch.Tensor:
    """Transposed convolution of parts: the rows that reach into this rank's output, spread without padding, cropped."""
    each = (weight.shape[2:], *(many(value, rank) for value in (stride, padding, output_padding, dilation)))
    spreads = [
        TransposedWindow(kernel=k, stride=s, dilation=d, padding=p, extra=e)
        for k, s, p, e, d in zip(*each, strict=True)
    ]
    tensor = spread_enough(input, spreads)
    where, space, part = where_of(tensor), space_of([input]), local(tensor)
    result = after(where, spreads)
    paddings, extras = [s.padding for s in spreads], [s.extra for s in spreads]
    for i in range(rank):
        if where[2 + i] is not None:
            paddings[i] = extras[i] = 0
    for route in routes_of(where, spreads, result):
        part = fetch(part, route.dim, route.axis, route.bounds, route.needs, 0.0, space)
    strides, dilations = [s.stride for s in spreads], [s.dilation for s in spreads]
    made = _TRANSPOSED[rank](part, weight, bias, strides, paddings, extras, groups, dilations)
    for i, one in enumerate(spreads):
        along = result[2 + i]
        if along is not None:
            rows = rows_of(along, space)
            made = made.narrow(2 + i, one.offset(rows), rows[1] - rows[0])
    return cut(made, result, space)


LEAST_INTERIOR = 0.75
"""A part is taken apart where so much of its output needs owned rows alone. Where it is less, waiting for halos hides
little, and a few convolutions of few rows take longer than one of all."""

Box = tuple[Rows | None, ...]
"""Output rows along each spatial dim, in global numbers; None: all of a dim that needs no exchange."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionPieces:
    """A convolution's output rows of one rank, in a box that needs owned rows alone, and slabs around it."""

    windows: tuple[Window, ...]
    beside: tuple[int, ...]
    groups: int
    routes: tuple[HaloRoute, ...]
    space: SpatialGroup
    full: Box
    interior: Box | None
    slabs: tuple[Box, ...]

    def firsts(self, *, extended: bool) -> list[int]:
        """Global number of the first row along each spatial dim: of the owned part, or with its halos."""
        result = [0] * len(self.windows)
        for route in self.routes:
            have, need = route.mine(self.space)
            result[route.dim - 2] = need[0] if extended else have[0]
        return result

    def input_of(self, tensor: torch.Tensor, box: Box, firsts: list[int]) -> torch.Tensor:
        """The rows of an input (or of its gradient) that a box of output rows needs; a view."""
        for i, rows in enumerate(box):
            if rows is not None:
                start, stop = self.windows[i].needs(rows)
                tensor = tensor.narrow(2 + i, start - firsts[i], stop - start)
        return tensor

    def output_of(self, tensor: torch.Tensor, box: Box) -> torch.Tensor:
        """The rows of an output (or of its gradient) in a box; a view."""
        for i, (rows, every) in enumerate(zip(box, self.full, strict=True)):
            if rows is not None and every is not None:
                tensor = tensor.narrow(2 + i, rows[0] - every[0], rows[1] - rows[0])
        return tensor

    def convolve(self, tensor: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.ops.aten.convolution(tensor, weight, bias, *self._rest())  # type: ignore[no-any-return]

    def gradients(
        self, grad: torch.Tensor, tensor: torch.Tensor, weight: torch.Tensor, mask: list[bool]
    ) -> tuple[torch.Tensor | None, ...]:
        """Gradients of (input, weight, bias) of one piece, as `mask` asks."""
        sizes = [weight.shape[0]] if mask[2] else None
        return torch.ops.aten.convolution_backward(  # type: ignore[no-any-return]
            grad, tensor, weight, sizes, *self._rest(), mask
        )

    def _rest(self) -> tuple[Any, ...]:
        strides, dilations = [w.stride for w in self.windows], [w.dilation for w in self.windows]
        return strides, list(self.beside), dilations, False, [0] * len(self.windows), self.groups


def divide_into_pieces(
    windows: Sequence[Window],
    rows: Sequence[Rows | None],
    beside: Sequence[int],
    groups: int,
    routes: Sequence[HaloRoute],
    space: SpatialGroup,
) -> ConvolutionPieces:
    """The pieces of an output that owns `rows` along each spatial dim."""
    exchanged = {route.dim - 2: route for route in routes}
    full: Box = tuple(own if i in exchanged else None for i, own in enumerate(rows))
    interior: list[Rows | None] = list(full)
    for i, route in exchanged.items():
        own = full[i]
        if own is not None:
            interior[i] = inner(windows[i], own, route.mine(space)[0])
    empty = _share(interior, full) < LEAST_INTERIOR
    slabs: list[Box] = []
    for i, own in enumerate(full):
        core = interior[i]
        if own is not None and core is not None and not empty:
            for side in ((own[0], core[0]), (core[1], own[1])):
                if side[0] < side[1]:
                    slabs.append((*interior[:i], side, *full[i + 1 :]))
    return ConvolutionPieces(
        windows=tuple(windows),
        beside=tuple(beside),
        groups=groups,
        routes=tuple(routes),
        space=space,
        full=full,
        interior=None if empty else tuple(interior),
        slabs=(full,) if empty else tuple(slabs),
    )


def _share(interior: Sequence[Rows | None], full: Box) -> float:
    """The part of an output that is in its interior; 0 where it has no row."""
    counts = [
        (i[1] - i[0], f[1] - f[0]) for i, f in zip(interior, full, strict=True) if i is not None and f is not None
    ]
    if any(inside <= 0 for inside, _ in counts):
        return 0.0
    return math.prod(inside / every for inside, every in counts)


class _Convolve(torch.autograd.Function):
    """Convolution with its halo exchange inside, so that both directions can overlap.

    Kept for backward: the owned rows, which whoever made them mostly keeps as well, and the halos as they came; not
    the two put together, which would be a second copy of nearly every activation.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, pieces: ConvolutionPieces
    ) -> torch.Tensor:
        space, routes = pieces.space, pieces.routes
        transfer = routes[0].start(tensor, space)
        core = None
        if pieces.interior is not None:
            own = pieces.input_of(tensor, pieces.interior, pieces.firsts(extended=False))
            core = pieces.convolve(own, weight, bias)
        extended, transfers = routes[0].finish(tensor, transfer, space), [transfer]
        for route in routes[1:]:
            transfers.append(route.start(extended, space))
            extended = route.finish(extended, transfers[-1], space)
        made = [
            pieces.convolve(pieces.input_of(extended, slab, pieces.firsts(extended=True)), weight, bias)
            for slab in pieces.slabs
        ]
        ctx.save_for_backward(tensor, weight, *(halo for transfer in transfers for _, halo in transfer.arrivals))
        ctx.rows = [[rows for rows, _ in transfer.arrivals] for transfer in transfers]
        ctx.pieces, ctx.biased = pieces, bias is not None
        if core is None:
            return made[0]
        del extended
        return _assemble(pieces, core, made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tensor, weight, *halos = ctx.saved_tensors
        pieces: ConvolutionPieces = ctx.pieces
        mask = [bool(need) for need in ctx.needs_input_grad[:3]]
        mask[2] = mask[2] and ctx.biased
        there, own, space = pieces.firsts(extended=True), pieces.firsts(extended=False), pieces.space
        totals: list[torch.Tensor | None] = [None, None]
        extended = _extended(pieces, tensor, ctx.rows, halos)
        wanted = torch.zeros_like(extended) if mask[0] and pieces.interior is not None else None
        for slab in pieces.slabs:
            found = _piece(pieces, slab, grad, pieces.input_of(extended, slab, there), weight, mask, totals)
            if wanted is not None:
                pieces.input_of(wanted, slab, there).add_(found)
            elif mask[0]:
                wanted = _spread(pieces, slab, found, extended, there)
        del extended
        transfer = None if wanted is None else pieces.routes[-1].start_back(wanted, space)
        core: Any = None
        if pieces.interior is not None:  # while gradients of halos travel back
            rows = pieces.input_of(tensor, pieces.interior, own)
            core = _piece(pieces, pieces.interior, grad, rows, weight, mask, totals)
        if wanted is not None and transfer is not None:
            wanted = pieces.routes[-1].finish_back(wanted, transfer, space, within=True)
            for route in reversed(pieces.routes[:-1]):
                wanted = route.finish_back(wanted, route.start_back(wanted, space), space, within=True)
            if pieces.interior is not None:
                pieces.input_of(wanted, pieces.interior, own).add_(core)
        return wanted, totals[0], totals[1], None


def _extended(
    pieces: ConvolutionPieces, tensor: torch.Tensor, rows: Sequence[Sequence[Rows]], halos: Sequence[torch.Tensor]
) -> torch.Tensor:
    """The owned rows with the halos that came in forward: `rows` of each route, one after another in `halos`."""
    left = iter(halos)
    for route, numbers in zip(pieces.routes, rows, strict=True):
        arrivals = [(number, next(left)) for number in numbers]
        tensor = route.finish(tensor, HaloTransfer(handle=None, arrivals=arrivals, departures=[]), pieces.space)
    return tensor


def _piece(
    pieces: ConvolutionPieces,
    box: Box,
    grad: torch.Tensor,
    rows: torch.Tensor,
    weight: torch.Tensor,
    mask: list[bool],
    totals: list[torch.Tensor | None],
) -> Any:
    """Gradient of one piece's input `rows`; those of weight and bias are added to `totals`."""
    found, *others = pieces.gradients(pieces.output_of(grad, box), rows, weight, mask)
    for i, other in enumerate(others):
        before = totals[i]
        if other is not None and mask[1 + i]:
            totals[i] = other if before is None else before.add_(other)
    return found


def _spread(
    pieces: ConvolutionPieces, box: Box, found: torch.Tensor, extended: torch.Tensor, firsts: list[int]
) -> torch.Tensor:
    """The gradient of all of a part's input, of which a box of output rows needed all or some: the only piece."""
    if found.shape == extended.shape:
        return found
    result = torch.zeros_like(extended)
    pieces.input_of(result, box, firsts).copy_(found)
    return result


def _assemble(pieces: ConvolutionPieces, core: torch.Tensor, made: list[torch.Tensor]) -> torch.Tensor:
    shape = list(core.shape)
    for i, every in enumerate(pieces.full):
        if every is not None:
            shape[2 + i] = every[1] - every[0]
    result = core.new_empty(shape)
    for box, piece in ((pieces.interior, core), *zip(pieces.slabs, made, strict=True)):
        if box is not None:
            pieces.output_of(result, box).copy_(piece)
    return result


def convolve_overlapped(
    tensor: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    windows: Sequence[Window],
    rows: Sequence[Rows | None],
    beside: Sequence[int],
    groups: int,
    routes: Sequence[HaloRoute],
    space: SpatialGroup,
) -> torch.Tensor:
    """Convolution of this rank's part: `rows` of the output along each cut spatial dim; `routes` fetch its halos.

    Interior rows are computed while the first dim's halos travel, and their gradients while the last dim's return.
    """
    pieces = divide_into_pieces(windows, rows, beside, groups, routes, space)
    return _Convolve.apply(tensor, weight, bias, pieces)  # type: ignore[no-any-return, no-untyped-call]


def routes_of(
    where: Where, windows: Sequence[Window | TransposedWindow], result: Where, *, fill: float = 0.0
) -> tuple[HaloRoute, ...]:
    """One Route for each cut spatial dim (tensor dims 2 and on) of which some part needs more than it owns."""
    routes = []
    for dim, (along, window, out) in enumerate(zip(where[2:], windows, result[2:], strict=True), start=2):
        if along is not None and out is not None:
            needs = needs_of(window, out)
            if not idle(along.bounds, needs):
                routes.append(HaloRoute(dim=dim, axis=along.axis, bounds=along.bounds, needs=needs, fill=fill))
    return tuple(routes)


def needs_of(window: Window | TransposedWindow, out: Along) -> tuple[Rows, ...]:
    """What every part needs for the rows it owns of a layer's output."""
    return tuple(window.needs(owned(out.bounds, part)) for part in range(out.parts))

"""Convolution and transposed convolution of cut tensors, with helpers for all layers that read neighbouring rows."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from tutti.errors import PlanError
from tutti.parallel.divided_tensor import local
from tutti.parallel.spatial.halo_exchange import HaloRoute, HaloTransfer, SpatialGroup, fetch
from tutti.parallel.spatial.halo_geometry import Rows, TransposedWindow, Window, bounds_of, idle, inner, owned
from tutti.parallel.spatial.spatial_tensor import (
    Along,
    SpatialTensor,
    Where,
    cut,
    handles,
    rows_of,
    space_of,
    where_of,
    whole,
)

Function = Callable[..., Any]
_CONVOLUTIONS = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}
_TRANSPOSED = {1: torch.conv_transpose1d, 2: torch.conv_transpose2d, 3: torch.conv_transpose3d}


def many(value: Any, count: int) -> tuple[int, ...]:
    """A number, or a sequence of 1 or `count` numbers, as a tuple of `count` numbers."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * count if len(values) == 1 else values


def rank_of(name: str, tensor: Any, digits: str) -> int:
    """Number of spatial dims of a layer, from the digit in its function's name.

    Raises:
        PlanError: the tensor is not a cut activation, or its batch or channels are cut.
    """
    rank = int(digits)
    if not isinstance(tensor, SpatialTensor):
        raise PlanError(f"mesh.space: {name} got a cut weight; only its input may be cut")
    where = where_of(tensor)
    if len(where) != rank + 2 or any(where[:2]):
        raise PlanError(
            f"mesh.space: {name} got {len(where)} dims, of which {[i for i, a in enumerate(where) if a]} are cut; its "
            f"input must have batch, channels and {rank} spatial dims, with batch and channels whole"
        )
    return rank


def spread_enough(
    tensor: torch.Tensor, windows: Sequence[Window | TransposedWindow], ceil: bool = False
) -> torch.Tensor:
    """Make the spatial dims whole whose outputs have fewer rows than parts.

    Args:
        tensor: the layer's input.
        windows: the layer's window along each spatial dim.
        ceil: whether the output's extent is rounded up.
    """
    where = where_of(tensor)
    short_dims = []
    for i, window in enumerate(windows):
        along = where[2 + i]
        if along is not None:
            extent = (
                window.extent(along.extent)
                if isinstance(window, TransposedWindow)
                else window.extent(along.extent, ceil=ceil)
            )
            if extent < along.parts:
                short_dims.append(2 + i)
    return whole(tensor, short_dims) if short_dims else tensor


def after(where: Where, windows: Sequence[Window | TransposedWindow], ceil: bool = False) -> Where:
    """How a layer's output is cut, given how its input is cut."""
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
    """Arguments of a convolution, with one window for each of its `rank` spatial dims."""

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
        pads_before = [t // 2 for t in total]
        pads_after = [t - b for t, b in zip(total, pads_before, strict=True)]
    else:
        pads_before = pads_after = list(many(padding, rank))
    windows = tuple(
        Window(kernel=k, stride=s, dilation=d, before=b, after=a)
        for k, s, d, b, a in zip(kernel, strides, dilations, pads_before, pads_after, strict=True)
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
    """Convolution of a cut tensor. Halos come from neighbours; rows outside the whole tensor are zeros."""
    layer = _convolution(rank, weight.shape[2:], stride, padding, dilation, groups)
    tensor = spread_enough(input, layer.windows)
    where, space, part = where_of(tensor), space_of([input]), local(tensor)
    if part.device.type != "meta" and torch.is_autocast_enabled(part.device.type):  # send halos in the autocast type
        dtype = torch.get_autocast_dtype(part.device.type)
        part, weight = part.to(dtype), weight.to(dtype)
        bias = bias if bias is None else bias.to(dtype)
    result = after(where, layer.windows)
    routes = routes_of(where, layer.windows, result)
    cut_dims = [i for i in range(rank) if where[2 + i] is not None]
    part, paddings = _pad_uneven(part, layer.windows, cut_dims)
    strides, dilations = [w.stride for w in layer.windows], [w.dilation for w in layer.windows]
    if space.overlap and routes:
        rows = [rows_of(along, space) if (along := result[2 + i]) else None for i in range(rank)]
        output = convolve_overlapped(part, weight, bias, layer.windows, rows, paddings, groups, routes, space)
        return cut(output, result, space)
    for route in routes:
        part = fetch(part, route.dim, route.axis, route.bounds, route.needs, 0.0, space)
    output = _CONVOLUTIONS[rank](part, weight, bias, strides, paddings, dilations, groups)
    return cut(output, result, space)


def _pad_uneven(part: torch.Tensor, windows: Sequence[Window], skip: list[int]) -> tuple[torch.Tensor, list[int]]:
    """Pad whole dims whose two paddings differ, as in padding="same". Dims in `skip` are not padded at all.

    Returns:
        The input, with the excess of the larger padding added, and the padding left to the convolution.
    """
    paddings, pads = [], []
    for i, window in enumerate(windows):
        even = min(window.before, window.after)
        paddings.append(0 if i in skip else even)
        pads.append((0, 0) if i in skip else (window.before - even, window.after - even))
    if any(pad != (0, 0) for pad in pads):
        part = F.pad(part, [value for pad in reversed(pads) for value in pad])
    return part, paddings


# Transposed convolution


@handles("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _conv_transpose(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return convolve_transposed(rank_of(func.__name__, (*args, *kwargs.values())[0], func.__name__[14]), *args, **kwargs)


def convolve_transposed(
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
    """Transposed convolution of a cut tensor.

    Input rows that contribute to this rank's output are fetched and convolved without padding; the result is
    cropped.
    """
    settings = (weight.shape[2:], *(many(value, rank) for value in (stride, padding, output_padding, dilation)))
    spreads = [
        TransposedWindow(kernel=k, stride=s, dilation=d, padding=p, extra=e)
        for k, s, p, e, d in zip(*settings, strict=True)
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
    output = _TRANSPOSED[rank](part, weight, bias, strides, paddings, extras, groups, dilations)
    for i, window in enumerate(spreads):
        along = result[2 + i]
        if along is not None:
            rows = rows_of(along, space)
            output = output.narrow(2 + i, window.offset(rows), rows[1] - rows[0])
    return cut(output, result, space)


LEAST_INTERIOR = 0.75
"""A convolution is divided into interior and slabs if at least this fraction of its output needs no halo.

With less, the overlap hides little of the halo transfer, and several convolutions of few rows take longer than
one of all rows.
"""

Box = tuple[Rows | None, ...]
"""Global output rows along each spatial dim; None for all rows of a dim that needs no exchange."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionPieces:
    """One rank's output of a convolution, divided into an interior that needs no halo, and slabs around it.

    Attributes:
        windows: the window along each spatial dim.
        padding: padding along each spatial dim, 0 along cut dims.
        groups: of the convolution.
        routes: the halo exchanges, in order.
        space: the parts.
        full: all of this rank's output rows.
        interior: output rows that need only owned input rows; None if the output is not divided.
        slabs: the other boxes of the output.
    """

    windows: tuple[Window, ...]
    padding: tuple[int, ...]
    groups: int
    routes: tuple[HaloRoute, ...]
    space: SpatialGroup
    full: Box
    interior: Box | None
    slabs: tuple[Box, ...]

    def firsts(self, *, extended: bool) -> list[int]:
        """Global number of the first row along each spatial dim: of the owned part, or `extended` by its halos."""
        result = [0] * len(self.windows)
        for route in self.routes:
            have, need = route.mine(self.space)
            result[route.dim - 2] = need[0] if extended else have[0]
        return result

    def input_of(self, tensor: torch.Tensor, box: Box, firsts: list[int]) -> torch.Tensor:
        """A view of the rows of an input (or of its gradient) that a box of output rows needs."""
        for i, rows in enumerate(box):
            if rows is not None:
                start, stop = self.windows[i].needs(rows)
                tensor = tensor.narrow(2 + i, start - firsts[i], stop - start)
        return tensor

    def output_of(self, tensor: torch.Tensor, box: Box) -> torch.Tensor:
        """A view of the rows of an output (or of its gradient) in a box."""
        for i, (rows, full_rows) in enumerate(zip(box, self.full, strict=True)):
            if rows is not None and full_rows is not None:
                tensor = tensor.narrow(2 + i, rows[0] - full_rows[0], rows[1] - rows[0])
        return tensor

    def convolve(self, tensor: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The output of one piece."""
        return torch.ops.aten.convolution(tensor, weight, bias, *self._convolution_arguments())  # type: ignore[no-any-return]

    def gradients(
        self, grad: torch.Tensor, tensor: torch.Tensor, weight: torch.Tensor, mask: list[bool]
    ) -> tuple[torch.Tensor | None, ...]:
        """Gradients of the (input, weight, bias) of one piece, for those that `mask` selects."""
        sizes = [weight.shape[0]] if mask[2] else None
        return torch.ops.aten.convolution_backward(  # type: ignore[no-any-return]
            grad, tensor, weight, sizes, *self._convolution_arguments(), mask
        )

    def _convolution_arguments(self) -> tuple[Any, ...]:
        strides, dilations = [w.stride for w in self.windows], [w.dilation for w in self.windows]
        return strides, list(self.padding), dilations, False, [0] * len(self.windows), self.groups


def divide_into_pieces(
    windows: Sequence[Window],
    rows: Sequence[Rows | None],
    padding: Sequence[int],
    groups: int,
    routes: Sequence[HaloRoute],
    space: SpatialGroup,
) -> ConvolutionPieces:
    """Divide this rank's output into interior and slabs.

    Args:
        windows: the window along each spatial dim.
        rows: output rows that this rank owns along each spatial dim; None along whole dims.
        padding: padding along each spatial dim, 0 along cut dims.
        groups: of the convolution.
        routes: the halo exchanges.
        space: the parts.
    """
    exchanged = {route.dim - 2: route for route in routes}
    full: Box = tuple(own_rows if i in exchanged else None for i, own_rows in enumerate(rows))
    interior: list[Rows | None] = list(full)
    for i, route in exchanged.items():
        own_rows = full[i]
        if own_rows is not None:
            interior[i] = inner(windows[i], own_rows, route.mine(space)[0])
    empty = _interior_fraction(interior, full) < LEAST_INTERIOR
    slabs: list[Box] = []
    for i, own_rows in enumerate(full):
        core = interior[i]
        if own_rows is not None and core is not None and not empty:
            for side in ((own_rows[0], core[0]), (core[1], own_rows[1])):
                if side[0] < side[1]:
                    slabs.append((*interior[:i], side, *full[i + 1 :]))
    return ConvolutionPieces(
        windows=tuple(windows),
        padding=tuple(padding),
        groups=groups,
        routes=tuple(routes),
        space=space,
        full=full,
        interior=None if empty else tuple(interior),
        slabs=(full,) if empty else tuple(slabs),
    )


def _interior_fraction(interior: Sequence[Rows | None], full: Box) -> float:
    """Fraction of the output's points in its interior; 0 if the interior is empty."""
    counts = [
        (i[1] - i[0], f[1] - f[0]) for i, f in zip(interior, full, strict=True) if i is not None and f is not None
    ]
    if any(interior_rows <= 0 for interior_rows, _ in counts):
        return 0.0
    return math.prod(interior_rows / full_rows for interior_rows, full_rows in counts)


class _Convolve(torch.autograd.Function):
    """Convolution with its halo exchange inside, so that computation overlaps communication in both directions.

    Saved for backward: the owned rows, which the layer before mostly saves too, and the halos as received. Saving
    the extended input instead would keep a second copy of nearly every activation.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, pieces: ConvolutionPieces
    ) -> torch.Tensor:
        space, routes = pieces.space, pieces.routes
        transfer = routes[0].start(tensor, space)
        core = None
        if pieces.interior is not None:
            own_input = pieces.input_of(tensor, pieces.interior, pieces.firsts(extended=False))
            core = pieces.convolve(own_input, weight, bias)
        extended, transfers = routes[0].finish(tensor, transfer, space), [transfer]
        for route in routes[1:]:
            transfers.append(route.start(extended, space))
            extended = route.finish(extended, transfers[-1], space)
        slab_outputs = [
            pieces.convolve(pieces.input_of(extended, slab, pieces.firsts(extended=True)), weight, bias)
            for slab in pieces.slabs
        ]
        ctx.save_for_backward(tensor, weight, *(halo for transfer in transfers for _, halo in transfer.arrivals))
        ctx.rows = [[rows for rows, _ in transfer.arrivals] for transfer in transfers]
        ctx.pieces, ctx.biased = pieces, bias is not None
        if core is None:
            return slab_outputs[0]
        del extended
        return _assemble(pieces, core, slab_outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tensor, weight, *halos = ctx.saved_tensors
        pieces: ConvolutionPieces = ctx.pieces
        mask = [bool(need) for need in ctx.needs_input_grad[:3]]
        mask[2] = mask[2] and ctx.biased
        extended_firsts, own_firsts, space = pieces.firsts(extended=True), pieces.firsts(extended=False), pieces.space
        totals: list[torch.Tensor | None] = [None, None]
        extended = _extend_by_halos(pieces, tensor, ctx.rows, halos)
        input_grad = torch.zeros_like(extended) if mask[0] and pieces.interior is not None else None
        for slab in pieces.slabs:
            piece_grad = _piece_gradient(
                pieces, slab, grad, pieces.input_of(extended, slab, extended_firsts), weight, mask, totals
            )
            if input_grad is not None:
                pieces.input_of(input_grad, slab, extended_firsts).add_(piece_grad)
            elif mask[0]:
                input_grad = _pad_gradient(pieces, slab, piece_grad, extended, extended_firsts)
        del extended
        transfer = None if input_grad is None else pieces.routes[-1].start_back(input_grad, space)
        core: Any = None
        if pieces.interior is not None:  # computed while gradients of halos return
            rows = pieces.input_of(tensor, pieces.interior, own_firsts)
            core = _piece_gradient(pieces, pieces.interior, grad, rows, weight, mask, totals)
        if input_grad is not None and transfer is not None:
            input_grad = pieces.routes[-1].finish_back(input_grad, transfer, space, within=True)
            for route in reversed(pieces.routes[:-1]):
                input_grad = route.finish_back(input_grad, route.start_back(input_grad, space), space, within=True)
            if pieces.interior is not None:
                pieces.input_of(input_grad, pieces.interior, own_firsts).add_(core)
        return input_grad, totals[0], totals[1], None


def _extend_by_halos(
    pieces: ConvolutionPieces, tensor: torch.Tensor, rows: Sequence[Sequence[Rows]], halos: Sequence[torch.Tensor]
) -> torch.Tensor:
    """The owned rows, extended by the halos of forward.

    Args:
        pieces: the convolution.
        tensor: the owned rows.
        rows: rows received by each route.
        halos: the tensors of these rows, of all routes in order.
    """
    remaining_halos = iter(halos)
    for route, numbers in zip(pieces.routes, rows, strict=True):
        arrivals = [(number, next(remaining_halos)) for number in numbers]
        tensor = route.finish(tensor, HaloTransfer(handle=None, arrivals=arrivals, departures=[]), pieces.space)
    return tensor


def _piece_gradient(
    pieces: ConvolutionPieces,
    box: Box,
    grad: torch.Tensor,
    rows: torch.Tensor,
    weight: torch.Tensor,
    mask: list[bool],
    totals: list[torch.Tensor | None],
) -> Any:
    """The gradient of one piece's input `rows`. Adds the gradients of weight and bias to `totals`."""
    input_grad, *weight_grads = pieces.gradients(pieces.output_of(grad, box), rows, weight, mask)
    for i, weight_grad in enumerate(weight_grads):
        total = totals[i]
        if weight_grad is not None and mask[1 + i]:
            totals[i] = weight_grad if total is None else total.add_(weight_grad)
    return input_grad


def _pad_gradient(
    pieces: ConvolutionPieces, box: Box, piece_grad: torch.Tensor, extended: torch.Tensor, firsts: list[int]
) -> torch.Tensor:
    """The gradient of the whole extended input, from that of the rows which the only piece needed."""
    if piece_grad.shape == extended.shape:
        return piece_grad
    result = torch.zeros_like(extended)
    pieces.input_of(result, box, firsts).copy_(piece_grad)
    return result


def _assemble(pieces: ConvolutionPieces, core: torch.Tensor, slab_outputs: list[torch.Tensor]) -> torch.Tensor:
    shape = list(core.shape)
    for i, full_rows in enumerate(pieces.full):
        if full_rows is not None:
            shape[2 + i] = full_rows[1] - full_rows[0]
    result = core.new_empty(shape)
    for box, piece in ((pieces.interior, core), *zip(pieces.slabs, slab_outputs, strict=True)):
        if box is not None:
            pieces.output_of(result, box).copy_(piece)
    return result


def convolve_overlapped(
    tensor: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    windows: Sequence[Window],
    rows: Sequence[Rows | None],
    padding: Sequence[int],
    groups: int,
    routes: Sequence[HaloRoute],
    space: SpatialGroup,
) -> torch.Tensor:
    """Convolution of this rank's part, overlapped with the exchange of its halos.

    The interior is computed during the first dim's halo transfer. In backward, it is computed during the last
    dim's.

    Args:
        tensor: the owned input rows.
        weight: of the convolution.
        bias: of the convolution.
        windows: the window along each spatial dim.
        rows: output rows that this rank owns along each spatial dim; None along whole dims.
        padding: padding along each spatial dim, 0 along cut dims.
        groups: of the convolution.
        routes: the halo exchanges, at least one.
        space: the parts.
    """
    pieces = divide_into_pieces(windows, rows, padding, groups, routes, space)
    return _Convolve.apply(tensor, weight, bias, pieces)  # type: ignore[no-any-return, no-untyped-call]


def routes_of(
    where: Where, windows: Sequence[Window | TransposedWindow], result: Where, *, fill: float = 0.0
) -> tuple[HaloRoute, ...]:
    """The exchange of each cut spatial dim along which some part needs rows that it does not own.

    Args:
        where: how the input is cut.
        windows: the window along each spatial dim.
        result: how the output is cut.
        fill: value of rows outside the whole tensor.
    """
    routes = []
    for dim, (along, window, out) in enumerate(zip(where[2:], windows, result[2:], strict=True), start=2):
        if along is not None and out is not None:
            needs = needs_of(window, out)
            if not idle(along.bounds, needs):
                routes.append(HaloRoute(dim=dim, axis=along.axis, bounds=along.bounds, needs=needs, fill=fill))
    return tuple(routes)


def needs_of(window: Window | TransposedWindow, out: Along) -> tuple[Rows, ...]:
    """The input rows that each part needs for the output rows that it owns."""
    return tuple(window.needs(owned(out.bounds, part)) for part in range(out.parts))

"""Convolution and transposed convolution of parts; what layers that look at neighbours share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from tutti.errors import PlanError
from tutti.parallel.spatial.exchange import fetch
from tutti.parallel.spatial.geometry import Spread, Window, bounds_of
from tutti.parallel.spatial.overlapped import convolve_overlapped
from tutti.parallel.spatial.routes import routes_of
from tutti.parallel.spatial.tensor import (
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


def spread_enough(tensor: torch.Tensor, windows: Sequence[Window | Spread], ceil: bool = False) -> torch.Tensor:
    """The tensor, whole along the spatial dims whose outputs have fewer rows than parts."""
    where = where_of(tensor)
    few = []
    for i, window in enumerate(windows):
        along = where[2 + i]
        if along is not None:
            extent = (
                window.extent(along.extent) if isinstance(window, Spread) else window.extent(along.extent, ceil=ceil)
            )
            if extent < along.parts:
                few.append(2 + i)
    return whole(tensor, few) if few else tensor


def after(where: Where, windows: Sequence[Window | Spread], ceil: bool = False) -> Where:
    """How a layer's output is cut."""
    result: list[Along | None] = [None, None]
    for along, window in zip(where[2:], windows, strict=True):
        if along is None:
            result.append(None)
            continue
        extent = window.extent(along.extent) if isinstance(window, Spread) else window.extent(along.extent, ceil=ceil)
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
    spreads = [Spread(kernel=k, stride=s, dilation=d, padding=p, extra=e) for k, s, p, e, d in zip(*each, strict=True)]
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

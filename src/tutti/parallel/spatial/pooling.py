"""Pooling of parts: maxima and averages over windows, and over everything."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from tutti.errors import PlanError
from tutti.parallel.spatial.exchange import Space, fetch
from tutti.parallel.spatial.geometry import Window
from tutti.parallel.spatial.routes import routes_of
from tutti.parallel.spatial.tensor import (
    HANDLERS,
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
from tutti.parallel.spatial.windows import after, many, rank_of, spread_enough

Function = Callable[..., Any]
_MAXIMA = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGES = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


@handles("max_pool1d", "max_pool2d", "max_pool3d")
def _max_pool(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return maximum(rank_of(func.__name__, args[0], func.__name__[8]), *args, **kwargs)


def maximum(
    rank: int,
    input: torch.Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> torch.Tensor:
    """Max pooling of parts; minus infinity stands outside the whole tensor."""
    if return_indices:
        raise PlanError("max pooling with return_indices=True on a tensor that mesh.space cuts; pool without indices")
    windows = _pools(rank, kernel_size, stride, padding, dilation)
    part, result, space = _pooled(input, windows, ceil_mode, float("-inf"))
    kernels, strides, dilations = ([getattr(w, k) for w in windows] for k in ("kernel", "stride", "dilation"))
    return cut(_MAXIMA[rank](part, kernels, strides, 0, dilations), result, space)


@handles("avg_pool1d", "avg_pool2d", "avg_pool3d")
def _avg_pool(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return average(rank_of(func.__name__, args[0], func.__name__[8]), *args, **kwargs)


def average(
    rank: int,
    input: torch.Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> torch.Tensor:
    """Average pooling of parts: sums over windows, divided by what the whole tensor's windows hold."""
    windows = _pools(rank, kernel_size, stride, padding, 1)
    shape = input.shape if not isinstance(input, CutTensor) else [0, 0, *_extents(input)]
    part, result, space = _pooled(input, windows, ceil_mode, 0.0)
    kernels, strides = [w.kernel for w in windows], [w.stride for w in windows]
    total = _AVERAGES[rank](part, kernels, strides)
    if divisor_override:
        return cut(total * (math.prod(kernels) / divisor_override), result, space)
    for i, window in enumerate(windows):
        along = result[2 + i]
        start, stop = rows_of(along, space) if along else (0, total.shape[2 + i])
        counts = [window.divisor(row, shape[2 + i], count_padding=count_include_pad) for row in range(start, stop)]
        if any(one != window.kernel for one in counts):
            factors = total.new_tensor([window.kernel / one for one in counts])
            total = total * factors.reshape([-1 if dim == 2 + i else 1 for dim in range(total.dim())])
    return cut(total, result, space)


def _extents(tensor: torch.Tensor) -> list[int]:
    sizes = local(tensor).shape[2:]
    return [a.extent if a else size for a, size in zip(where_of(tensor)[2:], sizes, strict=True)]


def _pools(rank: int, kernel: Any, stride: Any, padding: Any, dilation: Any) -> list[Window]:
    kernels = many(kernel, rank)
    strides = kernels if stride is None or stride == [] or stride == () else many(stride, rank)
    each = (kernels, strides, many(padding, rank), many(dilation, rank))
    return [Window(kernel=k, stride=s, dilation=d, before=p, after=p) for k, s, p, d in zip(*each, strict=True)]


def _pooled(
    input: torch.Tensor, windows: Sequence[Window], ceil: bool, fill: float
) -> tuple[torch.Tensor, Where, Space]:
    """Exactly the rows that this rank's windows cover, padded with `fill`; how the output is cut; the space."""
    tensor = spread_enough(input, windows, ceil)
    where, space, part = where_of(tensor), space_of([input]), local(tensor)
    result = after(where, windows, ceil)
    for route in routes_of(where, windows, result, fill=fill):
        part = fetch(part, route.dim, route.axis, route.bounds, route.needs, fill, space)
    pads = []
    for i, window in enumerate(windows):
        size = part.shape[2 + i]
        if where[2 + i] is None:
            start, stop = window.needs((0, window.extent(size, ceil=ceil)))
            pads.append((-start, stop - size))
        else:
            pads.append((0, 0))
    if any(pad != (0, 0) for pad in pads):
        part = F.pad(part, [value for pad in reversed(pads) for value in pad], value=fill)
    return part, result, space


@handles("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
def _adaptive(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """To one value: a mean over all ranks; to more: of the whole tensor."""
    tensor, size = (*args, *kwargs.values())
    rank = rank_of(func.__name__, tensor, func.__name__[17])
    if many(size if size is not None else 0, rank) == (1,) * rank:
        return HANDLERS["mean"](torch.mean, (tensor, tuple(range(2, 2 + rank)), True), {})
    return func(whole(tensor), size)

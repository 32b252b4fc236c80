"""Pooling and interpolation of cut tensors."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from tutti.errors import PlanError
from tutti.parallel.divided_tensor import local
from tutti.parallel.spatial.halo_exchange import SpatialGroup, fetch
from tutti.parallel.spatial.halo_geometry import Window, bounds_of, owned
from tutti.parallel.spatial.spatial_convolution import after, many, rank_of, routes_of, spread_enough
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
_MAXIMA = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGES = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


@handles("max_pool1d", "max_pool2d", "max_pool3d")
def _max_pool(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return max_pool(rank_of(func.__name__, args[0], func.__name__[8]), *args, **kwargs)


def max_pool(
    rank: int,
    input: torch.Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> torch.Tensor:
    """Max pooling of a cut tensor; rows outside the whole tensor are minus infinity."""
    if return_indices:
        raise PlanError("mesh.space: max pooling of a cut tensor returns no indices; use return_indices=False")
    windows = _windows(rank, kernel_size, stride, padding, dilation)
    part, result, space = _pooling_input(input, windows, ceil_mode, float("-inf"))
    kernels, strides, dilations = ([getattr(w, k) for w in windows] for k in ("kernel", "stride", "dilation"))
    return cut(_MAXIMA[rank](part, kernels, strides, 0, dilations), result, space)


@handles("avg_pool1d", "avg_pool2d", "avg_pool3d")
def _avg_pool(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return avg_pool(rank_of(func.__name__, args[0], func.__name__[8]), *args, **kwargs)


def avg_pool(
    rank: int,
    input: torch.Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> torch.Tensor:
    """Average pooling of a cut tensor. Windows at its borders have the divisors of the whole tensor's windows."""
    windows = _windows(rank, kernel_size, stride, padding, 1)
    shape = input.shape if not isinstance(input, SpatialTensor) else [0, 0, *_extents(input)]
    part, result, space = _pooling_input(input, windows, ceil_mode, 0.0)
    kernels, strides = [w.kernel for w in windows], [w.stride for w in windows]
    total = _AVERAGES[rank](part, kernels, strides)
    if divisor_override:
        return cut(total * (math.prod(kernels) / divisor_override), result, space)
    for i, window in enumerate(windows):
        along = result[2 + i]
        start, stop = rows_of(along, space) if along else (0, total.shape[2 + i])
        counts = [window.divisor(row, shape[2 + i], count_padding=count_include_pad) for row in range(start, stop)]
        if any(count != window.kernel for count in counts):
            factors = total.new_tensor([window.kernel / count for count in counts])
            total = total * factors.reshape([-1 if dim == 2 + i else 1 for dim in range(total.dim())])
    return cut(total, result, space)


def _extents(tensor: torch.Tensor) -> list[int]:
    sizes = local(tensor).shape[2:]
    return [a.extent if a else size for a, size in zip(where_of(tensor)[2:], sizes, strict=True)]


def _windows(rank: int, kernel: Any, stride: Any, padding: Any, dilation: Any) -> list[Window]:
    kernels = many(kernel, rank)
    strides = kernels if stride is None or stride == [] or stride == () else many(stride, rank)
    settings = (kernels, strides, many(padding, rank), many(dilation, rank))
    return [Window(kernel=k, stride=s, dilation=d, before=p, after=p) for k, s, p, d in zip(*settings, strict=True)]


def _pooling_input(
    input: torch.Tensor, windows: Sequence[Window], ceil: bool, fill: float
) -> tuple[torch.Tensor, Where, SpatialGroup]:
    """The exact input rows of this rank's windows.

    Returns:
        The rows, padded with `fill`; how the output is cut; the SpatialGroup.
    """
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
    """Pooling to one value is a mean over all ranks; pooling to more values fetches the whole tensor."""
    tensor, size = (*args, *kwargs.values())
    rank = rank_of(func.__name__, tensor, func.__name__[17])
    if many(size if size is not None else 0, rank) == (1,) * rank:
        return SpatialTensor.handlers["mean"](torch.mean, (tensor, tuple(range(2, 2 + rank)), True), {})
    return func(whole(tensor), size)


_LINEAR = ("linear", "bilinear", "trilinear")
_NEAREST = ("nearest", "nearest-exact")

Taps = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""For each output row: two input rows, and the weight of the second."""


@handles("interpolate", "upsample", "upsample_nearest", "upsample_bilinear")
def _interpolate(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func.__name__ == "upsample_bilinear":
        kwargs = {**kwargs, "mode": "bilinear", "align_corners": True}
    return _resampled(*args, **kwargs)


def _resampled(
    input: torch.Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> torch.Tensor:
    """F.interpolate in nearest and linear modes.

    Raises:
        PlanError: another mode, or antialias.
    """
    if mode not in (*_LINEAR, *_NEAREST) or antialias:
        raise PlanError(
            f"mesh.space: interpolate(mode={mode!r}, antialias={antialias}) is not supported on a cut tensor; use a "
            "nearest or linear mode without antialias"
        )
    count = len(where_of(input)) - 2
    factors = None if scale_factor is None else _per_dim(scale_factor, count, float)
    sizes = None if size is None else _per_dim(size, count, int)
    for i in range(count):
        input = _resample_dim(
            input,
            2 + i,
            None if sizes is None else int(sizes[i]),
            None if factors is None else float(factors[i]),
            mode,
            align_corners=bool(align_corners),
            recompute=bool(recompute_scale_factor),
        )
    return input


def _per_dim(value: Any, count: int, kind: type) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple | torch.Size) else (kind(value),) * count


def _resample_dim(
    input: torch.Tensor,
    dim: int,
    size: int | None,
    factor: float | None,
    mode: str,
    *,
    align_corners: bool,
    recompute: bool,
) -> torch.Tensor:
    """Resample along one dim, cut or whole."""
    along, space = where_of(input)[dim], space_of([input]) if any(where_of(input)) else None
    extent = along.extent if along else local(input).shape[dim]
    out = size if size is not None else math.floor(float(extent) * (factor or 1.0))
    if along is not None and out < along.parts:
        input, along = whole(input, [dim]), None
    part, where = local(input), list(where_of(input))
    factor = None if recompute or size is not None else factor
    taps = _taps(extent, out, factor, mode, part, align_corners=align_corners)
    if along is not None and space is not None:
        bounds = bounds_of(out, along.parts)
        first, second = taps[0].tolist(), taps[1].tolist()
        needs = tuple(
            (min(first[a:b]), max(second[a:b]) + 1) for a, b in (owned(bounds, i) for i in range(along.parts))
        )
        part = fetch(part, dim, along.axis, along.bounds, needs, 0.0, space)
        where[dim] = Along(along.axis, bounds)
        start, stop = rows_of(where[dim], space)  # type: ignore[arg-type]
        offset = needs[space.place[along.axis]][0]
        taps = (taps[0][start:stop] - offset, taps[1][start:stop] - offset, taps[2][start:stop])
    output = _interpolate_rows(part, dim, taps, linear=mode in _LINEAR)
    return output if space is None else cut(output, tuple(where), space)


def _taps(extent: int, out: int, factor: float | None, mode: str, like: torch.Tensor, *, align_corners: bool) -> Taps:
    """Input rows and weights for all output rows."""
    if mode in _NEAREST:
        numbers = torch.arange(extent, dtype=torch.float64).reshape(1, 1, extent)
        if factor is None:
            source_rows = F.interpolate(numbers, size=out, mode=mode)
        else:
            source_rows = F.interpolate(numbers, scale_factor=factor, mode=mode)
        rows = source_rows.reshape(-1).long().to(like.device)
        return rows, rows, torch.zeros(out, dtype=like.dtype, device=like.device)
    precise = torch.float64 if like.dtype == torch.float64 else torch.float32
    row = torch.arange(out, dtype=precise, device=like.device)
    unit = torch.ones((), dtype=precise, device=like.device)
    if align_corners:
        position = row * (unit * (extent - 1) / (out - 1) if out > 1 else unit * 0)
    else:
        scale = unit * extent / out if factor is None else unit * (1.0 / factor)
        position = ((row + 0.5) * scale - 0.5).clamp(min=0)
    first = position.long().clamp(max=extent - 1)
    second = (first + 1).clamp(max=extent - 1)
    return first, second, (position - first).clamp(0, 1).to(like.dtype)


def _interpolate_rows(part: torch.Tensor, dim: int, taps: Taps, *, linear: bool) -> torch.Tensor:
    first, second, weight = taps
    near = part.index_select(dim, first)
    if not linear:
        return near
    weight = weight.reshape([-1 if i == dim else 1 for i in range(part.dim())])
    return near * (1 - weight) + part.index_select(dim, second) * weight

"""Up- and down-sampling of a cut tensor: each output row is a mean of two input rows, whose numbers torch's rule gives.

Positions are computed in the tensor's own precision, as torch's kernels do (UpSample.h), so that the same rows are
chosen; dims are resampled one after another, which gives bi- and trilinear weights.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from tutti.errors import PlanError
from tutti.parallel.spatial.exchange import fetch
from tutti.parallel.spatial.geometry import bounds_of, owned
from tutti.parallel.spatial.tensor import Along, cut, handles, local, rows_of, space_of, where_of, whole

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
    """F.interpolate for the nearest and linear modes; refuses the others."""
    if mode not in (*_LINEAR, *_NEAREST) or antialias:
        raise PlanError(
            f"interpolate(mode={mode!r}, antialias={antialias}) on a tensor that mesh.space cuts; use nearest or a "
            "linear mode without antialias"
        )
    count = len(where_of(input)) - 2
    factors = None if scale_factor is None else _each(scale_factor, count, float)
    sizes = None if size is None else _each(size, count, int)
    for i in range(count):
        input = _along(
            input,
            2 + i,
            None if sizes is None else int(sizes[i]),
            None if factors is None else float(factors[i]),
            mode,
            align_corners=bool(align_corners),
            recompute=bool(recompute_scale_factor),
        )
    return input


def _each(value: Any, count: int, kind: type) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple | torch.Size) else (kind(value),) * count


def _along(
    input: torch.Tensor,
    dim: int,
    size: int | None,
    factor: float | None,
    mode: str,
    *,
    align_corners: bool,
    recompute: bool,
) -> torch.Tensor:
    """Resample one dim, cut or whole."""
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
    made = _apply(part, dim, taps, linear=mode in _LINEAR)
    return made if space is None else cut(made, tuple(where), space)


def _taps(extent: int, out: int, factor: float | None, mode: str, like: torch.Tensor, *, align_corners: bool) -> Taps:
    """Rows and weights for all output rows."""
    if mode in _NEAREST:
        numbers = torch.arange(extent, dtype=torch.float64).reshape(1, 1, extent)
        if factor is None:
            chosen = F.interpolate(numbers, size=out, mode=mode)
        else:
            chosen = F.interpolate(numbers, scale_factor=factor, mode=mode)
        rows = chosen.reshape(-1).long().to(like.device)
        return rows, rows, torch.zeros(out, dtype=like.dtype, device=like.device)
    precise = torch.float64 if like.dtype == torch.float64 else torch.float32
    row = torch.arange(out, dtype=precise, device=like.device)
    one = torch.ones((), dtype=precise, device=like.device)
    if align_corners:
        position = row * (one * (extent - 1) / (out - 1) if out > 1 else one * 0)
    else:
        scale = one * extent / out if factor is None else one * (1.0 / factor)
        position = ((row + 0.5) * scale - 0.5).clamp(min=0)
    first = position.long().clamp(max=extent - 1)
    second = (first + 1).clamp(max=extent - 1)
    return first, second, (position - first).clamp(0, 1).to(like.dtype)


def _apply(part: torch.Tensor, dim: int, taps: Taps, *, linear: bool) -> torch.Tensor:
    first, second, weight = taps
    near = part.index_select(dim, first)
    if not linear:
        return near
    weight = weight.reshape([-1 if i == dim else 1 for i in range(part.dim())])
    return near * (1 - weight) + part.index_select(dim, second) * weight

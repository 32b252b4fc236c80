"""Padding and slicing of parts: windows of one row."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from tutti.errors import PlanError
from tutti.parallel.spatial.exchange import Space, fetch
from tutti.parallel.spatial.geometry import Window, bounds_of, owned
from tutti.parallel.spatial.tensor import Along, CutTensor, cut, handles, local, space_of, where_of, whole

Function = Callable[..., Any]


@handles("pad")
def _pad(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return padded(*args, **kwargs)


def padded(input: torch.Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> torch.Tensor:
    """F.pad: dims that are not cut in any mode, cut ones with a constant (negative: cropped)."""
    where, space = where_of(input), space_of([input])
    part, count = local(input), len(where)
    widths = [(pad[2 * i], pad[2 * i + 1]) for i in range(len(pad) // 2)]
    along_cut = {count - 1 - i: width for i, width in enumerate(widths) if where[count - 1 - i] and width != (0, 0)}
    if along_cut and mode != "constant":
        raise PlanError(
            f"padding mode {mode!r} along a dim that mesh.space cuts; use zeros there, or cut other dims (space_grid)"
        )
    beside = [0 if count - 1 - i in along_cut else w for i, width in enumerate(widths) for w in width]
    if any(beside):
        part = F.pad(part, beside, mode, value)
    after_pad = list(where)
    for dim, (before, behind) in along_cut.items():
        window = Window(before=before, after=behind)
        part, after_pad[dim] = _moved_rows(part, dim, where[dim], window, value or 0.0, space)
    return cut(part, tuple(after_pad), space)


def _moved_rows(
    part: torch.Tensor, dim: int, along: Along | None, window: Window, fill: float, space: Space
) -> tuple[torch.Tensor, Along | None]:
    """This rank's rows of a tensor that is padded, cropped or thinned along a cut dim."""
    if along is None:
        raise PlanError(f"dim {dim} is not cut")
    extent = window.extent(along.extent)
    if extent < along.parts:
        needs = (window.needs((0, extent)),) * along.parts
        part = fetch(part, dim, along.axis, along.bounds, needs, fill, space)
        return part[(slice(None),) * dim + (slice(None, None, window.stride),)], None
    bounds = bounds_of(extent, along.parts)
    needs = tuple(window.needs(owned(bounds, index)) for index in range(along.parts))
    part = fetch(part, dim, along.axis, along.bounds, needs, fill, space)
    return part[(slice(None),) * dim + (slice(None, None, window.stride),)], Along(along.axis, bounds)


@handles("__getitem__")
def _getitem(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Slices of any dims, numbers and None; what else is asked along a cut dim is taken from the whole tensor."""
    tensor, key = args
    if not isinstance(tensor, CutTensor):
        return func(tensor, pytree.tree_map(_whole_leaf, key))
    keys = key if isinstance(key, tuple) else (key,)
    simple = all(one is None or one is Ellipsis or isinstance(one, int | slice) for one in keys)
    if not simple or any(isinstance(one, bool) for one in keys):
        return func(whole(tensor), pytree.tree_map(_whole_leaf, key))
    used = sum(one is not None and one is not Ellipsis for one in keys)
    rest = (slice(None),) * (len(where_of(tensor)) - used)
    place = keys.index(Ellipsis) if Ellipsis in keys else len(keys)
    return _sliced(tensor, (*keys[:place], *rest, *keys[place + 1 :]))


def _whole_leaf(leaf: Any) -> Any:
    return whole(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _sliced(tensor: torch.Tensor, keys: tuple[Any, ...]) -> torch.Tensor:
    space, where = space_of([tensor]), where_of(tensor)
    numbers = [dim for dim, one in enumerate([k for k in keys if k is not None]) if isinstance(one, int) and where[dim]]
    slices = [one for one in keys if one is not None]
    empty = [dim for dim, one in enumerate(slices) if isinstance(one, slice) and _is_empty(one, where[dim])]
    tensor = whole(tensor, numbers + empty)
    where, part = where_of(tensor), local(tensor)
    result: list[Along | None] = []
    plain: list[Any] = []
    dim = 0
    for one in keys:
        along = where[dim] if one is not None else None
        plain.append(one if along is None else slice(None))
        if one is None:
            result.append(None)
            continue
        if isinstance(one, slice):
            if along is not None and one != slice(None):
                start, stop, step = one.indices(along.extent)
                window = Window(stride=step, before=-start, after=stop - along.extent)
                part, along = _moved_rows(part, dim, along, window, 0.0, space)
            result.append(along)
        dim += 1
    return cut(part[tuple(plain)], tuple(result), space)


def _is_empty(one: slice, along: Along | None) -> bool:
    return along is not None and len(range(*one.indices(along.extent))) == 0

"""Functions that reorder, join, reduce or reshape cut tensors. Functions that need more than parts fetch the whole."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from tutti.errors import PlanError
from tutti.parallel.divided_tensor import local, whole_shape
from tutti.parallel.spatial.halo_exchange import SpatialGroup, all_sum, fetch
from tutti.parallel.spatial.halo_geometry import Window, bounds_of, owned
from tutti.parallel.spatial.spatial_elementwise import elementwise
from tutti.parallel.spatial.spatial_tensor import (
    Along,
    SpatialTensor,
    Where,
    cut,
    handles,
    narrowed,
    space_of,
    where_of,
    whole,
)

Function = Callable[..., Any]


def _dims(dims: Any, count: int) -> list[int]:
    """Dims as a sorted list of nonnegative numbers; all if None."""
    if dims is None or dims == ():
        return list(range(count))
    return sorted(dim % count for dim in ((dims,) if isinstance(dims, int) else dims))


def _without(where: Where, dims: Iterable[int], *, keep: bool) -> Where:
    """How a tensor is cut after `dims` have been reduced."""
    removed = set(dims)
    return tuple(None if i in removed else along for i, along in enumerate(where) if keep or i not in removed)


# Functions of the whole tensor


def apply_to_whole(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Fetch the whole of every tensor; the result is plain."""
    return func(*map(_whole_leaf, args), **{name: _whole_leaf(value) for name, value in kwargs.items()})


def _whole_leaf(value: Any) -> Any:
    if isinstance(value, list | tuple) and any(isinstance(leaf, SpatialTensor) for leaf in value):
        return type(value)(map(_whole_leaf, value))
    return whole(value) if isinstance(value, torch.Tensor) else value


_WHOLE_FUNCTIONS = (
    "flatten view reshape view_as reshape_as unflatten ravel tolist numpy item __float__ __int__ __bool__ "
    "adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d median quantile equal allclose"
)
SpatialTensor.handlers.update(dict.fromkeys(_WHOLE_FUNCTIONS.split(), apply_to_whole))


# Reductions


@handles("sum", "mean")
def _sum(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _reduce(func.__name__, *args, **kwargs)


def _reduce(
    name: str,
    tensor: torch.Tensor,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    axis: Any = None,
) -> torch.Tensor:
    """Sum or mean over dims: first of this part, then over the ranks along the reduced cut axes."""
    where, shape, space = where_of(tensor), whole_shape(tensor), space_of([tensor])
    dims = _dims(dim if axis is None else axis, len(where))
    part = local(tensor).sum(dims, keepdim=keepdim, dtype=dtype)
    axes = tuple(sorted(along.axis for i in dims if (along := where[i]) is not None))
    total = all_sum(part, axes, space)
    if name == "mean":
        count = 1
        for i in dims:
            count *= shape[i]
        total = total / count
    return cut(total, _without(where, dims, keep=keepdim), space)


@handles("amax", "amin", "argmax", "argmin", "logsumexp", "prod", "all", "any", "var", "std", "max", "min", "norm")
def _other_reduction(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Reductions of the part along whole dims, of the whole tensor along cut dims."""
    tensor, *rest = args
    if rest and isinstance(rest[0], torch.Tensor):
        return elementwise(func, args, kwargs)
    where, has_dim = where_of(tensor), "dim" in kwargs
    dim = kwargs["dim"] if has_dim else (rest[0] if rest and func.__name__ != "norm" else None)
    keep = kwargs.get("keepdim", any(value is True for value in rest[1:]))
    positional_only = func.__name__ in ("var", "std") and not has_dim
    if dim is None or isinstance(dim, bool) or positional_only:
        return apply_to_whole(func, args, kwargs)
    dims = _dims(dim, len(where))
    if any(where[i] for i in dims):
        tensor = whole(tensor, dims)
    result = func(local(tensor), *rest, **kwargs)
    result_where, space = _without(where_of(tensor), dims, keep=keep), space_of([args[0]])
    if isinstance(result, tuple):
        return type(result)([cut(leaf, result_where, space) for leaf in result])
    return cut(result, result_where, space)


@handles("softmax", "log_softmax", "softmin", "normalize", "cumsum", "glu", "flip", "roll", "layer_norm", "rms_norm")
def _along_dims(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Functions that act along dims (layer_norm: the last ones). Cut ones of these dims are made whole first."""
    tensor, *rest = args
    where, name = where_of(tensor), func.__name__
    if name in ("layer_norm", "rms_norm"):
        shape = rest[0] if rest else kwargs["normalized_shape"]
        count = 1 if isinstance(shape, int) else len(shape)
        dims = list(range(len(where) - count, len(where)))
    else:
        position = 1 if name in ("normalize", "roll") else 0
        default = {"normalize": 1, "glu": -1}.get(name)
        if name == "flip" and rest and isinstance(rest[0], int):
            rest = [tuple(rest)]
        dim = kwargs.get("dim", kwargs.get("dims", rest[position] if len(rest) > position else default))
        dims = _dims(dim, len(where))
    if any(where[i] for i in dims):
        tensor = whole(tensor, dims)
    return cut(func(local(tensor), *rest, **kwargs), where_of(tensor), space_of(args))


@handles("linear")
def _linear(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Acts along the last dim, which is made whole first if it is cut."""
    tensor, *rest = args
    if not isinstance(tensor, SpatialTensor):
        raise PlanError("mesh.space: linear got a cut weight; only its input may be cut")
    where = where_of(tensor)
    if where[-1] is not None:
        tensor = whole(tensor, [len(where) - 1])
    return cut(func(local(tensor), *rest, **kwargs), where_of(tensor), space_of(args))


# Reordering


def _permuted(tensor: torch.Tensor, order: list[int]) -> torch.Tensor:
    where = where_of(tensor)
    return cut(local(tensor).permute(order), tuple(where[i] for i in order), space_of([tensor]))


@handles("permute")
def _permute(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, *rest = args
    order = kwargs.get("dims", rest[0] if rest and not isinstance(rest[0], int) else rest)
    return _permuted(tensor, [dim % len(where_of(tensor)) for dim in order])


@handles("transpose", "swapaxes", "swapdims")
def _transpose(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, *rest = args
    first, second = (*rest, *kwargs.values())
    order = list(range(len(where_of(tensor))))
    order[first], order[second] = order[second], order[first]
    return _permuted(tensor, order)


@handles("movedim", "moveaxis")
def _movedim(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, source, target = (*args, *kwargs.values())
    count = len(where_of(tensor))
    return _permuted(tensor, _moved_order(count, source, target))


def _moved_order(count: int, source: Any, target: Any) -> list[int]:
    """Order of dims after movedim, found by moving the dims of a meta tensor whose sizes are the dims' numbers."""
    numbered = torch.empty(tuple(range(count)), device="meta")
    return list(numbered.movedim(source, target).shape)


@handles("unsqueeze")
def _unsqueeze(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, dim = (*args, *kwargs.values())
    where = list(where_of(tensor))
    where.insert(dim % (len(where) + 1), None)
    return cut(local(tensor).unsqueeze(dim), tuple(where), space_of(args))


@handles("squeeze")
def _squeeze(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Drop dims in which the whole tensor has size 1."""
    tensor, *rest = args
    where, shape = where_of(tensor), whole_shape(tensor)
    dim = rest[0] if rest else kwargs.get("dim")
    removed = [i for i in _dims(dim, len(where)) if shape[i] == 1]
    return cut(local(tensor).squeeze(removed), _without(where, removed, keep=False), space_of(args))


# Joining and splitting


@handles("cat", "concat", "concatenate")
def _cat(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Join along a dim, made whole first if it is cut. Tensors that are whole where others are cut are narrowed."""
    tensors = list(args[0] if args else kwargs["tensors"])
    dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
    space, count = space_of(tensors), len(where_of(tensors[0]))
    dim %= count
    tensors = [whole(tensor, [dim]) for tensor in tensors]
    where = _common(tensors, skip=dim)
    parts = []
    for tensor in tensors:
        part, own_where = local(tensor), where_of(tensor)
        for i, along in enumerate(where):
            if along is not None and own_where[i] is None:
                if part.shape[i] != along.extent:
                    raise PlanError(
                        f"mesh.space: cat of tensors with {part.shape[i]} and {along.extent} rows along dim {i}; make "
                        "their sizes equal"
                    )
                part = narrowed(part, i, along, space)
        parts.append(part)
    return cut(torch.cat(parts, dim), where, space)


def _common(tensors: list[torch.Tensor], skip: int) -> Where:
    """How the joined tensors are cut, except along dim `skip`."""
    where = list(where_of(tensors[0]))
    for tensor in tensors:
        for i, along in enumerate(where_of(tensor)):
            if i != skip and along is not None:
                if where[i] not in (None, along):
                    shapes = [tuple(whole_shape(other)) for other in tensors]
                    raise PlanError(
                        f"mesh.space: cat of tensors with shapes {shapes}; make sizes equal except along dim {skip}"
                    )
                where[i] = along
    return tuple(where)


@handles("stack")
def _stack(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = args[0] if args else kwargs["tensors"]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    unsqueezed = [
        _unsqueeze(torch.unsqueeze, (tensor, dim), {}) if isinstance(tensor, SpatialTensor) else tensor.unsqueeze(dim)
        for tensor in tensors
    ]
    return _cat(torch.cat, (unsqueezed, dim), {})


@handles("chunk", "split", "split_with_sizes", "unbind", "tensor_split")
def _separate(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Split along a dim, made whole first if it is cut."""
    tensor, *rest = args
    name = func.__name__
    position = 0 if name == "unbind" else 1
    dim = kwargs.get("dim", rest[position] if len(rest) > position else 0) % len(where_of(tensor))
    space = space_of(args)
    tensor = whole(tensor, [dim])
    where = _without(where_of(tensor), [dim], keep=name != "unbind")
    return tuple(cut(part, where, space) for part in func(local(tensor), *rest, **kwargs))


@handles("pad")
def _pad(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return pad_parts(*args, **kwargs)


def pad_parts(
    input: torch.Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> torch.Tensor:
    """F.pad. Whole dims support all modes; cut dims only a constant (negative widths crop)."""
    where, space = where_of(input), space_of([input])
    part, count = local(input), len(where)
    widths = [(pad[2 * i], pad[2 * i + 1]) for i in range(len(pad) // 2)]
    along_cut = {count - 1 - i: width for i, width in enumerate(widths) if where[count - 1 - i] and width != (0, 0)}
    if along_cut and mode != "constant":
        raise PlanError(
            f"mesh.space: padding mode {mode!r} is not supported along a cut dim; use zero padding, or cut other dims "
            "(space_grid)"
        )
    whole_widths = [0 if count - 1 - i in along_cut else w for i, width in enumerate(widths) for w in width]
    if any(whole_widths):
        part = F.pad(part, whole_widths, mode, value)
    after_pad = list(where)
    for dim, (before, after) in along_cut.items():
        window = Window(before=before, after=after)
        part, after_pad[dim] = _moved_rows(part, dim, where[dim], window, value or 0.0, space)
    return cut(part, tuple(after_pad), space)


def _moved_rows(
    part: torch.Tensor, dim: int, along: Along | None, window: Window, fill: float, space: SpatialGroup
) -> tuple[torch.Tensor, Along | None]:
    """This rank's rows of a tensor after padding, cropping or striding along a cut dim.

    Returns:
        The rows, and how the dim is cut; None if too few rows remain, so that every rank has all of them.
    """
    if along is None:
        raise PlanError(f"mesh.space: dim {dim} is not cut")
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
    """Slices, numbers and None are applied to parts; any other key is applied to the whole tensor."""
    tensor, key = args
    if not isinstance(tensor, SpatialTensor):
        return func(tensor, pytree.tree_map(_whole_slice_leaf, key))
    keys = key if isinstance(key, tuple) else (key,)
    simple = all(entry is None or entry is Ellipsis or isinstance(entry, int | slice) for entry in keys)
    if not simple or any(isinstance(entry, bool) for entry in keys):
        return func(whole(tensor), pytree.tree_map(_whole_slice_leaf, key))
    used = sum(entry is not None and entry is not Ellipsis for entry in keys)
    rest = (slice(None),) * (len(where_of(tensor)) - used)
    position = keys.index(Ellipsis) if Ellipsis in keys else len(keys)
    return _sliced(tensor, (*keys[:position], *rest, *keys[position + 1 :]))


def _whole_slice_leaf(leaf: Any) -> Any:
    return whole(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _sliced(tensor: torch.Tensor, keys: tuple[Any, ...]) -> torch.Tensor:
    space, where = space_of([tensor]), where_of(tensor)
    numbers = [
        dim for dim, entry in enumerate([k for k in keys if k is not None]) if isinstance(entry, int) and where[dim]
    ]
    slices = [entry for entry in keys if entry is not None]
    empty = [dim for dim, entry in enumerate(slices) if isinstance(entry, slice) and _is_empty(entry, where[dim])]
    tensor = whole(tensor, numbers + empty)
    where, part = where_of(tensor), local(tensor)
    result: list[Along | None] = []
    plain: list[Any] = []
    dim = 0
    for entry in keys:
        along = where[dim] if entry is not None else None
        plain.append(entry if along is None else slice(None))
        if entry is None:
            result.append(None)
            continue
        if isinstance(entry, slice):
            if along is not None and entry != slice(None):
                start, stop, step = entry.indices(along.extent)
                window = Window(stride=step, before=-start, after=stop - along.extent)
                part, along = _moved_rows(part, dim, along, window, 0.0, space)
            result.append(along)
        dim += 1
    return cut(part[tuple(plain)], tuple(result), space)


def _is_empty(entry: slice, along: Along | None) -> bool:
    return along is not None and len(range(*entry.indices(along.extent))) == 0

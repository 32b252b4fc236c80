"""Functions that reorder, join, reduce or reshape a cut tensor; where parts do not suffice, the whole is fetched."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from tutti.errors import PlanError
from tutti.parallel.spatial.halo_exchange import SpatialGroup, all_sum, fetch
from tutti.parallel.spatial.halo_geometry import Window, bounds_of, owned
from tutti.parallel.spatial.spatial_elementwise import elementwise, shape_of
from tutti.parallel.spatial.spatial_tensor import (
    HANDLERS,
    Along,
    CutTensor,
    Where,
    cut,
    handles,
    local,
    narrowed,
    space_of,
    where_of,
    whole,
)

Function = Callable[..., Any]


def _dims(dims: Any, count: int) -> list[int]:
    """Dims as a list of numbers of 0 or more; None: all."""
    if dims is None or dims == ():
        return list(range(count))
    return sorted(dim % count for dim in ((dims,) if isinstance(dims, int) else dims))


def _without(where: Where, dims: Iterable[int], *, keep: bool) -> Where:
    """The geometry after `dims` have been reduced."""
    gone = set(dims)
    return tuple(None if i in gone else along for i, along in enumerate(where) if keep or i not in gone)


# Where the region ends: the whole tensor is needed


def ending(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Fetch the whole of every tensor, and go on without cuts."""
    return func(*map(_whole_leaf, args), **{name: _whole_leaf(value) for name, value in kwargs.items()})


def _whole_leaf(value: Any) -> Any:
    if isinstance(value, list | tuple) and any(isinstance(one, CutTensor) for one in value):
        return type(value)(map(_whole_leaf, value))
    return whole(value) if isinstance(value, torch.Tensor) else value


_ENDING = (
    "flatten view reshape view_as reshape_as unflatten ravel tolist numpy item __float__ __int__ __bool__ "
    "adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d median quantile equal allclose"
)
HANDLERS.update(dict.fromkeys(_ENDING.split(), ending))


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
    """Sum or mean over dims, cut or not: this rank's, then over the ranks along the axes that are gone."""
    where, shape, space = where_of(tensor), shape_of(tensor), space_of([tensor])
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
    """Reductions along dims that are not cut; along others, of the whole tensor."""
    tensor, *rest = args
    if rest and isinstance(rest[0], torch.Tensor):
        return elementwise(func, args, kwargs)
    where, named = where_of(tensor), "dim" in kwargs
    given = kwargs["dim"] if named else (rest[0] if rest and func.__name__ != "norm" else None)
    keep = kwargs.get("keepdim", any(value is True for value in rest[1:]))
    positional_only = func.__name__ in ("var", "std") and not named
    if given is None or isinstance(given, bool) or positional_only:
        return ending(func, args, kwargs)
    dims = _dims(given, len(where))
    if any(where[i] for i in dims):
        tensor = whole(tensor, dims)
    result = func(local(tensor), *rest, **kwargs)
    after, space = _without(where_of(tensor), dims, keep=keep), space_of([args[0]])
    if isinstance(result, tuple):
        return type(result)([cut(one, after, space) for one in result])
    return cut(result, after, space)


@handles("softmax", "log_softmax", "softmin", "normalize", "cumsum", "glu", "flip", "roll", "layer_norm", "rms_norm")
def _along(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Functions along dims (normalised shapes: the last ones), which must not be cut; where they are, of the whole."""
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
        given = kwargs.get("dim", kwargs.get("dims", rest[position] if len(rest) > position else default))
        dims = _dims(given, len(where))
    if any(where[i] for i in dims):
        tensor = whole(tensor, dims)
    return cut(func(local(tensor), *rest, **kwargs), where_of(tensor), space_of(args))


@handles("linear")
def _linear(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Along the last dim, which must not be cut."""
    tensor, *rest = args
    if not isinstance(tensor, CutTensor):
        raise PlanError("a weight that mesh.space cuts; only activations may be cut")
    where = where_of(tensor)
    if where[-1] is not None:
        tensor = whole(tensor, [len(where) - 1])
    return cut(func(local(tensor), *rest, **kwargs), where_of(tensor), space_of(args))


# Reordering


def _reordered(tensor: torch.Tensor, order: list[int]) -> torch.Tensor:
    where = where_of(tensor)
    return cut(local(tensor).permute(order), tuple(where[i] for i in order), space_of([tensor]))


@handles("permute")
def _permute(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, *rest = args
    order = kwargs.get("dims", rest[0] if rest and not isinstance(rest[0], int) else rest)
    return _reordered(tensor, [dim % len(where_of(tensor)) for dim in order])


@handles("transpose", "swapaxes", "swapdims")
def _transpose(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, *rest = args
    one, other = (*rest, *kwargs.values())
    order = list(range(len(where_of(tensor))))
    order[one], order[other] = order[other], order[one]
    return _reordered(tensor, order)


@handles("movedim", "moveaxis")
def _movedim(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, source, target = (*args, *kwargs.values())
    count = len(where_of(tensor))
    return _reordered(tensor, _moved(count, source, target))


def _moved(count: int, source: Any, target: Any) -> list[int]:
    """Order of dims after movedim: sizes that number the dims are moved, and read."""
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
    """Drops dims of size 1, of the whole tensor's sizes."""
    tensor, *rest = args
    where, shape = where_of(tensor), shape_of(tensor)
    given = rest[0] if rest else kwargs.get("dim")
    gone = [i for i in _dims(given, len(where)) if shape[i] == 1]
    return cut(local(tensor).squeeze(gone), _without(where, gone, keep=False), space_of(args))


# Joining and taking apart


@handles("cat", "concat", "concatenate")
def _cat(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Along a dim that is not cut; tensors that are whole where others are cut are narrowed."""
    tensors = list(args[0] if args else kwargs["tensors"])
    dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
    space, count = space_of(tensors), len(where_of(tensors[0]))
    dim %= count
    tensors = [whole(tensor, [dim]) for tensor in tensors]
    where = _common(tensors, skip=dim)
    parts = []
    for tensor in tensors:
        part, own = local(tensor), where_of(tensor)
        for i, along in enumerate(where):
            if along is not None and own[i] is None:
                if part.shape[i] != along.extent:
                    raise PlanError(f"cat of tensors of {part.shape[i]} and {along.extent} rows along dim {i}")
                part = narrowed(part, i, along, space)
        parts.append(part)
    return cut(torch.cat(parts, dim), where, space)


def _common(tensors: list[torch.Tensor], skip: int) -> Where:
    """How the tensors are cut together, dim `skip` aside."""
    where = list(where_of(tensors[0]))
    for tensor in tensors:
        for i, along in enumerate(where_of(tensor)):
            if i != skip and along is not None:
                if where[i] not in (None, along):
                    shapes = [tuple(shape_of(one)) for one in tensors]
                    raise PlanError(f"cat of tensors of different sizes: {shapes}; make them equal but for dim {skip}")
                where[i] = along
    return tuple(where)


@handles("stack")
def _stack(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = args[0] if args else kwargs["tensors"]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    raised = [
        _unsqueeze(torch.unsqueeze, (one, dim), {}) if isinstance(one, CutTensor) else one.unsqueeze(dim)
        for one in tensors
    ]
    return _cat(torch.cat, (raised, dim), {})


@handles("chunk", "split", "split_with_sizes", "unbind", "tensor_split")
def _separate(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Along a dim that is not cut; else of the whole."""
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
    part: torch.Tensor, dim: int, along: Along | None, window: Window, fill: float, space: SpatialGroup
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
        return func(tensor, pytree.tree_map(_whole_slice_leaf, key))
    keys = key if isinstance(key, tuple) else (key,)
    simple = all(one is None or one is Ellipsis or isinstance(one, int | slice) for one in keys)
    if not simple or any(isinstance(one, bool) for one in keys):
        return func(whole(tensor), pytree.tree_map(_whole_slice_leaf, key))
    used = sum(one is not None and one is not Ellipsis for one in keys)
    rest = (slice(None),) * (len(where_of(tensor)) - used)
    place = keys.index(Ellipsis) if Ellipsis in keys else len(keys)
    return _sliced(tensor, (*keys[:place], *rest, *keys[place + 1 :]))


def _whole_slice_leaf(leaf: Any) -> Any:
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

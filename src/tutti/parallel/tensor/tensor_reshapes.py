"""Handlers for functions that change the shape: views, permutations, slices and joins."""

import itertools
import operator
from typing import Any

import torch

from tutti.parallel.divided_tensor import whole_shape
from tutti.parallel.tensor.partition_ranges import viewed
from tutti.parallel.tensor.tensor_activation import PartPlacement, SplitTensor, handles, named, parted, properties
from tutti.parallel.tensor.tensor_collectives import take

_T = properties("T")


def _moved(tensor: torch.Tensor, place: PartPlacement, dim: int) -> torch.Tensor:
    """Mark `tensor` as a part that is divided along `dim`."""
    return parted(tensor, PartPlacement(dim=dim, spread=place.spread, group=place.group))


def _sizes(values: tuple[Any, ...]) -> tuple[int, ...]:
    """Sizes given as separate arguments or as one sequence."""
    flat = values[0] if len(values) == 1 and not isinstance(values[0], int | torch.Tensor) else values
    return tuple(operator.index(value) for value in flat)


@handles(*named("view reshape"))
def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    first, rest = args[0], args[1:] or tuple(kwargs.values())
    if not isinstance(first, SplitTensor) or not rest or isinstance(rest[0], torch.dtype):
        return NotImplemented
    return _as_shape(first, _sizes(rest), func is torch.Tensor.view)


@handles(torch.Tensor.view_as, torch.Tensor.reshape_as)
def _view_as(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not isinstance(args[0], SplitTensor):
        return args[0].reshape(whole_shape(args[1]))
    return _as_shape(args[0], whole_shape(args[1]), func is torch.Tensor.view_as)


@handles(*named("flatten"))
def _flatten(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shape = whole_shape(args[0])
    start = args[1] if len(args) > 1 else kwargs.get("start_dim", 0)
    end = args[2] if len(args) > 2 else kwargs.get("end_dim", -1)
    start, end = start % len(shape), end % len(shape)
    middle = torch.Size(shape[start : end + 1]).numel()
    return _as_shape(args[0], (*shape[:start], middle, *shape[end + 1 :]), False)


@handles(*named("unflatten"))
def _unflatten(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 3:
        return NotImplemented
    shape, dim = whole_shape(args[0]), args[1] % len(args[0].shape)
    sizes = _filled(_sizes((args[2],)), shape[dim])
    return _as_shape(args[0], (*shape[:dim], *sizes, *shape[dim + 1 :]), False)


def _filled(sizes: tuple[int, ...], numel: int) -> tuple[int, ...]:
    """Replace a size of -1 by the size that makes `numel` elements."""
    known = torch.Size(size for size in sizes if size != -1).numel()
    return tuple(numel // max(known, 1) if size == -1 else size for size in sizes)


def _as_shape(first: Any, sizes: tuple[int, ...], only_view: bool) -> Any:
    place, shape = first.place, whole_shape(first)
    target = _filled(sizes, torch.Size(shape).numel())
    moved = viewed(shape, place.dim, place.spread, target)
    if moved is None:
        return NotImplemented
    dim, spread = moved
    local_sizes = list(target)
    local_sizes[dim] = spread.local(place.group.rank)
    if only_view and not first.is_contiguous():
        try:
            result = torch.Tensor.view(first, local_sizes)
        except RuntimeError:  # the whole tensor can be viewed so, but the strides of the part may not allow it
            result = first.reshape(local_sizes)
    else:
        result = first.reshape(local_sizes)
    return parted(result, PartPlacement(dim=dim, spread=spread, group=place.group))


@handles(*named("permute"))
def _permute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dims = [dim % args[0].ndim for dim in _sizes(args[1:] or tuple(kwargs.values()))]
    return _moved(torch.permute(args[0], dims), args[0].place, dims.index(args[0].place.dim))


@handles(*named("transpose swapaxes swapdims"))
def _transpose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    a, b = (dim % args[0].ndim for dim in (*args[1:], *kwargs.values()))
    return _moved(torch.transpose(args[0], a, b), args[0].place, {a: b, b: a}.get(args[0].place.dim, args[0].place.dim))


@handles(*_T, *properties("mT"), *named("t"))
def _matrix_transpose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dims = args[0].ndim
    if dims < 2 or (dims > 2 and func in _T):
        return NotImplemented
    return _transpose(torch.transpose, (args[0], dims - 2, dims - 1), {})


@handles(*named("unsqueeze"))
def _unsqueeze(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dim = (args[1] if len(args) > 1 else kwargs["dim"]) % (args[0].ndim + 1)
    return _moved(torch.unsqueeze(args[0], dim), args[0].place, args[0].place.dim + (dim <= args[0].place.dim))


@handles(*named("squeeze"))
def _squeeze(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    place, shape = args[0].place, whole_shape(args[0])
    arguments = args[1:] or tuple(kwargs.values())
    dims = [dim % len(shape) for dim in _sizes(arguments)] if arguments else range(len(shape))
    removed = [dim for dim in dims if shape[dim] == 1]
    if place.dim in removed:
        return NotImplemented
    return _moved(torch.squeeze(args[0], tuple(removed)), place, place.dim - sum(dim < place.dim for dim in removed))


@handles(*named("expand broadcast_to") if hasattr(torch, "expand") else [torch.Tensor.expand, torch.broadcast_to])
def _expand(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    first, place = args[0], args[0].place
    sizes = list(_sizes(args[1:] or tuple(kwargs.values())))
    dim = place.dim + len(sizes) - first.ndim
    if sizes[dim] not in (-1, place.spread.size):
        return NotImplemented
    sizes[dim] = place.spread.local(place.group.rank)
    return _moved(first.expand(sizes), place, dim)


@handles(torch.Tensor.expand_as)
def _expand_as(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not isinstance(args[0], SplitTensor):
        return args[0].expand(whole_shape(args[1]))
    return _expand(torch.Tensor.expand, (args[0], *whole_shape(args[1])), {})


@handles(*named("repeat_interleave"))
def _repeat_interleave(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    arguments = dict(zip(("input", "repeats", "dim"), args, strict=False)) | kwargs
    first, times, dim = arguments.get("input"), arguments.get("repeats"), arguments.get("dim")
    if not isinstance(first, SplitTensor) or not isinstance(times, int) or dim is None or "output_size" in arguments:
        return NotImplemented
    place, dim = first.place, dim % first.ndim
    result = torch.repeat_interleave(first, times, dim)
    spread = place.spread.scaled(times) if dim == place.dim else place.spread
    return parted(result, PartPlacement(dim=place.dim, spread=spread, group=place.group))


def narrow(first: Any, dim: int, start: int, stop: int) -> Any:
    """Positions start .. stop - 1 of the whole tensor along `dim`."""
    place = first.place
    if dim != place.dim:
        return parted(torch.narrow(first, dim, start, stop - start), place)
    spread, rank = place.spread.narrowed(start, stop), place.group.rank
    result = torch.narrow(first, dim, place.spread.before(rank, start), spread.local(rank))
    return parted(result, PartPlacement(dim=dim, spread=spread, group=place.group))


@handles(*named("narrow"))
def _narrow(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 4 or not all(isinstance(arg, int) for arg in args[1:]):
        return NotImplemented
    first, dim, start, length = args
    dim = dim % first.ndim
    start = start % whole_shape(first)[dim] if start < 0 else start
    return narrow(first, dim, start, start + length)


@handles(*named("split split_with_sizes"))
def _split(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = ("tensor", "split_size_or_sections", "dim")
    arguments = dict(zip(names, args, strict=False)) | kwargs
    size: Any = arguments.get("split_size_or_sections", arguments.get("split_size", arguments.get("split_sizes")))
    first, dim = arguments["tensor"], arguments.get("dim", 0) % arguments["tensor"].ndim
    total = whole_shape(first)[dim]
    lengths = [min(size, total - start) for start in range(0, total, size)] if isinstance(size, int) else list(size)
    return tuple(_cut(first, dim, lengths))


@handles(*named("chunk"))
def _chunk(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    arguments = dict(zip(("input", "chunks", "dim"), args, strict=False)) | kwargs
    first, dim = arguments["input"], arguments.get("dim", 0) % arguments["input"].ndim
    total = whole_shape(first)[dim]
    size = -(-total // arguments["chunks"])
    return tuple(_cut(first, dim, [min(size, total - start) for start in range(0, total, max(size, 1))]))


def _cut(first: Any, dim: int, lengths: list[int]) -> list[Any]:
    bounds = [sum(lengths[:count]) for count in range(len(lengths) + 1)]
    return [narrow(first, dim, a, b) for a, b in itertools.pairwise(bounds)]


@handles(*named("unbind"))
def _unbind(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % args[0].ndim
    place = args[0].place
    if dim == place.dim:
        return NotImplemented
    return tuple(_moved(piece, place, place.dim - (dim < place.dim)) for piece in torch.unbind(args[0], dim))


@handles(*named("select"))
def _select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 3 or args[1] % args[0].ndim == args[0].place.dim:
        return NotImplemented
    dim, place = args[1] % args[0].ndim, args[0].place
    return _moved(torch.select(args[0], dim, args[2]), place, place.dim - (dim < place.dim))


@handles(torch.Tensor.__getitem__)
def _getitem(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Slices, None, an ellipsis, and integers along dims that are not divided."""
    first, index = args
    if not isinstance(first, SplitTensor):
        return NotImplemented
    index = index if isinstance(index, tuple) else (index,)
    plain = all(item is None or item is Ellipsis or isinstance(item, slice | int) for item in index)
    if not plain or any(isinstance(item, bool) for item in index):
        return NotImplemented
    used = sum(item is not None and item is not Ellipsis for item in index)
    if Ellipsis not in index:
        index = (*index, Ellipsis)
    ellipsis_at = index.index(Ellipsis)
    index = (*index[:ellipsis_at], *[slice(None)] * (first.ndim - used), *index[ellipsis_at + 1 :])
    source = target = 0
    result, place = first, first.place
    local_index: list[Any] = []
    new_dim = place.dim
    for item in index:
        if source == place.dim and item is not None:
            if not isinstance(item, slice) or item.step not in (None, 1):
                return NotImplemented
            start, stop, _ = item.indices(place.spread.size)
            result, new_dim, item = narrow(first, place.dim, start, max(start, stop)), target, slice(None)
        local_index.append(item)
        source += item is not None
        target += item is None or isinstance(item, slice)
    return _moved(torch.Tensor.__getitem__(result, tuple(local_index)), result.place, new_dim)


@handles(*named("cat concat concatenate"))
def _cat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    arguments = dict(zip(("tensors", "dim"), args, strict=False)) | kwargs
    return _joined(torch.cat, list(arguments["tensors"]), arguments.get("dim", 0), 0)


@handles(*named("stack"))
def _stack(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    arguments = dict(zip(("tensors", "dim"), args, strict=False)) | kwargs
    return _joined(torch.stack, list(arguments["tensors"]), arguments.get("dim", 0), 1)


def _joined(func: Any, tensors: list[Any], dim: int, new: int) -> Any:
    """Join along a dim that is not divided. All parts must have the same placement; whole tensors are cut to match.

    Args:
        func: torch.cat or torch.stack.
        tensors: the tensors to join.
        dim: dim of the result.
        new: 1 if the function adds a dim, else 0.
    """
    place = next(t.place for t in tensors if isinstance(t, SplitTensor))
    if not new:
        tensors = [t for t in tensors if whole_shape(t) != (0,)]  # torch.cat ignores these; empty caches have them
    dims = tensors[0].ndim
    dim = dim % (dims + new)
    new_place_dim = place.dim + (new and dim <= place.dim)
    fits = all(t.ndim == dims > place.dim and whole_shape(t)[place.dim] == place.spread.size for t in tensors)
    if (
        not fits
        or (not new and dim == place.dim)
        or any(t.place != place for t in tensors if isinstance(t, SplitTensor))
    ):
        return NotImplemented
    parts = [t if isinstance(t, SplitTensor) else take(t, place.dim, place.spread, place.group) for t in tensors]
    return _moved(func(parts, dim), place, new_place_dim)

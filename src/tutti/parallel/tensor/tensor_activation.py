"""TensorParallelActivation: an activation that is divided over the split ranks and behaves as the whole tensor.

It is a plain local tensor that knows which ranges of which dim it holds. It reports the whole shape. Every torch
function called with it is looked up in a table: functions in the table compute on the part, with the same result, and
all others get the gathered whole tensor. A model's own code therefore runs unchanged; a layout that was guessed badly
makes it slower, never wrong. A function that would write into a gathered copy is refused.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree

from tutti.errors import ScriptError
from tutti.parallel.tensor.partition_ranges import RankRanges
from tutti.parallel.tensor.tensor_collectives import SplitGroup, copy, gather, pieces, take

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""fn(torch function, args, kwargs) -> result, or NotImplemented if it cannot compute on parts.

It runs with torch's dispatch to subclasses disabled, so a TensorParallelActivation argument acts as the local tensor.
"""

HANDLERS: dict[Any, Handler] = {}
"""torch function -> its computation on parts; filled when the modules of this package are imported."""

H = TypeVar("H", bound=Handler)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPlacement:
    """Where a part lies in its whole tensor.

    Attributes:
        dim: the divided dim, not negative.
        spread: the ranges of `dim` that each rank holds.
        group: the ranks that hold the parts.
    """

    dim: int
    spread: RankRanges
    group: SplitGroup


class TensorParallelActivation(torch.Tensor):
    """This rank's part of a whole tensor, at `place`. Made by `parted`."""

    place: PartPlacement

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if not torch.is_grad_enabled():
                _refuse_custom_function(args)
            handler = HANDLERS.get(func)
            if handler is not None:
                if not args and "input" in kwargs:
                    args, kwargs = (kwargs["input"],), {key: value for key, value in kwargs.items() if key != "input"}
                result = handler(func, args, kwargs)
                if result is not NotImplemented:
                    return result
            return on_whole(func, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            ranges = self.place.spread.parts[self.place.group.rank]
            return f"TensorParallelActivation(whole {whole_shape(self)}, dim {self.place.dim} at {ranges}, local {local(self)!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return whole(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return parted(local(self).clone(), self.place)


def handles(*functions: Any) -> Callable[[H], H]:
    """Decorator: register a handler for these functions."""

    def enter(handler: H) -> H:
        HANDLERS.update(dict.fromkeys(functions, handler))
        return handler

    return enter


def named(words: str) -> list[Any]:
    """The functions of these names in torch, torch.Tensor, torch.nn.functional and torch.special."""
    spaces = (torch, torch.Tensor, torch.nn.functional, torch.special, torch._C._nn)
    names = words.split()
    functions = [getattr(space, name) for name in names for space in spaces if hasattr(space, name)]
    missing = [name for name in names if not any(hasattr(space, name) for space in spaces)]
    assert not missing, missing
    return functions


def properties(words: str) -> list[Any]:
    """The functions that torch dispatches when these properties of a tensor are read."""
    return [getattr(torch.Tensor, name).__get__ for name in words.split()]


def parted(tensor: torch.Tensor, place: PartPlacement) -> torch.Tensor:
    """Mark `tensor`, which is this rank's part, as a part of a whole tensor.

    A plain tensor is changed in place, without a copy, so it must be fresh.
    """
    if isinstance(tensor, TensorParallelActivation):
        if tensor.place == place:
            return tensor
        tensor = local(tensor)
    elif type(tensor) is not torch.Tensor:
        tensor = tensor.as_subclass(torch.Tensor)
    tensor.__class__ = TensorParallelActivation
    tensor.place = place  # type: ignore[attr-defined]
    return tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part as a plain tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def whole(value: Any) -> Any:
    """The whole tensor, gathered if `value` is a part; any other value unchanged. Collective for a part."""
    if not isinstance(value, TensorParallelActivation):
        return value
    place = value.place
    with torch._C.DisableTorchFunctionSubclass():
        return gather(value, place.dim, place.spread, place.group)


def all_whole(tree: Any) -> Any:
    """Apply `whole` to every leaf of a nested structure."""
    if not any(isinstance(leaf, TensorParallelActivation) for leaf in pytree.tree_leaves(tree)):
        return tree
    return pytree.tree_map(whole, tree)


def whole_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of the whole tensor. Call it only where dispatch to subclasses is disabled."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, TensorParallelActivation):
        return shape
    place = tensor.place
    return (*shape[: place.dim], place.spread.size, *shape[place.dim + 1 :])


def on_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the function with gathered tensors.

    Raises:
        ScriptError: if the function would change a gathered copy in place.
    """
    name = getattr(func, "__name__", str(func))
    inplace = (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__set__", "__delitem__")
    inplace = inplace or name in ("__iadd__", "__isub__", "__imul__", "__itruediv__", "__iand__", "__ior__")
    first = args[0] if args else None
    if (inplace and isinstance(first, TensorParallelActivation)) or isinstance(
        kwargs.get("out"), TensorParallelActivation
    ):
        raise ScriptError(
            f"{name} changes in place an activation that is divided over the split axis, which is not supported; "
            "use a function that returns a new tensor, or keep whole the layer that computes the activation: "
            "LayoutRule(modules=..., placement='replicate')"
        )
    return func(*all_whole(args), **all_whole(kwargs))


def fit(tensor: Any, back: int, spread: RankRanges, group: SplitGroup) -> Any:
    """Make an operand match parts of ranges `spread` along dim `back`, which is negative (counted from the end).

    A part that contains these ranges is narrowed; any other part is gathered. A whole tensor is cut to this rank's
    part. If it broadcasts along the dim it is copied instead, and its gradient is all-reduced.
    """
    if not isinstance(tensor, torch.Tensor):
        return tensor
    if isinstance(tensor, TensorParallelActivation):
        place, dims = tensor.place, tensor.ndim
        if place.dim - dims == back and place.spread.contains(spread):
            if place.spread == spread:
                return tensor
            return pieces(tensor, place.dim, place.spread.inside(group.rank, spread))
        tensor = whole(tensor)
    if tensor.ndim < -back or tensor.shape[back] == 1 != spread.size:
        return copy(tensor, group)
    return take(tensor, tensor.ndim + back, spread, group)


def lead(
    tensors: list[Any], forced: TensorParallelActivation | None = None
) -> tuple[int, RankRanges, SplitGroup] | None:
    """Choose the dim (negative), ranges and group on which an elementwise function of `tensors` computes.

    The choice is the operand with the fewest positions, whose ranges the others contain, so that most operands need no
    communication. `forced` overrides it.

    Returns:
        None if the function cannot be computed on parts.
    """
    parts = [t for t in tensors if isinstance(t, TensorParallelActivation)] if forced is None else [forced]
    if not parts:
        return None
    dims = [t.place.dim - t.ndim for t in parts]
    chosen = min(range(len(parts)), key=lambda i: sum(parts[i].place.spread.local(r) for r in range(_size(parts[i]))))
    back, spread = dims[chosen], parts[chosen].place.spread
    if any(isinstance(t, torch.Tensor) and not _meets(t, back, spread.size) for t in tensors):
        return None
    return back, spread, parts[chosen].place.group


def _size(tensor: TensorParallelActivation) -> int:
    return tensor.place.group.size


def _meets(tensor: torch.Tensor, back: int, size: int) -> bool:
    """Whether the whole tensor has this size along the dim, or broadcasts to it."""
    shape = whole_shape(tensor)
    return len(shape) < -back or shape[back] in (1, size)


def _refuse_custom_function(args: tuple[Any, ...]) -> None:
    """Refuse a TensorParallelActivation argument of a custom autograd function: its backward would see only the part."""
    if not any(isinstance(arg, TensorParallelActivation) and arg.requires_grad for arg in args):
        return
    frame: Any = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(first, torch.autograd.function.FunctionCtx):
            raise ScriptError(
                f"the autograd function {type(first).__name__.removesuffix('Backward')} got an activation that is "
                "divided over the split axis; keep whole the layer that computes the activation: "
                "LayoutRule(modules=..., placement='replicate')"
            )
        frame = frame.f_back

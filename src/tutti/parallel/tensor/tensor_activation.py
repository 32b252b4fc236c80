"""SplitTensor: an activation that is divided over the split ranks and behaves as the whole tensor.

It is a plain local tensor that knows which ranges of which dim it holds. It reports the whole shape. Every torch
function called with it is looked up in a table: functions in the table compute on the part, with the same result, and
all others get the gathered whole tensor. A model's own code therefore runs unchanged; a layout that was guessed badly
makes it slower, never wrong. A function that would write into a gathered copy is refused.
"""

import sys
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.utils import _pytree as pytree

from tutti.errors import ScriptError
from tutti.parallel.divided_tensor import DividedTensor, local, whole_shape
from tutti.parallel.tensor.partition_ranges import RankRanges
from tutti.parallel.tensor.tensor_collectives import SplitGroup, copy, gather, pieces, take


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


class SplitTensor(DividedTensor):
    """This rank's part of a whole tensor, at `place`. Made by `parted`."""

    place: PartPlacement

    @staticmethod
    def check_call(args: tuple[Any, ...]) -> None:
        if not torch.is_grad_enabled():
            _refuse_custom_function(args)

    @classmethod
    def call_unhandled(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return on_whole(func, args, kwargs)

    def _whole_shape(self) -> tuple[int, ...]:
        place, shape = self.place, tuple(self.shape)
        return (*shape[: place.dim], place.spread.size, *shape[place.dim + 1 :])

    def with_same_placement(self, part: torch.Tensor) -> Self:
        result: Self = parted(part, self.place)  # type: ignore[assignment]
        return result

    def placement_text(self) -> str:
        return f"dim {self.place.dim} at {self.place.spread.parts[self.place.group.rank]}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return whole(self).__reduce_ex__(protocol)


handles = SplitTensor.handles


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
    if isinstance(tensor, SplitTensor):
        if tensor.place == place:
            return tensor
        tensor = local(tensor)
    elif type(tensor) is not torch.Tensor:
        tensor = tensor.as_subclass(torch.Tensor)
    tensor.__class__ = SplitTensor
    tensor.place = place  # type: ignore[attr-defined]
    return tensor


def whole(value: Any) -> Any:
    """The whole tensor, gathered if `value` is a part; any other value unchanged. Collective for a part."""
    if not isinstance(value, SplitTensor):
        return value
    place = value.place
    with torch._C.DisableTorchFunctionSubclass():
        return gather(value, place.dim, place.spread, place.group)


def all_whole(tree: Any) -> Any:
    """Apply `whole` to every leaf of a nested structure."""
    if not any(isinstance(leaf, SplitTensor) for leaf in pytree.tree_leaves(tree)):
        return tree
    return pytree.tree_map(whole, tree)


def on_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the function with gathered tensors.

    Raises:
        ScriptError: if the function would change a gathered copy in place.
    """
    name = getattr(func, "__name__", str(func))
    inplace = (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__set__", "__delitem__")
    inplace = inplace or name in ("__iadd__", "__isub__", "__imul__", "__itruediv__", "__iand__", "__ior__")
    first = args[0] if args else None
    if (inplace and isinstance(first, SplitTensor)) or isinstance(kwargs.get("out"), SplitTensor):
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
    if isinstance(tensor, SplitTensor):
        place, dims = tensor.place, tensor.ndim
        if place.dim - dims == back and place.spread.contains(spread):
            if place.spread == spread:
                return tensor
            return pieces(tensor, place.dim, place.spread.inside(group.rank, spread))
        tensor = whole(tensor)
    if tensor.ndim < -back or tensor.shape[back] == 1 != spread.size:
        return copy(tensor, group)
    return take(tensor, tensor.ndim + back, spread, group)


def lead(tensors: list[Any], forced: SplitTensor | None = None) -> tuple[int, RankRanges, SplitGroup] | None:
    """Choose the dim (negative), ranges and group on which an elementwise function of `tensors` computes.

    The choice is the operand with the fewest positions, whose ranges the others contain, so that most operands need no
    communication. `forced` overrides it.

    Returns:
        None if the function cannot be computed on parts.
    """
    parts = [t for t in tensors if isinstance(t, SplitTensor)] if forced is None else [forced]
    if not parts:
        return None
    dims = [t.place.dim - t.ndim for t in parts]
    chosen = min(range(len(parts)), key=lambda i: sum(parts[i].place.spread.local(r) for r in range(_size(parts[i]))))
    back, spread = dims[chosen], parts[chosen].place.spread
    if any(isinstance(t, torch.Tensor) and not _meets(t, back, spread.size) for t in tensors):
        return None
    return back, spread, parts[chosen].place.group


def _size(tensor: SplitTensor) -> int:
    return tensor.place.group.size


def _meets(tensor: torch.Tensor, back: int, size: int) -> bool:
    """Whether the whole tensor has this size along the dim, or broadcasts to it."""
    shape = whole_shape(tensor)
    return len(shape) < -back or shape[back] in (1, size)


def _refuse_custom_function(args: tuple[Any, ...]) -> None:
    """Refuse a SplitTensor argument of a custom autograd function: its backward would see only the part."""
    if not any(isinstance(arg, SplitTensor) and arg.requires_grad for arg in args):
        return
    frame: Any = sys._getframe(3)
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

"""Arguments and results taken apart into leaves: torch's trees, with data classes among the containers."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from tutti.errors import PlanError

_LEAVES = frozenset(
    {torch.Tensor, torch.nn.Parameter, FakeTensor, int, float, bool, str, type(None), torch.dtype, torch.device}
)
"""Types of leaves that are met most: what consists of them needs none of torch's search for containers."""


@dataclass(frozen=True, slots=True)
class Form:
    """How leaves are put together: (args, kwargs) with `count` args and kwargs called `names`, or as `spec` says, or
    one leaf alone.
    """

    count: int | None = None
    names: tuple[Any, ...] = ()
    spec: pytree.TreeSpec | None = None


ALONE = Form()


def flatten(value: Any) -> tuple[list[Any], Form]:
    """Leaves of nested tuples, lists, dicts, named tuples and data classes (such as `transformers`' outputs)."""
    if type(value) in _LEAVES:
        return [value], ALONE
    if type(value) is tuple and len(value) == 2 and type(value[0]) is tuple and type(value[1]) is dict:
        args, kwargs = value
        leaves = [*args, *kwargs.values()]
        if _LEAVES.issuperset(map(type, leaves)):
            return leaves, Form(len(args), tuple(kwargs))
    leaves, spec = pytree.tree_flatten(value)
    new = {type(leaf) for leaf in leaves if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)}
    if not new:
        return leaves, Form(spec=spec)
    for kind in new:
        pytree.register_dataclass(kind)
    return flatten(value)


def unflatten(leaves: list[Any], form: Form) -> Any:
    """What `flatten` took apart, with other leaves."""
    if form.spec is not None:
        return pytree.tree_unflatten(leaves, form.spec)
    if form.count is None:
        return leaves[0]
    return tuple(leaves[: form.count]), dict(zip(form.names, leaves[form.count :], strict=True))


def refuse_hidden_tensors(leaf: Any, where: str) -> None:
    """Raise PlanError for an object that keeps tensors where they cannot be seen: they could not be sent on."""
    if type(leaf) in _LEAVES or isinstance(leaf, torch.nn.Module | torch.Tensor | type):
        return
    if hasattr(leaf, "__dict__") and any(isinstance(inner, torch.Tensor) for inner in _inside(vars(leaf))):
        raise PlanError(
            f"mesh.stage: {where} passes a {type(leaf).__name__} that holds tensors; pass tensors, tuples, lists, "
            "dicts or data classes between the modules that stages are made of"
        )


def _inside(values: dict[str, Any]) -> Iterator[Any]:
    for value in values.values():
        yield from pytree.tree_leaves(value)

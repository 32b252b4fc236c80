"""Arguments and results taken apart into leaves: torch's trees, with data classes among the containers."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tutti.errors import PlanError


def flatten(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Leaves of nested tuples, lists, dicts, named tuples and data classes (such as `transformers`' outputs)."""
    leaves, spec = pytree.tree_flatten(value)
    new = {type(leaf) for leaf in leaves if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)}
    if not new:
        return leaves, spec
    for kind in new:
        pytree.register_dataclass(kind)
    return flatten(value)


unflatten = pytree.tree_unflatten


def refuse_hidden_tensors(leaf: Any, where: str) -> None:
    """Raise PlanError for an object that keeps tensors where they cannot be seen: they could not be sent on."""
    if isinstance(leaf, torch.nn.Module | type) or not hasattr(leaf, "__dict__"):
        return
    if any(isinstance(inner, torch.Tensor) for inner in _inside(vars(leaf))):
        raise PlanError(
            f"mesh.stage: {where} passes a {type(leaf).__name__} that holds tensors; pass tensors, tuples, lists, "
            "dicts or data classes between the modules that stages are made of"
        )


def _inside(values: dict[str, Any]) -> Iterator[Any]:
    for value in values.values():
        yield from pytree.tree_leaves(value)


def map_leaves(function: Callable[[Any], Any], leaves: list[Any], spec: pytree.TreeSpec) -> Any:
    """The tree of `function(leaf)`."""
    return pytree.tree_unflatten([function(leaf) for leaf in leaves], spec)

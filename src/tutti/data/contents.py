"""What samples and batches of any class hold, by name: entries of containers, attributes of objects."""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_LEAVES = (
    torch.Tensor, np.ndarray, np.generic, *_PLAIN,
    type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType,
)  # fmt: skip


def is_plain(value: Any) -> bool:
    """Return whether a value is a number, a text, bytes or None."""
    return isinstance(value, _PLAIN)


def is_graph(value: Any) -> bool:
    """Return whether a value is a graph of PyTorch Geometric or the like: attributes by name, and a way to map them."""
    return not isinstance(value, Mapping | torch.Tensor | torch.nn.Module) and all(
        callable(getattr(value, name, None)) for name in ("keys", "__getitem__", "apply")
    )


def contents(value: Any) -> list[tuple[str, Any]] | None:
    """Return what a value holds, each with what to add to its name; None for a value that holds nothing by name."""
    if isinstance(value, _LEAVES):
        return None
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", entry) for key, entry in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{name}", getattr(value, name)) for name in value._fields]
    if isinstance(value, list | tuple):
        return [(f"[{index}]", entry) for index, entry in enumerate(value)]
    if isinstance(value, set | frozenset):
        return [(f"[{index}]", entry) for index, entry in enumerate(sorted(value, key=repr))]
    if dataclasses.is_dataclass(value):
        return [(f".{entry.name}", getattr(value, entry.name)) for entry in dataclasses.fields(value)]
    if is_graph(value):
        return [(f"[{key!r}]", value[key]) for key in value.keys()]  # noqa: SIM118 - not a dict
    attributes = getattr(value, "__dict__", None)
    return None if attributes is None else [(f".{name}", entry) for name, entry in attributes.items()]

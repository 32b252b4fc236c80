"""The tensors of a batch, whatever it is made of, by name: what is recorded of a batch, and compared."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from tutti.verify.alignment import sample_columns
from tutti.verify.recording import Values


def batch_tensors(batch: Any) -> Values:
    """Return copies of the tensors in a batch, by name.

    Packed sequences and nested tensors are padded, so that their rows are samples. Integers are copied whole, other
    wide tensors in evenly spread columns.
    """
    return {name: _copy(tensor) for name, tensor in _named(batch, "batch", frozenset())}


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    return sample_columns(tensor) if tensor.is_floating_point() else tensor.detach().to("cpu", copy=True)


def _named(value: Any, name: str, seen: frozenset[int]) -> Iterator[tuple[str, torch.Tensor]]:
    if id(value) in seen:
        return
    if isinstance(value, PackedSequence):
        padded, lengths = pad_packed_sequence(value, batch_first=True)
        yield from ((name, padded), (f"{name}.lengths", lengths))
    elif isinstance(value, torch.Tensor):
        yield name, value.to_padded_tensor(0.0) if value.is_nested else value
    elif isinstance(value, np.ndarray):
        if value.dtype.kind in "biufc":
            yield name, torch.from_numpy(np.ascontiguousarray(value))
    else:
        for key, entry in _entries(value):
            yield from _named(entry, f"{name}{key}", seen | {id(value)})


def _entries(value: Any) -> list[tuple[str, Any]]:
    """Return what a container or an object holds, each with what to add to its name."""
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", entry) for key, entry in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{field}", getattr(value, field)) for field in value._fields]
    if isinstance(value, list | tuple):
        return [(f"[{index}]", entry) for index, entry in enumerate(value)]
    if isinstance(value, type) or callable(value):
        return []
    if dataclasses.is_dataclass(value):
        return [(f".{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value)]
    keys = getattr(value, "keys", None)
    if callable(keys) and hasattr(value, "__getitem__"):  # a graph
        return [(f"[{key!r}]", value[key]) for key in keys()]
    return [(f".{key}", entry) for key, entry in getattr(value, "__dict__", {}).items()]

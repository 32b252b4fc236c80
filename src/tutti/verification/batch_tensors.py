"""The tensors of a batch, whatever it is made of, by name: what is recorded of a batch, and compared."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from tutti.data.contents import contents
from tutti.verification.alignment import sample_columns
from tutti.verification.recording import Values


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
        for key, entry in contents(value) or ():
            yield from _named(entry, f"{name}{key}", seen | {id(value)})

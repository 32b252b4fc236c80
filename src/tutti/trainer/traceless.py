"""Computes the model once more and leaves no trace in its modules or in the generators of random numbers."""

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tutti.data.seeds import preserved_generators

_CONTAINERS = (list, dict, set, deque)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """On exit, restore every module's attributes, buffers, lists and modes, and all generators."""
    saved = [_SavedModule(module) for module in model.modules()]
    devices = {parameter.device.index for parameter in model.parameters() if parameter.is_cuda}
    with preserved_generators(), torch.random.fork_rng(devices=sorted(devices), enabled=bool(devices)):
        try:
            yield
        finally:
            for state in saved:
                state.restore()


class _SavedModule:
    """The attributes of one module, by value where forward may change them in place."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.attributes = dict(module.__dict__)
        self.buffers = dict(module._buffers)
        own = [value for name, value in self.attributes.items() if not name.startswith("_")]
        self.containers = [(value, copy.copy(value)) for value in _containers(own)]
        tensors = [value for value in (*own, *self.buffers.values()) if isinstance(value, torch.Tensor)]
        self.tensors = [
            (tensor, tensor._version, tensor.detach().clone())
            for tensor in tensors
            if not tensor.is_meta and not tensor.is_inference()
        ]

    def restore(self) -> None:
        """Put back what forward has changed."""
        self.module.__dict__.clear()
        self.module.__dict__.update(self.attributes)
        self.module._buffers.clear()
        self.module._buffers.update(self.buffers)
        for value, before in self.containers:
            _refill(value, before)
        with torch.no_grad():
            for tensor, version, before in self.tensors:
                if tensor._version != version:
                    tensor.copy_(before)


def _containers(values: Iterable[Any], depth: int = 3) -> Iterator[Any]:
    """Yield the lists, dicts, sets and queues among `values` and in them."""
    for value in values:
        if type(value) in _CONTAINERS:
            yield value
            if depth > 1:
                yield from _containers(list(value.values() if isinstance(value, dict) else value), depth - 1)


def _refill(value: Any, before: Any) -> None:
    value.clear()
    (value.extend if isinstance(value, list | deque) else value.update)(before)

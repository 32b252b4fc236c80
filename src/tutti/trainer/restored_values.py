"""Copies of lists, dicts, tensors and generators' states that code may change in place, and their restoration."""

import copy
import math
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import nn

CONTAINERS = (list, dict, set, deque, defaultdict, OrderedDict, Counter)


class SavedContainers:
    """The lists, dicts, sets and queues among `values` and in them, with what they hold now.

    Args:
        values: the values.
        largest: longer ones are left out.
    """

    def __init__(self, values: Iterable[Any], largest: float = math.inf) -> None:
        self._saved = [(value, copy.copy(value)) for value in _containers(values, largest)]

    def restore(self) -> None:
        """Fill them again with what they held."""
        for value, before in self._saved:
            value.clear()
            (value.extend if isinstance(value, list | deque) else value.update)(before)


class SavedTensors:
    """The tensors and arrays of NumPy among `values`, with what is in them now.

    Args:
        values: the values.
        largest: tensors with more elements are left out.
    """

    def __init__(self, values: Iterable[Any], largest: float = math.inf) -> None:
        values = [*values]
        tensors = {id(value): value for value in values if isinstance(value, torch.Tensor)}
        self._saved = [
            (tensor, tensor._version, tensor.detach().clone())
            for tensor in tensors.values()
            if not tensor.is_meta and not tensor.is_inference() and tensor.numel() <= largest
        ]
        arrays = {id(value): value for value in values if isinstance(value, np.ndarray) and value.flags.writeable}
        self._arrays = [(array, array.copy()) for array in arrays.values() if array.size <= largest]

    def restore(self) -> None:
        """Write back what has been changed in place."""
        with torch.no_grad():
            for tensor, version, before in self._saved:
                with suppress(RuntimeError):  # its memory has been replaced
                    if tensor._version != version or _written_unseen(tensor, before):
                        tensor.copy_(before)
        for array, numbers in self._arrays:
            array[...] = numbers


class SavedGenerators:
    """The generators of random numbers among `values`, with their states."""

    def __init__(self, values: Sequence[Any]) -> None:
        self._torch = [(value, value.get_state()) for value in values if isinstance(value, torch.Generator)]
        self._numpy = [
            (value.bit_generator, value.bit_generator.state)
            for value in values
            if isinstance(value, np.random.Generator)
        ]
        self._older = [(value, value.get_state()) for value in values if isinstance(value, np.random.RandomState)]
        self._python = [(value, value.getstate()) for value in values if isinstance(value, random.Random)]

    def restore(self) -> None:
        """Set the states again."""
        for generator, state in self._torch:
            generator.set_state(state)
        for bits, numbers in self._numpy:
            bits.state = numbers
        for older, words in self._older:
            older.set_state(words)
        for python, version in self._python:
            python.setstate(version)


def _written_unseen(tensor: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether a tensor has other values: kernels write running statistics without changing `_version`."""
    return type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer) and not torch.equal(tensor, before)


def _containers(values: Iterable[Any], largest: float, depth: int = 3) -> Iterator[Any]:
    """Yield the lists, dicts, sets and queues among `values` and in them."""
    for value in values:
        if type(value) in CONTAINERS and len(value) <= largest:
            yield value
            if depth > 1:
                yield from _containers(list(value.values() if isinstance(value, dict) else value), largest, depth - 1)

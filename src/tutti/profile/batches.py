"""The batch a model is traced on: moved to meta, cut in half, described as inputs of one sample."""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from tutti.config.model import TensorShape
from tutti.profile.meta import SMALL_NUMEL, to_meta


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A collated batch of `samples` samples: `model(*args, **kwargs)`, then the loss of its output and `target`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    samples: int

    @property
    def on_meta(self) -> "Batch":
        """The batch with its floating tensors on meta; small integers and masks keep their values."""

        def move(tensor: Tensor) -> Tensor:
            floating = tensor.is_floating_point() or tensor.is_complex()
            if floating or tensor.numel() > SMALL_NUMEL:
                return to_meta(tensor).requires_grad_(tensor.requires_grad)
            return tensor.detach().cpu().clone()  # storage of its own: half a batch must not hold the whole one's

        args, kwargs, target = tree_map_only(Tensor, move, (self.args, self.kwargs, self.target))
        return Batch(args=args, kwargs=kwargs, target=target, samples=self.samples)

    @property
    def half(self) -> "Batch | None":
        """The first half of the samples; None if it cannot be cut: one sample, or no dimension counts samples."""
        count = self.samples // 2

        def cut(tensor: Tensor) -> Tensor:
            dim = batch_dim(tensor, self.samples)
            return tensor if dim is None else tensor.narrow(dim, 0, count)

        everything = (self.args, self.kwargs, self.target)
        leaves = tree_leaves(everything)
        cuttable = any(isinstance(leaf, Tensor) and batch_dim(leaf, self.samples) is not None for leaf in leaves)
        if count < 1 or not cuttable:
            return None
        args, kwargs, target = tree_map_only(Tensor, cut, everything)
        return Batch(args=args, kwargs=kwargs, target=target, samples=count)

    def inputs(self, model: nn.Module) -> tuple[TensorShape, ...]:
        """The forward call's tensors by the names of its parameters, without their batch dimension."""
        try:
            named = dict(inspect.signature(model.forward).bind_partial(*self.args, **self.kwargs).arguments)
        except (TypeError, ValueError):
            named = {**{f"input{i}": value for i, value in enumerate(self.args)}, **self.kwargs}
        return tuple(self._shape(name, tensor) for name, tensor in _tensors(named, ""))

    def _shape(self, name: str, tensor: Tensor) -> TensorShape:
        dim = batch_dim(tensor, self.samples)
        shape = tuple(size for i, size in enumerate(tensor.shape) if i != dim)
        return TensorShape(name=name, shape=shape, dtype=dtype_name(tensor.dtype))


def batch_dim(tensor: Tensor, samples: int) -> int | None:
    """The dimension that counts samples: the first of that size."""
    return next((dim for dim, size in enumerate(tensor.shape) if size == samples), None)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tensors(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """Tensors inside nested lists and dicts, with dotted paths."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _tensors(item, f"{path}.{index}" if path else str(index))

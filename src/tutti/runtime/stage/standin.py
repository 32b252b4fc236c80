"""Stand-ins: while a model is traced, its parameters are tensors with a shape and no values.

A module is traced as it was when the stages were cut: what later mechanisms put on it (other forwards, hooks) is set
aside meanwhile, since it would exchange values with other ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

SMALL_NUMEL = 65536
"""Buffers of at most this many elements keep their values while a module is traced on shapes: code reads them."""

_KEPT = (
    "forward",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
)
_ABSENT = object()

Interceptor = Callable[..., Any]


class _Computed(torch.autograd.Function):
    """Gives a tensor a place in a graph that nobody walks."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, made: list[torch.Tensor]) -> torch.Tensor:
        return made.pop()


class StandIns:
    """The stand-ins of every tensor of `model` as it is now, whole; `names`: of stand-ins of parameters, by id."""

    def __init__(self, model: nn.Module) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.names: dict[int, str] = {}
        self._anchor = torch.empty((), requires_grad=True)
        self._made: dict[int, torch.Tensor] = {}
        self._modules = [(name, module, self._entries(name, module)) for name, module in model.named_modules()]

    def outline(self, tensor: torch.Tensor, *, requires_grad: bool | None = None) -> torch.Tensor:
        """A tensor without values of the same shape, strides, dtype and device; of one without memory, on the CPU."""
        device = torch.device("cpu") if tensor.device.type == "meta" else tensor.device
        made = self.empty(tensor.shape, tensor.stride(), tensor.dtype, device)
        return made.requires_grad_(tensor.requires_grad if requires_grad is None else requires_grad)

    def empty(
        self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A tensor without values."""
        with torch.no_grad():
            return FakeTensor(self.mode, torch.empty_strided(shape, stride, dtype=dtype, device="meta"), device)

    def computed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same tensor as one that requires a gradient but is no leaf, so that it may be changed in place."""
        made: torch.Tensor = _Computed.apply(self._anchor, [tensor])  # type: ignore[no-untyped-call]
        return made

    def _entries(self, name: str, module: nn.Module) -> dict[str, Any]:
        """What the module's __dict__ holds while it is traced."""
        kept = {key: module.__dict__.get(key, _ABSENT) for key in _KEPT}
        hooks = {key: value.copy() if hasattr(value, "copy") else value for key, value in kept.items()}
        prefix = name + "." if name else ""
        own: dict[str, torch.Tensor | None] = {}
        for key, parameter in module._parameters.items():
            own[key] = self._parameter(prefix + key, parameter)
        buffers = {key: self._buffer(buffer) for key, buffer in module._buffers.items()}
        entries = {**hooks, "_parameters": own, "_buffers": buffers}
        if isinstance(module, nn.RNNBase):  # its forward reads this list, not the parameters
            entries["_flat_weights"] = [own.get(key) for key in module._flat_weights_names]
        return entries

    def _parameter(self, name: str, parameter: nn.Parameter | None) -> torch.Tensor | None:
        if parameter is None:
            return None
        made = self._made.get(id(parameter))
        if made is None:
            made = self._made[id(parameter)] = self.outline(parameter)
            self.names[id(made)] = name
        return made

    def _buffer(self, buffer: torch.Tensor | None) -> torch.Tensor | None:
        if buffer is None:
            return None
        made = self._made.get(id(buffer))
        if made is None:
            small = buffer.numel() <= SMALL_NUMEL
            made = self._made[id(buffer)] = buffer.detach().clone() if small else self.outline(buffer)
        return made

    @contextmanager
    def in_place(
        self, glue: frozenset[str], intercept: Callable[[str, nn.Module], Interceptor] | None
    ) -> Iterator[None]:
        """While open, the model's tensors are stand-ins and every call of a module goes through `intercept(name,
        module)`. Modules named in `glue` keep their own buffers, hooks and forward.
        """
        before: list[tuple[nn.Module, dict[str, Any]]] = []
        try:
            for name, module, entries in self._modules:
                own = ("forward", "_buffers") if name in glue else ()
                new = {key: value for key, value in entries.items() if key not in own}
                if intercept is not None:
                    new["_compiled_call_impl"] = intercept(name, module)
                before.append((module, {key: module.__dict__.get(key, _ABSENT) for key in new}))
                _set(module, new)
            yield
        finally:
            for module, values in reversed(before):
                _set(module, values)


def _set(module: nn.Module, values: dict[str, Any]) -> None:
    for key, value in values.items():
        if value is _ABSENT:
            module.__dict__.pop(key, None)
        else:
            module.__dict__[key] = value


def is_unknown(value: Any) -> bool:
    """Whether a tensor has no values."""
    return isinstance(value, FakeTensor)

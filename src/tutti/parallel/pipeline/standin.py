"""Stand-ins: while a model is traced, its parameters are tensors with a shape and no values.

A module is traced as it was when the stages were cut: what later mechanisms put on it (other forwards, hooks) is set
aside meanwhile, since it would exchange values with other ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tutti.parallel.expert.stacked import is_stacked

SMALL_NUMEL = 65536
"""Buffers of at most this many elements keep their values while a module is traced on shapes: code reads them."""

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
)
_ABSENT = object()

Interceptor = Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""(name, module, args, kwargs) -> what a call of the module gives."""


class _Computed(torch.autograd.Function):
    """Gives a tensor a place in a graph that nobody walks."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, made: list[torch.Tensor]) -> torch.Tensor:
        return made.pop()


@dataclass(frozen=True, slots=True)
class _Door:
    """What a call of a module goes through while stand-ins are in place."""

    name: str
    module: nn.Module
    stand_ins: "StandIns"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        assert self.stand_ins.intercept is not None
        return self.stand_ins.intercept(self.name, self.module, args, kwargs)


class StandIns:
    """The stand-ins of every tensor of `model` as it is now, whole; `names`: of stand-ins of parameters, by id;
    `intercept`: what calls go to now; `stacked`: ids of layers of stacked experts.
    """

    def __init__(self, model: nn.Module) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.names: dict[int, str] = {}
        self.intercept: Interceptor | None = None
        self._anchor = torch.empty((), requires_grad=True)
        self._made: dict[int, torch.Tensor] = {}
        self._plans: dict[frozenset[str], list[tuple[dict[str, Any], dict[str, Any]]]] = {}
        self.stacked = {id(module) for module in model.modules() if is_stacked(module)}
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
        return FakeTensor(self.mode, torch.empty_strided(shape, stride, dtype=dtype, device="meta"), device)

    def computed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same tensor as one that requires a gradient but is no leaf, so that it may be changed in place."""
        made: torch.Tensor = _Computed.apply(self._anchor, [tensor])  # type: ignore[no-untyped-call]
        return made

    def _entries(self, name: str, module: nn.Module) -> dict[str, Any]:
        """What the module's __dict__ holds while it is traced."""
        kept = {key: module.__dict__.get(key, _ABSENT) for key in ("forward", *HOOKS)}
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

    def modes(self) -> tuple[bool, ...]:
        """Which modules are in training mode."""
        return tuple([module.training for _, module, _ in self._modules])

    @contextmanager
    def in_place(self, glue: frozenset[str], intercept: Interceptor) -> Iterator[None]:
        """While open, the model's tensors are stand-ins and every call of a module goes to `intercept`. Modules named
        in `glue` keep their own buffers and forward; hooks of others are those of their time, see `hooks_in_place`.
        """
        before: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.intercept = intercept
        try:
            for own, new in self._plan(glue):
                before.append((own, {key: own.get(key, _ABSENT) for key in new}))
                _set(own, new)
            yield
        finally:
            self.intercept = None
            for own, values in reversed(before):
                _set(own, values)

    @contextmanager
    def hooks_in_place(self, module: nn.Module) -> Iterator[None]:
        """While open, the hooks of a unit and its parts are those it had when the stages were cut."""
        inside = {id(part) for part in module.modules()}
        before = []
        try:
            for _, part, entries in self._modules:
                if id(part) in inside:
                    before.append((part.__dict__, {key: part.__dict__.get(key, _ABSENT) for key in HOOKS}))
                    _set(part.__dict__, {key: entries[key] for key in HOOKS})
            yield
        finally:
            for own, values in before:
                _set(own, values)

    def _plan(self, glue: frozenset[str]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """For each module: its __dict__, and what that holds while stand-ins are in place."""
        if glue not in self._plans:
            plan = []
            for name, module, entries in self._modules:
                left = ("forward", "_buffers") if name in glue else HOOKS
                new = {key: value for key, value in entries.items() if key not in left}
                plan.append((module.__dict__, {**new, "_compiled_call_impl": _Door(name, module, self)}))
            self._plans[glue] = plan
        return self._plans[glue]


def _set(own: dict[str, Any], values: dict[str, Any]) -> None:
    own.update(values)
    for key, value in values.items():
        if value is _ABSENT:
            del own[key]


def is_unknown(value: Any) -> bool:
    """Whether a tensor has no values."""
    return isinstance(value, FakeTensor)

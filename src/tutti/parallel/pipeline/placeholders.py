"""Placeholders: while a model is traced, its parameters are tensors with a shape and no values.

A module is traced without the forwards and hooks that mechanisms have installed, since these would communicate with
other ranks. What the script changes later is followed: see `StandIns.refresh`. The script's own hooks run while the
forward is traced, not while a stage computes (see parallel/script_hooks.py).
"""

import os
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import Function

from tutti.parallel.expert.expert_parallel import is_stacked
from tutti.parallel.pipeline.stage_program import Slot, Surroundings
from tutti.parallel.script_hooks import HOOKS, forward_hooks, has_script_hooks

SMALL_NUMEL = 65536
"""Buffers of at most this many elements keep their values during tracing, because code may read them."""

_ABSENT = object()

Interceptor = Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""(name, module, args, kwargs) -> the result of a call of the module."""


class _Computed(torch.autograd.Function):
    """Gives a tensor a `grad_fn` in a graph that is never run backward."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, made: list[torch.Tensor]) -> torch.Tensor:
        return made.pop()


@dataclass(frozen=True, slots=True)
class _CallInterceptor:
    """Called in place of a module while placeholders are installed."""

    name: str
    module: nn.Module
    stand_ins: "StandIns"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        assert self.stand_ins.intercept is not None
        return self.stand_ins.intercept(self.name, self.module, args, kwargs)


class StandIns:
    """Placeholders for all tensors of `model`, made while the tensors are still whole.

    Args:
        model: the model.
        device: where it will compute; None: where it is.

    Attributes:
        mode: the mode of all fake tensors made here.
        names: id of a parameter's placeholder -> name of the parameter.
        intercept: receives calls of modules while placeholders are installed.
        stacked: ids of layers of stacked experts.
        hooks_run: whether the script's hooks run while the forward is traced.
    """

    def __init__(self, model: nn.Module, device: torch.device | None = None) -> None:
        self._device = device
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.names: dict[int, str] = {}
        self.intercept: Interceptor | None = None
        self.hooks_run = True
        self._anchor = torch.empty((), requires_grad=True)
        self._made: dict[int, torch.Tensor] = {}
        self._kept: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}
        self._plans: dict[frozenset[str], list[tuple[dict[str, Any], dict[str, Any]]]] = {}
        self.stacked = {id(module) for module in model.modules() if is_stacked(module)}
        self._modules = [(name, module, self._entries(name, module)) for name, module in model.named_modules()]
        self._noted: list[tuple[Any, ...]] = []

    def note(self, model: nn.Module) -> None:
        """Note the parameters as they are now, so that `kept_name` knows them."""
        self._kept |= {id(parameter): (weakref.ref(parameter), name) for name, parameter in model.named_parameters()}

    def kept_name(self, leaf: Any) -> str | None:
        """The name of a parameter that the script holds itself, from before or after the model was divided."""
        if not isinstance(leaf, nn.Parameter) or id(leaf) not in self._kept:
            return None
        alive, name = self._kept[id(leaf)]
        return name if alive() is leaf else None

    def outline(self, tensor: torch.Tensor, *, requires_grad: bool | None = None) -> torch.Tensor:
        """A tensor without values, with the shape, strides, dtype and device of `tensor`; the CPU for a meta tensor."""
        device = torch.device("cpu") if tensor.device.type == "meta" else tensor.device
        return self._placeholder(tensor, device, requires_grad)

    def _placeholder(self, tensor: torch.Tensor, device: torch.device, requires_grad: bool | None) -> torch.Tensor:
        placeholder = self.empty(tensor.shape, tensor.stride(), tensor.dtype, device)
        return placeholder.requires_grad_(tensor.requires_grad if requires_grad is None else requires_grad)

    def empty(
        self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A tensor without values."""
        return FakeTensor(self.mode, torch.empty_strided(shape, stride, dtype=dtype, device="meta"), device)

    def computed(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` as a non-leaf that requires a gradient, so that it may be changed in place."""
        non_leaf: torch.Tensor = _Computed.apply(self._anchor, [tensor])  # type: ignore[no-untyped-call]
        return non_leaf

    def _entries(self, name: str, module: nn.Module) -> dict[str, Any]:
        """The entries of the module's `__dict__` during tracing."""
        hooks = {"forward": module.__dict__.get("forward", _ABSENT), **forward_hooks(module, ("torch",))}
        prefix = name + "." if name else ""
        parameters: dict[str, torch.Tensor | None] = {}
        for key, parameter in module._parameters.items():
            parameters[key] = self._parameter(prefix + key, parameter)
        buffers = {key: self._buffer(buffer) for key, buffer in module._buffers.items()}
        entries = {**hooks, "_parameters": parameters, "_buffers": buffers}
        if isinstance(module, nn.RNNBase):  # forward reads this list instead of the parameters
            entries["_flat_weights"] = [parameters.get(key) for key in module._flat_weights_names]
        return entries

    def _parameter(self, name: str, parameter: nn.Parameter | None) -> torch.Tensor | None:
        if parameter is None:
            return None
        placeholder = self._made.get(id(parameter))
        if placeholder is None:
            placeholder = self._made[id(parameter)] = self._of_model(parameter)
            self.names[id(placeholder)] = name
            self._kept[id(parameter)] = (weakref.ref(parameter), name)
        return placeholder

    def _buffer(self, buffer: torch.Tensor | None) -> torch.Tensor | None:
        if buffer is None:
            return None
        placeholder = self._made.get(id(buffer))
        if placeholder is None:
            small = buffer.numel() <= SMALL_NUMEL
            placeholder = self._made[id(buffer)] = self._copy(buffer) if small else self._of_model(buffer)
        return placeholder

    def _of_model(self, tensor: torch.Tensor) -> torch.Tensor:
        """A parameter or buffer without values, where the model will compute."""
        return self.outline(tensor) if self._device is None else self._placeholder(tensor, self._device, None)

    def _copy(self, buffer: torch.Tensor) -> torch.Tensor:
        """A copy of a small buffer, where the model will compute."""
        return buffer.detach().clone() if buffer.is_meta else buffer.detach().to(self._device, copy=True)

    def hooked(self) -> list[str]:
        """Names of the modules on which the script has registered forward hooks or forward pre-hooks."""
        return [
            name
            for name, module, _ in self._modules
            if (module._forward_hooks or module._forward_pre_hooks) and has_script_hooks(module)
        ]

    def refresh(self) -> set[str] | None:
        """Follow what the script has changed on modules since the last call.

        Returns:
            Names of the modules that have changed; None at the first call.
        """
        now = [_noted_of(module) for _, module, _ in self._modules]
        before, self._noted = self._noted, now
        if not before:
            return None
        changed = set()
        for (name, module, entries), old, new in zip(self._modules, before, now, strict=True):
            if old != new:
                changed.add(name)
                if old[0] is not new[0]:
                    entries["forward"] = module.__dict__.get("forward", _ABSENT)
                    self._plans.clear()
        return changed

    def modes(self) -> tuple[bool, ...]:
        """Whether each module is in training mode."""
        return tuple([module.training for _, module, _ in self._modules])

    @contextmanager
    def in_place(self, glue: frozenset[str], intercept: Interceptor) -> Iterator[None]:
        """Install the placeholders, and send every call of a module to `intercept`.

        Args:
            glue: names of the modules that are traced with their present buffers, forward and hooks. Hooks of all
                other modules stay as they are now; see `hooks_in_place`.
            intercept: receives the calls.
        """
        before: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.intercept = intercept
        try:
            hooked = self._hooked(glue)
            for state, plain in self._plan(glue):
                new = {**plain, **hooked[id(state)]} if id(state) in hooked else plain
                before.append((state, {key: state.get(key, _ABSENT) for key in new}))
                _set(state, new)
            yield
        finally:
            self.intercept = None
            for state, values in reversed(before):
                _set(state, values)

    @contextmanager
    def hooks_in_place(self, module: nn.Module) -> Iterator[None]:
        """Leave a unit and its children only torch's own hooks that they had when the model was cut."""
        inside = {id(part) for part in module.modules()}
        before = []
        try:
            for _, part, entries in self._modules:
                if id(part) in inside:
                    before.append((part.__dict__, {key: part.__dict__.get(key, _ABSENT) for key in HOOKS}))
                    _set(part.__dict__, {key: entries[key] for key in HOOKS})
            yield
        finally:
            for state, values in before:
                _set(state, values)

    def _hooked(self, glue: frozenset[str]) -> dict[int, dict[str, Any]]:
        """Entries with the script's hooks of modules that are traced, by the id of the module's `__dict__`."""
        hooked = [m for name, m, _ in self._modules if name in glue and has_script_hooks(m)] if self.hooks_run else []
        return {id(module.__dict__): forward_hooks(module, ("script", "torch")) for module in hooked}

    def _plan(self, glue: frozenset[str]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """The `__dict__` of each module, and the entries it has while placeholders are installed."""
        if glue not in self._plans:
            plan = []
            for name, module, entries in self._modules:
                unchanged = ("forward", "_buffers") if name in glue else HOOKS
                new = {key: value for key, value in entries.items() if key not in unchanged}
                plan.append((module.__dict__, {**new, "_compiled_call_impl": _CallInterceptor(name, module, self)}))
            self._plans[glue] = plan
        return self._plans[glue]


_SIMPLE = (int, float, str, bool, type(None))
_NOT_FLAGS = frozenset({"training", "_is_full_backward_hook", "call_super_init", "dump_patches"})


def _noted_of(module: nn.Module) -> tuple[Any, ...]:
    """What the shapes of a module's results may depend on, apart from its tensors and its mode."""
    state = module.__dict__
    flags = {key: value for key, value in state.items() if type(value) in _SIMPLE and key not in _NOT_FLAGS}
    config = state.get("config")
    flags_of_config = {key: value for key, value in getattr(config, "__dict__", {}).items() if type(value) in _SIMPLE}
    return state.get("forward"), type(module).forward, flags, flags_of_config, [*map(id, module._modules.values())]


def _set(state: dict[str, Any], values: dict[str, Any]) -> None:
    state.update(values)
    for key, value in values.items():
        if value is _ABSENT:
            del state[key]


def is_unknown(value: Any) -> bool:
    """Whether `value` is a tensor without values."""
    return isinstance(value, FakeTensor)


_UNSET = object()

Apply = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""(the bound `apply` of a torch.autograd.Function, args, kwargs) -> its result."""


def surroundings(device: torch.device) -> Surroundings:
    """The current grad mode and autocast on `device`."""
    kind = device.type
    autocast = (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
    return Surroundings(grad=torch.is_grad_enabled(), autocast=autocast)


class Attributes:
    """Sets plain attributes of a model's modules to tensors, and restores the attributes at the end.

    Args:
        model: the model.
        watched: names of modules that set attributes themselves; `look` records these.

    Attributes:
        now: the tensors set so far.
    """

    def __init__(self, model: nn.Module, watched: Iterable[str] = ()) -> None:
        self.now: dict[Slot, torch.Tensor] = {}
        self._model = model
        self._before: dict[Slot, Any] = {}
        self._watched = [(name, model.get_submodule(name)) for name in watched]
        self._initial: list[dict[str, torch.Tensor]] = []

    def __enter__(self) -> "Attributes":
        self._initial = [tensor_attributes(module) for _, module in self._watched]
        return self

    def look(self) -> None:
        """Record the tensors that watched modules have set so far."""
        for (name, module), before in zip(self._watched, self._initial, strict=True):
            for key, tensor in tensor_attributes(module).items():
                if tensor is not before.get(key):
                    self._before.setdefault((name, key), before.get(key, _UNSET))
                    self.now[name, key] = tensor

    def set(self, slot: Slot, tensor: torch.Tensor) -> None:
        """Set an attribute to `tensor` until the end."""
        state = self._model.get_submodule(slot[0]).__dict__
        self._before.setdefault(slot, state.get(slot[1], _UNSET))
        self.now[slot] = state[slot[1]] = tensor

    def __exit__(self, *problem: object) -> None:
        self.look()
        for (name, key), value in self._before.items():
            state = self._model.get_submodule(name).__dict__
            if value is _UNSET:
                state.pop(key, None)
            else:
                state[key] = value


def tensor_attributes(module: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of a module that are neither parameters nor buffers."""
    return {key: value for key, value in vars(module).items() if isinstance(value, torch.Tensor)}


@contextmanager
def attributes(model: nn.Module, tensors: Mapping[Slot, torch.Tensor]) -> Iterator[None]:
    """Set the attributes `wanted` while the context is open."""
    with Attributes(model) as setting:
        for slot, tensor in tensors.items():
            setting.set(slot, tensor)
        yield


def cache_configs(model: nn.Module) -> list[Any]:
    """The configs of transformers' models that can request key-value caches, without repetition."""
    configs = {id(config): config for module in model.modules() if (config := vars(module).get("config")) is not None}
    return [config for config in configs.values() if hasattr(config, "use_cache")]


@contextmanager
def without_caches(configs: list[Any]) -> Iterator[None]:
    """Stop transformers' models from making key-value caches, which collect tensors of all layers in one object."""
    caching = [config for config in configs if config.use_cache is True]
    for config in caching:
        config.use_cache = False
    try:
        yield
    finally:
        for config in caching:
            config.use_cache = True


@contextmanager
def functions(handler: Apply) -> Iterator[None]:
    """Send calls of the user's autograd functions to `seen`, which gets the function's original `apply`."""
    original = Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return handler(original.__get__(None, cls), args, kwargs)

    Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Function.apply = original  # type: ignore[method-assign]


def positions(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Replace known boolean masks of x[mask] by index tensors, which makes the number of selected elements known.

    Args:
        args: the arguments of `__getitem__` or `__setitem__`.

    Returns:
        `args` itself if there is no such mask.
    """
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    new: list[Any] = []
    for part in index:
        mask = isinstance(part, torch.Tensor) and part.dtype == torch.bool and not is_unknown(part)
        new += part.nonzero(as_tuple=True) if mask else [part]
    return (
        args
        if len(new) == len(index) and all(a is b for a, b in zip(new, index, strict=True))
        else (args[0], tuple(new), *args[2:])
    )


def script_line(error: BaseException) -> str:
    """file:line of the innermost frame of an error in the user's code."""
    place = "forward"
    for frame in traceback.extract_tb(error.__traceback__):
        library = f"{os.sep}torch{os.sep}" in frame.filename or f"parallel{os.sep}pipeline" in frame.filename
        if not library:
            place = f"{os.path.basename(frame.filename)}:{frame.lineno} ({frame.line})"
    return place

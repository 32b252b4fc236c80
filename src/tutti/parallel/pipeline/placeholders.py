"""Stand-ins: while a model is traced, its parameters are tensors with a shape and no values.

A module is traced as it was when the stages were cut: what later mechanisms put on it (other forwards, hooks) is set
aside meanwhile, since it would exchange values with other ranks.
"""

import os
import traceback
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


_UNSET = object()

Apply = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""(the bound apply of a torch.autograd.Function, args, kwargs) -> what it gives."""


def surroundings(device: torch.device) -> Surroundings:
    """Grad mode and autocast as they are now."""
    kind = device.type
    autocast = (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
    return Surroundings(grad=torch.is_grad_enabled(), autocast=autocast)


class Attributes:
    """Tensors in plain attributes of a model's modules that are set for a while: `now`. Set by `set`, or by the modules
    called `watched` themselves.
    """

    def __init__(self, model: nn.Module, watched: Iterable[str] = ()) -> None:
        self.now: dict[Slot, torch.Tensor] = {}
        self._model = model
        self._before: dict[Slot, Any] = {}
        self._watched = [(name, model.get_submodule(name)) for name in watched]
        self._found: list[dict[str, torch.Tensor]] = []

    def __enter__(self) -> "Attributes":
        self._found = [tensor_attributes(module) for _, module in self._watched]
        return self

    def look(self) -> None:
        """Take in what watched modules have set so far."""
        for (name, module), before in zip(self._watched, self._found, strict=True):
            for key, tensor in tensor_attributes(module).items():
                if tensor is not before.get(key):
                    self._before.setdefault((name, key), before.get(key, _UNSET))
                    self.now[name, key] = tensor

    def set(self, slot: Slot, tensor: torch.Tensor) -> None:
        """Let the attribute be `tensor` until the end."""
        own = self._model.get_submodule(slot[0]).__dict__
        self._before.setdefault(slot, own.get(slot[1], _UNSET))
        self.now[slot] = own[slot[1]] = tensor

    def __exit__(self, *problem: object) -> None:
        self.look()
        for (name, key), value in self._before.items():
            own = self._model.get_submodule(name).__dict__
            if value is _UNSET:
                own.pop(key, None)
            else:
                own[key] = value


def tensor_attributes(module: nn.Module) -> dict[str, torch.Tensor]:
    """A module's tensors that are neither parameters nor buffers."""
    return {key: value for key, value in vars(module).items() if isinstance(value, torch.Tensor)}


@contextmanager
def attributes(model: nn.Module, wanted: Mapping[Slot, torch.Tensor]) -> Iterator[None]:
    """While open, modules' attributes are those tensors."""
    with Attributes(model) as setting:
        for slot, tensor in wanted.items():
            setting.set(slot, tensor)
        yield


def cache_configs(model: nn.Module) -> list[Any]:
    """The configs of transformers' models that can ask for key-value caches, each once."""
    configs = {id(config): config for module in model.modules() if (config := vars(module).get("config")) is not None}
    return [config for config in configs.values() if hasattr(config, "use_cache")]


@contextmanager
def without_caches(configs: list[Any]) -> Iterator[None]:
    """transformers' models make no key-value caches meanwhile: those collect tensors of all layers in one object."""
    asking = [config for config in configs if config.use_cache is True]
    for config in asking:
        config.use_cache = False
    try:
        yield
    finally:
        for config in asking:
            config.use_cache = True


@contextmanager
def functions(seen: Apply) -> Iterator[None]:
    """While open, the user's own autograd functions go to `seen`, given the function's plain apply."""
    plain = Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return seen(plain.__get__(None, cls), args, kwargs)

    Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Function.apply = plain  # type: ignore[method-assign]


def positions(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """x[mask] with a known mask, as x[positions]: how many there are is then known too."""
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
    """file:line of the innermost frame of an error that is the user's code."""
    place = "forward"
    for frame in traceback.extract_tb(error.__traceback__):
        library = f"{os.sep}torch{os.sep}" in frame.filename or f"parallel{os.sep}pipeline" in frame.filename
        if not library:
            place = f"{os.path.basename(frame.filename)}:{frame.lineno} ({frame.line})"
    return place

"""What a trace needs of the world around the model: caches off, autograd functions seen, where an error came from."""

import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd import Function

from tutti.parallel.pipeline.program import Slot, Surroundings
from tutti.parallel.pipeline.standin import is_unknown

_ABSENT = object()

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
                    self._before.setdefault((name, key), before.get(key, _ABSENT))
                    self.now[name, key] = tensor

    def set(self, slot: Slot, tensor: torch.Tensor) -> None:
        """Let the attribute be `tensor` until the end."""
        own = self._model.get_submodule(slot[0]).__dict__
        self._before.setdefault(slot, own.get(slot[1], _ABSENT))
        self.now[slot] = own[slot[1]] = tensor

    def __exit__(self, *problem: object) -> None:
        self.look()
        for (name, key), value in self._before.items():
            own = self._model.get_submodule(name).__dict__
            if value is _ABSENT:
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
        library = f"{os.sep}torch{os.sep}" in frame.filename or f"runtime{os.sep}stage" in frame.filename
        if not library:
            place = f"{os.path.basename(frame.filename)}:{frame.lineno} ({frame.line})"
    return place

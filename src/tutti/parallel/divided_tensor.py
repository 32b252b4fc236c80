"""This rank's part of an activation; to the user's code it behaves as the whole tensor.

The base of tensor and spatial parallelism. Not a DTensor: it holds activations, never parameters.

A subclass has a table of handlers. Each computes one torch function on parts, with the result of the whole tensor.
Size queries are answered here, for every subclass. A function without a handler goes to the subclass's
`call_unhandled`: tensor parallelism gathers the whole tensor, spatial parallelism refuses.
"""

from abc import abstractmethod
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, ClassVar, Self, TypeVar

import torch

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""fn(torch function, args, kwargs) -> result, or NotImplemented if it cannot compute on parts.

It runs with torch's dispatch to subclasses disabled, so a divided argument acts as the local tensor.
"""

HandlerT = TypeVar("HandlerT", bound=Handler)


class DividedTensor(torch.Tensor):
    """This rank's part of a whole tensor.

    Attributes:
        handlers: handlers of this subclass, by `handler_key(function)`.
    """

    handlers: ClassVar[dict[Any, Handler]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.handlers = {}

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, partial):  # loss_means.py has put its own in place of a loss function of torch
            func = getattr(func, "__wrapped__", func)
        if not args and "input" in kwargs:
            # torch.relu(input=x): handlers expect the tensor as args[0].
            args, kwargs = (kwargs["input"],), {name: value for name, value in kwargs.items() if name != "input"}
        with torch._C.DisableTorchFunctionSubclass():
            cls.check_call(args)
            handler = _SIZE_QUERIES.get(name_of(func)) or cls.handlers.get(cls.handler_key(func))
            if handler is not None:
                result = handler(func, args, kwargs)
                if result is not NotImplemented:
                    return result
            return cls.call_unhandled(func, args, kwargs)

    @staticmethod
    def handler_key(func: Any) -> Hashable:
        """Return the key of a torch function in `handlers`: the function itself."""
        key: Hashable = func
        return key

    @staticmethod
    def check_call(args: tuple[Any, ...]) -> None:
        """Hook: raise if these arguments are not allowed in any call."""

    @classmethod
    @abstractmethod
    def call_unhandled(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute a function that has no handler, or raise."""

    @abstractmethod
    def _whole_shape(self) -> tuple[int, ...]:
        """Return the shape of the whole tensor. Call it only where dispatch to subclasses is disabled."""

    @abstractmethod
    def with_same_placement(self, part: torch.Tensor) -> Self:
        """Wrap `part` with this tensor's placement."""

    @abstractmethod
    def placement_text(self) -> str:
        """Describe where the part lies, for messages."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return (
                f"{type(self).__name__}(whole {self._whole_shape()}, {self.placement_text()}, local "
                f"{self.as_subclass(torch.Tensor)!r})"
            )

    def __format__(self, spec: str) -> str:
        return repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        with torch._C.DisableTorchFunctionSubclass():
            return self.with_same_placement(self.as_subclass(torch.Tensor).clone())

    @classmethod
    def handles(cls, *keys: Hashable) -> Callable[[HandlerT], HandlerT]:
        """Decorator: register a handler for the functions of these keys."""

        def register(handler: HandlerT) -> HandlerT:
            cls.handlers.update(dict.fromkeys(keys, handler))
            return handler

        return register


def name_of(function: Any) -> str:
    """Return the name of a torch function; "get:NAME" if it reads a property."""
    name = getattr(function, "__name__", str(function))
    if name in ("__get__", "__set__", "__delete__"):
        return f"{name.strip('_')}:{getattr(getattr(function, '__self__', None), '__name__', '')}"
    return name


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part as a plain tensor; a plain tensor unchanged."""
    if not isinstance(tensor, DividedTensor):
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def whole_shape(tensor: torch.Tensor) -> torch.Size:
    """Return the shape of the whole tensor. Call it only where dispatch to subclasses is disabled."""
    return torch.Size(tensor._whole_shape() if isinstance(tensor, DividedTensor) else tensor.shape)


def _size(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    shape = whole_shape(args[0])
    return shape if dim is None else shape[dim]


def _shape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return whole_shape(args[0])


def _numel(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return whole_shape(args[0]).numel()


def _dim(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return len(args[0].shape)


def _len(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return whole_shape(args[0])[0]


_SIZE_QUERIES: dict[str, Handler] = {
    "size": _size, "get:shape": _shape, "numel": _numel, "nelement": _numel, "dim": _dim, "ndimension": _dim,
    "get:ndim": _dim, "__len__": _len,
}  # fmt: skip
"""Size queries; they return the whole tensor's size.

Keyed by name, so that one entry covers both `torch.numel` and `torch.Tensor.numel`.
"""

"""Models without memory: parameters on the meta device, during construction and by copying."""

import copy
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from tutti.errors import ScriptError

M = TypeVar("M", bound=nn.Module)

SMALL_NUMEL = 65536
"""Tensors of at most this many elements that are not parameters keep their values, because constructors and control
flow read them (`torch.linspace(0, rate, depth).tolist()`).
"""

_CONSTRUCTOR = re.compile(r"_*(re|post_)?(init|reset)|apply$")
_FILLED = (
    torch.empty,
    torch.zeros,
    torch.ones,
    torch.full,
    torch.rand,
    torch.randn,
    torch.randint,
    torch.randperm,
    torch.normal,
    torch.arange,
    torch.linspace,
    torch.logspace,
    torch.eye,
    torch.empty_strided,
    torch.empty_permuted,
)
_NEW = (Tensor.new_empty, Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_empty_strided)
_FACTORIES = frozenset((*_FILLED, *_NEW))
_MOVES = frozenset((Tensor.to, Tensor.cpu, Tensor.cuda))


def to_meta(tensor: Tensor) -> Tensor:
    """Return a meta tensor of the same shape, strides and dtype; it requires no gradient."""
    return torch.empty_like(tensor.detach(), device="meta")


@contextmanager
def meta_autocasts_as_cpu() -> Iterator[None]:
    """While open, autocast takes the meta device for a CPU.

    Models ask for the autocast of the device of their input, `torch.autocast(x.device.type, enabled=False)`, and torch
    knows none for meta.
    """
    enter = torch.autocast.__init__
    asked = {name: getattr(torch, name) for name in ("is_autocast_enabled", "get_autocast_dtype")}

    def construct(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        enter(self, "cpu" if device_type == "meta" else device_type, *args, **kwargs)

    def ask(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *device: function(*("cpu" if name == "meta" else name for name in device))

    torch.autocast.__init__ = construct  # type: ignore[method-assign]
    for name, function in asked.items():
        setattr(torch, name, ask(function))
    try:
        yield
    finally:
        torch.autocast.__init__ = enter  # type: ignore[method-assign]
        for name, function in asked.items():
            setattr(torch, name, function)


def flat_tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among an operator's arguments, also those in lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from flat_tensors(value)


def mixed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether meta and real tensors meet in one call."""
    metas = {tensor.is_meta for tensor in flat_tensors((*args, *kwargs.values()))}
    return len(metas) == 2


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """While open, create parameters of modules on the meta device, without memory.

    Large tensors (more than SMALL_NUMEL elements) that a module's constructor creates are on meta too. Small tensors
    that are not parameters keep their values, and so do all tensors created elsewhere, such as the script's data.
    Initialisers do nothing to meta tensors. An operation on meta and real tensors returns a meta tensor. A meta tensor
    stays on meta when it is moved.
    """
    handle = register_module_parameter_registration_hook(_empty_parameter)
    try:
        with _BuildMode():
            yield
    finally:
        handle.remove()


def meta_copy(model: M) -> M:
    """Return a deep copy of `model` whose parameters are on meta; nothing of their size is allocated.

    Tied parameters stay tied. Buffers and plain tensor attributes keep their values if they are small, and go to meta
    otherwise. Exceptions from copying a module's own attributes are passed on.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        if is_lazy(parameter):
            continue
        memo[id(parameter)] = nn.Parameter(to_meta(parameter), requires_grad=parameter.requires_grad)
    with _CopyMode():
        return copy.deepcopy(model, memo)


def _empty_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    """Registration hook: move a parameter's contents to meta but keep its identity, so that ties stay."""
    if type(parameter) is not nn.Parameter or parameter.is_meta:
        return
    twin = nn.Parameter(to_meta(parameter), requires_grad=parameter.requires_grad)
    try:
        torch.utils.swap_tensors(parameter, twin)  # type: ignore[no-untyped-call]
    except RuntimeError:  # weak references to it exist: it stays real, and `meta_copy` will not read it
        return


def _in_constructor() -> bool:
    """Return whether a calling frame is a module's constructor, initialiser, or `apply`."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "materialize":  # a lazy parameter takes its shape, and cannot change its device
            return False
        named = code.co_argcount and _CONSTRUCTOR.match(code.co_name)
        if named and isinstance(frame.f_locals.get(code.co_varnames[0]), nn.Module):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class _BuildMode(TorchFunctionMode):
    """The redirections of `parameters_on_meta`."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FACTORIES and kwargs.get("out") is None:
            return _make(func, args, kwargs) if _in_constructor() else func(*args, **kwargs)
        if func in _MOVES and _stays(func, args, kwargs):
            return _cast(*args, **kwargs)
        if not mixed(args, kwargs):
            return _call(func, args, kwargs)
        new_args, new_kwargs = tree_map_only(Tensor, _unreal, (args, kwargs))
        result = _call(func, new_args, new_kwargs)
        # An in-place operation must return the tensor it was called on, though its values are now unknown.
        return args[0] if args and isinstance(args[0], Tensor) and result is new_args[0] else result


def _unreal(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_meta or is_lazy(tensor) else to_meta(tensor)


def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of tensors.

    Raises:
        ScriptError: it needs the values of a meta tensor; the message names the script's line.
    """
    try:
        return func(*args, **kwargs)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        if not any(tensor.is_meta for tensor in flat_tensors((*args, *kwargs.values()))) or "meta" not in str(error):
            raise
        frame = sys._getframe(2)  # the caller of the function
        raise ScriptError(
            f"{frame.f_code.co_filename}, line {frame.f_lineno} reads values of parameters "
            f"({getattr(func, '__name__', func)}), which have no values while a model is only described; "
            "read them after job.prepare"
        ) from error


def _make(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a factory function, on meta if its result is large."""
    on_meta = {key: value for key, value in kwargs.items() if key not in ("generator", "pin_memory")}
    outline = func(*args, **{**on_meta, "device": "meta"})
    if outline.numel() > SMALL_NUMEL:
        return outline
    return func(*args, **kwargs)


def _stays(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a move is skipped: of a meta tensor, or to an accelerator that this machine lacks."""
    if args[0].is_meta:
        return True
    device = "cuda" if func is Tensor.cuda else str(kwargs.get("device", args[1] if len(args) > 1 else None))
    here = torch.accelerator.current_accelerator(check_available=True)
    kind = device.partition(":")[0]
    return kind in ("cuda", "xpu", "mps") and (here is None or kind != here.type)


def _cast(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return `tensor.to(*args, **kwargs)` without its change of device."""
    others = (*args, *kwargs.values())
    dtypes = [other.dtype if isinstance(other, Tensor) else other for other in others]
    dtype = next((value for value in dtypes if isinstance(value, torch.dtype)), tensor.dtype)
    return tensor if dtype == tensor.dtype else tensor.to(dtype)


class _CopyMode(TorchFunctionMode):
    """Copies tensors that are not parameters: small ones with their values, others to meta."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            small = not tensor.is_meta and tensor.numel() <= SMALL_NUMEL
            memo[id(tensor)] = tensor.detach().to("cpu", copy=True) if small else to_meta(tensor)
        return memo[id(tensor)]

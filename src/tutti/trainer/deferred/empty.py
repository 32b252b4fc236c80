"""New tensors without memory, and initialisers of torch that would do nothing to them.

`trunc_normal_` draws again what falls outside, `orthogonal_` factors a matrix: they look at values, so torch 2.13 has
them return at once where there are none. They ask `is_meta` first; that question is answered here, and they are
recorded as a whole. Numbers that a script gives or counts (`tensor`, `arange`, `linspace`) are few and keep memory.
"""

import inspect
import sys
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tutti.trainer.deferred.tape import Tape

_EMPTY = {
    *(torch.empty, torch.empty_permuted, torch.empty_strided, torch.zeros, torch.ones, torch.full),
    *(torch.rand, torch.randn, torch.randint, torch.randperm),
}
_INITIALISERS = ("_no_grad_trunc_normal_", "orthogonal_", "sparse_", "dirac_")
_QUESTION = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]


class WithoutMemory(TorchFunctionMode):
    """While entered, makes new tensors without memory, and puts those initialisers on `tape`, whoever calls them."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape
        known = [getattr(nn.init, name) for name in _INITIALISERS if hasattr(nn.init, name)]
        self._functions: dict[CodeType, Any] = {function.__code__: function for function in known}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        sampled = func is torch.normal and not any(isinstance(one, torch.Tensor) for one in args)
        if (func in _EMPTY or sampled) and kwargs.get("device") is None:
            return func(*args, **{**kwargs, "device": "meta"})
        result = func(*args, **kwargs)
        if func == _QUESTION and result:
            caller = sys._getframe(1)
            function = self._functions.get(caller.f_code)
            if function is not None:
                names = list(inspect.signature(function).parameters)
                self._tape.record_whole(function, args[0], tuple(caller.f_locals[name] for name in names[1:]))
        return result

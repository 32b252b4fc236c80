"""Hooks on modules and parameters, told apart by who registered them: the script, torch or this package.

Under pipeline stages, the forward of a script is traced on every rank, and each rank computes its stages only. A hook
of the script often keeps an activation for the loss, or replaces one. Such hooks therefore run in the trace, where
they see all activations as tensors without values, and what they compute becomes part of the program. Torch's own
hooks (weight_norm) belong to their module and run where it is computed.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

from torch import nn

Origin = Literal["script", "torch", "tutti"]

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
)
_OPTIONS = {"_forward_hooks_with_kwargs": "_forward_hooks", "_forward_pre_hooks_with_kwargs": "_forward_pre_hooks"}


def origin_of(hook: Any) -> Origin:
    """Who has defined a hook."""
    while isinstance(hook, partial):
        hook = hook.func
    module = str(getattr(hook, "__module__", None) or type(hook).__module__)
    root = module.partition(".")[0]
    return "tutti" if root == "tutti" else "torch" if root == "torch" else "script"


def forward_hooks(module: nn.Module, origins: Iterable[Origin]) -> dict[str, Any]:
    """The entries of the module's `__dict__` with its forward hooks, of which only those from `origins` are left."""
    state = module.__dict__
    if not state["_forward_hooks"] and not state["_forward_pre_hooks"]:
        return {key: state[key].copy() for key in HOOKS}
    wanted = set(origins)
    kept = {
        key: {number for number, hook in state[key].items() if origin_of(hook) in wanted}
        for key in ("_forward_hooks", "_forward_pre_hooks")
    }
    return {
        key: type(state[key])((n, value) for n, value in state[key].items() if n in kept[_OPTIONS.get(key, key)])
        for key in HOOKS
    }


def has_script_hooks(module: nn.Module) -> bool:
    """Whether the script has registered a forward hook or forward pre-hook on the module."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(origin_of(hook) == "script" for hook in hooks)


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether the script has registered a full backward hook or backward pre-hook on the module."""
    hooks = (*module._backward_hooks.values(), *module._backward_pre_hooks.values())
    return any(origin_of(hook) == "script" for hook in hooks)


def call_with_script_hooks(
    module: nn.Module,
    call: Callable[[tuple[Any, ...], dict[str, Any]], Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call `call(args, kwargs)` between the script's forward pre-hooks and forward hooks of a module, as torch does."""
    for number, hook in [*module._forward_pre_hooks.items()]:
        if origin_of(hook) != "script":
            continue
        if number in module._forward_pre_hooks_with_kwargs:
            changed = hook(module, args, kwargs)
            args, kwargs = (args, kwargs) if changed is None else changed
        else:
            changed = hook(module, args)
            if changed is not None:
                args = changed if isinstance(changed, tuple) else (changed,)
    result = call(args, kwargs)
    for number, hook in [*module._forward_hooks.items()]:
        if origin_of(hook) != "script":
            continue
        more = (args, kwargs) if number in module._forward_hooks_with_kwargs else (args,)
        changed = hook(module, *more, result)
        result = result if changed is None else changed
    return result


class CallWithoutScriptHooks:
    """Calls a module, but none of the script's forward hooks on it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = self.module.__dict__
        before = {key: state[key] for key in HOOKS}
        state.update(forward_hooks(self.module, ("torch", "tutti")))
        try:
            return self.module(*args, **kwargs)
        finally:
            state.update(before)

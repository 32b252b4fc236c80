"""Hooks that a script registers on parameters, called once a step with the gradient of the whole batch.

Torch calls such a hook for each backward, with what one rank has computed for one microbatch. A hook that clips, for
example, would then give other values on several ranks than on one. So a step sets these hooks aside while backward
runs, and calls them with the reduced gradient.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn

from tutti.errors import PlanError
from tutti.parallel.layout import Layout
from tutti.parallel.script_hooks import origin_of

Hooks = dict[int, Callable[..., Any]]


class GradientHooks:
    """The script's hooks on parameters: those of `register_hook` and `register_post_accumulate_grad_hook`.

    Args:
        model: the divided model.
        layout: what this rank holds.
    """

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self._layout = layout
        self._parameters = dict(model.named_parameters())
        self._counts: list[int] = []
        self._hooked: list[str] = []
        self._set_aside: list[tuple[nn.Parameter, Hooks, Hooks]] = []

    def set_aside(self) -> AbstractContextManager[None]:
        """Within the context, backward calls no hook of the script.

        Raises:
            PlanError: a rank holds only a part of a parameter that has a hook.
        """
        self._set_aside = []
        for name in self._find():
            if self._layout.shard_of(name).cuts:
                raise PlanError(hook_refusal(name))
            self._set_aside.append((self._parameters[name], *script_hooks(self._parameters[name])))
        return self._without_hooks() if self._set_aside else nullcontext()

    @contextmanager
    def _without_hooks(self) -> Iterator[None]:
        for parameter, tensor_hooks, after_hooks in self._set_aside:
            for key in tensor_hooks:
                del _registered(parameter)[0][key]
            for key in after_hooks:
                del _registered(parameter)[1][key]
        try:
            yield
        finally:
            for parameter, tensor_hooks, after_hooks in self._set_aside:
                _registered(parameter)[0].update(tensor_hooks)
                _registered(parameter)[1].update(after_hooks)

    def _find(self) -> list[str]:
        """Names of the parameters with hooks of the script. All are searched again if a number of hooks changes."""
        counts = [_number_of_hooks(parameter) for parameter in self._parameters.values()]
        if counts != self._counts:
            self._counts = counts
            self._hooked = [name for name, parameter in self._parameters.items() if any(script_hooks(parameter))]
        return self._hooked

    def call(self) -> None:
        """Call the hooks with the gradients of the step. A tensor that a hook returns replaces the gradient."""
        for parameter, tensor_hooks, after_hooks in self._set_aside:
            if parameter.grad is None:
                continue
            for hook in tensor_hooks.values():
                replaced = hook(parameter.grad)
                if replaced is not None:
                    parameter.grad = replaced
            for hook in after_hooks.values():
                hook(parameter)
        self._set_aside = []


def refuse_lost_hooks(originals: dict[str, nn.Parameter], model: nn.Module) -> None:
    """Refuse hooks on parameters that dividing the model has replaced, since the new ones do not have them.

    Args:
        originals: the parameters before the model was divided, by name.
        model: the divided model.
    """
    now = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in originals.items():
        if name in now and now[name] is not parameter and any(script_hooks(parameter)):
            raise PlanError(hook_refusal(name))


def script_hooks(parameter: nn.Parameter) -> tuple[Hooks, Hooks]:
    """The hooks of `register_hook` and of `register_post_accumulate_grad_hook` that are not this package's own."""
    tensor_hooks, after_hooks = _registered(parameter)
    return _not_own(tensor_hooks), _not_own(after_hooks)


def hook_refusal(name: str) -> str:
    return (
        f"parameter {name!r} has a gradient hook, but under this plan a rank holds only a part of the parameter, and "
        "the hook may need all of it; use Job(clip_norm=...) instead of a hook that clips, or a plan that keeps "
        "parameters whole (replicate, or sharding level 1)"
    )


def _registered(parameter: Any) -> tuple[Hooks, Hooks]:
    """Torch's own dicts of a parameter's hooks; new ones where there are none."""
    tensor_hooks, after_hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    return {} if tensor_hooks is None else tensor_hooks, {} if after_hooks is None else after_hooks


def _number_of_hooks(parameter: Any) -> int:
    return len(parameter._backward_hooks or ()) + len(parameter._post_accumulate_grad_hooks or ())


def _not_own(hooks: Hooks) -> Hooks:
    return {key: hook for key, hook in hooks.items() if origin_of(hook) != "tutti"}

"""torch.compile under plans: the whole model where all modules compute on plain tensors, else what stays whole.

A module is traced at its first call, so the compiler sees all that the plan has changed in it, whenever it was told to
compile. What a plan divides exchanges tensors with other ranks and is not traced.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from tutti.config.plan import Plan
from tutti.config.vocabulary import AxisName
from tutti.errors import ScriptError
from tutti.nn import EmbeddingTables, MixtureOfExperts
from tutti.parallel.data.batch_state import GatheredForward, SharedInstanceNorm, SharedLookup
from tutti.parallel.data.batchnorm import GlobalForward
from tutti.parallel.expert.expert_parallel import is_stacked
from tutti.parallel.pipeline.stage_building import StagePartition

Compile = bool | str | Mapping[str, Any]
"""False: not at all; True: as torch.compile does by default; or its mode, or its arguments."""

_WHOLE_AXES: tuple[AxisName, ...] = ("replicate", "shard")
"""Axes along which all modules compute on plain tensors."""

_PARTS_AXES: tuple[AxisName, ...] = ("stage", "expert", "table")
"""Axes that divide some modules and leave others whole."""


class Compilation:
    """What torch.compile does with a model under a plan.

    Args:
        model: the user's model.
        plan: the plan.
        how: what the Job says.
        device: where the model computes.
    """

    def __init__(self, model: nn.Module, plan: Plan, how: Compile, device: torch.device) -> None:
        self._model, self._plan, self._how, self._device = model, plan, how, device
        self._axes = [axis for axis, degree in plan.mesh.items() if degree > 1 and axis not in _WHOLE_AXES]
        self._by_script: dict[nn.Module, Any] = {}

    def before_division(self) -> str:
        """Compile the model in place if the plan lets it be compiled whole.

        Returns:
            What the user should know; empty if all is compiled that the script wants compiled.

        Raises:
            ScriptError: torch.compile refuses the arguments, or there is no C++ compiler for its kernels.
        """
        if not self._axes:
            _compile([self._model], self._how, self._device)
            return ""
        compiled = [module for module in self._model.modules() if module._compiled_call_impl is not None]
        if self._how is False and not compiled:
            return ""
        _compile([], self._how, self._device)
        reason = self._off_reason()
        if reason:
            torch.compiler.set_stance("force_eager")
            return reason
        self._by_script = {module: module._compiled_call_impl for module in compiled}
        for module in compiled:  # how the model is divided is found by calling it
            module._compiled_call_impl = None
        return ""

    def after_division(self, stages: StagePartition | None) -> str:
        """Compile what the plan leaves whole, if it divides some modules.

        Modules that the script has compiled itself run compiled again if they are whole.

        Args:
            stages: where the model is cut into stages.

        Returns:
            What the user should know; empty if nothing was to be compiled, or the model was compiled whole.
        """
        if not self._axes or self._off_reason() or (self._how is False and not self._by_script):
            return ""
        units = [""] if stages is None else stages.tracer.units.names
        whole = {module for name in units for module in _whole_modules(self._model.get_submodule(name))}
        inside = {part for module in whole for part in module.modules()}
        named = {module: name for name, module in self._model.named_modules()}
        axis, lost = self._axes[0], [named[module] for module in self._by_script if module not in inside]
        for module, compiled in self._by_script.items():
            if module in inside:
                module._compiled_call_impl = compiled
        if self._how is not False:
            _compile(whole, self._how, self._device)
            names = sorted(named[module] for module in whole)
            what = f"{', '.join(names[:4])}{', ...' if len(names) > 4 else ''}" if names else "no module"
            return f"torch.compile compiles {what} under mesh.{axis}: blocks that the plan leaves whole"
        if not lost:
            return ""
        return (
            f"torch.compile is off for {lost[0] or 'the model'} under mesh.{axis}, which divides it; values are the "
            "same, and Job(compile=...) compiles the blocks that the plan leaves whole"
        )

    def _off_reason(self) -> str:
        """Return why nothing can be compiled under this plan, as a sentence; empty if something can."""
        for axis in self._axes:
            if axis not in _PARTS_AXES:
                return (
                    f"torch.compile is off under mesh.{axis}, which divides what modules compute; values are the same"
                )
        if self._plan.degree("stage") > 1 and self._plan.pipeline.schedule == "zero-bubble":
            return (
                "torch.compile is off under pipeline.schedule = zero-bubble, which computes the gradients of inputs "
                "and of weights apart; values are the same, and other schedules compile the blocks of stages"
            )
        return ""


def _whole_modules(module: nn.Module) -> Iterator[nn.Module]:
    """The largest modules within `module` that consist of others, none of which is divided."""
    if not any(True for _ in module.children()):
        return
    called = type(module).forward is not nn.Module.forward and not isinstance(module, nn.ModuleList | nn.ModuleDict)
    if called and not any(map(_is_divided, module.modules())):
        yield module
        return
    if not _is_divided(module):
        for child in module.children():
            yield from _whole_modules(child)


def _is_divided(module: nn.Module) -> bool:
    forward = type(vars(module).get("forward"))
    return (
        isinstance(module, MixtureOfExperts | EmbeddingTables)
        or is_stacked(module)
        or forward.__module__.startswith(("tutti.parallel.expert", "tutti.parallel.embedding"))
    )


_COMMUNICATING = (GlobalForward, GatheredForward, SharedInstanceNorm, SharedLookup)
"""Forwards of modules that exchange batch statistics or state with other ranks."""


def _hide_communication() -> None:
    """Keep the compiler from tracing the exchanges, which would break the graph at each of their many host calls."""
    for forward in _COMMUNICATING:
        if not hasattr(forward.__call__, "_torchdynamo_disable"):
            forward.__call__ = torch.compiler.disable(forward.__call__)  # type: ignore[method-assign, no-untyped-call]


def _compile(modules: Iterable[nn.Module], how: Compile, device: torch.device) -> None:
    """Compile modules in place. Without modules, only check that `how` can be used."""
    if how is False:
        return
    options: dict[str, Any] = {} if how is True else {"mode": how} if isinstance(how, str) else dict(how)
    try:
        torch.compile(nn.Identity(), **options)
        _hide_communication()
        for module in modules:
            module.compile(**options)
        if device.type == "cpu" and options.get("backend", "inductor") == "inductor":
            from torch._inductor.cpp_builder import get_cpp_compiler  # takes a second to import

            get_cpp_compiler()
    except (RuntimeError, TypeError, ValueError) as error:
        reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise ScriptError(
            f"Job(compile={how!r}): torch.compile cannot be used ({reason[0]}); give True, a mode or its arguments "
            'as a dict; on CPUs, install a C++ compiler (g++) or give compile={"backend": "aot_eager"}'
        ) from None

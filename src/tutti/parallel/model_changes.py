"""What a script may change on a model after prepare, and the refusal of what it may not.

Prepare decides what each rank holds and how gradients are reduced, from the parameters that it finds. Torch lets a
script change them later. `NotedModel.check` compares the model with what prepare found, before each step, evaluation
and checkpoint. Modules without parameters, hooks, flags, and values written in place may change freely, because each
step reads them anew.
"""

from collections.abc import Mapping
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from tutti.config.plan import Plan
from tutti.errors import ScriptError
from tutti.parallel.sharding.sharded_gradients import Shards

Kind = tuple[torch.dtype, torch.device, torch.Size]


class NotedModel:
    """What prepare found in a model.

    Args:
        model: the divided model, as steps use it.
        plan: the plan.
        shards: the sharding of parameters.
        own_forwards: `forward_entries` of the model before it was divided.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        shards: Shards,
        own_forwards: Mapping[int, Any],
    ) -> None:
        self._model, self._plan, self._shards = model, plan, shards
        self._convertible = _is_plain(plan)
        self._installed = [
            (name, module, module.__dict__["forward"])
            for name, module in model.named_modules()
            if "forward" in module.__dict__ and module.__dict__["forward"] is not own_forwards.get(id(module))
        ]
        self._divides_values = plan.mesh.get("shard", 1) > 1 or plan.sharding.offload != "none"
        self._note()

    def _note(self) -> None:
        model = self._model
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._names = dict(model.named_parameters(remove_duplicate=False))
        self._parameters = list(dict.fromkeys(self._names.values()))
        modules = self._modules.values()
        entries: list[dict[str, Any]] = [e for module in modules for e in (module._parameters, module._modules)]
        self._entries = [entry for entry in entries if entry]
        self._sized = [*(entry for entry in entries if not entry), *(module._buffers for module in modules)]
        self._buffer_names = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        self._noted, self._noted_size = self._parts(), self._size()
        self._kinds = [*map(_kind, self._parameters)]
        self._trained = [parameter.requires_grad for parameter in self._parameters]
        self._addresses = [*map(torch.Tensor.data_ptr, self._parameters)]
        self._memory = {parameter: parameter.data for parameter in self._parameters} if self._divides_values else {}

    def check(self) -> bool:
        """Compare the model with what prepare found.

        Returns:
            Whether parameters have been frozen, unfrozen, or have another type or device, which replicas follow.

        Raises:
            ScriptError: the script has changed what prepare has divided; the message names it and the remedy.
        """
        parts = self._parts()
        if len(parts) != len(self._noted) or not all(map(is_, parts, self._noted)) or self._size() != self._noted_size:
            self._check_names()
            self._check_modules()
            self._note()
        changed = [*map(torch.Tensor.data_ptr, self._parameters)] != self._addresses and self._check_kinds()
        trained = [parameter.requires_grad for parameter in self._parameters]
        if trained != self._trained:
            self._trained, changed = trained, True
        for name, module, forward in self._installed:
            if module.__dict__.get("forward") is not forward:
                raise ScriptError(
                    f"the forward of {name or 'the model'!r} was replaced after prepare, but under this plan "
                    f"{type(forward).__name__} computes it together with other ranks; replace it before job.prepare"
                )
        if self._divides_values:
            self._restore_memory()
        return changed

    def _parts(self) -> list[Any]:
        return [*chain.from_iterable(map(dict.values, self._entries))]

    def _size(self) -> int:
        return sum(map(len, self._sized))

    def _check_names(self) -> None:
        now = dict(self._model.named_parameters(remove_duplicate=False))
        if now.keys() != self._names.keys():
            gone, new = sorted(self._names.keys() - now.keys()), sorted(now.keys() - self._names.keys())
            if gone:
                renamed = f" ({new[0]!r} is new)" if new else ""
                raise ScriptError(
                    f"parameter {gone[0]!r} was removed from the model after prepare{renamed}, but gradients, "
                    "checkpoints and the optimizer know it by this name; prune, parametrize, tie or remove layers "
                    "before job.prepare"
                )
            raise ScriptError(
                f"parameter {new[0]!r} was added to the model or replaced after prepare, so its gradient would not be "
                "reduced over the ranks, and no checkpoint would have it; build the whole model before job.prepare (a "
                "layer that joins later can be skipped by a flag until then)"
            )
        for name, parameter in now.items():
            if parameter is not self._names[name]:
                raise ScriptError(
                    f"parameter {name!r} was replaced by another tensor after prepare (a new layer, an assignment, or "
                    "load_state_dict(assign=True)), but the optimizer holds the old one; replace it before "
                    "job.prepare, or write the new values in place (load_state_dict, copy_)"
                )

    def _check_modules(self) -> None:
        """The parameters are the same. Other modules may change, unless ranks compute them together."""
        now = dict(self._model.named_modules(remove_duplicate=False))
        changed = [
            name for name in sorted(self._modules.keys() | now.keys()) if self._modules.get(name) is not now.get(name)
        ]
        for name in changed:
            kind = type(now.get(name) or self._modules.get(name)).__name__
            if any(self._is_computed_together(module) for module in (self._modules.get(name), now.get(name))):
                raise ScriptError(
                    f"module {name!r} ({kind}) was added, replaced or removed after prepare, but its statistics or its "
                    "forward are computed together with other ranks; change the model before job.prepare"
                )
        for name, _ in self._model.named_buffers(remove_duplicate=False):
            owner, _, key = name.rpartition(".")
            if name not in self._buffer_names and key not in now[owner]._non_persistent_buffers_set:
                raise ScriptError(
                    f"buffer {name!r} was added to the model after prepare, so no checkpoint would have it; register "
                    "it before job.prepare, or with persistent=False"
                )

    def _is_computed_together(self, module: nn.Module | None) -> bool:
        if self._plan.mesh.get("space", 1) > 1:
            return True
        return isinstance(module, _NormBase) or any(module is other for _, other, _ in self._installed)

    def _check_kinds(self) -> bool:
        """Some parameters lie in other memory. Return whether their types or devices have changed."""
        self._addresses = [*map(torch.Tensor.data_ptr, self._parameters)]
        kinds = [*map(_kind, self._parameters)]
        if kinds == self._kinds:
            return False
        names = {parameter: name for name, parameter in reversed(self._names.items())}
        for parameter, (dtype, device, shape) in zip(self._parameters, self._kinds, strict=True):
            if parameter.shape != shape or (_kind(parameter) != (dtype, device, shape) and not self._convertible):
                raise ScriptError(
                    f"parameter {names[parameter]!r} is {_describe(_kind(parameter))} now, but was "
                    f"{_describe((dtype, device, shape))} when prepare saw it; call .double(), .half(), .to(...) or "
                    "assign .data before job.prepare"
                )
        self._kinds = kinds
        return True

    @torch.no_grad()
    def _restore_memory(self) -> None:
        """Copy values that the script has put into other memory (`p.data = ...`) back to where the plan keeps them."""
        for pack in self._shards.packs():  # these move once, when they are first gathered
            for parameter, piece in zip(pack.parameters, pack.mine, strict=True):
                self._memory[parameter.shard] = piece.within(pack.flat)
        for tensor, memory in self._memory.items():
            if tensor.data_ptr() != memory.data_ptr():
                memory.copy_(tensor.data)
                tensor.data = memory


_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule")


def check_unwrapped(model: nn.Module) -> None:
    """Refuse a model in a wrapper of torch that exchanges gradients or parameters itself.

    Raises:
        ScriptError: names the wrapper and the remedy.
    """
    for name, module in model.named_modules():
        kinds = [kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("torch.")]
        wrapper = next((kind for kind in _WRAPPERS if kind in kinds), None)
        if wrapper is not None:
            remedy = "without fully_shard" if wrapper == "FSDPModule" else "inside it (its .module)"
            raise ScriptError(
                f"{name or 'the model'!r} is in torch's {wrapper}, which exchanges gradients or parameters itself; "
                f"pass prepare the model {remedy}, and say how it is divided with --mesh"
            )


def forward_entries(model: nn.Module) -> dict[int, Any]:
    """The forwards that the script itself has put on modules, by the id of the module."""
    return {id(module): module.__dict__["forward"] for module in model.modules() if "forward" in module.__dict__}


def _kind(parameter: torch.Tensor) -> Kind:
    return parameter.dtype, parameter.device, parameter.shape


def _describe(kind: Kind) -> str:
    dtype, device, shape = kind
    return f"{str(dtype).removeprefix('torch.')} of shape {tuple(shape)} on {device}"


def _is_plain(plan: Plan) -> bool:
    """Whether ranks hold whole parameters and exchange only gradients, so that parameters may change their type."""
    replicas_only = all(axis in ("replicate", "context") for axis, degree in plan.mesh.items() if degree > 1)
    return replicas_only and plan.sync.mode == "synchronous" and plan.sync.compress is None

"""Guards around a divided model: where its parts would leave as the whole, a sentence says what to call instead.

They are hooks and attributes of the modules, which `ModuleChanges.undone` takes away while the model is whole.
"""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tutti.config.mesh_axes import format_mesh
from tutti.config.vocabulary import AxisName
from tutti.errors import ScriptError
from tutti.parallel.layout import Layout
from tutti.parallel.whole_model import ModuleChanges, Place

DIVIDING: tuple[AxisName, ...] = ("shard", "split", "stage", "expert", "table")
"""The axes whose ranks may hold different parts of a model."""

_reading = threading.local()


@contextmanager
def reading_parts() -> Iterator[None]:
    """Within the context, states may be read although they are this rank's parts: checkpoints do."""
    before, _reading.allowed = getattr(_reading, "allowed", False), True
    try:
        yield
    finally:
        _reading.allowed = before


def may_read() -> bool:
    """Whether this thread is within `reading_parts`."""
    return bool(getattr(_reading, "allowed", False))


def _refuse(what: str, axes: str, remedy: str) -> None:
    if not may_read():
        raise ScriptError(f"{what} would see only this rank's part of it, since the plan divides it ({axes}); {remedy}")


_REMEDY = (
    "call job.state_dict() or job.save_pretrained(folder) on every rank instead, or do it inside `with "
    "job.whole_model():`"
)


def divided_names(model: nn.Module, layout: Layout, division: ModuleChanges) -> dict[str, Place]:
    """The parameters and buffers that this rank holds in parts or not at all, and where the modules hold them."""
    divided = {}
    for name, (table, module, key) in division.places.items():
        shard = layout.shards.get(name)
        if table.get(key) is None or (shard is not None and shard.cuts):
            divided[name] = (table, module, key)
    return divided


def guard_model(model: nn.Module, layout: Layout, division: ModuleChanges) -> None:
    """Refuse to copy, pickle or read the state of modules whose tensors are divided, and cut states that they load."""
    divided = divided_names(model, layout, division)
    if not divided:
        return
    axes = format_mesh({axis: n for axis in DIVIDING if (n := layout.mesh.degree(axis)) > 1})
    owners: dict[int, dict[str, str]] = {}
    for name, (_, module, key) in divided.items():
        owners.setdefault(id(module), {})[key] = name
    for module in model.modules():
        if any(id(inner) in owners for inner in module.modules()):
            guard = ModuleGuard(type(module).__name__, axes)
            module.register_state_dict_pre_hook(guard.on_state_dict)  # type: ignore[no-untyped-call]
            vars(module).update(__deepcopy__=guard.on_copy, __reduce_ex__=guard.on_pickle)
            cutter = StateCutter(type(module).__name__, layout, owners.get(id(module), {}))
            module.register_load_state_dict_pre_hook(cutter)  # type: ignore[no-untyped-call]
    model.register_load_state_dict_post_hook(lambda module, keys: _update_copies(layout))  # type: ignore[no-untyped-call]
    if layout.mesh.degree("stage") > 1:
        for module in model.modules():
            if missing := [name for key, name in owners.get(id(module), {}).items()]:
                module.register_forward_pre_hook(MissingParameters(missing[0]), prepend=True)


def _update_copies(layout: Layout) -> None:
    for update_copies in layout.states.after_load:
        update_copies()


@dataclass(frozen=True, slots=True)
class ModuleGuard:
    """Refuses what would treat one module's parts as the whole: `kind` names it, `axes` what divides it."""

    kind: str
    axes: str

    def on_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        _refuse(f"{self.kind}.state_dict()", self.axes, _REMEDY)

    def on_copy(self, memo: dict[int, Any]) -> Any:
        remedy = f"{_REMEDY}; for an average of the weights, use tutti.AveragedWeights(job)"
        _refuse(f"copy.deepcopy of {self.kind}", self.axes, remedy)
        raise ScriptError(f"{self.kind} cannot be copied while it is divided among ranks; {_REMEDY}")

    def on_pickle(self, protocol: Any) -> Any:
        _refuse(f"pickle (torch.save) of {self.kind}", self.axes, _REMEDY)
        raise ScriptError(f"{self.kind} cannot be pickled while it is divided among ranks; {_REMEDY}")


@dataclass(frozen=True, slots=True)
class StateCutter:
    """Cuts a whole state_dict that a module loads to this rank's parts.

    Attributes:
        names: the divided tensors of the module, by their name in it.
    """

    kind: str
    layout: Layout
    names: dict[str, str]

    def __call__(
        self,
        module: nn.Module,
        state: dict[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        if metadata.get("assign_to_params_buffers", False):
            raise ScriptError(
                f"{self.kind}.load_state_dict(assign=True) would replace this rank's parts of the weights; leave out "
                "assign=True"
            )
        for key, name in self.names.items():
            whole = state.get(prefix + key)
            if not isinstance(whole, torch.Tensor):
                continue
            here = module._parameters.get(key, module._buffers.get(key))
            if here is None:  # on other ranks
                if tuple(whole.shape) == self.layout.names[name]:
                    del state[prefix + key]
            elif tuple(whole.shape) == self.layout.names[name]:
                state[prefix + key] = self.layout.shard_of(name).take(whole)


@dataclass(frozen=True, slots=True)
class MissingParameters:
    """Refuses a call of a module whose parameter `name` is on the ranks of another stage."""

    name: str

    def __call__(self, module: nn.Module, args: Any) -> None:
        key = self.name.rpartition(".")[2]
        if module._parameters.get(key, module._buffers.get(key)) is None:
            raise ScriptError(
                f"{type(module).__name__} was called outside of a step, but its {self.name!r} is on another stage; "
                "use job.evaluate, or call the model inside `with job.whole_model():`"
            )


def guard_optimizers(optimizers: Iterable[Optimizer], layout: Layout) -> None:
    """Refuse to read or load the state of optimizers that hold this rank's part of it."""
    axes = format_mesh({axis: n for axis in DIVIDING if (n := layout.mesh.degree(axis)) > 1})
    whole = layout.mesh.degree("stage") == 1 and not layout.states.shards
    if not axes or (whole and not any(shard.cuts for shard in layout.shards.values())):
        return

    def on_state_dict(optimizer: Optimizer) -> None:
        remedy = "call job.save() on every rank, and `tutti export --optimizers` for one file"
        _refuse(f"{type(optimizer).__name__}.state_dict()", axes, remedy)

    def on_load(optimizer: Optimizer, state: dict[str, Any]) -> None:
        remedy = "resume from a checkpoint instead (Job(resume=...))"
        _refuse(f"{type(optimizer).__name__}.load_state_dict()", axes, remedy)

    for optimizer in optimizers:
        optimizer.register_state_dict_pre_hook(on_state_dict)
        optimizer.register_load_state_dict_pre_hook(on_load)

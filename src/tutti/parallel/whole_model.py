"""The whole model out of all ranks' parts: whole tensors, in modules that compute as the script built them.

`ModuleChanges` records what a plan's mechanisms changed in the modules. `WholeModel` gathers the tensors and takes
those changes back for a while.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tutti.comm.world import World
from tutti.errors import ScriptError
from tutti.parallel.layout import Layout, TensorShard, to_local

_ABSENT = object()

Place = tuple[dict[str, Any], nn.Module, str]
"""Where a module holds a tensor: its `_parameters` or `_buffers`, the module, and the name in it."""


@dataclass(slots=True)
class _ModuleState:
    """A module's class and attributes at one time; its tables of hooks are copied."""

    path: str
    module: nn.Module
    kind: type[nn.Module]
    attributes: dict[str, Any]


@dataclass(slots=True)
class _Change:
    """What division changed in one module.

    Attributes:
        kind: the class before.
        attributes: plain attributes before; absent ones are `_ABSENT`.
        hooks: names of tables -> keys of the hooks that were added.
    """

    module: nn.Module
    kind: type[nn.Module]
    attributes: dict[str, Any] = field(default_factory=dict)
    hooks: dict[str, set[int]] = field(default_factory=dict)


class ModuleChanges:
    """What dividing a model changes in its modules; made before, and told when the model is divided.

    Attributes:
        places: the modules that hold each parameter and buffer, by its name in the undivided model.
        parameters: names of the parameters.
        originals: the parameters of the undivided model, by name, until `done`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._before = _states(model)
        self._changes: list[_Change] = []
        self.places: dict[str, Place] = {}
        self.parameters: set[str] = set()
        for state in self._before:
            for table in (state.module._parameters, state.module._buffers):
                names = {key: f"{state.path}.{key}" if state.path else key for key in table if table[key] is not None}
                self.places |= {name: (table, state.module, key) for key, name in names.items()}
                if table is state.module._parameters:
                    self.parameters |= set(names.values())

    def done(self) -> None:
        """The model is divided: compare it with what it was."""
        after = {id(state.module): state for state in _states(self._before[0].module)}
        for before in self._before:
            if id(before.module) in after:
                change = _difference(before, after[id(before.module)])
                if change is not None:
                    self._changes.append(change)
        self._before = []

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Give the modules the classes, forwards and hooks of the undivided model; changes made since then stay."""
        restored = [_undo(change) for change in self._changes]
        try:
            yield
        finally:
            for redo in reversed(restored):
                redo()


def _states(model: nn.Module) -> list[_ModuleState]:
    states = []
    for path, module in model.named_modules():
        attributes = {
            key: value.copy() if _is_hook_table(key, value) else value
            for key, value in vars(module).items()
            if key not in ("_parameters", "_buffers", "_modules", "training", "_flat_weights", "_flat_weight_refs")
        }
        states.append(_ModuleState(path, module, type(module), attributes))
    return states


def _is_hook_table(key: str, value: Any) -> bool:
    return key.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")) and isinstance(value, dict)


def _difference(before: _ModuleState, after: _ModuleState) -> _Change | None:
    change = _Change(before.module, before.kind)
    for key in before.attributes.keys() | after.attributes.keys():
        old, new = before.attributes.get(key, _ABSENT), after.attributes.get(key, _ABSENT)
        if _is_hook_table(key, new):
            added = new.keys() - (old.keys() if isinstance(old, dict) else ())
            change.hooks.update({key: set(added)} if added else {})
        elif old is not new:
            change.attributes[key] = old
    return change if change.attributes or change.hooks or before.kind is not after.kind else None


def _undo(change: _Change) -> Any:
    """Take one module's change back; returns the function that makes it again."""
    module, state = change.module, vars(change.module)
    kind = type(module)
    now = {key: state.get(key, _ABSENT) for key in change.attributes}
    tables = {key: state[key].copy() for key in change.hooks}
    module.__class__ = change.kind
    _set(state, change.attributes)
    for key, added in change.hooks.items():
        for number in added:
            state[key].pop(number, None)

    def redo() -> None:
        module.__class__ = kind
        _set(state, now)
        for key, table in tables.items():
            current = state[key].copy()
            kept = {n: hook for n, hook in table.items() if n in current or n in change.hooks[key]}
            state[key].clear()
            state[key].update({**kept, **current})  # in the order in which they were

    return redo


def _set(state: dict[str, Any], values: dict[str, Any]) -> None:
    for key, value in values.items():
        if value is _ABSENT:
            state.pop(key, None)
        else:
            state[key] = value


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """One rank's part of a tensor, as it tells the others."""

    shard: TensorShard
    dtype: torch.dtype
    trained: bool


class _Edit(Enum):
    """What became of a tensor: nothing, other values, or a shape or dtype that a part cannot follow."""

    NONE = "none"
    VALUES = "values"
    UNFIT = "unfit"


class _Entered:
    """A tensor as it is on entering, to be found again and put back on leaving."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._data, self._version = tensor, tensor.detach(), tensor._version

    @torch.no_grad()
    def left(self, places: list[Place]) -> _Edit:
        """Put the tensor back where another one is now, with the other's values if they fit."""
        tensor, data = self._tensor, self._data
        current = places[0][0].get(places[0][2])
        edit = _Edit.NONE if tensor._version == self._version else _Edit.VALUES
        if tensor.shape != data.shape or tensor.dtype != data.dtype or tensor.device != data.device:
            tensor.data = data
            edit = _Edit.UNFIT
        if current is tensor:
            return edit
        if current is None or current.shape != data.shape or current.dtype != data.dtype:
            edit = _Edit.UNFIT
        else:
            tensor.copy_(current)
            edit = _Edit.VALUES
        for table, _, key in places:
            table[key] = tensor
        return edit


class WholeModel:
    """Gathers the tensors of a divided model and puts them into its modules.

    Args:
        division: what dividing the model changed.
        layout: which part of each tensor this rank holds.
        world: all ranks.

    Attributes:
        division: as given.
    """

    def __init__(self, division: ModuleChanges, layout: Layout, world: World) -> None:
        self.division, self._layout, self._world = division, layout, world
        self._places: dict[str, list[Place]] = {}
        for name, place in division.places.items():
            self._places.setdefault(layout.first_name(name), []).append(place)

    @contextmanager
    def in_place(self, device: torch.device, *, keep: bool = True, edits: bool = False) -> Iterator[None]:
        """Let the model's modules hold whole tensors and compute as on one device. Collective on entering.

        Args:
            device: where gathered tensors are put.
            keep: whether this rank needs the model; otherwise it only takes part in the exchange.
            edits: write values that were changed inside back into the parts; leaving is then collective.

        Raises:
            ScriptError: with `edits`, on all ranks: they have changed different tensors, or a dtype or shape.
        """
        wholes = self._gathered(device, keep=keep)
        if not keep:
            yield
            return
        parts = {name: [place[0].get(place[2]) for place in self._places[name]] for name in wholes}
        with self.division.undone():
            self._put({name: [whole] * len(parts[name]) for name, whole in wholes.items()})
            before = {name: _Entered(tensor) for name, tensor in self._present().items()}
            failed = True
            try:
                yield
                failed = False
            finally:
                edited = {name: entered.left(self._places[name]) for name, entered in before.items()}
                self._put(parts)
        if edits and not failed:
            self._write_back(wholes, parts, edited)

    def _present(self) -> dict[str, torch.Tensor]:
        found = ((name, places[0][0].get(places[0][2])) for name, places in self._places.items())
        return {name: tensor for name, tensor in found if tensor is not None}

    def _put(self, tensors: dict[str, list[Any]]) -> None:
        for name, per_place in tensors.items():
            for (table, module, key), tensor in zip(self._places[name], per_place, strict=True):
                if isinstance(module, nn.RNNBase):  # it keeps a list of its weights
                    setattr(module, key, tensor)
                else:
                    table[key] = tensor

    @torch.no_grad()
    def _gathered(self, device: torch.device, *, keep: bool) -> dict[str, torch.Tensor]:
        """The tensors that some rank does not hold whole, by first name."""
        local = self._present()
        held = {name: _held(self._layout, name, tensor) for name, tensor in local.items()}
        everyone = self._world.gather(held)
        wholes: dict[str, torch.Tensor] = {}
        for name in self._places:
            owners: dict[Any, int] = {}
            for rank, theirs in enumerate(everyone):
                if name in theirs:
                    owners.setdefault(theirs[name].shard.cuts, rank)
            if set(owners) == {()} and all(name in theirs for theirs in everyone):
                continue
            wholes[name] = self._assembled(name, local.get(name), owners, everyone, device)
            if not keep:
                del wholes[name]
        return wholes

    def _assembled(
        self,
        name: str,
        part: torch.Tensor | None,
        owners: dict[Any, int],
        everyone: list[dict[str, _Held]],
        device: torch.device,
    ) -> torch.Tensor:
        first = everyone[min(owners.values())][name]
        whole = torch.zeros(first.shard.shape, dtype=first.dtype, device=device)
        for rank in owners.values():
            shard = everyone[rank][name].shard
            mine = part if rank == self._world.rank else None
            shard.put(whole, _broadcast(self._world, mine, shard, first.dtype, rank))
        if name not in self.division.parameters:
            return whole
        parameter = nn.Parameter(whole, requires_grad=first.trained)
        parameter.__dict__.update({} if part is None else part.__dict__)
        return parameter

    @torch.no_grad()
    def _write_back(
        self, wholes: dict[str, torch.Tensor], parts: dict[str, list[Any]], edited: dict[str, _Edit]
    ) -> None:
        """Copy changed values into this rank's parts. Collective."""
        touched = {name for name, edit in edited.items() if edit is not _Edit.NONE}
        unfit = [name for name, edit in edited.items() if edit is _Edit.UNFIT]
        everyone = self._world.gather((touched, unfit))
        _refuse_edits(everyone)
        changed = bool(touched)
        for name, whole in wholes.items():
            if parts[name][0] is not None:
                part = to_local(parts[name][0].detach())
                values = self._layout.shard_of(name).take(whole.detach()).to(part.device)
                if not torch.equal(values, part):  # a write through .data leaves no other trace
                    part.copy_(values)
                    changed = True
        if any(self._world.gather(changed)):
            for update_copies in self._layout.states.after_load:
                update_copies()


def _refuse_edits(everyone: list[tuple[set[str], list[str]]]) -> None:
    """Raise if parts cannot follow what ranks did: (tensors that they wrote to, tensors of another shape or dtype)."""
    unfit = [name for _, names in everyone for name in names]
    if unfit:
        raise ScriptError(
            f"the shape or dtype of {unfit[0]!r} was changed inside job.whole_model(), and the parts of the ranks "
            "cannot follow; change a copy.deepcopy of the model instead"
        )
    for rank, (touched, _) in enumerate(everyone):
        different = sorted(touched ^ everyone[0][0])
        if different:
            there, absent = (rank, 0) if different[0] in touched else (0, rank)
            raise ScriptError(
                f"{different[0]!r} was changed inside job.whole_model() on rank {there} and not on rank {absent}; make "
                "the same change on every rank, or change a copy.deepcopy of the model"
            )


def _held(layout: Layout, name: str, tensor: torch.Tensor) -> _Held:
    part = to_local(tensor.detach())
    shard = layout.shards.get(name) or TensorShard(shape=tuple(part.shape))
    return _Held(shard=shard, dtype=part.dtype, trained=tensor.requires_grad)


def _broadcast(
    world: World, part: torch.Tensor | None, shard: TensorShard, dtype: torch.dtype, source: int
) -> torch.Tensor:
    """One rank's part on every rank, as bytes, which every backend can send."""
    numel = torch.Size(shard.local_shape).numel()
    if part is not None:
        data = to_local(part.detach()).to(world.device).contiguous().reshape(-1).view(torch.uint8)
    else:
        data = torch.empty(numel * dtype.itemsize, dtype=torch.uint8, device=world.device)
    if numel and world.world_size > 1:
        dist.broadcast(data, src=source)
    return data.view(dtype).reshape(shard.local_shape)

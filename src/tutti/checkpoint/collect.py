"""What a rank puts into a checkpoint: its parts of tensors, and the small state beside them."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tutti.checkpoint.generators import read_generators
from tutti.checkpoint.tensors import Item, item, stored_dtype
from tutti.errors import CheckpointError
from tutti.parallel.layout import Cut, Held, Layout, local
from tutti.trainer.run_state import Run

Key = tuple[int, str, str]
"""A tensor of a checkpoint: (optimizer, parameter, key of its state), or (MODEL, name, "")."""

MODEL = -1
KEPT = -2
"""What compressed sums keep back: (KEPT, "rank/bucket", name), whole flat tensors."""

Group = tuple[dict[str, Any], list[str]]
"""Settings of an optimizer's group, and the names of its parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One part that a rank writes: of which tensor, its whole shape, and which cuts of it."""

    key: Key
    shape: tuple[int, ...]
    dtype: str
    cuts: tuple[Cut, ...]
    anywhere: bool = False

    @property
    def stored_as(self) -> str:
        """Its key in the file."""
        where, name, key = self.key
        if where == KEPT:
            return f"kept/{name}/{key}"
        return f"model/{name}" if where == MODEL else f"optimizer-{where}/{name}/{key}"


@dataclass(slots=True)
class Contribution:
    """What one rank tells the others. `order`: names of the model's tensors; `tied`: other names of some of them; the
    rest is by optimizer: `scalars` by parameter and key, `digests` of state that must be the same on every rank,
    `beside` what is not of a parameter. `kept`: how the buckets of compressed sums are made up; `sees`: whether rank
    0's folder is seen from here.
    """

    pieces: list[Piece] = field(default_factory=list)
    order: dict[str, None] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    groups: list[list[Group]] = field(default_factory=list)
    scalars: list[dict[str, dict[str, Any]]] = field(default_factory=list)
    digests: dict[Key, str] = field(default_factory=dict)
    beside: list[dict[str, Any]] = field(default_factory=list)
    extra_state: dict[str, Any] = field(default_factory=dict)
    generators: dict[str, Any] = field(default_factory=dict)
    kept: dict[str, Any] | None = None
    replica: dict[str, Any] = field(default_factory=dict)
    sees: bool = True
    failure: str | None = None


def collect(run: Run) -> tuple[Contribution, list[Item]]:
    """This rank's contribution, and the tensors it writes. Raises CheckpointError for what cannot be written."""
    mine = Contribution(generators=read_generators())
    items: list[Item] = []
    for name, first, tensor in named_tensors(run.model, run.layout):
        if name != first:
            mine.tied[name] = first
        if first in mine.order:
            continue
        mine.order[first] = None
        if run.layout.counts(name):
            part = local(tensor.detach())
            _add(mine, items, (MODEL, first, ""), held_of(run.layout, name, part), part)
    mine.extra_state = {name: module.get_extra_state() for name, module in extra_states(run.model)}
    names = run.layout.state_names(run.model, run.optimizers)
    for number, optimizer in enumerate(run.optimizers):
        _collect_optimizer(run.layout, number, optimizer, names[number], mine, items)
    return mine, items


def _add(
    mine: Contribution, items: list[Item], key: Key, held: Held, part: torch.Tensor, *, anywhere: bool = False
) -> None:
    if tuple(part.shape) != held.local_shape:
        raise CheckpointError(
            f"{' '.join(filter(None, key[1:]))} has shape {tuple(part.shape)} on this rank, its layout says "
            f"{held.local_shape}; leave the shapes of parameters as prepare made them"
        )
    dtype = stored_dtype(part.dtype)
    piece = Piece(key=key, shape=held.shape, dtype=dtype, cuts=held.cuts, anywhere=anywhere)
    mine.pieces.append(piece)
    items.append(item(piece.stored_as, part))


def _collect_optimizer(
    layout: Layout,
    number: int,
    optimizer: Optimizer,
    names: dict[nn.Parameter, str],
    mine: Contribution,
    items: list[Item],
) -> None:
    said = optimizer.state_dict()
    states, groups = said["state"], said["param_groups"]
    numbered = numbering(optimizer, groups)
    mine.groups.append([])
    mine.scalars.append({})
    for group, live in zip(groups, optimizer.param_groups, strict=True):
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        mine.groups[-1].append((settings, [layout.first_name(_name(names, p, optimizer)) for p in live["params"]]))
    for parameter, place in numbered.items():
        if place in states:
            _collect_state(layout, number, names[parameter], parameter, states[place], mine, items)
    rest = {key: value for key, value in states.items() if key not in set(numbered.values())}
    mine.beside.append({"state": rest, **{k: v for k, v in said.items() if k not in ("state", "param_groups")}})


def numbering(optimizer: Optimizer, groups: list[dict[str, Any]]) -> dict[nn.Parameter, Any]:
    """The number by which a state_dict with these `groups` calls each parameter of the optimizer."""
    return {
        parameter: place
        for live, group in zip(optimizer.param_groups, groups, strict=True)
        for parameter, place in zip(live["params"], group["params"], strict=True)
    }


def _name(names: dict[nn.Parameter, str], parameter: nn.Parameter, optimizer: Optimizer) -> str:
    if parameter not in names:
        raise CheckpointError(
            f"{type(optimizer).__name__} holds a parameter of shape {tuple(parameter.shape)} that is not in the model, "
            "so no checkpoint can name it; register it in the model before prepare"
        )
    return names[parameter]


def _collect_state(
    layout: Layout,
    number: int,
    name: str,
    parameter: nn.Parameter,
    state: dict[str, Any],
    mine: Contribution,
    items: list[Item],
) -> None:
    """State of the parameter's shape is cut like it; scalars are written once; the rest must be equal everywhere."""
    held, writes = (
        layout.states.held.get(name) or held_of(layout, name, local(parameter.detach())),
        layout.counts_state(name),
    )
    first = layout.first_name(name)
    for key, value in state.items():
        value = local(value) if isinstance(value, torch.Tensor) else value
        if isinstance(value, torch.Tensor) and value.dim() and tuple(value.shape) == held.local_shape:
            if writes:
                _add(mine, items, (number, first, str(key)), held, value)
        elif isinstance(value, torch.Tensor) and value.numel() > 1:
            mine.digests[(number, first, str(key))] = _digest(value)
            if writes:
                whole = Held(shape=tuple(value.shape))
                _add(mine, items, (number, first, str(key)), whole, value, anywhere=bool(held.cuts))
        elif writes:
            mine.scalars[-1].setdefault(first, {})[key] = pack(value)


def named_tensors(model: nn.Module, layout: Layout) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(name, first name of the same tensor, tensor) of parameters and persistent buffers here, also of tied ones."""
    seen: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        kept = {k: b for k, b in module._buffers.items() if k not in module._non_persistent_buffers_set}
        for key, tensor in [*module._parameters.items(), *kept.items()]:
            if tensor is not None:
                name = f"{prefix}.{key}" if prefix else key
                first = layout.first_name(name)
                if seen.setdefault(first, tensor) is not tensor:  # tied once, and now no more
                    first = name
                yield name, first, tensor


def held_of(layout: Layout, name: str, part: torch.Tensor) -> Held:
    """How a tensor is held here; one that no mechanism cut is as large as it is, whatever it was at prepare."""
    return layout.held.get(name) or Held(shape=tuple(part.shape))


def extra_states(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name in a state_dict, module) of modules that keep state of their own beside tensors."""
    for prefix, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield f"{prefix}._extra_state" if prefix else "_extra_state", module


def pack(value: Any) -> Any:
    """A state's scalar as plain values: tensors of one element become numbers that say their dtype and shape."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return ["tensor", str(value.dtype).removeprefix("torch."), value.item(), list(value.shape)]
    return ["value", value.cpu() if isinstance(value, torch.Tensor) else value]


def unpack(packed: Any) -> Any:
    """What `pack` packed."""
    if packed[0] == "value":
        return packed[1]
    _, dtype, number, shape = packed
    return torch.full(shape, number, dtype=getattr(torch, dtype))


def _digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().data).hexdigest()

"""Apply the decisions on this rank: replace parameters by this rank's parts, and module forwards by divided ones."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from tutti.parallel.layout import GRADIENT_AXES, Layout
from tutti.parallel.tensor.layer_patterns import Decision
from tutti.parallel.tensor.partition_ranges import RankRanges
from tutti.parallel.tensor.tensor_activation import PartPlacement, all_whole, parted
from tutti.parallel.tensor.tensor_collectives import SplitGroup
from tutti.parallel.tensor.tensor_layers import (
    GATES,
    ColumnForward,
    HeadsForward,
    ParallelEntry,
    RecurrentForward,
    RowForward,
    SamplesForward,
    TokensForward,
    VocabularyForward,
    is_transposed,
    projections,
    recurrent_parameters,
)

PLACES = "_tutti_split_places"
"""Attribute of a module's class: the placement of each of its divided parameters, by name."""

Cut = tuple[str, int, RankRanges]
"""(name of a parameter in its module, dim, ranges of each rank)."""


class Running:
    """Counts the calls in progress of modules that contain divided parameters.

    While any is in progress, the model's own code reads a divided parameter as a `SplitTensor`, which behaves as the
    whole one. At other times every reader gets this rank's plain parameter.
    """

    def __init__(self) -> None:
        self.depth = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> "Running":
        return self


def apply_decisions(model: nn.Module, decisions: Sequence[Decision], layout: Layout, group: SplitGroup) -> None:
    """Divide `model` in place as `decisions` say, and record in `layout` what this rank holds."""
    entry, running = ParallelEntry(group), Running()
    by_tokens = any(decision.role == "tokens" for decision in decisions)
    parts: dict[int, nn.Parameter] = {}
    places: dict[int, PartPlacement] = {}
    for decision in decisions:
        module = model.get_submodule(decision.name)
        for leaf, dim, spread in cuts_of(module, decision):
            _cut(
                module,
                leaf,
                f"{decision.name}.{leaf}" if decision.name else leaf,
                dim,
                spread,
                layout,
                group,
                parts,
                places,
            )
        _set_forward(module, decision, entry, group, layout, by_tokens)
    owners = _share(model, parts, places)
    for module, leaves in owners:
        _guard(module, leaves, running)
    _watch(model, [module for module, _ in owners], running, entry)
    for module in model.modules():
        if isinstance(module, _BatchNorm):  # its reduction over samples needs plain tensors
            module.register_forward_pre_hook(lambda _, *call: all_whole(call), with_kwargs=True)


def cuts_of(module: nn.Module, decision: Decision) -> list[Cut]:
    """The parameters of a module that are cut: along which dim, and into which ranges per rank."""
    if decision.role in ("shared", "tokens", "samples"):
        return []
    if decision.role == "vocabulary":
        return [("weight", 0, decision.spread)]
    if decision.role == "heads":
        assert isinstance(module, nn.MultiheadAttention)
        unit = decision.spread.scaled(module.head_dim)
        return [(leaf, dim, unit.repeated(repeats)) for leaf, dim, repeats in projections(module)]
    if decision.role == "units":
        assert isinstance(module, nn.RNNBase)
        rows = decision.spread.repeated(GATES[module.mode])
        return [(leaf, 0, rows) for leaf in recurrent_parameters(module)]
    outputs = decision.role == "column"
    cuts: list[Cut] = [("weight", int(outputs == is_transposed(module)), decision.spread)]
    if outputs and module._parameters.get("bias") is not None:
        cuts.append(("bias", 0, decision.spread))
    return cuts


def _cut(
    module: nn.Module,
    leaf: str,
    name: str,
    dim: int,
    spread: RankRanges,
    layout: Layout,
    group: SplitGroup,
    parts: dict[int, nn.Parameter],
    places: dict[int, PartPlacement],
) -> None:
    """Make this rank's part of one parameter, unless a tied module has already cut it."""
    whole = module._parameters[leaf]
    assert whole is not None
    if id(whole) in parts:
        return
    ranges = spread.parts[group.rank]
    with torch.no_grad():
        pieces = [whole.narrow(dim, start, stop - start) for start, stop in ranges]
        part = torch.cat(pieces, dim) if pieces else whole.narrow(dim, 0, 0).clone()
    parts[id(whole)] = nn.Parameter(part.contiguous(), requires_grad=whole.requires_grad)
    places[id(whole)] = PartPlacement(dim=dim, spread=spread, group=group)
    layout.cut(name, dim, *ranges)


def _share(
    model: nn.Module, parts: dict[int, nn.Parameter], places: dict[int, PartPlacement]
) -> list[tuple[nn.Module, dict[str, PartPlacement]]]:
    """Put each part in every module that had the whole parameter, including tied modules.

    Returns:
        Each such module, with the placements of its divided parameters.
    """
    owners = []
    for module in list(model.modules()):
        leaves = {leaf: id(p) for leaf, p in module._parameters.items() if p is not None and id(p) in parts}
        for leaf, key in leaves.items():
            setattr(module, leaf, parts[key])  # _parameters is not enough: recurrent layers also list their weights
        if leaves:
            owners.append((module, {leaf: places[key] for leaf, key in leaves.items()}))
    return owners


def _set_forward(
    module: Any, decision: Decision, entry: ParallelEntry, group: SplitGroup, layout: Layout, by_tokens: bool
) -> None:
    """Replace the module's forward by that of its role, and set over which axes replicated gradients are reduced."""
    if decision.role in ("column", "shared"):
        module.forward = ColumnForward(
            module=module, entry=entry, spread=decision.spread, shared=decision.role == "shared"
        )
    elif decision.role == "row":
        module.forward = RowForward(module=module, group=group, spread=decision.spread, by_tokens=by_tokens)
    elif decision.role == "vocabulary":
        module.forward = VocabularyForward(module=module, group=group, spread=decision.spread)
    elif decision.role == "heads":
        module.forward = HeadsForward(module=module, entry=entry, heads=decision.spread)
    elif decision.role == "units":
        module.forward = RecurrentForward(module=module, entry=entry, units=decision.spread)
    elif decision.role == "samples":
        module.forward = SamplesForward(module=module, group=group, plain=module.forward)
    else:
        module.forward = TokensForward(module=module, group=group, plain=module.forward)
    if decision.role in ("shared", "samples"):
        for leaf, _ in module.named_parameters():
            layout.set_reduce_axes(f"{decision.name}.{leaf}", (*GRADIENT_AXES, "split"))


def _guard(module: nn.Module, leaves: dict[str, PartPlacement], running: Running) -> None:
    """Make `module.weight` return the whole parameter, as a `SplitTensor`, to the model's own code while it runs."""

    def reader(leaf: str, place: PartPlacement) -> property:
        def read(self: nn.Module) -> Any:
            if leaf not in self._parameters:
                raise AttributeError(leaf)
            parameter = self._parameters[leaf]
            local_size = place.spread.local(place.group.rank)
            if parameter is None or not running.depth or parameter.shape[place.dim] != local_size:
                return parameter  # shape inference puts a whole parameter in its place for a while
            return parted(parameter.as_subclass(torch.Tensor), place)

        return property(read)

    kind = type(module)
    body = {leaf: reader(leaf, place) for leaf, place in leaves.items()}
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    module.__class__ = type(kind.__name__, (kind,), {**names, **body, PLACES: leaves})


def whole_parameter(model: nn.Module, name: str) -> torch.Tensor:
    """The parameter `name` as the model's code sees it: `SplitTensor`, which behaves as the whole, if it is divided."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    parameter = module._parameters[leaf]
    assert parameter is not None
    place = getattr(module, PLACES, {}).get(leaf)
    return parameter if place is None else parted(parameter.as_subclass(torch.Tensor), place)


def _watch(model: nn.Module, divided: list[nn.Module], running: Running, entry: ParallelEntry) -> None:
    """Count the calls of modules that contain divided modules. Without gradients, the model's result is gathered."""
    inside = {id(module) for module in divided}
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # disables its fused evaluation kernel, which needs whole parameters
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
        contains = any(id(inner) in inside for inner in module.modules() if inner is not module)
        if contains or module is model:
            module.forward = _running(module.forward, running, entry if module is model else None)


def _running(plain: Callable[..., Any], running: Running, entry: ParallelEntry | None) -> Callable[..., Any]:
    """Wrap a forward so that `running` counts its calls; `entry` is given only for the model itself."""

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        running.depth += 1
        try:
            result = plain(*args, **kwargs)
        finally:
            running.depth -= 1
        if entry is None:
            return result
        entry.forget()
        return result if torch.is_grad_enabled() else all_whole(result)

    return forward

"""Apply: the decisions carried out on this rank: parameters become this rank's parts, modules compute on parts."""

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
"""Attribute of a module's class: where its divided parameters lie in the whole ones."""

Cut = tuple[str, int, RankRanges]
"""(name of a parameter in its module, dim, spread)."""


class Running:
    """Whether code of a model that contains divided parameters is running: then its own reads of them are of the
    whole tensor (a part that behaves as the whole). At other times everybody sees this rank's plain parameter.
    """

    def __init__(self) -> None:
        self.depth = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> "Running":
        return self


def apply_decisions(model: nn.Module, decisions: Sequence[Decision], layout: Layout, group: SplitGroup) -> None:
    """Change `model` in place as `decisions` say, and write into `layout` what this rank holds."""
    entry, running = ParallelEntry(group), Running()
    by_tokens = any(one.role == "tokens" for one in decisions)
    done: dict[int, nn.Parameter] = {}
    places: dict[int, PartPlacement] = {}
    for one in decisions:
        module = model.get_submodule(one.name)
        for leaf, dim, spread in cuts_of(module, one):
            _cut(module, leaf, f"{one.name}.{leaf}" if one.name else leaf, dim, spread, layout, group, done, places)
        _set_forward(module, one, entry, group, layout, by_tokens)
    owners = _share(model, done, places)
    for module, leaves in owners:
        _guard(module, leaves, running)
    _watch(model, [module for module, _ in owners], running, entry)
    for module in model.modules():
        if isinstance(module, _BatchNorm):  # its exchange over samples takes plain tensors
            module.register_forward_pre_hook(lambda _, args: all_whole(args))


def cuts_of(module: nn.Module, one: Decision) -> list[Cut]:
    """Which of a module's parameters are cut, along which dim, into what."""
    if one.role in ("shared", "tokens", "samples"):
        return []
    if one.role == "vocabulary":
        return [("weight", 0, one.spread)]
    if one.role == "heads":
        assert isinstance(module, nn.MultiheadAttention)
        unit = one.spread.scaled(module.head_dim)
        return [(leaf, dim, unit.repeated(repeats)) for leaf, dim, repeats in projections(module)]
    if one.role == "units":
        assert isinstance(module, nn.RNNBase)
        rows = one.spread.repeated(GATES[module.mode])
        return [(leaf, 0, rows) for leaf in recurrent_parameters(module)]
    outputs = one.role == "column"
    cuts: list[Cut] = [("weight", int(outputs == is_transposed(module)), one.spread)]
    if outputs and module._parameters.get("bias") is not None:
        cuts.append(("bias", 0, one.spread))
    return cuts


def _cut(
    module: nn.Module,
    leaf: str,
    name: str,
    dim: int,
    spread: RankRanges,
    layout: Layout,
    group: SplitGroup,
    done: dict[int, nn.Parameter],
    places: dict[int, PartPlacement],
) -> None:
    """Replace one parameter by this rank's part; one that is tied and has been cut already stays as it is."""
    whole = module._parameters[leaf]
    assert whole is not None
    if id(whole) in done:
        return
    ranges = spread.parts[group.rank]
    with torch.no_grad():
        pieces = [whole.narrow(dim, start, stop - start) for start, stop in ranges]
        part = torch.cat(pieces, dim) if pieces else whole.narrow(dim, 0, 0).clone()
    done[id(whole)] = nn.Parameter(part.contiguous(), requires_grad=whole.requires_grad)
    places[id(whole)] = PartPlacement(dim=dim, spread=spread, group=group)
    layout.cut(name, dim, *ranges)


def _share(
    model: nn.Module, done: dict[int, nn.Parameter], places: dict[int, PartPlacement]
) -> list[tuple[nn.Module, dict[str, PartPlacement]]]:
    """Put the parts wherever the whole parameters were, tied places too; returns where that was."""
    owners = []
    for module in list(model.modules()):
        leaves = {leaf: id(p) for leaf, p in module._parameters.items() if p is not None and id(p) in done}
        for leaf, key in leaves.items():
            setattr(module, leaf, done[key])  # not into _parameters: recurrent layers keep a list of their own
        if leaves:
            owners.append((module, {leaf: places[key] for leaf, key in leaves.items()}))
    return owners


def _set_forward(
    module: Any, one: Decision, entry: ParallelEntry, group: SplitGroup, layout: Layout, by_tokens: bool
) -> None:
    if one.role in ("column", "shared"):
        module.forward = ColumnForward(module=module, entry=entry, spread=one.spread, shared=one.role == "shared")
    elif one.role == "row":
        module.forward = RowForward(module=module, group=group, spread=one.spread, by_tokens=by_tokens)
    elif one.role == "vocabulary":
        module.forward = VocabularyForward(module=module, group=group, spread=one.spread)
    elif one.role == "heads":
        module.forward = HeadsForward(module=module, entry=entry, heads=one.spread)
    elif one.role == "units":
        module.forward = RecurrentForward(module=module, entry=entry, units=one.spread)
    elif one.role == "samples":
        module.forward = SamplesForward(module=module, group=group, plain=module.forward)
    else:
        module.forward = TokensForward(module=module, group=group, plain=module.forward)
    if one.role in ("shared", "samples"):
        for leaf, _ in module.named_parameters():
            layout.set_reduce_axes(f"{one.name}.{leaf}", (*GRADIENT_AXES, "split"))


def _guard(module: nn.Module, leaves: dict[str, PartPlacement], running: Running) -> None:
    """While the model runs, `module.weight` read by the model's own code stands for the whole parameter."""

    def reader(leaf: str, place: PartPlacement) -> property:
        def read(self: nn.Module) -> Any:
            if leaf not in self._parameters:
                raise AttributeError(leaf)
            own = self._parameters[leaf]
            if own is None or not running.depth or own.shape[place.dim] != place.spread.local(place.group.rank):
                return own  # a whole one stands in for it while shapes are found out
            return parted(own.as_subclass(torch.Tensor), place)

        return property(read)

    kind = type(module)
    body = {leaf: reader(leaf, place) for leaf, place in leaves.items()}
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    module.__class__ = type(kind.__name__, (kind,), {**names, **body, PLACES: leaves})


def whole_parameter(model: nn.Module, name: str) -> torch.Tensor:
    """The parameter `name` as the model's own code sees it: a divided one is a part that behaves as the whole."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    parameter = module._parameters[leaf]
    assert parameter is not None
    place = getattr(module, PLACES, {}).get(leaf)
    return parameter if place is None else parted(parameter.as_subclass(torch.Tensor), place)


def _watch(model: nn.Module, divided: list[nn.Module], running: Running, entry: ParallelEntry) -> None:
    """Note when modules that contain divided ones run; what the model returns without gradients is made whole."""
    inside = {id(module) for module in divided}
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # its fused kernel for evaluation takes whole parameters
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
        contains = any(id(one) in inside for one in module.modules() if one is not module)
        if contains or module is model:
            module.forward = _running(module.forward, running, entry if module is model else None)


def _running(plain: Callable[..., Any], running: Running, entry: ParallelEntry | None) -> Callable[..., Any]:
    """`entry`: given for the model itself."""

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

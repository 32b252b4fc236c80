"""Find how parallelism mechanisms can divide each module of a model, and record it in the ModelSpec for the planner."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tutti.config.model import ModelSpec, ModuleSpec, OpKind, SplitKind, block_of_name
from tutti.config.plan import LayoutRule
from tutti.errors import TuttiError
from tutti.nn import MixtureOfExperts
from tutti.parallel.embedding.table_linear import dividable_linears
from tutti.parallel.expert.expert_parallel import is_stacked
from tutti.parallel.spatial.apply_spatial_parallel import on_shapes
from tutti.parallel.spatial.spatial_tensor import SpatialTensor, cut_whole
from tutti.parallel.tensor import describe_split
from tutti.parallel.tensor.layer_patterns import KEY, VALUE, features, is_linear
from tutti.parallel.tensor.tensor_plan import SplitModule

_KINDS: Mapping[str, SplitKind] = {
    "column": "column",
    "shared": "column",
    "row": "row",
    "vocabulary": "vocabulary",
    "heads": "heads",
    "units": "rnn",
}
"""Placement of a module by tensor parallelism -> the kind in its ModelSpec."""

_DEGREES = (2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32, 48, 64, 96, 128)
"""Degrees that are tried to find which of them divide the heads of a model."""

ModuleFields = dict[str, dict[str, Any]]
"""Fields of ModuleSpec by module name."""


def with_capabilities(
    spec: ModelSpec, model: nn.Module, args: Sequence[Any] = (), layout: Sequence[LayoutRule] = ()
) -> ModelSpec:
    """Return `spec` with what the mechanisms can do with the modules of `model`.

    What cannot be determined stays "not divided".

    Args:
        spec: the costs of the model.
        model: the model as the user wrote it, undivided.
        args: positional arguments of its forward for some samples; they give the size of volumes.
        layout: rules of the plan that the spec is made for. Norms that they divide by tokens are divided under no
            other.
    """
    modules = {module.name: module for module in spec.modules}
    facts: ModuleFields = {name: {} for name in modules}
    for more in (
        _blocks(modules),
        _split(spec, model),
        _by_tokens(model, layout),
        _experts(modules, model),
        _tables(modules, model),
        _linears(modules, model),
        _attention(spec.modules),
        _space(model, args),
    ):
        for name, fields in more.items():
            if name in facts:
                facts[name].update(fields)
    return replace(spec, modules=tuple(replace(module, **facts[module.name]) for module in spec.modules))


def _blocks(modules: Iterable[str]) -> ModuleFields:
    numbers: dict[str, int] = {}
    blocks = {name: block_of_name(name) for name in modules}
    return {name: {"block": numbers.setdefault(block, len(numbers))} for name, block in blocks.items() if block}


def _split(spec: ModelSpec, model: nn.Module) -> ModuleFields:
    """Fields of modules that tensor parallelism divides, and of the modules between them."""
    accepted = {degree: decisions for degree in _DEGREES if (decisions := _described(model, degree)) is not None}
    if not accepted:
        return {}
    limit = math.lcm(*accepted) if len(accepted) < len(_DEGREES) else 0
    described = {divided.name: divided for divided in accepted[min(accepted)]}
    modules = {module.name: module for module in spec.modules}
    facts: ModuleFields = {}
    for name, divided in described.items():
        if divided.placement in _KINDS and name in modules:
            facts[name] = {
                "split": _KINDS[divided.placement],
                **({"split_groups": divided.groups} if divided.groups else {}),
            }
            into = next((e.values for e in divided.exchanges if e.when == "backward" and e.kind == "all-reduce"), 0)
            facts[name]["input_nbytes"] = _input_nbytes(model.get_submodule(name), modules[name], into)
    kinds: dict[str, SplitKind] = {name: fields.get("split", "") for name, fields in facts.items()}
    between = _between(spec.modules, kinds)
    for name in (*between, *(name for name, kind in kinds.items() if kind in ("column", "row", "heads"))):
        place = name if name in between else name.rpartition(".")[0]
        if between.get(place) == "heads" or kinds.get(name) == "heads":
            facts.setdefault(name, {})["split_limit"] = limit
    for name, kind in between.items():
        facts.setdefault(name, {})["split"] = kind
        groups = {divided.groups for inner, divided in described.items() if inner.rpartition(".")[0] == name} - {0}
        if kind == "heads" and len(groups) == 1:
            facts[name]["split_groups"] = groups.pop()
    for name, units in _units(spec.modules, kinds, between, described).items():
        facts[name].setdefault("split_limit", units)
    return facts


def _units(
    modules: Sequence[ModuleSpec],
    kinds: Mapping[str, SplitKind],
    between: Mapping[str, SplitKind],
    described: Mapping[str, SplitModule],
) -> dict[str, int]:
    """Number of units of each divided module; an activation has as many as the layer before it."""
    units: dict[str, int] = {}
    last: dict[str, int] = {}
    for module in modules:
        parent, _, _ = module.name.rpartition(".")
        if kinds.get(module.name):
            units[module.name] = last[parent] = described[module.name].units
        elif between.get(module.name) == "column" and parent in last:
            units[module.name] = last[parent]
    return units


def _by_tokens(model: nn.Module, layout: Sequence[LayoutRule]) -> ModuleFields:
    """Fields of norms that each split rank computes for its part of the tokens: those with a "row" rule."""
    if all(rule.placement != "row" for rule in layout):
        return {}
    for degree in _DEGREES:
        divided_modules = _described(model, degree, layout)
        if divided_modules is not None:
            return {divided.name: {"sequence": True} for divided in divided_modules if divided.placement == "tokens"}
    return {}


def _described(model: nn.Module, degree: int, layout: Sequence[LayoutRule] = ()) -> list[SplitModule] | None:
    try:
        return describe_split(model, layout, degree, rules_for_others=bool(layout))
    except TuttiError:
        return None


def _input_nbytes(module: nn.Module, spec: ModuleSpec, values: int) -> float:
    """Bytes of an input of `values` values per row, derived from the bytes of the output."""
    if is_linear(module):
        width = features(module)[1]
    elif isinstance(module, nn.RNNBase):
        width = module.hidden_size * (2 if module.bidirectional else 1)
    else:
        width = int(getattr(module, "embed_dim", 0))
    return spec.output_nbytes * values / width if width else 0.0


def _between(modules: Sequence[ModuleSpec], kinds: Mapping[str, SplitKind]) -> dict[str, SplitKind]:
    """Modules without parameters that work on divided values, with the kind of division.

    Attention whose projections are divided is in the code of the module that contains them. An activation follows a
    layer that is divided by its outputs.
    """
    between: dict[str, SplitKind] = {}
    children: dict[str, list[SplitKind]] = {}
    last: dict[str, SplitKind] = {}
    for module in modules:
        parent, _, _ = module.name.rpartition(".")
        kind = kinds.get(module.name, "")
        if kind:
            children.setdefault(parent, []).append(kind)
            last[parent] = kind
        elif module.ops and not module.parameters and last.get(parent) == "column" and _is_elementwise(module):
            between[module.name] = "column"
    for module in modules:
        inside = children.get(module.name, [])
        multiplies = any(op.kind in ("gemm", "attention") for op in module.ops)
        if (
            module.name
            and module.ops
            and "column" in inside
            and ("row" in inside or multiplies)
            and not kinds.get(module.name)
        ):
            between[module.name] = "heads" if multiplies else "column"
    return {name: kind for name, kind in between.items() if name}


_ON_ELEMENTS: frozenset[OpKind] = frozenset({"elementwise", "exponential", "function", "random", "pool", "other"})
"""Kinds of operators that work on divided values without a change."""


def _is_elementwise(module: ModuleSpec) -> bool:
    return all(op.kind in _ON_ELEMENTS for op in module.ops)


def _experts(modules: Mapping[str, ModuleSpec], model: nn.Module) -> ModuleFields:
    facts: ModuleFields = {}
    for name, module in model.named_modules():
        if name in modules and (isinstance(module, MixtureOfExperts) or is_stacked(module)):
            times = getattr(module, "top_k", None) or _chosen(model, name)
            facts[name] = {"expert": True, "routed_nbytes": modules[name].output_nbytes * times}
    return facts


def _chosen(model: nn.Module, name: str) -> int:
    """How many experts a token goes to, according to the module's parent or the model's config; 2 if neither tells."""
    parent = model.get_submodule(name.rpartition(".")[0])
    config = getattr(model, "config", None)
    for place, word in ((parent, "top_k"), (config, "num_experts_per_tok")):
        value = getattr(place, word, None)
        if isinstance(value, int):
            return value
    return 2


def _tables(modules: Mapping[str, ModuleSpec], model: nn.Module) -> ModuleFields:
    tied = {module.tied_to for module in modules.values()}
    facts: ModuleFields = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and name in modules and name not in tied:
            if modules[name].tied_to is not None:
                continue
            facts[name] = {"table": True}
            if not modules[name].output_nbytes:  # the module that holds all tables looks up one vector in each
                facts[name]["output_nbytes"] = float(module.embedding_dim * module.weight.element_size())
    return facts


def _linears(modules: Mapping[str, ModuleSpec], model: nn.Module) -> ModuleFields:
    """Linear layers that the table axis can divide, with the bytes of their inputs."""
    tied = {module.tied_to for module in modules.values()}
    return {
        name: {"linear_input_nbytes": _input_nbytes(model.get_submodule(name), modules[name], inputs)}
        for name, inputs in dividable_linears(model).items()
        if name in modules and name not in tied and modules[name].tied_to is None
    }


def _attention(modules: Sequence[ModuleSpec]) -> ModuleFields:
    """Bytes of keys and values.

    They are what key and value layers inside a module return. Without such layers, they are twice the output of the
    attention, but at most half of what its operators read and write (which may include scores).
    """
    returned = {module.name: module.output_nbytes for module in modules}
    facts: ModuleFields = {}
    for module in modules:
        half = sum(op.nbytes_forward for op in module.ops if op.kind == "attention") / 2
        if half:
            paths = [[f"{module.name}.{layer}" for layer in names.split()] for names in (KEY, VALUE)]
            inside = [next((returned[path] for path in candidates if path in returned), 0.0) for candidates in paths]
            twice = min(half, 2 * module.output_nbytes) if module.output_nbytes else half
            facts[module.name] = {"key_value_nbytes": sum(inside) if all(inside) else twice}
    return facts


def _space(model: nn.Module, args: Sequence[Any]) -> ModuleFields:
    """Fields of modules that work on volumes.

    What crosses a cut through a spatial dim is what a part with a neighbour on both sides sends.
    """
    volume = next(
        (argument for argument in args if isinstance(argument, torch.Tensor) and argument.is_floating_point()), None
    )
    ranks = [m.weight.dim() - 2 for m in model.modules() if isinstance(m, nn.modules.conv._ConvNd)]
    if volume is None or len(args) != 1 or not ranks or volume.dim() != max(ranks) + 2:
        return {}
    facts: ModuleFields = {}
    for dim in range(max(ranks)):
        seen = _sent(model, volume, dim, max(ranks))
        for name, nbytes in seen.items():
            fields = facts.setdefault(name, {"spatial": True, "halo_nbytes_by_dim": ()})
            fields["halo_nbytes_by_dim"] += (nbytes / len(volume),)
    for fields in facts.values():
        fields["halo_nbytes_per_cut"] = fields["halo_nbytes_by_dim"][0]
    return facts


def _sent(model: nn.Module, volume: torch.Tensor, dim: int, rank: int) -> dict[str, float]:
    """Bytes sent across one cut through `dim` in both directions, by module with a divided output.

    They are measured on the second of four parts. On volumes that are too small, they are twice what one of two parts
    sends. The result is empty if the model cannot be cut along `dim`.
    """
    for parts, place, times in ((4, 1, 1.0), (2, 0, 2.0)):
        try:
            seen = _sent_by(model, volume, (dim, parts, place), rank)
        except Exception:  # the model's own code fails on cut tensors, so it cannot be cut in this manner
            continue
        return {name: times * nbytes for name, nbytes in seen.items()}
    return {}


def _sent_by(model: nn.Module, volume: torch.Tensor, cut: tuple[int, int, int], rank: int) -> dict[str, float]:
    """Bytes that one part sends in forward, by module with a divided output; `cut`: (dim, parts, index of the part)."""
    dim, parts, index = cut
    grid = tuple(parts if axis == dim else 1 for axis in range(rank))
    place = tuple(index if axis == dim else 0 for axis in range(rank))
    shapes, space = on_shapes(model, grid, place, volume.dtype)
    sent: dict[str, float] = {}
    open_calls: list[tuple[int, list[int]]] = []  # (sent before, sent by each module that it calls)

    def enter(module: nn.Module, inputs: Any) -> None:
        open_calls.append((space.sent_nbytes, []))

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        before, inside = open_calls.pop()
        everything = space.sent_nbytes - before
        if open_calls:
            open_calls[-1][1].append(everything)
        if isinstance(output, SpatialTensor):
            sent[names[module]] = sent.get(names[module], 0.0) + everything - sum(inside)

    names = {module: name for name, module in shapes.named_modules()}
    for module in names:
        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
    shapes(cut_whole(torch.empty(volume.shape, dtype=volume.dtype, device="meta"), 2, space))
    return sent

"""Decide how each module is divided over the split axis, from the layout rules and the known patterns.

Nothing is communicated, and the model is not changed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from tutti.config.plan import LayoutRule, find_placement
from tutti.config.vocabulary import Placement
from tutti.errors import PlanError
from tutti.parallel.data.batchnorm import is_batch_norm
from tutti.parallel.tensor.apply_tensor_parallel import cuts_of
from tutti.parallel.tensor.layer_patterns import (
    Decision,
    LayerGroup,
    Role,
    features,
    groups,
    is_embedding,
    is_heads,
    is_linear,
    is_norm,
    is_recurrent,
)
from tutti.parallel.tensor.partition_ranges import Among, RankRanges, even


def decide(
    model: nn.Module,
    layout: Sequence[LayoutRule],
    degree: int,
    *,
    rules_for_others: bool = False,
    weights: tuple[float, ...] = (),
) -> list[Decision]:
    """Decide how the modules of a model are divided.

    Args:
        model: the model, not divided yet.
        layout: the layout rules of the plan.
        degree: number of split ranks.
        rules_for_others: whether rules may be meant for other axes (experts, tables); a rule may then divide nothing.
        weights: relative size of each rank's part; empty for equal parts.

    Returns:
        A decision for each module that is divided, in the order of the model.

    Raises:
        PlanError: if a module cannot be divided, or rules contradict each other; it names the modules and the remedy.
    """
    rules, among = {name: find_placement(layout, name) for name, _ in model.named_modules()}, Among(degree, weights)
    decisions: dict[str, Decision] = {}
    for group in groups(model):
        if _agrees(group, rules):
            decisions.update((decision.name, decision) for decision in group.decide(among))
    for name, module in model.named_modules():
        if name not in decisions and rules[name] in ("split", "column", "row"):
            single = _single(name, module, rules[name], among)
            if single is not None:
                decisions[name] = single
    _by_samples(model, layout, decisions)
    _check_rules(model, layout, decisions, rules_for_others)
    _check_tied(model, decisions, rules)
    if not decisions and not rules_for_others:
        raise PlanError(
            f"mesh.split = {degree} divides nothing: no layer of the model is known to be divisible (linear layers in "
            "pairs, attention, embeddings tied to the output); state what to divide with LayoutRule(modules=..., "
            "placement='split'), or use another axis"
        )
    order = {name: number for number, (name, _) in enumerate(model.named_modules())}
    return sorted(decisions.values(), key=lambda decision: order[decision.name])


def _agrees(group: LayerGroup, rules: dict[str, Placement]) -> bool:
    """Whether the rules let the group be divided together. Raises PlanError if they contradict each other."""
    placements = {name: rules.get(name, "auto") for name in group.members}
    whole = [name for name, placement in placements.items() if placement == "replicate"]
    divided = [name for name, placement in placements.items() if placement in ("split", "column", "row")]
    if group.consumer is None:
        if whole and divided:
            raise PlanError(
                f"modules {whole[0]!r} and {divided[0]!r} share their weight, but the layout says 'replicate' for one "
                f"and {placements[divided[0]]!r} for the other; give both the same placement"
            )
        return not whole and all(placement in ("auto", "split", "column") for placement in placements.values())
    producers = [name for name in group.members if name != group.consumer]
    if placements[group.consumer] == "row":
        for name in producers:
            if placements[name] in ("replicate", "row"):
                raise PlanError(
                    f"the layout says 'row' for module {group.consumer!r} and {placements[name]!r} for {name!r}, "
                    f"which computes its input: the input is not divided; give {name!r} the placement 'column', or "
                    "both 'replicate'"
                )
    fits = all(placements[name] in ("auto", "split", "column") for name in producers)
    return fits and not whole and placements[group.consumer] in ("auto", "split", "row")


def _single(name: str, module: nn.Module, placement: str, among: Among) -> Decision | None:
    """The decision that a rule makes for one module; None for a container or a module that it does not concern."""
    role: Role | None = None
    size, what = 0, "rows"
    if is_linear(module):
        inputs, outputs = features(module)
        role, size = ("row", inputs) if placement == "row" else ("column", outputs)
        what = "inputs" if placement == "row" else "outputs"
    elif placement == "split" and is_embedding(module):
        role, size = "vocabulary", int(module._parameters["weight"].shape[0])  # type: ignore[union-attr]
    elif placement == "split" and is_recurrent(module):
        role, size, what = "units", int(module.hidden_size), "hidden units"  # type: ignore[arg-type]
    elif placement == "row" and is_norm(module):
        return Decision(name=name, role="tokens", spread=even(among.degree, among.degree))
    return None if role is None else Decision(name=name, role=role, spread=among.units(name, size, what))


def _by_samples(model: nn.Module, layout: Sequence[LayoutRule], decisions: dict[str, Decision]) -> None:
    """Divide by samples each module that a 'row' rule names exactly and that is not a single layer.

    Krizhevsky 2014 (arXiv 1404.5997): convolutions by samples, the classifier by features.
    """
    for rule in layout:
        module = dict(model.named_modules()).get(rule.modules)
        by_samples = rule.placement == "row" and find_placement(layout, rule.modules) == "row"
        if (
            not by_samples
            or module is None
            or is_linear(module)
            or is_norm(module)
            or next(module.parameters(), None) is None
        ):
            continue
        inside = [name for name in decisions if name.startswith(rule.modules + ".")]
        for name in inside:
            del decisions[name]
        _check_by_samples(model, rule.modules)
        decisions[rule.modules] = Decision(name=rule.modules, role="samples", spread=even(0, 1))


def _check_by_samples(model: nn.Module, name: str) -> None:
    module = model.get_submodule(name)
    norms = [inner for inner, norm in module.named_modules() if is_batch_norm(norm)]
    if norms:
        raise PlanError(
            f"layout rule {name!r} says 'row': each rank would compute a part of the samples, but the module contains "
            f"the BatchNorm {norms[0]!r}, which needs all samples; replace it by GroupNorm, or keep the module whole"
        )
    parameters = {id(p) for p in module.parameters()}
    for other, p in model.named_parameters(remove_duplicate=False):
        if id(p) in parameters and not other.startswith(name + "."):
            raise PlanError(
                f"layout rule {name!r} says 'row', but one of its parameters is tied to {other!r}, outside the module; "
                "keep the module whole: placement='replicate'"
            )


def _check_rules(
    model: nn.Module, layout: Sequence[LayoutRule], decisions: dict[str, Decision], rules_for_others: bool
) -> None:
    """Refuse a rule that asks for a division but divides nothing."""
    for rule in layout:
        if rule.placement not in ("split", "column", "row"):
            continue
        only_rule = [rule]
        touched = [n for n, _ in model.named_modules() if find_placement(only_rule, n) != "auto"]
        if not touched:
            raise PlanError(f"layout: no module matches {rule.modules!r}; names are those of model.named_modules()")
        inside = [n for n in decisions if any(n == t or n.startswith(t + ".") or not t for t in touched)]
        if not inside and not rules_for_others:
            module = model.get_submodule(touched[0])
            raise PlanError(
                f"layout rule {rule.modules!r} says {rule.placement!r}, but {_why(module, touched[0])}; leave the "
                "rule out, or use placement='replicate'"
            )


def _why(module: nn.Module, name: str) -> str:
    """Why a rule divides nothing in this module, for the error."""
    kind = type(module).__name__
    if isinstance(module, nn.MultiheadAttention) and not is_heads(module):
        return f"module {name!r} has bias_k or add_zero_attn, whose heads cannot be divided"
    if isinstance(module, nn.Embedding):
        return f"the rows of {name!r} cannot be divided: it has max_norm, scale_grad_by_freq or sparse gradients"
    return f"nothing in module {name!r} ({kind}) can be divided so over the split axis"


def _check_tied(model: nn.Module, decisions: dict[str, Decision], rules: dict[str, Placement]) -> None:
    """Check that a tied weight is cut in member form only.

    If rules ask for two, they are refused. If both were guessed from patterns, the modules stay whole.
    """
    cuts: dict[int, str] = {}
    for name, module in model.named_modules():
        if name not in decisions or decisions[name].role in ("heads", "units", "tokens", "samples"):
            continue
        weight = module._parameters["weight"]
        first = cuts.setdefault(id(weight), name)
        if first == name or _cut(decisions[name]) == _cut(decisions[first]):
            continue
        if rules[name] != "auto" or rules.get(first, "auto") != "auto":
            raise PlanError(
                f"modules {first!r} and {name!r} share their weight, but would be divided as "
                f"{decisions[first].role!r} and {decisions[name].role!r}; give both the same placement, or 'replicate'"
            )
        for removed in {member for tied in (first, name) for member in (decisions[tied].partner, tied)}:
            decisions.pop(removed, None)
        return _check_tied(model, decisions, rules)


def _cut(decision: Decision) -> tuple[object, ...]:
    dim = 1 if decision.role == "row" else 0
    return dim, decision.role == "shared", decision.spread


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCollective:
    """One collective per microbatch, of `values` numbers for each row (token, sample) of the activation."""

    kind: Literal["all-reduce", "all-gather", "reduce-scatter"]
    when: Literal["forward", "backward"]
    values: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitModule:
    """One module with parameters of its own.

    Attributes:
        name: dotted name of the module.
        kind: its class.
        placement: its role in the division (see `Role`), or "replicate".
        nbytes_per_rank: bytes of its parameters on each split rank; a tied parameter counts where it comes first.
        exchanges: its collectives.
        partner: see `Decision`.
        groups: number of key heads; see `Decision`.
        units: number of outputs, inputs, rows or heads that are divided.
    """

    name: str
    kind: str
    placement: str
    nbytes_per_rank: tuple[int, ...]
    exchanges: tuple[PlannedCollective, ...]
    partner: str = ""
    groups: int = 0
    units: int = 0


def describe_split(
    model: nn.Module,
    layout: Sequence[LayoutRule],
    degree: int,
    *,
    rules_for_others: bool = False,
    weights: tuple[float, ...] = (),
) -> list[SplitModule]:
    """Describe how an undivided model would be divided over `degree` ranks, in the order of the model.

    The model may be on the meta device. For `rules_for_others` and `weights` see `decide`.

    Raises:
        PlanError: as `decide` does.
    """
    decisions: dict[str, Decision] = {}
    if degree > 1:
        ordered = decide(model, layout, degree, rules_for_others=rules_for_others, weights=weights)
        decisions = {decision.name: decision for decision in ordered}
    seen: set[int] = set()
    modules = []
    for name, module in model.named_modules():
        parameters = {leaf: p for leaf, p in module._parameters.items() if p is not None}
        if not parameters:
            continue
        decision = decisions.get(name)
        cuts = {leaf: (dim, spread) for leaf, dim, spread in cuts_of(module, decision)} if decision else {}
        nbytes = [0] * degree
        for leaf, p in parameters.items():
            if id(p) in seen:
                continue
            seen.add(id(p))
            for rank in range(degree):
                nbytes[rank] += _nbytes(p, cuts.get(leaf), rank)
        modules.append(
            SplitModule(
                name=name,
                kind=type(module).__name__,
                placement=decision.role if decision else "replicate",
                nbytes_per_rank=tuple(nbytes),
                exchanges=_exchanges(module, decision) if decision else (),
                partner=decision.partner if decision else "",
                groups=decision.groups if decision else 0,
                units=decision.spread.size if decision else 0,
            )
        )
    return modules


def _nbytes(parameter: nn.Parameter, cut: tuple[int, RankRanges] | None, rank: int) -> int:
    total = parameter.numel() * parameter.element_size()
    return total if cut is None else total // parameter.shape[cut[0]] * cut[1].local(rank)


def _exchanges(module: Any, decision: Decision) -> tuple[PlannedCollective, ...]:
    """The collectives that decision divided module needs per microbatch."""
    of_input = PlannedCollective(kind="all-reduce", when="backward", values=0)
    if decision.role in ("column", "shared"):
        inputs, _ = features(module)
        return (_of(of_input, inputs),) if decision.entered else ()
    if decision.role == "row":
        return (PlannedCollective(kind="all-reduce", when="forward", values=features(module)[1]),)
    if decision.role == "vocabulary":
        return (PlannedCollective(kind="all-reduce", when="forward", values=module.weight.shape[1]),)
    if decision.role == "heads":
        return (_of(of_input, module.embed_dim),)
    if decision.role == "units":
        times = module.num_layers * (2 if module.bidirectional else 1)
        steps = (
            PlannedCollective(kind="all-gather", when="forward", values=2 * times * module.hidden_size),
            PlannedCollective(kind="reduce-scatter", when="backward", values=times * module.hidden_size),
        )
        return (*steps, _of(of_input, module.input_size))
    if decision.role == "samples":  # the layout counts the reduction of their gradients over the split ranks
        return ()
    return (PlannedCollective(kind="all-gather", when="backward", values=int(module.weight.shape[-1])),)


def _of(exchange: PlannedCollective, values: int) -> PlannedCollective:
    return PlannedCollective(kind=exchange.kind, when=exchange.when, values=values)

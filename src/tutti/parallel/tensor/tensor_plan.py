"""Decide: how every module is divided over the split axis, from the layout's rules and the known patterns.

Pure: nothing is exchanged, the model is not changed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from tutti.config.plan import LayoutRule, find_placement
from tutti.config.vocabulary import Placement
from tutti.errors import PlanError
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
    """One decision for every module that is divided, in order of the model.

    `weights`: of each rank's part, empty for equal parts; `rules_for_others`: rules may be meant for other axes
    (experts, tables), so one that divides nothing is no error. Raises PlanError for what cannot be divided and for
    contradictions, with the modules' names and the remedy.
    """
    said, among = {name: find_placement(layout, name) for name, _ in model.named_modules()}, Among(degree, weights)
    found: dict[str, Decision] = {}
    for group in groups(model):
        if _agrees(group, said):
            found.update((one.name, one) for one in group.decide(among))
    for name, module in model.named_modules():
        if name not in found and said[name] in ("split", "column", "row"):
            one = _single(name, module, said[name], among)
            if one is not None:
                found[name] = one
    _by_samples(model, layout, found)
    _check_rules(model, layout, found, rules_for_others)
    _check_tied(model, found, said)
    if not found and not rules_for_others:
        raise PlanError(
            f"mesh.split = {degree} divides nothing: no layer of the model is known to be divisible (linear layers in "
            "pairs, attention, embeddings tied to the output); state what to divide with LayoutRule(modules=..., "
            "placement='split'), or use another axis"
        )
    order = {name: number for number, (name, _) in enumerate(model.named_modules())}
    return sorted(found.values(), key=lambda one: order[one.name])


def _agrees(group: LayerGroup, said: dict[str, Placement]) -> bool:
    """Whether the rules let the group be divided as a whole. Raises PlanError where they contradict each other."""
    words = {name: said.get(name, "auto") for name in group.members}
    whole = [name for name, word in words.items() if word == "replicate"]
    divided = [name for name, word in words.items() if word in ("split", "column", "row")]
    if group.consumer is None:
        if whole and divided:
            raise PlanError(
                f"modules {whole[0]!r} and {divided[0]!r} share their weight, but the layout says 'replicate' of one "
                f"and {words[divided[0]]!r} of the other; give both the same placement"
            )
        return not whole and all(word in ("auto", "split", "column") for word in words.values())
    producers = [name for name in group.members if name != group.consumer]
    if words[group.consumer] == "row":
        for name in producers:
            if words[name] in ("replicate", "row"):
                raise PlanError(
                    f"the layout says 'row' of module {group.consumer!r}, but its input comes from {name!r}, of which "
                    f"it says {words[name]!r}: the input is not divided; say 'column' of {name!r}, or 'replicate' of "
                    "both"
                )
    fits = all(words[name] in ("auto", "split", "column") for name in producers)
    return fits and not whole and words[group.consumer] in ("auto", "split", "row")


def _single(name: str, module: nn.Module, word: str, among: Among) -> Decision | None:
    """What a rule makes of one module by itself; None for a container or a module it does not concern."""
    role: Role | None = None
    size, what = 0, "rows"
    if is_linear(module):
        inputs, outputs = features(module)
        role, size = ("row", inputs) if word == "row" else ("column", outputs)
        what = "inputs" if word == "row" else "outputs"
    elif word == "split" and is_embedding(module):
        role, size = "vocabulary", int(module._parameters["weight"].shape[0])  # type: ignore[union-attr]
    elif word == "split" and is_recurrent(module):
        role, size, what = "units", int(module.hidden_size), "hidden units"  # type: ignore[arg-type]
    elif word == "row" and is_norm(module):
        return Decision(name=name, role="tokens", spread=even(among.degree, among.degree))
    return None if role is None else Decision(name=name, role=role, spread=among.units(name, size, what))


def _by_samples(model: nn.Module, layout: Sequence[LayoutRule], found: dict[str, Decision]) -> None:
    """A rule that says 'row' of a module by its very name, which is no single layer: it runs on parts of the samples
    (Krizhevsky 2014, arXiv 1404.5997: convolutions by samples, the classifier by features)."""
    for rule in layout:
        module = dict(model.named_modules()).get(rule.modules)
        said = rule.placement == "row" and find_placement(layout, rule.modules) == "row"
        if (
            not said
            or module is None
            or is_linear(module)
            or is_norm(module)
            or next(module.parameters(), None) is None
        ):
            continue
        inside = [name for name in found if name.startswith(rule.modules + ".")]
        for name in inside:
            del found[name]
        _check_by_samples(model, rule.modules)
        found[rule.modules] = Decision(name=rule.modules, role="samples", spread=even(0, 1))


def _check_by_samples(model: nn.Module, name: str) -> None:
    module = model.get_submodule(name)
    norms = [inner for inner, one in module.named_modules() if isinstance(one, _BatchNorm)]
    if norms:
        raise PlanError(
            f"layout rule {name!r} says 'row': it would see its samples in parts, but it contains the BatchNorm "
            f"{norms[0]!r}, which needs all of them; replace that by GroupNorm, or keep the module whole"
        )
    own = {id(p) for p in module.parameters()}
    for other, p in model.named_parameters(remove_duplicate=False):
        if id(p) in own and not other.startswith(name + "."):
            raise PlanError(
                f"layout rule {name!r} says 'row', but a parameter of it is also {other!r}, outside it; keep the "
                "module whole: placement='replicate'"
            )


def _check_rules(
    model: nn.Module, layout: Sequence[LayoutRule], found: dict[str, Decision], rules_for_others: bool
) -> None:
    """A rule that asks for something to be divided must divide something."""
    for rule in layout:
        if rule.placement not in ("split", "column", "row"):
            continue
        only_rule = [rule]
        touched = [n for n, _ in model.named_modules() if find_placement(only_rule, n) != "auto"]
        if not touched:
            raise PlanError(f"layout: no module matches {rule.modules!r}; names are those of model.named_modules()")
        inside = [n for n in found if any(n == t or n.startswith(t + ".") or not t for t in touched)]
        if not inside and not rules_for_others:
            module = model.get_submodule(touched[0])
            raise PlanError(
                f"layout rule {rule.modules!r} says {rule.placement!r}, but {_why(module, touched[0])}; leave the "
                "rule out, or use placement='replicate'"
            )


def _why(module: nn.Module, name: str) -> str:
    kind = type(module).__name__
    if isinstance(module, nn.MultiheadAttention) and not is_heads(module):
        return f"module {name!r} has bias_k or add_zero_attn, whose heads cannot be divided"
    if isinstance(module, nn.Embedding):
        return f"the rows of {name!r} cannot be divided: it has max_norm, scale_grad_by_freq or sparse gradients"
    return f"nothing in module {name!r} ({kind}) can be divided that way over the split axis"


def _check_tied(model: nn.Module, found: dict[str, Decision], said: dict[str, Placement]) -> None:
    """One weight cannot be cut in two ways: what rules ask for is refused, what was only guessed is left whole."""
    cuts: dict[int, str] = {}
    for name, module in model.named_modules():
        if name not in found or found[name].role in ("heads", "units", "tokens", "samples"):
            continue
        weight = module._parameters["weight"]
        before = cuts.setdefault(id(weight), name)
        if before == name or _cut(found[name]) == _cut(found[before]):
            continue
        if said[name] != "auto" or said.get(before, "auto") != "auto":
            raise PlanError(
                f"modules {before!r} and {name!r} share their weight, but would be divided as "
                f"{found[before].role!r} and {found[name].role!r}; give both the same placement, or 'replicate'"
            )
        for gone in {one for tied in (before, name) for one in (found[tied].partner, tied)}:
            found.pop(gone, None)
        return _check_tied(model, found, said)


def _cut(decision: Decision) -> tuple[object, ...]:
    dim = 1 if decision.role == "row" else 0
    return dim, decision.role == "shared", decision.spread


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCollective:
    """One collective a microbatch. `values`: how many values travel for each row (token, sample) of the activation."""

    kind: Literal["all-reduce", "all-gather", "reduce-scatter"]
    when: Literal["forward", "backward"]
    values: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitModule:
    """One module with parameters of its own. `placement`: how it is divided, or "replicate"; `nbytes_per_rank`: bytes
    of its own parameters on every rank of the split group (a tied one is counted where it comes first); `groups`: of
    key heads, which stay whole (see Decision); `units`: outputs, inputs, rows or heads that are divided.
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
    """How a model that nothing has touched is divided over `degree` ranks, in order of the model.

    It may be on the meta device; `rules_for_others`, `weights`: see `decide`. Raises PlanError as preparing it would.
    """
    decided = (
        {one.name: one for one in decide(model, layout, degree, rules_for_others=rules_for_others, weights=weights)}
        if degree > 1
        else {}
    )
    seen: set[int] = set()
    found = []
    for name, module in model.named_modules():
        own = {leaf: p for leaf, p in module._parameters.items() if p is not None}
        if not own:
            continue
        one = decided.get(name)
        cuts = {leaf: (dim, spread) for leaf, dim, spread in cuts_of(module, one)} if one else {}
        nbytes = [0] * degree
        for leaf, p in own.items():
            if id(p) in seen:
                continue
            seen.add(id(p))
            for rank in range(degree):
                nbytes[rank] += _nbytes(p, cuts.get(leaf), rank)
        found.append(
            SplitModule(
                name=name,
                kind=type(module).__name__,
                placement=one.role if one else "replicate",
                nbytes_per_rank=tuple(nbytes),
                exchanges=_exchanges(module, one) if one else (),
                partner=one.partner if one else "",
                groups=one.groups if one else 0,
                units=one.spread.size if one else 0,
            )
        )
    return found


def _nbytes(parameter: nn.Parameter, cut: tuple[int, RankRanges] | None, rank: int) -> int:
    total = parameter.numel() * parameter.element_size()
    return total if cut is None else total // parameter.shape[cut[0]] * cut[1].local(rank)


def _exchanges(module: Any, one: Decision) -> tuple[PlannedCollective, ...]:
    into = PlannedCollective(kind="all-reduce", when="backward", values=0)
    if one.role in ("column", "shared"):
        inputs, _ = features(module)
        return (_of(into, inputs),) if one.entered else ()
    if one.role == "row":
        return (PlannedCollective(kind="all-reduce", when="forward", values=features(module)[1]),)
    if one.role == "vocabulary":
        return (PlannedCollective(kind="all-reduce", when="forward", values=module.weight.shape[1]),)
    if one.role == "heads":
        return (_of(into, module.embed_dim),)
    if one.role == "units":
        times = module.num_layers * (2 if module.bidirectional else 1)
        steps = (
            PlannedCollective(kind="all-gather", when="forward", values=2 * times * module.hidden_size),
            PlannedCollective(kind="reduce-scatter", when="backward", values=times * module.hidden_size),
        )
        return (*steps, _of(into, module.input_size))
    if one.role == "samples":  # their gradients' sums over the split ranks are among the layout's
        return ()
    return (PlannedCollective(kind="all-gather", when="backward", values=int(module.weight.shape[-1])),)


def _of(exchange: PlannedCollective, values: int) -> PlannedCollective:
    return PlannedCollective(kind=exchange.kind, when=exchange.when, values=values)

"""What dividing a model over the split axis means, module by module, as data."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from tutti.config.plan import LayoutRule
from tutti.parallel.tensor.apply import cuts_of
from tutti.parallel.tensor.decide import decide
from tutti.parallel.tensor.decisions import Decision, features
from tutti.parallel.tensor.spread import Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
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
    exchanges: tuple[Exchange, ...]
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


def _nbytes(parameter: nn.Parameter, cut: tuple[int, Spread] | None, rank: int) -> int:
    total = parameter.numel() * parameter.element_size()
    return total if cut is None else total // parameter.shape[cut[0]] * cut[1].local(rank)


def _exchanges(module: Any, one: Decision) -> tuple[Exchange, ...]:
    into = Exchange(kind="all-reduce", when="backward", values=0)
    if one.role in ("column", "shared"):
        inputs, _ = features(module)
        return (_of(into, inputs),) if one.entered else ()
    if one.role == "row":
        return (Exchange(kind="all-reduce", when="forward", values=features(module)[1]),)
    if one.role == "vocabulary":
        return (Exchange(kind="all-reduce", when="forward", values=module.weight.shape[1]),)
    if one.role == "heads":
        return (_of(into, module.embed_dim),)
    if one.role == "units":
        times = module.num_layers * (2 if module.bidirectional else 1)
        steps = (
            Exchange(kind="all-gather", when="forward", values=2 * times * module.hidden_size),
            Exchange(kind="reduce-scatter", when="backward", values=times * module.hidden_size),
        )
        return (*steps, _of(into, module.input_size))
    if one.role == "samples":  # their gradients' sums over the split ranks are among the layout's
        return ()
    return (Exchange(kind="all-gather", when="backward", values=int(module.weight.shape[-1])),)


def _of(exchange: Exchange, values: int) -> Exchange:
    return Exchange(kind=exchange.kind, when=exchange.when, values=values)

"""The `expert` axis: experts divided over its ranks, and every mixture's slice shared by all ranks that compute it.

Ranks along the axis compute different samples. A token travels to the rank that has its expert and its result comes
back. An expert's weights see the tokens of the whole expert group, so their gradients are not summed over `expert`.
"""

from collections.abc import Sequence

from torch import nn

from tutti.config.partitioning import cut
from tutti.config.plan import LayoutRule, find_placement
from tutti.errors import PlanError
from tutti.nn.mixture import MixtureOfExperts
from tutti.parallel.data.batchnorm import BatchScope
from tutti.parallel.expert.slice import Holders, OwnSlice, SharedSlice, Sharers, sizes_of
from tutti.parallel.expert.stacked import is_stacked, travel_to_experts
from tutti.parallel.layout import GRADIENT_AXES, Layout

STACKS = ("input_weight", "input_bias", "output_weight", "output_bias")
"""A mixture's parameters whose first dim is the expert."""


def divide_experts(model: nn.Module, rules: Sequence[LayoutRule], layout: Layout, scope: BatchScope) -> None:
    """Share every mixture's slice over the ranks that compute it, and divide its experts over `expert`.

    Experts are divided in order, uneven where they do not divide; `replicate` in a layout rule keeps a mixture whole.
    Recognised: tutti.nn.MixtureOfExperts, and experts in stacked parameters as transformers has them (Mixtral, Qwen).
    Raises PlanError where there are no experts to divide, fewer than ranks, or weights that other modules share.
    """
    mesh = layout.mesh
    found = {name: module for name, module in model.named_modules() if isinstance(module, MixtureOfExperts)}
    stacked = {name: module for name, module in model.named_modules() if is_stacked(module)}
    divided = [name for name in (*found, *stacked) if mesh.degree("expert") > 1 and _divides(rules, name)]
    _check(model, found, stacked, divided, layout)
    sharing = mesh.degree(*GRADIENT_AXES)
    if sharing == 1:
        for module in found.values():
            module.exchange = OwnSlice(scope)
    if not (found or stacked) or sharing == 1:
        return
    sharers = Sharers(
        size=sharing,
        rank=mesh.index(*GRADIENT_AXES),
        group=mesh.new_group(*GRADIENT_AXES),
        scope=scope,
        channel=layout.channel("routing", *GRADIENT_AXES),
    )
    group = mesh.new_group("expert") if divided else None
    members, all_ranks = mesh.ranks("expert"), mesh.ranks(*GRADIENT_AXES)
    for name, module in (found | stacked).items():
        holders = None
        if name in divided:
            count = module.experts if isinstance(module, MixtureOfExperts) else module.num_experts
            bounds = tuple(cut(int(count), len(members)))
            places = tuple(all_ranks.index(rank) for rank in members)
            holders = Holders(group=group, places=places, bounds=bounds, own=mesh.index("expert"))
            _take_part(module, name, holders.experts, layout)
        if isinstance(module, MixtureOfExperts):
            module.exchange = SharedSlice(sharers, holders, layout.channel("tokens", "expert"))
        elif holders is not None:
            travel_to_experts(module, holders, sizes_of(holders.bounds), layout)


def _divides(rules: Sequence[LayoutRule], name: str) -> bool:
    placement = find_placement(rules, name)
    if placement in ("column", "row"):
        raise PlanError(f"layout: experts of {name!r} cannot be placed {placement!r}; use 'split' or 'replicate'")
    return placement != "replicate"


def _take_part(module: nn.Module, name: str, experts: tuple[int, int], layout: Layout) -> None:
    """Replace the stacked parameters by this rank's experts."""
    keys = STACKS if isinstance(module, MixtureOfExperts) else tuple(module._parameters)
    for key in keys:
        whole = module._parameters[key]
        if whole is None:
            continue
        part = whole.detach()[slice(*experts)].clone()
        module._parameters[key] = nn.Parameter(part, requires_grad=whole.requires_grad)
        full = f"{name}.{key}" if name else key
        layout.cut(full, 0, experts)
        layout.set_reduce_axes(full, [axis for axis in layout.shard_of(full).sums if axis != "expert"])


def _check(
    model: nn.Module,
    found: dict[str, MixtureOfExperts],
    stacked: dict[str, nn.Module],
    divided: list[str],
    layout: Layout,
) -> None:
    degree, context = layout.mesh.degree("expert"), layout.mesh.degree("context")
    if degree > 1 and not divided:
        raise PlanError(
            f"mesh.expert = {degree}, but the model has no experts to divide; use tutti.nn.MixtureOfExperts, or make "
            "these ranks replicate"
        )
    for name in divided:
        module = found.get(name) or stacked[name]
        count = getattr(module, "experts" if name in found else "num_experts")
        if count < degree:
            raise PlanError(f"mesh.expert = {degree}, but {name!r} has {count} experts; lower it to {count}")
        own = {f"{name}.{key}" if name else key for key in module._parameters}
        tied = next((names for names in layout.tied if own & set(names) and _of_modules(model, names) > 1), None)
        if tied:
            raise PlanError(f"{' and '.join(tied)} are one tensor, so {name!r} cannot be divided; place it 'replicate'")
    for name, mixture in found.items():
        if context > 1 and mixture.capacity_factor is not None:
            raise PlanError(
                f"mesh.context = {context}: the tokens of {name!r} lie on several ranks, so which ones exceed an "
                "expert's capacity is not defined as on one device; set capacity_factor=None"
            )
    routed = getattr(getattr(model, "config", None), "output_router_logits", False)
    if stacked and routed and layout.mesh.degree(*GRADIENT_AXES) > 1:
        raise PlanError(
            f"{type(model).__name__} computes its load-balancing loss from each rank's own tokens, which is not the "
            "global batch's; set config.output_router_logits=False, or use tutti.nn.MixtureOfExperts"
        )


def _of_modules(model: nn.Module, names: list[str]) -> int:
    """How many modules share the tensor that has these names."""
    return len({id(model.get_submodule(name.rpartition(".")[0])) for name in names})

"""What torch's fully_shard (FSDP2) gathers together: the units of a model, and what it refuses in one.

A unit is a block, as for tutti's own sharding. The root unit holds all else: parameters outside of blocks, and those
that are tied between blocks. In lower precision, large layers that autocast computes in it are units of their own.
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from tutti.config.vocabulary import Precision
from tutti.parallel.layout import Layout
from tutti.parallel.sharding.sharded_unit import Place, members_of

LOW_PRECISION: dict[Precision, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16}

LOWERED = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
"""Layers whose parameters autocast casts before it uses them, so that they can be gathered in lower precision."""

LEAST_LOWERED_NUMEL = 2**20
"""A layer of this size is gathered by itself in lower precision; smaller ones with their block, in their own dtype."""

NEEDED = "set_reduce_scatter_unused_params"
"""The method of FSDPModule that came last of those that are used here."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnitPlan:
    """A unit before it is sharded.

    Attributes:
        name: of the module; empty for the root.
        module: what fully_shard is called on.
        members: parameters by name, with all their places.
        lowered: whether the parameters are gathered in the plan's lower precision.
    """

    name: str
    module: nn.Module
    members: dict[str, list[Place]] = field(default_factory=dict)
    lowered: bool = False


def plan_units(model: nn.Module, layout: Layout, precision: Precision) -> list[UnitPlan]:
    """Return the units of a model in the order in which they are sharded: inner ones first, the root last."""
    blocks, members = members_of(model, layout)
    inside = {inner for _, block in blocks for inner in block.modules()}
    outside = members[0]
    # fully_shard finds what is tied only between blocks in none of them, so such blocks belong to the root.
    between = [places for places in outside.values() if all(module in inside for module, _ in places)]
    hidden = {module for places in between for module, _ in places}
    units: list[UnitPlan] = []
    root = dict(outside)
    for (name, block), held in zip(blocks, members[1:], strict=True):
        if hidden.intersection(block.modules()):
            root |= held
        elif held:
            units += _with_layers(UnitPlan(name=name, module=block, members=held), precision)
    return [*units, *_with_layers(UnitPlan(name="", module=model, members=root), precision)]


def _with_layers(unit: UnitPlan, precision: Precision) -> list[UnitPlan]:
    """Split the large layers off that are gathered in lower precision; the unit itself comes last."""
    if precision not in LOW_PRECISION:
        return [unit]
    if unit.name and all(_is_lowered(*place) for places in unit.members.values() for place in places):
        return [UnitPlan(name=unit.name, module=unit.module, members=unit.members, lowered=True)]
    layers: dict[nn.Module, dict[str, list[Place]]] = {}
    for name, places in unit.members.items():
        layers.setdefault(places[0][0], {})[name] = places
    own = {
        module: members
        for module, members in layers.items()
        if all(len(places) == 1 and _is_lowered(*places[0]) for places in members.values())
        and _numel(members) >= LEAST_LOWERED_NUMEL
    }
    rest = {name: places for name, places in unit.members.items() if places[0][0] not in own}
    units = [
        UnitPlan(name=next(iter(members)).rpartition(".")[0], module=module, members=members, lowered=True)
        for module, members in own.items()
    ]
    return [*units, UnitPlan(name=unit.name, module=unit.module, members=rest)]


def _is_lowered(module: nn.Module, key: str) -> bool:
    """Whether autocast casts the parameter before its first use; what weight_norm computes a weight from is not."""
    return type(module) in LOWERED and key in ("weight", "bias")


def _numel(members: dict[str, list[Place]]) -> int:
    return sum(int(getattr(*places[0]).numel()) for places in members.values())


def obstacle(model: nn.Module, layout: Layout, device: torch.device, backend: str) -> str | None:
    """Return why fully_shard cannot shard this model here, with the remedy; None where it can.

    Raises:
        PlanError: no engine divides the model; see `members_of`.
    """
    if not hasattr(FSDPModule, NEEDED) or not hasattr(dist, "all_gather_single"):
        return f"torch {torch.__version__} lacks parts of FSDP2 that came with 2.13"
    if device.type != "cpu" and backend != "nccl":
        return f"ranks with a {device.type} device exchange by {backend}, and FSDP2 needs NCCL there"
    for unit in plan_units(model, layout, "full"):
        dtypes: dict[torch.dtype, str] = {}
        for name, places in unit.members.items():
            parameter = getattr(*places[0])
            if not parameter.is_contiguous():
                return f"parameter {name!r} is not contiguous (channels_last?), which FSDP2 does not shard"
            if parameter.is_complex():
                return f"parameter {name!r} is complex, which FSDP2 does not reduce"
            if parameter.requires_grad:
                dtypes.setdefault(parameter.dtype, name)
        if len(dtypes) > 1:
            (one, first), (other, second) = list(dtypes.items())[:2]
            return (
                f"{first!r} is {_words(one)} and {second!r} {_words(other)}, and FSDP2 reduces the gradients of "
                f"{unit.name or 'what lies outside of blocks'!r} in one dtype"
            )
    return None


def _words(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""Blocks: the parts of a model whose parameters are gathered together."""

from collections.abc import Iterator

import torch
from torch import nn

from tutti.config.vocabulary import AxisName
from tutti.errors import PlanError
from tutti.parallel.layout import Layout
from tutti.parallel.sharding.pieces import Loads
from tutti.parallel.sharding.rooms import Rooms
from tutti.parallel.sharding.unit import Pack, Place, Unit

_CONTAINERS = (nn.Sequential, nn.ModuleList)


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The repeated parts: elements of lists and sequences of modules, outermost first, that have parameters.

    An element that is itself a list or a sequence with more than leaves in it is looked into.
    """
    return list(_blocks(model, "", within=False, seen=set()))


def make_units(
    model: nn.Module, layout: Layout, device: torch.device | None
) -> tuple[list[Unit], dict[nn.Module, Unit]]:
    """Divide the model's parameters among the shard axis, and write into `layout` what this rank holds.

    Returns the units, the first of which has what lies outside of blocks or is tied between them, and the unit of
    every block. Parameters whose gradients are not summed along `shard`, without dims or without elements stay whole.
    `device`: where shards lie (None: where the parameters are). Raises PlanError for sparse embeddings.
    """
    blocks = blocks_of(model)
    home = {module: index for index, (_, block) in enumerate(blocks, 1) for module in block.modules()}
    members: list[dict[str, list[Place]]] = [{} for _ in range(len(blocks) + 1)]
    for name, places in _places(model).items():
        parameter = getattr(*places[0])
        if "shard" in layout.shard_of(name).sums and parameter.dim() and parameter.numel():
            _check_dense(name, places)
            homes = {home.get(module, 0) for module, _ in places}
            members[homes.pop() if len(homes) == 1 else 0][name] = places
    loads, rooms = Loads(layout.mesh), Rooms()
    units = [Unit(name="", packs=_packs(members[0], layout, device, loads, rooms))]
    of_block = {}
    for (name, block), inside in zip(blocks, members[1:], strict=True):
        if inside:
            of_block[block] = Unit(name=name, packs=_packs(inside, layout, device, loads, rooms))
            units.append(of_block[block])
    for unit in units:
        unit.show("shard")
    return units, of_block


def _blocks(module: nn.Module, name: str, *, within: bool, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    for key, child in module.named_children():
        path = f"{name}.{key}" if name else key
        if id(child) in seen or not any(True for _ in child.parameters()):
            continue
        listed = isinstance(module, _CONTAINERS)
        if listed and not _holds_blocks(child):
            seen.add(id(child))
            yield path, child
        else:
            yield from _blocks(child, path, within=listed, seen=seen)


def _holds_blocks(module: nn.Module) -> bool:
    return isinstance(module, _CONTAINERS) and any(True for child in module.children() for _ in child.children())


def _places(model: nn.Module) -> dict[str, list[Place]]:
    """Where every parameter is, by its first name."""
    first: dict[nn.Parameter, str] = {}
    places: dict[str, list[Place]] = {}
    for path, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = first.setdefault(parameter, f"{path}.{key}" if path else key)
            places.setdefault(name, []).append((module, key))
    return places


def _packs(
    members: dict[str, list[Place]], layout: Layout, device: torch.device | None, loads: Loads, rooms: Rooms
) -> list[Pack]:
    kinds: dict[tuple[torch.dtype, tuple[AxisName, ...]], list[tuple[str, list[Place]]]] = {}
    for name, places in members.items():
        others = loads.others(layout.shard_of(name).sums)
        kinds.setdefault((getattr(*places[0]).dtype, others), []).append((name, places))
    packs = []
    for (_, others), named in kinds.items():
        rank = layout.mesh.index("shard")
        pack = Pack(named, loads=loads.beside(others), rooms=rooms, rank=rank, others=others, home=device)
        for one, piece in zip(pack.parameters, pack.mine, strict=True):
            one.held = layout.shard_of(one.name)
            layout.cut(one.name, piece.dim, *([(piece.start, piece.stop)] if piece.numel else []))
            layout.set_reduce_axes(one.name, ())
        packs.append(pack)
    return packs


def _check_dense(name: str, places: list[Place]) -> None:
    for module, _ in places:
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise PlanError(
                f"{name!r} has sparse gradients, which sharding levels 2 and 3 do not divide; make the embedding with "
                "sparse=False, or use sharding level 1"
            )

"""The space axis of a plan: groups along the grid, and a model whose inputs arrive cut."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.utils import _pytree as pytree

from tutti.config.plan import Plan
from tutti.config.vocabulary import DATA_AXES
from tutti.errors import PlanError
from tutti.parallel.data.batchnorm import BatchScope
from tutti.parallel.layout import Layout
from tutti.parallel.mesh import Mesh
from tutti.parallel.spatial import losses, norms, pointwise, pooling, resample, shapes, slicing, windows
from tutti.parallel.spatial.exchange import Space
from tutti.parallel.spatial.norms import share_statistics_in_space
from tutti.parallel.spatial.tensor import CutTensor, cut_whole, whole

HANDLING = (losses, norms, pointwise, pooling, resample, shapes, slicing, windows)
"""The modules that say what a cut tensor can do; importing them registers it."""


def cut_space(model: nn.Module, plan: Plan, layout: Layout, scope: BatchScope) -> Space:
    """Make `model` take whole samples, cut them, and compute this rank's part. Call it last: all gradients are
    summed over space too, on top of what other mechanisms said.

    Raises PlanError where the model has no convolution, or fewer spatial dims than the grid.
    """
    mesh = layout.mesh
    ranks = [module.weight.dim() - 2 for module in model.modules() if isinstance(module, _ConvNd)]
    if not ranks:
        raise PlanError(
            f"mesh.space = {mesh.degree('space')}, but the model has no convolution whose input could be cut in space;"
            " use replicate, split or context instead"
        )
    grid = grid_of(plan, max(ranks))
    statistics = any(isinstance(module, _BatchNorm) for module in model.modules())
    space = open_space(mesh, grid, statistics=statistics)
    space.halos, space.totals = layout.channel("halos", "space"), layout.channel("statistics", "space")
    for over_space in space.scopes.values():
        over_space.channel = layout.channel("statistics", *DATA_AXES, "space")
    share_statistics_in_space(model, scope)
    for name in layout.names:
        layout.set_reduce_axes(name, dict.fromkeys((*layout.shard_of(name).sums, "space")))
    model.forward = SpaceForward(model, model.forward, space)
    return space


def grid_of(plan: Plan, rank: int) -> tuple[int, ...]:
    """Parts along each of `rank` spatial dims."""
    given = plan.space_grid or (plan.degree("space"),)
    if len(given) > rank:
        raise PlanError(
            f"space_grid = {list(given)} cuts {len(given)} spatial dims, but the model's convolutions have {rank}; "
            f"give at most {rank} numbers"
        )
    return (*given, *(1,) * (rank - len(given)))


class SpaceForward:
    """The model's forward on parts: inputs of (batch, channels, spatial dims) are cut, other inputs stay whole.

    Where gradients are computed the output stays cut, and the loss function sees it as the whole; else it is fetched.
    """

    def __init__(self, model: nn.Module, plain: Callable[..., Any], space: Space) -> None:
        self.model, self.plain, self.space = model, plain, space

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled model gets its plain forward back: the ranks are not part of it."""
        return functools.partial, (type(self.model).forward, self.model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map(self._cut, (args, kwargs))
        output = self.plain(*args, **kwargs)
        return output if torch.is_grad_enabled() else pytree.tree_map(_whole, output)

    def _cut(self, leaf: Any) -> Any:
        if (
            isinstance(leaf, torch.Tensor)
            and not isinstance(leaf, CutTensor)
            and leaf.dim() == len(self.space.grid) + 2
        ):
            return cut_whole(leaf, 2, self.space)
        return leaf


def _whole(leaf: Any) -> Any:
    return whole(leaf) if isinstance(leaf, torch.Tensor) else leaf


def open_space(mesh: Mesh, grid: Sequence[int], *, statistics: bool = False) -> Space:
    """Groups for every set of cut grid axes, and over data for batch statistics. Collective over all ranks."""
    ranks = mesh.ranks("space")
    place = tuple(int(part) for part in np.unravel_index(mesh.index("space"), tuple(grid)))
    axes = [axis for axis, parts in enumerate(grid) if parts > 1]
    every = [some for count in range(1, len(axes) + 1) for some in itertools.combinations(axes, count)]
    group = mesh.new_group("space")
    sums = {some: _group(_line(ranks, grid, place, some)) for some in every}
    scopes = {}
    for some in every if statistics else ():
        members = _members(mesh, grid, place, some)
        scopes[some] = BatchScope(world_size=len(members), group=_group(members))
    if statistics or ranks:
        dist.all_reduce(torch.zeros(1, device=_device(group)), group=group)  # some backends connect a group here
    return Space(grid=tuple(grid), place=place, group=group, sums=sums, scopes=scopes)


def _device(group: Any) -> torch.device:
    return torch.device("cuda") if dist.get_backend(group) == "nccl" else torch.device("cpu")


def _line(ranks: Sequence[int], grid: Sequence[int], place: Sequence[int], axes: Sequence[int]) -> tuple[int, ...]:
    """Of `ranks`, row-major over the grid, those that differ from `place` along `axes` alone."""
    spots = itertools.product(*(range(grid[i]) if i in axes else (place[i],) for i in range(len(grid))))
    return tuple(ranks[int(np.ravel_multi_index(spot, tuple(grid)))] for spot in spots)


def _members(mesh: Mesh, grid: Sequence[int], place: Sequence[int], axes: Sequence[int]) -> tuple[int, ...]:
    """Ranks over all data, on this rank's line along `axes`: those that share batch statistics."""
    names, degrees = tuple(mesh.degrees), tuple(mesh.degrees.values())
    spots = {int(np.ravel_multi_index(s, tuple(grid))) for s in _spots(grid, place, axes)}
    members = []
    for rank in range(math.prod(degrees)):
        where = dict(zip(names, (int(i) for i in np.unravel_index(rank, degrees)), strict=True))
        others = (name for name in names if name != "space" and name not in DATA_AXES)
        if where["space"] in spots and all(where[name] == mesh.coordinates[name] for name in others):
            members.append(rank)
    return tuple(members)


def _spots(grid: Sequence[int], place: Sequence[int], axes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*(range(grid[i]) if i in axes else (place[i],) for i in range(len(grid))))


def _group(members: tuple[int, ...]) -> Any:
    """One group for each distinct set of members that ranks name; this rank's."""
    named: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(named, members)
    groups = {some: dist.new_group(list(some)) for some in sorted(set(named))}
    return groups[members]

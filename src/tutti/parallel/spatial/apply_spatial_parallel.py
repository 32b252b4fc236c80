"""The space axis of a plan: groups along the grid, and a model whose inputs arrive cut."""

import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
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
from tutti.data.batches import Unpack
from tutti.data.samples import DataSource
from tutti.errors import PlanError
from tutti.parallel.data.batchnorm import BatchScope
from tutti.parallel.layout import Layout
from tutti.parallel.mesh import Mesh
from tutti.parallel.spatial import spatial_convolution, spatial_elementwise, spatial_pooling, spatial_reshapes
from tutti.parallel.spatial.halo_exchange import SpatialGroup
from tutti.parallel.spatial.halo_geometry import bounds_of, owned
from tutti.parallel.spatial.spatial_elementwise import share_statistics_in_space
from tutti.parallel.spatial.spatial_tensor import (
    Along,
    CutTensor,
    Where,
    cut,
    cut_whole,
    local,
    space_of,
    where_of,
    whole,
)

HANDLING = (
    spatial_elementwise,
    spatial_elementwise,
    spatial_elementwise,
    spatial_pooling,
    spatial_pooling,
    spatial_reshapes,
    spatial_reshapes,
    spatial_convolution,
)
"""The modules that say what a cut tensor can do; importing them registers it."""


def cut_space(model: nn.Module, plan: Plan, layout: Layout, scope: BatchScope) -> SpatialGroup:
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

    def __init__(self, model: nn.Module, plain: Callable[..., Any], space: SpatialGroup) -> None:
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


def open_space(mesh: Mesh, grid: Sequence[int], *, statistics: bool = False) -> SpatialGroup:
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
    return SpatialGroup(grid=tuple(grid), place=place, group=group, sums=sums, scopes=scopes)


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


def on_shapes(
    model: nn.Module, grid: Sequence[int], place: Sequence[int], dtype: torch.dtype
) -> tuple[nn.Module, SpatialGroup]:
    """A copy of `model` on shapes that computes the part at `place` of `grid`, and the Space in which it counts what it
    would send."""
    assert HANDLING
    space = SpatialGroup(grid=tuple(grid), place=tuple(place), group=None, sums={}, dry=True)
    shapes = copy.deepcopy(model).to("meta", dtype).train()
    for module in shapes.modules():
        if isinstance(module, _BatchNorm):
            module.forward = OwnStatistics(module)  # type: ignore[method-assign]
    return shapes, space


def halo_nbytes_of(
    model: nn.Module, shape: Sequence[int], grid: Sequence[int], index: int, dtype: torch.dtype = torch.float32
) -> tuple[int, int]:
    """(bytes sent in forward, bytes sent in backward) of one microbatch, by part `index` (row-major) of the grid.

    `model`: as the user wrote it, one input of `shape` (batch, channels, spatial dims); `grid`: parts along each
    spatial dim; `dtype`: of activations. Batch statistics and other sums over ranks are small and left out. Raises
    PlanError for what a cut tensor cannot do.
    """
    place = tuple(int(part) for part in np.unravel_index(index, tuple(grid)))
    shapes, space = on_shapes(model, grid, place, dtype)
    output = shapes(cut_whole(torch.empty(tuple(shape), dtype=dtype, device="meta"), 2, space))
    forward, space.sent_nbytes = space.sent_nbytes, 0
    local(output).sum().backward()  # type: ignore[no-untyped-call]
    return forward, space.sent_nbytes


class OwnStatistics:
    """The forward of a BatchNorm over this part alone: its shapes are right, and nothing is sent."""

    def __init__(self, module: _BatchNorm) -> None:
        self.module = module

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        made = type(self.module).forward(self.module, local(input))
        return cut(made, where_of(input), space_of([input])) if isinstance(input, CutTensor) else made


def feed_parts(model: nn.Module, source: DataSource, unpack: Unpack) -> tuple[DataSource, Unpack]:
    """The source and the pickers by which each rank reads only its part of every sample.

    For a data set with `extents(rank)` and `part_of_space(rows)`, as tutti.data.volumes.Hdf5Volumes has them; others
    give whole samples, which the model's forward cuts. Evaluation reads whole samples.
    """
    space = getattr(model.forward, "space", None)
    dataset = source.dataset
    if not isinstance(space, SpatialGroup) or not hasattr(dataset, "part_of_space"):
        return source, unpack
    extents = tuple(dataset.extents(len(space.grid)))
    if any(extent < parts for extent, parts in zip(extents, space.grid, strict=True)):
        raise PlanError(f"space_grid = {list(space.grid)} cuts volumes of {list(extents)} rows; use a smaller grid")
    marked = MarkedUnpack(unpack, extents, space)
    return replace(source, dataset=dataset.part_of_space(marked.rows)), marked


class MarkedUnpack:
    """Pickers whose tensors of this rank's extents are marked as parts of the whole, while gradients are computed."""

    def __init__(self, unpack: Unpack, extents: tuple[int, ...], space: SpatialGroup) -> None:
        self.plain, self.space = unpack, space
        bounds = [bounds_of(extent, parts) for extent, parts in zip(extents, space.grid, strict=True)]
        self.rows = [owned(one, place) for one, place in zip(bounds, space.place, strict=True)]
        self.shape = tuple(stop - start for start, stop in self.rows)
        self.where: Where = tuple(Along(axis, one) if space.grid[axis] > 1 else None for axis, one in enumerate(bounds))

    def __call__(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        if not torch.is_grad_enabled():
            return self.plain(batch)
        if not any(self._fits(leaf) for leaf in pytree.tree_leaves(batch)):
            raise PlanError(
                f"no tensor of the batch ends in {list(self.shape)} rows, this rank's part of a volume; keep the data "
                "set's sizes in collate_fn, or give prepare a data set that returns whole samples"
            )
        unpacked: tuple[tuple[Any, ...], dict[str, Any], Any] = self.plain(pytree.tree_map(self._marked, batch))
        return unpacked

    def _fits(self, leaf: Any) -> bool:
        rank = len(self.shape)
        return isinstance(leaf, torch.Tensor) and leaf.dim() > rank and tuple(leaf.shape[-rank:]) == self.shape

    def _marked(self, leaf: Any) -> Any:
        return (
            cut(leaf, (None,) * (leaf.dim() - len(self.shape)) + self.where, self.space) if self._fits(leaf) else leaf
        )

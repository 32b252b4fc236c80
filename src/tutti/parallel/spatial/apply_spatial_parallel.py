"""Applies the space axis of a plan: process groups along the grid, and a model whose inputs are cut."""

import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.utils import _pytree as pytree

import tutti.parallel.spatial.spatial_convolution as spatial_convolution
import tutti.parallel.spatial.spatial_elementwise as spatial_elementwise
import tutti.parallel.spatial.spatial_pooling as spatial_pooling
import tutti.parallel.spatial.spatial_reshapes as spatial_reshapes
from tutti.comm.rendezvous import open_group
from tutti.config.plan import Plan
from tutti.config.vocabulary import DATA_AXES
from tutti.data.batches import Unpack
from tutti.data.samples import DataSource
from tutti.errors import PlanError
from tutti.parallel.data.batchnorm import BatchScope, SharedStatistics, is_batch_norm, own_forward
from tutti.parallel.divided_tensor import local
from tutti.parallel.layout import Layout
from tutti.parallel.mesh import Mesh
from tutti.parallel.spatial.halo_exchange import SpatialGroup
from tutti.parallel.spatial.halo_geometry import bounds_of, owned
from tutti.parallel.spatial.spatial_elementwise import on_part, share_statistics_in_space
from tutti.parallel.spatial.spatial_tensor import Along, SpatialTensor, Where, cut, cut_whole, whole

HANDLING = (spatial_elementwise, spatial_pooling, spatial_reshapes, spatial_convolution)
"""The modules that register the functions of cut tensors when imported."""


def cut_space(model: nn.Module, plan: Plan, layout: Layout, scope: BatchScope) -> SpatialGroup:
    """Make `model` accept whole samples, cut them, and compute this rank's part.

    Call this after all other mechanisms: it adds the space axis to the axes over which every gradient is reduced.

    Args:
        model: the model; its forward is replaced.
        plan: names the degree of space and the grid.
        layout: the mesh, the gradients' reduction axes and the channels.
        scope: of batch statistics over data.

    Returns:
        This rank's groups and position in the grid.

    Raises:
        PlanError: the model has no convolution, or its convolutions have fewer spatial dims than the grid.
    """
    mesh = layout.mesh
    ranks = [module.weight.dim() - 2 for module in model.modules() if isinstance(module, _ConvNd)]
    if not ranks:
        raise PlanError(
            f"mesh.space = {mesh.degree('space')}, but the model has no convolution whose input could be cut in space; "
            "use replicate, split or context instead"
        )
    grid = grid_of(plan, max(ranks))
    statistics = any(is_batch_norm(module) for module in model.modules())
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
    """Parts along each of `rank` spatial dims, from the plan.

    Raises:
        PlanError: the plan's grid has more dims.
    """
    grid = plan.space_grid or (plan.degree("space"),)
    if len(grid) > rank:
        raise PlanError(
            f"space_grid = {list(grid)} cuts {len(grid)} spatial dims, but the model's convolutions have {rank}; "
            f"give at most {rank} numbers"
        )
    return (*grid, *(1,) * (rank - len(grid)))


class SpaceForward:
    """The forward of a model with cut inputs. Inputs of (batch, channels, spatial dims) are cut, others stay whole.

    With gradients, the output stays cut, and the loss function sees its whole shape. Without, the whole output is
    fetched.
    """

    def __init__(self, model: nn.Module, plain: Callable[..., Any], space: SpatialGroup) -> None:
        self.model, self.plain, self.space = model, plain, space

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled model gets its original forward back: process groups cannot be pickled."""
        return functools.partial, (type(self.model).forward, self.model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map(self._cut, (args, kwargs))
        output = self.plain(*args, **kwargs)
        return output if torch.is_grad_enabled() else pytree.tree_map(_whole_leaf, output)

    def _cut(self, leaf: Any) -> Any:
        if (
            isinstance(leaf, torch.Tensor)
            and not isinstance(leaf, SpatialTensor)
            and leaf.dim() == len(self.space.grid) + 2
        ):
            return cut_whole(leaf, 2, self.space)
        return leaf


def _whole_leaf(leaf: Any) -> Any:
    return whole(leaf) if isinstance(leaf, torch.Tensor) else leaf


def open_space(mesh: Mesh, grid: Sequence[int], *, statistics: bool = False) -> SpatialGroup:
    """Open groups for every set of cut grid axes, and for batch statistics over data too. Collective over all ranks.

    Each group is opened by its members only, which open their common groups in the same order.

    Args:
        mesh: the mesh.
        grid: parts along each spatial dim.
        statistics: whether the model has batch statistics.
    """
    ranks = mesh.ranks("space")
    place = tuple(int(part) for part in np.unravel_index(mesh.index("space"), tuple(grid)))
    axes = [axis for axis, parts in enumerate(grid) if parts > 1]
    axis_sets = [axis_set for count in range(1, len(axes) + 1) for axis_set in itertools.combinations(axes, count)]
    group = mesh.new_group("space")
    # Not connected here: collectives alone use these groups, in one order on all members, and few of the groups.
    sums = {axis_set: open_group(_ranks_on_line(ranks, grid, place, axis_set), connect=False) for axis_set in axis_sets}
    scopes = {}
    for axis_set in axis_sets if statistics else ():
        members = _statistics_ranks(mesh, grid, place, axis_set)
        scopes[axis_set] = BatchScope(world_size=len(members), group=open_group(members, connect=False))
    return SpatialGroup(grid=tuple(grid), place=place, group=group, sums=sums, scopes=scopes)


def _ranks_on_line(
    ranks: Sequence[int], grid: Sequence[int], place: Sequence[int], axes: Sequence[int]
) -> tuple[int, ...]:
    """The entries of `ranks` (row-major over the grid) whose grid position differs from `place` only along `axes`."""
    return tuple(ranks[int(np.ravel_multi_index(position, tuple(grid)))] for position in _positions(grid, place, axes))


def _statistics_ranks(mesh: Mesh, grid: Sequence[int], place: Sequence[int], axes: Sequence[int]) -> tuple[int, ...]:
    """The ranks that share batch statistics: those of all data axes on this rank's line along `axes`."""
    names, degrees = tuple(mesh.degrees), tuple(mesh.degrees.values())
    positions = {int(np.ravel_multi_index(s, tuple(grid))) for s in _positions(grid, place, axes)}
    members = []
    for rank in range(math.prod(degrees)):
        coordinates = dict(zip(names, (int(i) for i in np.unravel_index(rank, degrees)), strict=True))
        others = (name for name in names if name != "space" and name not in DATA_AXES)
        if coordinates["space"] in positions and all(coordinates[name] == mesh.coordinates[name] for name in others):
            members.append(rank)
    return tuple(members)


def _positions(grid: Sequence[int], place: Sequence[int], axes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*(range(grid[i]) if i in axes else (place[i],) for i in range(len(grid))))


def on_shapes(
    model: nn.Module, grid: Sequence[int], place: Sequence[int], dtype: torch.dtype
) -> tuple[nn.Module, SpatialGroup]:
    """Copy `model` to meta tensors, to compute the part at `place` of `grid` without values.

    Args:
        model: the model as the user wrote it.
        grid: parts along each spatial dim.
        place: the part along each spatial dim.
        dtype: of parameters and activations.

    Returns:
        The copy, and the SpatialGroup that counts the bytes it would send.
    """
    assert HANDLING
    space = SpatialGroup(grid=tuple(grid), place=tuple(place), group=None, sums={}, dry=True)
    shapes = copy.deepcopy(model).to("meta", dtype).train()
    for module in shapes.modules():
        if is_batch_norm(module):
            module.forward = OwnStatistics(module)
    return shapes, space


def halo_nbytes_of(
    model: nn.Module, shape: Sequence[int], grid: Sequence[int], index: int, dtype: torch.dtype = torch.float32
) -> tuple[int, int]:
    """Halo bytes of one microbatch that one part of the grid sends.

    Batch statistics and other small sums are not counted.

    Args:
        model: the model as the user wrote it, with one input.
        shape: of the input: (batch, channels, spatial dims).
        grid: parts along each spatial dim.
        index: the part, row-major over the grid.
        dtype: of activations.

    Returns:
        Bytes sent in forward, and bytes sent in backward.

    Raises:
        PlanError: the model calls a function that a cut tensor refuses.
    """
    place = tuple(int(part) for part in np.unravel_index(index, tuple(grid)))
    shapes, space = on_shapes(model, grid, place, dtype)
    output = shapes(cut_whole(torch.empty(tuple(shape), dtype=dtype, device="meta"), 2, space))
    forward, space.sent_nbytes = space.sent_nbytes, 0
    local(output).sum().backward()  # type: ignore[no-untyped-call]
    return forward, space.sent_nbytes


class OwnStatistics:
    """The forward of a BatchNorm with statistics of this part only: shapes are right, and nothing is sent."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.own = module, own_forward(module)

    def __call__(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.own is None:
            return on_part(functools.partial(type(self.module).forward, self.module), input)
        with SharedStatistics(BatchScope(), on_part):
            return self.own(input, *args, **kwargs)


def feed_parts(model: nn.Module, source: DataSource, unpack: Unpack) -> tuple[DataSource, Unpack]:
    """Make each rank read only its part of every sample, if the data set can.

    This needs a data set with `extents(rank)` and `part_of_space(rows)`, such as tutti.data.volumes.Hdf5Volumes.
    Other data sets return whole samples, which the model's forward cuts. Evaluation reads whole samples.

    Args:
        model: the model, after `cut_space`.
        source: the training data.
        unpack: divides a batch into arguments and target.

    Returns:
        The source and `unpack`, replaced if parts are read.

    Raises:
        PlanError: the grid has more parts than the volumes have rows.
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
    """Divides a batch like `unpack`.

    With gradients, it first marks tensors that have this rank's extents as parts of the whole.
    """

    def __init__(self, unpack: Unpack, extents: tuple[int, ...], space: SpatialGroup) -> None:
        self.plain, self.space = unpack, space
        bounds = [bounds_of(extent, parts) for extent, parts in zip(extents, space.grid, strict=True)]
        self.rows = [owned(dim_bounds, place) for dim_bounds, place in zip(bounds, space.place, strict=True)]
        self.shape = tuple(stop - start for start, stop in self.rows)
        self.where: Where = tuple(
            Along(axis, dim_bounds) if space.grid[axis] > 1 else None for axis, dim_bounds in enumerate(bounds)
        )

    def __call__(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        if not torch.is_grad_enabled():
            return self.plain(batch)
        if not any(self._fits(leaf) for leaf in pytree.tree_leaves(batch)):
            raise PlanError(
                f"no tensor of the batch has {list(self.shape)} as its last sizes, which this rank's part of a volume "
                "has; keep the data set's sizes in collate_fn, or use a data set that returns whole samples"
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

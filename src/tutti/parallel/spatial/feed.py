"""Data for ranks that share samples: a data set that can read a part is told which, and its batches are marked."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tutti.data.samples import DataSource
from tutti.errors import PlanError
from tutti.parallel.spatial.exchange import Space
from tutti.parallel.spatial.geometry import bounds_of, owned
from tutti.parallel.spatial.tensor import Along, Where, cut
from tutti.trainer.run_state import Unpack


def feed_parts(model: nn.Module, source: DataSource, unpack: Unpack) -> tuple[DataSource, Unpack]:
    """The source and the pickers by which each rank reads only its part of every sample.

    For a data set with `extents(rank)` and `part_of_space(rows)`, as tutti.data.volumes.Hdf5Volumes has them; others
    give whole samples, which the model's forward cuts. Evaluation reads whole samples.
    """
    space = getattr(model.forward, "space", None)
    dataset = source.dataset
    if not isinstance(space, Space) or not hasattr(dataset, "part_of_space"):
        return source, unpack
    extents = tuple(dataset.extents(len(space.grid)))
    if any(extent < parts for extent, parts in zip(extents, space.grid, strict=True)):
        raise PlanError(f"space_grid = {list(space.grid)} cuts volumes of {list(extents)} rows; use a smaller grid")
    marked = MarkedUnpack(unpack, extents, space)
    return replace(source, dataset=dataset.part_of_space(marked.rows)), marked


class MarkedUnpack:
    """Pickers whose tensors of this rank's extents are marked as parts of the whole, while gradients are computed."""

    def __init__(self, unpack: Unpack, extents: tuple[int, ...], space: Space) -> None:
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

"""What one rank will send for a sample cut in space, without ranks: the model's own forward and backward, on shapes."""

import copy
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from tutti.parallel.spatial.apply import HANDLING
from tutti.parallel.spatial.exchange import Space
from tutti.parallel.spatial.tensor import CutTensor, cut, cut_whole, local, space_of, where_of


def on_shapes(
    model: nn.Module, grid: Sequence[int], place: Sequence[int], dtype: torch.dtype
) -> tuple[nn.Module, Space]:
    """A copy of `model` on shapes that computes the part at `place` of `grid`, and the Space in which it counts what it
    would send."""
    assert HANDLING
    space = Space(grid=tuple(grid), place=tuple(place), group=None, sums={}, dry=True)
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

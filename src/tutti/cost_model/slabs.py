"""What convolutions of parts of an input take more than one of the same rows: where most of a part needs no halo, its
interior and slabs are computed apart."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from tutti.cost_model import constants
from tutti.cost_model.compute import Work
from tutti.cost_model.division import Division
from tutti.cost_model.table import ModelTable
from tutti.cost_model.worker import Array, Worker


def computed_apart(
    columns: ModelTable,
    part: Division,
    grid: Sequence[int],
    worker: Worker,
    samples: int,
    passes: tuple[Work, Work],
    *,
    on_cpu: bool,
    least: bool = False,
) -> tuple[Work, Work]:
    """Forward and backward of a microbatch of `samples`, as parallel/spatial/overlapped.py does it: inputs, outputs and
    their gradients are read and written some times more; where the interior is computed while halos travel, every slab
    goes over the weights anew, and its few rows take longer than as many rows of a larger part. `grid`: parts along
    each dim; `least`: what that takes in any grid of as many parts."""
    ahead, back = passes
    cut = (columns.halo > 0).any(axis=1) & (columns.outputs > 0)
    if max(grid) == 1 or not cut.any() or not samples:
        return ahead, back
    inside = _least_interior(columns, max(grid)) if least else interior(columns, grid)
    apart = cut & (inside >= constants.LEAST_INTERIOR)
    inputs = np.where(cut, samples * part.passed * columns.activations, 0.0)
    outputs = np.where(apart, samples * part.passed * columns.outputs, 0.0)
    slabs = 1 if least else sum(min(2, parts - 1) for parts in grid)
    weights = np.where(apart, columns.parameters * part.weight, 0.0) * slabs
    share = np.where(apart & (not least), 1 - inside, 0.0)
    moved_s = 1 / worker.bandwidth_bytes_per_s

    def longer(work: Work, direction: Literal["forward", "backward"], over_weights_s: float) -> Work:
        (of_inputs, of_outputs), calls = constants.APART_PASSES[direction], constants.APART_CALLS[direction]
        slow = 1 / constants.SLAB_EFFICIENCY[direction] - 1 if on_cpu else 0.0
        of_inputs_here = np.where(apart, of_inputs, constants.HALO_PASSES[direction])
        traffic = moved_s * (of_inputs_here * inputs + of_outputs * outputs) + over_weights_s * weights
        each_s = worker.call_s if worker.gap_s is None else worker.gap_s  # a GPU's host is ahead of it
        calls_here = np.where(apart, calls, constants.HALO_CALLS[direction])
        called = worker.slowdown * each_s * np.where(cut, calls_here, 0.0)
        more = np.stack([share * slow * work.seconds, worker.slowdown * traffic, called])
        return Work(seconds=work.seconds + more.sum(axis=0), limits=work.limits + more)

    pace = worker.convolution_weights
    return longer(ahead, "forward", pace.forward_s), longer(back, "backward", 2 * pace.backward_s + 3 * moved_s)


def interior(columns: ModelTable, grid: Sequence[int]) -> Array:
    """(modules,): the part of a rank's rows that needs nothing beside what the rank has: no halo, and at the ends no
    padding, which is put there as halos are; 0 where each needs some."""
    whole = np.where(columns.activations > 0, columns.activations, np.inf)
    inside = np.ones(len(columns))
    for dim, parts in enumerate(grid[:3]):
        if parts > 1:
            inside *= 1 - np.minimum(parts * columns.halo[:, dim] / whole, 1.0)
    return inside


def _least_interior(columns: ModelTable, parts: int) -> Array:
    """The least of any grid of so many parts: all along one dim."""
    least: Array = np.min([interior(columns, (*(1,) * dim, parts)) for dim in range(3)], axis=0)
    return least

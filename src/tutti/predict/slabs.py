"""What convolutions of parts of an input take more than one of the same rows: interior and slabs are computed apart."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from tutti.predict import constants
from tutti.predict.compute import Work
from tutti.predict.division import Division
from tutti.predict.table import ModelTable
from tutti.predict.worker import Array, Worker


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
    """Forward and backward of a microbatch of `samples` where the interior is computed while halos travel, as
    runtime/space/overlapped.py does it: inputs, outputs and their gradients are read and written some times more, every
    slab goes over the weights anew, and its few rows take longer than as many rows of a larger part. `grid`: parts
    along each dim; `least`: what that takes in any grid of as many parts."""
    ahead, back = passes
    cut = (columns.halo > 0).any(axis=1) & (columns.outputs > 0)
    if max(grid) == 1 or not cut.any() or not samples:
        return ahead, back
    inputs = np.where(cut, samples * part.passed * columns.activations, 0.0)
    outputs = np.where(cut, samples * part.passed * columns.outputs, 0.0)
    slabs = 1 if least else sum(min(2, parts - 1) for parts in grid)
    weights = np.where(cut, columns.parameters * part.weight, 0.0) * slabs
    share = np.where(cut & (not least), _slabs(columns.halo, columns.activations, grid), 0.0)
    moved_s = 1 / worker.bandwidth_bytes_per_s

    def longer(work: Work, direction: Literal["forward", "backward"], over_weights_s: float) -> Work:
        (of_inputs, of_outputs), calls = constants.APART_PASSES[direction], constants.APART_CALLS[direction]
        slow = 1 / constants.SLAB_EFFICIENCY[direction] - 1 if on_cpu else 0.0
        traffic = moved_s * (of_inputs * inputs + of_outputs * outputs) + over_weights_s * weights
        each_s = worker.call_s if worker.gap_s is None else worker.gap_s  # a GPU's host is ahead of it
        called = worker.slowdown * each_s * np.where(cut, calls, 0.0)
        more = np.stack([share * slow * work.seconds, worker.slowdown * traffic, called])
        return Work(seconds=work.seconds + more.sum(axis=0), limits=work.limits + more)

    pace = worker.weights
    return longer(ahead, "forward", pace.forward_s), longer(back, "backward", 2 * pace.backward_s + 3 * moved_s)


def _slabs(halo: Array, activations: Array, grid: Sequence[int]) -> Array:
    """(modules,): the part of a rank's rows that needs halos, of one inside the grid; 1 at most."""
    whole = np.where(activations > 0, activations, np.inf)
    interior = np.ones(len(halo))
    for dim, parts in enumerate(grid):
        if parts > 1:
            mine = parts * halo[:, dim] / whole * min(2, parts - 1) / 2
            interior *= 1 - np.minimum(mine, 1.0)
    return 1 - interior

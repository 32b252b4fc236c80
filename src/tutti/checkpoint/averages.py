"""Averages of the weights in a checkpoint: each rank writes and reads the parts that it holds."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from tutti.checkpoint.contribution import Collected, shard_here
from tutti.checkpoint.index import AVERAGE
from tutti.checkpoint.sources import LoadTarget, transfer

if TYPE_CHECKING:
    from tutti.checkpoint.training_state import TrainingState


def collect_averages(training: "TrainingState", collected: Collected) -> None:
    """Add this rank's parts of the averages to what it writes."""
    layout = training.parallel.layout
    for average_name, average in training.averages.items():
        for name, tensor in (average.tensors | average.buffers).items():
            if layout.counts(name):
                collected.add((AVERAGE, name, average_name), shard_here(layout, name, tensor), tensor)


def load_average(training: "TrainingState", name: str, buffers: Mapping[str, torch.Tensor]) -> bool:
    """Fill one of `training.averages` from the checkpoint that the run was resumed from. Collective.

    Args:
        training: the resumed state.
        name: name of the average.
        buffers: this rank's buffers, by name; the average gets its own of those that the checkpoint has.

    Returns:
        Whether the checkpoint has an average of this name.
    """
    assert training.reopen is not None
    average, world, layout = training.averages[name], training.parallel.world, training.parallel.layout
    source = training.reopen()
    updates = source.run_state.get("averages", {}).get(name)
    if updates is None:
        return False
    stored = {key[1] for key in source.tensors if key[0] == AVERAGE and key[2] == name}
    average.buffers = {first: buffer.clone() for first, buffer in buffers.items() if first in stored}
    tensors = average.tensors | average.buffers
    transfer(
        world,
        source,
        [
            LoadTarget(key=(AVERAGE, first, name), out=tensor, cuts=shard_here(layout, first, tensor).cuts)
            for first, tensor in tensors.items()
            if first in stored
        ],
    )
    average.updates = updates
    return True

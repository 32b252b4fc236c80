"""What batch statistics over several ranks cost: two small exchanges a module and microbatch, nothing hides them; on a
CPU other passes over the values than the operator of one device makes.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tutti.config.model import ModelSpec, ModuleSpec
from tutti.cost_model import constants
from tutti.cost_model.compute import OpTable, Work
from tutti.cost_model.groups import Group
from tutti.cost_model.table import remembered
from tutti.cost_model.worker import KINDS, Array, Worker

_STATISTIC_NBYTES = 4  # float32
_STATE_VALUES = 2  # running mean and variance of a channel
_COUNTER_NBYTES = 8  # batches tracked


def statistics_s(model: ModelSpec, group: Group) -> tuple[Array, Array]:
    """Seconds of a microbatch's exchanges of statistics over `group`, by module, (in forward, in backward).

    Forward gathers count, mean and squared deviations of every channel from all ranks; backward sums two vectors
    over channels.
    """
    channels = _channels_of(model)
    forward, backward = np.zeros(len(channels)), np.zeros(len(channels))
    for index in np.flatnonzero(channels) if group.ranks > 1 else ():
        gathered = group.ranks * (2 * channels[index] + 1) * _STATISTIC_NBYTES
        forward[index] = group.scatter(gathered)  # an all-gather of as much takes as long
        backward[index] = group.all_reduce(2 * channels[index] * _STATISTIC_NBYTES)
    return forward, backward


def taken_in_passes(ops: OpTable) -> OpTable:
    """The operators of a rank on a CPU where statistics are those of several ranks: then a BatchNorm goes over its
    values in passes as a norm of rows does, `SHARED_NORM` times as long."""
    batch, rows = KINDS.index("batch_norm"), KINDS.index("norm")
    those = ops.kind == batch
    if not those.any():
        return ops
    longer = np.where(those, constants.SHARED_NORM, 1.0)
    return replace(
        ops,
        kind=np.where(those, rows, ops.kind),
        flops_forward=ops.flops_forward * longer,
        flops_backward=ops.flops_backward * longer,
    )


def at_least(
    one: Callable[..., Work], ops: OpTable, worker: Worker, samples: int, modules: int, *, weights: bool = True
) -> Work:
    """The pass `one` (compute.forward or compute.backward), whether statistics are those of one rank or of several: of
    each module the quicker."""
    alone = one(ops, worker, samples, modules, weights=weights)
    shared_ops = taken_in_passes(ops) if worker.gap_s is None else ops
    if shared_ops is ops:
        return alone
    shared = one(shared_ops, worker, samples, modules, weights=weights)
    limits = np.where(shared.seconds < alone.seconds, shared.limits, alone.limits)
    return Work(seconds=np.minimum(shared.seconds, alone.seconds), limits=limits)


@remembered(16)
def _channels_of(model: ModelSpec) -> Array:
    return np.array([_channels(module) if module.batch_statistics else 0.0 for module in model.modules])


def _channels(module: ModuleSpec) -> float:
    """Channels of a BatchNorm, from its running statistics, or its weight and bias where it keeps none."""
    if module.buffer_nbytes:
        return (module.buffer_nbytes - _COUNTER_NBYTES) / (_STATE_VALUES * _STATISTIC_NBYTES)
    return module.parameters / 2

"""What batch statistics over several ranks cost: two small exchanges a module and microbatch, nothing hides them."""

from tutti.predict.network import Link, ring_all_reduce, ring_reduce_scatter
from tutti.spec.model import ModelSpec, ModuleSpec
from tutti.spec.plan import Plan

_STATISTIC_NBYTES = 4  # float32
_STATE_VALUES = 2  # running mean and variance of a channel
_COUNTER_NBYTES = 8  # batches tracked


def statistics_s(model: ModelSpec, plan: Plan, link: Link) -> tuple[float, float]:
    """Seconds of a step's exchanges of statistics, (in forward, in backward).

    Forward gathers count, mean and squared deviations of every channel from all ranks; backward sums two vectors
    over channels.
    """
    degree = plan.data_parallel_degree
    forward = backward = 0.0
    for module in model.modules:
        if module.batch_statistics and degree > 1:
            channels = _channels(module)
            gathered = degree * (2 * channels + 1) * _STATISTIC_NBYTES
            forward += ring_reduce_scatter(link, gathered, degree)  # an all-gather of as much takes as long
            backward += ring_all_reduce(link, 2 * channels * _STATISTIC_NBYTES, degree)
    return forward * plan.batch.num_microbatches, backward * plan.batch.num_microbatches


def _channels(module: ModuleSpec) -> float:
    """Channels of a BatchNorm, from its running statistics, or its weight and bias where it keeps none."""
    if module.buffer_nbytes:
        return (module.buffer_nbytes - _COUNTER_NBYTES) / (_STATE_VALUES * _STATISTIC_NBYTES)
    return module.parameters / 2

"""Costs of state in the host's memory: copies over the link between a device and its host, and the update on the host.

They follow parallel/offload. Without a shard axis, gradients leave a device that is alone after every backward, and its
copies of weights that autocast would convert are in half precision. Ranks that compute on CPUs copy within one memory.
"""

import math
from collections.abc import Sequence

import numpy as np

import tutti.cost_model.cost_constants as cost_constants
from tutti.config.cluster import DeviceKind
from tutti.config.plan import Plan
from tutti.cost_model.module_costs import ModelTable
from tutti.cost_model.rank_placement import HostGroup
from tutti.cost_model.worker_speed import Array


def is_offloaded(plan: Plan, kind: DeviceKind) -> bool:
    """Return whether state lies in the memory of a host that the ranks do not compute in."""
    return kind == "cuda" and plan.sharding.offload != "none"


def leaves_early(plan: Plan) -> bool:
    """Return whether gradients leave the device in every microbatch, because no other rank adds to them."""
    return plan.world_size == 1 and plan.sharding.offload != "none"


def level_of(plan: Plan) -> int:
    """Return the sharding level that gathers parameters as often as the plan copies them to the device."""
    if plan.degree("shard") > 1:
        return plan.sharding.level
    return 2 if plan.sharding.offload == "optimizer" else 3


def copied_fraction(columns: ModelTable, plan: Plan) -> Array:
    """Return (modules,): bytes of the device's copy of parameters, as a fraction of the parameters."""
    half = leaves_early(plan) and plan.precision in ("bfloat16", "float16")
    return np.where(columns.multiplies & half, 0.5, 1.0)


def load_s_per_nbyte(host_group: HostGroup) -> float:
    """Return the seconds in which a byte is copied between a device and its host, in one direction."""
    return 1 / (host_group.node.host_link_bytes_per_s or cost_constants.HOST_LINK_BYTES_PER_S)


def host_limit_nbytes(host_group: HostGroup) -> float:
    """Return the bytes of its host's memory that a rank's state may fill."""
    return cost_constants.HOST_FILL * host_group.node.memory_nbytes / host_group.ranks_per_host


def update_bytes_per_s(host_group: HostGroup) -> float:
    """Return the memory traffic per second of an optimizer that runs on a device's part of its host's cores."""
    whole = host_group.node.memory_bandwidth_bytes_per_s or cost_constants.HOST_MEMORY_BYTES_PER_S
    return whole / max(1, host_group.ranks_per_host)


def disk_bytes_per_s(host_group: HostGroup) -> tuple[float, float]:
    """Return the rates at which a rank reads and writes its part of a host's disk while all ranks do."""
    disk = host_group.node.nvme
    rates = cost_constants.NVME_BYTES_PER_S if disk is None else (disk.read_bytes_per_s, disk.write_bytes_per_s)
    ranks = max(1, host_group.ranks_per_host)
    return rates[0] / ranks, rates[1] / ranks


def disk_limit_nbytes(host_group: HostGroup) -> float:
    """Return the bytes of its host's disk that a rank's state may fill; infinite where the cluster names no disk."""
    disk = host_group.node.nvme
    return np.inf if disk is None else disk.nbytes / max(1, host_group.ranks_per_host)


def buffered_nbytes(state: float, largest: float) -> float:
    """Return the bytes of optimizer state on a disk that are in the host's memory at once.

    Args:
        state: bytes of a rank's state.
        largest: those of the parameter with most of them, which is not divided.
    """
    group = min(state, max(cost_constants.STATE_GROUP_NBYTES, largest))
    return min(cost_constants.STATE_BUFFERS, math.ceil(state / max(group, 1.0))) * group


def update_with_disk_s(update_s: float, state: float, host_group: HostGroup) -> float:
    """Return the seconds of an update whose state is read from a disk and written back.

    Reading the first group and writing the last one overlap with nothing; the rest does with the update.

    Args:
        update_s: the update where the state is in memory.
        state: bytes of a rank's state.
        host_group: the rank's host.
    """
    read, write = disk_bytes_per_s(host_group)
    ends = min(state, cost_constants.STATE_GROUP_NBYTES)
    s_per_nbyte = 1 / read + 1 / write
    return ends * s_per_nbyte + max(update_s, (state - ends) * s_per_nbyte)


def saved_copies_s(moved_nbytes: float, passes_s: tuple[float, float], host_group: HostGroup) -> tuple[float, float]:
    """Return the seconds by which copies of activations prolong a microbatch's forward and backward.

    Args:
        moved_nbytes: bytes that leave in forward and come back in backward.
        passes_s: forward and backward without them.
        host_group: the rank's host.
    """
    copy_s = moved_nbytes * load_s_per_nbyte(host_group)
    return max(0.0, copy_s - passes_s[0]), max(0.0, copy_s - passes_s[1])


def moved_nbytes(regions: Sequence[Sequence[float]], samples: int) -> list[float]:
    """Return, for each module with offload, the bytes of a microbatch's activations that leave the device.

    Args:
        regions: one sample's activations of each module inside it.
        samples: samples of a microbatch on a rank.
    """
    return [
        sum(samples * nbytes for nbytes in region if samples * nbytes >= cost_constants.SAVED_NBYTES)
        for region in regions
    ]

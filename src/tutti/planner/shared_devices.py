"""Planning for ranks that share accelerators: each gets its part of a device."""

import math
from dataclasses import replace

from tutti.config.cluster import ClusterSpec, LinkSpec
from tutti.cost_model.cost_notes import count
from tutti.errors import PlanError
from tutti.planner.plan_request import Choice, PlanRequest
from tutti.planner.scenarios import with_memory, with_speed

_STAGED_LINK = LinkSpec(
    tier="node", latency_s=1e-4, bandwidth_bytes_per_s=2e9, backend="staged", source="Gloo through host memory"
)
"""Assumed: about what Gloo reaches between processes of one host."""


def with_shared_devices(cluster: ClusterSpec, request: PlanRequest) -> ClusterSpec:
    """Return the cluster with as many parts of accelerators as the request has ranks.

    Every device is cut into equally many parts, each with its part of the memory and of the speed. Ranks of a host
    exchange tensors through its memory. A cluster of CPUs, or with enough devices, is returned unchanged.

    Raises:
        PlanError: the request leaves the number of ranks open.
    """
    ranks = math.prod(request.mesh.values()) if request.mesh is not None else request.degree
    if ranks is None:
        raise PlanError("--share-device leaves open how many ranks share the devices; add --nproc N, or --mesh")
    parts = -(-ranks // cluster.device_count)
    kinds = {device.kind for device in cluster.devices.values()}
    if parts < 2 or kinds == {"cpu"}:
        return cluster
    least = min(device.memory_nbytes for device in cluster.devices.values())
    nodes = tuple(
        replace(node, devices_per_node=node.devices_per_node * parts, links=_networks(node.links))
        for node in cluster.nodes
    )
    cut = replace(cluster, nodes=nodes, links=(_STAGED_LINK, *_networks(cluster.links)))
    return with_speed(with_memory(cut, least / parts), 1 / parts)


def _networks(links: tuple[LinkSpec, ...]) -> tuple[LinkSpec, ...]:
    return tuple(link for link in links if link.tier != "node")


def as_shared(choice: Choice, cluster: ClusterSpec) -> Choice:
    """Return a choice whose plan lets ranks share devices, and which says so.

    Args:
        choice: the choice for the cluster that `with_shared_devices` returned.
        cluster: the cluster as it is.
    """
    ranks = choice.best.world_size
    if ranks <= cluster.device_count:
        return choice
    remark = (
        f"{count(ranks, 'rank')} share {count(cluster.device_count, 'device')}: the prediction gives each its part of "
        "a device and an assumed link, so its times say little. Use this plan to prove that it works, not for "
        "speed."
    )
    best = replace(choice.best, share_device=True)
    return replace(choice, best=best, remarks=(remark, *choice.remarks))

"""Clusters of cards for the tests of the planner: equal and mixed ones."""

import dataclasses
from typing import Any

from cost_model.examples import cluster, gpu, link
from tutti.config.cluster import ClusterSpec, NodeSpec, scale_bandwidth


def cards(nodes: int = 1, per_node: int = 4, **device: Any) -> ClusterSpec:
    links = (link("node", 1e-5, 1e11), link("network", 2e-5, 5e9))
    return cluster(gpu(**device), links, count=nodes, devices_per_node=per_node)


def mixed() -> ClusterSpec:
    quick = gpu(name="quick", peak_flops_per_s={"float32": 30e12}, memory_nbytes=2**35)
    nodes = tuple(
        NodeSpec(name=name, device=device, devices_per_node=count, memory_nbytes=2**36)
        for name, device, count in (("a", "slow", 4), ("b", "quick", 2))
    )
    links = (link("node", 1e-6, 1e11), link("network", 1e-6, 1e10))
    return ClusterSpec(name="mixed", devices={"slow": gpu(name="slow"), "quick": quick}, nodes=nodes, links=links)


def own_links(machines: ClusterSpec) -> ClusterSpec:
    """Return the same hosts listed singly, with links of their own that are slower from host to host.

    The cluster itself has no links then.
    """
    nodes = [
        dataclasses.replace(node, name=f"{node.name}{at}", count=1)
        for node in machines.nodes
        for at in range(node.count)
    ]
    slower = [
        dataclasses.replace(node, links=tuple(scale_bandwidth(link, 0.2**at) for link in machines.links))
        for at, node in enumerate(nodes)
    ]
    return dataclasses.replace(machines, nodes=tuple(slower), links=())

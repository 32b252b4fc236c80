"""What a cluster of Kubernetes has: the allocatable part of its nodes, by kind, within the namespace's quota."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from tutti.clusters.cluster_resources import ClusterNode, NodePool
from tutti.clusters.kubernetes_api import Cluster
from tutti.clusters.kubernetes_manifest import KubernetesSettings

_PRODUCTS = (
    "nvidia.com/gpu.product", "cloud.google.com/gke-accelerator", "k8s.amazonaws.com/accelerator",
    "amd.com/gpu.product-name", "accelerator",
)  # fmt: skip
"""Labels of nodes that name the kind of their GPUs."""

_UNITS = {"m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_UNITS |= {f"{unit}i": 1024.0**power for power, unit in enumerate("KMGTPE", 1)}


def amount(text: str) -> float:
    """Return a quantity as Kubernetes writes it, such as "500m", "64Gi" or "1e3".

    Examples:
        >>> amount("500m"), amount("2Gi"), amount("8")
        (0.5, 2147483648.0, 8.0)
    """
    match = re.fullmatch(r"([0-9.]+(?:[eE][+-]?\d+)?)([A-Za-z]*)", text.strip())
    if match is None or (match[2] and match[2] not in _UNITS):
        return 0.0
    return float(match[1]) * _UNITS.get(match[2], 1.0)


def kubernetes_pools(cluster: Cluster, settings: KubernetesSettings) -> tuple[NodePool, ...]:
    """Return the nodes that pods with these settings may get, a pool for each kind of GPU.

    What other pods use is not subtracted.

    Args:
        cluster: whose API is asked.
        settings: of the job.

    Raises:
        LaunchError: the API refuses, or does not answer.
    """
    space = settings.namespace or cluster.namespace
    listed = cluster.ask(cluster.core.list_node)["items"]
    quotas = (cluster.ask(cluster.core.list_namespaced_resource_quota, space, absent=True) or {}).get("items", [])
    left = _left(quotas)
    pools: dict[tuple[str, str], tuple[list[ClusterNode], dict[str, str]]] = {}
    for said in sorted(listed, key=lambda node: str(node["metadata"]["name"])):
        label, product = _product(said)
        nodes, absent = pools.setdefault((label, product), ([], {}))
        node, name = _node(said, settings, product), str(said["metadata"]["name"])
        reason = _unusable(said, settings) or _too_small(node, settings)
        if reason:
            absent[name] = reason
        else:
            nodes.append(node)
    return tuple(
        _within(left, _pool(label, product, nodes, absent, settings), settings, space)
        for (label, product), (nodes, absent) in pools.items()
    )


def _product(said: Mapping[str, Any]) -> tuple[str, str]:
    labels = said["metadata"].get("labels") or {}
    return next(((label, str(labels[label])) for label in _PRODUCTS if label in labels), ("", ""))


def _node(said: Mapping[str, Any], settings: KubernetesSettings, product: str) -> ClusterNode:
    """Return the part of a node that a pod with these settings gets."""
    has = said.get("status", {}).get("allocatable") or {}
    gpus, cores = int(amount(str(has.get(settings.gpu_resource, "0")))), int(amount(str(has.get("cpu", "0"))))
    memory = amount(str(has.get("memory", "0")))
    memory = memory if settings.memory is None else min(memory, amount(settings.memory))
    return ClusterNode(
        name=str(said["metadata"]["name"]),
        cores=cores if settings.cpus is None else min(cores, settings.cpus),
        memory_nbytes=int(memory) or None,
        gpus=gpus if settings.gpus is None else min(gpus, settings.gpus),
        gpu=product if gpus else "",
        idle=None,
    )


def _unusable(said: Mapping[str, Any], settings: KubernetesSettings) -> str:
    """Return why no pod with these settings is placed on a node; empty if one may be."""
    conditions = {each["type"]: each for each in said.get("status", {}).get("conditions") or []}
    ready = conditions.get("Ready", {})
    if ready.get("status") != "True":
        return f"it is not ready ({ready.get('reason') or 'it says nothing'})"
    if said.get("spec", {}).get("unschedulable"):
        return "it is cordoned"
    labels = said["metadata"].get("labels") or {}
    for key, value in settings.node_selector.items():
        if labels.get(key) != value:
            return f"node_selector leaves it out ({key} is not {value})"
    for taint in said.get("spec", {}).get("taints") or []:
        if taint.get("effect") != "PreferNoSchedule" and not _tolerated(taint, settings.tolerations):
            return f"it has the taint {taint['key']}:{taint['effect']}; set tolerations to use it"
    return ""


def _tolerated(taint: Mapping[str, Any], tolerations: Iterable[str]) -> bool:
    for text in tolerations:
        about, _, effect = text.partition(":")
        key, equals, value = about.partition("=")
        same = key == taint["key"] and (not equals or value == taint.get("value", ""))
        if same and effect in ("", taint["effect"]):
            return True
    return False


def _too_small(node: ClusterNode, settings: KubernetesSettings) -> str:
    for what, has, asked in (("GPUs", node.gpus, settings.gpus), ("cores", node.cores, settings.cpus)):
        if asked is not None and has < asked:
            return f"it has {has} {what}, and a pod is to get {asked}"
    if settings.memory is not None and (node.memory_nbytes or 0) < int(amount(settings.memory)):
        return f"it has less memory than {settings.memory}"
    return ""


def _pool(
    label: str, product: str, nodes: list[ClusterNode], absent: dict[str, str], settings: KubernetesSettings
) -> NodePool:
    chosen = {**settings.node_selector, label: product} if label else settings.node_selector
    selector = ",".join(f"{key}:{value}" for key, value in chosen.items())
    request = f"node_selector={selector}" if label and label not in settings.node_selector else ""
    return NodePool(name=product, nodes=tuple(nodes), absent=absent, request=request)


def _left(quotas: Iterable[Mapping[str, Any]]) -> dict[str, tuple[float, str]]:
    """Return what quotas leave of each resource, with the name of the tightest."""
    found: dict[str, tuple[float, str]] = {}
    for quota in quotas:
        hard = quota.get("status", {}).get("hard") or quota.get("spec", {}).get("hard") or {}
        used = quota.get("status", {}).get("used") or {}
        for key, text in hard.items():
            rest = amount(str(text)) - amount(str(used.get(key, "0")))
            if key not in found or rest < found[key][0]:
                found[key] = (rest, str(quota["metadata"]["name"]))
    return found


def _within(
    left: Mapping[str, tuple[float, str]], pool: NodePool, settings: KubernetesSettings, space: str
) -> NodePool:
    """Return a pool with no more than the namespace's quota leaves."""
    if not pool.nodes:
        return pool
    first, notes, most = pool.nodes[0], list(pool.notes), math.inf
    keys = (f"requests.{settings.gpu_resource}", settings.gpu_resource)
    gpus = [left[key] for key in keys if key in left]
    if first.gpus and gpus and min(gpus)[0] < first.gpus:
        rest, name = min(gpus)
        if rest < 1 or (settings.gpus or 0) > rest:
            return replace(pool, closed=f"the quota {name} of {space} leaves {rest:g} GPUs")
        notes.append(f"the quota {name} of {space} leaves {rest:g} GPUs")
        pool = replace(pool, nodes=tuple(replace(node, gpus=min(node.gpus, int(rest))) for node in pool.nodes))
        first = pool.nodes[0]
    cores = settings.cpus or first.gpus or 1
    needs: dict[str, float] = dict.fromkeys(keys, first.gpus) if first.gpus else {}
    needs |= {"requests.cpu": cores, "cpu": cores, "limits.cpu": cores, "pods": 1}
    if settings.memory is not None:
        needs |= dict.fromkeys(("requests.memory", "memory", "limits.memory"), amount(settings.memory))
    for key, each in needs.items():
        if key in left and left[key][0] // each < min(most, len(pool.nodes)):
            most = left[key][0] // each
            notes.append(f"the quota {left[key][1]} of {space} leaves {max(0, int(most))} pods ({key})")
    if "count/jobs.batch" in left and left["count/jobs.batch"][0] < 1:
        most = 0
        notes.append(f"the quota {left['count/jobs.batch'][1]} of {space} leaves no job")
    if most < 1:
        return replace(pool, closed=notes[-1])
    return replace(pool, notes=tuple(notes), most_nodes=None if most is math.inf else int(most))

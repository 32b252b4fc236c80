"""Measured clusters that are kept: this host's, and sets of nodes that a cluster gave once."""

import contextlib
import hashlib
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tutti.config import serialization
from tutti.config.cluster import ClusterSpec
from tutti.errors import TuttiError
from tutti.profile.probe.host_facts import cache_folder, versions

_DECIDING = ("torch", "cuda", "driver")
"""Versions after a change of which rates are measured again."""


def cached_cluster_path() -> Path:
    """Return the file where `tutti probe` writes this host's ClusterSpec, and where others look for it."""
    return cache_folder() / "tutti" / f"cluster-{socket.gethostname()}.json"


def node_set_path(names: Sequence[str]) -> Path:
    """Return the file in which the measurement of a set of nodes is kept.

    Args:
        names: of the nodes, in any order.
    """
    digest = hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()[:16]
    return cache_folder() / "tutti" / f"nodes-{digest}.json"


def of_nodes(cluster: ClusterSpec, names: Sequence[str]) -> ClusterSpec:
    """Return a measured cluster with the names of its nodes.

    Args:
        cluster: measured on these nodes.
        names: of the nodes in the order of their ranks, as their cluster calls them.
    """
    if cluster.conditions is None:
        return cluster
    return replace(cluster, conditions=replace(cluster.conditions, hosts=tuple(names)))


def outdated(cluster: ClusterSpec, here: Mapping[str, str]) -> str:
    """Return which version has changed since a cluster was measured, in words; empty if none that is known.

    Args:
        cluster: a measured cluster, or one of data sheets, which no version changes.
        here: the versions now; what it lacks is not known here.
    """
    then = {} if cluster.conditions is None else cluster.conditions.versions
    changed = [name for name in _DECIDING if name in then and name in here and then[name] != here[name]]
    return ", ".join(f"{name} was {then[name]} and is {here[name]}" for name in changed)


def read_cached(file: Path) -> ClusterSpec | None:
    """Return a kept measurement; None if there is none, or another version of torch, CUDA or the driver made it.

    Raises:
        SpecError: the file is damaged.
    """
    if not file.exists():
        return None
    cluster = serialization.load(ClusterSpec, file)
    return None if outdated(cluster, versions()) else cluster


def clusters_within(names: Sequence[str]) -> list[ClusterSpec]:
    """Return the kept measurements of which every node is among these, the one of most nodes first.

    Damaged files, and measurements by another version of torch, CUDA or the driver, are left out.

    Args:
        names: of the nodes.
    """
    allowed, here = set(names), versions()
    found: list[ClusterSpec] = []
    for file in sorted((cache_folder() / "tutti").glob("nodes-*.json")):
        with contextlib.suppress(TuttiError, OSError):
            cluster = serialization.load(ClusterSpec, file)
            hosts = () if cluster.conditions is None else cluster.conditions.hosts
            if hosts and allowed.issuperset(hosts) and not outdated(cluster, here):
                found.append(cluster)
    return sorted(found, key=lambda cluster: -len(cluster.conditions.hosts if cluster.conditions else ()))

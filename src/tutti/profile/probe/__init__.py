"""Measuring machines: this host, or all hosts of a process group -> ClusterSpec."""

import socket
from collections.abc import Callable
from pathlib import Path

from tutti.config.cluster import ClusterSpec
from tutti.profile.probe.effort import FULL, QUICK, Effort
from tutti.profile.probe.environment import cache_folder
from tutti.profile.probe.local import measure_here

TIMEOUT_S = 600.0


def measure(
    *,
    quick: bool = False,
    ranks: int | None = None,
    progress: Callable[[str], None] | None = None,
    folder: Path | None = None,
    timeout_s: float = TIMEOUT_S,
) -> ClusterSpec:
    """Measure this host with processes of its own; the calling process touches no device.

    `quick`: at most 10 s on 2 cores, else 90. `ranks`: processes, None for one each GPU, else one each core, 2 to 4.
    `progress` is told what is being measured. `folder`: whose disk is read, the working directory by default. Not
    for daemonic processes, which may not start others. Raises LaunchError where a rank fails.
    """
    return measure_here(
        QUICK if quick else FULL,
        ranks,
        folder=folder or Path.cwd(),
        say=progress or (lambda text: None),
        timeout_s=timeout_s,
    )


def cached_cluster_path() -> Path:
    """Where `tutti probe` leaves this host's ClusterSpec, and others look for it."""
    return cache_folder() / "tutti" / f"cluster-{socket.gethostname()}.json"


__all__ = ["FULL", "QUICK", "Effort", "cached_cluster_path", "measure"]

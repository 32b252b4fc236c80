"""Measure machines, this host or all hosts of a process group, and return a ClusterSpec.

The functions that measure need torch and are loaded on first use: `tutti run` looks for kept measurements without it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tutti.config.cluster import ClusterSpec
from tutti.profile.probe.cluster_cache import cached_cluster_path, node_set_path, of_nodes, read_cached

if TYPE_CHECKING:
    from tutti.profile.probe.probe_timing import FULL, QUICK, Effort

TIMEOUT_S = 600.0


def measure(
    *,
    quick: bool = False,
    ranks: int | None = None,
    progress: Callable[[str], None] | None = None,
    folder: Path | None = None,
    timeout_s: float = TIMEOUT_S,
) -> ClusterSpec:
    """Measure this host with processes of its own. The calling process touches no device.

    Args:
        quick: measure fewer sizes and repeats (`QUICK` instead of `FULL`).
        ranks: number of processes; None for one per GPU, or else one per core, from 2 to 4.
        progress: receives what is being measured.
        folder: on the disk whose read speed is measured; the working directory by default.
        timeout_s: longest time for the whole probe.

    Raises:
        LaunchError: a rank fails. Daemonic processes may not start others and cannot call this.
    """
    from tutti.profile.probe.local_probe import measure_here
    from tutti.profile.probe.probe_timing import FULL, QUICK

    return measure_here(
        QUICK if quick else FULL,
        ranks,
        folder=folder or Path.cwd(),
        say=progress or (lambda text: None),
        timeout_s=timeout_s,
    )


__all__ = [
    "FULL",
    "QUICK",
    "Effort",
    "cached_cluster_path",
    "measure",
    "node_set_path",
    "of_nodes",
    "read_cached",
]


def __getattr__(name: str) -> Any:
    if name in ("FULL", "QUICK", "Effort"):
        from tutti.profile.probe import probe_timing

        return getattr(probe_timing, name)
    raise AttributeError(f"module 'tutti.profile.probe' has no attribute {name!r}")

"""What this host grants to the ranks started on it."""

import os
from pathlib import Path

from tutti.launch.environment import stated_threads


def granted_cores() -> int:
    """Processor cores this process may use: its affinity, bounded by the control group's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota(Path("/sys/fs/cgroup/cpu.max"))
    return max(1, min(cores, int(quota))) if quota is not None else cores


def _cgroup_quota(path: Path) -> float | None:
    """Cores granted by a cgroup v2 quota file ("max 100000" or "200000 100000"), or None without a bound."""
    try:
        quota, period = path.read_text(encoding="ascii").split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def threads_per_rank(ranks: int) -> int:
    """How many threads each of `ranks` ranks of this host computes with: the user's word, else an equal share."""
    return stated_threads() or max(1, granted_cores() // ranks)

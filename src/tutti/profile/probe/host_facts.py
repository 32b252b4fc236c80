"""What a host grants to this process, and how busy it is: cores, memory, load, versions. Needs no torch."""

import os
import platform
import socket
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import psutil

from tutti.config.version import VERSION
from tutti.machine import gpu_driver

ROOT = Path("/")

LOAD_INTERVAL_S = 0.25
"""Seconds for which the load of the cores is observed."""


def load() -> float:
    """Return the number of cores that are busy with other work, observed while this process sleeps.

    The load average of the last minute would include work that has ended, such as the launch of the ranks.
    """
    busy = psutil.cpu_percent(interval=LOAD_INTERVAL_S, percpu=True)
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(busy))
    return sum(percent for core, percent in enumerate(busy) if core in allowed) / 100


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """A host as one process sees it.

    Attributes:
        cpu: name of the processor.
        cores: whole cores that the process may use.
        memory_nbytes: memory that the process may use.
        load: number of its cores that are busy with other work.
        machine: equal for hosts that are one machine (of a lab, containers); empty if the system does not say.
        machine_cores: cores of that machine.
    """

    name: str
    cpu: str
    cores: int
    memory_nbytes: int
    load: float
    machine: str = ""
    machine_cores: int = 0


def facts(name: str = "") -> HostFacts:
    """Return the facts of this host, now.

    Args:
        name: what its cluster calls it; its own name if empty.
    """
    return HostFacts(
        name=name or socket.gethostname(),
        cpu=cpu_model(),
        cores=cores_granted(),
        memory_nbytes=memory_granted(),
        load=load(),
        machine=" ".join(_words(ROOT / "proc/sys/kernel/random/boot_id")),
        machine_cores=os.cpu_count() or 0,
    )


def cores_granted(root: Path = ROOT) -> int:
    """Return the whole cores that this process may use: its affinity, bounded by the quotas of its control groups."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(root)
    return max(1, min(cores, int(quota))) if quota is not None else cores


def memory_granted(root: Path = ROOT) -> int:
    """Return the bytes of memory that this process may use: the host's, bounded by the limits of its control groups."""
    total = int(psutil.virtual_memory().total)
    limit = memory_limit(root)
    return min(total, limit) if limit is not None else total


def cpu_quota(root: Path = ROOT) -> float | None:
    """Return the cores that control groups grant (the tightest of the group and its ancestors); None if unbounded."""
    quotas = []
    for folder in _groups(root, ""):
        words = _words(folder / "cpu.max")
        if len(words) == 2 and words[0] != "max":
            quotas.append(int(words[0]) / int(words[1]))
    for folder in _groups(root, "cpu"):
        quota, period = _words(folder / "cpu.cfs_quota_us"), _words(folder / "cpu.cfs_period_us")
        if quota and period and int(quota[0]) > 0:
            quotas.append(int(quota[0]) / int(period[0]))
    return min(quotas, default=None)


def memory_limit(root: Path = ROOT) -> int | None:
    """Return the bytes that control groups grant; None if unbounded."""
    words = [_words(folder / "memory.max") for folder in _groups(root, "")]
    words += [_words(folder / "memory.limit_in_bytes") for folder in _groups(root, "memory")]
    # Version 1 writes "no limit" as the largest multiple of a page in 63 bits.
    limits = [int(word[0]) for word in words if word and word[0] != "max" and int(word[0]) < 2**60]
    return min(limits, default=None)


def cpu_model(root: Path = ROOT) -> str:
    """Return the processor's name."""
    try:
        text = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return " ".join(value.split())
    return platform.processor() or platform.machine() or "CPU"


def cache_nbytes(root: Path = ROOT) -> int:
    """Return the bytes of the largest cache of core 0; 32 MiB if the system does not say."""
    sizes = []
    for file in (root / "sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        word = "".join(_words(file))
        if word.endswith("K") and word[:-1].isdigit():
            sizes.append(int(word[:-1]) * 2**10)
        elif word.endswith("M") and word[:-1].isdigit():
            sizes.append(int(word[:-1]) * 2**20)
    return max(sizes, default=32 * 2**20)


def versions() -> dict[str, str]:
    """Return the versions of the software that the rates depend on."""
    known = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "tutti": VERSION,
    }
    for name in ("torch", "numpy"):
        try:
            known[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    driver = gpu_driver()
    return known | ({"driver": driver} if driver else {})


def now_utc() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _groups(root: Path, controller: str) -> list[Path]:
    """Return the folders of this process's control group and its ancestors, for one controller; "" is version 2."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    folders: list[Path] = []
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / controllers
        group = base / path.lstrip("/")
        # In a container the path may be the host's, which is not mounted. The mount itself is then the group.
        folders += [group, *(parent for parent in group.parents if parent.is_relative_to(base))]
        folders.append(base)
    return list(dict.fromkeys(folders))


def _words(path: Path) -> list[str]:
    """Return the words of a file; none if it cannot be read."""
    try:
        return path.read_text(encoding="ascii").split()
    except (OSError, UnicodeDecodeError):
        return []


def cache_folder() -> Path:
    """Return the user's cache folder: $XDG_CACHE_HOME, or else ~/.cache."""
    stated = os.environ.get("XDG_CACHE_HOME")
    return Path(stated) if stated else Path.home() / ".cache"


def pin_loopback() -> None:
    """Make ranks of one host connect over the loopback interface, whatever the network looks like."""
    names = [name for _, name in socket.if_nameindex()]
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)

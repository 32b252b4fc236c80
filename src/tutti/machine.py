"""What the machine itself does to a run: core time stolen by a hypervisor, energy drawn, its GPU driver, folders."""

import contextlib
import functools
import importlib
import multiprocessing
import multiprocessing.util
import os
import resource
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

MODULES = Path("/sys/module")
"""The folder in which Linux lists its drivers."""

_LONGEST_SOCKET_FOLDER = 70
"""Characters of a folder in which multiprocessing can name its sockets; a socket's path has at most 107."""

_MOST_CORES = 8
"""Cores whose clock is read."""

_SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")  # a private folder is made there


def gpu_driver(modules: Path = MODULES) -> str:
    """Return the version of this machine's GPU driver; empty if it has none, or one without a number of its own.

    Args:
        modules: the folder in which Linux lists its drivers.
    """
    for driver in ("nvidia", "amdgpu", "xe", "i915"):
        with contextlib.suppress(OSError):
            return (modules / driver / "version").read_text(encoding="utf-8").strip()
    return ""


def use_short_socket_folder() -> bool:
    """Let multiprocessing make its sockets in a folder with a short path where TMPDIR is long, also in child processes.

    Returns:
        Whether there is such a folder.
    """
    folder = tempfile.gettempdir()
    settings = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if len(os.fsencode(folder)) <= _LONGEST_SOCKET_FOLDER or "tempdir" in settings:
        return True
    for short in _SHORT_FOLDERS:
        with contextlib.suppress(OSError):
            settings["tempdir"] = made = tempfile.mkdtemp(prefix="pymp-", dir=short)
            remove = multiprocessing.util.Finalize
            remove(None, shutil.rmtree, args=(made,), kwargs={"ignore_errors": True}, exitpriority=-100)
            return True
    return False


def stolen_s() -> float:
    """Return the seconds of core time, summed over cores since boot, that a hypervisor took while there was work to do.

    0 if the system does not report them.
    """
    return float(getattr(psutil.cpu_times(), "steal", 0.0))


class StolenTime:
    """Measures the share of core time that is stolen from its creation on."""

    def __init__(self) -> None:
        self._began, self._stolen_s = time.perf_counter(), stolen_s()

    def share(self) -> float:
        """Return the stolen share so far, from 0 to 1."""
        passed = (time.perf_counter() - self._began) * (os.cpu_count() or 1)
        return min(1.0, (stolen_s() - self._stolen_s) / max(passed, 1e-9))


class HostUse:
    """Measures how busy a host's cores are, and with what part of that this process and its children, from now on."""

    def __init__(self) -> None:
        self._began, self._busy, self._own = time.perf_counter(), _busy_s(), _own_s()

    def shares(self) -> tuple[float, float]:
        """Return (busy with anything, busy with this process and its children), each as a share of all cores' time."""
        passed = max(1e-9, (time.perf_counter() - self._began) * (os.cpu_count() or 1))
        return min(1.0, (_busy_s() - self._busy) / passed), min(1.0, (_own_s() - self._own) / passed)


def _busy_s() -> float:
    """Return the core time since boot in which this system's cores worked."""
    times = psutil.cpu_times()
    return float(sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq")))


def _own_s() -> float:
    """Return the core time of this process and of its children, also of those that have ended."""
    process = psutil.Process()
    total = sum(process.cpu_times()[:4])
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            total += sum(child.cpu_times()[:2])
    return float(total)


class ProcessLoad:
    """Measures what the system does to this process from now on."""

    def __init__(self) -> None:
        self._began = _process_counts()

    def passed(self) -> dict[str, float]:
        """Return what has happened since.

        Returns:
            Seconds of `processor_s` (all threads), `waited_s` (of the main thread for a core), `throttled_s` (by the
            limit of its cgroup), `stolen_s` (by a hypervisor, of all cores), `memory_s` (in which some task of its
            cgroup waited for memory); `faults`, the major page faults; and `clock_hz` of its core now. 0 where the
            system does not tell.
        """
        now = _process_counts()
        return {name: now[name] - began for name, began in self._began.items()} | {"clock_hz": _clock_hz()}


def _process_counts() -> dict[str, float]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    scheduled = _text(f"/proc/self/task/{threading.main_thread().native_id}/schedstat").split()
    group = _cgroup()
    throttled = dict(line.split() for line in _text(f"{group}/cpu.stat").splitlines() if line.count(" ") == 1)
    pressure = _text(f"{group}/memory.pressure") or _text("/proc/pressure/memory")
    stalled = pressure.partition("total=")[2].split()
    return {
        "processor_s": used.ru_utime + used.ru_stime,
        "waited_s": int(scheduled[1]) / 1e9 if len(scheduled) > 1 else 0.0,
        "throttled_s": int(throttled.get("throttled_usec", 0)) / 1e6,
        "stolen_s": stolen_s(),
        "memory_s": int(stalled[0]) / 1e6 if stalled else 0.0,
        "faults": float(used.ru_majflt),
    }


@functools.cache
def _cgroup() -> str:
    """The folder of this process's cgroup (version 2)."""
    line = next((line for line in _text("/proc/self/cgroup").splitlines() if line.startswith("0::")), "0::")
    return f"/sys/fs/cgroup{line[3:].rstrip('/')}"


def _clock_hz() -> float:
    """The mean clock of the cores that this process may use, as the kernel scales it; 0 where it does not tell."""
    cores = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
    files = [f"/sys/devices/system/cpu/cpu{core}/cpufreq/scaling_cur_freq" for core in cores]
    clocks = [1e3 * float(text) for text in map(_text, files[:_MOST_CORES]) if text.strip().isdigit()]
    return sum(clocks) / len(clocks) if clocks else 0.0


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


POWERCAP = Path("/sys/class/powercap")
_COUNTED = ("package", "dram")
_SAMPLE_S = 30.0
"""Seconds between readings; a counter of a host that draws 400 W wraps around every 10 minutes."""


class EnergyMeter:
    """Measures the energy that a host's processors and memory, and one GPU, draw from its creation on.

    Processors: Linux's powercap counters (RAPL), which readers need permission for. They count every process of the
    host. GPU: the driver's counter (NVML), read through nvidia-ml-py if it is installed.

    Args:
        host: whether to measure the host; one of its ranks does.
        gpu: UUID of the GPU to measure, without "GPU-"; None for none.
        folder: the folder of the powercap counters.
    """

    def __init__(self, *, host: bool, gpu: str | None = None, folder: Path = POWERCAP) -> None:
        self._zones = _zones(folder) if host else {}
        self._last = {zone: _count(zone / "energy_uj") for zone in self._zones}
        self._host_j = 0.0
        self._gpu = None if gpu is None else _gpu_counter(gpu)
        self._gpu_began_mj = self._gpu() if self._gpu is not None else 0
        self._sampled = time.monotonic()

    def sample(self) -> None:
        """Read the counters if they may soon wrap around."""
        if self._zones and time.monotonic() - self._sampled >= _SAMPLE_S:
            self._read()

    def joules(self) -> float | None:
        """Return the energy so far; None if nothing could be measured."""
        if not self._zones and self._gpu is None:
            return None
        self._read()
        gpu_j = (self._gpu() - self._gpu_began_mj) / 1e3 if self._gpu is not None else 0.0
        return self._host_j + gpu_j

    def _read(self) -> None:
        self._sampled = time.monotonic()
        for zone, limit in self._zones.items():
            now = _count(zone / "energy_uj")
            passed = now - self._last[zone]
            self._host_j += (passed if passed >= 0 else passed + limit) / 1e6
            self._last[zone] = now


def _zones(folder: Path) -> dict[Path, int]:
    """Return the counters that together cover processors and memory once, and where each wraps around."""
    zones = {}
    for zone in sorted(folder.glob("intel-rapl*:*")):
        try:
            name = (zone / "name").read_text(encoding="utf-8").strip()
            if name.startswith(_COUNTED) and _count(zone / "energy_uj") >= 0:
                zones[zone] = _count(zone / "max_energy_range_uj")
        except (OSError, ValueError):  # missing, or not readable by this user
            continue
    return zones


def _count(path: Path) -> int:
    return int(path.read_text(encoding="utf-8"))


def _gpu_counter(uuid: str) -> Callable[[], int] | None:
    """Return a function that reads a GPU's energy counter in mJ; None without nvidia-ml-py or such a counter."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except Exception:  # the library is not installed, or the GPU is older than Volta
        return None
    return lambda: int(nvml.nvmlDeviceGetTotalEnergyConsumption(handle))

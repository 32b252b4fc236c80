"""What the machine itself does to a run: core time stolen by a hypervisor, and energy drawn."""

import contextlib
import importlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil


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

"""Time that a hypervisor gave to other machines, and energy, as the system counts them."""

import os
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import psutil
import pytest

from tutti import machine
from tutti.machine import EnergyMeter, HostUse


def test_the_share_of_all_cores_time(monkeypatch: pytest.MonkeyPatch) -> None:
    times, now = namedtuple("times", "user steal"), [0.0, 0.0]
    monkeypatch.setattr(psutil, "cpu_times", lambda: times(user=9.0, steal=now[0]))
    monkeypatch.setattr(machine.time, "perf_counter", lambda: now[1])
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 2)
    now[:] = 100.0, 50.0
    stolen = machine.StolenTime()
    now[:] = 100.5, 51.0
    assert stolen.share() == 0.25
    now[:] = 109.0, 51.0  # coarser than the clock: never more than all of it
    assert stolen.share() == 1.0


def test_a_system_that_does_not_say_has_none_stolen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_times", lambda: namedtuple("times", "user")(user=9.0))
    assert machine.stolen_s() == 0.0


def powercap(folder: Path, zones: dict[str, tuple[str, int]], limit: int = 1_000_000) -> Path:
    """Write counters in the form of Linux's: zone -> (name, microjoules)."""
    for zone, (name, count) in zones.items():
        (folder / zone).mkdir(parents=True, exist_ok=True)
        (folder / zone / "name").write_text(f"{name}\n")
        (folder / zone / "energy_uj").write_text(f"{count}\n")
        (folder / zone / "max_energy_range_uj").write_text(f"{limit}\n")
    return folder


def test_energy_counts_packages_and_memory_once_and_over_a_wrap(tmp_path: Path) -> None:
    zones = {
        "intel-rapl:0": ("package-0", 900_000),
        "intel-rapl:0:0": ("core", 5),
        "intel-rapl:0:1": ("dram", 100),
        "intel-rapl:1": ("package-1", 0),
        "intel-rapl:2": ("psys", 7),
    }
    meter = EnergyMeter(host=True, folder=powercap(tmp_path, zones))
    later = {
        "intel-rapl:0": ("package-0", 100_000),
        "intel-rapl:0:1": ("dram", 50_100),
        "intel-rapl:1": ("package-1", 1),
    }
    powercap(tmp_path, {**zones, **later})
    assert meter.joules() == pytest.approx(0.2 + 0.05 + 1e-6)
    assert meter.joules() == pytest.approx(0.2 + 0.05 + 1e-6)


def test_energy_that_cannot_be_measured_is_none(tmp_path: Path) -> None:
    assert EnergyMeter(host=True, folder=tmp_path).joules() is None
    assert EnergyMeter(host=False).joules() is None
    assert EnergyMeter(host=False, gpu="no-such-device").joules() is None


def spin(seconds: float) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def test_the_use_of_a_host_counts_this_process_and_its_children() -> None:
    use, began = HostUse(), time.perf_counter()
    spin(0.2)
    subprocess.run([sys.executable, "-c", "sum(range(3_000_000))"], check=True)
    cores_s = (time.perf_counter() - began) * (os.cpu_count() or 1)
    busy, own = use.shares()
    assert own * cores_s >= 0.2
    assert own <= busy + 0.05 <= 1.05

"""Time that a hypervisor gave to other machines, as the system counts it."""

from collections import namedtuple

import psutil
import pytest

from tutti import machine


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

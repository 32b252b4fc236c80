"""Stolen time: the share of this machine's core time that a hypervisor gave to other machines."""

import os
import time

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

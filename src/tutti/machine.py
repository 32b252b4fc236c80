"""What the system says of this machine's processors: how much of their time a hypervisor gave to other machines."""

import os
import time

import psutil


def stolen_s() -> float:
    """Seconds of core time, of all cores since the machine began, in which they had work and a hypervisor ran others'
    instead; 0 where the system does not say."""
    return float(getattr(psutil.cpu_times(), "steal", 0.0))


class StolenTime:
    """What part of the cores' time is stolen from the moment this is made."""

    def __init__(self) -> None:
        self._began, self._stolen_s = time.perf_counter(), stolen_s()

    def share(self) -> float:
        """0 to 1, until now."""
        passed = (time.perf_counter() - self._began) * (os.cpu_count() or 1)
        return min(1.0, (stolen_s() - self._stolen_s) / max(passed, 1e-9))

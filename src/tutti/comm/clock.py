"""Where a step's wall time goes: phases that add up to it, with nothing left out and nothing counted twice."""

import time
from typing import get_args

import torch

from tutti.config.prediction import Phase
from tutti.machine import EnergyMeter, HostUse, StolenTime

STEP_PHASES: tuple[Phase, ...] = tuple(p for p in get_args(Phase) if p != "evaluation")

_COMPUTING: tuple[Phase, ...] = ("forward", "backward", "optimizer")
"""Phases in which the rank computes. Waiting for other ranks in them is counted as exposed communication instead."""


class PhaseClock:
    """A stopwatch that is always in exactly one phase.

    On a GPU, entering a phase waits for the device, so that work is counted in the phase that launched it. This takes
    time, so phases are exact only in every `sample_every`-th step.

    Args:
        device: the device on which the rank computes.
        sample_every: on a GPU, phases are exact in one of this many steps.
        energy: measures what the rank's device, or its host, draws.
    """

    def __init__(self, device: torch.device, sample_every: int = 20, energy: EnergyMeter | None = None) -> None:
        self.device = device
        # reading a torch.device is slow compared with reading a clock
        self._on_gpu = device.type not in ("cpu", "meta")
        self.sample_every = sample_every
        self.started = time.perf_counter()
        self.stolen = StolenTime()
        self.host_use = HostUse()
        self.energy = energy or EnergyMeter(host=False)
        self.steps = 0
        self._phase: Phase = "other"
        self._since = self.started
        self._row_since = self.started
        self._seconds: dict[Phase, float] = dict.fromkeys(STEP_PHASES, 0.0)

    def enter(self, phase: Phase) -> None:
        """End the current phase and begin `phase`."""
        now = self.device_time() if self._on_gpu else time.perf_counter()
        self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = phase, now

    def device_time(self) -> float:
        """Return perf_counter seconds; if phases are exact, after all work on the device has finished."""
        if self._on_gpu and self.phases_exact:
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()

    def stream_time(self) -> float:
        """Return perf_counter seconds; if phases are exact, after the work on this thread's stream has finished."""
        if self._on_gpu and self.phases_exact:
            torch.accelerator.current_stream(self.device).synchronize()
        return time.perf_counter()

    def count_as_exposed(self, seconds: float) -> Phase:
        """Move the last `seconds` from the current phase to exposed communication, if the rank computes in that phase.

        Returns:
            The current phase.
        """
        if self._phase in _COMPUTING:
            self._seconds[self._phase] -= seconds
            self._seconds["exposed_communication"] += seconds
        return self._phase

    @property
    def phases_exact(self) -> bool:
        """Whether the phases of the current step are exact, as they always are on a CPU."""
        return not self._on_gpu or self.steps % self.sample_every == 0

    def elapsed_s(self) -> float:
        """Return the seconds since the clock started."""
        return time.perf_counter() - self.started

    def take_row(self) -> tuple[float, dict[Phase, float]]:
        """Close a row of metrics.

        Returns:
            (wall seconds since the last row, seconds by phase, which add up to it).
        """
        self.enter(self._phase)
        self.energy.sample()
        wall, phases = self._since - self._row_since, self._seconds
        self._row_since, self._seconds = self._since, dict.fromkeys(STEP_PHASES, 0.0)
        self.steps += 1
        return wall, phases

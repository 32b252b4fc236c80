"""Exchanges that travel while the next step computes."""

from abc import abstractmethod

import torch

from tutti.comm.traffic import CommHandle
from tutti.local_sgd.apart import Apart
from tutti.local_sgd.vectors import Replicas
from tutti.trainer.run_state import Run


class Travelling(Apart):
    """What replicas exchange leaves every `period` updates and is taken in after the next one. A resumed run sends it
    again, for what left is as it was when it was saved.
    """

    def __init__(self, replicas: Replicas, period: int) -> None:
        super().__init__(replicas, period)
        self._flight: CommHandle | None = None

    @abstractmethod
    def leave(self) -> CommHandle:
        """Begin to exchange what the parameters are now."""

    @abstractmethod
    def land(self) -> None:
        """It is there: take it in."""

    def restart(self) -> None:
        self._arrive()

    def resumed(self, run: Run, tensors: dict[str, torch.Tensor]) -> None:
        super().resumed(run, tensors)
        self._depart()

    def exchange(self, run: Run) -> None:
        if self._arrive():
            self.land()
            self.staleness = 1
        self._depart()

    def _arrive(self) -> bool:
        """Wait for what is under way; returns whether anything was."""
        handle, self._flight = self._flight, None
        if handle is not None:
            handle.wait()
        return handle is not None

    def _depart(self) -> None:
        since = self.counts["since"]
        if since > 0 and since % self.period == 0:
            self._flight = self.leave()

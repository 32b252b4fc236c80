"""What modes share in which ranks do not wait for each other in steps: own losses, and moments at which all meet.

Ranks come together to evaluate, to save, to go on with other parameters, and at the end. What they exchange in between
goes past the process groups of training, so that no rank needs another to be inside a call.
"""

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from tutti.comm.traffic import CommHandle
from tutti.local_sgd.apart import Apart
from tutti.local_sgd.mode import Kept
from tutti.local_sgd.vectors import Replicas
from tutti.trainer.run_state import Run


class Alone(Apart):
    """Replicas of which each steps when it likes. `rested`: how far they were apart when they last came together."""

    alone = True

    def __init__(self, replicas: Replicas) -> None:
        super().__init__(replicas, 1)
        self.rested: dict[str, float | int] | None = None
        self._last = torch.full((2,), torch.nan, dtype=torch.float64)

    @abstractmethod
    def still(self, run: Run) -> AbstractContextManager[None]:
        """All ranks have come and nothing is under way; inside, nothing begins. Collective."""

    def start_losses(self, run: Run, totals: torch.Tensor) -> CommHandle | None:
        """Nothing is summed: a rank's loss is of its own samples, which stand for all of the global batch."""
        share = run.loader.share
        assert share is not None
        own = sum(part.count for part in share.parts)
        totals[:2] *= share.batch_size / max(own, 1)
        if own == 0:  # its loss stays what it was
            totals[0], totals[1] = float(self._last[0] / self._last[1]) * share.batch_size, share.batch_size
        else:
            self._last = totals[:2].clone()
        return None

    def updated(self, run: Run) -> None:
        self.disagreement = None
        self.counts["since"] += 1
        self.staleness += 1
        self.equal = False
        self.exchange(run)
        if run.replica.parameters is not self._trained:
            with self.still(run):
                self._retrain(run)

    def finish(self, run: Run) -> None:
        with self.still(run):
            super().finish(run)

    @contextmanager
    def shown(self, run: Run, *, saving: bool = False) -> Iterator[Kept]:
        with self.still(run), super().shown(run, saving=saving) as kept:
            yield kept

    def resumed(self, run: Run, tensors: dict[str, torch.Tensor]) -> None:
        super().resumed(run, tensors)
        self.restart()
        self.meet()

    def evaluation_row(self) -> dict[str, Any]:
        return {} if self.rested is None else {"replicas": {"disagreement": self.rested}}

    def meet(self) -> None:
        """Wait until all replicas have called it."""
        self.replicas.gather(torch.zeros(1, device=self.device))

    @property
    def device(self) -> torch.device:
        return self._trained[0].device

"""Averages that are taken in some updates after they were begun: they travel while replicas go on.

x <- x + (mean(x_then) - x_then), with the parameters as they were when the average began: what a replica has learnt
meanwhile stays. With a delay of the whole period this is CoCoD-SGD (Shen et al. 2019, arXiv 1906.12043), with a shorter
one DaSGD (Zhou et al. 2020, arXiv 2006.00441).
"""

import torch

from tutti.comm.traffic import CommHandle
from tutti.config.compression import Compression
from tutti.local_sgd.average import Averaged
from tutti.local_sgd.measure import Drift
from tutti.local_sgd.travel import InTurns, Travel, parts_for, whole_legs
from tutti.local_sgd.vectors import Flats, Replicas
from tutti.trainer.run_state import Run


class Delayed(Averaged):
    """An average begins every `period` updates and is taken in `delay` updates later, 1 .. period. In a code, what it
    began from is added to the last average: x_ref + mean(code(x_then - x_ref + kept)).

    `counts["since"]`: updates since an average was begun; `counts["away"]`: whether one is under way. A resumed run
    sends it again: what left is as it was when it was saved.
    """

    def __init__(
        self,
        replicas: Replicas,
        period: int,
        delay: int,
        *,
        after: int = 0,
        corrects: bool = False,
        how: Compression | None = None,
    ) -> None:
        super().__init__(replicas, period, after=after, corrects=corrects, how=how)
        self.delay = delay
        self.counts["away"] = 0
        self._away: Travel | None = None
        self._means: Flats = []

    def start_losses(self, run: Run, totals: torch.Tensor) -> CommHandle | None:
        """What travels goes on behind the sum of the losses, and has a step's time until the next."""
        handle = super().start_losses(run, totals)
        if self._away is not None:
            self._away.go_on(self.counts["since"] + 1, handle)
        return handle

    def restart(self) -> None:
        if self._away is not None:
            self._away.drop()
            if self._coded is not None:
                self._coded.forget()
        self._away, self.counts["away"] = None, 0
        super().restart()
        self.held["then"] = self.vectors.read()
        self._means = [torch.empty_like(flat) for flat in self.held["then"]]

    def resumed(self, run: Run, tensors: dict[str, torch.Tensor]) -> None:
        super().resumed(run, tensors)
        if self.counts["away"]:
            self._leave(again=True).go_on(self.counts["since"])

    def exchange(self, run: Run) -> None:
        since = self.counts["since"]
        if self._away is not None and since >= self.delay:
            self._away.land()
            self._take_in()
            self.buffers.agree()
            self._away, self.counts["away"], self.staleness = None, 0, self.delay
        if since >= self.period:
            self._leave()
            self.counts |= {"since": 0, "away": 1}

    def _leave(self, *, again: bool = False) -> Travel:
        """What the parameters are now is to be averaged; `again`: what they were when it left before."""
        then = self.held["then"]
        for now, left in () if again else self.vectors.pieces(then):
            left.copy_(now)
        if self._how is None:
            legs = whole_legs(self.replicas, then, self._means, parts_for(self.delay, 1))
            self._away = InTurns(legs, 1, self.delay)
        else:
            self._away = self._sums(self._how).start(then, self.held["reference"], self._means, self.delay)
        return self._away

    def _take_in(self) -> None:
        """The mean is there: x <- x - (x_then - mean)."""
        drift = Drift()
        for now, mean, left in self.vectors.pieces(self._means, self.held["then"]):
            gap = left - mean
            drift.add(gap, mean)
            now.sub_(gap)
        self.disagreement = drift.figures(self.replicas)
        if self._how is not None:
            sums, before = self._sums(self._how), self.held["reference"]
            sums.settle()
            self.held |= {"reference": self._means, **sums.held()}
            self._means, self.counts["coded"] = before, sums.count

"""Averages that are taken in some updates after they were begun: they travel while replicas go on.

x <- x + (mean(x_then) - x_then), with the parameters as they were when the average began: what a replica has learnt
meanwhile stays. With a delay of the whole period this is CoCoD-SGD (Shen et al. 2019, arXiv 1906.12043), with a shorter
one DaSGD (Zhou et al. 2020, arXiv 2006.00441).
"""

import torch

from tutti.runtime.consistency.average import Averaged
from tutti.runtime.consistency.measure import from_mean
from tutti.runtime.consistency.travel import Travel, whole_legs
from tutti.runtime.consistency.vectors import Flats, Replicas
from tutti.runtime.state import Run
from tutti.spec.compression import Compression


class Delayed(Averaged):
    """An average begins every `period` updates and is taken in `delay` updates later, 1 .. period. In a code, what it
    began from is added to the last average: x_ref + mean(code(x_then - x_ref + kept)).

    `counts["since"]`: updates since an average was begun; `counts["away"]`: whether one is under way. A resumed run
    sends it again: what left is as it was when it was saved.
    """

    def __init__(
        self, replicas: Replicas, period: int, delay: int, *, after: int = 0, how: Compression | None = None
    ) -> None:
        super().__init__(replicas, period, after=after, how=how)
        self.delay = self.parts = delay
        self.counts["away"] = 0
        self._away: Travel | None = None
        self._sum: Flats = []

    def restart(self) -> None:
        if self._away is not None:
            self._away.drop()
            if self._coded is not None:
                self._coded.forget()
        self._away, self.counts["away"] = None, 0
        super().restart()
        self.held["then"] = self.vectors.read()

    def resumed(self, run: Run, tensors: dict[str, torch.Tensor]) -> None:
        super().resumed(run, tensors)
        if self.counts["away"]:
            self._leave().go_on(self.counts["since"])

    def exchange(self, run: Run) -> None:
        since = self.counts["since"]
        if self._away is not None and since < self.delay:
            self._away.go_on(since)
        elif self._away is not None:
            self._away.land()
            self._take_in()
        if since >= self.period:
            self.held["then"] = self.vectors.read()
            self.counts |= {"since": 0, "away": 1}
            self._leave()

    def _leave(self) -> Travel:
        """Begin to sum what the parameters were then."""
        then = self.held["then"]
        if self._how is None:
            self._sum = [flat.clone() for flat in then]
            legs = whole_legs(self.replicas, self._sum, self.parts)
            away = Travel(legs, 1, self.delay)
        else:
            self._sum = list(torch._foreach_sub(then, self.held["reference"]))
            away = self._sums(self._how).start(self._sum, self.delay)
        self._away = away
        return away

    def _take_in(self) -> None:
        """The sums are there."""
        then, mean = self.held["then"], self._sum
        if self._how is not None:
            self._sums(self._how).settle(mean)
        torch._foreach_div_(mean, float(self.replicas.size))
        if self._how is not None:
            torch._foreach_add_(mean, self.held["reference"])
            self.held |= {"reference": mean, **self._sums(self._how).held()}
            self.counts["coded"] = self._sums(self._how).count
        self.disagreement = from_mean(then, mean, self.replicas)
        self.vectors.add(list(torch._foreach_sub(mean, then)))
        self.buffers.agree()
        self._away, self._sum = None, []
        self.counts["away"], self.staleness = 0, self.delay

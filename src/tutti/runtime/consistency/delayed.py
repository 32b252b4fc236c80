"""Averages that are taken in some updates after they were begun: they travel while replicas go on.

x <- x + (mean(x_then) - x_then), with the parameters as they were when the average began: what a replica has learnt
meanwhile stays. With a delay of the whole period this is CoCoD-SGD (Shen et al. 2019, arXiv 1906.12043), with a shorter
one DaSGD (Zhou et al. 2020, arXiv 2006.00441).
"""

import torch

from tutti.runtime.consistency.average import Averaged
from tutti.runtime.consistency.coded import Travel
from tutti.runtime.consistency.measure import from_mean
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
        self.delay = delay
        self.counts["away"] = 0
        self._away: Whole | Travel | None = None

    def restart(self) -> None:
        if self._away is not None:
            self._away.drop()
        self._away, self.counts["away"] = None, 0
        super().restart()
        self.held["then"] = self.vectors.read()

    def resumed(self, run: Run, tensors: dict[str, torch.Tensor]) -> None:
        super().resumed(run, tensors)
        if self.counts["away"]:
            self._away = self._begun()
            for update in range(1, self.counts["since"] + 1):
                self._away.go_on(update)

    def exchange(self, run: Run) -> None:
        since = self.counts["since"]
        if self._away is not None and since < self.delay:
            self._away.go_on(since)
        elif self._away is not None:
            self._take_in(self._away)
        if since >= self.period:
            self.held["then"] = self.vectors.read()
            self._away = self._begun()
            self.counts |= {"since": 0, "away": 1}

    def _begun(self) -> "Whole | Travel":
        then = self.held["then"]
        if self._how is None:
            return Whole(self.replicas, [flat.clone() for flat in then])
        changes = list(torch._foreach_sub(then, self.held["reference"]))
        return self._sums(self._how).start(changes, self.delay)

    def _take_in(self, away: "Whole | Travel") -> None:
        then, mean = self.held["then"], away.land()
        torch._foreach_div_(mean, float(self.replicas.size))
        if self._how is not None:
            torch._foreach_add_(mean, self.held["reference"])
            sums = self._sums(self._how)
            self.held |= {"reference": mean, **sums.held()}
            self.counts["coded"] = sums.count
        self.disagreement = from_mean(then, mean, self.replicas)
        self.vectors.add(list(torch._foreach_sub(mean, then)))
        self.buffers.agree()
        self._away, self.counts["away"], self.staleness = None, 0, self.delay


class Whole:
    """A sum of `flats` as they are, under way."""

    def __init__(self, replicas: Replicas, flats: Flats) -> None:
        self._flats, self._flight = flats, replicas.start_sum(flats)

    def go_on(self, update: int) -> None:
        """It needs no help on its way."""

    def land(self) -> Flats:
        self._flight.wait()
        return self._flats

    def drop(self) -> None:
        self._flight.wait()

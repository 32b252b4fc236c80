"""Elastic averaging: replicas are drawn to a centre, and the centre to them.

EASGD (Zhang et al. 2015, arXiv 1412.6651), equations 2 and 3, synchronous: d = a (x - c) of the parameters before an
update; x <- x + update(x) - d; c <- c + sum of d over the replicas. With Nesterov momentum in the optimizer it is
EAMSGD, the pull acting on the point at which the gradient is taken, which is what torch's SGD keeps as parameters.
"""

import torch

from tutti.runtime.consistency.apart import Apart
from tutti.runtime.consistency.measure import MEASURED, from_sample
from tutti.runtime.consistency.vectors import Flats, Replicas
from tutti.runtime.state import Run
from tutti.runtime.traffic import Flight


class Elastic(Apart):
    """The sum of d travels while the next step computes. Every rank has the centre, the same bits; it is the model that
    is evaluated, saved and left at the end. `pull`: replicas times a, so that c goes so far to the replicas' mean.
    """

    def __init__(self, replicas: Replicas, period: int, pull: float) -> None:
        super().__init__(replicas, period)
        self.counts["rounds"] = 0
        self.alpha = pull / replicas.size
        self._flight: Flight | None = None
        self._own: Flats = []
        self._sum: Flats = []

    def restart(self) -> None:
        if self._flight is not None:
            self._flight.wait()
            self._flight = None
        self.held = {"centre": self.vectors.read()}

    def resumed(self, run: Run, tensors: dict[str, torch.Tensor]) -> None:
        super().resumed(run, tensors)
        self._leave()

    def exchange(self, run: Run) -> None:
        if self._flight is not None:
            self._flight.wait()
            self._flight = None
            now = list(torch._foreach_sub(self.vectors.read(), self._own))
            self.vectors.write(now)
            torch._foreach_add_(self.held["centre"], self._sum)
            if self.counts["rounds"] % MEASURED == 0:
                self.disagreement = from_sample(now, self.replicas)
            self.counts["rounds"] += 1
            self.buffers.agree()
            self.staleness = 1
        self._leave()

    def ending(self) -> Flats:
        return [flat.clone() for flat in self.held["centre"]]

    def _leave(self) -> None:
        """Begin to sum d, if it is time."""
        since = self.counts["since"]
        if since == 0 or since % self.period:
            return
        self._own = list(torch._foreach_mul(torch._foreach_sub(self.vectors.read(), self.held["centre"]), self.alpha))
        self._sum = [flat.clone() for flat in self._own]
        self._flight = self.replicas.start_sum(self._sum)

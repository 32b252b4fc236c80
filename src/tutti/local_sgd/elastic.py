"""Elastic averaging: replicas are drawn to a centre, and the centre to them.

EASGD (Zhang et al. 2015, arXiv 1412.6651), equations 2 and 3, synchronous: d = a (x - c) of the parameters before an
update; x <- x + update(x) - d; c <- c + sum of d over the replicas. With Nesterov momentum in the optimizer it is
EAMSGD, the pull acting on the point at which the gradient is taken, which is what torch's SGD keeps as parameters.
"""

import torch

from tutti.comm.traffic import CommHandle
from tutti.local_sgd.measure import MEASURED, from_sample
from tutti.local_sgd.travelling import Travelling
from tutti.local_sgd.vectors import Flats, Replicas


class Elastic(Travelling):
    """The sum of d travels while the next step computes. Every rank has the centre, the same bits; it is the model that
    is evaluated, saved and left at the end. `pull`: replicas times a, so that c goes so far to the replicas' mean.
    """

    def __init__(self, replicas: Replicas, period: int, pull: float) -> None:
        super().__init__(replicas, period)
        self.counts["rounds"] = 0
        self.alpha = pull / replicas.size
        self._own: Flats = []
        self._sum: Flats = []

    def restart(self) -> None:
        super().restart()
        self.held = {"centre": self.vectors.read()}

    def leave(self) -> CommHandle:
        self._own = list(torch._foreach_mul(torch._foreach_sub(self.vectors.read(), self.held["centre"]), self.alpha))
        self._sum = [flat.clone() for flat in self._own]
        return self.replicas.start_sum(self._sum)

    def land(self) -> None:
        now = list(torch._foreach_sub(self.vectors.read(), self._own))
        self.vectors.write(now)
        torch._foreach_add_(self.held["centre"], self._sum)
        if self.counts["rounds"] % MEASURED == 0:
            self.disagreement = from_sample(now, self.replicas)
        self.counts["rounds"] += 1
        self.buffers.agree()

    def ending(self) -> Flats:
        return [flat.clone() for flat in self.held["centre"]]

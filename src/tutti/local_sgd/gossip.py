"""Decentralised: replicas mix their parameters with few others, and their mean goes where synchronous training goes.

Ring and shift-one follow D-PSGD (Lian et al. 2017, arXiv 1705.09056): x <- W x + update(x). What is mixed is as it was
before the update, so that it travels while the next step computes. Pairs are those of Bagua's shift-one. Push follows
stochastic gradient push (Assran et al. 2018, arXiv 1811.10792, algorithm 1): every replica has x and a weight w; the
model computes at z = x / w; the update is added to x; x and w then go in equal shares to the replica itself and to
those it pushes to.
"""

from collections.abc import Callable, Sequence

import torch

from tutti.comm.traffic import CommHandle
from tutti.local_sgd.apart import Apart
from tutti.local_sgd.measure import MEASURED, from_sample
from tutti.local_sgd.travelling import Travelling
from tutti.local_sgd.vectors import Flats, Replicas
from tutti.trainer.run_state import Run

Partners = Callable[[int, int, int], dict[int, float]]
"""(mixing, replica, replicas) -> weight of every replica that is mixed in; the rest is the replica's own."""

Graph = Callable[[int, int, int], tuple[Sequence[int], Sequence[int]]]
"""(mixing, replica, replicas) -> whom the replica pushes to, and who pushes to it."""


def ring(mixing: int, index: int, size: int) -> dict[int, float]:
    """A third of both neighbours; with two replicas half of the other."""
    if size <= 2:
        return {1 - index: 0.5} if size == 2 else {}
    return {(index - 1) % size: 1 / 3, (index + 1) % size: 1 / 3}


def shift_one(mixing: int, index: int, size: int) -> dict[int, float]:
    """Half of one partner in the other half of the replicas, which shifts by one each time. `size`: even, or 1."""
    half = size // 2
    if not half:
        return {}
    if index < half:
        return {half + (index + mixing) % half: 0.5}
    return {(index - half - mixing) % half: 0.5}


class Decentralised(Apart):
    """Replicas that mix every `period` updates and are equal only in the mean."""

    def __init__(self, replicas: Replicas, period: int) -> None:
        super().__init__(replicas, period)
        self.counts["mixings"] = 0

    def mixed(self, now: Flats) -> None:
        """A mixing is done and gave the parameters `now`."""
        self.vectors.write(now)
        if self.counts["mixings"] % MEASURED == 0:
            self.disagreement = from_sample(now, self.replicas)
        self.counts["mixings"] += 1
        self.buffers.agree()


class Mixed(Travelling, Decentralised):
    """Every `period` updates a replica's parameters are mixed with its partners', by weights that are symmetric."""

    def __init__(self, replicas: Replicas, period: int, partners: Partners) -> None:
        super().__init__(replicas, period)
        self._partners = partners
        self._sent: Flats = []
        self._received: list[Flats] = []

    def leave(self) -> CommHandle:
        self._sent = self.vectors.read()
        partners = list(self._weights())
        self._received = [[torch.empty_like(flat) for flat in self._sent] for _ in partners]
        return self.replicas.start_swap(self._sent, partners, self._received, partners)

    def land(self) -> None:
        now = self.vectors.read()
        for weight, theirs in zip(self._weights().values(), self._received, strict=True):
            torch._foreach_add_(now, torch._foreach_sub(theirs, self._sent), alpha=weight)
        self.mixed(now)

    def ending(self) -> Flats:
        return self.replicas.mean(self.vectors.read())

    def _weights(self) -> dict[int, float]:
        return self._partners(self.counts["mixings"], self.replicas.index, self.replicas.size)


class Push(Decentralised):
    """Every `period` updates x and w go in equal shares to the replica itself and to those that `graph` says."""

    def __init__(self, replicas: Replicas, period: int, graph: Graph) -> None:
        super().__init__(replicas, period)
        self._graph = graph

    def restart(self) -> None:
        zeros = [torch.zeros_like(flat) for flat in self.vectors.read()]
        weight = torch.ones(1, dtype=torch.float64, device=zeros[0].device)
        self.held = {"excess": zeros, "weight": [weight]}

    def exchange(self, run: Run) -> None:
        if self.counts["since"] % self.period:
            return
        to, frm = self._graph(self.counts["mixings"], self.replicas.index, self.replicas.size)
        share = 1 / (len(to) + 1)
        mine = list(torch._foreach_mul([*self._biased(), *self.held["weight"]], share))
        received = [[torch.empty_like(flat) for flat in mine] for _ in frm]
        self.replicas.start_swap(mine, to, received, frm).wait()
        for theirs in received:
            torch._foreach_add_(mine, theirs)
        weight = mine.pop()
        now = [flat / weight.to(flat.dtype) for flat in mine]
        self.held = {"excess": list(torch._foreach_sub(mine, now)), "weight": [weight]}
        self.mixed(now)
        self.staleness = 0

    def ending(self) -> Flats:
        return self.replicas.mean(self._biased())

    def _biased(self) -> Flats:
        """x, which an update moves as far as it moves z."""
        return list(torch._foreach_add(self.vectors.read(), self.held["excess"]))


def one_peer(mixing: int, index: int, size: int) -> tuple[Sequence[int], Sequence[int]]:
    """(to, from) on the one-peer exponential graph: distances 1, 2, 4, ... below `size`, in turn."""
    if size == 1:
        return (), ()
    distance = 1 << (mixing % (size - 1).bit_length())
    return ((index + distance) % size,), ((index - distance) % size,)

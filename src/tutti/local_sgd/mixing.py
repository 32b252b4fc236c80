"""Replicas that mix their parameters with few others, or with a centre: elastic averaging, D-PSGD, gradient push.

EASGD (Zhang et al. 2015, arXiv 1412.6651), equations 2 and 3, synchronous. With d = a (x - c) for the parameters before
an update: x <- x + update(x) - d, and c <- c + the sum of d over the replicas. With Nesterov momentum in the optimizer
it is EAMSGD: the pull acts on the point at which the gradient is taken, which torch's SGD stores as the parameters.

Ring and shift-one follow D-PSGD (Lian et al. 2017, arXiv 1705.09056): x <- W x + update(x). The parameters before the
update are mixed, so that the exchange runs while the next step computes. The pairs are those of Bagua's shift-one.

Push follows stochastic gradient push (Assran et al. 2018, arXiv 1811.10792, algorithm 1). Every replica has parameters
x and a weight w, and the model computes at z = x / w. The update is added to x. Then x and w are divided equally among
the replica itself and those it pushes to. The mean of the replicas moves as in synchronous training.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch

from tutti.comm.traffic import CommHandle
from tutti.local_sgd.consistency import ModeArguments
from tutti.local_sgd.diverged_replicas import DivergedReplicas
from tutti.local_sgd.replica_group import MEASURED_EVERY, FlatVectors, ReplicaGroup, distance_from_sampled_mean
from tutti.parallel.parallel_model import ParallelModel


class OverlappedExchange(DivergedReplicas):
    """Replicas that begin an exchange every `period` updates and apply its result after the next update.

    A resumed run starts the exchange again from the saved parameters.
    """

    def __init__(self, replicas: ReplicaGroup, period: int) -> None:
        super().__init__(replicas, period)
        self._work: CommHandle | None = None

    @abstractmethod
    def begin_exchange(self) -> CommHandle:
        """Start to exchange the current parameters."""

    @abstractmethod
    def receive(self) -> None:
        """Apply the result of the completed exchange."""

    def restart(self) -> None:
        self._wait_for_exchange()

    def on_resumed(self, parallel: ParallelModel, tensors: dict[str, torch.Tensor]) -> None:
        super().on_resumed(parallel, tensors)
        self._begin_if_due()

    def exchange(self, parallel: ParallelModel) -> None:
        if self._wait_for_exchange():
            self.receive()
            self.staleness = 1
        self._begin_if_due()

    def _wait_for_exchange(self) -> bool:
        """Wait for the exchange in progress; return whether there was one."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()
        return work is not None

    def _begin_if_due(self) -> None:
        updates_since = self.counts["updates_since"]
        if updates_since > 0 and updates_since % self.period == 0:
            self._work = self.begin_exchange()


class ElasticAveraging(OverlappedExchange):
    """EASGD: replicas are pulled towards a centre, and the centre towards them.

    The differences d are summed while the next step computes. Every rank has the same centre. It is the model that is
    evaluated, saved and kept at the end of training.

    Args:
        replicas: the group.
        period: updates between two exchanges.
        pull: fraction of the distance to the replicas' mean that the centre moves in an exchange, 0 to 1. It is a times
            the number of replicas.

    Attributes:
        alpha: fraction of the distance to the centre that a replica moves; a in the equations.
    """

    def __init__(self, replicas: ReplicaGroup, period: int, pull: float) -> None:
        super().__init__(replicas, period)
        self.counts["rounds"] = 0
        self.alpha = pull / replicas.size
        self._differences: FlatVectors = []
        self._summed_differences: FlatVectors = []

    def restart(self) -> None:
        super().restart()
        self.saved_vectors = {"centre": self.vectors.read()}

    def begin_exchange(self) -> CommHandle:
        self._differences = list(
            torch._foreach_mul(torch._foreach_sub(self.vectors.read(), self.saved_vectors["centre"]), self.alpha)
        )
        self._summed_differences = [flat.clone() for flat in self._differences]
        return self.replicas.start_sum(self._summed_differences)

    def receive(self) -> None:
        new = list(torch._foreach_sub(self.vectors.read(), self._differences))
        self.vectors.write(new)
        torch._foreach_add_(self.saved_vectors["centre"], self._summed_differences)
        if self.counts["rounds"] % MEASURED_EVERY == 0:
            self.disagreement = distance_from_sampled_mean(new, self.replicas)
        self.counts["rounds"] += 1
        self.buffers.agree()

    def final_parameters(self) -> FlatVectors:
        return [flat.clone() for flat in self.saved_vectors["centre"]]


Partners = Callable[[int, int, int], dict[int, float]]
"""(mixing, replica, replicas) -> weight of every replica that is mixed in; the rest is the replica's own weight."""

Graph = Callable[[int, int, int], tuple[Sequence[int], Sequence[int]]]
"""(mixing, replica, replicas) -> (replicas that it pushes to, replicas that push to it)."""


def ring(mixing: int, index: int, size: int) -> dict[int, float]:
    """Return weights 1/3 for both neighbours on a ring; with two replicas, 1/2 for the other one."""
    if size <= 2:
        return {1 - index: 0.5} if size == 2 else {}
    return {(index - 1) % size: 1 / 3, (index + 1) % size: 1 / 3}


def shift_one(mixing: int, index: int, size: int) -> dict[int, float]:
    """Return weight 1/2 for one partner in the other half of the replicas; the pairs shift by one with each mixing.

    Args:
        mixing: number of mixings so far.
        index: this replica.
        size: number of replicas: even, or 1.
    """
    half = size // 2
    if not half:
        return {}
    if index < half:
        return {half + (index + mixing) % half: 0.5}
    return {(index - half - mixing) % half: 0.5}


class DecentralisedReplicas(DivergedReplicas):
    """Replicas that mix every `period` updates; only their mean follows synchronous training."""

    def __init__(self, replicas: ReplicaGroup, period: int) -> None:
        super().__init__(replicas, period)
        self.counts["mixings"] = 0

    def mixed(self, new: FlatVectors) -> None:
        """Complete a mixing: load its result, and measure the disagreement in every `MEASURED_EVERY`-th mixing."""
        self.vectors.write(new)
        if self.counts["mixings"] % MEASURED_EVERY == 0:
            self.disagreement = distance_from_sampled_mean(new, self.replicas)
        self.counts["mixings"] += 1
        self.buffers.agree()


class GossipMixing(OverlappedExchange, DecentralisedReplicas):
    """Replicas that mix their parameters with their partners' every `period` updates, with symmetric weights.

    Args:
        replicas: the group.
        period: updates between two mixings.
        partners: the partners of each mixing, with their weights.
    """

    def __init__(self, replicas: ReplicaGroup, period: int, partners: Partners) -> None:
        super().__init__(replicas, period)
        self._partners = partners
        self._sent: FlatVectors = []
        self._received: list[FlatVectors] = []

    def begin_exchange(self) -> CommHandle:
        self._sent = self.vectors.read()
        partners = list(self._weights())
        self._received = [[torch.empty_like(flat) for flat in self._sent] for _ in partners]
        return self.replicas.start_swap(self._sent, partners, self._received, partners)

    def receive(self) -> None:
        new = self.vectors.read()
        for weight, theirs in zip(self._weights().values(), self._received, strict=True):
            torch._foreach_add_(new, torch._foreach_sub(theirs, self._sent), alpha=weight)
        self.mixed(new)

    def final_parameters(self) -> FlatVectors:
        return self.replicas.mean(self.vectors.read())

    def _weights(self) -> dict[int, float]:
        return self._partners(self.counts["mixings"], self.replicas.index, self.replicas.size)


class StochasticGradientPush(DecentralisedReplicas):
    """Replicas that divide x and w equally among themselves and their neighbours in `graph` every `period` updates.

    Args:
        replicas: the group.
        period: updates between two mixings.
        graph: who pushes to whom in each mixing.
    """

    def __init__(self, replicas: ReplicaGroup, period: int, graph: Graph) -> None:
        super().__init__(replicas, period)
        self._graph = graph

    def restart(self) -> None:
        zeros = [torch.zeros_like(flat) for flat in self.vectors.read()]
        weight = torch.ones(1, dtype=torch.float64, device=zeros[0].device)
        self.saved_vectors = {"excess": zeros, "weight": [weight]}

    def exchange(self, parallel: ParallelModel) -> None:
        if self.counts["updates_since"] % self.period:
            return
        targets, sources = self._graph(self.counts["mixings"], self.replicas.index, self.replicas.size)
        share = 1 / (len(targets) + 1)
        pushed = list(torch._foreach_mul([*self._biased(), *self.saved_vectors["weight"]], share))
        received = [[torch.empty_like(flat) for flat in pushed] for _ in sources]
        self.replicas.start_swap(pushed, targets, received, sources).wait()
        for theirs in received:
            torch._foreach_add_(pushed, theirs)
        weight = pushed.pop()
        new = [flat / weight.to(flat.dtype) for flat in pushed]
        self.saved_vectors = {"excess": list(torch._foreach_sub(pushed, new)), "weight": [weight]}
        self.mixed(new)
        self.staleness = 0

    def final_parameters(self) -> FlatVectors:
        return self.replicas.mean(self._biased())

    def _biased(self) -> FlatVectors:
        """Return x. An update moves x as far as it moves the model's z, so x is z plus the saved `excess`."""
        return list(torch._foreach_add(self.vectors.read(), self.saved_vectors["excess"]))


def one_peer(mixing: int, index: int, size: int) -> tuple[Sequence[int], Sequence[int]]:
    """Return (to, from) on the one-peer exponential graph, whose distances are 1, 2, 4, ... below `size`, in turn."""
    if size == 1:
        return (), ()
    distance = 1 << (mixing % (size - 1).bit_length())
    return ((index + distance) % size,), ((index - distance) % size,)


def make_ring(replicas: ReplicaGroup, arguments: ModeArguments) -> GossipMixing:
    """Make replicas that mix with both neighbours on a ring."""
    return GossipMixing(replicas, arguments.period, ring)


def make_shift_one(replicas: ReplicaGroup, arguments: ModeArguments) -> GossipMixing:
    """Make replicas that mix with one partner, which shifts by one each time."""
    return GossipMixing(replicas, arguments.period, shift_one)


def make_push(replicas: ReplicaGroup, arguments: ModeArguments) -> StochasticGradientPush:
    """Make stochastic gradient push on the one-peer exponential graph."""
    return StochasticGradientPush(replicas, arguments.period, one_peer)


def make_elastic(replicas: ReplicaGroup, arguments: ModeArguments) -> ElasticAveraging:
    """Make elastic averaging with the plan's parameters."""
    assert arguments.relaxed.pull is not None
    return ElasticAveraging(replicas, arguments.period, arguments.relaxed.pull)

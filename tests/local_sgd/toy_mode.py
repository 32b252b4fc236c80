"""A consistency mode of another package: replicas go part of the way to their mean. One file, one registration."""

import torch

from local_sgd.replicas import Seen, Told, train
from tutti.config.consistency_modes import (
    ConsistencyMode,
    ReplicaTraffic,
    register_consistency_mode,
    ring_share,
)
from tutti.config.registry import REQUIRED, Parameter
from tutti.local_sgd.consistency import ModeArguments
from tutti.local_sgd.diverged_replicas import DivergedReplicas
from tutti.local_sgd.replica_group import FlatVectors, ReplicaGroup, distance_from_mean
from tutti.parallel.parallel_model import ParallelModel

NAME = "toy-halfway"


class Halfway(DivergedReplicas):
    """x <- x + share (mean(x) - x) every `period` updates."""

    def __init__(self, replicas: ReplicaGroup, period: int, share: float) -> None:
        super().__init__(replicas, period)
        self.share = share

    def restart(self) -> None:
        pass

    def exchange(self, parallel: ParallelModel) -> None:
        if self.counts["updates_since"] < self.period:
            return
        own, mean = self.vectors.read(), self.final_parameters()
        self.disagreement = distance_from_mean(own, mean, self.replicas)
        self.vectors.write([torch.lerp(x, to, self.share) for x, to in zip(own, mean, strict=True)])
        self.buffers.agree()
        self.counts["updates_since"], self.staleness = 0, 0

    def final_parameters(self) -> FlatVectors:
        return self.replicas.mean(self.vectors.read())


def make_halfway(replicas: ReplicaGroup, arguments: ModeArguments) -> Halfway:
    """The factory of the entry."""
    return Halfway(replicas, arguments.period, float(arguments.relaxed.options["share"]))


ENTRY = ConsistencyMode(
    name=NAME,
    summary="replicas go part of the way to their mean",
    parameters={
        "period": Parameter(
            default=REQUIRED,
            allowed=lambda period: period >= 2,
            requirement="give a number of updates of 2 or more",
        ),
        "share": Parameter(
            default=0.5, allowed=lambda share: 0 < share <= 1, requirement="give a number above 0 and at most 1"
        ),
    },
    traffic=ReplicaTraffic(sent_vectors=ring_share, pattern="all-reduce", passes=lambda replicas: 5.0, transient=2),
    make="local_sgd.toy_mode:make_halfway",
)


def train_with_it(told: Told) -> Seen:
    """Train on two ranks, in processes that register it first."""
    register_consistency_mode(ENTRY)
    return train(told, 2)

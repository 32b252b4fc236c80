"""Adasum: replicas' changes are added as far as they are orthogonal and averaged as far as they are parallel.

Maleki et al. 2020 (arXiv 2006.02924): a (1 - a.b / 2|a|^2) + b (1 - a.b / 2|b|^2), for each tensor; first for pairs of
replicas, then for pairs of pairs. As in Horovod, the change that each replica's optimizer made is combined.
"""

import math
import sys
from collections.abc import Callable, Sequence

import torch

from tutti.local_sgd.consistency import ModeArguments
from tutti.local_sgd.diverged_replicas import DivergedReplicas
from tutti.local_sgd.replica_group import MEASURED_EVERY, FlatVectors, ReplicaGroup, distance_from_sampled_mean
from tutti.parallel.parallel_model import ParallelModel

TINY = math.sqrt(sys.float_info.min)
"""Smaller squared lengths count as zero: such a vector is added unchanged."""


def combine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the Adasum of two tensors; products and lengths are computed in float64."""
    x, y = a.double(), b.double()
    dot, square_a, square_b = float((x * y).sum()), float(x.square().sum()), float(y.square().sum())
    weight_a = 1.0 if square_a < TINY else 1 - dot / (2 * square_a)
    weight_b = 1.0 if square_b < TINY else 1 - dot / (2 * square_b)
    return a * weight_a + b * weight_b


def adasum(
    flats: FlatVectors, replicas: ReplicaGroup, parts: Callable[[FlatVectors], Sequence[torch.Tensor]]
) -> FlatVectors:
    """Return the Adasum of `flats` over the replicas, bit-identical on all of them.

    The number of replicas need not be a power of two. Each replica beyond the largest power of two first sends its
    vectors to one below it, and gets the result at the end.

    Args:
        flats: this replica's vectors.
        replicas: the group.
        parts: (vectors) -> views of the tensors in them.
    """
    power_of_two = 1 << (replicas.size.bit_length() - 1)
    combined_flats, index = [flat.clone() for flat in flats], replicas.index
    other = [torch.empty_like(flat) for flat in flats]

    def swap(partner: int, *, sends: bool, receives: bool) -> None:
        handle = replicas.start_swap(
            combined_flats, [partner] if sends else [], [other] if receives else [], [partner] if receives else []
        )
        handle.wait()

    def add(partner: int) -> None:
        for local, theirs in zip(parts(combined_flats), parts(other), strict=True):
            first, second = (local, theirs) if index < partner else (theirs, local)
            local.copy_(combine(first, second))

    if index >= power_of_two:
        swap(index - power_of_two, sends=True, receives=False)
    elif index + power_of_two < replicas.size:
        swap(index + power_of_two, sends=False, receives=True)
        add(index + power_of_two)
    distance = 1
    while distance < power_of_two and index < power_of_two:
        swap(index ^ distance, sends=True, receives=True)
        add(index ^ distance)
        distance *= 2
    if index + power_of_two < replicas.size:
        swap(index + power_of_two, sends=True, receives=False)
    elif index >= power_of_two:
        swap(index - power_of_two, sends=False, receives=True)
        combined_flats = other
    return combined_flats


class Adasum(DivergedReplicas):
    """Replicas that combine their changes by Adasum every `period` updates: x <- reference + adasum(x - reference).

    The reference is the result of the last exchange. Every replica keeps its own optimizer state.

    Args:
        replicas: the group.
        period: updates between two exchanges.
    """

    def __init__(self, replicas: ReplicaGroup, period: int) -> None:
        super().__init__(replicas, period)
        self.counts["rounds"] = 0

    def restart(self) -> None:
        self.saved_vectors = {"reference": self.vectors.read()}

    def exchange(self, parallel: ParallelModel) -> None:
        if self.counts["updates_since"] < self.period:
            return
        if self.counts["rounds"] % MEASURED_EVERY == 0:
            self.disagreement = distance_from_sampled_mean(self.vectors.read(), self.replicas)
        self.counts["rounds"] += 1
        self.vectors.write(self.final_parameters())
        self.buffers.agree()
        self._restart_equal()

    def final_parameters(self) -> FlatVectors:
        change = list(torch._foreach_sub(self.vectors.read(), self.saved_vectors["reference"]))
        combined = adasum(change, self.replicas, self.vectors.parts)
        return list(torch._foreach_add(self.saved_vectors["reference"], combined))


def make_adasum(replicas: ReplicaGroup, arguments: ModeArguments) -> Adasum:
    """Make the Adasum mode with the plan's parameters."""
    return Adasum(replicas, arguments.period)

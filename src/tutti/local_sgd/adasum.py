"""Adasum: what replicas changed is added as far as it is orthogonal and averaged as far as it is parallel.

Maleki et al. 2020 (arXiv 2006.02924): a (1 - a.b / 2|a|^2) + b (1 - a.b / 2|b|^2), tensor by tensor, pairs of replicas
first, then pairs of pairs. As Horovod does it, what is combined is the change that each replica's optimizer made.
"""

import math
import sys
from collections.abc import Callable, Sequence

import torch

from tutti.local_sgd.apart import Apart
from tutti.local_sgd.measure import MEASURED, from_sample
from tutti.local_sgd.vectors import Flats, Replicas
from tutti.trainer.run_state import Run

TINY = math.sqrt(sys.float_info.min)
"""Squared lengths below it are zero: such a vector is added as it is."""


def combine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Adasum of two tensors; products and lengths in float64."""
    x, y = a.double(), b.double()
    dot, of_a, of_b = float((x * y).sum()), float(x.square().sum()), float(y.square().sum())
    keep_a = 1.0 if of_a < TINY else 1 - dot / (2 * of_a)
    keep_b = 1.0 if of_b < TINY else 1 - dot / (2 * of_b)
    return a * keep_a + b * keep_b


def adasum(flats: Flats, replicas: Replicas, parts: Callable[[Flats], Sequence[torch.Tensor]]) -> Flats:
    """Adasum of `flats` over the replicas, the same bits on all of them. `parts`: views of the tensors in vectors.

    Replicas beyond the largest power of two give theirs to one below it first, and get the result at the end.
    """
    whole = 1 << (replicas.size.bit_length() - 1)
    mine, index = [flat.clone() for flat in flats], replicas.index
    other = [torch.empty_like(flat) for flat in flats]

    def meet(partner: int, *, sends: bool, receives: bool) -> None:
        handle = replicas.start_swap(
            mine, [partner] if sends else [], [other] if receives else [], [partner] if receives else []
        )
        handle.wait()

    def add(partner: int) -> None:
        for own, theirs in zip(parts(mine), parts(other), strict=True):
            first, second = (own, theirs) if index < partner else (theirs, own)
            own.copy_(combine(first, second))

    if index >= whole:
        meet(index - whole, sends=True, receives=False)
    elif index + whole < replicas.size:
        meet(index + whole, sends=False, receives=True)
        add(index + whole)
    distance = 1
    while distance < whole and index < whole:
        meet(index ^ distance, sends=True, receives=True)
        add(index ^ distance)
        distance *= 2
    if index + whole < replicas.size:
        meet(index + whole, sends=True, receives=False)
    elif index >= whole:
        meet(index - whole, sends=False, receives=True)
        mine = other
    return mine


class Adasum(Apart):
    """x <- x_before + adasum(x - x_before) every `period` updates; optimizers' states stay each replica's own."""

    def __init__(self, replicas: Replicas, period: int) -> None:
        super().__init__(replicas, period)
        self.counts["rounds"] = 0

    def restart(self) -> None:
        self.held = {"reference": self.vectors.read()}

    def exchange(self, run: Run) -> None:
        if self.counts["since"] < self.period:
            return
        if self.counts["rounds"] % MEASURED == 0:
            self.disagreement = from_sample(self.vectors.read(), self.replicas)
        self.counts["rounds"] += 1
        self.vectors.write(self.ending())
        self.buffers.agree()
        self._alike()

    def ending(self) -> Flats:
        change = list(torch._foreach_sub(self.vectors.read(), self.held["reference"]))
        combined = adasum(change, self.replicas, self.vectors.parts)
        return list(torch._foreach_add(self.held["reference"], combined))

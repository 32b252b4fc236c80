"""Replicas that are averaged every so often: local SGD, post-local SGD, one average at the end, DiLoCo.

Local SGD: Stich 2018 (arXiv 1805.09767); post-local: Lin et al. 2018 (arXiv 1808.07217); DiLoCo: Douillard et al. 2023
(arXiv 2311.08105), whose outer optimizer takes x_before - mean(x) for a gradient.
"""

import torch

from tutti.runtime.consistency.apart import Apart
from tutti.runtime.consistency.measure import from_mean
from tutti.runtime.consistency.states import average_states
from tutti.runtime.consistency.vectors import Flats, Replicas
from tutti.runtime.state import Run

NEVER = 1 << 62
"""A period that no run reaches: replicas are averaged when training ends."""


class Averaged(Apart):
    """x <- mean(x) every `period` updates. `after`: updates that are synchronous before. `states`: the optimizers'
    state is averaged too; otherwise every replica keeps its own.
    """

    def __init__(self, replicas: Replicas, period: int, *, after: int = 0, states: bool = False) -> None:
        super().__init__(replicas, period)
        self.after, self.states = after, states

    def begin(self, run: Run) -> None:
        if run.progress.step >= self.after:
            super().begin(run)

    def updated(self, run: Run) -> None:
        if self.apart:
            super().updated(run)
        elif run.progress.step + 1 >= self.after:
            super().begin(run)

    def restart(self) -> None:
        pass

    def exchange(self, run: Run) -> None:
        if self.counts["since"] < self.period:
            return
        own, mean = self.vectors.read(), self._mean()
        self.disagreement = from_mean(own, mean, self.replicas)
        self.vectors.write(self.combined(mean))
        self.buffers.agree()
        if self.states:
            average_states(run, self.replicas)
        self._alike()

    def ending(self) -> Flats:
        return self._mean()

    def combined(self, mean: Flats) -> Flats:
        """What replicas go on from, given their mean."""
        return mean

    def _mean(self) -> Flats:
        return self.replicas.mean(self.vectors.read())


class DiLoCo(Averaged):
    """x <- x_before - rate (d + momentum v), with d = x_before - mean(x) and v <- momentum v + d (Nesterov)."""

    def __init__(self, replicas: Replicas, period: int, *, rate: float, momentum: float) -> None:
        super().__init__(replicas, period)
        self.rate, self.momentum = rate, momentum

    def restart(self) -> None:
        before = self.held.get("velocity")
        reference = self.vectors.read()
        velocity = before if before is not None else [torch.zeros_like(flat) for flat in reference]
        self.held = {"reference": reference, "velocity": velocity}

    def ending(self) -> Flats:
        return self._outer(self._mean())[0]

    def combined(self, mean: Flats) -> Flats:
        result, self.held["velocity"] = self._outer(mean)
        return result

    def finish(self, run: Run) -> None:
        if not self.equal:
            _, velocity = self._outer(self._mean())
            super().finish(run)
            self.held["velocity"] = velocity

    def _outer(self, mean: Flats) -> tuple[Flats, Flats]:
        """(parameters, velocity) after an outer update."""
        change = torch._foreach_sub(self.held["reference"], mean)
        velocity = torch._foreach_add(change, self.held["velocity"], alpha=self.momentum)
        direction = torch._foreach_add(change, velocity, alpha=self.momentum)
        return list(torch._foreach_add(self.held["reference"], direction, alpha=-self.rate)), list(velocity)

"""Replicas that are averaged every so often: local SGD, post-local SGD, one average at the end, DiLoCo.

Local SGD: Stich 2018 (arXiv 1805.09767); post-local: Lin et al. 2018 (arXiv 1808.07217); DiLoCo: Douillard et al. 2023
(arXiv 2311.08105), whose outer optimizer takes x_before - mean(x) for a gradient. In a code, replicas tell each other
how far they went since they were equal, and keep what the code leaves out for the next time: Qsparse-local-SGD, Basu
et al. 2019 (arXiv 1906.02367).
"""

import torch

from tutti.runtime.consistency.apart import Apart
from tutti.runtime.consistency.coded import CodedSums
from tutti.runtime.consistency.measure import from_mean
from tutti.runtime.consistency.states import average_states
from tutti.runtime.consistency.vectors import Flats, Replicas
from tutti.runtime.state import Run
from tutti.spec.compression import Compression

NEVER = 1 << 62
"""A period that no run reaches: replicas are averaged when training ends."""


class Averaged(Apart):
    """x <- mean(x) every `period` updates. `after`: updates that are synchronous before. `states`: the optimizers'
    state is averaged too; otherwise every replica keeps its own. `how`: the code of a mean, x <- x_before +
    mean(code(x - x_before + kept)); with None, and of the last one, the values themselves are averaged. `delay`:
    updates that are made while an average travels.
    """

    delay = 0

    def __init__(
        self,
        replicas: Replicas,
        period: int,
        *,
        after: int = 0,
        states: bool = False,
        how: Compression | None = None,
    ) -> None:
        super().__init__(replicas, period)
        self.after, self.states = after, states
        self._how = how if replicas.size > 1 else None
        self._coded: CodedSums | None = None

    def begin(self, run: Run) -> None:
        if run.progress.step >= self.after:
            super().begin(run)

    def updated(self, run: Run) -> None:
        if self.apart:
            super().updated(run)
        elif run.progress.step + 1 >= self.after:
            super().begin(run)

    def restart(self) -> None:
        self.held = {} if self._how is None else {"reference": self.vectors.read(), **self._sums(self._how).held()}

    def resumed(self, run: Run, tensors: dict[str, torch.Tensor]) -> None:
        super().resumed(run, tensors)
        if self._how is not None:
            self._sums(self._how).count = self.counts["coded"]

    def exchange(self, run: Run) -> None:
        if self.counts["since"] < self.period:
            return
        mean = self._mean() if self._how is None else self._coded_mean(self._how)
        self.disagreement = from_mean(self.vectors.tensors, self.vectors.parts(mean), self.replicas)
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

    def _coded_mean(self, how: Compression) -> Flats:
        before, sums = self.held["reference"], self._sums(how)
        changes = [torch.empty_like(flat) for flat in before]
        for now, equal, change in self.vectors.pieces(before, changes):
            torch.sub(now, equal, out=change)
        sums.sum(changes)
        self.counts["coded"] = sums.count
        for equal, change in zip(before, changes, strict=True):
            torch.add(equal, change, alpha=1.0 / self.replicas.size, out=change)
        return changes

    def _sums(self, how: Compression) -> CodedSums:
        """Those of the parameters that are trained now; of others what was kept back is dropped."""
        if self._coded is None or self._coded.vectors is not self.vectors:
            self._coded, self.counts["coded"] = CodedSums(self.replicas, how, self.vectors, self.delay), 0
        return self._coded


class DiLoCo(Averaged):
    """x <- x_before - rate (d + momentum v), with d = x_before - mean(x) and v <- momentum v + d (Nesterov)."""

    def __init__(
        self, replicas: Replicas, period: int, *, rate: float, momentum: float, how: Compression | None = None
    ) -> None:
        super().__init__(replicas, period, how=how)
        self.rate, self.momentum = rate, momentum

    def restart(self) -> None:
        before = self.held.get("velocity")
        super().restart()
        reference = self.held.get("reference") or self.vectors.read()
        velocity = before if before is not None else [torch.zeros_like(flat) for flat in reference]
        self.held |= {"reference": reference, "velocity": velocity}

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
        """(parameters, velocity) after an outer update; the parameters where the mean was."""
        velocities = []
        for value, before, velocity in zip(mean, self.held["reference"], self.held["velocity"], strict=True):
            change = torch.sub(before, value, out=value)
            velocities.append(torch.add(change, velocity, alpha=self.momentum))
            direction = change.add_(velocities[-1], alpha=self.momentum)
            torch.add(before, direction, alpha=-self.rate, out=value)
        return mean, velocities

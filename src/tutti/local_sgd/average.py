"""Replicas that are averaged every so often: local SGD, post-local SGD, one average at the end, DiLoCo.

Local SGD: Stich 2018 (arXiv 1805.09767); post-local: Lin et al. 2018 (arXiv 1808.07217); DiLoCo: Douillard et al. 2023
(arXiv 2311.08105), whose outer optimizer takes x_before - mean(x) for a gradient. In a code, replicas tell each other
how far they went since they were equal, and keep what the code leaves out for the next time: Qsparse-local-SGD, Basu
et al. 2019 (arXiv 1906.02367).
"""

import torch

from tutti.comm.traffic import CommHandle
from tutti.config.compression import Compression
from tutti.local_sgd.apart import Apart
from tutti.local_sgd.coded import CodedSums
from tutti.local_sgd.measure import Drift
from tutti.local_sgd.moments import Moments, check_moments
from tutti.local_sgd.states import average_states
from tutti.local_sgd.vectors import Flats, Replicas
from tutti.trainer.run_state import Run

NEVER = 1 << 62
"""A period that no run reaches: replicas are averaged when training ends."""


class Averaged(Apart):
    """x <- mean(x) every `period` updates. `after`: updates that are synchronous before. `states`: the optimizers'
    state is averaged too; otherwise every replica keeps its own. `corrects`: its second moments are corrected for that
    (moments.py). `how`: the code of a mean, x <- x_before +
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
        corrects: bool = False,
        how: Compression | None = None,
    ) -> None:
        super().__init__(replicas, period)
        self.after, self.states, self.corrects = after, states, corrects
        self._moments: Moments | None = None
        self._how = how if replicas.size > 1 else None
        self._coded: CodedSums | None = None
        self._room: Flats = []

    def begin(self, run: Run) -> None:
        for optimizer in run.optimizers if self.corrects else ():
            check_moments(optimizer)
        if run.progress.step >= self.after:
            super().begin(run)

    def start_losses(self, run: Run, totals: torch.Tensor) -> CommHandle | None:
        handle = super().start_losses(run, totals)
        if self._moments is not None:
            self._moments.start()
        return handle

    def updated(self, run: Run) -> None:
        if self.apart:
            if self._moments is not None:
                self._moments.updated()
            super().updated(run)
        elif run.progress.step + 1 >= self.after:
            super().begin(run)

    def _take(self, run: Run) -> None:
        super()._take(run)
        if self.corrects and self.replicas.size > 1:
            if self._moments is not None:
                self._moments.drop()
            self._moments = Moments(self.replicas, run.optimizers, self._trained)

    def restart(self) -> None:
        self._room = []
        self.held = {} if self._how is None else {"reference": self.vectors.read(), **self._sums(self._how).held()}
        if self._moments is not None:
            self.held["moments"] = self._moments.kept

    def resumed(self, run: Run, tensors: dict[str, torch.Tensor]) -> None:
        super().resumed(run, tensors)
        if self._how is not None:
            self._sums(self._how).count = self.counts["coded"]

    def exchange(self, run: Run) -> None:
        if self.counts["since"] < self.period:
            return
        self.average()
        self.buffers.agree()
        if self.states:
            average_states(run, self.replicas)
        self.equal, self.staleness, self.counts["since"] = True, 0, 0

    def average(self) -> None:
        """x <- mean(x), or what is combined with it, some values at a time; that is what was equal from now on."""
        sums, drift, size = self._summed(), Drift(), self.replicas.size
        for now, total, *own in self.vectors.pieces(sums, *(self.held[name] for name in self.combines)):
            mean = total.div_(size) if self._how is None else torch.add(own[0], total, alpha=1.0 / size, out=total)
            drift.add(now.to(mean.dtype) - mean, mean)
            now.copy_(self.combined(mean, *own))
            if own:
                own[0].copy_(now)
        self.disagreement = drift.figures(self.replicas)

    @property
    def combines(self) -> tuple[str, ...]:
        """What of `held` the mean is combined with: first what was equal."""
        return () if self._how is None else ("reference",)

    def combined(self, mean: torch.Tensor, *own: torch.Tensor) -> torch.Tensor:
        """What replicas go on from, given some values of their mean and of what it is combined with."""
        return mean

    def ending(self) -> Flats:
        return self._mean()

    def _mean(self) -> Flats:
        return self.replicas.mean(self.vectors.read())

    def _summed(self) -> Flats:
        """The sum over the replicas of x or, in a code, of how far each went since all were equal."""
        self._room = self._room or self.vectors.empty()
        if self._how is None:
            for now, room in self.vectors.pieces(self._room):
                room.copy_(now)
            self.replicas.start_sum(self._room).wait()
            return self._room
        for now, equal, room in self.vectors.pieces(self.held["reference"], self._room):
            torch.sub(now, equal, out=room)
        sums = self._sums(self._how)
        sums.sum(self._room)
        self.held |= sums.held()
        self.counts["coded"] = sums.count
        return self._room

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

    @property
    def combines(self) -> tuple[str, ...]:
        return "reference", "velocity"

    def combined(self, mean: torch.Tensor, *own: torch.Tensor) -> torch.Tensor:
        before, velocity = own
        change = before - mean
        torch.add(change, velocity, alpha=self.momentum, out=velocity)
        direction = change.add_(velocity, alpha=self.momentum)
        return torch.add(before, direction, alpha=-self.rate)

    def ending(self) -> Flats:
        return self._outer()[0]

    def finish(self, run: Run) -> None:
        if not self.equal:
            _, velocity = self._outer()
            super().finish(run)
            self.held["velocity"] = velocity

    def _outer(self) -> tuple[Flats, Flats]:
        """(parameters, velocity) after an outer update, which is not made."""
        velocities = [velocity.clone() for velocity in self.held["velocity"]]
        values = zip(self._mean(), self.held["reference"], velocities, strict=True)
        return [self.combined(*one) for one in values], velocities

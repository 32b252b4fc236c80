"""Replicas that are averaged periodically: local SGD, post-local SGD, one-shot averaging, DiLoCo, delayed averages.

Local SGD: Stich 2018 (arXiv 1805.09767); post-local: Lin et al. 2018 (arXiv 1808.07217); DiLoCo: Douillard et al. 2023
(arXiv 2311.08105), whose outer optimizer uses x_before - mean(x) as a gradient. With a codec, replicas send how far
they moved since they were equal, and add what the codec leaves out to the next average: Qsparse-local-SGD, Basu et al.
2019 (arXiv 1906.02367).

A delayed average runs while replicas continue to train, and they take in its result some updates after it began: x <- x
+ (mean(x_then) - x_then), where x_then are the parameters when it began. So what a replica has learnt in between is not
lost. With a delay of the whole period this is CoCoD-SGD (Shen et al. 2019, arXiv 1906.12043), with a shorter one DaSGD
(Zhou et al. 2020, arXiv 2006.00441).
"""

import torch

from tutti.comm.traffic import CommHandle
from tutti.config.compression import Compression
from tutti.data.batches import BatchShare
from tutti.local_sgd.consistency import ModeArguments
from tutti.local_sgd.delayed_reduction import (
    CompressedReplicaSum,
    DelayedReduction,
    ReductionInRounds,
    chunks_for_updates,
    mean_chunks,
)
from tutti.local_sgd.diverged_replicas import DivergedReplicas, average_optimizer_states
from tutti.local_sgd.replica_group import Drift, FlatVectors, ReplicaGroup
from tutti.local_sgd.second_moments import SecondMomentCorrection, check_correctable
from tutti.parallel.parallel_model import ParallelModel

NEVER = 1 << 62
"""A period that no run reaches: replicas are averaged when training ends."""


class LocalSgd(DivergedReplicas):
    """Replicas that are averaged every `period` updates: x <- mean(x).

    With a codec, x <- x_before + mean(code(x - x_before + residual)); the last average is always of the parameters
    themselves.

    Args:
        replicas: the group.
        period: updates between two averages.
        after: number of synchronous updates before the first local one.
        states: whether to average the optimizers' state too; otherwise every replica keeps its own.
        corrects: whether to correct the optimizers' second moments (second_moments.py).
        compression: the codec of the changes; None: the parameters themselves are averaged.

    Attributes:
        delay: updates between the beginning of an average and its end; 0: replicas wait for it.
    """

    delay = 0

    def __init__(
        self,
        replicas: ReplicaGroup,
        period: int,
        *,
        after: int = 0,
        states: bool = False,
        corrects: bool = False,
        compression: Compression | None = None,
    ) -> None:
        super().__init__(replicas, period)
        self.after, self.states, self.corrects = after, states, corrects
        self._moments: SecondMomentCorrection | None = None
        self._compression = compression if replicas.size > 1 else None
        self._coded: CompressedReplicaSum | None = None
        self._room: FlatVectors = []

    def begin(self, parallel: ParallelModel, step: int) -> None:
        for optimizer in parallel.optimizers if self.corrects else ():
            check_correctable(optimizer)
        if step >= self.after:
            super().begin(parallel, step)

    def start_losses(self, parallel: ParallelModel, totals: torch.Tensor, share: BatchShare) -> CommHandle | None:
        work = super().start_losses(parallel, totals, share)
        if self._moments is not None:
            self._moments.start()
        return work

    def updated(self, parallel: ParallelModel, step: int) -> None:
        if self.diverged:
            if self._moments is not None:
                self._moments.updated()
            super().updated(parallel, step)
        elif step + 1 >= self.after:
            super().begin(parallel, step)

    def _take(self, parallel: ParallelModel) -> None:
        super()._take(parallel)
        if self.corrects and self.replicas.size > 1:
            if self._moments is not None:
                self._moments.cancel()
            self._moments = SecondMomentCorrection(self.replicas, parallel.optimizers, self._trained)

    def restart(self) -> None:
        self._room = []
        self.saved_vectors = (
            {}
            if self._compression is None
            else {"reference": self.vectors.read(), **self._sums(self._compression).saved_tensors()}
        )
        if self._moments is not None:
            self.saved_vectors["moments"] = self._moments.sums

    def on_resumed(self, parallel: ParallelModel, tensors: dict[str, torch.Tensor]) -> None:
        super().on_resumed(parallel, tensors)
        if self._compression is not None:
            self._sums(self._compression).count = self.counts["coded"]

    def exchange(self, parallel: ParallelModel) -> None:
        if self.counts["since"] < self.period:
            return
        self.average()
        self.buffers.agree()
        if self.states:
            average_optimizer_states(parallel, self.replicas)
        self.equal, self.staleness, self.counts["since"] = True, 0, 0

    def average(self) -> None:
        """Average the parameters or combine them with their mean, piece by piece.

        The result is the common point from now on.
        """
        sums, drift, size = self._summed(), Drift(), self.replicas.size
        for now, total, *saved in self.vectors.pieces(sums, *(self.saved_vectors[name] for name in self.combines)):
            mean = (
                total.div_(size)
                if self._compression is None
                else torch.add(saved[0], total, alpha=1.0 / size, out=total)
            )
            drift.add(now.to(mean.dtype) - mean, mean)
            now.copy_(self.combined(mean, *saved))
            if saved:
                saved[0].copy_(now)
        self.disagreement = drift.figures(self.replicas)

    @property
    def combines(self) -> tuple[str, ...]:
        """Names of the saved vectors with which the mean is combined, the common point first."""
        return () if self._compression is None else ("reference",)

    def combined(self, mean: torch.Tensor, *own: torch.Tensor) -> torch.Tensor:
        """Return the values from which replicas go on.

        Args:
            mean: a piece of the replicas' mean.
            own: the same piece of each saved vector that `combines` names; may be changed in place.
        """
        return mean

    def final_parameters(self) -> FlatVectors:
        return self._mean()

    def _mean(self) -> FlatVectors:
        """Return the replicas' mean."""
        return self.replicas.mean(self.vectors.read())

    def _summed(self) -> FlatVectors:
        """Return the sum over the replicas of x or, with a codec, of how far each moved from the common point."""
        self._room = self._room or self.vectors.empty()
        if self._compression is None:
            for now, buffer in self.vectors.pieces(self._room):
                buffer.copy_(now)
            self.replicas.start_sum(self._room).wait()
            return self._room
        for now, reference, buffer in self.vectors.pieces(self.saved_vectors["reference"], self._room):
            torch.sub(now, reference, out=buffer)
        sums = self._sums(self._compression)
        sums.sum(self._room)
        self.saved_vectors |= sums.saved_tensors()
        self.counts["coded"] = sums.count
        return self._room

    def _sums(self, compression: Compression) -> CompressedReplicaSum:
        """Return the compressed sum of the trained parameters; residuals of other parameters are dropped."""
        if self._coded is None or self._coded.vectors is not self.vectors:
            self._coded, self.counts["coded"] = (
                CompressedReplicaSum(self.replicas, compression, self.vectors, self.delay),
                0,
            )
        return self._coded


class DiLoCo(LocalSgd):
    """Replicas whose mean change is the gradient of an outer optimizer, SGD with Nesterov momentum.

    With d = x_before - mean(x): v <- momentum v + d, and x <- x_before - rate (d + momentum v).

    Args:
        replicas: the group.
        period: updates between two outer updates.
        rate: learning rate of the outer optimizer.
        momentum: momentum of the outer optimizer.
        compression: the codec of the changes; None: the parameters themselves are averaged.
    """

    def __init__(
        self,
        replicas: ReplicaGroup,
        period: int,
        *,
        rate: float,
        momentum: float,
        compression: Compression | None = None,
    ) -> None:
        super().__init__(replicas, period, compression=compression)
        self.rate, self.momentum = rate, momentum

    def restart(self) -> None:
        before = self.saved_vectors.get("velocity")
        super().restart()
        reference = self.saved_vectors.get("reference") or self.vectors.read()
        velocity = before if before is not None else [torch.zeros_like(flat) for flat in reference]
        self.saved_vectors |= {"reference": reference, "velocity": velocity}

    @property
    def combines(self) -> tuple[str, ...]:
        return "reference", "velocity"

    def combined(self, mean: torch.Tensor, *own: torch.Tensor) -> torch.Tensor:
        before, velocity = own
        change = before - mean
        torch.add(change, velocity, alpha=self.momentum, out=velocity)
        direction = change.add_(velocity, alpha=self.momentum)
        return torch.add(before, direction, alpha=-self.rate)

    def final_parameters(self) -> FlatVectors:
        return self._outer()[0]

    def finish(self, parallel: ParallelModel) -> None:
        if not self.equal:
            _, velocity = self._outer()
            super().finish(parallel)
            self.saved_vectors["velocity"] = velocity

    def _outer(self) -> tuple[FlatVectors, FlatVectors]:
        """Return (parameters, velocity) after an outer update, without applying it."""
        velocities = [velocity.clone() for velocity in self.saved_vectors["velocity"]]
        values = zip(self._mean(), self.saved_vectors["reference"], velocities, strict=True)
        return [self.combined(*vectors) for vectors in values], velocities


class DelayedAverage(LocalSgd):
    """Replicas that begin an average every `period` updates and take it in `delay` updates later.

    With a codec, the mean change is added to the result of the last average, x_ref + mean(code(x_then - x_ref +
    residual)). A resumed run starts the average in progress again, from the saved parameters.

    `counts["since"]`: updates since an average began; `counts["away"]`: 1 while an average is in progress.

    Args:
        replicas: the group.
        period: updates between the beginnings of two averages.
        delay: updates between the beginning of an average and its end, 1 to `period`.
        after: number of synchronous updates before the first local one.
        corrects: whether to correct the optimizers' second moments (second_moments.py).
        compression: the codec of the changes; None: the parameters themselves are averaged.
    """

    def __init__(
        self,
        replicas: ReplicaGroup,
        period: int,
        delay: int,
        *,
        after: int = 0,
        corrects: bool = False,
        compression: Compression | None = None,
    ) -> None:
        super().__init__(replicas, period, after=after, corrects=corrects, compression=compression)
        self.delay = delay
        self.counts["away"] = 0
        self._delayed: DelayedReduction | None = None
        self._means: FlatVectors = []

    def start_losses(self, parallel: ParallelModel, totals: torch.Tensor, share: BatchShare) -> CommHandle | None:
        """Start the all-reduce of the losses, and advance the average in progress behind it.

        The rounds that start here have a step's time until the next ones.
        """
        work = super().start_losses(parallel, totals, share)
        if self._delayed is not None:
            self._delayed.advance(self.counts["since"] + 1, work)
        return work

    def restart(self) -> None:
        if self._delayed is not None:
            self._delayed.cancel()
            if self._coded is not None:
                self._coded.forget()
        self._delayed, self.counts["away"] = None, 0
        super().restart()
        self.saved_vectors["then"] = self.vectors.read()
        self._means = [torch.empty_like(flat) for flat in self.saved_vectors["then"]]

    def on_resumed(self, parallel: ParallelModel, tensors: dict[str, torch.Tensor]) -> None:
        super().on_resumed(parallel, tensors)
        if self.counts["away"]:
            self._leave(again=True).advance(self.counts["since"])

    def exchange(self, parallel: ParallelModel) -> None:
        since = self.counts["since"]
        if self._delayed is not None and since >= self.delay:
            self._delayed.finish()
            self._take_in()
            self.buffers.agree()
            self._delayed, self.counts["away"], self.staleness = None, 0, self.delay
        if since >= self.period:
            self._leave()
            self.counts |= {"since": 0, "away": 1}

    def _leave(self, *, again: bool = False) -> DelayedReduction:
        """Start to average the present parameters.

        Args:
            again: whether to average instead those of the average that was in progress when the run was saved.
        """
        then = self.saved_vectors["then"]
        for now, snapshot in () if again else self.vectors.pieces(then):
            snapshot.copy_(now)
        if self._compression is None:
            chunks = mean_chunks(self.replicas, then, self._means, chunks_for_updates(self.delay, 1))
            self._delayed = ReductionInRounds(chunks, 1, self.delay)
        else:
            self._delayed = self._sums(self._compression).start(
                then, self.saved_vectors["reference"], self._means, self.delay
            )
        return self._delayed

    def _take_in(self) -> None:
        """Take in the mean that has arrived: x <- x - (x_then - mean)."""
        drift = Drift()
        for now, mean, snapshot in self.vectors.pieces(self._means, self.saved_vectors["then"]):
            gap = snapshot - mean
            drift.add(gap, mean)
            now.sub_(gap)
        self.disagreement = drift.figures(self.replicas)
        if self._compression is not None:
            sums, before = self._sums(self._compression), self.saved_vectors["reference"]
            sums.commit()
            self.saved_vectors |= {"reference": self._means, **sums.saved_tensors()}
            self._means, self.counts["coded"] = before, sums.count


def make_local_sgd(replicas: ReplicaGroup, arguments: ModeArguments) -> LocalSgd:
    """Make local, post-local or one-shot averaging, which differ in their parameters."""
    relaxed, compression = arguments.relaxed, arguments.compression
    after, corrects = relaxed.after or 0, relaxed.optimizer_state == "corrected"
    if relaxed.delay:
        return DelayedAverage(
            replicas, arguments.period, relaxed.delay, after=after, corrects=corrects, compression=compression
        )
    states = relaxed.optimizer_state == "averaged"
    return LocalSgd(
        replicas, relaxed.period or NEVER, after=after, states=states, corrects=corrects, compression=compression
    )


def make_diloco(replicas: ReplicaGroup, arguments: ModeArguments) -> DiLoCo:
    """Make DiLoCo with the plan's parameters."""
    rate, momentum = arguments.relaxed.outer_rate, arguments.relaxed.outer_momentum
    assert rate is not None
    assert momentum is not None
    return DiLoCo(replicas, arguments.period, rate=rate, momentum=momentum, compression=arguments.compression)

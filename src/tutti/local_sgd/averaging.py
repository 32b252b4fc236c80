"""Replicas that are averaged periodically: local SGD, post-local SGD, one-shot averaging, DiLoCo, delayed averages.

Local SGD: Stich 2018 (arXiv 1805.09767); post-local: Lin et al. 2018 (arXiv 1808.07217); DiLoCo: Douillard et al. 2023
(arXiv 2311.08105), whose outer optimizer uses reference - mean(x) as a gradient. The reference is the result of the
last average, which all replicas have. With a codec, replicas send their change since the last average, and add what the
codec leaves out to the next one: Qsparse-local-SGD, Basu et al. 2019 (arXiv 1906.02367).

A delayed average runs while replicas continue to train, and they apply the result `delay` updates later: x <- x +
(mean(snapshot) - snapshot), where the snapshot is a replica's parameters when the average began. So a replica keeps
what it has learnt meanwhile. With a delay of the whole period this is CoCoD-SGD (Shen et al. 2019, arXiv 1906.12043),
with a shorter one DaSGD (Zhou et al. 2020, arXiv 2006.00441).
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
"""A period that no run reaches: replicas are averaged only when training ends (one-shot averaging)."""


class LocalSgd(DivergedReplicas):
    """Replicas that are averaged every `period` updates: x <- mean(x).

    With a codec, x <- reference + mean(encode(x - reference + residual)), where the reference is the last average. The
    average at the end of training is never compressed.

    Args:
        replicas: the group.
        period: updates between two averages.
        start_step: number of synchronous updates before the first local one.
        average_optimizer_state: whether to average the optimizers' state too; otherwise every replica keeps its own.
        correct_moments: whether to correct the optimizers' second moments (second_moments.py).
        compression: the codec of the changes; None: the parameters themselves are averaged.

    Attributes:
        delay: updates between the beginning of an average and applying its result; 0: replicas wait for it.
    """

    delay = 0

    def __init__(
        self,
        replicas: ReplicaGroup,
        period: int,
        *,
        start_step: int = 0,
        average_optimizer_state: bool = False,
        correct_moments: bool = False,
        compression: Compression | None = None,
    ) -> None:
        super().__init__(replicas, period)
        self.start_step = start_step
        self.average_optimizer_state, self.correct_moments = average_optimizer_state, correct_moments
        self._moments: SecondMomentCorrection | None = None
        self._compression = compression if replicas.size > 1 else None
        self._cached_sum: CompressedReplicaSum | None = None
        self._scratch: FlatVectors = []

    def begin(self, parallel: ParallelModel, step: int) -> None:
        for optimizer in parallel.optimizers if self.correct_moments else ():
            check_correctable(optimizer)
        if step >= self.start_step:
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
        elif step + 1 >= self.start_step:
            super().begin(parallel, step)

    def _track_parameters(self, parallel: ParallelModel) -> None:
        super()._track_parameters(parallel)
        if self.correct_moments and self.replicas.size > 1:
            if self._moments is not None:
                self._moments.cancel()
            self._moments = SecondMomentCorrection(self.replicas, parallel.optimizers, self._trained)

    def restart(self) -> None:
        self._scratch = []
        self.saved_vectors = (
            {}
            if self._compression is None
            else {"reference": self.vectors.read(), **self._compressed_sum(self._compression).saved_tensors()}
        )
        if self._moments is not None:
            self.saved_vectors["moments"] = self._moments.sums

    def on_resumed(self, parallel: ParallelModel, tensors: dict[str, torch.Tensor]) -> None:
        super().on_resumed(parallel, tensors)
        if self._compression is not None:
            self._compressed_sum(self._compression).count = self.counts["compressed_sums"]

    def exchange(self, parallel: ParallelModel) -> None:
        if self.counts["updates_since"] < self.period:
            return
        self.average()
        self.buffers.agree()
        if self.average_optimizer_state:
            average_optimizer_states(parallel, self.replicas)
        self.equal, self.staleness, self.counts["updates_since"] = True, 0, 0

    def average(self) -> None:
        """Average, and set each replica to `combined(mean)`, piece by piece. The result is the next reference."""
        totals, drift, size = self._sum_over_replicas(), Drift(), self.replicas.size
        vectors = (totals, *(self.saved_vectors[name] for name in self.combines))
        for parameters, total, *saved in self.vectors.pieces(*vectors):
            mean = (
                total.div_(size)
                if self._compression is None
                else torch.add(saved[0], total, alpha=1.0 / size, out=total)
            )
            drift.add(parameters.to(mean.dtype) - mean, mean)
            parameters.copy_(self.combined(mean, *saved))
            if saved:
                saved[0].copy_(parameters)
        self.disagreement = drift.distances(self.replicas)

    @property
    def combines(self) -> tuple[str, ...]:
        """Names of the saved vectors that `combined` gets, the reference first."""
        return () if self._compression is None else ("reference",)

    def combined(self, mean: torch.Tensor, *saved: torch.Tensor) -> torch.Tensor:
        """Return the values with which replicas continue.

        Args:
            mean: a piece of the replicas' mean.
            *saved: the same piece of each saved vector that `combines` names; may be changed in place.
        """
        return mean

    def final_parameters(self) -> FlatVectors:
        return self._mean()

    def _mean(self) -> FlatVectors:
        """Return the replicas' mean."""
        return self.replicas.mean(self.vectors.read())

    def _sum_over_replicas(self) -> FlatVectors:
        """Return the sum over the replicas of x or, with a codec, of x - reference."""
        self._scratch = self._scratch or self.vectors.empty()
        if self._compression is None:
            for parameters, buffer in self.vectors.pieces(self._scratch):
                buffer.copy_(parameters)
            self.replicas.start_sum(self._scratch).wait()
            return self._scratch
        for parameters, reference, buffer in self.vectors.pieces(self.saved_vectors["reference"], self._scratch):
            torch.sub(parameters, reference, out=buffer)
        compressed_sum = self._compressed_sum(self._compression)
        compressed_sum.sum(self._scratch)
        self.saved_vectors |= compressed_sum.saved_tensors()
        self.counts["compressed_sums"] = compressed_sum.count
        return self._scratch

    def _compressed_sum(self, compression: Compression) -> CompressedReplicaSum:
        """Return the compressed sum of the trained parameters; residuals of other parameters are dropped."""
        if self._cached_sum is None or self._cached_sum.vectors is not self.vectors:
            self._cached_sum = CompressedReplicaSum(self.replicas, compression, self.vectors, self.delay)
            self.counts["compressed_sums"] = 0
        return self._cached_sum


class DiLoCo(LocalSgd):
    """Replicas whose mean change is the gradient of an outer optimizer, SGD with Nesterov momentum.

    With d = reference - mean(x): v <- momentum v + d, and x <- reference - rate (d + momentum v).

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
        velocity = self.saved_vectors.get("velocity")
        super().restart()
        reference = self.saved_vectors.get("reference") or self.vectors.read()
        if velocity is None:
            velocity = [torch.zeros_like(flat) for flat in reference]
        self.saved_vectors |= {"reference": reference, "velocity": velocity}

    @property
    def combines(self) -> tuple[str, ...]:
        return "reference", "velocity"

    def combined(self, mean: torch.Tensor, *saved: torch.Tensor) -> torch.Tensor:
        reference, velocity = saved
        gradient = reference - mean
        torch.add(gradient, velocity, alpha=self.momentum, out=velocity)
        direction = gradient.add_(velocity, alpha=self.momentum)
        return torch.add(reference, direction, alpha=-self.rate)

    def final_parameters(self) -> FlatVectors:
        return self._outer_update()[0]

    def finish(self, parallel: ParallelModel) -> None:
        if not self.equal:
            _, velocity = self._outer_update()
            super().finish(parallel)
            self.saved_vectors["velocity"] = velocity

    def _outer_update(self) -> tuple[FlatVectors, FlatVectors]:
        """Return (parameters, velocity) after an outer update, without applying it. Collective."""
        velocities = [velocity.clone() for velocity in self.saved_vectors["velocity"]]
        triples = zip(self._mean(), self.saved_vectors["reference"], velocities, strict=True)
        return [self.combined(*triple) for triple in triples], velocities


class DelayedAverage(LocalSgd):
    """Replicas that begin an average every `period` updates and apply its result `delay` updates later.

    With a codec, the result is reference + mean(encode(snapshot - reference + residual)), where the reference is the
    result of the last average. A resumed run starts the average in progress again, from the saved snapshot.

    `counts["updates_since"]` counts updates since an average began; `counts["in_progress"]` is 1 until it is applied.

    Args:
        replicas: the group.
        period: updates between the beginnings of two averages.
        delay: updates between the beginning of an average and applying its result, 1 to `period`.
        start_step: number of synchronous updates before the first local one.
        correct_moments: whether to correct the optimizers' second moments (second_moments.py).
        compression: the codec of the changes; None: the parameters themselves are averaged.
    """

    def __init__(
        self,
        replicas: ReplicaGroup,
        period: int,
        delay: int,
        *,
        start_step: int = 0,
        correct_moments: bool = False,
        compression: Compression | None = None,
    ) -> None:
        super().__init__(
            replicas, period, start_step=start_step, correct_moments=correct_moments, compression=compression
        )
        self.delay = delay
        self.counts["in_progress"] = 0
        self._delayed: DelayedReduction | None = None
        self._means: FlatVectors = []

    def start_losses(self, parallel: ParallelModel, totals: torch.Tensor, share: BatchShare) -> CommHandle | None:
        """Start the all-reduce of the losses, and advance the average in progress behind it.

        The rounds that start here have one step to finish.
        """
        work = super().start_losses(parallel, totals, share)
        if self._delayed is not None:
            self._delayed.advance(self.counts["updates_since"] + 1, work)
        return work

    def restart(self) -> None:
        if self._delayed is not None:
            self._delayed.cancel()
            if self._cached_sum is not None:
                self._cached_sum.discard()
        self._delayed, self.counts["in_progress"] = None, 0
        super().restart()
        self.saved_vectors["snapshot"] = self.vectors.read()
        self._means = [torch.empty_like(flat) for flat in self.saved_vectors["snapshot"]]

    def on_resumed(self, parallel: ParallelModel, tensors: dict[str, torch.Tensor]) -> None:
        super().on_resumed(parallel, tensors)
        if self.counts["in_progress"]:
            self._begin_average(again=True).advance(self.counts["updates_since"])

    def exchange(self, parallel: ParallelModel) -> None:
        updates_since = self.counts["updates_since"]
        if self._delayed is not None and updates_since >= self.delay:
            self._delayed.finish()
            self._apply_average()
            self.buffers.agree()
            self._delayed, self.counts["in_progress"], self.staleness = None, 0, self.delay
        if updates_since >= self.period:
            self._begin_average()
            self.counts |= {"updates_since": 0, "in_progress": 1}

    def _begin_average(self, *, again: bool = False) -> DelayedReduction:
        """Start to average the parameters.

        Args:
            again: whether to average the saved snapshot, whose average was in progress when the run was saved.
        """
        snapshot = self.saved_vectors["snapshot"]
        for parameters, copy in () if again else self.vectors.pieces(snapshot):
            copy.copy_(parameters)
        if self._compression is None:
            chunks = mean_chunks(self.replicas, snapshot, self._means, chunks_for_updates(self.delay, 1))
            self._delayed = ReductionInRounds(chunks, 1, self.delay)
        else:
            self._delayed = self._compressed_sum(self._compression).start(
                snapshot, self.saved_vectors["reference"], self._means, self.delay
            )
        return self._delayed

    def _apply_average(self) -> None:
        """Apply the mean that has arrived: x <- x - (snapshot - mean)."""
        drift = Drift()
        for parameters, mean, snapshot in self.vectors.pieces(self._means, self.saved_vectors["snapshot"]):
            distance = snapshot - mean
            drift.add(distance, mean)
            parameters.sub_(distance)
        self.disagreement = drift.distances(self.replicas)
        if self._compression is not None:
            compressed_sum, old_reference = self._compressed_sum(self._compression), self.saved_vectors["reference"]
            compressed_sum.commit()
            self.saved_vectors |= {"reference": self._means, **compressed_sum.saved_tensors()}
            self._means, self.counts["compressed_sums"] = old_reference, compressed_sum.count


def make_local_sgd(replicas: ReplicaGroup, arguments: ModeArguments) -> LocalSgd:
    """Make local SGD, post-local SGD, one-shot averaging or a delayed average, as the plan's parameters say."""
    relaxed, compression = arguments.relaxed, arguments.compression
    start_step, correct_moments = relaxed.after or 0, relaxed.optimizer_state == "corrected"
    if relaxed.delay:
        return DelayedAverage(
            replicas,
            arguments.period,
            relaxed.delay,
            start_step=start_step,
            correct_moments=correct_moments,
            compression=compression,
        )
    average_optimizer_state = relaxed.optimizer_state == "averaged"
    return LocalSgd(
        replicas,
        relaxed.period or NEVER,
        start_step=start_step,
        average_optimizer_state=average_optimizer_state,
        correct_moments=correct_moments,
        compression=compression,
    )


def make_diloco(replicas: ReplicaGroup, arguments: ModeArguments) -> DiLoCo:
    """Make DiLoCo with the plan's parameters."""
    rate, momentum = arguments.relaxed.outer_rate, arguments.relaxed.outer_momentum
    assert rate is not None
    assert momentum is not None
    return DiLoCo(replicas, arguments.period, rate=rate, momentum=momentum, compression=arguments.compression)

"""Replicas under 0/1 Adam that step independently and agree periodically on displacements sent in one bit per value.

The optimizer's part is `tutti/optim/zero_one_adam.py`.
"""

import torch

from tutti.config.compression import Compression
from tutti.config.zero_one_schedule import local_updates
from tutti.local_sgd.delayed_reduction import CompressedReplicaSum
from tutti.local_sgd.diverged_replicas import DivergedReplicas
from tutti.local_sgd.replica_group import FlatTensors, FlatVectors, ReplicaGroup, distance_from_mean
from tutti.optim.zero_one_adam import zero_one_adam_of
from tutti.parallel.parallel_model import ParallelModel


class ZeroOneReplicas(DivergedReplicas):
    """Replicas that are synchronous until the second moment is frozen, and then agree every `local_updates` updates.

    The residual of their displacements is kept and added to the next ones.

    Args:
        replicas: the group.
        compression: the 0/1 Adam settings.
    """

    skip_together = True  # momentum is a displacement divided by its sum of rates, which must be equal on all ranks

    def __init__(self, replicas: ReplicaGroup, compression: Compression) -> None:
        super().__init__(replicas, 1)
        self.compression, self.counts["agreed"] = compression, 0
        self._compressed_sum: CompressedReplicaSum | None = None

    def begin(self, parallel: ParallelModel, step: int) -> None:
        self.rule = zero_one_adam_of(parallel.optimizers[0])
        if self.rule.frozen:
            super().begin(parallel, step)

    def updated(self, parallel: ParallelModel, step: int) -> None:
        if self.diverged:
            super().updated(parallel, step)
        elif self.rule.frozen:
            super().begin(parallel, step)

    def restart(self) -> None:
        self.rule.rebase()
        self._compressed_sum = (
            CompressedReplicaSum(self.replicas, self.compression, self._displacements())
            if self.replicas.size > 1
            else None
        )
        self._register_residuals()

    def exchange(self, parallel: ParallelModel) -> None:
        settings = self.compression.settings
        due = local_updates(self.counts["agreed"], int(settings["local_steps"]), int(settings["longest"]))
        if self.counts["updates_since"] < due:
            return
        local, displacements = self.vectors.read(), self._displacements()
        flats = displacements.read()
        torch._foreach_div_(flats, float(self.replicas.size))
        if self._compressed_sum is not None:
            self._compressed_sum.sum(flats)
        displacements.write(flats)
        self.rule.agree()
        self.disagreement = distance_from_mean(local, self.vectors.read(), self.replicas)
        self.buffers.agree()
        self._register_residuals()
        self.counts["agreed"] += 1
        self.counts["updates_since"], self.staleness, self.equal = 0, 0, True

    def final_parameters(self) -> FlatVectors:
        return self.replicas.mean(self.vectors.read())

    def _displacements(self) -> FlatTensors:
        return FlatTensors(
            (str(place), state["displacement"]) for place, (_, _, state) in enumerate(self.rule.learned())
        )

    def _register_residuals(self) -> None:
        """Give the residuals to checkpoints."""
        self.saved_vectors = {} if self._compressed_sum is None else self._compressed_sum.saved_tensors()

"""Ensembles: independent members whose predictions are averaged (Lakshminarayanan et al. 2017, arXiv 1612.01474).

Every member trains on its own share of the data.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tutti.async_sgd.asynchronous_replicas import AsynchronousReplicas
from tutti.errors import ScriptError
from tutti.local_sgd.consistency import ModeArguments, ReplicaState
from tutti.local_sgd.replica_group import FlatVectors, ReplicaGroup
from tutti.parallel.parallel_model import ParallelModel


class FirstCounts(ReplicaGroup):
    """Replicas whose "mean" is the values of the first: in a checkpoint, one member stands for the whole ensemble."""

    def mean(self, flats: FlatVectors) -> FlatVectors:
        """Replace `flats` by the first replica's, in place; the same bits on every replica."""
        if self.index and flats:  # _foreach_zero_ raises for an empty list
            torch._foreach_zero_(flats)
        self.start_sum(flats).wait()
        return flats


class Ensemble(AsynchronousReplicas):
    """Independent members. Every member evaluates every sample; a checkpoint's model is the first member's.

    Args:
        replicas: the group; each replica is a member.
    """

    def __init__(self, replicas: ReplicaGroup) -> None:
        super().__init__(FirstCounts(**{part.name: getattr(replicas, part.name) for part in fields(replicas)}))
        self._squares = torch.zeros(2, dtype=torch.float64)

    def restart(self) -> None:
        pass

    def exchange(self, parallel: ParallelModel) -> None:
        self.staleness = 0

    def final_parameters(self) -> FlatVectors:
        return self.replicas.mean(self.vectors.read())

    def quiesced(self, parallel: ParallelModel) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def averaged_model(self, parallel: ParallelModel, *, saving: bool = False) -> Iterator[ReplicaState]:
        if saving:
            with super().averaged_model(parallel, saving=True) as state:
                yield state
            return
        self._squares = torch.zeros(2, dtype=torch.float64)
        yield ReplicaState()
        squares = self.replicas.gather(self._squares.to(self.device))
        relative = (squares[:, 0] / squares[:, 1].clamp_min(1e-300)).sqrt()
        self.last_disagreement = {"max": float(relative.max()), "mean": float(relative.mean())}

    def finish(self, parallel: ParallelModel) -> None:
        """Leave the members as they are."""

    def evaluation_share(self, parallel: ParallelModel) -> tuple[int, int]:
        return 0, 1

    def combine_predictions(self, output: Any) -> Any:
        leaves, structure = pytree.tree_flatten(output)
        return pytree.tree_unflatten([self._mean_of(leaf) for leaf in leaves], structure)

    def _mean_of(self, leaf: Any) -> Any:
        """Return the members' mean of one output tensor, and add to the squares that measure their disagreement."""
        if leaf is None or isinstance(leaf, bool | int | str):
            return leaf
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
            kind = str(leaf.dtype).removeprefix("torch.") if isinstance(leaf, torch.Tensor) else type(leaf).__name__
            raise ScriptError(
                f'sync.mode = "ensemble" averages predictions, but the model returns {kind}; return floating-point '
                "tensors of scores, and choose the class in the metric"
            )
        half = leaf.dtype in (torch.float16, torch.bfloat16)
        mean = torch.empty_like(leaf, dtype=torch.float32 if half else None, memory_format=torch.contiguous_format)
        self.replicas.start_sum([mean.copy_(leaf)]).wait()
        mean = (mean / self.replicas.size).to(leaf.dtype)
        self._squares[0] += float((leaf.detach() - mean).double().square().sum())
        self._squares[1] += float(mean.double().square().sum())
        return mean


def make_ensemble(replicas: ReplicaGroup, arguments: ModeArguments) -> Ensemble:
    """Make an ensemble; a plan has no parameters for it."""
    return Ensemble(replicas)

"""The interface of a consistency mode: what the training loop calls around its steps. The loop itself knows no mode."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tutti.comm.point_to_point import all_reduce_small, ring_all_reduce_nbytes
from tutti.comm.traffic import CommHandle
from tutti.config.compression import Compression
from tutti.config.consistency_modes import Relaxed
from tutti.data.batches import BatchShare
from tutti.parallel.layout import norm_squared
from tutti.parallel.parallel_model import ParallelModel


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """The state of one replica that a checkpoint saves in addition to the shared model.

    Attributes:
        tensors: tensors by name.
        values: plain values by name.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


class ModeArguments(NamedTuple):
    """Arguments of a mode's factory, in addition to the group of replicas.

    Args:
        relaxed: the mode's parameters, with its defaults.
        compression: the codec of the vectors that replicas sum; None: values are sent as they are.
        seed: seed of the mode's random draws.
    """

    relaxed: Relaxed
    compression: Compression | None
    seed: int

    @property
    def period(self) -> int:
        """Updates between two exchanges."""
        assert self.relaxed.period is not None
        return self.relaxed.period


class Consistency:
    """Synchronous training, and the interface of all modes.

    Here gradients are all-reduced in every step, so replicas stay equal, and most methods do nothing.

    Attributes:
        diverged: whether replicas step on gradients of their own.
        gradient_scale: factor of these gradients: the number of replicas. The mean of the replicas' gradients is then
            the gradient of the global mean, also with unequal shares and token counts.
        learning_rate_scale: factor of the learning rate of a replica's own update.
        asynchronous: whether ranks do not wait for each other in steps.
        skip_together: while diverged, whether a non-finite gradient on one replica skips the update on all.
    """

    diverged: bool = False
    gradient_scale: float = 1.0
    learning_rate_scale: float = 1.0
    asynchronous: bool = False
    skip_together: bool = False

    def begin(self, parallel: ParallelModel, step: int) -> None:
        """Begin training with model, optimizers and counters ready, new or from a checkpoint.

        Args:
            parallel: the model and its optimizers.
            step: number of updates made before.
        """

    def start_losses(self, parallel: ParallelModel, totals: torch.Tensor, share: BatchShare) -> CommHandle | None:
        """Start the all-reduce of the losses in place.

        Replicas that differ use direct messages, because their own exchanges may fill the queues of a network.

        Args:
            parallel: the model and its optimizers.
            totals: total and count of the loss, one flag per rank, then values that other mechanisms add.
            share: this rank's share of the global batch.

        Returns:
            The handle to wait for; None if nothing is sent.
        """
        size, channel = parallel.world.world_size, parallel.layout.channel("scalars")
        if size == 1:
            return None
        if self.diverged:
            work, nbytes = all_reduce_small(totals, None)
            return channel.start([work], nbytes)
        return channel.start([dist.all_reduce(totals, async_op=True)], ring_all_reduce_nbytes(totals, size))

    def norm_squared(self, parallel: ParallelModel, named: Iterable[tuple[str, torch.Tensor]]) -> torch.Tensor:
        """Return the squared norm of the gradients, for clipping, over the ranks that make the same update."""
        return norm_squared(parallel.layout, named, parallel.world.device)

    def updated(self, parallel: ParallelModel, step: int) -> None:
        """React to an update.

        Args:
            parallel: the model and its optimizers.
            step: number of the update, from 0. The optimizers have made it, or all ranks have skipped it; its row is
                not written yet.
        """

    @contextmanager
    def averaged_model(self, parallel: ParallelModel, *, saving: bool = False) -> Iterator[ReplicaState]:
        """Temporarily load the model that all ranks would end with, to evaluate or save it. Collective.

        Args:
            parallel: the model and its optimizers.
            saving: whether to load the mean of the optimizers' state too.

        Yields:
            The state from which this replica resumes; complete only with `saving`.
        """
        yield ReplicaState()

    def evaluation_share(self, parallel: ParallelModel) -> tuple[int, int]:
        """Return (i, n): this rank evaluates part i of n."""
        return parallel.mesh.data_index, parallel.mesh.data_degree

    def combine_predictions(self, output: Any) -> Any:
        """Return the output to evaluate, given this rank's. Called by all ranks that evaluate the same part."""
        return output

    def resume(self, parallel: ParallelModel, values: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Restore the values that `averaged_model` yielded, and return the tensors to be filled.

        `on_resumed` is called once they are filled.

        Args:
            parallel: the model and its optimizers.
            values: the plain values of the `ReplicaState`.
        """
        return {}

    def on_resumed(self, parallel: ParallelModel, tensors: dict[str, torch.Tensor]) -> None:
        """Continue from the tensors that `resume` returned, which are filled now."""

    def finish(self, parallel: ParallelModel) -> None:
        """End training: give every rank the same model. Collective."""

    def row(self) -> dict[str, Any]:
        """Return the fields about replicas for the step's row; empty where replicas are equal."""
        return {}

    def evaluation_row(self) -> dict[str, Any]:
        """Return the fields about replicas for an evaluation's row; empty where they are equal or unknown."""
        return {}

    def on_exit(self, parallel: ParallelModel) -> None:
        """React to the end of the script on this rank, without an error; other ranks may still be training."""

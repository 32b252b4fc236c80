"""What a consistency mode does around the steps. The step loop calls these methods and knows no mode."""

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
    """What one replica resumes from beside the shared model: tensors by name, and plain values."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


class ModeArguments(NamedTuple):
    """What the factory of a mode is given beside the group of replicas.

    Args:
        relaxed: the mode's parameters, with its defaults.
        compression: the codec of what replicas sum; None: values as they are.
        seed: of the mode's random draws.
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
    """Synchronous training: gradients are summed over replicas in every step, so replicas stay equal. Does nothing.

    Attributes:
        diverged: whether replicas step on gradients of their own. gradient_scale: factor of these gradients, the number
        of replicas. Their mean is then the gradient of the global mean,
            also with unequal shares and tokens.
        learning_rate_scale: factor of the learning rate of a replica's own update.
        asynchronous: whether ranks do not wait for each other in steps.
        skip_together: while diverged, a gradient that is not finite on one replica skips the update on all.
    """

    diverged: bool = False
    gradient_scale: float = 1.0
    learning_rate_scale: float = 1.0
    asynchronous: bool = False
    skip_together: bool = False

    def begin(self, parallel: ParallelModel, step: int) -> None:
        """Model, optimizers and counters are ready, new or from a checkpoint; `step` updates were made before."""

    def start_losses(self, parallel: ParallelModel, totals: torch.Tensor, share: BatchShare) -> CommHandle | None:
        """Start to sum `totals` in place: the loss' total and count, one flag a rank, and what others add.

        `share` is this rank's share of the global batch.

        Replicas that differ use direct messages, since their exchanges may fill the queues of a network.
        """
        size, channel = parallel.world.world_size, parallel.layout.channel("scalars")
        if size == 1:
            return None
        if self.diverged:
            work, nbytes = all_reduce_small(totals, None)
            return channel.start([work], nbytes)
        return channel.start([dist.all_reduce(totals, async_op=True)], ring_all_reduce_nbytes(totals, size))

    def norm_squared(self, parallel: ParallelModel, named: Iterable[tuple[str, torch.Tensor]]) -> torch.Tensor:
        """Sum of squares of the gradients that ranks which step alike hold, for clipping."""
        return norm_squared(parallel.layout, named, parallel.world.device)

    def updated(self, parallel: ParallelModel, step: int) -> None:
        """The optimizers have made update `step`, from 0, or all ranks have skipped it. Its row is not written yet."""

    @contextmanager
    def averaged_model(self, parallel: ParallelModel, *, saving: bool = False) -> Iterator[ReplicaState]:
        """Temporarily load the model that all ranks would end with now, to evaluate or save it. Collective.

        Args:
            parallel: the model and its optimizers.
            saving: also load the mean of the optimizers' state, and yield what this replica resumes from.
        """
        yield ReplicaState()

    def evaluation_share(self, parallel: ParallelModel) -> tuple[int, int]:
        """(i, n): this rank computes the i-th of n parts of what is evaluated."""
        return parallel.mesh.data_index, parallel.mesh.data_degree

    def combine_predictions(self, output: Any) -> Any:
        """The model's output that an evaluation uses, from this rank's. Called by all ranks that share a part."""
        return output

    def resume(self, parallel: ParallelModel, values: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Restore the values that `averaged_model` yielded; returns tensors to be filled, after which `on_resumed` is
        called."""
        return {}

    def on_resumed(self, parallel: ParallelModel, tensors: dict[str, torch.Tensor]) -> None:
        """The tensors are filled."""

    def finish(self, parallel: ParallelModel) -> None:
        """Training has ended: every rank gets the same model. Collective."""

    def row(self) -> dict[str, Any]:
        """Fields about replicas in the step's row; empty where they are equal."""
        return {}

    def evaluation_row(self) -> dict[str, Any]:
        """Fields about replicas in an evaluation's row; empty where they are equal or nothing is known."""
        return {}

    def on_exit(self, parallel: ParallelModel) -> None:
        """The script has ended well on this rank; on others it may go on."""

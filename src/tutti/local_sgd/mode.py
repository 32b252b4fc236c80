"""What a mode of consistency does around the steps. The step loop calls these verbs and knows no mode."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tutti.comm.point_to_point import all_reduce_small, ring_all_reduce_nbytes
from tutti.comm.traffic import CommHandle
from tutti.parallel.layout import norm_squared

if TYPE_CHECKING:
    from tutti.trainer.run_state import Run


@dataclass(frozen=True, slots=True)
class Kept:
    """What one replica resumes from beside the model that all share: tensors by what they are, and plain values."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


class Consistency:
    """Synchronous: gradients are summed over replicas in every step, so that replicas are equal. Does nothing.

    `apart`: whether replicas step on gradients of their own; `gain`: what these are multiplied with, the number of
    replicas: then the mean of them is the gradient of the global mean, with unequal shares and tokens too. `pace`: what
    the learning rate of a replica's own update is multiplied with. `alone`: ranks do not wait for each other in steps.
    `together`: where they are apart, a gradient that is not finite on one leaves the update out on all.
    """

    apart: bool = False
    gain: float = 1.0
    pace: float = 1.0
    alone: bool = False
    together: bool = False

    def begin(self, run: "Run") -> None:
        """Model, optimizers and counters stand, new or from a checkpoint."""

    def start_losses(self, run: "Run", totals: torch.Tensor) -> CommHandle | None:
        """Begin to sum `totals` (the loss' total and count, one flag a rank, what others add), in place: where replicas
        are apart in one way across a network, whose queues what they exchange may fill."""
        size, channel = run.world.world_size, run.layout.channel("scalars")
        if size == 1:
            return None
        if self.apart:
            work, nbytes = all_reduce_small(totals, None)
            return channel.start([work], nbytes)
        return channel.start([dist.all_reduce(totals, async_op=True)], ring_all_reduce_nbytes(totals, size))

    def norm_squared(self, run: "Run", named: Iterable[tuple[str, torch.Tensor]]) -> torch.Tensor:
        """Sum of squares of gradients, by which they are clipped: of all that ranks which step alike hold."""
        return norm_squared(run.layout, named, run.world.device)

    def updated(self, run: "Run") -> None:
        """The optimizers have made an update, or left one out on all ranks. The step's row is not written yet."""

    @contextmanager
    def shown(self, run: "Run", *, saving: bool = False) -> Iterator[Kept]:
        """Inside, the model is the one that all ranks would end with now; it is evaluated and saved. `saving`: the
        optimizers' state is the replicas' mean inside, and what this replica resumes from is given. Collective.
        """
        yield Kept()

    def evaluates(self, run: "Run") -> tuple[int, int]:
        """(i, n): this rank computes the i-th of n parts of what is evaluated."""
        return run.mesh.data_index, run.mesh.data_degree

    def predicted(self, output: Any) -> Any:
        """What counts as the model's output in an evaluation, given this rank's. Ranks that share a part call it."""
        return output

    def resume(self, run: "Run", values: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Go on from the values that `shown` gave; returns tensors to fill with those it gave. `resumed` follows."""
        return {}

    def resumed(self, run: "Run", tensors: dict[str, torch.Tensor]) -> None:
        """The tensors are filled."""

    def finish(self, run: "Run") -> None:
        """Training has ended: every rank gets the same model. Collective."""

    def row(self) -> dict[str, Any]:
        """What the step's row says of replicas; nothing where they are equal."""
        return {}

    def evaluation_row(self) -> dict[str, Any]:
        """What an evaluation's row says of replicas; nothing where they are equal or it is not known."""
        return {}

    def left(self, run: "Run") -> None:
        """The script has ended well on this rank. On others it may go on."""

"""What of a model's states is divided, as the step and the optimizers see it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import Optimizer

from tutti.parallel.sharding.sums import Coded
from tutti.parallel.sharding.unit import Pack


class Shards:
    """Nothing is divided; what is, overrides. All ranks call the same methods in the same order."""

    @property
    def sent_nbytes(self) -> int:
        """Bytes that this rank has sent for parameters and gradients in the last step."""
        return 0

    def memory(self) -> list[torch.Tensor]:
        """Tensors without memory that a built model's parameters lie in."""
        return []

    def materialise(self, real: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> None:
        """Give those memory: `real` finds it; what computes does so on `device`."""

    def bind(self, optimizers: Iterable[Optimizer]) -> None:
        """Optimizers hold the model's parameters as they are now; check them, or give them their part."""

    def packs(self) -> list[Pack]:
        """Parameters whose gradients are summed into parts, together; in one order on all ranks and in all runs."""
        return []

    def sum_by(self, coded: Mapping[Pack, Coded]) -> None:
        """Sum the gradients of these packs in fewer bytes."""

    def clear(self) -> None:
        """A step begins: gradients are none."""

    def begin(self) -> None:
        """The backward that comes is the step's last: sum gradients from here on."""

    def send(self) -> None:
        """Backward has returned: begin the sums that it has left out."""

    def finish(self) -> None:
        """Wait for all sums."""

    @contextmanager
    def whole_gradients(self, optimizer: Optimizer) -> Iterator[None]:
        """Inside, the optimizer's groups list every parameter whose gradient this rank holds."""
        yield

    def wholes(
        self, optimizer: Optimizer, of: Callable[[nn.Parameter], torch.Tensor | None]
    ) -> dict[nn.Parameter, torch.Tensor]:
        """By parameter whose state is divided: a tensor of its shape, whole on every rank. `of`: this rank's part, by
        what the optimizer has in the parameter's place; None: zeros. Collective.
        """
        return {}

"""Deep gradient compression (Lin et al. 2018): top-k of a velocity with momentum corrected and masked.

u = m u + g, v = v + u; the k largest of v are sent, and u and v become 0 where they were. The optimizer on the sum
must have no momentum of its own.
"""

import math
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from tutti.compression.state import State
from tutti.compression.topk import Momentum, TopK
from tutti.config.compression import ramped_density


@dataclass(frozen=True, slots=True)
class DGC(TopK):
    """As top-k on the wire. `momentum`: m, that the optimizer would have had; `warmup_steps`: with sparsity growing."""

    density: float = 0.001
    momentum: float = 0.9
    warmup_steps: int = 0

    @property
    def keeps(self) -> tuple[str, ...]:
        return ("residual", "momentum")

    def at(self, progress: float) -> "DGC":
        """The codec of the warm-up: `progress` 0 begins with 75 % sparsity, which grows geometrically until 1."""
        return replace(self, density=ramped_density(self.density, progress))

    def now(self, count: int) -> Self:
        return replace(
            self, density=ramped_density(self.density, count / self.warmup_steps if self.warmup_steps else 1)
        )

    def encode_by_torch(self, values: Tensor, state: State, message: Tensor) -> None:
        kept, moving = state.new["residual"], state.new["momentum"]
        torch.mul(state.old["momentum"], self.momentum, out=moving)
        moving += values
        torch.add(state.old["residual"], moving, out=kept)
        self._take_by_torch(kept, moving, message)

    def _momentum(self, values: Tensor, state: State) -> Momentum:
        return self.momentum, state.old["momentum"], state.new["momentum"]


def clip_locally(values: Tensor, max_norm: float, ranks: int) -> None:
    """Scale a rank's gradient to a norm of at most max_norm / sqrt(ranks), in place: before it is added to what is
    kept, since what is kept is not clipped again.
    """
    norm = torch.linalg.vector_norm(values)
    values.mul_((max_norm / math.sqrt(ranks) / norm).clamp(max=1.0))

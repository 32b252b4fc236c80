"""Deep gradient compression (Lin et al. 2018): top-k of a velocity with momentum corrected and masked.

u = m u + g, v = v + u; the k largest of v are sent, and u and v become 0 where they were. The optimizer on the sum
must have no momentum of its own.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tutti.compress.state import State
from tutti.compress.topk import TopK

_FIRST_DENSITY, _RATIO = 0.25, 0.25  # sparsity 75 %, 93.75 %, 98.44 %, 99.6 %, 99.9 %


@dataclass(frozen=True, slots=True)
class DGC(TopK):
    """As top-k on the wire. `momentum`: m, that the optimizer would have had."""

    density: float = 0.001
    momentum: float = 0.9

    @property
    def keeps(self) -> tuple[str, ...]:
        return ("residual", "momentum")

    def at(self, progress: float) -> "DGC":
        """The codec of the warm-up: `progress` 0 begins with 75 % sparsity, which grows geometrically until 1."""
        if progress >= 1:
            return self
        return replace(self, density=max(self.density, _FIRST_DENSITY * _RATIO ** math.floor(max(progress, 0) * 4)))

    def encode_by_torch(self, values: Tensor, state: State, message: Tensor) -> None:
        kept, moving = state.new["residual"], state.new["momentum"]
        torch.mul(state.old["momentum"], self.momentum, out=moving)
        moving += values
        torch.add(state.old["residual"], moving, out=kept)
        self._take_by_torch(kept, moving, message)

    def encode_by_kernel(self, values: Tensor, state: State, message: Tensor) -> None:
        moving = (self.momentum, state.old["momentum"], state.new["momentum"])
        self._by_kernel(values, state.old["residual"], state.new["residual"], moving, message)


def clip_locally(values: Tensor, max_norm: float, ranks: int) -> None:
    """Scale a rank's gradient to a norm of at most max_norm / sqrt(ranks), in place: before it is added to what is
    kept, since what is kept is not clipped again.
    """
    norm = torch.linalg.vector_norm(values)
    values.mul_((max_norm / math.sqrt(ranks) / norm).clamp(max=1.0))

"""Deep gradient compression (Lin et al. 2018): top-k of a velocity, with momentum correction and masking.

u = m u + g, v = v + u; the k largest of v are sent, and u and v become 0 at their places. The optimizer that gets the
sum must have no momentum of its own.
"""

import math
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from tutti.compression.codec_state import CodecState
from tutti.compression.largest_values import Momentum
from tutti.compression.top_k import TopK
from tutti.config.compression import Compression, ramped_density


@dataclass(frozen=True, slots=True)
class DGC(TopK):
    """Sends the largest values of a velocity, in messages like those of top-k.

    Args:
        density: share of the values that is sent after the warm-up.
        momentum: m, which the optimizer would have had.
        warmup_steps: number of steps in which the density falls.
    """

    density: float = 0.001
    momentum: float = 0.9
    warmup_steps: int = 0

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("residual", "momentum")

    def at(self, progress: float) -> "DGC":
        """Return the codec during the warm-up.

        Args:
            progress: 0 to 1. Sparsity grows geometrically from 75 % at 0 to its final value at 1.
        """
        return replace(self, density=ramped_density(self.density, progress))

    def at_step(self, count: int) -> Self:
        return replace(
            self, density=ramped_density(self.density, count / self.warmup_steps if self.warmup_steps else 1)
        )

    def encode_by_torch(self, values: Tensor, state: CodecState, message: Tensor) -> None:
        residual, velocity = state.new["residual"], state.new["momentum"]
        torch.mul(state.old["momentum"], self.momentum, out=velocity)
        velocity += values
        torch.add(state.old["residual"], velocity, out=residual)
        self._take_by_torch(residual, velocity, message)

    def _momentum(self, values: Tensor, state: CodecState) -> Momentum:
        return self.momentum, state.old["momentum"], state.new["momentum"]


def clip_locally(values: Tensor, max_norm: float, ranks: int) -> None:
    """Scale a rank's gradient, in place, to a norm of at most max_norm / sqrt(ranks).

    Do this before the gradient is added to the residual, which is not clipped again.

    Args:
        values: this rank's gradient.
        max_norm: largest norm of the sum.
        ranks: number of ranks.
    """
    norm = torch.linalg.vector_norm(values)
    values.mul_((max_norm / math.sqrt(ranks) / norm).clamp(max=1.0))


def from_compression(compression: Compression) -> DGC:
    """Make the deep gradient compression that a plan states."""
    return DGC(
        compression.settings["density"], compression.settings["momentum"], int(compression.settings["warmup_steps"])
    )

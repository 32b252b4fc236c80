"""Deep gradient compression (Lin et al. 2018): top-k of accumulated momentum, with masking of what was sent.

u = m u + g, v = v + u. u is the momentum (state `momentum`), v the accumulated momentum that is not sent yet (state
`residual`). The k largest values of v are sent, and u and v are zeroed at the sent positions. The optimizer that gets
the sum must have no momentum of its own.
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
    """Sends the largest values of the accumulated momentum, in messages like those of top-k.

    Args:
        density: fraction of the values that is sent after the warm-up.
        momentum: momentum factor m; the optimizer's own must be 0.
        warmup_steps: number of steps in which the density falls to `density`.
    """

    density: float = 0.001
    momentum: float = 0.9
    warmup_steps: int = 0

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("residual", "momentum")

    def at_step(self, count: int) -> Self:
        return replace(
            self, density=ramped_density(self.density, count / self.warmup_steps if self.warmup_steps else 1)
        )

    def encode_by_torch(self, values: Tensor, state: CodecState, message: Tensor) -> None:
        residual, momentum = state.new["residual"], state.new["momentum"]
        torch.mul(state.old["momentum"], self.momentum, out=momentum)
        momentum += values
        torch.add(state.old["residual"], momentum, out=residual)
        self._take_by_torch(residual, momentum, message)

    def _momentum(self, values: Tensor, state: CodecState) -> Momentum:
        return self.momentum, state.old["momentum"], state.new["momentum"]


def clip_locally(values: Tensor, max_norm: float, ranks: int) -> None:
    """Scale a rank's gradient, in place, to a norm of at most max_norm / sqrt(ranks).

    For training loops of your own. Call it before encoding; the residual is never clipped.

    Args:
        values: this rank's gradient.
        max_norm: bound for the summed gradient's norm.
        ranks: number of ranks.
    """
    norm = torch.linalg.vector_norm(values)
    values.mul_((max_norm / math.sqrt(ranks) / norm).clamp(max=1.0))


def from_compression(compression: Compression) -> DGC:
    """Make the deep gradient compression that a plan states."""
    return DGC(
        compression.settings["density"], compression.settings["momentum"], int(compression.settings["warmup_steps"])
    )

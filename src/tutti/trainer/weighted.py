"""Losses as (total, count): the one form in which means over ranks and microbatches add up."""

from dataclasses import dataclass
from typing import Any

import torch

from tutti.errors import ScriptError


@dataclass(frozen=True, slots=True)
class Weighted:
    """A mean over something other than samples, as its parts: mean = total / count.

    A language model with padding returns Weighted(sum of token losses, number of tokens), so that a token weighs the
    same on whichever rank and in whichever microbatch it falls. `total`: 0-d tensor with gradient; `count`: number
    or 0-d tensor.
    """

    total: torch.Tensor
    count: torch.Tensor | float


def as_weighted(loss: Any, samples: float) -> Weighted:
    """A user's loss of a part of `samples` samples, as (total, count). Raises ScriptError for anything else."""
    if isinstance(loss, Weighted):
        return loss
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return Weighted(loss.reshape(()) * samples, float(samples))
    shape = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
    raise ScriptError(
        f"the loss is {shape}; return a 0-d tensor that is the mean over samples, or "
        "tutti.Weighted(total, count) where the mean is over something else"
    )

"""How far ranks' parts of a gradient cancel in their sum, of which alone a second moment v knows.

A code's error is of the size of the parts that are written: independent ones have together the norm of their sum, and
what is lost is divided by what the sum was like. But some cancel: before a BatchNorm over all samples the gradient of a
bias is rounding, of any one rank's samples it is as large as others'. There parts would be 1e6 times the square root of
v, and so would be what a code loses of them, and of all that lies in one block with them.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

PARTS, SUM = "parts", "sum"
"""In an optimizer's state of a parameter: squared norms of ranks' parts of gradients, together, and of their sums."""

CHANCE = 2.0
"""Parts that do not cancel are together no longer than this many times their sum, also where chance is against it."""

NOTHING = 1e-36
"""Sums are not taken for shorter than this many times the parts, of squared norms: rounding of float64."""

Squares = dict[nn.Parameter, tuple[float, float]]
"""By parameter: squared norms of ranks' parts of a gradient, together, and of their sum; in one unit, whichever."""


def squares_of(tensors: Sequence[Tensor]) -> Tensor:
    """(n,) their squared norms, float64."""
    return torch.stack([tensor.detach().double().square().sum() for tensor in tensors])


def remember(squares: Squares, optimizer: Optimizer) -> None:
    """Add squares of a step to the state of the parameters that have one."""
    for parameter, (parts, total) in squares.items():
        state = optimizer.state.get(parameter)
        if state and math.isfinite(parts) and math.isfinite(total):
            state[PARTS], state[SUM] = state.get(PARTS, 0.0) + parts, state.get(SUM, 0.0) + total


def excess(state: Mapping[str, Any]) -> float:
    """How many times longer than their sum a parameter's parts are, beyond chance; 1 where they do not cancel."""
    parts, total = state.get(PARTS, 0.0), state.get(SUM, 0.0)
    return max(1.0, math.sqrt(parts / max(total, NOTHING * parts)) / CHANCE) if parts else 1.0

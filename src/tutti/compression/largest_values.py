"""The largest values of a tensor: a threshold from a sample, then an exact selection."""

import math

import torch
from torch import Tensor

SAMPLE = 16384
"""Number of values in the sample that gives the threshold."""


Momentum = tuple[float, Tensor, Tensor]
"""(m, old u, new u) of u = m u + values; the tensors are empty without momentum."""


def threshold_ranks(expected: float) -> list[int]:
    """Return ranks in a sorted sample, counted from the largest, of thresholds that enough values should exceed.

    Args:
        expected: how many values of the sample are expected to belong to the k largest of all.
    """
    return [math.ceil(expected + spread * math.sqrt(expected) + 2) for spread in (3, 12)]


def above_capacity(numel: int, count: int) -> int:
    """Return the buffer size for positions above a threshold. If there are more, the sample was misleading."""
    return min(numel, 4 * count + numel // 64 + 4096)


def largest(x: Tensor, count: int) -> Tensor:
    """Return the positions of the `count` largest magnitudes, in rising order.

    Among equal magnitudes the first positions are chosen. NaN is above infinity.
    """
    whole, magnitude = (torch.int32, 2**31 - 1) if x.dtype is torch.float32 else (torch.int64, 2**63 - 1)
    keys = x.view(whole) & magnitude
    order = torch.sort(keys, descending=True, stable=True).indices
    return order[:count].sort().values

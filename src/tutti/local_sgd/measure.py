"""How far replicas have drifted apart: distances from their mean, relative to the mean's length."""

import torch

from tutti.compression.cast import AT_ONCE
from tutti.local_sgd.vectors import Flats, Replicas

MEASURED = 10
"""Where the mean is not known anyway, every so manyth exchange is measured."""

SAMPLED = 4096
"""Parameters that are looked at there."""


class Drift:
    """How far this replica is from the mean, of values that are added some at a time."""

    def __init__(self) -> None:
        self._apart, self._length = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        self._numel = 0

    def add(self, gap: torch.Tensor, mean: torch.Tensor) -> None:
        """Some values' distances from the mean, and the mean."""
        gap, mean = gap.reshape(-1), mean.reshape(-1)
        self._apart, self._length = self._apart + gap.dot(gap), self._length + mean.dot(mean)
        self._numel += gap.numel()

    def figures(self, replicas: Replicas) -> dict[str, float | int]:
        """Largest and mean distance of a replica from the mean, relative to the mean's length. Collective."""
        return _figures(replicas.gather(self._apart.reshape(1)), self._length, self._numel)


def from_mean(own: Flats, mean: Flats, replicas: Replicas) -> dict[str, float | int]:
    """Largest and mean distance of a replica from the `mean`, relative to the mean's length; of every parameter."""
    drift = Drift()
    for one, other in zip(own, mean, strict=True):
        for a, b in zip(*(torch.split(flat.reshape(-1), AT_ONCE) for flat in (one, other)), strict=True):
            drift.add(a.to(b.dtype) - b, b)
    return drift.figures(replicas)


def from_sample(own: Flats, replicas: Replicas) -> dict[str, float | int]:
    """The same of parameters at even distances, at most `SAMPLED` of them."""
    numel = sum(flat.numel() for flat in own)
    stride = -(-numel // SAMPLED)
    mine = torch.cat([flat[::stride].double() for flat in own])
    everyone = replicas.gather(mine)
    mean = everyone.mean(0)
    return _figures((everyone - mean).square().sum(1), mean.square().sum(), mine.numel())


def _figures(squares: torch.Tensor, length: torch.Tensor, numel: int) -> dict[str, float | int]:
    relative = (squares.reshape(-1) / length.clamp_min(1e-300)).sqrt()
    return {"max": float(relative.max()), "mean": float(relative.mean()), "parameters": numel}

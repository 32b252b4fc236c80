"""How far replicas have drifted apart: distances from their mean, relative to the mean's length."""

import torch

from tutti.runtime.consistency.vectors import Flats, Replicas

MEASURED = 10
"""Where the mean is not known anyway, every so manyth exchange is measured."""

SAMPLED = 4096
"""Parameters that are looked at there."""


AT_ONCE = 1 << 16
"""Parameters that are measured at once: their differences in float64 stay in a core's cache."""


def from_mean(own: Flats, mean: Flats, replicas: Replicas) -> dict[str, float | int]:
    """Largest and mean distance of a replica from the `mean`, relative to the mean's length; of every parameter."""
    apart, length = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for one, other in zip(own, mean, strict=True):
        for a, b in zip(*(torch.split(flat.reshape(-1), AT_ONCE) for flat in (one, other)), strict=True):
            wide = b.double()
            apart, length = apart + (a.double() - wide).square().sum(), length + wide.square().sum()
    return _figures(replicas.gather(apart.reshape(1)), length, sum(flat.numel() for flat in mean))


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

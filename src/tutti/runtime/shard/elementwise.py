"""Whether an optimizer updates every element of a parameter by itself, so that it may be given parts of parameters."""

import copy
import inspect
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tutti.errors import PlanError


def is_elementwise(optimizer: Optimizer) -> bool:
    """Tried out: a fresh optimizer of the same kind and settings steps on a small matrix, and on its halves.

    One that cannot be made anew from its settings counts as not elementwise.
    """
    kind = type(optimizer)
    known = set(inspect.signature(kind.__init__).parameters) - {"params"}
    settings: dict[str, Any] = {key: value for key, value in optimizer.defaults.items() if key in known}
    try:
        whole = _trained(kind, settings, [(0, 6)])
        parts = _trained(kind, settings, [(0, 3), (3, 6)])
    except Exception:
        return False
    return torch.equal(whole, parts)


def check_elementwise(optimizer: Optimizer) -> None:
    """Raises PlanError for an optimizer that needs whole parameters (norms, row means, factors)."""
    if not is_elementwise(optimizer):
        raise PlanError(
            f"{type(optimizer).__name__} does not treat the elements of a parameter one by one, so it cannot update "
            "parts of parameters; use sharding level 1, which gives every rank whole parameters to update, or an "
            "elementwise optimizer such as AdamW or SGD"
        )


def _trained(kind: type[Optimizer], settings: dict[str, Any], ranges: list[tuple[int, int]]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(6, 4, dtype=torch.float64, generator=generator)
    gradients = torch.randn(3, 6, 4, dtype=torch.float64, generator=generator)
    parts = [nn.Parameter(start[low:high].clone()) for low, high in ranges]
    optimizer = kind(parts, **copy.deepcopy(settings))
    for gradient in gradients:
        for part, (low, high) in zip(parts, ranges, strict=True):
            part.grad = gradient[low:high].clone()
        optimizer.step()
    return torch.cat([part.detach() for part in parts])

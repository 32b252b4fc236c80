"""Whether an optimizer may be given parts of parameters: it updates every element of a parameter by itself, or steps by
norms of whole tensors that it can be told.
"""

import copy
import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.errors import PlanError
from tutti.optim.large_batch import LAMB, ByNorms


def is_elementwise(optimizer: Optimizer) -> bool:
    """Tried out: a fresh optimizer of the same kind and settings steps on a small matrix, and on its halves.

    One that cannot be made anew from its settings counts as not elementwise.
    """
    tried = _tried(optimizer)
    return tried is not None and torch.equal(*tried)


def is_by_norms(optimizer: Optimizer) -> bool:
    """Whether norms of whole tensors (see ByNorms) are all that it must be told to update parts of parameters.

    Tried out like the other: a subclass may do what only whole parameters allow.
    """
    tried = _tried(optimizer, told=True) if isinstance(optimizer, ByNorms) else None
    # parts' squares add up in another order
    return tried is not None and torch.allclose(*tried, rtol=1e-10, atol=1e-12)


def check_takes_parts(optimizer: Optimizer) -> None:
    """Raises PlanError for an optimizer that needs whole parameters (row means, factors, norms of its own)."""
    if not is_elementwise(optimizer) and not is_by_norms(optimizer):
        raise PlanError(
            f"{type(optimizer).__name__} does not treat the elements of a parameter one by one, so it cannot update "
            "parts of parameters; use sharding level 1, which gives every rank whole parameters to update, an "
            "elementwise optimizer such as AdamW or SGD, or one of tutti.optim.large_batch, whose norms are known"
        )


def _tried(optimizer: Optimizer, *, told: bool = False) -> tuple[Tensor, Tensor] | None:
    """A small matrix after some steps of a fresh optimizer of the same kind and settings, taken whole and in halves;
    None where it cannot be made anew. `told`: norms, too, are those of the whole.
    """
    kind = type(optimizer)
    known = set(inspect.signature(kind.__init__).parameters) - {"params"}
    settings: dict[str, Any] = {key: value for key, value in optimizer.defaults.items() if key in known}
    if isinstance(optimizer, LAMB) and "normalise" in known:
        settings["normalise"] = optimizer.normalise
    try:
        return _trained(kind, settings, [(0, 6)], told), _trained(kind, settings, [(0, 3), (3, 6)], told)
    except Exception:
        return None


def _trained(kind: type[Optimizer], settings: dict[str, Any], ranges: list[tuple[int, int]], told: bool) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(6, 4, dtype=torch.float64, generator=generator)
    gradients = torch.randn(3, 6, 4, dtype=torch.float64, generator=generator)
    parts = [nn.Parameter(start[low:high].clone()) for low, high in ranges]
    optimizer = kind(parts, **copy.deepcopy(settings))
    if told and isinstance(optimizer, ByNorms):
        optimizer.over_parts = _of_all_parts
    if told and isinstance(optimizer, LAMB):
        optimizer.global_norm = _global_norm
    for gradient in gradients:
        for part, (low, high) in zip(parts, ranges, strict=True):
            part.grad = gradient[low:high].clone()
        optimizer.step()
    return torch.cat([part.detach() for part in parts])


def _of_all_parts(squares: Tensor, parameters: Sequence[nn.Parameter]) -> Tensor:
    """See large_batch.OverParts: where all parameters are parts of one tensor."""
    parts = len(set(parameters))
    return squares.view(-1, parts).sum(1).repeat_interleave(parts)


def _global_norm(parameters: Sequence[nn.Parameter]) -> float:
    """See large_batch.GlobalNorm."""
    return math.sqrt(sum(float(p.grad.square().sum()) for p in parameters if p.grad is not None))

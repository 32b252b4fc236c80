"""Elementwise combinations of flat tensors: sums, maxima."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

_BLOCK_NBYTES = 2**18
"""Combined at a time: so small that it is still in the cache when it is written."""

_COMBINE: dict[Any, Callable[..., Any]] = {dist.ReduceOp.SUM: torch.add, dist.ReduceOp.MAX: torch.maximum}


def combine(
    tensors: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    op: Any = dist.ReduceOp.SUM,
    probes: list[torch.Tensor] | None = None,
) -> None:
    """Put the combination of `tensors`, in their order, into each of `outs`: others, or the same. All are flat, of one
    size and dtype. Half precisions are combined in float32. `probes`: gets sums of what came out, while it is in the
    cache.
    """
    apart, combined, wide = outs[0] is not tensors[0], _COMBINE[op], _widened(outs[0].dtype)
    size = max(_BLOCK_NBYTES // outs[0].element_size(), 1)
    for start in range(0, outs[0].numel(), size):
        first, *others = [tensor[start : start + size] for tensor in tensors]
        target, *targets = [out[start : start + size] for out in outs]
        total = target
        if wide is not target.dtype:
            total = first.to(wide)
            targets.append(target)
        elif apart:
            total.copy_(first)
        for other in others:
            combined(total, other, out=total)
        for one in targets:
            one.copy_(total)
        if probes is not None:
            probes.append(target.sum())


def _widened(dtype: torch.dtype) -> torch.dtype:
    """The precision in which values of `dtype` are combined."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype

"""Heads exchanged for tokens: each rank gets all tokens of some heads, attends, and gives the tokens back.

The all-to-all form of Jacobs et al. 2023 ("DeepSpeed Ulysses", arXiv 2309.14509). Shapes are (batch, heads, tokens, d).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import FunctionCtx, once_differentiable

from tutti.runtime.traffic import Lane


def to_heads(x: torch.Tensor, group: Any, degree: int, lane: Lane) -> torch.Tensor:
    """(batch, heads, part of the tokens, d) -> (batch, part of the heads, tokens, d)."""
    return _Exchange.apply(x, True, group, degree, lane)  # type: ignore[no-any-return, no-untyped-call]


def to_tokens(x: torch.Tensor, group: Any, degree: int, lane: Lane) -> torch.Tensor:
    """(batch, part of the heads, tokens, d) -> (batch, heads, part of the tokens, d)."""
    return _Exchange.apply(x, False, group, degree, lane)  # type: ignore[no-any-return, no-untyped-call]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, heads: bool, group: Any, degree: int, lane: Lane) -> torch.Tensor:
        ctx.heads, ctx.road = heads, (group, degree, lane)
        return _exchange(x, heads, group, degree, lane)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        heads, road = ctx.heads, ctx.road  # type: ignore[attr-defined]
        return _exchange(grad, not heads, *road), None, None, None, None


def _exchange(x: torch.Tensor, heads: bool, group: Any, degree: int, lane: Lane) -> torch.Tensor:
    """Cut one dim into a part for each rank, and join what arrives along the other, in order of rank."""
    cut, joined = (1, 2) if heads else (2, 1)
    sent = torch.stack(x.chunk(degree, cut)).contiguous()
    received = torch.empty_like(sent)
    with lane.waiting(sent[1:].numel() * sent.element_size()):
        dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(0), joined)

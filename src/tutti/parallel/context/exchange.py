"""Heads exchanged for tokens: each rank gets all tokens of some heads, attends, and gives the tokens back.

The all-to-all form of Jacobs et al. 2023 ("DeepSpeed Ulysses", arXiv 2309.14509). Shapes are (batch, heads, tokens, d).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from tutti.comm.point_to_point import all_to_all
from tutti.comm.traffic import CommChannel, CommHandle


@dataclass(slots=True, kw_only=True)
class Road:
    """One tensor's way to the other ranks and its gradient's way back. `heads`: heads are given for tokens, else the
    other way round; `handle`, `arriving`: what is under way, and where it comes in.
    """

    heads: bool
    group: Any
    degree: int
    channel: CommChannel
    handle: CommHandle | None = None
    arriving: torch.Tensor | None = None

    def start(self, x: torch.Tensor, *, heads: bool) -> None:
        """Cut one dim into a part for each rank, and send the parts."""
        sent = torch.stack(x.chunk(self.degree, 1 if heads else 2)).contiguous()
        self.arriving = torch.empty_like(sent)
        work = all_to_all(self.arriving, sent, self.group)
        self.handle = self.channel.start([work], sent[1:].numel() * sent.element_size())

    def finish(self, *, heads: bool) -> torch.Tensor:
        """Join what arrives along the other dim, in order of rank."""
        assert self.handle is not None
        assert self.arriving is not None
        self.handle.wait()
        arrived, self.arriving, self.handle = self.arriving, None, None
        return torch.cat(arrived.unbind(0), 2 if heads else 1)


def to_heads(xs: Sequence[torch.Tensor], group: Any, degree: int, channel: CommChannel) -> list[torch.Tensor]:
    """Each (batch, heads, part of the tokens, d) -> (batch, part of the heads, tokens, d).

    All are under way at once, and so are their gradients.
    """
    roads = [Road(heads=True, group=group, degree=degree, channel=channel) for _ in xs]
    left = [_Leave.apply(x, road) for x, road in zip(xs, roads, strict=True)]  # type: ignore[no-untyped-call]
    return [_Arrive.apply(x, road) for x, road in zip(left, roads, strict=True)]  # type: ignore[no-untyped-call]


def to_tokens(x: torch.Tensor, group: Any, degree: int, channel: CommChannel) -> torch.Tensor:
    """(batch, part of the heads, tokens, d) -> (batch, heads, part of the tokens, d)."""
    road = Road(heads=False, group=group, degree=degree, channel=channel)
    return _Arrive.apply(_Leave.apply(x, road), road)  # type: ignore[no-any-return, no-untyped-call]


class _Leave(torch.autograd.Function):
    """Starts the exchange; in backward, where the gradient's exchange ends."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, road: Road) -> torch.Tensor:
        ctx.road = road
        road.start(x, heads=road.heads)
        return _token(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        road: Road = ctx.road  # type: ignore[attr-defined]
        return road.finish(heads=not road.heads), None


class _Arrive(torch.autograd.Function):
    """Ends the exchange; in backward, where the gradient's exchange starts."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, road: Road) -> torch.Tensor:
        ctx.road = road
        return road.finish(heads=road.heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        road: Road = ctx.road  # type: ignore[attr-defined]
        road.start(grad, heads=not road.heads)
        return _token(grad), None


def _token(like: torch.Tensor) -> torch.Tensor:
    """What ties the end of an exchange to its start in the graph; it carries no value."""
    return like.new_zeros(())

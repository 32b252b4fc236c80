"""Rows that change ranks and come back as gradients: all-to-all with uneven parts, also empty ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tutti.comm.point_to_point import all_to_all
from tutti.comm.traffic import CommChannel, CommHandle


@dataclass(slots=True)
class AllToAllRoute:
    """Who sends how many rows to whom. `send[i]`, `receive[i]`: rows to and from rank i of `group`; `own`: this rank's
    place in it, whose rows stay; `channel`: where it is counted; `handle`, `arriving`: the exchange under way, and
    where
    gradients come in.
    """

    group: Any
    own: int
    send: Sequence[int]
    receive: Sequence[int]
    channel: CommChannel
    handle: CommHandle | None = None
    arriving: Tensor | None = None

    def back(self) -> "AllToAllRoute":
        """The way back."""
        return AllToAllRoute(self.group, self.own, self.receive, self.send, self.channel)


def exchange(rows: Tensor, route: AllToAllRoute) -> Tensor:
    """`rows`, ordered by receiver, go to their ranks; returns the rows that came, ordered by sender.

    Gradients take the way back. All ranks of the group call it, and backward must pass here on all of them or none.
    """
    return land(launch(rows, route), route)


def launch(rows: Tensor, route: AllToAllRoute) -> Tensor:
    """Start an exchange; its result may be used only after `land`. In backward the reverse exchange ends here."""
    return _Launch.apply(rows, route)  # type: ignore[no-any-return, no-untyped-call]


def land(rows: Tensor, route: AllToAllRoute) -> Tensor:
    """Wait for an exchange. In backward the reverse exchange starts here, so what forward computes between `launch`
    and `land` hides the exchange in both directions.
    """
    return _Land.apply(rows, route)  # type: ignore[no-any-return, no-untyped-call]


def plain_exchange(rows: Tensor, route: AllToAllRoute) -> Tensor:
    """`exchange` of what has no gradient: indices, sizes."""
    received, handle = _start(rows, route)
    handle.wait()
    return received


def _start(rows: Tensor, route: AllToAllRoute) -> tuple[Tensor, CommHandle]:
    row_numel = rows[0].numel() if len(rows) else 0
    nbytes = (len(rows) - route.send[route.own]) * row_numel * rows.element_size()
    received = rows.new_empty((sum(route.receive), *rows.shape[1:]))
    work = all_to_all(received, rows.contiguous(), route.group, (route.receive, route.send))
    return received, route.channel.start([work], nbytes)


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: AllToAllRoute) -> Tensor:
        ctx.route = route
        received, route.handle = _start(rows, route)
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """`gradient` only brings the order of things; what arrived has its own shape and waits in the route."""
        ctx.route.handle.wait()
        arrived, ctx.route.handle, ctx.route.arriving = ctx.route.arriving, None, None
        return arrived, None


class _Land(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: AllToAllRoute) -> Tensor:
        ctx.route = route
        assert route.handle is not None
        route.handle.wait()
        route.handle = None
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.route.arriving, ctx.route.handle = _start(gradient, ctx.route.back())
        return gradient, None

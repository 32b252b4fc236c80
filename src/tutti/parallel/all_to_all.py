"""All-to-all exchanges of rows, with gradients. Parts may be uneven, or empty."""

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
    """Who sends how many rows to whom.

    Attributes:
        group: the process group.
        own: this rank's position in `group`; the rows that it sends to itself stay here.
        send: for each rank of `group`, the number of rows sent to it.
        receive: for each rank of `group`, the number of rows received from it.
        channel: the accounting channel of the exchange.
        handle: the exchange in progress, if any.
        arriving: the buffer that the gradients are received into.
    """

    group: Any
    own: int
    send: Sequence[int]
    receive: Sequence[int]
    channel: CommChannel
    handle: CommHandle | None = None
    arriving: Tensor | None = None

    def back(self) -> "AllToAllRoute":
        """Return the route in the opposite direction."""
        return AllToAllRoute(self.group, self.own, self.receive, self.send, self.channel)


def exchange(rows: Tensor, route: AllToAllRoute) -> Tensor:
    """Send rows to other ranks, and their gradients back. Collective.

    All ranks of the group must call it, and backward must pass through it on all of them or on none.

    Args:
        rows: (rows, ...), ordered by receiver.
        route: the number of rows for each rank.

    Returns:
        The rows received, ordered by sender.
    """
    return land(launch(rows, route), route)


def launch(rows: Tensor, route: AllToAllRoute) -> Tensor:
    """Start an exchange; its result may be used only after `land`. In backward the reverse exchange ends here."""
    return _Launch.apply(rows, route)  # type: ignore[no-any-return, no-untyped-call]


def land(rows: Tensor, route: AllToAllRoute) -> Tensor:
    """Wait for an exchange that `launch` started.

    In backward the reverse exchange starts here. What forward computes between `launch` and `land` therefore hides the
    exchange in both directions.
    """
    return _Land.apply(rows, route)  # type: ignore[no-any-return, no-untyped-call]


def plain_exchange(rows: Tensor, route: AllToAllRoute) -> Tensor:
    """Exchange rows that have no gradient, such as indices and sizes."""
    received, handle = _start(rows, route)
    handle.wait()
    return received


def _start(rows: Tensor, route: AllToAllRoute) -> tuple[Tensor, CommHandle]:
    row_numel = rows[0].numel() if len(rows) else 0  # without rows, nothing is sent
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
        """Return the gradient that arrived, which waits in the route.

        `gradient` only makes this run after `_Land.backward`: the result has another shape.
        """
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

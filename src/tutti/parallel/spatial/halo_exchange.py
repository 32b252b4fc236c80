"""Exchanges among the ranks that share a sample: halo rows and sums, each with its exact adjoint."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from tutti.comm.point_to_point import ring_all_reduce_nbytes, start_messages
from tutti.comm.traffic import CommChannel, CommHandle, untracked_channel
from tutti.parallel.data.batchnorm import BatchScope
from tutti.parallel.spatial.halo_geometry import HaloRows, Rows, idle, overlap, owned, receives, sends


@dataclass(slots=True, kw_only=True)
class SpatialGroup:
    """The ranks that share a sample, this rank's position among them, and the bytes it has sent.

    Attributes:
        grid: parts along each spatial dim.
        place: this rank's part along each spatial dim.
        group: process group of all parts, row-major over the grid.
        sums: set of cut grid axes -> process group along these axes.
        scopes: set of cut grid axes -> scope of batch statistics, over data and these axes.
        overlap: whether interiors are computed during halo transfers; off only to measure the gain.
        sent_nbytes: bytes of rows that this rank has sent.
        halos: channel that counts halo messages.
        totals: channel that counts sums.
        dry: count rows without sending them.
    """

    grid: tuple[int, ...]
    place: tuple[int, ...]
    group: Any
    sums: dict[tuple[int, ...], Any]
    scopes: dict[tuple[int, ...], BatchScope] = field(default_factory=dict)
    overlap: bool = True
    sent_nbytes: int = 0
    halos: CommChannel = field(default_factory=untracked_channel)
    totals: CommChannel = field(default_factory=untracked_channel)
    dry: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "SpatialGroup":
        return self

    def neighbour(self, axis: int, part: int) -> int:
        """Group rank of the `part` on this rank's line along a grid axis."""
        position = 0
        for number, parts in enumerate(self.grid):
            position = position * parts + (part if number == axis else self.place[number])
        return position


@dataclass(slots=True, kw_only=True)
class HaloTransfer:
    """Halo rows being sent and received.

    Attributes:
        handle: the messages; None if there are none.
        arrivals: (rows, buffer) for each message to receive.
        departures: tensors kept alive until they are sent.
    """

    handle: CommHandle | None
    arrivals: list[tuple[Rows, torch.Tensor]]
    departures: list[torch.Tensor]

    def wait(self) -> None:
        if self.handle is not None:
            self.handle.wait()


def _start_transfer(
    tensor: torch.Tensor,
    dim: int,
    first: int,
    outgoing: Sequence[HaloRows],
    incoming: Sequence[HaloRows],
    axis: int,
    space: SpatialGroup,
) -> HaloTransfer:
    """Start to exchange rows of `tensor` along `dim`.

    Args:
        tensor: has the rows to send; its shape outside `dim` is also that of received rows.
        dim: the cut dim.
        first: global number of row 0 of `tensor`.
        outgoing: rows to send, by part.
        incoming: rows to receive, by part.
        axis: the grid axis that cuts `dim`.
        space: the parts.
    """
    transfer, to_receive, to_send = HaloTransfer(handle=None, arrivals=[], departures=[]), [], []
    nbytes = 0
    for message in outgoing:
        start, stop = message.rows
        rows = tensor.narrow(dim, start - first, stop - start).contiguous()
        transfer.departures.append(rows)  # keeps it alive until it is sent
        nbytes += rows.numel() * rows.element_size()
        to_send.append((space.neighbour(axis, message.part), rows))
    for message in incoming:
        start, stop = message.rows
        shape = [*tensor.shape[:dim], stop - start, *tensor.shape[dim + 1 :]]
        rows = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
        transfer.arrivals.append((message.rows, rows))
        to_receive.append((space.neighbour(axis, message.part), rows))
    space.sent_nbytes += nbytes
    if (to_receive or to_send) and not space.dry:
        transfer.handle = space.halos.start(start_messages(to_receive, to_send, space.group), nbytes)
    return transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class HaloRoute:
    """An exchange along one dim: the rows that each part owns, and the rows that it needs.

    Attributes:
        dim: the dim of the tensor.
        axis: the grid axis that cuts it.
        bounds: boundaries of the owned rows.
        needs: rows that each part needs.
        fill: value of needed rows outside the tensor.
    """

    dim: int
    axis: int
    bounds: tuple[int, ...]
    needs: tuple[Rows, ...]
    fill: float = 0.0

    def mine(self, space: SpatialGroup) -> tuple[Rows, Rows]:
        """(rows this rank owns, rows it needs)."""
        index = space.place[self.axis]
        return owned(self.bounds, index), self.needs[index]

    def start(self, tensor: torch.Tensor, space: SpatialGroup) -> HaloTransfer:
        """Start to exchange the rows that parts need from other parts."""
        index = space.place[self.axis]
        outgoing, incoming = sends(self.bounds, self.needs, index), receives(self.bounds, self.needs, index)
        return _start_transfer(tensor, self.dim, self.bounds[index], outgoing, incoming, self.axis, space)

    def finish(self, tensor: torch.Tensor, transfer: HaloTransfer, space: SpatialGroup) -> torch.Tensor:
        """The needed rows, after the transfer."""
        have, need = self.mine(space)
        shape = [*tensor.shape[: self.dim], need[1] - need[0], *tensor.shape[self.dim + 1 :]]
        inside = need[0] >= 0 and need[1] <= self.bounds[-1]
        result = tensor.new_empty(shape) if inside else tensor.new_full(shape, self.fill)
        _copy_rows(result, tensor, self.dim, need[0], have[0], overlap(have, need))
        transfer.wait()
        for rows, arrived in transfer.arrivals:
            _copy_rows(result, arrived, self.dim, need[0], rows[0], rows)
        return result

    def start_back(self, grad: torch.Tensor, space: SpatialGroup) -> HaloTransfer:
        """Start to return gradients of halo rows to their owners."""
        index = space.place[self.axis]
        outgoing, incoming = receives(self.bounds, self.needs, index), sends(self.bounds, self.needs, index)
        return _start_transfer(grad, self.dim, self.needs[index][0], outgoing, incoming, self.axis, space)

    def finish_back(
        self, grad: torch.Tensor, transfer: HaloTransfer, space: SpatialGroup, *, within: bool = False
    ) -> torch.Tensor:
        """Gradients of the owned rows: this rank's plus those returned by other parts.

        Args:
            grad: gradient of the needed rows.
            transfer: from `start_back`.
            space: the parts.
            within: accumulate in `grad` if it has all owned rows; the result is then a view of it.
        """
        have, need = self.mine(space)
        if within and need[0] <= have[0] and have[1] <= need[1]:
            result = grad.narrow(self.dim, have[0] - need[0], have[1] - have[0])
        else:
            result = grad.new_zeros([*grad.shape[: self.dim], have[1] - have[0], *grad.shape[self.dim + 1 :]])
            _copy_rows(result, grad, self.dim, have[0], need[0], overlap(have, need))
        transfer.wait()
        for rows, arrived in transfer.arrivals:
            result.narrow(self.dim, rows[0] - have[0], rows[1] - rows[0]).add_(arrived)
        return result


def _copy_rows(
    target: torch.Tensor, source: torch.Tensor, dim: int, target_first: int, source_first: int, rows: Rows
) -> None:
    """Copy `rows` between two tensors, given the global number of each one's row 0 along `dim`."""
    start, length = rows[0], rows[1] - rows[0]
    if length > 0:
        target.narrow(dim, start - target_first, length).copy_(source.narrow(dim, start - source_first, length))


class _Fetch(torch.autograd.Function):
    """Owned rows -> needed rows. Backward returns gradients of halo rows to their owners, which add them."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, route: HaloRoute, space: SpatialGroup) -> torch.Tensor:
        ctx.route, ctx.space = route, space
        return route.finish(tensor, route.start(tensor, space), space)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        route, space = ctx.route, ctx.space
        return route.finish_back(grad, route.start_back(grad, space), space), None, None


def fetch(
    tensor: torch.Tensor,
    dim: int,
    axis: int,
    bounds: tuple[int, ...],
    needs: tuple[Rows, ...],
    fill: float,
    space: SpatialGroup,
) -> torch.Tensor:
    """The rows along `dim` that this rank needs, of a tensor cut there at `bounds`. Differentiable.

    Args:
        tensor: this rank's rows.
        dim: the cut dim.
        axis: the grid axis that cuts it.
        bounds: boundaries of the owned rows.
        needs: rows that each part on the grid axis needs, equal on all ranks.
        fill: value of needed rows outside the tensor.
        space: the parts.
    """
    if idle(bounds, needs):
        return tensor
    route = HaloRoute(dim=dim, axis=axis, bounds=bounds, needs=needs, fill=fill)
    return _Fetch.apply(tensor, route, space)  # type: ignore[no-any-return, no-untyped-call]


class _AllSum(torch.autograd.Function):
    """Sum over ranks. Every rank receives the sum, so the gradient is the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any, channel: CommChannel) -> torch.Tensor:
        ctx.group, ctx.channel = group, channel
        return _all_reduced(tensor, group, channel)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _all_reduced(grad, ctx.group, ctx.channel), None, None


def _all_reduced(tensor: torch.Tensor, group: Any, channel: CommChannel) -> torch.Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    with channel.waiting(ring_all_reduce_nbytes(total, dist.get_world_size(group))):
        dist.all_reduce(total, group=group)
    return total


def all_sum(tensor: torch.Tensor, axes: tuple[int, ...], space: SpatialGroup) -> torch.Tensor:
    """Sum over the parts along these grid axes (sorted). Differentiable."""
    if not axes or space.dry:
        return tensor
    return _AllSum.apply(tensor, space.sums[axes], space.totals)  # type: ignore[no-any-return, no-untyped-call]

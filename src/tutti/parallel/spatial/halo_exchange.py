"""Exchanges among the ranks that share a sample: rows of a neighbour, and sums; each with its exact adjoint."""

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
    """This rank's place among the parts of a sample, and what it has sent.

    `grid`: parts along each spatial dim; `place`: this rank's part along each; `group`: of the ranks of all
    parts, row-major over the grid; `sums`: a group for every set of cut grid axes; `scopes`: of batch statistics,
    over data and those axes. `overlap`: whether interiors are computed while halos travel; off only to measure it.
    `sent_nbytes`: bytes of rows this rank has sent, also counted in `halos`, as sums are in `totals`. `dry`: rows are
    counted, not sent.
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
        """Place in the group of the `part` on this rank's line along a grid axis."""
        position = 0
        for number, parts in enumerate(self.grid):
            position = position * parts + (part if number == axis else self.place[number])
        return position


@dataclass(slots=True, kw_only=True)
class HaloTransfer:
    """Rows on their way: arrivals are (rows, buffer)."""

    handle: CommHandle | None
    arrivals: list[tuple[Rows, torch.Tensor]]
    departures: list[torch.Tensor]

    def wait(self) -> None:
        if self.handle is not None:
            self.handle.wait()


def depart(
    tensor: torch.Tensor,
    dim: int,
    first: int,
    outgoing: Sequence[HaloRows],
    incoming: Sequence[HaloRows],
    axis: int,
    space: SpatialGroup,
) -> HaloTransfer:
    """Start sending rows of `tensor`, whose row `first` is its row 0 along `dim`, and receiving others."""
    transfer, comes, goes = HaloTransfer(handle=None, arrivals=[], departures=[]), [], []
    nbytes = 0
    for message in outgoing:
        start, stop = message.rows
        rows = tensor.narrow(dim, start - first, stop - start).contiguous()
        transfer.departures.append(rows)  # held until it has left
        nbytes += rows.numel() * rows.element_size()
        goes.append((space.neighbour(axis, message.part), rows))
    for message in incoming:
        start, stop = message.rows
        shape = [*tensor.shape[:dim], stop - start, *tensor.shape[dim + 1 :]]
        rows = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
        transfer.arrivals.append((message.rows, rows))
        comes.append((space.neighbour(axis, message.part), rows))
    space.sent_nbytes += nbytes
    if (comes or goes) and not space.dry:
        transfer.handle = space.halos.start(start_messages(comes, goes, space.group), nbytes)
    return transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class HaloRoute:
    """An exchange along one dim: rows are owned by `bounds`, every part wants `needs`; outside them stands `fill`."""

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
        index = space.place[self.axis]
        outgoing, incoming = sends(self.bounds, self.needs, index), receives(self.bounds, self.needs, index)
        return depart(tensor, self.dim, self.bounds[index], outgoing, incoming, self.axis, space)

    def finish(self, tensor: torch.Tensor, transfer: HaloTransfer, space: SpatialGroup) -> torch.Tensor:
        """The needed rows, once those of others are there."""
        have, need = self.mine(space)
        shape = [*tensor.shape[: self.dim], need[1] - need[0], *tensor.shape[self.dim + 1 :]]
        inside = need[0] >= 0 and need[1] <= self.bounds[-1]
        result = tensor.new_empty(shape) if inside else tensor.new_full(shape, self.fill)
        _put(result, tensor, self.dim, need[0], have[0], overlap(have, need))
        transfer.wait()
        for rows, arrived in transfer.arrivals:
            _put(result, arrived, self.dim, need[0], rows[0], rows)
        return result

    def start_back(self, grad: torch.Tensor, space: SpatialGroup) -> HaloTransfer:
        """Send the gradients of rows that others own back to them."""
        index = space.place[self.axis]
        outgoing, incoming = receives(self.bounds, self.needs, index), sends(self.bounds, self.needs, index)
        return depart(grad, self.dim, self.needs[index][0], outgoing, incoming, self.axis, space)

    def finish_back(
        self, grad: torch.Tensor, transfer: HaloTransfer, space: SpatialGroup, *, within: bool = False
    ) -> torch.Tensor:
        """Gradients of the owned rows: this rank's, and those that return are added. `within`: in `grad` itself, of
        which the result then is a view, where it has all of them."""
        have, need = self.mine(space)
        if within and need[0] <= have[0] and have[1] <= need[1]:
            result = grad.narrow(self.dim, have[0] - need[0], have[1] - have[0])
        else:
            result = grad.new_zeros([*grad.shape[: self.dim], have[1] - have[0], *grad.shape[self.dim + 1 :]])
            _put(result, grad, self.dim, have[0], need[0], overlap(have, need))
        transfer.wait()
        for rows, arrived in transfer.arrivals:
            result.narrow(self.dim, rows[0] - have[0], rows[1] - rows[0]).add_(arrived)
        return result


def _put(
    target: torch.Tensor, source: torch.Tensor, dim: int, target_first: int, source_first: int, rows: Rows
) -> None:
    """Copy `rows` between tensors whose row 0 along `dim` has these global numbers."""
    start, length = rows[0], rows[1] - rows[0]
    if length > 0:
        target.narrow(dim, start - target_first, length).copy_(source.narrow(dim, start - source_first, length))


class _Fetch(torch.autograd.Function):
    """Owned rows -> needed rows; backward returns gradients of foreign rows to their owners, where they are added."""

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
    """The rows along `dim` that this rank needs, of a tensor cut there at `bounds`; differentiable.

    `needs`: of every part on the grid `axis`, the same on all ranks; rows outside the tensor are `fill`.
    """
    if idle(bounds, needs):
        return tensor
    route = HaloRoute(dim=dim, axis=axis, bounds=bounds, needs=needs, fill=fill)
    return _Fetch.apply(tensor, route, space)  # type: ignore[no-any-return, no-untyped-call]


class _AllSum(torch.autograd.Function):
    """Sum over ranks; the adjoint of a sum that all ranks receive is the sum of all their gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any, channel: CommChannel) -> torch.Tensor:
        ctx.group, ctx.channel = group, channel
        return _summed(tensor, group, channel)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _summed(grad, ctx.group, ctx.channel), None, None


def _summed(tensor: torch.Tensor, group: Any, channel: CommChannel) -> torch.Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    with channel.waiting(ring_all_reduce_nbytes(total, dist.get_world_size(group))):
        dist.all_reduce(total, group=group)
    return total


def all_sum(tensor: torch.Tensor, axes: tuple[int, ...], space: SpatialGroup) -> torch.Tensor:
    """Sum over the parts along these grid axes (sorted); differentiable."""
    if not axes or space.dry:
        return tensor
    return _AllSum.apply(tensor, space.sums[axes], space.totals)  # type: ignore[no-any-return, no-untyped-call]

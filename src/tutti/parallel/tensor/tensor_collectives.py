"""Conjugate pairs of collectives over the split axis: each one's backward is the other's forward.

A *whole* tensor is equal on all split ranks, and so is its gradient, which is complete. A *part* differs between
ranks, and so does its gradient.

copy: whole -> whole, used by computation on parts. Identity in forward, all-reduce of gradients in backward. This is
    f of Shoeybi et al. 2019 (arXiv 1909.08053).
add: one term on each rank -> whole. All-reduce in forward, identity in backward. This is their g.
gather: parts -> whole.
take: whole -> part.
gather_copy, add_take: both steps in one collective, along the sequence (Korthikanti et al. 2022, arXiv 2205.05198).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _python_dispatch

from tutti.comm.hierarchical import HierarchicalCommunicator
from tutti.comm.point_to_point import all_gather, reduce_scatter, ring_all_reduce_nbytes
from tutti.comm.shared_memory import SharedMemoryCommunicator
from tutti.comm.traffic import CommChannel, untracked_channel
from tutti.data.seeds import forked_device, seed_device
from tutti.errors import PlanError
from tutti.parallel.tensor.partition_ranges import Range, RankRanges


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitGroup:
    """The ranks of this rank's split group.

    Attributes:
        handle: their process group.
        rank: this rank's number in the group.
        size: number of ranks.
        weights: relative size of the part that each rank computes; empty for equal parts.
        channel: where communication is counted.
        communicator: makes the collectives where ranks share memory: all ranks, or the ranks of each node.
    """

    handle: Any
    rank: int
    size: int
    weights: tuple[float, ...] = ()
    channel: CommChannel = field(default_factory=untracked_channel, compare=False)
    communicator: SharedMemoryCommunicator | HierarchicalCommunicator | None = field(default=None, compare=False)

    def sum(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """All-reduce in place, and return the tensor."""
        with self.channel.waiting(ring_all_reduce_nbytes(tensor, self.size)):
            if self.communicator is not None:
                self.communicator.reduce(tensor, op)
            else:
                dist.all_reduce(tensor, op, group=self.handle)
        return tensor

    def gather(self, gathered: torch.Tensor, part: torch.Tensor) -> None:
        """All-gather every rank's `part`, concatenated along dim 0, into `gathered`."""
        with self.channel.waiting((self.size - 1) * part.numel() * part.element_size()):
            if self.communicator is not None:
                self.communicator.gather(gathered.view(self.size, -1), part).wait()
            else:
                all_gather(gathered, part, self.handle).wait()

    def sum_part(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        """Reduce-scatter `whole` along dim 0 into `part`."""
        with self.channel.waiting(ring_all_reduce_nbytes(whole, self.size) // 2):
            if self.communicator is not None:
                self.communicator.scatter_sum(whole, part).wait()
            else:
                reduce_scatter(part, whole, self.handle).wait()


def copy(whole: torch.Tensor, group: SplitGroup) -> torch.Tensor:
    """The whole tensor, for computation on parts: its gradient is all-reduced."""
    return _Copy.apply(whole, group) if _tracked(whole) else whole  # type: ignore[no-untyped-call]


def add(term: torch.Tensor, group: SplitGroup) -> torch.Tensor:
    """All-reduce the ranks' terms. `term` must be fresh: it is overwritten."""
    return _Add.apply(term, group)  # type: ignore[no-untyped-call, no-any-return]


def gather(part: torch.Tensor, dim: int, spread: RankRanges, group: SplitGroup) -> torch.Tensor:
    """All-gather the ranks' parts along `dim` into the whole tensor."""
    return _GatherActivation.apply(part, dim, spread, group)  # type: ignore[no-untyped-call, no-any-return]


def take(whole: torch.Tensor, dim: int, spread: RankRanges, group: SplitGroup) -> torch.Tensor:
    """This rank's part of a whole tensor."""
    return _Take.apply(whole, dim, spread, group)  # type: ignore[no-untyped-call, no-any-return]


def gather_copy(part: torch.Tensor, dim: int, spread: RankRanges, group: SplitGroup) -> torch.Tensor:
    """`copy` of `gather`: the gradient is reduce-scattered in one collective."""
    return _GatherCopy.apply(part, dim, spread, group)  # type: ignore[no-untyped-call, no-any-return]


def add_take(term: torch.Tensor, dim: int, spread: RankRanges, group: SplitGroup) -> torch.Tensor:
    """`take` of `add`: the ranks' terms are reduce-scattered along `dim`."""
    return _AddTake.apply(term, dim, spread, group)  # type: ignore[no-untyped-call, no-any-return]


def pieces(tensor: torch.Tensor, dim: int, ranges: tuple[Range, ...]) -> torch.Tensor:
    """Positions `ranges` of a tensor along `dim`, concatenated; a view if there is one range."""
    parts = [tensor.narrow(dim, start, stop - start) for start, stop in ranges]
    if not parts:
        return tensor.narrow(dim, 0, 0)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _tracked(tensor: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and tensor.requires_grad


def _gathered(part: torch.Tensor, dim: int, spread: RankRanges, group: SplitGroup) -> torch.Tensor:
    """All-gather along `dim`. Parts of different sizes are padded to the largest; booleans are sent as bytes."""
    if part.dtype is torch.bool:
        return _gathered(part.to(torch.uint8), dim, spread, group).bool()
    sizes = [spread.local(rank) for rank in range(group.size)]
    largest, rows = max(sizes), part.movedim(dim, 0)
    if sizes[group.rank] < largest:
        rows = torch.cat([rows, rows.new_zeros((largest - sizes[group.rank], *rows.shape[1:]))])
    rows = rows.contiguous()
    gathered = rows.new_empty((group.size * largest, *rows.shape[1:]))
    group.gather(gathered, rows)
    if not spread.simple:
        whole = rows.new_empty((spread.size, *rows.shape[1:]))
        for rank, ranges in enumerate(spread.parts):
            offset = rank * largest
            for start, stop in ranges:
                whole[start:stop] = gathered[offset : offset + stop - start]
                offset += stop - start
        gathered = whole
    return gathered.movedim(0, dim).contiguous()


def _summed_part(term: torch.Tensor, dim: int, spread: RankRanges, group: SplitGroup) -> torch.Tensor:
    """This rank's part of the sum over ranks."""
    if spread.simple:
        rows = term.movedim(dim, 0).contiguous()
        part = rows.new_empty((spread.local(group.rank), *rows.shape[1:]))
        group.sum_part(part, rows)
        return part.movedim(0, dim).contiguous()
    whole = group.sum(term.contiguous().clone())
    return pieces(whole, dim, spread.parts[group.rank]).contiguous()


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, group: SplitGroup) -> torch.Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return add(grad.contiguous().clone(), ctx.group), None


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, term: torch.Tensor, group: SplitGroup) -> torch.Tensor:
        ctx.group = group
        if not term.is_contiguous():
            return group.sum(term.contiguous())
        ctx.mark_dirty(term)
        return group.sum(term)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return copy(grad, ctx.group), None


class _GatherActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, dim: int, spread: RankRanges, group: SplitGroup) -> torch.Tensor:
        ctx.place = dim, spread, group
        return _gathered(part, dim, spread, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dim, spread, group = ctx.place
        ranges = spread.parts[group.rank]
        if spread.disjoint:
            return take(grad, dim, spread, group), None, None, None
        _check_once(grad)
        owned = torch.zeros_like(grad)  # a position that several ranks hold counts once
        for start, stop in spread.owned().parts[group.rank]:
            owned.narrow(dim, start, stop - start).copy_(grad.narrow(dim, start, stop - start))
        return pieces(owned, dim, ranges), None, None, None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, dim: int, spread: RankRanges, group: SplitGroup) -> torch.Tensor:
        ctx.place = dim, spread, group
        part = pieces(whole, dim, spread.parts[group.rank])
        return part.clone() if len(spread.parts[group.rank]) <= 1 else part

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dim, spread, group = ctx.place
        if spread.disjoint:
            return gather(grad, dim, spread, group), None, None, None
        _check_once(grad)
        shape = list(grad.shape)
        shape[dim] = spread.size
        return group.sum(_placed(grad, dim, shape, spread.parts[group.rank])), None, None, None


class _GatherCopy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, dim: int, spread: RankRanges, group: SplitGroup) -> torch.Tensor:
        ctx.place = dim, spread, group
        return _gathered(part, dim, spread, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return add_take(grad, *ctx.place), None, None, None


class _AddTake(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, term: torch.Tensor, dim: int, spread: RankRanges, group: SplitGroup) -> torch.Tensor:
        ctx.place = dim, spread, group
        return _summed_part(term, dim, spread, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gather_copy(grad, *ctx.place), None, None, None


def _check_once(grad: torch.Tensor) -> None:
    """Refuse a backward of a backward where ranks hold the same positions.

    Raises:
        PlanError: backward was called with create_graph.
    """
    if torch.is_grad_enabled() and grad.requires_grad:
        raise PlanError(
            "mesh.split divides heads that several ranks hold together, whose gradients cannot be differentiated again "
            "(create_graph=True); use a degree that divides the heads, or another axis"
        )


def _placed(part: torch.Tensor, dim: int, shape: list[int], ranges: tuple[Range, ...]) -> torch.Tensor:
    """Zeros of `shape`, with the part at its ranges."""
    whole, offset = part.new_zeros(shape), 0
    for start, stop in ranges:
        whole.narrow(dim, start, stop - start).copy_(part.narrow(dim, offset, stop - start))
        offset += stop - start
    return whole


def draws_whole() -> bool:
    """Whether a mode is active (in verification) under which random draws must equal those of one device.

    Parts are then gathered, and every rank draws for the whole tensor.
    """
    modes = _python_dispatch._get_current_dispatch_mode_stack()
    return any(getattr(mode, "draws_whole", False) for mode in modes)


@contextmanager
def own_stream(device: torch.device, group: SplitGroup) -> Iterator[None]:
    """Draw random numbers from a stream of this rank, derived from the common stream and the rank in the split group.

    The common stream advances by one draw, whatever is drawn inside, so it stays equal on all split ranks. Recompute
    restores the common stream and therefore draws the same values again.
    """
    generator = _generator(device)
    if generator is None:  # torch shows no generator of such a device
        drawn = int(torch.randint(2**62, (), device=device))
        with forked_device(device):
            seed_device((drawn * 1_000_003 + group.rank + 1) % 2**63, device)
            yield
        return
    if device.type == "cuda":  # advances the offset instead of drawing, which would synchronize with the device
        seed, offset = generator.initial_seed(), generator.get_offset()
        generator.set_offset(offset + 4)
        seed = hash((seed, offset))
    else:
        seed = int(torch.randint(2**62, (), generator=generator))
    state = generator.get_state()
    generator.manual_seed((seed * 1_000_003 + group.rank + 1) % 2**63)
    try:
        yield
    finally:
        generator.set_state(state)


def _generator(device: torch.device) -> torch.Generator | None:
    if device.type == "cpu":
        return torch.default_generator
    generators = getattr(torch.get_device_module(device), "default_generators", None)
    return None if generators is None else generators[device.index or 0]

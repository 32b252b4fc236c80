"""Conjugate pairs of exchanges over the split axis: what one does in forward the other does in backward.

Tensors are of two kinds. A *whole* one is equal on all split ranks, and so is its gradient, which is complete. Of a
*part* every rank has its own, with its own gradient. `copy`: whole -> whole whose uses are parts of one sum (identity,
gradients summed: f of Shoeybi et al. 2019, arXiv 1909.08053); `add`: parts of a sum -> whole (their g); `gather`:
parts -> whole; `take`: whole -> part; `gather_copy` and `add_take`: the same in one exchange, along the sequence
(Korthikanti et al. 2022, arXiv 2205.05198).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.utils import _python_dispatch

from tutti.comm.hierarchical import HierarchicalCommunicator
from tutti.comm.point_to_point import all_gather, reduce_scatter, ring_all_reduce_nbytes
from tutti.comm.shared_memory import SharedMemoryCommunicator
from tutti.comm.traffic import CommChannel, untracked_channel
from tutti.parallel.tensor.partition_ranges import Range, RankRanges


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitGroup:
    """The ranks of this rank's split group. `handle`: their process group; `rank`: this one's place among them;
    `weights`: of the parts that each computes, empty where they are equal; `channel`: where exchanges are counted;
    `communicator`:
    where they are made, if ranks share memory: all of them, or those of each host.
    """

    handle: Any
    rank: int
    size: int
    weights: tuple[float, ...] = ()
    channel: CommChannel = field(default_factory=untracked_channel, compare=False)
    communicator: SharedMemoryCommunicator | HierarchicalCommunicator | None = field(default=None, compare=False)

    def sum(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """Reduce in place over the ranks, and return the tensor."""
        with self.channel.waiting(ring_all_reduce_nbytes(tensor, self.size)):
            if self.communicator is not None:
                self.communicator.reduce(tensor, op)
            else:
                dist.all_reduce(tensor, op, group=self.handle)
        return tensor

    def gather(self, everyone: torch.Tensor, mine: torch.Tensor) -> None:
        """Every rank's `mine`, one behind another along dim 0, into `everyone`."""
        with self.channel.waiting((self.size - 1) * mine.numel() * mine.element_size()):
            if self.communicator is not None:
                self.communicator.gather(everyone.view(self.size, -1), mine).wait()
            else:
                all_gather(everyone, mine, self.handle).wait()

    def sum_part(self, mine: torch.Tensor, whole: torch.Tensor) -> None:
        """This rank's part along dim 0 of the sum of `whole` over ranks into `mine`."""
        with self.channel.waiting(ring_all_reduce_nbytes(whole, self.size) // 2):
            if self.communicator is not None:
                self.communicator.scatter_sum(whole, mine).wait()
            else:
                reduce_scatter(mine, whole, self.handle).wait()


def copy(whole: torch.Tensor, group: SplitGroup) -> torch.Tensor:
    """The whole tensor for uses on parts: its gradient is the sum over ranks."""
    return _Copy.apply(whole, group) if _tracked(whole) else whole  # type: ignore[no-untyped-call]


def add(term: torch.Tensor, group: SplitGroup) -> torch.Tensor:
    """The sum of the ranks' terms, whole. `term` must be fresh: it is overwritten."""
    return _Add.apply(term, group)  # type: ignore[no-untyped-call, no-any-return]


def gather(part: torch.Tensor, dim: int, spread: RankRanges, group: SplitGroup) -> torch.Tensor:
    """The whole tensor from the ranks' parts along `dim`."""
    return _GatherActivation.apply(part, dim, spread, group)  # type: ignore[no-untyped-call, no-any-return]


def take(whole: torch.Tensor, dim: int, spread: RankRanges, group: SplitGroup) -> torch.Tensor:
    """This rank's part of a whole tensor."""
    return _Take.apply(whole, dim, spread, group)  # type: ignore[no-untyped-call, no-any-return]


def gather_copy(part: torch.Tensor, dim: int, spread: RankRanges, group: SplitGroup) -> torch.Tensor:
    """`copy` of `gather`: gradients are summed and taken apart in one exchange."""
    return _GatherCopy.apply(part, dim, spread, group)  # type: ignore[no-untyped-call, no-any-return]


def add_take(term: torch.Tensor, dim: int, spread: RankRanges, group: SplitGroup) -> torch.Tensor:
    """`take` of `add`: this rank's part, along `dim`, of the sum of the ranks' terms."""
    return _AddTake.apply(term, dim, spread, group)  # type: ignore[no-untyped-call, no-any-return]


def pieces(tensor: torch.Tensor, dim: int, ranges: tuple[Range, ...]) -> torch.Tensor:
    """The positions `ranges` of a tensor along `dim`, one behind another; a view where it is one range."""
    parts = [tensor.narrow(dim, start, stop - start) for start, stop in ranges]
    if not parts:
        return tensor.narrow(dim, 0, 0)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _tracked(tensor: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and tensor.requires_grad


def _gathered(part: torch.Tensor, dim: int, spread: RankRanges, group: SplitGroup) -> torch.Tensor:
    """Parts of different sizes travel padded to the largest, truth values as bytes."""
    if part.dtype is torch.bool:
        return _gathered(part.to(torch.uint8), dim, spread, group).bool()
    sizes = [spread.local(rank) for rank in range(group.size)]
    most, lead = max(sizes), part.movedim(dim, 0)
    if sizes[group.rank] < most:
        lead = torch.cat([lead, lead.new_zeros((most - sizes[group.rank], *lead.shape[1:]))])
    lead = lead.contiguous()
    everyone = lead.new_empty((group.size * most, *lead.shape[1:]))
    group.gather(everyone, lead)
    if not spread.simple:
        whole = lead.new_empty((spread.size, *lead.shape[1:]))
        for rank, ranges in enumerate(spread.parts):
            offset = rank * most
            for start, stop in ranges:
                whole[start:stop] = everyone[offset : offset + stop - start]
                offset += stop - start
        everyone = whole
    return everyone.movedim(0, dim).contiguous()


def _summed_part(term: torch.Tensor, dim: int, spread: RankRanges, group: SplitGroup) -> torch.Tensor:
    """This rank's part of the sum over ranks."""
    if spread.simple:
        lead = term.movedim(dim, 0).contiguous()
        mine = lead.new_empty((spread.local(group.rank), *lead.shape[1:]))
        group.sum_part(mine, lead)
        return mine.movedim(0, dim).contiguous()
    whole = group.sum(term.contiguous().clone())
    return pieces(whole, dim, spread.parts[group.rank]).contiguous()


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, group: SplitGroup) -> torch.Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.group.sum(grad.contiguous().clone()), None


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, term: torch.Tensor, group: SplitGroup) -> torch.Tensor:
        if not term.is_contiguous():
            return group.sum(term.contiguous())
        ctx.mark_dirty(term)
        return group.sum(term)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad, None


class _GatherActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, dim: int, spread: RankRanges, group: SplitGroup) -> torch.Tensor:
        ctx.place = dim, spread, group
        return _gathered(part, dim, spread, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dim, spread, group = ctx.place
        mine = spread.parts[group.rank]
        if spread.disjoint:
            return pieces(grad, dim, mine), None, None, None
        kept = torch.zeros_like(grad)  # what several ranks hold counts once
        for start, stop in spread.owned().parts[group.rank]:
            kept.narrow(dim, start, stop - start).copy_(grad.narrow(dim, start, stop - start))
        return pieces(kept, dim, mine), None, None, None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, dim: int, spread: RankRanges, group: SplitGroup) -> torch.Tensor:
        ctx.place = dim, spread, group
        part = pieces(whole, dim, spread.parts[group.rank])
        return part.clone() if len(spread.parts[group.rank]) <= 1 else part

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dim, spread, group = ctx.place
        if spread.disjoint:
            return _gathered(grad, dim, spread, group), None, None, None
        shape = list(grad.shape)
        shape[dim] = spread.size
        return group.sum(_placed(grad, dim, shape, spread.parts[group.rank])), None, None, None


class _GatherCopy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, dim: int, spread: RankRanges, group: SplitGroup) -> torch.Tensor:
        ctx.place = dim, spread, group
        return _gathered(part, dim, spread, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _summed_part(grad, *ctx.place), None, None, None


class _AddTake(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, term: torch.Tensor, dim: int, spread: RankRanges, group: SplitGroup) -> torch.Tensor:
        ctx.place = dim, spread, group
        return _summed_part(term, dim, spread, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _gathered(grad, *ctx.place), None, None, None


def _placed(part: torch.Tensor, dim: int, shape: list[int], ranges: tuple[Range, ...]) -> torch.Tensor:
    """A tensor of zeros with the part where it belongs."""
    whole, offset = part.new_zeros(shape), 0
    for start, stop in ranges:
        whole.narrow(dim, start, stop - start).copy_(part.narrow(dim, offset, stop - start))
        offset += stop - start
    return whole


def draws_whole() -> bool:
    """Whether a mode is on (verification) that makes random draws agree with one device's: then a part is gathered,
    and every rank draws for the whole tensor."""
    modes = _python_dispatch._get_current_dispatch_mode_stack()
    return any(getattr(mode, "draws_whole", False) for mode in modes)


@contextmanager
def own_stream(device: torch.device, group: SplitGroup) -> Iterator[None]:
    """Draw from a stream derived from (the common stream, this rank's place among the split ranks).

    The common stream goes on by one draw whatever is drawn inside, so it stays equal on all split ranks; recompute,
    which restores it, finds the same values again.
    """
    generator = _generator(device)
    if device.type == "cuda":  # no draw: it would wait for the device
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


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator

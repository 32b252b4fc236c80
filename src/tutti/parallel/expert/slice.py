"""A mixture's exchange with the ranks that share its microbatch slice: who chose what, and rows sent to their experts.

Capacity, the order in which tokens are dropped and the load-balancing loss are those of the whole slice, so they do not
depend on the number of ranks. One gather a layer tells every rank all counts; the sizes of the all-to-alls follow.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from tutti.comm.point_to_point import ring_all_reduce_nbytes
from tutti.comm.traffic import CommChannel, untracked_channel
from tutti.nn.mixture import Alone, Experts, Routing
from tutti.parallel.all_to_all import Route, exchange, land, launch
from tutti.parallel.data.batchnorm import BatchScope


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharers:
    """The ranks that share every slice. `group`: of all of them; `rank`: this rank's place in it; `scope`: whether this
    rank's samples count in the pass that is running; `channel`: where what they tell each other is counted.
    """

    size: int
    rank: int
    group: Any
    scope: BatchScope
    channel: CommChannel = field(default_factory=untracked_channel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holders:
    """The ranks over which experts are divided. `group`: theirs; `places`: their places among the sharers, in order;
    `bounds`: holder i has experts bounds[i] .. bounds[i + 1] - 1; `own`: this rank's place among the holders.
    """

    group: Any
    places: tuple[int, ...]
    bounds: tuple[int, ...]
    own: int

    @property
    def experts(self) -> tuple[int, int]:
        """This rank's experts, (start, stop)."""
        return self.bounds[self.own], self.bounds[self.own + 1]


class OwnSlice(Alone):
    """One rank computes the whole slice: nothing is exchanged, but forward may run again within backward."""

    def __init__(self, scope: BatchScope) -> None:
        self.scope = scope

    def __deepcopy__(self, memo: dict[int, Any]) -> "OwnSlice":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Alone, ()

    @property
    def recomputing(self) -> bool:
        return self.scope.recomputing


class SharedSlice:
    """`tutti.nn.mixture.Exchange` over ranks. Without holders every rank has all experts, and no row travels."""

    def __init__(self, sharers: Sharers, holders: Holders | None, channel: CommChannel) -> None:
        self.sharers, self.holders, self.channel = sharers, holders, channel

    def __deepcopy__(self, memo: dict[int, Any]) -> "SharedSlice":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled model stands alone: the ranks are not part of it."""
        return Alone, ()

    @property
    def recomputing(self) -> bool:
        return self.sharers.scope.recomputing

    def agree(self, counts: Tensor, mass: Tensor, *, training: bool) -> Routing:
        """Every rank's counts and the mass of all; in evaluation without holders a rank needs no other."""
        if not self.sharers.scope.counts:
            counts, mass = torch.zeros_like(counts), mass * 0.0
        if not training and self.holders is None:
            return Routing(counts=counts.cpu()[None], rank=0, mass=mass)
        total, everyone = _Gather.apply(mass, counts, self.sharers)  # type: ignore[no-untyped-call]
        return Routing(counts=everyone, rank=self.sharers.rank, mass=total)

    def compute(self, experts: Experts, rows: Tensor, kept: Tensor) -> Tensor:
        """Rows for experts that are here are computed while the others travel, in backward too."""
        if self.holders is None:
            here = kept[self.sharers.rank if len(kept) > 1 else 0]
            return experts.run_experts(rows, here.tolist())
        return self.divided(experts, rows, kept[list(self.holders.places)], self.holders)

    def divided(self, experts: Experts, rows: Tensor, kept: Tensor, holders: Holders) -> Tensor:
        """`kept`: (holders, experts), what each holder's tokens ask of every expert."""
        own, (first, last) = holders.own, holders.experts
        asked = [int(kept[own, a:b].sum()) for a, b in pairwise(holders.bounds)]
        answered = kept[:, first:last].clone()
        mine = answered[own].tolist()
        answered[own] = 0
        begin, end = sum(asked[:own]), sum(asked[: own + 1])
        asked[own] = 0
        route = Route(holders.group, own, asked, answered.sum(1).tolist(), self.channel)
        travelling = launch(torch.cat([rows[:begin], rows[end:]]), route)
        stayed = experts.run_experts(rows[begin:end], mine)
        arrived = land(travelling, route)
        order = _by_expert(answered).to(rows.device)
        results = experts.run_experts(arrived.index_select(0, order), answered.sum(0).tolist())
        returned = exchange(results.index_select(0, torch.argsort(order)), route.back())
        return torch.cat([returned[:begin], stayed, returned[begin:]])


class _Gather(torch.autograd.Function):
    """(sum of every rank's mass, every rank's counts on the CPU). Each rank's loss has a part in the sum's gradient,
    so backward adds the parts up."""

    @staticmethod
    def forward(ctx: Any, mass: Tensor, counts: Tensor, sharers: Sharers) -> tuple[Tensor, Tensor]:
        ctx.sharers = sharers
        mine = torch.cat([counts.reshape(-1).double(), mass.double()])
        everyone = [torch.empty_like(mine) for _ in range(sharers.size)]
        with sharers.channel.waiting((sharers.size - 1) * mine.numel() * mine.element_size()):
            dist.all_gather(everyone, mine, group=sharers.group)
        table = torch.stack(everyone)
        theirs = table[:, : counts.numel()].round().long().cpu().reshape(sharers.size, *counts.shape)
        ctx.mark_non_differentiable(theirs)
        return table[:, counts.numel() :].sum(0).to(mass.dtype), theirs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> Any:
        total, sharers = gradient.contiguous().clone(), ctx.sharers
        with sharers.channel.waiting(ring_all_reduce_nbytes(total, sharers.size)):
            dist.all_reduce(total, group=sharers.group)
        return total, None, None


def _by_expert(sizes: Tensor) -> Tensor:
    """Order that makes rows that lie by sender, then by expert, lie by expert. `sizes`: (senders, experts)."""
    expert = torch.arange(sizes.shape[1]).repeat(len(sizes))
    return torch.argsort(expert.repeat_interleave(sizes.reshape(-1)), stable=True)


def sizes_of(bounds: Sequence[int]) -> list[int]:
    """Sizes of the runs between boundaries."""
    return [stop - start for start, stop in pairwise(bounds)]

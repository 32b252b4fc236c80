"""Gradients fused into buckets; each leaves for its all-reduce once its gradients are there, in one agreed order."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tutti.comm.point_to_point import ring_all_reduce_nbytes
from tutti.comm.traffic import CommChannel, CommHandle, untracked_channel
from tutti.errors import ScriptError

FIRST_NBYTES = 2**20
"""The first bucket closes at this size, so that the link is busy early in backward."""


class Summing(ABC):
    """How the buckets of a group are summed over its ranks; all ranks start them in the same order. `way`: what they
    go through, in words; `alone`: a bucket holds one gradient.
    """

    way = "process group"
    alone = False

    def bucket(self, parameters: list[nn.Parameter], group: "Group") -> "Bucket":
        """A bucket that is summed so."""
        return Bucket(parameters, group)

    def follow(self, parameter: nn.Parameter, ready: Callable[[nn.Parameter], None]) -> Any:
        """Call `ready` whenever backward has made a parameter's gradient, until what is returned is removed."""
        return parameter.register_post_accumulate_grad_hook(ready)  # type: ignore[no-untyped-call]

    def room(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The memory of a bucket: zeros."""
        return torch.zeros(numel, dtype=dtype, device=device)

    @abstractmethod
    def start(self, bucket: "Bucket") -> CommHandle:
        """Begin to sum `bucket.flat` in place; the sums are there when the flight has been waited for."""

    def poll(self, handle: CommHandle) -> bool:
        """Do what this rank can do now for a sum under way, where it needs this rank to; returns whether it is over."""
        return True

    def finite(self, bucket: "Bucket") -> bool:
        """Whether the sums, which are there, are surely finite; False where nobody has looked."""
        return False


class AllReduce(Summing):
    """The process group's own all-reduce."""

    def start(self, bucket: "Bucket") -> CommHandle:
        group = bucket.group
        work = dist.all_reduce(bucket.flat, group=group.handle, async_op=True)
        return group.channel.start([work], bucket.sent_nbytes)


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks over which a gradient is summed. `handle`: their process group, None for all ranks; `channel`: where
    the
    sums are counted; `summing`: how.
    """

    handle: Any
    size: int
    channel: CommChannel = field(default_factory=untracked_channel, compare=False)
    summing: Summing = field(default_factory=AllReduce, compare=False)


class Bucket:
    """Gradients of some parameters in one flat tensor, with a flag each: 1 where this rank has a gradient.

    `views[i]`: the part of `flat` that is the gradient of `parameters[i]`, in the parameter's shape and strides.
    """

    def __init__(self, parameters: list[nn.Parameter], group: "Group") -> None:
        first, numel = parameters[0], sum(p.numel() for p in parameters)
        self.parameters = parameters
        self.group = group
        self.flat = group.summing.room(numel + len(parameters), first.dtype, first.device)
        self.views = [_view(part, p) for part, p in zip(self._parts(), parameters, strict=True)]
        self.flags = self.flat[numel:]
        self.filled = [False] * len(parameters)
        self.missing = len(parameters)
        self.sent_nbytes = ring_all_reduce_nbytes(self.flat[:numel], group.size)
        self.work: CommHandle | None = None
        self.landed = False

    def open(self) -> None:
        """Begin a step: nothing is filled."""
        self.filled = [False] * len(self.parameters)
        self.missing = len(self.parameters)
        self.work, self.landed = None, False
        self.flags.fill_(1)

    def take(self, index: int) -> None:
        """Take the gradient of parameter `index` over; the parameter's `grad` is a view of the bucket from here on, and
        what later microbatches give is added there.
        """
        parameter, view = self.parameters[index], self.views[index]
        if self.work is not None:
            raise ScriptError(
                f"a parameter of shape {tuple(parameter.shape)} got a gradient again after it had been summed over the "
                "ranks; checkpoint(use_reentrant=True) around a shared module does that: use use_reentrant=False"
            )
        if parameter.grad is not view:
            assert parameter.grad is not None
            view.copy_(parameter.grad.detach())
            parameter.grad = view

    def fill(self, index: int) -> None:
        """Take the gradient of parameter `index` over; it is complete on this rank."""
        self.take(index)
        if not self.filled[index]:
            self.filled[index] = True
            self.missing -= 1

    def complete(self) -> None:
        """Fill what backward left out: with what earlier microbatches gave, or with zeros and the flag 0."""
        for index, parameter in enumerate(self.parameters):
            if self.filled[index]:
                continue
            if parameter.grad is not None:
                self.fill(index)
            else:
                self.views[index].zero_()
                self.flags[index] = 0
        self.missing = 0

    def launch(self) -> None:
        """Start the sum."""
        self.work = self.group.summing.start(self)

    def poll(self) -> None:
        """Do what can be done now for a sum that is under way."""
        if self.work is not None and not self.landed:
            self.landed = self.group.summing.poll(self.work)

    def wait(self) -> None:
        """Wait for the sums; a parameter that no rank used keeps None for a gradient."""
        assert self.work is not None
        self.work.wait()
        for index, filled in enumerate(self.filled):
            if not filled and float(self.flags[index]) > 0:
                self.parameters[index].grad = self.views[index]

    def _parts(self) -> list[torch.Tensor]:
        sizes = [p.numel() for p in self.parameters]
        return list(torch.split(self.flat, [*sizes, len(sizes)])[:-1])


def make_buckets(
    parameters: Iterable[nn.Parameter], group_of: Callable[[nn.Parameter], Group], cap_nbytes: int
) -> list[Bucket]:
    """Buckets of about `cap_nbytes` over `parameters`, given in the order in which backward reaches them.

    A bucket closes once it has reached its cap; one holds a single group, dtype and device.
    """
    buckets: list[Bucket] = []
    closed: set[tuple[Group, torch.dtype, torch.device]] = set()
    open_ones: dict[tuple[Group, torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in parameters:
        key = (group_of(parameter), parameter.dtype, parameter.device)
        if key[0].summing.alone:
            buckets.append(key[0].summing.bucket([parameter], key[0]))
            continue
        members = open_ones.setdefault(key, [])
        members.append(parameter)
        cap = cap_nbytes if key in closed else min(cap_nbytes, FIRST_NBYTES)
        if sum(p.numel() * p.element_size() for p in members) >= cap:
            buckets.append(key[0].summing.bucket(open_ones.pop(key), key[0]))
            closed.add(key)  # caps look at no other kind: the ranks of a group may differ in those
    return buckets + [key[0].summing.bucket(members, key[0]) for key, members in open_ones.items()]


def _view(part: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """Strided like the parameter (channels last, say), which autograd's gradients are, too."""
    if torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return part.as_strided(parameter.shape, parameter.stride())
    return part.view(parameter.shape)

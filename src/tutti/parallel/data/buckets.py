"""Gradients packed into buckets. Each bucket is reduced once its gradients are complete, in one order on all ranks.

If the ranks of a host share memory, a bucket lies in memory that all of them reach (`fastest_bucket_reducer`).
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tutti.comm.hierarchical import CommThread, HierarchicalAllReduce
from tutti.comm.local_group import LocalGroup
from tutti.comm.point_to_point import ring_all_reduce_nbytes
from tutti.comm.rendezvous import HostHierarchy, make_local_group_or_hierarchy
from tutti.comm.shared_memory import SharedMemoryAllReduce
from tutti.comm.traffic import CommChannel, CommHandle, untracked_channel
from tutti.errors import ScriptError

FIRST_NBYTES = 2**20
"""Size at which the first bucket closes, so that the link is busy early in backward."""


class BucketReducer(ABC):
    """How a group's buckets are reduced over its ranks. All ranks start the reductions in the same order.

    Attributes:
        transport: what the data go through, for messages and reports.
        one_per_bucket: whether a bucket holds only one gradient.
    """

    transport = "process group"
    one_per_bucket = False

    def bucket(self, parameters: list[nn.Parameter], group: "ReductionGroup") -> "Bucket":
        """Make a bucket that this reducer can reduce."""
        return Bucket(parameters, group)

    def add_hook(self, parameter: nn.Parameter, ready: Callable[[nn.Parameter], None]) -> Any:
        """Call `ready` whenever backward has completed a parameter's gradient, until the returned handle is removed."""
        return parameter.register_post_accumulate_grad_hook(ready)  # type: ignore[no-untyped-call]

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate the memory of a bucket, filled with zeros."""
        return torch.zeros(numel, dtype=dtype, device=device)

    @abstractmethod
    def start(self, bucket: "Bucket") -> CommHandle:
        """Start to reduce `bucket.flat` in place; it holds the sums once the handle has been waited for."""

    def poll(self, handle: CommHandle) -> bool:
        """Advance a reduction that needs this rank to make progress; return whether it is complete."""
        return True

    def known_finite(self, bucket: "Bucket") -> bool:
        """Whether the reduced values are known to be finite; False if nobody has checked."""
        return False


class AllReduceBuckets(BucketReducer):
    """Uses the process group's own all-reduce."""

    def start(self, bucket: "Bucket") -> CommHandle:
        group = bucket.group
        work = dist.all_reduce(bucket.flat, group=group.handle, async_op=True)
        return group.channel.start([work], bucket.sent_nbytes)


@dataclass(frozen=True, slots=True)
class ReductionGroup:
    """The ranks over which a gradient is reduced.

    Attributes:
        handle: their process group; None for all ranks.
        size: number of ranks.
        channel: accounting of the traffic.
        bucket_reducer: how buckets are reduced.
    """

    handle: Any
    size: int
    channel: CommChannel = field(default_factory=untracked_channel, compare=False)
    bucket_reducer: BucketReducer = field(default_factory=AllReduceBuckets, compare=False)


class Bucket:
    """The gradients of some parameters in one flat tensor, followed by one flag each: 1 if this rank has the gradient.

    Attributes:
        flat: shape (values + parameters,): all gradients, then the flags.
        views: for each parameter, the part of `flat` that is its gradient, in the parameter's shape and strides.
        flags: the part of `flat` with the flags.
        filled: for each parameter, whether its gradient is complete on this rank.
        missing: number of gradients that are not complete yet.
        sent_nbytes: bytes that this rank sends for one reduction.
        copies_together: whether complete gradients are copied into the bucket together, before its reduction. On
            devices, to start a kernel takes longer than to copy most gradients. On CPUs, each is copied while it is in
            the cache.
        work: handle of the running reduction; None before it starts.
        reduced: whether the reduction is known to be complete.
    """

    def __init__(self, parameters: list[nn.Parameter], group: "ReductionGroup") -> None:
        first, numel = parameters[0], sum(p.numel() for p in parameters)
        self.parameters = parameters
        self.group = group
        self.flat = group.bucket_reducer.allocate(numel + len(parameters), first.dtype, first.device)
        self.views = [_view(part, p) for part, p in zip(self._parts(), parameters, strict=True)]
        self._addresses = [view.data_ptr() for view in self.views]
        self.flags = self.flat[numel:]
        self.filled = [False] * len(parameters)
        self._uncopied: list[int] = []
        self.copies_together = first.device.type != "cpu"
        self.missing = len(parameters)
        self.sent_nbytes = ring_all_reduce_nbytes(self.flat[:numel], group.size)
        self.work: CommHandle | None = None
        self.reduced = False

    def open(self) -> None:
        """Begin a step with an empty bucket."""
        self.filled = [False] * len(self.parameters)
        self.missing = len(self.parameters)
        self.work, self.reduced = None, False
        self._uncopied = []
        self.flags.fill_(1)
        for index in range(len(self.views)):
            self._attached(index)

    def take(self, index: int) -> None:
        """Copy a gradient into the bucket, and make the parameter's `grad` a view of it; later microbatches add to it.

        Args:
            index: position of the parameter in the bucket.

        Raises:
            ScriptError: the bucket's reduction has already started.
        """
        self._check_open(index)
        self._copy([index])

    def fill(self, index: int) -> None:
        """Take the gradient of parameter `index`, which is complete on this rank."""
        if self.copies_together:
            self._check_open(index)
            self._uncopied.append(index)
        else:
            self.take(index)
        if not self.filled[index]:
            self.filled[index] = True
            self.missing -= 1

    def _check_open(self, index: int) -> None:
        if self.work is not None:
            raise ScriptError(
                f"a parameter of shape {tuple(self.parameters[index].shape)} got another gradient after its gradient "
                "had been reduced over the ranks; checkpoint(use_reentrant=True) around a shared module does that: use "
                "use_reentrant=False"
            )

    def _copy(self, indices: Iterable[int]) -> None:
        """Copy gradients into the bucket, and make the parameters' `grad` views of it."""
        views, gradients = [], []
        for index in indices:
            parameter, view = self.parameters[index], self._attached(index)
            if parameter.grad is not view:
                assert parameter.grad is not None
                gradient = parameter.grad.detach()
                views.append(view)
                gradients.append(gradient.to_dense() if gradient.is_sparse else gradient)
                parameter.grad = view
        if len(views) == 1:
            views[0].copy_(gradients[0])
        elif views:
            torch._foreach_copy_(views, gradients)

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
        """Start the reduction."""
        self._copy(dict.fromkeys(self._uncopied))
        self._uncopied = []
        self.work = self.group.bucket_reducer.start(self)

    def poll(self) -> None:
        """Advance the reduction, if it has started."""
        if self.work is not None and not self.reduced:
            self.reduced = self.group.bucket_reducer.poll(self.work)

    def wait(self) -> None:
        """Wait for the reduction; a parameter that no rank used keeps None as its gradient."""
        assert self.work is not None
        self.work.wait()
        if all(self.filled):
            return
        used = self.flags.tolist()  # the host waits for an accelerator only here, where a gradient may be missing
        for index, filled in enumerate(self.filled):
            if not filled and used[index] > 0:
                self.parameters[index].grad = self.views[index]

    def _attached(self, index: int) -> torch.Tensor:
        """Return the view of a parameter; a new one if the script gave it other memory (`p.grad.data = ...`)."""
        if self.views[index].data_ptr() != self._addresses[index]:
            self.views[index] = _view(self._parts()[index], self.parameters[index])
        return self.views[index]

    def _parts(self) -> list[torch.Tensor]:
        sizes = [p.numel() for p in self.parameters]
        return list(torch.split(self.flat, [*sizes, len(sizes)])[:-1])


def make_buckets(
    parameters: Iterable[nn.Parameter], group_of: Callable[[nn.Parameter], ReductionGroup], cap_nbytes: int
) -> list[Bucket]:
    """Divide parameters into buckets of about `cap_nbytes`.

    A bucket closes once it has reached its cap, and holds parameters of a single group, dtype and device.

    Args:
        parameters: in the order in which backward reaches them.
        group_of: returns the ranks that reduce a parameter's gradient.
        cap_nbytes: size at which a bucket closes.
    """
    buckets: list[Bucket] = []
    closed: set[tuple[ReductionGroup, torch.dtype, torch.device]] = set()
    open_ones: dict[tuple[ReductionGroup, torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in parameters:
        key = (group_of(parameter), parameter.dtype, parameter.device)
        if key[0].bucket_reducer.one_per_bucket:
            buckets.append(key[0].bucket_reducer.bucket([parameter], key[0]))
            continue
        members = open_ones.setdefault(key, [])
        members.append(parameter)
        cap = cap_nbytes if key in closed else min(cap_nbytes, FIRST_NBYTES)
        if sum(p.numel() * p.element_size() for p in members) >= cap:
            buckets.append(key[0].bucket_reducer.bucket(open_ones.pop(key), key[0]))
            closed.add(key)  # a cap depends on no other key, because the ranks of a group may differ in those
    return buckets + [key[0].bucket_reducer.bucket(members, key[0]) for key, members in open_ones.items()]


def _view(part: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """Return a view strided like the parameter (channels last, say), as autograd's gradients are."""
    if torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return part.as_strided(parameter.shape, parameter.stride())
    return part.view(parameter.shape)


def fastest_bucket_reducer(group: Any) -> BucketReducer:
    """Return the fastest reducer for the buckets of a process group. Collective.

    It uses shared memory if all ranks are on one host, two levels if hosts have several of them, and otherwise the
    group's all-reduce.
    """
    hosts = make_local_group_or_hierarchy(group)
    if isinstance(hosts, LocalGroup):
        return SharedMemoryBuckets(hosts)
    return AllReduceBuckets() if hosts is None else HierarchicalBuckets(hosts)


class _SharedBuckets(BucketReducer):
    """Buckets in memory that the ranks of a host share."""

    def __init__(self, local_group: LocalGroup) -> None:
        self.local_group = local_group
        self.buffer_numbers: dict[int, int] = {}

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate memory that the other ranks reach."""
        number, segment = self.local_group.new_segment(numel * dtype.itemsize)
        flat = segment.tensor(dtype, numel)
        self.buffer_numbers[flat.data_ptr()] = number
        return flat


class SharedMemoryBuckets(_SharedBuckets):
    """Ranks of one host: each reduces its slice when polled, and unclaimed slices while it waits."""

    transport = "shared memory"

    def __init__(self, local_group: LocalGroup) -> None:
        super().__init__(local_group)
        self._sums: dict[int, SharedMemoryAllReduce] = {}

    def start(self, bucket: Bucket) -> CommHandle:
        """Announce that this rank's bucket is full."""
        flat = bucket.flat
        buffer = self.buffer_numbers[flat.data_ptr()]
        work = self._sums[buffer] = SharedMemoryAllReduce(
            self.local_group, buffer, flat.numel(), flat.dtype, probed=True
        )
        return bucket.group.channel.start([work], bucket.sent_nbytes)

    def known_finite(self, bucket: Bucket) -> bool:
        return self._sums[self.buffer_numbers[bucket.flat.data_ptr()]].finite

    def poll(self, handle: CommHandle) -> bool:
        return handle.poll()


class HierarchicalBuckets(_SharedBuckets):
    """Ranks of several hosts: a thread makes the reductions, one after another."""

    transport = "shared memory inside hosts, process group between them"

    def __init__(self, hierarchy: HostHierarchy) -> None:
        super().__init__(hierarchy.local_group)
        self._hierarchy, self._worker = hierarchy, CommThread()
        weakref.finalize(self, self._worker.end)

    def start(self, bucket: Bucket) -> CommHandle:
        """Pass the bucket's reduction to the thread."""
        work = HierarchicalAllReduce(
            self._hierarchy, self._worker, self.buffer_numbers[bucket.flat.data_ptr()], bucket.flat
        )
        return bucket.group.channel.start([work], bucket.sent_nbytes)

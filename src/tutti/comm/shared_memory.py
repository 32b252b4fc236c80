"""Collectives and messages among the ranks of one host, through shared memory.

- `SharedMemoryCommunicator`: each rank copies its tensor into a shared segment, and every rank reads what it needs.
- `SharedMemoryAllReduce`: an all-reduce in place. The tensors lie in shared segments, cut into one slice per rank. A
  rank reduces its own slice first and unclaimed slices while it waits.
- `MessageSender`, `MessageReceiver`: ordered messages from one rank to another.

Reductions add in the order of ranks, half precisions in float32, so results are bit-identical on all ranks. A
collective needs of the other ranks only that they have started it, as a process group's own does.
"""

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tutti.comm.local_group import CLAIM, DONE, READ, READY, SENT, SLOTS, BufferPool, LocalGroup, PendingSignals
from tutti.comm.rendezvous import make_local_group

ReadTensors = Callable[[list[torch.Tensor]], None]


_FINAL_READ_TIMEOUT_S = 2.0
"""Longest wait at the end for ranks that have all they need to go on, but had no turn yet."""


class SharedMemoryExchange:
    """One exchange: all ranks may read this rank's `tensor` until each has signalled that it is done."""

    def __init__(
        self,
        local_group: LocalGroup,
        staging: BufferPool,
        in_progress: list["SharedMemoryExchange"],
        tensor: torch.Tensor,
    ) -> None:
        self._local_group, self._staging, self._in_progress, self._dtype = (
            local_group,
            staging,
            in_progress,
            tensor.dtype,
        )
        self._room = staging.put(tensor.detach().reshape(-1))
        self._slot = local_group.start(self._room, tensor.numel(), self.synchronize)
        self._absent, self._reading = (PendingSignals(local_group, self._slot, kind) for kind in (READY, DONE))

    def present(self) -> bool:
        """Whether all ranks have started."""
        return self._absent.arrived()

    def arrive(self) -> list[torch.Tensor]:
        """Wait for all ranks; returns each one's tensor, flat. Call `leave` once they have been read."""
        self._absent.wait()
        return self._local_group.tensors(self._slot, self._dtype)

    def leave(self) -> None:
        """Signal that this rank has read what it needs."""
        self._local_group.signal(self._slot, DONE)
        self._in_progress.append(self)

    def read_by_all(self) -> bool:
        """Whether all other ranks have left, so that the segment is free."""
        return self._reading.arrived()

    def synchronize(self) -> None:
        """Return when all other ranks have left."""
        self._reading.wait()

    def give_back(self) -> None:
        """Return the segment to the pool."""
        self._local_group.forget(self._slot, self.synchronize)
        self._staging.give(self._room)


class SharedMemoryCommunicator:
    """Collectives of a local group. One thread of a rank starts them; other threads may complete them."""

    def __init__(self, local_group: LocalGroup) -> None:
        self.local_group, self._staging = local_group, BufferPool(local_group)
        self._in_progress: list[SharedMemoryExchange] = []
        self._lock = threading.Lock()
        weakref.finalize(self, _await_readers, self._in_progress)

    def put(self, tensor: torch.Tensor) -> SharedMemoryExchange:
        """Start an exchange of a contiguous tensor, of the same size on all ranks."""
        with self._lock:
            _release_finished(self._in_progress)
            return SharedMemoryExchange(self.local_group, self._staging, self._in_progress, tensor)

    def borrow(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for the next tensor exchanged here, which then needs no copy; it goes back to the pool."""
        with self._lock:
            _release_finished(self._in_progress)
            return self._staging.borrow(numel, dtype)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """A persistent shared copy of a flat tensor, to be exchanged repeatedly without copying.

        Call `synchronize` before changing it, as others may still read it.
        """
        with self._lock:
            return self._staging.keep(tensor)

    def synchronize(self, left: int = 0) -> None:
        """Wait until all others have read all but the `left` most recent exchanges of this rank."""
        while (oldest := self._oldest(left)) is not None:
            oldest.synchronize()  # not under the lock: who is to read it may wait for what another thread puts here
            with self._lock:
                oldest.give_back()

    def _oldest(self, left: int) -> SharedMemoryExchange | None:
        """Remove and return the oldest exchange still being read, if more than `left` are."""
        with self._lock:
            _release_finished(self._in_progress)
            return self._in_progress.pop(0) if len(self._in_progress) > left else None

    def share(self, mine: torch.Tensor, read: ReadTensors) -> "SharedMemoryWork":
        """Let all ranks read `mine`; `read` gets every rank's tensor, flat. Returns a work."""
        return SharedMemoryWork(self.put(mine), read)

    def reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """All-reduce `tensor` in place (sum or maximum)."""
        self.start_reduce(tensor, op).wait()

    def start_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> "SharedMemoryWork":
        """Start `reduce`. Returns a work."""
        return self.share(tensor, lambda tensors: reduce_tensors(tensors, [tensor.view(-1)], op))

    def gather(self, segments: torch.Tensor, mine: torch.Tensor) -> "SharedMemoryWork":
        """All-gather `mine` into the rows of `segments`, (ranks, values). Returns a work."""
        return self.share(mine, partial(copy_rows, segments))

    def scatter_sum(self, buffer: torch.Tensor, out: torch.Tensor) -> "SharedMemoryWork":
        """Reduce-scatter row r of `buffer`, (ranks, values), into `out` of rank r. Returns a work."""
        return self.share(buffer, partial(_reduce_slice, out, self.local_group.rank))


def make_shared_memory_communicator(group: Any = None) -> SharedMemoryCommunicator | None:
    """The communicator of a process group, where `make_local_group` gives one. Collective."""
    local_group = make_local_group(group)
    return None if local_group is None else SharedMemoryCommunicator(local_group)


def _release_finished(in_progress: list[SharedMemoryExchange]) -> None:
    """Return the segments that all ranks have read to the pool."""
    done = [one for one in in_progress if one.read_by_all()]
    for one in done:
        one.give_back()
        in_progress.remove(one)


def _await_readers(in_progress: list[SharedMemoryExchange]) -> None:
    """Give other ranks a moment to read this process's segments before they disappear."""
    end = time.monotonic() + _FINAL_READ_TIMEOUT_S
    while in_progress and time.monotonic() < end:
        _release_finished(in_progress)
        time.sleep(0.001)


class SharedMemoryWork:
    """An exchange in progress. `read` gets every rank's tensor, flat, once all have started."""

    def __init__(self, exchange: SharedMemoryExchange, read: ReadTensors) -> None:
        self._exchange: SharedMemoryExchange | None = exchange
        self._read = read

    def is_completed(self) -> bool:
        """Whether it has completed; completes it if all ranks have started."""
        if self._exchange is not None and self._exchange.present():
            self.wait()
        return self._exchange is None

    def wait(self) -> None:
        """Return when it has completed. Raises RuntimeError when a rank has ended or times out."""
        if self._exchange is not None:
            self._read(self._exchange.arrive())
            self._exchange.leave()
            self._exchange = None


def copy_rows(segments: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    """Each of `tensors` into its row of `segments`."""
    for row, theirs in zip(segments, tensors, strict=True):
        row.copy_(theirs.view(row.shape))


def _reduce_slice(out: torch.Tensor, rank: int, tensors: list[torch.Tensor]) -> None:
    start, stop = rank * out.numel(), (rank + 1) * out.numel()
    reduce_tensors([theirs[start:stop] for theirs in tensors], [out.view(-1)])


_SLICE_ALIGNMENT = 32
"""Parts begin at multiples of so many values, so that no two ranks write to one cache line."""


class SharedMemoryAllReduce:
    """An all-reduce in place, in progress.

    Args:
        segment: number of this rank's segment; its first `numel` values of `dtype` are reduced.
        probed: whether to check, while a slice is in the cache, that it is finite.

    `finite`: once completed, whether all slices were checked and are finite.
    """

    finite = False

    def __init__(
        self, local_group: LocalGroup, segment: int, numel: int, dtype: torch.dtype, *, probed: bool = False
    ) -> None:
        self._probed = probed
        self._local_group, self._numel, self._dtype = local_group, numel, dtype
        self._untried = [(local_group.rank + step) % local_group.size for step in range(local_group.size)]
        self._over = False
        self._slot = local_group.start(segment, numel, self.wait, claim=True)
        self._ready, self._done = (PendingSignals(local_group, self._slot, kind) for kind in (READY, DONE))
        self._done.missing += 1  # parts, of which this rank does one or more

    def is_completed(self) -> bool:
        """Whether it has completed. Reduces this rank's slice if all have started and nobody has taken it."""
        if not self._ready.arrived():
            return False
        if len(self._untried) == self._local_group.size:
            self._take_part()
        self._done.arrived()
        return self._ended()

    def wait(self) -> None:
        """Return when it has completed. Raises RuntimeError when a rank has ended or times out."""
        self._ready.wait()
        while self._untried and self._done.missing:
            self._take_part()
        self._done.wait()
        self._ended()

    def _ended(self) -> bool:
        if not self._done.missing and not self._over:
            self._over = True
            self.finite = self._probed and self._local_group.all_finite(
                self._slot
            )  # before another exchange has the slot
            self._local_group.forget(self._slot, self.wait)
        return self._over

    def _take_part(self) -> None:
        """Reduce the next slice, unless another rank has claimed it."""
        part = self._untried.pop(0)
        if not self._local_group.take(self._slot, CLAIM, part):
            return
        start, stop = (self._edge(part + end) for end in (0, 1))
        parts = [tensor[start:stop] for tensor in self._local_group.tensors(self._slot, self._dtype)]
        probes: list[torch.Tensor] | None = [] if self._probed else None
        reduce_tensors(parts, parts, probes=probes)
        self._local_group.record_finite(
            self._slot, part, finite=not probes or bool(torch.stack(probes).isfinite().all())
        )
        self._done.missing -= 1
        self._local_group.signal(self._slot, DONE)

    def _edge(self, part: int) -> int:
        if part == self._local_group.size:
            return self._numel
        return self._numel * part // self._local_group.size // _SLICE_ALIGNMENT * _SLICE_ALIGNMENT


class MessageSender:
    """Sends messages to local rank `target`, in order."""

    def __init__(self, local_group: LocalGroup, target: int) -> None:
        self._local_group, self._target = local_group, target
        self._staging = BufferPool(local_group)
        self._sent = 0
        self._read = 0
        self._segments: dict[int, int] = {}

    def send(self, tensor: torch.Tensor) -> None:
        """Send a contiguous tensor. Waits only while SLOTS messages are unread."""
        local_group, target = self._local_group, self._target
        while self._next_read(wait=self._sent - self._read == SLOTS):
            self._free()
        flat = tensor.detach().reshape(-1)
        number = self._staging.put(flat)
        self._segments[self._sent] = number
        local_group.mailboxes[local_group.rank, target, self._sent % SLOTS] = number, flat.numel()
        local_group.signals.post(local_group.mailbox_signal(local_group.rank, target, SENT))
        self._sent += 1

    def synchronize(self) -> None:
        """Wait until all messages have been read: they lie in this process's memory, so it must not end before."""
        while self._read < self._sent:
            self._next_read(wait=True)
            self._free()

    def _next_read(self, *, wait: bool) -> bool:
        """Whether one more message has been read; with `wait`, returns once it has."""
        return _poll_or_wait(
            self._local_group,
            self._local_group.mailbox_signal(self._local_group.rank, self._target, READ),
            self._target,
            wait=wait,
        )

    def _free(self) -> None:
        """Return the segment of the oldest message to the pool."""
        self._staging.give(self._segments.pop(self._read))
        self._read += 1


class MessageReceiver:
    """Receives messages from local rank `source` into the given tensors, in order."""

    def __init__(self, local_group: LocalGroup, source: int) -> None:
        self._local_group, self._source = local_group, source
        self._expected: list[ReceiveHandle] = []
        self._read = 0

    def receive(self, tensor: torch.Tensor) -> "ReceiveHandle":
        """Post a receive into contiguous `tensor`."""
        letter = ReceiveHandle(self, tensor)
        self._expected.append(letter)
        return letter

    def deliver(self, *, wait: bool) -> bool:
        """Complete the oldest posted receive if its message has arrived; with `wait`, once it has."""
        local_group, source = self._local_group, self._source
        if not _poll_or_wait(
            local_group, local_group.mailbox_signal(source, local_group.rank, SENT), source, wait=wait
        ):
            return False
        letter = self._expected.pop(0)
        flat = letter.tensor.view(-1)
        segment, numel = local_group.mailboxes[source, local_group.rank, self._read % SLOTS].tolist()
        sent = local_group.tensor(source, segment, numel, flat.dtype)
        if sent.numel() != flat.numel():
            raise RuntimeError(f"shared memory: a message of {sent.numel()} values came for {flat.numel()}")
        flat.copy_(sent)
        letter.arrived = True
        self._read += 1
        local_group.signals.post(local_group.mailbox_signal(source, local_group.rank, READ))
        return True


class ReceiveHandle:
    """A posted receive."""

    __slots__ = ("_receiver", "arrived", "tensor")

    def __init__(self, mailbox_signal: MessageReceiver, tensor: torch.Tensor) -> None:
        self._receiver, self.tensor, self.arrived = mailbox_signal, tensor, False

    def is_completed(self) -> bool:
        """Whether the message has arrived, and all sent before it."""
        while not self.arrived and self._receiver.deliver(wait=False):
            pass
        return self.arrived

    def wait(self) -> None:
        """Return when the message has arrived. Raises RuntimeError when a rank has ended or times out."""
        while not self.arrived:
            self._receiver.deliver(wait=True)


def _poll_or_wait(local_group: LocalGroup, index: int, rank: int, *, wait: bool) -> bool:
    """Whether `rank` has posted the semaphore once more; with `wait`, returns once it has."""
    if wait:
        local_group.signals.wait(index, [rank])
    return wait or local_group.signals.take(index)


_BLOCK_NBYTES = 2**18
"""Combined at a time: so small that it is still in the cache when it is written."""


_ELEMENTWISE: dict[Any, Callable[..., Any]] = {dist.ReduceOp.SUM: torch.add, dist.ReduceOp.MAX: torch.maximum}


def reduce_tensors(
    tensors: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    op: Any = dist.ReduceOp.SUM,
    probes: list[torch.Tensor] | None = None,
) -> None:
    """Reduce `tensors`, in their order, into each of `outs`; all are flat, of one size and dtype.

    Args:
        outs: other tensors, or the same ones. Half precisions are accumulated in float32.
        probes: receives a sum per block of the result, taken while the block is in the cache.
    """
    separate, combined, wide = outs[0] is not tensors[0], _ELEMENTWISE[op], _accumulation_dtype(outs[0].dtype)
    size = max(_BLOCK_NBYTES // outs[0].element_size(), 1)
    for start in range(0, outs[0].numel(), size):
        first, *others = [tensor[start : start + size] for tensor in tensors]
        target, *targets = [out[start : start + size] for out in outs]
        total = target
        if wide is not target.dtype:
            total = first.to(wide)
            targets.append(target)
        elif separate:
            total.copy_(first)
        for other in others:
            combined(total, other, out=total)
        for one in targets:
            one.copy_(total)
        if probes is not None:
            probes.append(target.sum())


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are accumulated."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype

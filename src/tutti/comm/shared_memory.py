"""Collectives and messages among the ranks of one host, through shared memory.

- `SharedMemoryCommunicator`: each rank copies its tensor into a shared segment, and every rank reads what it needs.
- `SharedMemoryAllReduce`: an all-reduce in place. The tensors lie in shared segments, cut into one slice per rank. A
  rank reduces its own slice first, and unclaimed slices while it waits.
- `MessageSender`, `MessageReceiver`: ordered messages from one rank to another.

Reductions add the ranks' tensors in rank order and accumulate half precisions in float32, so results are bit-identical
on all ranks. As in a process group, a collective needs the other ranks only to have started it.
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
from tutti.event_record import ACTIVE

ReadTensors = Callable[[list[torch.Tensor]], None]


_FINAL_READ_TIMEOUT_S = 2.0
"""Longest wait when a communicator is released, in seconds, for ranks that have not yet read this rank's segments."""


def _note(work: Any, name: str, local_group: LocalGroup, dtype: torch.dtype, numel: int) -> int:
    """Note in the flight record that a collective begins; return its number, 0 where nothing is recorded."""
    recorder = ACTIVE.recorder
    if recorder is None:
        return 0
    number = recorder.begin_flat(name, local_group.name, dtype, numel)
    recorder.know(number, work)
    return number


def _note_end(number: int) -> None:
    if ACTIVE.recorder is not None and number:
        ACTIVE.recorder.end(number)


class SharedMemoryExchange:
    """One exchange: all ranks may read this rank's `tensor` until each has signalled that it is done.

    Args:
        local_group: the ranks that exchange.
        staging: pool that provides the shared segment.
        in_progress: list to which the exchange is added once this rank has left it.
        tensor: the values that this rank shares.
    """

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
        self._noted = _note(self, "shared-memory exchange", local_group, tensor.dtype, tensor.numel())

    def present(self) -> bool:
        """Whether all ranks have started."""
        return self._absent.arrived()

    def arrive(self) -> list[torch.Tensor]:
        """Wait until all ranks have started. Call `leave` once the tensors have been read.

        Returns:
            The tensor of each rank, flat, in rank order.
        """
        self._absent.wait()
        return self._local_group.tensors(self._slot, self._dtype)

    def leave(self) -> None:
        """Signal that this rank has read what it needs."""
        self._local_group.signal(self._slot, DONE)
        self._in_progress.append(self)
        _note_end(self._noted)

    def read_by_all(self) -> bool:
        """Whether all other ranks have left, so that the segment is free."""
        return self._reading.arrived()

    def synchronize(self) -> None:
        """Wait until all other ranks have left."""
        self._reading.wait()

    def give_back(self) -> None:
        """Return the segment to the pool."""
        self._local_group.forget(self._slot, self.synchronize)
        self._staging.give(self._room)


class SharedMemoryCommunicator:
    """Collectives of a local group. One thread of a rank starts them; other threads may complete them.

    Args:
        local_group: the ranks of this host.
    """

    def __init__(self, local_group: LocalGroup) -> None:
        self.local_group, self._staging = local_group, BufferPool(local_group)
        self._in_progress: list[SharedMemoryExchange] = []
        self._lock = threading.Lock()
        weakref.finalize(self, _await_readers, self._in_progress)

    def put(self, tensor: torch.Tensor) -> SharedMemoryExchange:
        """Start an exchange of a contiguous tensor, which must have the same size on all ranks."""
        with self._lock:
            _release_finished(self._in_progress)
            return SharedMemoryExchange(self.local_group, self._staging, self._in_progress, tensor)

    def borrow(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for the next tensor to exchange, which then needs no copy.

        The memory returns to the pool after the exchange.
        """
        with self._lock:
            _release_finished(self._in_progress)
            return self._staging.borrow(numel, dtype)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a persistent shared copy of a flat tensor, which can be exchanged repeatedly without copying.

        Call `synchronize` before changing the copy, because other ranks may still read it.
        """
        with self._lock:
            return self._staging.keep(tensor)

    def synchronize(self, left: int = 0) -> None:
        """Wait until the other ranks have read all of this rank's exchanges except the `left` most recent ones."""
        while (oldest := self._oldest(left)) is not None:
            oldest.synchronize()  # without the lock: its readers may wait for what another thread of this rank puts
            with self._lock:
                oldest.give_back()

    def _oldest(self, left: int) -> SharedMemoryExchange | None:
        """Remove and return the oldest exchange still being read, if more than `left` are."""
        with self._lock:
            _release_finished(self._in_progress)
            return self._in_progress.pop(0) if len(self._in_progress) > left else None

    def share(self, mine: torch.Tensor, read: ReadTensors) -> "SharedMemoryWork":
        """Let all ranks read this rank's tensor.

        Args:
            mine: this rank's tensor, contiguous and of the same size on all ranks.
            read: called with the tensors of all ranks, flat and in rank order, once all have started.

        Returns:
            The work handle.
        """
        return SharedMemoryWork(self.put(mine), read)

    def reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """All-reduce `tensor` in place (sum or maximum)."""
        self.start_reduce(tensor, op).wait()

    def start_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> "SharedMemoryWork":
        """Start an all-reduce of `tensor` in place (sum or maximum). Returns the work handle."""
        return self.share(tensor, lambda tensors: reduce_tensors(tensors, [tensor.view(-1)], op))

    def gather(self, segments: torch.Tensor, mine: torch.Tensor) -> "SharedMemoryWork":
        """All-gather `mine` into the rows of `segments`, shape (ranks, values). Returns the work handle."""
        return self.share(mine, partial(copy_rows, segments))

    def scatter_sum(self, buffer: torch.Tensor, out: torch.Tensor) -> "SharedMemoryWork":
        """Reduce-scatter row r of `buffer`, shape (ranks, values), into `out` of rank r. Returns the work handle."""
        return self.share(buffer, partial(_reduce_slice, out, self.local_group.rank))


def make_shared_memory_communicator(group: Any = None) -> SharedMemoryCommunicator | None:
    """Return the communicator of a process group, or None where `make_local_group` returns None. Collective."""
    local_group = make_local_group(group)
    return None if local_group is None else SharedMemoryCommunicator(local_group)


def _release_finished(in_progress: list[SharedMemoryExchange]) -> None:
    """Return to the pool the segments that all ranks have read."""
    done = [exchange for exchange in in_progress if exchange.read_by_all()]
    for exchange in done:
        exchange.give_back()
        in_progress.remove(exchange)


def _await_readers(in_progress: list[SharedMemoryExchange]) -> None:
    """Give other ranks a moment to read this process's segments before they disappear."""
    end = time.monotonic() + _FINAL_READ_TIMEOUT_S
    while in_progress and time.monotonic() < end:
        _release_finished(in_progress)
        time.sleep(0.001)


class SharedMemoryWork:
    """An exchange in progress, as a work handle.

    Args:
        exchange: the exchange.
        read: called with the tensors of all ranks, flat and in rank order, once all have started.
    """

    def __init__(self, exchange: SharedMemoryExchange, read: ReadTensors) -> None:
        self._exchange: SharedMemoryExchange | None = exchange
        self._read = read

    def is_completed(self) -> bool:
        """Return whether the exchange has completed; complete it if all ranks have started."""
        if self._exchange is not None and self._exchange.present():
            self.wait()
        return self._exchange is None

    def wait(self) -> None:
        """Wait until the exchange has completed.

        Raises:
            RuntimeError: another rank has ended, or the wait timed out.
        """
        if self._exchange is not None:
            self._read(self._exchange.arrive())
            self._exchange.leave()
            self._exchange = None


def copy_rows(segments: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    """Copy each of `tensors` into its row of `segments`."""
    for row, theirs in zip(segments, tensors, strict=True):
        row.copy_(theirs.view(row.shape))


def _reduce_slice(out: torch.Tensor, rank: int, tensors: list[torch.Tensor]) -> None:
    start, stop = rank * out.numel(), (rank + 1) * out.numel()
    reduce_tensors([theirs[start:stop] for theirs in tensors], [out.view(-1)])


_SLICE_ALIGNMENT = 32
"""Slices begin at multiples of this many values, so that no two ranks write to the same cache line."""


class SharedMemoryAllReduce:
    """An all-reduce in place, in progress.

    Args:
        local_group: the ranks of this host.
        segment: number of this rank's segment.
        numel: number of values to reduce, from the start of the segment.
        dtype: their dtype.
        probed: whether to check that each slice is finite, while it is in the cache.

    Attributes:
        finite: once completed, whether all slices were checked and are finite.
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
        self._done.missing += 1  # one signal per slice, this rank's own included
        self._noted = _note(self, "shared-memory all-reduce", local_group, dtype, numel)

    def is_completed(self) -> bool:
        """Return whether the all-reduce has completed.

        Also reduces this rank's slice if all ranks have started and nobody has claimed it yet.
        """
        if not self._ready.arrived():
            return False
        if len(self._untried) == self._local_group.size:
            self._take_part()
        self._done.arrived()
        return self._ended()

    def wait(self) -> None:
        """Wait until the all-reduce has completed, and reduce unclaimed slices meanwhile.

        Raises:
            RuntimeError: another rank has ended, or the wait timed out.
        """
        self._ready.wait()
        while self._untried and self._done.missing:
            self._take_part()
        self._done.wait()
        self._ended()

    def _ended(self) -> bool:
        if not self._done.missing and not self._over:
            self._over = True
            # Read before another collective uses the slot.
            self.finite = self._probed and self._local_group.all_finite(self._slot)
            self._local_group.forget(self._slot, self.wait)
            _note_end(self._noted)
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
    """Sends messages to one local rank, in order.

    Args:
        local_group: the ranks of this host.
        target: local rank of the receiver.
    """

    def __init__(self, local_group: LocalGroup, target: int) -> None:
        self._local_group, self._target = local_group, target
        self._staging = BufferPool(local_group)
        self._sent = 0
        self._read = 0
        self._segments: dict[int, int] = {}

    def send(self, tensor: torch.Tensor) -> None:
        """Send a contiguous tensor. Waits only while `SLOTS` messages are unread."""
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
        """Wait until the receiver has read all messages.

        They lie in memory of this process, so it must not end earlier.
        """
        while self._read < self._sent:
            self._next_read(wait=True)
            self._free()

    def _next_read(self, *, wait: bool) -> bool:
        """Return whether one more message has been read; with `wait`, wait until it has."""
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
    """Receives messages from one local rank into the given tensors, in order.

    Args:
        local_group: the ranks of this host.
        source: local rank of the sender.
    """

    def __init__(self, local_group: LocalGroup, source: int) -> None:
        self._local_group, self._source = local_group, source
        self._expected: list[ReceiveHandle] = []
        self._read = 0

    def receive(self, tensor: torch.Tensor) -> "ReceiveHandle":
        """Post a receive into contiguous `tensor`."""
        handle = ReceiveHandle(self, tensor)
        self._expected.append(handle)
        return handle

    def deliver(self, *, wait: bool) -> bool:
        """Complete the oldest posted receive if its message has arrived.

        Args:
            wait: whether to wait for the message.

        Returns:
            Whether a receive was completed.

        Raises:
            RuntimeError: the message has another size than the tensor, the sender has ended, or the wait timed out.
        """
        local_group, source = self._local_group, self._source
        if not _poll_or_wait(
            local_group, local_group.mailbox_signal(source, local_group.rank, SENT), source, wait=wait
        ):
            return False
        handle = self._expected.pop(0)
        flat = handle.tensor.view(-1)
        segment, numel = local_group.mailboxes[source, local_group.rank, self._read % SLOTS].tolist()
        sent = local_group.tensor(source, segment, numel, flat.dtype)
        if sent.numel() != flat.numel():
            raise RuntimeError(
                f"shared memory: a message of {sent.numel()} values arrived for a tensor of {flat.numel()}; "
                "send and receive tensors of the same size, in the same order"
            )
        flat.copy_(sent)
        handle.arrived = True
        self._read += 1
        local_group.signals.post(local_group.mailbox_signal(source, local_group.rank, READ))
        return True


class ReceiveHandle:
    """A posted receive, as a work handle."""

    __slots__ = ("_receiver", "arrived", "tensor")

    def __init__(self, mailbox_signal: MessageReceiver, tensor: torch.Tensor) -> None:
        self._receiver, self.tensor, self.arrived = mailbox_signal, tensor, False

    def is_completed(self) -> bool:
        """Return whether the message has arrived; deliver earlier messages first."""
        while not self.arrived and self._receiver.deliver(wait=False):
            pass
        return self.arrived

    def wait(self) -> None:
        """Wait until the message has arrived.

        Raises:
            RuntimeError: the sender has ended, or the wait timed out.
        """
        while not self.arrived:
            self._receiver.deliver(wait=True)


def _poll_or_wait(local_group: LocalGroup, index: int, rank: int, *, wait: bool) -> bool:
    """Return whether `rank` has posted semaphore `index` once more; with `wait`, wait until it has."""
    if wait:
        local_group.signals.wait(index, [rank])
    return wait or local_group.signals.take(index)


_BLOCK_NBYTES = 2**18
"""Bytes reduced at a time: few enough that a block is still in the cache when the result is written."""


_ELEMENTWISE: dict[Any, Callable[..., Any]] = {dist.ReduceOp.SUM: torch.add, dist.ReduceOp.MAX: torch.maximum}


def reduce_tensors(
    tensors: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    op: Any = dist.ReduceOp.SUM,
    probes: list[torch.Tensor] | None = None,
) -> None:
    """Reduce `tensors`, in their order, into each of `outs`. All are flat and have the same size and dtype.

    Args:
        tensors: the tensors to reduce.
        outs: tensors for the result: separate ones, or `tensors` themselves.
        op: sum or maximum. Half precisions are accumulated in float32.
        probes: list to which the sum of each block of the result is added, taken while the block is in the cache.
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
        for destination in targets:
            destination.copy_(total)
        if probes is not None:
            probes.append(target.sum())


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of `dtype` are accumulated."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype

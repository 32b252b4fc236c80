"""What NCCL does with the messages of several ranks, simulated in one process.

`recorded` notes the operations that a rank's own code issues (`dist.isend`, `dist.irecv`, and waits for them), in
order. `find_deadlock` runs the operations of all ranks against each other under two rules:

- The first operation of a group blocks its rank until both sides have called one (pytorch#136248).
- The operations of a communicator complete in the order in which each side has issued them, and a send completes
  together with the receive that it meets (rendezvous).
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch.distributed as dist


@dataclass(slots=True)
class Operation:
    """A message that one rank sends or receives, or a wait for one.

    Attributes:
        kind: "send", "receive" or "wait".
        group: the communicator, as the pair of its ranks.
        shape: shape and dtype of the tensor.
        awaited: for a wait: the message.
        done: whether the message has arrived.
    """

    kind: str
    group: Any = None
    shape: Any = None
    awaited: "Operation | None" = None
    done: bool = False


@dataclass(slots=True)
class RecordedWork:
    """A work handle that notes when it is waited for."""

    trace: list[Operation]
    message: Operation

    def wait(self) -> None:
        self.trace.append(Operation("wait", awaited=self.message))

    def is_completed(self) -> bool:
        return False


class UncountedChannel:
    """A channel without accounting, which costs time here."""

    def start(self, works: list[Any], nbytes: int = 0) -> Any:
        return works[0]


@contextmanager
def recorded() -> Iterator[list[Operation]]:
    """The messages that the code in the block issues. Groups are pairs of ranks."""
    trace: list[Operation] = []

    def issue(kind: str) -> Callable[..., RecordedWork]:
        def call(tensor: Any, peer: int, group: Any) -> RecordedWork:
            trace.append(Operation(kind, group, (tensor.shape, tensor.dtype)))
            return RecordedWork(trace, trace[-1])

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "isend", issue("send"))
        patch.setattr(dist, "irecv", issue("receive"))
        yield trace


@dataclass(slots=True)
class _Communicator:
    """The operations in progress between two ranks, in the order in which each side has issued them."""

    connected: bool = False
    issued: dict[int, deque[Operation]] = field(default_factory=dict)

    def issue(self, rank: int, operation: Operation) -> None:
        self.issued.setdefault(rank, deque()).append(operation)
        while len(self.issued) == 2 and all(self.issued.values()):
            first, second = (queue[0] for queue in self.issued.values())
            if first.kind == second.kind:
                return  # both send, or both receive: neither ever completes
            assert first.shape == second.shape, f"{first.shape} meets {second.shape}"
            first.done = second.done = True
            for queue in self.issued.values():
                queue.popleft()


def find_deadlock(traces: Sequence[Sequence[Operation]]) -> str:
    """Run the ranks' operations. Returns what the first stuck rank waits for; empty if all ranks end."""
    communicators = {
        operation.group: _Communicator() for trace in traces for operation in trace if operation.kind != "wait"
    }
    position = [0] * len(traces)

    def connects(group: Any) -> bool:
        """Whether both sides are at an operation of this group."""
        return all(position[rank] < len(traces[rank]) and traces[rank][position[rank]].group == group for rank in group)

    moved = True
    while moved:
        moved = False
        for rank, trace in enumerate(traces):
            while position[rank] < len(trace):
                operation = trace[position[rank]]
                if operation.awaited is not None:
                    if not operation.awaited.done:
                        break
                else:
                    communicator = communicators[operation.group]
                    communicator.connected = communicator.connected or connects(operation.group)
                    if not communicator.connected:
                        break
                    communicator.issue(rank, operation)
                position[rank] += 1
                moved = True
    stuck = [rank for rank, trace in enumerate(traces) if position[rank] < len(trace)]
    if stuck:
        operation = traces[stuck[0]][position[stuck[0]]]
        where = operation.awaited or operation
        return f"rank {stuck[0]} is stuck in a {operation.kind} ({where.kind} in {where.group})"
    left = [operation for c in communicators.values() for queue in c.issued.values() for operation in queue]
    assert not left, "a message is never received"
    return ""

"""All-to-all, all-gather and reductions as pairwise messages, each rank posting receives before sends.

Gloo sends a message once its receiver has reported, over the same connection, that it is ready. Gloo's own all-to-all
posts sends first. The late rank of a pair then fills the connection with its message, and its own "ready" waits behind
it. The two messages follow each other instead of crossing, in this and every later exchange.

In an experiment, two hosts exchanged 2 MiB at 100 Mbit/s, and one of them was late by a tenth of the transfer. Gloo's
all-to-all took 2.0 times the link's time, its all-gather 1.6 and its reduce-scatter 2.2. With receives posted first
they take 1.1 (docs/measurements.md).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed these functions and warns about the old names.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

_ALL_TO_ALL_TAG, _ALL_GATHER_TAG, _REDUCE_SCATTER_TAG, _SMALL_ALL_REDUCE_TAG = 2, 3, 4, 5
"""Message tags. Other messages in the same groups use tags 0 and 1."""

MAX_DIRECT_RANKS = 16
"""Up to this group size, small all-reduces go as direct messages from each rank to all others."""

RowCounts = tuple[Sequence[int], Sequence[int]]
"""Number of rows from each rank, and number of rows to each rank."""


class MessagesWork:
    """Messages in progress, as one work handle.

    Args:
        works: the work handles of the messages, receives first.
        kept: tensors to keep alive until the messages have arrived.
        then: called once they have arrived.
    """

    __slots__ = ("_kept", "_then", "_works")

    def __init__(self, works: list[Any], kept: tuple[Any, ...] = (), then: Callable[[], Any] | None = None) -> None:
        self._works, self._kept, self._then = works, kept, then

    def wait(self) -> None:
        """Wait for each message once, receives first, then call `then`; further calls return at once.

        Waiting twice for one of Gloo's receives would wait for another message.
        """
        while self._works:
            self._works.pop(0).wait()
        then, self._then, self._kept = self._then, None, ()
        if then is not None:
            then()

    def is_completed(self) -> bool:
        """Return whether `wait` would return at once. A work with a `then` completes only in `wait`."""
        return self._then is None and all(work.is_completed() for work in self._works)


RankTensors = Sequence[Tensor] | Tensor
"""A tensor for each rank, in rank order."""

AddressedTensors = Sequence[tuple[int, Tensor]]
"""(rank in the group, tensor to receive from it or send to it)."""


def start_messages(received: AddressedTensors, sent: AddressedTensors, group: Any, *, tag: int = 0) -> list[Any]:
    """Start receives and sends.

    Between two ranks, messages of one group and tag arrive in the order in which they were sent. Empty tensors are not
    sent.

    Args:
        received: tensors to fill, with the ranks that send them.
        sent: tensors to send, with the ranks that receive them.
        group: the process group; None: all ranks.
        tag: the message tag.

    Returns:
        The work handles, receives first. Wait for each only once.
    """
    receives = [(place, row) for place, row in received if row.numel()]
    sends = [(place, row) for place, row in sent if row.numel()]
    if not receives and not sends:
        return []
    if dist.get_backend(group) != "gloo":
        operations = [dist.P2POp(dist.irecv, row, group=group, tag=tag, group_peer=place) for place, row in receives]
        operations += [dist.P2POp(dist.isend, row, group=group, tag=tag, group_peer=place) for place, row in sends]
        return dist.batch_isend_irecv(operations)
    # Call the group's methods: irecv and isend take a third longer for small messages, of which there are many.
    process_group: Any = dist.group.WORLD if group is None else group
    works = [process_group.recv([row], place, tag) for place, row in receives]
    return works + [process_group.send([row], place, tag) for place, row in sends]


def exchange_with_others(received: RankTensors, sent: RankTensors, group: Any, *, tag: int = 0) -> list[Any]:
    """Start to receive a tensor from every other rank and to send one to each, as `start_messages` does.

    Args:
        received: tensors to fill, by rank of the sender.
        sent: tensors to send, by rank of the receiver.
        group: the process group; None: all ranks.
        tag: the message tag.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    others = [(rank + step) % size for step in range(1, size)]
    receives = [(other, received[other]) for other in others[::-1]]
    return start_messages(receives, [(other, sent[other]) for other in others], group, tag=tag)


def all_to_all(received: Tensor, sent: Tensor, group: Any, counts: RowCounts | None = None) -> Any:
    """Start an all-to-all of rows along dim 0.

    Args:
        received: filled with the rows from all ranks, in rank order.
        sent: the rows to send, in the order of the ranks that receive them.
        group: the process group; None: all ranks.
        counts: number of rows from and to each rank; None: equally many.

    Returns:
        The work handle.
    """
    receive_counts, send_counts = (list(counts[0]), list(counts[1])) if counts else (None, None)
    if not _uses_pairs(sent, group):
        return dist.all_to_all_single(received, sent, receive_counts, send_counts, group=group, async_op=True)
    size = dist.get_world_size(group)
    rows = (
        torch.split(received, receive_counts or [len(received) // size] * size),
        torch.split(sent, send_counts or [len(sent) // size] * size),
    )
    return MessagesWork(_exchange_with_all(*rows, group, _ALL_TO_ALL_TAG), (received, sent))


def all_gather(everyone: Tensor, mine: Tensor, group: Any) -> Any:
    """Start an all-gather of every rank's `mine` into `everyone`, along dim 0. Returns the work handle."""
    if not _uses_pairs(mine, group):
        return _all_gather(everyone, mine, group=group, async_op=True)
    size = dist.get_world_size(group)
    rows = everyone.view(size, *mine.shape).unbind(0)
    return MessagesWork(_exchange_with_all(rows, [mine] * size, group, _ALL_GATHER_TAG), (everyone, mine))


def reduce_scatter(mine: Tensor, whole: Tensor, group: Any) -> Any:
    """Start a reduce-scatter of `whole` along dim 0 into `mine`. Returns the work handle.

    On CPUs the ranks' tensors are added in rank order.
    """
    if not _uses_pairs(whole, group):
        return _reduce_scatter(mine, whole, group=group, async_op=True)
    size = dist.get_world_size(group)
    parts = mine.new_empty(size, *mine.shape)  # this rank's part of `whole`, from each rank
    works = _exchange_with_all(parts.unbind(0), whole.view(size, *mine.shape).unbind(0), group, _REDUCE_SCATTER_TAG)
    return MessagesWork(works, (parts, whole), lambda: torch.sum(parts, 0, out=mine))


def ring_all_reduce_nbytes(tensor: Tensor, size: int) -> int:
    """Return the bytes that one rank sends in a ring all-reduce: 2 (size - 1) / size of the tensor."""
    return 2 * (size - 1) * tensor.numel() * tensor.element_size() // size


def all_reduce_small(mine: Tensor, group: Any) -> tuple[Any, int]:
    """Start an all-reduce of a small tensor in place, bit-identical on all ranks.

    On CPUs, up to `MAX_DIRECT_RANKS` ranks each send their tensor to all others. This takes one network latency, where
    a ring takes 2 (ranks - 1) of them in sequence.

    Args:
        mine: this rank's tensor.
        group: the process group; None: all ranks.

    Returns:
        (work handle, bytes that this rank sends).
    """
    size = dist.get_world_size(group)
    if size > MAX_DIRECT_RANKS or not _uses_pairs(mine, group):
        return dist.all_reduce(mine, group=group, async_op=True), ring_all_reduce_nbytes(mine, size)
    gathered = mine.new_empty(size, *mine.shape)  # the tensor of each rank
    works = _exchange_with_all(gathered.unbind(0), [mine] * size, group, _SMALL_ALL_REDUCE_TAG)

    def add_up() -> None:  # in rank order, so that the result is bit-identical on all ranks
        mine.copy_(gathered[0])
        for row in gathered[1:]:
            mine.add_(row)

    return MessagesWork(works, (gathered, mine), add_up), (size - 1) * mine.numel() * mine.element_size()


def _uses_pairs(tensor: Tensor, group: Any) -> bool:
    """Return whether a collective on this tensor and group goes as pairwise messages."""
    return tensor.device.type == "cpu" and dist.get_backend(group) == "gloo"


def _exchange_with_all(received: RankTensors, sent: RankTensors, group: Any, tag: int) -> list[Any]:
    """Run `exchange_with_others`, and copy this rank's own tensor."""
    works = exchange_with_others(received, sent, group, tag=tag)
    rank = dist.get_rank(group)
    received[rank].copy_(sent[rank])
    return works

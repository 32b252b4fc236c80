"""All-to-all, all-gather and reductions as pairwise messages, each rank posting receives before sends.

Gloo sends a message once its receiver has said, over the same connection, that it is ready. Gloo's own all-to-all posts
sends first: the late rank of a pair fills the connection with its message, and its own "ready" waits behind it. The two
messages then follow each other instead of crossing, in this and every later exchange. Between two hosts at 100 Mbit/s,
one of them late by a tenth of the transfer, exchanges of 2 MiB took 2.0 times the link's time so, 1.6 with Gloo's
all-gather and 2.2 with its reduce-scatter; with receives posted first they take 1.1 (docs/measurements.md).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 has new names for them, and warns of the old ones.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

_ALL_TO_ALL_TAG, _ALL_GATHER_TAG, _REDUCE_SCATTER_TAG, _SMALL_ALL_REDUCE_TAG = 2, 3, 4, 5
"""Tags, of which 0 and 1 are those of other messages in the same groups."""

MAX_DIRECT_RANKS = 16
"""Up to so many ranks tell everyone what is little."""

RowCounts = tuple[Sequence[int], Sequence[int]]
"""Rows from each rank, and to each."""


class MessagesWork:
    """Messages in flight as one work. `then`: runs once they have arrived; `kept`: tensors to keep alive until then."""

    __slots__ = ("_kept", "_then", "_works")

    def __init__(self, works: list[Any], kept: tuple[Any, ...] = (), then: Callable[[], Any] | None = None) -> None:
        self._works, self._kept, self._then = works, kept, then

    def wait(self) -> None:
        """Wait for each message once, receives first: Gloo's receive would wait for another message if asked again."""
        while self._works:
            self._works.pop(0).wait()
        then, self._then, self._kept = self._then, None, ()
        if then is not None:
            then()

    def is_completed(self) -> bool:
        """Whether it has been waited for, or would be at once."""
        return self._then is None and all(work.is_completed() for work in self._works)


RankTensors = Sequence[Tensor] | Tensor
"""A tensor for each rank, in their order."""

AddressedTensors = Sequence[tuple[int, Tensor]]
"""Tensors from, or to, places in a group."""


def start_messages(received: AddressedTensors, sent: AddressedTensors, group: Any, *, tag: int = 0) -> list[Any]:
    """Start receives and sends; returns their works, receives first.

    Between two ranks, messages of one group and tag arrive in the order they were sent in. Empty ones are not sent.
    """
    comes = [(place, row) for place, row in received if row.numel()]
    goes = [(place, row) for place, row in sent if row.numel()]
    if not comes and not goes:
        return []
    if dist.get_backend(group) != "gloo":
        begin = [dist.P2POp(dist.irecv, row, group=group, tag=tag, group_peer=place) for place, row in comes]
        begin += [dist.P2POp(dist.isend, row, group=group, tag=tag, group_peer=place) for place, row in goes]
        return dist.batch_isend_irecv(begin)
    # The group's own methods: irecv and isend take a third longer for small ones, of which there are many.
    own: Any = dist.group.WORLD if group is None else group
    works = [own.recv([row], place, tag) for place, row in comes]
    return works + [own.send([row], place, tag) for place, row in goes]


def exchange_with_others(received: RankTensors, sent: RankTensors, group: Any, *, tag: int = 0) -> list[Any]:
    """`start_messages` with one tensor to, and one from, every other rank."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    others = [(rank + step) % size for step in range(1, size)]
    comes = [(other, received[other]) for other in others[::-1]]
    return start_messages(comes, [(other, sent[other]) for other in others], group, tag=tag)


def all_to_all(received: Tensor, sent: Tensor, group: Any, counts: RowCounts | None = None) -> Any:
    """Start an all-to-all of rows along dim 0 of `sent`, into `received` in the order of ranks.

    `counts`: rows from and to each rank; equally many if None. Returns a work.
    """
    come, go = (list(counts[0]), list(counts[1])) if counts else (None, None)
    if not _uses_pairs(sent, group):
        return dist.all_to_all_single(received, sent, come, go, group=group, async_op=True)
    size = dist.get_world_size(group)
    rows = (
        torch.split(received, come or [len(received) // size] * size),
        torch.split(sent, go or [len(sent) // size] * size),
    )
    return MessagesWork(_exchange_with_all(*rows, group, _ALL_TO_ALL_TAG), (received, sent))


def all_gather(everyone: Tensor, mine: Tensor, group: Any) -> Any:
    """Start an all-gather of every rank's `mine`, concatenated, into `everyone`. Returns a work."""
    if not _uses_pairs(mine, group):
        return _all_gather(everyone, mine, group=group, async_op=True)
    size = dist.get_world_size(group)
    rows = everyone.view(size, *mine.shape).unbind(0)
    return MessagesWork(_exchange_with_all(rows, [mine] * size, group, _ALL_GATHER_TAG), (everyone, mine))


def reduce_scatter(mine: Tensor, whole: Tensor, group: Any) -> Any:
    """Start a reduce-scatter of `whole` along dim 0 into `mine`, added in the order of ranks. Returns a work."""
    if not _uses_pairs(whole, group):
        return _reduce_scatter(mine, whole, group=group, async_op=True)
    size = dist.get_world_size(group)
    came = mine.new_empty(size, *mine.shape)
    works = _exchange_with_all(came.unbind(0), whole.view(size, *mine.shape).unbind(0), group, _REDUCE_SCATTER_TAG)
    return MessagesWork(works, (came, whole), lambda: torch.sum(came, 0, out=mine))


def ring_all_reduce_nbytes(tensor: Tensor, size: int) -> int:
    """Bytes one rank sends in a ring all-reduce: 2 (size - 1) / size of the tensor."""
    return 2 * (size - 1) * tensor.numel() * tensor.element_size() // size


def all_reduce_small(mine: Tensor, group: Any) -> tuple[Any, int]:
    """Start an all-reduce of a small `mine` in place, bit-identical on all ranks. Returns (work, bytes sent).

    Up to MAX_DIRECT_RANKS ranks each send their tensor to all others: one network latency, where a ring takes
    2 (ranks - 1) of them in sequence.
    """
    size = dist.get_world_size(group)
    if size > MAX_DIRECT_RANKS or not _uses_pairs(mine, group):
        return dist.all_reduce(mine, group=group, async_op=True), ring_all_reduce_nbytes(mine, size)
    came = mine.new_empty(size, *mine.shape)
    works = _exchange_with_all(came.unbind(0), [mine] * size, group, _SMALL_ALL_REDUCE_TAG)

    def add_up() -> None:  # in the order of ranks
        mine.copy_(came[0])
        for row in came[1:]:
            mine.add_(row)

    return MessagesWork(works, (came, mine), add_up), (size - 1) * mine.numel() * mine.element_size()


def _uses_pairs(tensor: Tensor, group: Any) -> bool:
    return tensor.device.type == "cpu" and dist.get_backend(group) == "gloo"


def _exchange_with_all(received: RankTensors, sent: RankTensors, group: Any, tag: int) -> list[Any]:
    """`exchange_with_others`, with this rank's own tensor copied."""
    works = exchange_with_others(received, sent, group, tag=tag)
    rank = dist.get_rank(group)
    received[rank].copy_(sent[rank])
    return works

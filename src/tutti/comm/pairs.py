"""All-to-all, gather and sums as messages of pairs of ranks, each with its receives begun before its sends.

Gloo sends a message once its receiver has said, over the same connection, that it is ready. Its own all-to-all begins
its sends first: of two ranks, the one that is late finds the other ready, fills the connection with its message, and
its own word of being ready waits behind that. So messages of the two ways follow each other instead of crossing, from
then on in every exchange. Between two hosts at 100 Mbit/s, one of them late by a tenth of it, exchanges of 2 MiB took
2.0 times as long as the line needs so, 1.6 in Gloo's all-gather and 2.2 in its reduce-scatter; begun in this order they
take 1.1 (docs/measurements.md).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 has new names for them, and warns of the old ones.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

_ALL_TO_ALL, _GATHER, _SUM, _LITTLE = 2, 3, 4, 5
"""Tags, of which 0 and 1 are those of other messages in the same groups."""

DIRECT_RANKS = 16
"""Up to so many ranks tell everyone what is little."""

Counts = tuple[Sequence[int], Sequence[int]]
"""Rows from each rank, and to each."""


class Messages:
    """Messages under way, as one work. `then`: what is done once they are there; `kept`: what must live so long."""

    __slots__ = ("_kept", "_then", "_works")

    def __init__(self, works: list[Any], kept: tuple[Any, ...] = (), then: Callable[[], Any] | None = None) -> None:
        self._works, self._kept, self._then = works, kept, then

    def wait(self) -> None:
        """For each once: Gloo's receive waits for another message when it is asked again. What comes is waited for
        first: a rank that has ended is noticed there."""
        while self._works:
            self._works.pop(0).wait()
        then, self._then, self._kept = self._then, None, ()
        if then is not None:
            then()

    def is_completed(self) -> bool:
        """Whether it has been waited for, or would be at once."""
        return self._then is None and all(work.is_completed() for work in self._works)


Rows = Sequence[Tensor] | Tensor
"""A tensor for each rank, in their order."""

Addressed = Sequence[tuple[int, Tensor]]
"""Tensors from, or to, places in a group."""


def messages(received: Addressed, sent: Addressed, group: Any, *, tag: int = 0) -> list[Any]:
    """Begin to receive and to send; what comes is to be waited for first. Between two ranks, messages of a group and a
    tag arrive in the order in which they were sent; empty ones are not sent."""
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


def to_others(received: Rows, sent: Rows, group: Any, *, tag: int = 0) -> list[Any]:
    """`messages` with a row to every other rank, and one from each."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    others = [(rank + step) % size for step in range(1, size)]
    comes = [(other, received[other]) for other in others[::-1]]
    return messages(comes, [(other, sent[other]) for other in others], group, tag=tag)


def all_to_all(received: Tensor, sent: Tensor, group: Any, counts: Counts | None = None) -> Any:
    """Begin: rows along dim 0 of `sent` to their ranks, into `received` in the order of ranks; equally many without
    `counts`. Returns a work."""
    come, go = (list(counts[0]), list(counts[1])) if counts else (None, None)
    if not _by_pairs(sent, group):
        return dist.all_to_all_single(received, sent, come, go, group=group, async_op=True)
    size = dist.get_world_size(group)
    rows = (
        torch.split(received, come or [len(received) // size] * size),
        torch.split(sent, go or [len(sent) // size] * size),
    )
    return Messages(_everyone(*rows, group, _ALL_TO_ALL), (received, sent))


def all_gather(everyone: Tensor, mine: Tensor, group: Any) -> Any:
    """Begin: every rank's `mine`, one behind another, into `everyone`. Returns a work."""
    if not _by_pairs(mine, group):
        return _all_gather(everyone, mine, group=group, async_op=True)
    size = dist.get_world_size(group)
    rows = everyone.view(size, *mine.shape).unbind(0)
    return Messages(_everyone(rows, [mine] * size, group, _GATHER), (everyone, mine))


def sum_part(mine: Tensor, whole: Tensor, group: Any) -> Any:
    """Begin: this rank's part along dim 0 of the sum of `whole` over ranks, added up in their order, into `mine`.
    Returns a work."""
    if not _by_pairs(whole, group):
        return _reduce_scatter(mine, whole, group=group, async_op=True)
    size = dist.get_world_size(group)
    came = mine.new_empty(size, *mine.shape)
    works = _everyone(came.unbind(0), whole.view(size, *mine.shape).unbind(0), group, _SUM)
    return Messages(works, (came, whole), lambda: torch.sum(came, 0, out=mine))


def ring_nbytes(tensor: Tensor, size: int) -> int:
    """Bytes one rank sends to sum a tensor over `size` ranks as a ring does: 2 (size - 1) / size of it."""
    return 2 * (size - 1) * tensor.numel() * tensor.element_size() // size


def sum_little(mine: Tensor, group: Any) -> tuple[Any, int]:
    """Begin: the sum over ranks of `mine`, in place, the same bits on all of them. Returns (a work, bytes sent).

    Among few ranks everyone tells everyone: that takes one way across a network, whose queues may be full of other
    things, where a ring's sum takes 2 (ranks - 1), one after another.
    """
    size = dist.get_world_size(group)
    if size > DIRECT_RANKS or not _by_pairs(mine, group):
        return dist.all_reduce(mine, group=group, async_op=True), ring_nbytes(mine, size)
    came = mine.new_empty(size, *mine.shape)
    works = _everyone(came.unbind(0), [mine] * size, group, _LITTLE)

    def add_up() -> None:  # in the order of ranks
        mine.copy_(came[0])
        for row in came[1:]:
            mine.add_(row)

    return Messages(works, (came, mine), add_up), (size - 1) * mine.numel() * mine.element_size()


def _by_pairs(tensor: Tensor, group: Any) -> bool:
    return tensor.device.type == "cpu" and dist.get_backend(group) == "gloo"


def _everyone(received: Rows, sent: Rows, group: Any, tag: int) -> list[Any]:
    """`to_others`; this rank's own row is copied."""
    works = to_others(received, sent, group, tag=tag)
    rank = dist.get_rank(group)
    received[rank].copy_(sent[rank])
    return works

"""A replica's tensors as few flat vectors, and what replicas do with them: means, sums, exchanges with partners."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from tutti.comm.point_to_point import ring_all_reduce_nbytes, start_messages
from tutti.comm.traffic import CommChannel, CommHandle, untracked_channel
from tutti.compression.cast import AT_ONCE
from tutti.parallel.mesh import Mesh

Flats = list[torch.Tensor]
"""One vector for each dtype and device."""


class Vectors:
    """Some tensors, by name, read into flat vectors and written back from them.

    Halves are computed with in float32, whole numbers in int64, and so exchanged.
    """

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        self.names: list[str] = []
        for name, tensor in named:
            self.names.append(name)
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
        self._kinds = list(kinds.values())

    @property
    def kinds(self) -> list[tuple[torch.dtype, torch.device]]:
        """Of each vector: what it is computed with, and where it is."""
        return [(_work(some[0].dtype), some[0].device) for some in self._kinds]

    @property
    def shapes(self) -> list[list[torch.Size]]:
        """Of each vector: the tensors' shapes, in their order there."""
        return [[t.shape for t in some] for some in self._kinds]

    @property
    def nbytes(self) -> int:
        """Bytes of the vectors."""
        return sum(sum(t.numel() for t in some) * _work(some[0].dtype).itemsize for some in self._kinds)

    def read(self) -> Flats:
        """The values, copied."""
        return [torch.cat([t.reshape(-1) for t in some]).to(_work(some[0].dtype)) for some in self._kinds]

    def empty(self) -> Flats:
        """Room for the values."""
        return [some[0].new_empty(sum(t.numel() for t in some), dtype=_work(some[0].dtype)) for some in self._kinds]

    def write(self, flats: Flats) -> None:
        """Give the tensors the values of `flats`."""
        for some, flat in zip(self._kinds, flats, strict=True):
            for tensor, part in zip(some, self._parts(some, flat), strict=True):
                tensor.copy_(part.view(tensor.shape))

    def pieces(self, *vectors: Flats) -> Iterator[tuple[torch.Tensor, ...]]:
        """Some values of a tensor and the same of each of `vectors`, all as views: few enough to stay in a core's cache
        while they are worked on, unless a tensor is not contiguous."""
        for place, some in enumerate(self._kinds):
            own = (self._parts(some, flats[place]) for flats in vectors)
            for tensor, *parts in zip(some, *own, strict=True):
                if tensor.is_contiguous():
                    yield from zip(*(torch.split(one, AT_ONCE) for one in (tensor.view(-1), *parts)), strict=True)
                else:
                    yield tensor, *(part.view(tensor.shape) for part in parts)

    def parts(self, flats: Flats) -> list[torch.Tensor]:
        """The part of every tensor, as views of `flats`, in their order there."""
        return [part for some, flat in zip(self._kinds, flats, strict=True) for part in self._parts(some, flat)]

    def _parts(self, some: list[torch.Tensor], flat: torch.Tensor) -> Sequence[torch.Tensor]:
        return torch.split(flat, [t.numel() for t in some])


def _work(dtype: torch.dtype) -> torch.dtype:
    if not dtype.is_floating_point:
        return torch.int64
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


@dataclass(frozen=True, slots=True)
class Replicas:
    """The replicas of a model, this one among them. `ranks`: the global rank of each; `group`: their process group.

    With one replica every exchange is nothing.
    """

    index: int = 0
    size: int = 1
    ranks: tuple[int, ...] = (0,)
    group: Any = None
    channel: CommChannel = field(default_factory=untracked_channel, compare=False)
    figures: CommChannel = field(default_factory=untracked_channel, compare=False)

    @classmethod
    def of(cls, mesh: Mesh, channel: CommChannel, figures: CommChannel) -> "Replicas":
        """The ranks along `replicate`. `channel`: of what they exchange; `figures`: of single numbers."""
        size = mesh.degree("replicate")
        group = mesh.group("replicate") if size > 1 else None
        return cls(mesh.index("replicate"), size, tuple(mesh.ranks("replicate")), group, channel, figures)

    def start_sum(self, flats: Flats, channel: CommChannel | None = None) -> CommHandle:
        """Begin to sum `flats` over the replicas, in place; `channel`: if they are not what replicas exchange."""
        channel = channel or self.channel
        if self.size == 1:
            return CommHandle(channel, [])
        works = [dist.all_reduce(flat, group=self.group, async_op=True) for flat in flats]
        return channel.start(works, sum(ring_all_reduce_nbytes(flat, self.size) for flat in flats))

    def mean(self, flats: Flats) -> Flats:
        """The mean of `flats` over the replicas, in place; the same bits on every replica."""
        if not flats:
            return flats
        self.start_sum(flats).wait()
        torch._foreach_div_(flats, float(self.size))
        return flats

    def start_swap(self, send: Flats, to: Sequence[int], receive: Sequence[Flats], frm: Sequence[int]) -> CommHandle:
        """Begin to send `send` to the replicas `to`, and to receive `receive[i]` from replica `frm[i]`."""
        comes = [(peer, flat) for flats, peer in zip(receive, frm, strict=True) for flat in flats]
        works = start_messages(comes, [(peer, flat) for peer in to for flat in send], self.group)
        return self.channel.start(works, len(to) * sum(flat.numel() * flat.element_size() for flat in send))

    def gather(self, figures: torch.Tensor) -> torch.Tensor:
        """`figures` of every replica, stacked in their order."""
        if self.size == 1:
            return figures[None]
        everyone = [torch.empty_like(figures) for _ in range(self.size)]
        with self.figures.waiting((self.size - 1) * figures.numel() * figures.element_size()):
            dist.all_gather(everyone, figures, group=self.group)
        return torch.stack(everyone)

"""The replicas of a model: their tensors as a few flat vectors, exchanges of these, and how far replicas differ."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from tutti.comm.point_to_point import ring_all_reduce_nbytes, start_messages
from tutti.comm.traffic import CommChannel, CommHandle, untracked_channel
from tutti.compression.cast import CACHE_CHUNK_NUMEL
from tutti.parallel.mesh import Mesh

FlatVectors = list[torch.Tensor]
"""One vector for each dtype and device."""


class FlatTensors:
    """Named tensors that are read into flat vectors and written back from them.

    Half precisions are computed and exchanged in float32, integers in int64.

    Args:
        named: (name, tensor) pairs.

    Attributes:
        names: names of the tensors.
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
        """(dtype, device) of each vector."""
        return [(_vector_dtype(tensors[0].dtype), tensors[0].device) for tensors in self._kinds]

    @property
    def shapes(self) -> list[list[torch.Size]]:
        """For each vector, the shapes of its tensors in their order."""
        return [[t.shape for t in tensors] for tensors in self._kinds]

    @property
    def nbytes(self) -> int:
        """Bytes of all vectors."""
        return sum(
            sum(t.numel() for t in tensors) * _vector_dtype(tensors[0].dtype).itemsize for tensors in self._kinds
        )

    def read(self) -> FlatVectors:
        """Return the values, copied."""
        return [
            torch.cat([t.reshape(-1) for t in tensors]).to(_vector_dtype(tensors[0].dtype)) for tensors in self._kinds
        ]

    def empty(self) -> FlatVectors:
        """Return uninitialised vectors of the same sizes."""
        return [
            tensors[0].new_empty(sum(t.numel() for t in tensors), dtype=_vector_dtype(tensors[0].dtype))
            for tensors in self._kinds
        ]

    def write(self, flats: FlatVectors) -> None:
        """Set the tensors to the values of `flats`."""
        for tensors, flat in zip(self._kinds, flats, strict=True):
            for tensor, part in zip(tensors, self._parts(tensors, flat), strict=True):
                tensor.copy_(part.view(tensor.shape))

    def pieces(self, *vectors: FlatVectors) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield pieces of the tensors, each with the same pieces of `vectors`, all as views.

        A piece is small enough to stay in a core's cache while it is processed, unless a tensor is not contiguous.
        """
        for index, tensors in enumerate(self._kinds):
            local = (self._parts(tensors, flats[index]) for flats in vectors)
            for tensor, *parts in zip(tensors, *local, strict=True):
                if tensor.is_contiguous():
                    yield from zip(
                        *(torch.split(flat, CACHE_CHUNK_NUMEL) for flat in (tensor.view(-1), *parts)), strict=True
                    )
                else:
                    yield tensor, *(part.view(tensor.shape) for part in parts)

    def parts(self, flats: FlatVectors) -> list[torch.Tensor]:
        """Return each tensor's part of `flats`, as views, in the order of the vectors."""
        return [part for tensors, flat in zip(self._kinds, flats, strict=True) for part in self._parts(tensors, flat)]

    def _parts(self, tensors: list[torch.Tensor], flat: torch.Tensor) -> Sequence[torch.Tensor]:
        return torch.split(flat, [t.numel() for t in tensors])


def _vector_dtype(dtype: torch.dtype) -> torch.dtype:
    if not dtype.is_floating_point:
        return torch.int64
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


@dataclass(frozen=True, slots=True)
class ReplicaGroup:
    """The replicas of a model, including this one. With one replica every exchange does nothing.

    Attributes:
        index: index of this replica.
        size: number of replicas.
        ranks: global rank of each replica.
        group: their process group.
        channel: accounting of what they exchange.
        scalar_channel: accounting of single numbers.
    """

    index: int = 0
    size: int = 1
    ranks: tuple[int, ...] = (0,)
    group: Any = None
    channel: CommChannel = field(default_factory=untracked_channel, compare=False)
    scalar_channel: CommChannel = field(default_factory=untracked_channel, compare=False)

    @classmethod
    def of(cls, mesh: Mesh, channel: CommChannel, scalar_channel: CommChannel) -> "ReplicaGroup":
        """Return the group of the ranks along `replicate`.

        Args:
            mesh: the mesh.
            channel: accounting of what replicas exchange.
            scalar_channel: accounting of single numbers.
        """
        size = mesh.degree("replicate")
        group = mesh.group("replicate") if size > 1 else None
        return cls(mesh.index("replicate"), size, tuple(mesh.ranks("replicate")), group, channel, scalar_channel)

    def start_sum(self, flats: FlatVectors, channel: CommChannel | None = None) -> CommHandle:
        """Start to all-reduce `flats` over the replicas, in place.

        Args:
            flats: the vectors.
            channel: accounting of what is sent; None: the group's `channel`.

        Returns:
            The handle to wait for.
        """
        channel = channel or self.channel
        if self.size == 1:
            return CommHandle(channel, [])
        works = [dist.all_reduce(flat, group=self.group, async_op=True) for flat in flats]
        return channel.start(works, sum(ring_all_reduce_nbytes(flat, self.size) for flat in flats))

    def mean(self, flats: FlatVectors) -> FlatVectors:
        """Replace `flats` by their mean over the replicas, in place; bit-identical on every replica."""
        if not flats:
            return flats
        self.start_sum(flats).wait()
        torch._foreach_div_(flats, float(self.size))
        return flats

    def start_swap(
        self, send: FlatVectors, targets: Sequence[int], receive: Sequence[FlatVectors], sources: Sequence[int]
    ) -> CommHandle:
        """Start to send vectors to some replicas and to receive vectors from others.

        Args:
            send: vectors for each replica in `targets`.
            targets: indices of the replicas that receive `send`.
            receive: for each replica in `sources`, the vectors to fill.
            sources: indices of the replicas that send.

        Returns:
            The handle to wait for.
        """
        receives = [(peer, flat) for flats, peer in zip(receive, sources, strict=True) for flat in flats]
        works = start_messages(receives, [(peer, flat) for peer in targets for flat in send], self.group)
        return self.channel.start(works, len(targets) * sum(flat.numel() * flat.element_size() for flat in send))

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the `tensor` of every replica, stacked in their order: shape (replicas, *shape)."""
        if self.size == 1:
            return tensor[None]
        everyone = [torch.empty_like(tensor) for _ in range(self.size)]
        with self.scalar_channel.waiting((self.size - 1) * tensor.numel() * tensor.element_size()):
            dist.all_gather(everyone, tensor, group=self.group)
        return torch.stack(everyone)


MEASURED_EVERY = 10
"""If the mean is not computed anyway, disagreement is measured in one of this many exchanges."""

SAMPLED_PARAMETERS = 4096
"""Largest number of parameters compared in such a measurement."""


class Drift:
    """Distance of this replica from the mean, accumulated piece by piece."""

    def __init__(self) -> None:
        self._squares = torch.zeros((), dtype=torch.float64)
        self._mean_norm_squared = torch.zeros((), dtype=torch.float64)
        self._numel = 0

    def add(self, distance: torch.Tensor, mean: torch.Tensor) -> None:
        """Add a piece.

        Args:
            distance: this replica's distance from the mean, by value.
            mean: the mean's values.
        """
        distance, mean = distance.reshape(-1), mean.reshape(-1)
        self._squares = self._squares + distance.dot(distance)
        self._mean_norm_squared = self._mean_norm_squared + mean.dot(mean)
        self._numel += distance.numel()

    def distances(self, replicas: ReplicaGroup) -> dict[str, float | int]:
        """Return a replica's largest and mean distance from the mean, relative to the mean's norm. Collective."""
        return _relative_distances(replicas.gather(self._squares.reshape(1)), self._mean_norm_squared, self._numel)


def distance_from_mean(local: FlatVectors, mean: FlatVectors, replicas: ReplicaGroup) -> dict[str, float | int]:
    """Return the largest and the mean distance of a replica from `mean`, relative to the norm of `mean`. Collective.

    Args:
        local: this replica's parameters.
        mean: the mean of all replicas' parameters.
        replicas: the group.
    """
    drift = Drift()
    for local_flat, mean_flat in zip(local, mean, strict=True):
        for a, b in zip(
            *(torch.split(flat.reshape(-1), CACHE_CHUNK_NUMEL) for flat in (local_flat, mean_flat)), strict=True
        ):
            drift.add(a.to(b.dtype) - b, b)
    return drift.distances(replicas)


def distance_from_sampled_mean(local: FlatVectors, replicas: ReplicaGroup) -> dict[str, float | int]:
    """Return the largest and the mean relative distance of a replica from the mean, over sampled values. Collective.

    The sample has at most about `SAMPLED_PARAMETERS` evenly spaced parameters.

    Args:
        local: this replica's parameters.
        replicas: the group.
    """
    numel = sum(flat.numel() for flat in local)
    stride = -(-numel // SAMPLED_PARAMETERS)
    sample = torch.cat([flat[::stride].double() for flat in local])
    everyone = replicas.gather(sample)
    mean = everyone.mean(0)
    return _relative_distances((everyone - mean).square().sum(1), mean.square().sum(), sample.numel())


def _relative_distances(squares: torch.Tensor, norm_squared: torch.Tensor, numel: int) -> dict[str, float | int]:
    """Return the largest and the mean of the relative distances, and the number of parameters compared."""
    relative = (squares.reshape(-1) / norm_squared.clamp_min(1e-300)).sqrt()
    return {"max": float(relative.max()), "mean": float(relative.mean()), "parameters": numel}

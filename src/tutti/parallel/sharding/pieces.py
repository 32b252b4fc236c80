"""How tensors are divided among ranks: ranges along one dim of each, laid behind one another in a segment a rank."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from tutti.config.vocabulary import AxisName
from tutti.parallel.mesh import Mesh

Bounds = tuple[int, tuple[int, ...]]
"""(dim, degree + 1 boundaries along it)."""


class Loads:
    """Elements that every rank of `shard` has so far, to be added to (see even_bounds). Counted apart for each set of
    other axes over which gradients are summed: their ranks must cut alike, whatever else they hold (tables, experts).
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._counts: dict[tuple[AxisName, ...], list[int]] = {}

    def others(self, sums: Iterable[AxisName]) -> tuple[AxisName, ...]:
        """The mesh's axes among `sums`, without `shard`."""
        wanted = {axis for axis in sums if axis != "shard"}
        return tuple(axis for axis in self._mesh.degrees if axis in wanted)

    def beside(self, sums: Iterable[AxisName]) -> list[int]:
        """The counts for parameters whose gradients are summed over `sums`."""
        return self._counts.setdefault(self.others(sums), [0] * self._mesh.degree("shard"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """start .. stop - 1 along `dim` of the tensor at `index`, from `offset` on in its rank's segment; `shape` of it."""

    index: int
    dim: int
    start: int
    stop: int
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The piece of a whole tensor, a view."""
        return whole.narrow(self.dim, self.start, self.stop - self.start) if whole.dim() else whole

    def within(self, segment: torch.Tensor) -> torch.Tensor:
        """The piece in its rank's segment, a view in the piece's shape."""
        return segment[self.offset : self.offset + self.numel].view(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """`ranks[r]`: rank r's piece of every tensor, maybe without elements; `size`: of a segment, equal on all ranks."""

    ranks: tuple[tuple[Piece, ...], ...]
    size: int

    @classmethod
    def cut(cls, shapes: Sequence[torch.Size], bounds: Sequence[Bounds], degree: int) -> "Pieces":
        """Pieces of tensors of `shapes`, each cut at its `bounds`."""
        ranks, sizes = [], []
        for rank in range(degree):
            pieces, offset = [], 0
            for index, (shape, (dim, edges)) in enumerate(zip(shapes, bounds, strict=True)):
                start, stop = edges[rank], edges[rank + 1]
                local = tuple(stop - start if d == dim else size for d, size in enumerate(shape))
                numel = torch.Size(local).numel() if stop > start else 0
                if not shape and not numel:
                    local = (0,)
                pieces.append(Piece(index=index, dim=dim, start=start, stop=stop, shape=local, offset=offset))
                offset += numel
            ranks.append(tuple(pieces))
            sizes.append(offset)
        return cls(ranks=tuple(ranks), size=max(sizes))

    def scatter(self, segments: Iterable[torch.Tensor], wholes: Sequence[torch.Tensor]) -> None:
        """Write all ranks' segments, each of at least `size`, into the whole tensors."""
        pairs = list(self._pairs(segments, wholes))
        torch._foreach_copy_([to for to, _ in pairs], [part for _, part in pairs])

    def collect(self, segments: Sequence[torch.Tensor] | torch.Tensor, wholes: Sequence[torch.Tensor | None]) -> None:
        """Write the whole tensors into the ranks' segments; zeros where there is none."""
        pairs = list(self._pairs(segments, wholes))
        if pairs:
            torch._foreach_copy_([part for _, part in pairs], [whole for whole, _ in pairs])
        for segment, pieces in zip(segments, self.ranks, strict=True):
            for piece in pieces:
                if wholes[piece.index] is None:
                    piece.within(segment).zero_()

    def _pairs(
        self, segments: Iterable[torch.Tensor], wholes: Sequence[torch.Tensor | None]
    ) -> "list[tuple[torch.Tensor, torch.Tensor]]":
        found = []
        for segment, pieces in zip(segments, self.ranks, strict=True):
            for piece in pieces:
                whole = wholes[piece.index]
                if whole is not None and piece.numel:
                    found.append((piece.of(whole), piece.within(segment)))
        return found


def even_bounds(shape: torch.Size, loads: list[int]) -> Bounds:
    """Cut along dim 0 where it divides, else along the largest dim; parts differ by one slice at most.

    `loads`: elements that each rank has so far; who has least gets the larger parts, and they are added to it. `shape`
    has at least one dim.
    """
    degree = len(loads)
    dim = 0 if shape[0] % degree == 0 else max(range(len(shape)), key=lambda d: (shape[d], -d))
    slices, left = divmod(shape[dim], degree)
    sizes = [slices] * degree
    for rank in sorted(range(degree), key=loads.__getitem__)[:left]:
        sizes[rank] += 1
    for rank, size in enumerate(sizes):
        loads[rank] += size * (shape.numel() // max(shape[dim], 1))
    return dim, tuple(accumulate(sizes, initial=0))

"""Which tokens of a sequence a rank holds, and in what order."""

from dataclasses import dataclass

import torch

from tutti.config.vocabulary import ContextKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """How a sequence lies over `degree` ranks; this one is `index`.

    all-to-all: rank r holds the r-th of C equal chunks. ring: the sequence is cut into 2 C chunks and rank r holds
    chunks r and 2 C - 1 - r ("zig-zag"), so that under a causal mask every rank has the same work: a query of the
    first chunk sees few keys, one of the last sees nearly all.
    """

    kind: ContextKind
    degree: int
    index: int

    @property
    def unit(self) -> int:
        """What a sequence's length must be a multiple of."""
        return 2 * self.degree if self.kind == "ring" else self.degree

    def chunks(self, rank: int | None = None) -> tuple[int, ...]:
        """Numbers of a rank's chunks (this one's by default), in order of position."""
        rank = self.index if rank is None else rank
        return (rank, self.unit - 1 - rank) if self.kind == "ring" else (rank,)

    def take(self, whole: torch.Tensor, dim: int, rank: int | None = None) -> torch.Tensor:
        """A rank's part of a whole tensor along `dim`."""
        size = whole.shape[dim] // self.unit
        pieces = [whole.narrow(dim, chunk * size, size) for chunk in self.chunks(rank)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    def join(self, parts: list[torch.Tensor], dim: int) -> torch.Tensor:
        """The whole tensor from every rank's part, in order of rank."""
        placed: dict[int, torch.Tensor] = {}
        for rank, part in enumerate(parts):
            chunks = self.chunks(rank)
            placed.update(zip(chunks, part.chunk(len(chunks), dim), strict=True))
        return torch.cat([placed[chunk] for chunk in range(self.unit)], dim)

    def positions(self, length: int, device: torch.device | str) -> torch.Tensor:
        """Positions of this rank's tokens in a sequence of `length`; int64, ascending."""
        return self.take(torch.arange(length, device=device), 0)

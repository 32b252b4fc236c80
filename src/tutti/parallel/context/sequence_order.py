"""Which tokens of a sequence a rank holds, and in what order."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from tutti.config.vocabulary import ContextKind
from tutti.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceOrder:
    """How each sequence lies over the ranks.

    all-to-all: rank r of C holds the r-th of C equal chunks.
    ring: the sequence is cut into 2 C chunks, and rank r holds chunks r and 2 C - 1 - r ("zig-zag"). Every rank then
        has the same work under a causal mask: a query of the first chunk sees few keys, one of the last nearly all.

    Attributes:
        kind: "ring" or "all-to-all".
        degree: number of ranks.
        index: this rank's number among them.
    """

    kind: ContextKind
    degree: int
    index: int

    @property
    def unit(self) -> int:
        """The number of tokens of which a sequence's length must be a multiple."""
        return 2 * self.degree if self.kind == "ring" else self.degree

    def chunks(self, rank: int | None = None) -> tuple[int, ...]:
        """Numbers of the chunks of a rank (by default this rank), in order of position."""
        rank = self.index if rank is None else rank
        return (rank, self.unit - 1 - rank) if self.kind == "ring" else (rank,)

    def take(self, whole: torch.Tensor, dim: int, rank: int | None = None) -> torch.Tensor:
        """The part of a whole tensor along `dim` that a rank (by default this rank) holds."""
        size = whole.shape[dim] // self.unit
        pieces = [whole.narrow(dim, chunk * size, size) for chunk in self.chunks(rank)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    def join(self, parts: list[torch.Tensor], dim: int) -> torch.Tensor:
        """The whole tensor along `dim` from the ranks' parts, given in order of rank."""
        placed: dict[int, torch.Tensor] = {}
        for rank, part in enumerate(parts):
            chunks = self.chunks(rank)
            placed.update(zip(chunks, part.chunk(len(chunks), dim), strict=True))
        return torch.cat([placed[chunk] for chunk in range(self.unit)], dim)

    def distance(self, rank: int, part: int) -> int:
        """The least distance between a token of this rank and one of `rank`, if each holds `part` tokens."""
        size = part // len(self.chunks())
        chunks = min(abs(mine - other) for mine in self.chunks() for other in self.chunks(rank))
        return (chunks - 1) * size + 1 if chunks else 0

    def positions(self, length: int, device: torch.device | str) -> torch.Tensor:
        """Positions of this rank's tokens in a sequence of `length` tokens; int64, ascending."""
        return self.take(torch.arange(length, device=device), 0)


def sequence_length(batch: Any, order: SequenceOrder) -> int:
    """The number of tokens of every sequence in `batch`.

    Raises:
        DataError: if the batch has no sequences, or the ranks cannot share their length equally.
    """
    leaves = pytree.tree_leaves(batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim in (2, 3)]
    if not tensors:
        raise DataError(
            f"mesh.context = {order.degree} cuts sequences, but no tensor of the batch has the shape (samples, tokens) "
            "or (samples, tokens, features); collate samples into such tensors, or drop the context axis"
        )
    first = next((tensor for tensor in tensors if not tensor.is_floating_point()), tensors[0])
    length = first.shape[1]
    if length == 0 or length % order.unit:
        padded = max(1, -(-length // order.unit)) * order.unit
        raise DataError(
            f"sequences of {length} tokens (dim 1 of the batch) cannot be cut for mesh.context = {order.degree} "
            f"({order.kind}): the length must be a multiple of {order.unit}; pad sequences to {padded}, "
            "or change the context degree"
        )
    return length


def cut_batch(batch: Any, length: int, order: SequenceOrder) -> Any:
    """This rank's part of every sequence tensor; other leaves are unchanged."""

    def cut(leaf: Any) -> Any:
        return order.take(leaf, 1).contiguous() if _is_sequence(leaf, length) else leaf

    return pytree.tree_map(cut, batch)


def shorten(batch: Any, length: int, samples: int, tokens: int) -> Any:
    """The first `samples` samples and `tokens` tokens of a batch of sequences of `length` tokens."""
    leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.ndim]
    size = leaves[0].shape[0]

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.ndim or leaf.shape[0] != size:
            return leaf
        fewer = leaf[:samples]
        return fewer[:, :tokens].contiguous() if _is_sequence(leaf, length) else fewer

    return pytree.tree_map(cut, batch)


def join_parts(value: Any, part_length: int, order: SequenceOrder, group: Any) -> Any:
    """Gather each tensor whose dim 1 has the length of a part into whole sequences. Collective."""

    def join(leaf: Any) -> Any:
        return gather_whole(leaf, 1, order, group) if _is_sequence(leaf, part_length) else leaf

    return pytree.tree_map(join, value)


def gather_whole(part: torch.Tensor, dim: int, order: SequenceOrder, group: Any) -> torch.Tensor:
    """The whole tensor along `dim`, on every rank. Collective; gradients do not flow through it."""
    is_bool = part.dtype == torch.bool  # not every backend can send booleans
    sent = (part.to(torch.uint8) if is_bool else part.detach()).contiguous()
    parts = [torch.empty_like(sent) for _ in range(order.degree)]
    dist.all_gather(parts, sent, group=group)
    whole = order.join(parts, dim)
    return whole.bool() if is_bool else whole


def _is_sequence(leaf: Any, length: int) -> bool:
    """Whether the leaf is a tensor (samples, tokens, ...) with `length` tokens."""
    return isinstance(leaf, torch.Tensor) and leaf.ndim >= 2 and leaf.shape[1] == length

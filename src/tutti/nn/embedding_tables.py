"""Embedding tables that are looked up together, so that one exchange serves all of them on several devices."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tutti.errors import ScriptError

Mode = Literal["sum", "mean", "max"]
Asked = Tensor | tuple[Tensor, Tensor]
"""The lookups in one table: (batch, hots) rows, or (rows, offsets) for bags of different sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bags:
    """Rows to look up in one table.

    Attributes:
        rows: (n,), bag after bag.
        count: number of bags.
        lengths: (count,), rows of each bag; None where all have as many.
        weights: (n,), of each row, or None.
    """

    rows: Tensor
    count: int
    lengths: Tensor | None = None
    weights: Tensor | None = None

    @property
    def offsets(self) -> Tensor:
        """(count,): where each bag begins."""
        if self.lengths is None:
            step = len(self.rows) // max(self.count, 1)
            return torch.arange(self.count, device=self.rows.device) * step
        return self.lengths.cumsum(0) - self.lengths


def bags_of(input: Tensor, offsets: Tensor | None, weights: Tensor | None, *, include_last: bool = False) -> Bags:
    """The arguments of nn.EmbeddingBag as Bags. Raises ValueError where shapes do not agree, as torch does."""
    if weights is not None and weights.shape != input.shape:
        raise ValueError(f"per_sample_weights have shape {tuple(weights.shape)}, input {tuple(input.shape)}")
    flat = None if weights is None else weights.reshape(-1)
    if input.dim() == 2:
        if offsets is not None:
            raise ValueError("if input is 2D, then offsets has to be None")
        return Bags(rows=input.reshape(-1).long(), count=input.shape[0], weights=flat)
    if input.dim() != 1 or offsets is None or offsets.dim() != 1:
        raise ValueError(f"input is {input.dim()}D; give (batch, hots), or 1D with 1D offsets")
    ends = offsets.long() if include_last else torch.cat([offsets.long(), offsets.new_tensor([len(input)]).long()])
    return Bags(rows=input.long(), count=len(ends) - 1, lengths=ends.diff(), weights=flat)


class Lookup(Protocol):
    """How tables are looked up. The result of `start` waits for the vectors: one (bags, width) a table."""

    def start(self, tables: Sequence[nn.EmbeddingBag], bags: Sequence[Bags]) -> Callable[[], list[Tensor]]: ...


class Here:
    """All tables are on this device."""

    def start(self, tables: Sequence[nn.EmbeddingBag], bags: Sequence[Bags]) -> Callable[[], list[Tensor]]:
        found = [pooled(table, bag) for table, bag in zip(tables, bags, strict=True)]
        return lambda: found


def pooled(table: nn.EmbeddingBag, bags: Bags) -> Tensor:
    """(count, width): the bags' vectors from a table on this device."""
    return F.embedding_bag(
        bags.rows,
        table.weight,
        bags.offsets,
        scale_grad_by_freq=table.scale_grad_by_freq,
        mode=table.mode,
        sparse=table.sparse,
        per_sample_weights=bags.weights,
        padding_idx=table.padding_idx,
    )


class EmbeddingTables(nn.Module):
    """Tables of `sizes[i]` rows of one width: rows (batch, tables) or (batch, tables, hots) -> (batch, tables, width).

    Also a list with one entry a table: (batch, hots), or (rows, offsets) for bags of differing sizes. A bag's vectors
    are pooled by `mode`; `weights` (for "sum") have the shape of the rows. Initial values are uniform in
    +-sqrt(1 / rows) (Naumov et al. 2019, DLRM, arXiv 1906.00091). Parameters: `tables.0.weight`, ...: (rows, width).

    On a mesh with a `table` axis the tables are divided over ranks, and one exchange finds all vectors. `start` begins
    it and returns what waits for the result, so that other layers can compute meanwhile:

        vectors = self.tables.start(categories)
        dense = self.bottom(x)
        ... vectors() ...
    """

    def __init__(
        self,
        sizes: Sequence[int],
        width: int,
        *,
        mode: Mode = "sum",
        sparse: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not sizes:
            raise ScriptError("EmbeddingTables got no sizes; give the number of rows of at least one table")
        made: dict[str, Any] = {"mode": mode, "sparse": sparse, "device": device, "dtype": dtype}
        self.width = width
        # No list: its elements would be blocks, which may be recomputed or sharded one by one, as they are called.
        self.tables = nn.ModuleDict({str(i): nn.EmbeddingBag(rows, width, **made) for i, rows in enumerate(sizes)})
        self.lookup: Lookup = Here()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in +-sqrt(1 / rows)."""
        for table in self._bags():
            bound = math.sqrt(1 / table.num_embeddings)
            nn.init.uniform_(table.weight, -bound, bound)

    def forward(self, rows: Tensor | Sequence[Asked], weights: Tensor | Sequence[Tensor] | None = None) -> Tensor:
        return self.start(rows, weights)()

    def start(
        self, rows: Tensor | Sequence[Asked], weights: Tensor | Sequence[Tensor] | None = None
    ) -> Callable[[], Tensor]:
        """Begin looking up; the result, when called, is what forward returns."""
        tables = self._bags()
        asked = list(rows.unbind(1)) if isinstance(rows, Tensor) else list(rows)
        each: Sequence[Tensor | None] = [None] * len(tables)
        if weights is not None:
            each = weights.unbind(1) if isinstance(weights, Tensor) else weights
        if len(asked) != len(tables) or len(each) != len(tables):
            raise ScriptError(
                f"EmbeddingTables has {len(tables)} tables, and was asked for rows of {len(asked)}, with weights for "
                f"{len(each)}; give (batch, tables), (batch, tables, hots), or a list with one entry a table"
            )
        bags = [_bags(one, weight) for one, weight in zip(asked, each, strict=True)]
        wait = self.lookup.start(tables, bags)
        return lambda: torch.stack(wait(), 1)

    def _bags(self) -> list[nn.EmbeddingBag]:
        return [table for table in self.tables.values() if isinstance(table, nn.EmbeddingBag)]


def _bags(asked: Asked, weights: Tensor | None) -> Bags:
    if isinstance(asked, tuple):
        return bags_of(asked[0], asked[1], weights)
    if asked.dim() == 1:
        asked, weights = asked.unsqueeze(1), None if weights is None else weights.unsqueeze(1)
    return bags_of(asked, None, weights)

"""Embedding tables that are looked up together, so that on several devices one exchange serves all of them."""

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
"""The lookups in one table: rows (batch, hots), or (rows, offsets) for bags of different sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bags:
    """Rows to look up in one table. The vectors of a bag are pooled into one.

    Attributes:
        rows: (n,), bag after bag.
        count: number of bags.
        lengths: (count,), rows of each bag; None where all bags have equally many.
        weights: (n,), weight of each row, or None.
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
    """Return the arguments of nn.EmbeddingBag as Bags.

    Args:
        input: (batch, hots) rows, or (n,) rows with `offsets`.
        offsets: (bags,), where each bag begins; with `include_last` also the end of the last one.
        weights: one for each row, in the shape of `input`.
        include_last: as include_last_offset of nn.EmbeddingBag.

    Raises:
        ValueError: shapes do not agree, as in torch.
    """
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
    """How tables are looked up. The result of `start` waits for the vectors: one tensor (bags, width) per table."""

    def start(self, tables: Sequence[nn.EmbeddingBag], bags: Sequence[Bags]) -> Callable[[], list[Tensor]]: ...


class Here:
    """Looks up tables that are all on this device."""

    def start(self, tables: Sequence[nn.EmbeddingBag], bags: Sequence[Bags]) -> Callable[[], list[Tensor]]:
        vectors = [pooled(table, bag) for table, bag in zip(tables, bags, strict=True)]
        return lambda: vectors


def pooled(table: nn.EmbeddingBag, bags: Bags) -> Tensor:
    """Look up the bags' vectors, (count, width), in a table on this device."""
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
    """Embedding tables of one width that are looked up together.

    Maps rows (batch, tables) or (batch, tables, hots) to vectors (batch, tables, width). Rows may also be a list with
    one entry per table: (batch, hots), or (rows, offsets) for bags of different sizes. The vectors of a bag are pooled
    by `mode`. `weights` (for mode "sum") have the shape of the rows.

    On a mesh with a `table` axis, the tables are divided over ranks, and one exchange finds all vectors. `start` begins
    the exchange and returns a function that waits for its result, so that other layers can compute meanwhile:

        vectors = self.tables.start(categories)
        dense = self.bottom(x)
        ... vectors() ...

    The parameters are `tables.0.weight`, ...: (rows, width). Initial values are uniform in +-sqrt(1 / rows) (Naumov et
    al. 2019, DLRM, arXiv 1906.00091).

    Args:
        sizes: number of rows of each table.
        width: length of the vectors.
        mode: how the vectors of a bag are pooled.
        sparse: whether gradients are sparse tensors.
        device, dtype: of the parameters.

    Examples:
        Three tables, looked up for two samples:

        >>> tables = EmbeddingTables([100, 50, 7], width=8)
        >>> tables(torch.tensor([[3, 49, 0], [99, 1, 6]])).shape
        torch.Size([2, 3, 8])
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
        # Not a ModuleList: its elements would count as blocks, which may be recomputed or sharded one by one.
        self.tables = nn.ModuleDict({str(i): nn.EmbeddingBag(rows, width, **made) for i, rows in enumerate(sizes)})
        self.lookup: Lookup = Here()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw parameters uniformly from +-sqrt(1 / rows)."""
        for table in self._bags():
            bound = math.sqrt(1 / table.num_embeddings)
            nn.init.uniform_(table.weight, -bound, bound)

    def forward(self, rows: Tensor | Sequence[Asked], weights: Tensor | Sequence[Tensor] | None = None) -> Tensor:
        return self.start(rows, weights)()

    def start(
        self, rows: Tensor | Sequence[Asked], weights: Tensor | Sequence[Tensor] | None = None
    ) -> Callable[[], Tensor]:
        """Begin looking up vectors.

        Args:
            rows: rows of every table.
            weights: weight of each row, in the shape of `rows`; None for no weights.

        Returns:
            A function that waits for the vectors and returns what `forward` returns.
        """
        tables = self._bags()
        asked = list(rows.unbind(1)) if isinstance(rows, Tensor) else list(rows)
        table_weights: Sequence[Tensor | None] = [None] * len(tables)
        if weights is not None:
            table_weights = weights.unbind(1) if isinstance(weights, Tensor) else weights
        if len(asked) != len(tables) or len(table_weights) != len(tables):
            raise ScriptError(
                f"EmbeddingTables has {len(tables)} tables, but got rows for {len(asked)} and weights for "
                f"{len(table_weights)}; give (batch, tables), (batch, tables, hots), or a list with one entry per table"
            )
        bags = [_bags(lookup, weight) for lookup, weight in zip(asked, table_weights, strict=True)]
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

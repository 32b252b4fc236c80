"""Which keys each query of attention sees: causality, windows, documents packed into one sequence, blocks, padding."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SequenceMask:
    """What a call of attention says about whole sequences. A query sees the keys that all conditions allow.

    Attributes:
        causal: a query sees no later keys.
        window: a query sees keys fewer than `window` positions away; None: any distance.
        documents: (batch, tokens), the document of each token: a query sees its own document. A negative number marks
            padding, which sees nothing and is not seen. None: one document.
        keep: (batch, tokens), False for keys that no query sees; None: all are seen.
        blocks: (n, n), whether each block of queries sees each block of keys; None: it does.
        block_size: tokens of such a block.
    """

    causal: bool = False
    window: int | None = None
    documents: torch.Tensor | None = None
    keep: torch.Tensor | None = None
    blocks: torch.Tensor | None = None
    block_size: int = 1

    @property
    def is_plain(self) -> bool:
        """Whether there is no condition but causality."""
        return self.window is None and self.documents is None and self.keep is None and self.blocks is None

    def visibility(self, length: int, device: torch.device) -> "Visibility":
        """The visibility of a whole sequence of `length` tokens."""
        positions = torch.arange(length, device=device)
        return Visibility(
            causal=self.causal,
            window=None if self.window is None else torch.full((), self.window, device=device),
            rows=positions,
            columns=positions,
            row_documents=self.documents,
            column_documents=self.documents,
            keep=self.keep,
            blocks=self.blocks,
            block_size=self.block_size,
            reach=self.window,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Visibility:
    """A sequence mask for some rows (queries) and columns (keys) of the sequence.

    Attributes:
        causal: see `SequenceMask`.
        window: see `SequenceMask`; a scalar tensor, because compiled kernels take no changing numbers.
        rows: (rows,), positions of the queries.
        columns: (columns,), positions of the keys.
        row_documents: (batch, rows), documents of the queries.
        column_documents: (batch, columns), documents of the keys.
        keep: (batch, columns), see `SequenceMask`.
        blocks: see `SequenceMask`.
        block_size: see `SequenceMask`.
        reach: the window as a number, for decisions of the host.
    """

    causal: bool
    window: torch.Tensor | None
    rows: torch.Tensor
    columns: torch.Tensor
    row_documents: torch.Tensor | None = None
    column_documents: torch.Tensor | None = None
    keep: torch.Tensor | None = None
    blocks: torch.Tensor | None = None
    block_size: int = 1
    reach: int | None = None

    def take_rows(self, take: Callable[[torch.Tensor], torch.Tensor]) -> "Visibility":
        """Only some of the rows: `take` takes them along the last dim of a tensor."""
        documents = None if self.row_documents is None else take(self.row_documents)
        return replace(self, rows=take(self.rows), row_documents=documents)

    def take_columns(self, take: Callable[[torch.Tensor], torch.Tensor]) -> "Visibility":
        """Only some of the columns, likewise."""
        documents = None if self.column_documents is None else take(self.column_documents)
        keep = None if self.keep is None else take(self.keep)
        return replace(self, columns=take(self.columns), column_documents=documents, keep=keep)

    def part(self, rows: slice, columns: slice) -> "Visibility":
        """Only some rows and columns."""
        return self.take_rows(lambda x: x[..., rows]).take_columns(lambda x: x[..., columns])

    def allowed(self) -> torch.Tensor:
        """(batch or 1, rows, columns), True where a query sees a key."""
        row, column = self.rows[:, None], self.columns[None, :]
        seen = (column <= row) if self.causal else torch.ones_like(column <= row)
        if self.window is not None:
            seen = seen & ((row - column).abs() < self.window)
        if self.blocks is not None:
            seen = seen & self.blocks[row // self.block_size, column // self.block_size]
        seen = seen[None]
        if self.row_documents is not None and self.column_documents is not None:
            ids = self.column_documents[:, None, :]
            seen = seen & (self.row_documents[:, :, None] == ids) & (ids >= 0)
        if self.keep is not None:
            seen = seen & self.keep[:, None, :]
        return seen

    def is_out_of_reach(self) -> bool:
        """Whether positions alone say that no row sees a column. Only on the CPU; elsewhere asking would wait."""
        if self.rows.device.type != "cpu" or not self.rows.numel() or not self.columns.numel():
            return False
        ahead = int(self.columns.min()) - int(self.rows.max())
        behind = int(self.rows.min()) - int(self.columns.max())
        if self.causal and ahead > 0:
            return True
        return self.reach is not None and max(ahead, behind) >= self.reach


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceParts:
    """Attention while this rank holds parts of sequences.

    Attributes:
        attend: (query, key, value, mask, scale) -> the output for this rank's queries. Collective.
        part: number of tokens of a sequence that this rank holds.
        length: number of tokens of a whole sequence.
    """

    attend: Callable[[Any, Any, Any, SequenceMask, float | None], torch.Tensor]
    part: int
    length: int


_parts: SequenceParts | None = None


def sequence_parts() -> SequenceParts | None:
    """How attention is computed over parts of sequences; None while sequences are whole."""
    return _parts


@contextmanager
def over_parts(parts: SequenceParts) -> Iterator[None]:
    """While open, this rank holds parts of sequences."""
    global _parts
    before, _parts = _parts, parts
    try:
        yield
    finally:
        _parts = before


def whole_length(tokens: int) -> int:
    """The length of the whole sequence of which this rank holds `tokens` tokens."""
    return _parts.length if _parts is not None and tokens == _parts.part else tokens

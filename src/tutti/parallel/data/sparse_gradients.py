"""Sparse gradients of embedding tables, summed over ranks as dense tensors of their rows.

NCCL cannot reduce sparse tensors, and Gloo only those on the CPU. So each rank gathers the rows of all ranks: first how
many each has, then their indices and values, padded to the most that any rank has. All tables that a group of ranks
reduces go in one exchange. The host waits for the device once for its own numbers of rows, and once for the others'.
"""

from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tutti.comm.point_to_point import all_gather, ring_all_reduce_nbytes
from tutti.parallel.data.buckets import ReductionGroup

_NO_GRADIENT, _DENSE = -1, -2
"""What a rank announces instead of a number of rows. One that used a table also as a matrix has a dense gradient."""


def sparse_tables(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters whose gradients are sparse: embeddings made with sparse=True."""
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    return {cast(nn.Parameter, module.weight) for module in embeddings if module.sparse}


class SparseReduction:
    """Sums the gradients of some tables over a group of ranks.

    A gradient stays None if no rank has one. It becomes dense on all ranks if it is dense on some.

    Args:
        tables: the tables, in one order on all ranks.
        group: the ranks.

    Attributes:
        sent_nbytes: bytes that this rank sent in the last step; before the first, those of whole tables.
    """

    def __init__(self, tables: Sequence[nn.Parameter], group: ReductionGroup) -> None:
        self.tables, self.group = tables, group
        self.sent_nbytes = sum(ring_all_reduce_nbytes(table, group.size) for table in tables)

    def run(self) -> None:
        """Replace the tables' gradients by their sums. Collective."""
        self.sent_nbytes = 0
        gradients = [_coalesced(table.grad) for table in self.tables]
        counts = self._gather_counts([_announced(gradient) for gradient in gradients])
        sparse: list[int] = []
        for index, row in enumerate(zip(*counts, strict=True)):
            if _DENSE in row:
                self._sum_dense(self.tables[index], gradients[index])
            elif max(row) > 0:
                sparse.append(index)
            elif max(row) == 0:  # some rank has a gradient, but of no rows
                self.tables[index].grad = _from_rows(self.tables[index], *_rows_of(self.tables[index], None))
        for dtype in dict.fromkeys(self.tables[index].dtype for index in sparse):
            chosen = [index for index in sparse if self.tables[index].dtype == dtype]
            own = [gradients[index] for index in chosen]
            self._sum_rows([self.tables[i] for i in chosen], own, [[max(0, row[i]) for i in chosen] for row in counts])

    def _gather_counts(self, own: list[int]) -> list[list[int]]:
        """Return what each rank announces for each table."""
        mine = torch.tensor(own, device=self.tables[0].device)
        return cast(list[list[int]], self._gather(mine).tolist())

    def _sum_dense(self, table: nn.Parameter, gradient: Tensor | None) -> None:
        dense = torch.zeros_like(table) if gradient is None else gradient.to_dense().contiguous()
        nbytes = ring_all_reduce_nbytes(dense, self.group.size)
        self.sent_nbytes += nbytes
        with self.group.channel.waiting(nbytes):
            dist.all_reduce(dense, group=self.group.handle)
        table.grad = dense

    def _sum_rows(
        self, tables: Sequence[nn.Parameter], gradients: Sequence[Tensor | None], counts: Sequence[Sequence[int]]
    ) -> None:
        """Sum the sparse gradients of tables of one dtype.

        Args:
            tables: the tables.
            gradients: this rank's gradients of them.
            counts: for each rank, the number of rows that it has of each table.
        """
        rows = [_rows_of(table, gradient) for table, gradient in zip(tables, gradients, strict=True)]
        widths = [table[0].numel() for table in tables]
        narrow = all(len(table) < 2**31 for table in tables)
        indices = self._gather_padded(
            torch.cat([index.to(torch.int32) if narrow else index for index, _ in rows]),
            [sum(row) for row in counts],
        )
        values = self._gather_padded(
            torch.cat([value.reshape(-1) for _, value in rows]),
            [sum(n * width for n, width in zip(row, widths, strict=True)) for row in counts],
        )
        index_parts = [torch.split(part, list(row)) for part, row in zip(indices, counts, strict=True)]
        value_parts = [
            torch.split(part, [n * width for n, width in zip(row, widths, strict=True)])
            for part, row in zip(values, counts, strict=True)
        ]
        for number, table in enumerate(tables):
            table.grad = _from_rows(
                table,
                torch.cat([parts[number] for parts in index_parts]).to(torch.int64),
                torch.cat([parts[number] for parts in value_parts]).view(-1, *table.shape[1:]),
            )

    def _gather_padded(self, flat: Tensor, numels: Sequence[int]) -> list[Tensor]:
        """Return every rank's flat tensor; `numels` are their sizes."""
        padded = torch.nn.functional.pad(flat, (0, max(numels) - len(flat)))
        return [row[:numel] for row, numel in zip(self._gather(padded).unbind(), numels, strict=True)]

    def _gather(self, mine: Tensor) -> Tensor:
        """Return every rank's tensor, stacked."""
        everyone = mine.new_empty(self.group.size * len(mine))
        nbytes = (self.group.size - 1) * mine.numel() * mine.element_size()
        self.sent_nbytes += nbytes
        with self.group.channel.waiting(nbytes):
            all_gather(everyone, mine, self.group.handle).wait()
        return everyone.view(self.group.size, -1)


def _coalesced(gradient: Tensor | None) -> Tensor | None:
    return gradient.coalesce() if gradient is not None and gradient.is_sparse else gradient


def _announced(gradient: Tensor | None) -> int:
    if gradient is None:
        return _NO_GRADIENT
    return gradient._nnz() if gradient.is_sparse else _DENSE


def _rows_of(table: Tensor, gradient: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the indices and values of a coalesced gradient; of no rows if there is none."""
    if gradient is None:
        return torch.empty(0, dtype=torch.int64, device=table.device), table.new_empty((0, *table.shape[1:]))
    return gradient.indices()[0], gradient.values()


def _from_rows(table: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    """Return the sparse gradient with these rows, laid out as embeddings lay theirs out; equal indices are summed."""
    return torch.sparse_coo_tensor(indices[None], values.detach(), table.shape, check_invariants=False).coalesce()

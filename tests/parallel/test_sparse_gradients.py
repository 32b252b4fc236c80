"""Sums of sparse gradients over ranks that are threads: collectives see dense tensors only, as every back end needs."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tutti.parallel.data import sparse_gradients
from tutti.parallel.data.buckets import ReductionGroup
from tutti.parallel.data.sparse_gradients import SparseReduction

RANKS = 3


@dataclass
class Threads:
    """Ranks as threads; a collective waits for all of them."""

    rank: threading.local = field(default_factory=threading.local)
    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(RANKS, timeout=10))
    given: list[Any] = field(default_factory=lambda: [None] * RANKS)
    gathers: int = 0

    def exchange(self, mine: Tensor) -> list[Tensor]:
        assert not mine.is_sparse
        self.given[self.rank.number] = mine
        self.barrier.wait()
        everyone = [tensor.clone() for tensor in self.given]
        self.barrier.wait()
        return everyone

    def all_gather(self, everyone: Tensor, mine: Tensor, group: Any) -> "Threads":
        assert mine.numel(), "some back ends refuse empty tensors"
        self.gathers += self.rank.number == 0
        everyone.copy_(torch.cat(self.exchange(mine)))
        return self

    def all_reduce(self, tensor: Tensor, group: Any) -> None:
        tensor.copy_(torch.stack(self.exchange(tensor)).sum(0))

    def wait(self) -> None:
        pass


def reduced(monkeypatch: pytest.MonkeyPatch, gradients: list[list[Tensor | None]]) -> tuple[list[list[Any]], int]:
    """The gradients of each rank after the sum, and the number of gathers. `gradients` are by rank and table."""
    threads = Threads()
    monkeypatch.setattr(sparse_gradients, "all_gather", threads.all_gather)
    monkeypatch.setattr(dist, "all_reduce", threads.all_reduce)
    like = [
        next((row[i] for row in gradients if row[i] is not None), torch.zeros(4, 2)) for i in range(len(gradients[0]))
    ]

    def on_rank(number: int) -> list[Any]:
        threads.rank.number = number
        tables = [nn.Parameter(torch.zeros(each.shape, dtype=each.dtype)) for each in like]
        for table, gradient in zip(tables, gradients[number], strict=True):
            table.grad = gradient
        try:
            SparseReduction(tables, ReductionGroup("ranks", RANKS)).run()
        except BaseException:
            threads.barrier.abort()
            raise
        return [table.grad for table in tables]

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(on_rank, range(RANKS))), threads.gathers


def rows(indices: list[int], shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    """A gradient as an embedding makes it: an index may come several times, and values are random."""
    values = torch.randn((len(indices), *shape[1:]), dtype=dtype)
    return torch.sparse_coo_tensor(torch.tensor([indices], dtype=torch.int64), values, shape, check_invariants=False)


def test_the_sum_is_that_of_dense_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    small, wide, low = (5, 2), (9, 3, 2), torch.float32
    gradients: list[list[Tensor | None]] = [
        [
            rows([0, 3, 3], small),
            rows([8], wide),
            rows([1, 1], small, low),
            None,
            rows([], small),
            torch.randn(5, 2).double(),
        ],
        [rows([3], small), None, rows([0, 1, 2, 3], small, low), None, None, rows([4, 4], small)],
        [None, rows([2, 0, 8, 8, 1], wide), None, None, None, None],
    ]
    sums = [sum(each.to_dense() for each in column if each is not None) for column in zip(*gradients, strict=True)]
    by_rank, gathers = reduced(monkeypatch, gradients)
    assert gathers == 1 + 2 * 2, "counts, then indices and values of each dtype, for all tables together"
    for number in range(6):
        found, expected = [gradient[number] for gradient in by_rank], sums[number]
        if not isinstance(expected, Tensor):
            assert found == [None] * RANKS
            continue
        for gradient in found:
            assert gradient.is_sparse == (number != 5)
            torch.testing.assert_close(gradient.to_dense(), expected, rtol=1e-6 if number == 2 else 1e-14, atol=1e-14)
            assert torch.equal(gradient.to_dense(), found[0].to_dense()), "bit for bit alike on all ranks"
            if gradient.is_sparse:
                assert gradient.is_coalesced()


def test_what_is_sent_is_the_rows_not_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    threads = Threads()
    sent = []
    monkeypatch.setattr(dist, "all_reduce", threads.all_reduce)
    monkeypatch.setattr(sparse_gradients, "all_gather", threads.all_gather)

    def on_rank(number: int) -> None:
        threads.rank.number = number
        table = nn.Parameter(torch.zeros(1000, 4, dtype=torch.float64))
        table.grad = rows([7] * 50 + [number], (1000, 4))
        reduction = SparseReduction([table], ReductionGroup("ranks", RANKS))
        reduction.run()
        sent.append(reduction.sent_nbytes)

    with ThreadPoolExecutor(RANKS) as pool:
        list(pool.map(on_rank, range(RANKS)))
    count, index, row = 8, 4, 4 * 8
    assert sent == [(RANKS - 1) * (count + 2 * (index + row))] * RANKS

"""Tables with sparse gradients, where ranks use different rows, none, or the whole table as a matrix.

The kinds are those of pytorch/pytorch#87497 (a batch of padding) and pytorch/pytorch#80496 (unused on one rank).
"""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from harness import run_ranks
from parallel.habits import STEPS, Habit, assert_as_plain, on_rank
from tutti.config.plan import ShardingPlan

WORDS = 13


class Tables(nn.Module):
    """One table with padding, one that only batches with word 7 use, one that nobody uses, a bag, and a tied one."""

    def __init__(self) -> None:
        super().__init__()
        self.padded = nn.Embedding(WORDS, 4, padding_idx=0, sparse=True)
        self.rare = nn.Embedding(WORDS, 4, sparse=True)
        self.unused = nn.Embedding(WORDS, 4, sparse=True)
        self.bag = nn.EmbeddingBag(WORDS, 4, mode="sum", sparse=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.padded(x).mean(1) + self.bag(x)
        rows = (x == 7).any(1).nonzero()[:, 0]
        return self.head(z.index_add(0, rows, self.rare(x[rows]).mean(1)) if len(rows) else z)


class Tied(nn.Module):
    """Its table is used as a matrix too, but only for samples that begin with a low word."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 3, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z, low = self.table(x).mean(1), x[:, 0] < 6
        return torch.where(low[:, None], z @ self.table.weight.T @ self.table.weight, z) if low.any() else z


def words() -> TensorDataset:
    """Batches of 6; whole shares of some are padding, and word 7 is in single samples."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randint(1, WORDS, (6 * STEPS, 4), generator=generator)
    x[x == 7] = 6
    x[2:4], x[9:12] = 0, 0
    x[4, 0], x[13, 2], x[29, 3] = 7, 7, 7
    return TensorDataset(x, torch.randint(3, (6 * STEPS,), generator=generator))


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def tables() -> Habit:
    return Habit(model=Tables, function=loss, data=words)


def clipped() -> Habit:
    return Habit(model=Tables, function=loss, data=words, clip_norm=0.1)


def adagrad() -> Habit:
    return Habit(model=Tables, function=loss, data=words, optimizer=torch.optim.Adagrad)


def tied() -> Habit:
    return Habit(model=Tied, function=loss, data=words)


class OnlyTables(nn.Module):
    """Every parameter is sparse, as SparseAdam needs; the last table is for word 7."""

    def __init__(self) -> None:
        super().__init__()
        self.common = nn.Embedding(WORDS, 3, padding_idx=0, sparse=True)
        self.rare = nn.EmbeddingBag(WORDS, 3, mode="sum", sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z, rows = self.common(x).mean(1), (x == 7).any(1).nonzero()[:, 0]
        return z.index_add(0, rows, self.rare(x[rows])) if len(rows) else z


def sparse_adam() -> Habit:
    return Habit(model=OnlyTables, function=loss, data=words, optimizer=torch.optim.SparseAdam)


class Gathered(nn.Module):
    """A parameter of no embedding, whose gradient is sparse because of how it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WORDS, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x[:, :1].expand(-1, 3)
        return torch.gather(self.weight, 0, rows, sparse_grad=True)


def gathered() -> Habit:
    return Habit(model=Gathered, function=loss, data=words)


HABITS = [tables, clipped, adagrad, tied, sparse_adam, gathered]


@pytest.mark.parametrize(
    ("plan", "ranks"),
    [
        ({"mesh": {"replicate": 1}}, 1),
        ({"mesh": {"replicate": 2}, "batch": {"num_microbatches": 2}}, 2),
        ({"mesh": {"replicate": 3}}, 3),
        ({"mesh": {"shard": 3}, "sharding": ShardingPlan(level=1)}, 3),
    ],
    ids=["one", "two", "three", "level 1"],
)
def test_as_on_one_device(plan: dict[str, Any], ranks: int) -> None:
    assert_as_plain(HABITS, ranks, **plan)


@pytest.mark.parametrize("level", [2, 3])
def test_levels_that_divide_tables_refuse_them_by_name(level: int) -> None:
    plan = {"mesh": {"shard": 2}, "sharding": ShardingPlan(level=level)}
    for (message,) in run_ranks(on_rank, 2, [tables], plan, "on"):
        assert "'padded.weight' has sparse gradients, which sharding levels 2 and 3 do not divide" in message

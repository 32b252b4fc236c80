"""Embedding tables divided over ranks, against one device: DLRM with tables together and apart, sparse and dense."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from against_one import Subject, assert_same_as_one
from tutti.errors import PlanError
from tutti.nn.tables import EmbeddingTables
from tutti.runtime.table.place import Table, place_tables
from tutti.spec.plan import LayoutRule

SIZES = (50, 7, 23, 3, 11)


class Together(nn.Module):
    """A small DLRM: tables looked up with one exchange, while the dense features pass their MLP."""

    def __init__(self, sparse: bool, mode: Any) -> None:
        super().__init__()
        self.tables = EmbeddingTables(SIZES, 4, mode=mode, sparse=sparse)
        self.bottom = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(4 + 15, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, dense: torch.Tensor, categories: torch.Tensor) -> torch.Tensor:
        vectors = self.tables.start(categories)
        x = self.bottom(dense)
        every = torch.cat([x.unsqueeze(1), vectors()], 1)
        low, high = torch.tril_indices(6, 6, -1)
        return self.top(torch.cat([x, (every @ every.transpose(1, 2))[:, low, high]], 1)).squeeze(1)


class Apart(nn.Module):
    """Loose tables: bags with offsets, learned weights, padding, means and maxima; single embeddings."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.summed = nn.EmbeddingBag(50, 4, mode="sum", padding_idx=2, sparse=sparse)
        self.mean = nn.EmbeddingBag(7, 4, mode="mean", padding_idx=6, sparse=sparse)
        self.largest = nn.EmbeddingBag(23, 4, mode="max")
        self.single = nn.Embedding(11, 4, padding_idx=3, sparse=sparse)
        self.top = nn.Linear(20, 1)

    def forward(self, dense: torch.Tensor, categories: torch.Tensor) -> torch.Tensor:
        ragged = categories[:, 0][categories[:, 0] % 3 > 0]  # bags of 0 to 3 rows
        lengths = (categories[:, 0] % 3 > 0).sum(1)
        weights = torch.sigmoid(dense.sum(1)).repeat_interleave(lengths) * self.scale.sum()
        found = [
            self.summed(ragged, lengths.cumsum(0) - lengths, per_sample_weights=weights),
            self.mean(categories[:, 1]),
            self.largest(categories[:, 2].flatten(), torch.arange(len(dense)) * 3),
            *self.single(categories[:, 4, :2]).unbind(1),
        ]
        return self.top(torch.cat(found, 1)).squeeze(1)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    dense = torch.randn(25, 3, generator=generator, dtype=torch.float64)
    rows = [torch.randint(0, rows, (25, 3), generator=generator) for rows in SIZES]
    return TensorDataset(dense, torch.stack(rows, 1), (torch.rand(25, generator=generator) > 0.5).double())


def subject(model: Callable[[], nn.Module], **fields: Any) -> Subject:
    return Subject(model=model, data=data(), loss_fn=F.binary_cross_entropy_with_logits, **{"batch": 7, **fields})


def together() -> Subject:
    return subject(lambda: Together(False, "sum"), job={"clip_norm": 0.5})


def together_mean() -> Subject:
    return subject(lambda: Together(False, "mean"))


def together_sparse() -> Subject:
    return subject(lambda: Together(True, "sum"), optimizer=torch.optim.SGD, rate=0.5, job={"clip_norm": 0.5})


def together_adagrad() -> Subject:
    return subject(lambda: Together(True, "sum"), optimizer=torch.optim.Adagrad, rate=0.1)


def apart() -> Subject:
    return subject(lambda: Apart(False))


def apart_sparse() -> Subject:
    return subject(lambda: Apart(True), optimizer=torch.optim.SGD, rate=0.5)


def look(run: Any) -> dict[str, Any]:
    """Which parts of which tables this rank holds."""
    held = dict(run.model.named_parameters())
    names = [
        name for name in run.layout.names if "tables" in name or name.split(".")[0] in ("summed", "mean", "single")
    ]
    return {name: tuple(held[name].shape)[0] if name in held else 0 for name in names}


ROWS = {"layout": (LayoutRule(modules="*tables.*", placement="split"), LayoutRule(modules="[sml]*", placement="row"))}
SMALL_WHOLE = {"layout": (LayoutRule(modules="*tables.3", placement="replicate"),)}


@pytest.mark.parametrize(
    ("mesh", "make", "options"),
    [
        ({"table": 2}, together, {}),
        ({"table": 3}, together_mean, {}),
        ({"table": 3}, together_mean, ROWS),
        ({"table": 2}, together_sparse, ROWS),
        ({"table": 4}, together_sparse, SMALL_WHOLE),
        ({"table": 2, "replicate": 2}, together_adagrad, {}),
        ({"replicate": 2, "table": 2}, together, {}),
        ({"table": 2}, apart, {}),
        ({"table": 3}, apart_sparse, ROWS),
        ({"table": 2, "replicate": 2}, apart, ROWS),
    ],
    ids=str,
)
def test_ranks_look_up_and_learn_as_one_device(mesh: Any, make: Any, options: dict[str, Any]) -> None:
    many = assert_same_as_one(make, mesh=mesh, batch={"num_microbatches": 2}, steps=4, look=look, **options)
    facts = [trained.facts for trained in many]
    copies = mesh.get("replicate", 1)
    for name in facts[0]:
        parts = [fact[name] for fact in facts]
        whole = max(parts) if min(parts) == max(parts) and len(set(parts)) == 1 else sum(parts) // copies
        assert whole > 0
        if options is ROWS:
            assert max(parts) < sum(parts)

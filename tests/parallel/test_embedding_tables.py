"""Embedding tables divided over ranks, against one device: DLRM with tables together and apart, sparse and dense."""

import functools
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from against_one import Subject, Trained, assert_agree
from harness import run_ranks
from trainer.several import Case, on_ranks, once, refusals
from tutti.config.plan import LayoutRule
from tutti.nn.embedding_tables import Bags, EmbeddingTables
from tutti.parallel.embedding.table_lookup import PlaceableTable, TablePlacement, place_tables, request

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


TABLES = (
    {f"tables.tables.{i}.weight": rows for i, rows in enumerate(SIZES)},
    {"summed.weight": 50, "mean.weight": 7, "largest.weight": 23, "single.weight": 11},
)
"""Rows of each table of the two models, by name."""


def look(run: Any) -> dict[str, Any]:
    """How many rows of each table this rank holds."""
    held = dict(run.parallel.model.named_parameters())
    return {name: len(held[name]) if name in held else 0 for name in (*TABLES[0], *TABLES[1])}


ROWS = {"layout": (LayoutRule(modules="*tables.*", placement="split"), LayoutRule(modules="[sml]*", placement="row"))}
ONE_WHOLE = {"layout": (LayoutRule(modules="*tables.3", placement="replicate"),)}
CASES: dict[int, dict[str, Case]] = {
    2: {
        "together": (together, {"mesh": {"table": 2}}),
        "together, sparse, by rows": (together_sparse, {"mesh": {"table": 2}, **ROWS}),
        "apart": (apart, {"mesh": {"table": 2}}),
        "apart, sparse": (apart_sparse, {"mesh": {"table": 2}, "shares": (1.0, 3.0)}),
    },
    3: {
        "together, mean": (together_mean, {"mesh": {"table": 3}}),
        "together, mean, by rows": (together_mean, {"mesh": {"table": 3}, **ROWS}),
        "apart, sparse, by rows": (apart_sparse, {"mesh": {"table": 3}, **ROWS}),
        "a rank without a share": (together, {"mesh": {"table": 3}, "shares": (1.0, 0.0, 1.0)}),
    },
    4: {
        "together, sparse, one table whole": (together_sparse, {"mesh": {"table": 4}, **ONE_WHOLE}),
        "together, adagrad, x replicate": (together_adagrad, {"mesh": {"table": 2, "replicate": 2}}),
        "replicate x together": (together, {"mesh": {"replicate": 2, "table": 2}}),
        "apart, by rows, x replicate": (apart, {"mesh": {"table": 2, "replicate": 2}, **ROWS}),
    },
}


@functools.cache
def results(ranks: int) -> list[dict[str, Trained]]:
    plans = {name: (make, {**plan, "batch": {"num_microbatches": 2}}) for name, (make, plan) in CASES[ranks].items()}
    return on_ranks(plans, ranks, look=look)


@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks, cases in CASES.items() for name in cases])
def test_ranks_look_up_and_learn_as_one_device(ranks: int, name: str) -> None:
    make, plan = CASES[ranks][name]
    many = [result[name] for result in results(ranks)]
    assert_agree(once(make), many)
    facts = [trained.facts for trained in many]
    for table, rows in TABLES["apart" in name].items():
        parts = [fact[table] for fact in facts]
        if "one table whole" in name and table == "tables.tables.3.weight":
            assert parts == [rows] * ranks
            continue
        assert sum(parts) == rows * plan["mesh"].get("replicate", 1)
        if "by rows" in name and table != "largest.weight":
            assert max(parts) - min(parts) <= 1


def test_fewer_bytes_travel_when_rows_asked_twice_are_asked_once() -> None:
    """A cut table is asked for distinct rows: 3 rows a sample of a table of 3 rows are 3 rows a rank and no more."""
    generator = torch.Generator().manual_seed(0)
    bags = Bags(rows=torch.randint(0, 3, (300,), generator=generator), count=100)
    table = nn.EmbeddingBag(3, 4)
    asked = request(table, TablePlacement(bounds=(0, 1, 3)), bags, 2)
    assert [len(rows) for rows in asked.asked] == [1, 2]
    whole = request(table, TablePlacement(bounds=(0, 0, 3), owner=1), bags, 2)
    assert [len(rows) for rows in whole.asked] == [0, 300]
    assert [whole.answers(rank) for rank in range(2)] == [0, 100]


@pytest.mark.parametrize(
    "place", [TablePlacement(bounds=(0, 2, 3)), TablePlacement(bounds=(0, 3, 3), owner=0)], ids=str
)
@pytest.mark.parametrize("wrong", [3, -1])
def test_rows_that_a_table_does_not_have_are_named(place: TablePlacement, wrong: int) -> None:
    with pytest.raises(IndexError, match="rows 0 to 2"):
        request(nn.EmbeddingBag(3, 4), place, Bags(rows=torch.tensor([0, wrong]), count=2), 2)


@given(
    sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=12),
    ranks=st.integers(2, 6),
    by_rows=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_every_row_of_every_table_has_one_place_and_loads_are_balanced(
    sizes: list[int], ranks: int, by_rows: bool
) -> None:
    tables = [
        PlaceableTable(name=str(i), rows=rows, nbytes=rows * 8, by_rows=by_rows and i == 0 and rows >= ranks)
        for i, rows in enumerate(sizes)
    ]
    places = place_tables(tables, ranks)
    held = [0] * ranks
    for table in tables:
        place = places[table.name]
        assert place.bounds[0] == 0
        assert place.bounds[-1] == table.rows
        parts = [stop - start for start, stop in pairwise(place.bounds)]
        assert min(parts) >= 0
        if place.owner is None:
            assert max(parts) - min(parts) <= 1
        else:
            assert parts[place.owner] == table.rows
        assert not table.by_rows or place.owner is None
        held = [nbytes + part * 8 for nbytes, part in zip(held, parts, strict=True)]
    small = sum(table.nbytes for table in tables if table.rows < ranks)
    assert max(held) <= 1.2 * sum(held) / ranks + 8 * len(sizes) + small or all(
        places[table.name].owner is None or table.rows < ranks for table in tables
    )


def test_as_few_tables_as_balance_needs_are_cut() -> None:
    """Sizes of the Criteo tables that MLPerf uses: on 8 ranks the four of 40 million rows are cut, or fewer."""
    rows = [40_000_000] * 4 + [40_790_948, 3_067_956, 590_152, 405_282, 39_060, 20_265, 17_295, 12_973, 976, 155, 3]
    tables = [PlaceableTable(name=str(i), rows=count, nbytes=count * 512) for i, count in enumerate(rows)]
    for ranks, most in ((2, 1), (4, 2), (8, 5)):
        places = place_tables(tables, ranks)
        cut = [name for name, place in places.items() if place.owner is None]
        assert len(cut) <= most, ranks
    equal = [PlaceableTable(name=str(i), rows=100, nbytes=800) for i in range(8)]
    owners = [place.owner for place in place_tables(equal, 4).values()]
    assert sorted(owners) == [0, 0, 1, 1, 2, 2, 3, 3]


def no_table() -> Subject:
    return Subject(model=lambda: nn.Linear(3, 1), data=data(), loss_fn=F.mse_loss, batch=7)


def bounded() -> Subject:
    return subject(lambda: nn.Sequential(nn.EmbeddingBag(9, 3, max_norm=1.0)))


def tied() -> Subject:
    def model() -> nn.Module:
        built = Together(False, "sum")
        built.tables.tables["1"].weight = built.tables.tables["0"].weight
        return built

    return subject(model)


def test_what_cannot_work_is_refused_on_all_ranks_with_the_remedy() -> None:
    column = {"layout": (LayoutRule(modules="*tables.0", placement="column"),)}
    mesh = {"mesh": {"table": 4}}
    cases: dict[str, Case] = {
        "tutti.nn.EmbeddingTables": (no_table, mesh),
        "max_norm": (bounded, mesh),
        "along rows": (together, {**mesh, **column}),
        "are one tensor": (tied, {**mesh, **ROWS}),
        "fewer than mesh.table": (together, {**mesh, **ROWS}),
    }
    for said in run_ranks(refusals, 4, list(cases.values())):
        for words, sentence in zip(cases, said, strict=True):
            assert sentence.startswith("PlanError: "), sentence
            assert words in sentence

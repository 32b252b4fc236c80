"""Steps that ways take beside exact sums: what is trained, and what follows from it."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tutti.planner.relaxed_strategies import RELAXED_STRATEGIES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def allowances(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), str(ROOT / "examples"), *sys.path])
    return importlib.import_module("allowances")


def test_a_way_is_judged_beside_exact_sums_and_not_where_a_seed_was_given_up(allowances: ModuleType) -> None:
    found = allowances.summary(
        {
            "mlp-4": {allowances.EXACT: [20, 30], "a": [40, 45], "b": [25, None]},
            "gpt-4": {allowances.EXACT: [10, 10], "a": [5, 5], "b": [10, 10]},
            "gpt-2": {allowances.EXACT: [10, 10], "a": [30, 10]},
        }
    )
    assert found["a"] == {
        "mlp-4": 1.7, "gpt-4": 0.5, "gpt-2": 2.0,
        "mean of 4": pytest.approx(0.85**0.5), "largest of 4": 1.7,
        "mean of 2": pytest.approx(2.0), "largest of 2": 2.0,
    }  # fmt: skip
    assert found["b"] == {"mlp-4": None, "gpt-4": 1.0, "mean of 4": None, "largest of 4": None}
    header, rows = allowances.rows({"summary": found})
    assert {len(row) for row in rows} == {len(header)}
    assert rows[1][1] == rows[1][3] == "given up"


def test_what_is_trained_is_what_a_launcher_would_set(allowances: ModuleType) -> None:
    """All ways that stand on readings, and none that is worked out from a variance."""
    read = allowances.read(allowances.Sizes())
    assert {strategy.words for strategy in read} == {
        strategy.words for strategy in RELAXED_STRATEGIES if strategy.variance is None
    }
    by_words = {strategy.words: dict(allowances.words_of(strategy)) for strategy in read}
    assert by_words["powersgd,rank=1"] == {"TUTTI_COMPRESS": "powersgd,rank=1"}
    assert by_words["local:period=8,delay=8 in qsgd,bits=4"] == {
        "TUTTI_COMPRESS": "qsgd,bits=4",
        "TUTTI_SYNC": "local:period=8,delay=8",
    }
    assert [strategy.words for strategy in allowances.read(allowances.QUICK)] == ["local:period=8"]

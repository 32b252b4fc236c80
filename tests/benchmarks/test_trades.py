"""What methods trade: what is compared, and what follows from trainings."""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def trades(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), str(ROOT / "examples"), *sys.path])
    return importlib.import_module("trades")


def run(steps: int | None, sent: int, step_s: float) -> dict[str, Any]:
    return {
        "steps": steps, "sent_nbytes": sent, "sent_to_target_nbytes": sent // 2 if steps else None, "step_s": step_s,
        "best_loss": 0.1, "last_loss": 0.2,
    }  # fmt: skip


def test_a_way_is_judged_beside_the_plain_one_and_only_where_every_seed_reached_the_target(trades: ModuleType) -> None:
    found = trades.summary(
        {
            "plain": [run(100, 800, 1.0), run(120, 800, 1.0), run(140, 800, 1.0)],
            "short": [run(150, 100, 0.5)] * 3,
            "lost": [run(150, 100, 0.5), run(None, 100, 0.5), run(150, 100, 0.5)],
        }
    )
    assert found["plain"]["fewer_bytes"] == found["plain"]["sooner"] == 1
    assert found["short"]["fewer_bytes"] == found["short"]["fewer_bytes_to_target"] == 8
    assert found["short"]["fewer_steps"] == 0.8
    assert found["short"]["sooner"] == 120 / 75
    assert "sooner" not in found["lost"]
    assert not found["lost"]["reached"]
    header, lines = trades.rows({"summary": {"claim": found}})
    assert {len(line) for line in lines} == {len(header)}


def test_a_claim_compares_trainings_of_one_model_on_as_many_ranks(trades: ModuleType) -> None:
    for claim, cases in trades.CLAIMS.items():
        assert len({case.ranks for case in cases.values()}) == 1, claim
        assert (
            len({(case.work.most, case.work.every, case.work.target, case.work.batch) for case in cases.values()}) == 1
        )
        assert next(iter(cases.values())).words == ()

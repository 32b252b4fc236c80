"""Sufficient factors lose nothing, so the planner uses them at every relaxation level where they are surely faster."""

from typing import Any

import pytest

from planner.test_relaxed import MODEL, hosts
from tutti.config.compression import parse_compression
from tutti.config.plan import BatchPlan, Plan, SyncPlan
from tutti.planner import choose
from tutti.planner.plan_explanation import explain
from tutti.planner.plan_request import Choice, PlanRequest
from tutti.planner.relaxed_strategies import RELAXED_STRATEGIES


def chosen(mbit: float, batch: int = 64, **changes: Any) -> Choice:
    script = Plan(batch=BatchPlan(global_batch_size=batch))
    return choose(MODEL, hosts(mbit), PlanRequest(**{"script": script, "degree": 4, **changes}))


@pytest.mark.parametrize("relax", ["exact", "reduced"])
def test_they_are_taken_on_a_slow_network_where_rows_are_few(relax: Any) -> None:
    others: dict[str, float | None] = {
        strategy.words: None for strategy in RELAXED_STRATEGIES if strategy.relaxation != "exact"
    }
    best = chosen(300, relax=relax, samples=others)
    assert best.best.sync.compress == parse_compression("factors")
    assert best.relaxation is not None
    assert best.relaxation.chosen
    assert (best.relaxation.strategy, best.relaxation.samples) == ("factors", 1.0)
    assert "loses nothing" in best.remarks[0]
    assert "something else" not in explain(best)


@pytest.mark.parametrize(("mbit", "batch"), [(1e6, 64), (300, 2048)])
def test_elsewhere_the_exact_choice_is_as_it_was(mbit: float, batch: int) -> None:
    """This holds on a fast network, and where the rows have as many bytes as the gradients."""
    best = chosen(mbit, batch)
    assert best.best.sync == SyncPlan()
    assert best.relaxation is None


def test_they_leave_alone_what_a_script_says() -> None:
    for words in ("one-bit", "float32"):
        script = Plan(batch=BatchPlan(global_batch_size=64), sync=SyncPlan(compress=parse_compression(words)))
        assert chosen(300, script=script).best.sync.compress == parse_compression(words)

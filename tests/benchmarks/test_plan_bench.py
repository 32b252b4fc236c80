"""The plan benchmark's arithmetic: regret of a choice, error of predictions; and the plans it measures."""

import importlib
import importlib.util
import math
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """benchmarks/plan.py, which has a namesake among the tests' folders."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    spec = importlib.util.spec_from_file_location("plan_benchmark", ROOT / "benchmarks/plan.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_regret_is_against_the_best_measured_and_errors_are_of_what_has_both(bench: Any) -> None:
    rows = [
        {"name": "a", "step_s": [1.0, 9.0, 2.0], "predicted_s": 1.0},
        {"name": "b", "step_s": [1.0], "not_predicted": "why"},
        {"name": "c", "step_s": [1.5], "predicted_s": 3.0},
        {"name": "d", "refused": "why", "predicted_s": 0.1},
        {"name": "e", "failed": "why"},
    ]
    found = bench.judged(rows, "c")
    assert (found["best"], found["best_s"], found["measured"]) == ("b", 1.0, 3)
    assert found["planner_regret"] == pytest.approx(0.5)
    assert (found["predicted_best"], found["predicted_best_regret"]) == ("a", pytest.approx(1.0))
    assert found["mean_absolute_error"] == pytest.approx((0.5 + 1.0) / 2)
    assert found["mean_error"] == pytest.approx((-0.5 + 1.0) / 2)
    assert (found["refused"], found["failed"], found["not_predicted"]) == (["d"], ["e"], ["b"])
    assert "planner_regret" not in bench.judged(rows, None)


def test_the_summary_takes_medians_over_cases_and_means_over_plans(bench: Any) -> None:
    cases = [
        {"measured": 2, "planner_regret": regret, "plans": [{"error": error}, {"error": -error}, {}]}
        for regret, error in ((0.0, 0.1), (0.5, 0.2), (0.02, 0.3))
    ]
    found = bench.summary(cases)
    assert found["planner_regret"] == {"median": 0.02, "largest": 0.5, "cases": 3}
    assert found["step_time_error"]["mean_absolute"] == pytest.approx(0.2)
    assert found["step_time_error"]["mean"] == pytest.approx(0.0)
    assert found["plans_measured"] == 6


@pytest.mark.parametrize("workload", ["mlp", "cnn", "gpt"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_plan_has_the_ranks_and_is_another(bench: Any, workload: str, ranks: int) -> None:
    named = bench.plan_space.plans(workload, ranks)
    both = bench.plan_space.plans(workload, ranks, every_order=True)
    assert all(plan.world_size == ranks == math.prod(plan.mesh.values()) for plan in both.values())
    assert len({repr(plan) for plan in both.values()}) == len(both)
    assert set(named) <= set(both)
    axes = {axis for plan in named.values() for axis in plan.mesh}
    assert axes == set(bench.plan_space.AXES[workload])


def test_plans_that_end_the_ranks_are_passed_over_and_the_rest_goes_on(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: list[list[int]] = []

    def trained(lab: Any, words: list[str], cwd: Path, limit_s: float) -> str | None:
        output = next(word.removeprefix("--output=") for word in words if word.startswith("--output="))
        numbers = [number for number, _ in bench.json.loads((cwd / "plans.json").read_text())]
        launches.append(numbers)
        with Path(output).open("w") as file:
            for number in numbers:
                file.write(f'{{"plan": {number}, "begun": true}}\n')
                if number == 1:
                    return "lost"
                file.write(f'{{"plan": {number}, "step_s": [1.0]}}\n')
        return None

    monkeypatch.setattr(bench, "trained", trained)
    plans = list(bench.plan_space.plans("mlp", 2).values())[:3]
    case = bench.Case(rate="1gbit", ranks=2, workload="mlp", model=None, script=None, cluster=None)
    found = bench.measure_plans(None, plans, case, tmp_path / "case", bench.QUICK)
    assert found == [{"step_s": [1.0]}, {"failed": "lost"}, {"step_s": [1.0]}]
    assert launches == [[0, 1, 2], [2]]

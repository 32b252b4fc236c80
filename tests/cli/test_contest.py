"""Which plans `--try` may run: none that the request forbids; and what measured steps say under every objective."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cost_model.examples import mlp
from planner.machines import cards
from tutti.commands import plan_trials
from tutti.commands.plan_trials import fastest, said, to_try, weights, words_in_full
from tutti.config.plan import BatchPlan, Plan
from tutti.config.prediction import Estimate, Trial
from tutti.errors import TrainingError
from tutti.launch.supervisor import Failure, Outcome
from tutti.planner import Choice, Objective, PlanRequest, choose

MODEL = mlp(8192)
MACHINES = cards(price_per_device_hour=2.0, power_w=400.0)


def chosen(**wishes: Any) -> Choice:
    script = Plan(batch=BatchPlan(global_batch_size=8192))
    return choose(MODEL, MACHINES, PlanRequest(script=script, train_samples=8192e3, **wishes))


def trial(words: str, step_s: float | None, failure: str = "") -> Trial:
    return Trial(
        plan=Plan(batch=BatchPlan(global_batch_size=8)), words=words, predicted=Estimate(value=1.0, low=0.5, high=2.0),
        predicted_throughput_per_s=8.0, measured_s=step_s, least_s=step_s, most_s=step_s, failure=failure,
    )  # fmt: skip


def test_the_choice_is_tried_first_and_then_what_is_predicted_best() -> None:
    choice = chosen()
    found = to_try(MODEL, MACHINES, choice, 4)
    assert found[0].plan == choice.best
    assert len(found) == 4
    times = [one.prediction.step_time_s.value for one in found if one.prediction is not None]
    assert times[1:] == sorted(times[1:])
    assert all(one.prediction is not None and one.prediction.fits for one in found)
    assert len(to_try(MODEL, MACHINES, choice, 1)) == 1


def test_no_precision_is_tried_that_the_request_does_not_allow() -> None:
    kept = chosen()
    assert {one.plan.precision for one in kept.alternatives} > {"full"}  # shown, and faster
    assert {one.plan.precision for one in to_try(MODEL, MACHINES, kept, 99)} == {"full"}
    free = chosen(precision="auto")
    assert {one.plan.precision for one in to_try(MODEL, MACHINES, free, 99)} > {"bfloat16"}
    asked = chosen(precision="tf32")
    assert {one.plan.precision for one in to_try(MODEL, MACHINES, asked, 99)} == {"tf32"}


def test_no_plan_is_tried_that_breaks_a_limit() -> None:
    free = chosen(objective="cost")
    ordered = to_try(MODEL, MACHINES, free, 99)
    costs = [one.totals.cost for one in ordered if one.totals is not None and one.totals.cost is not None]
    hours = [one.totals.time_s for one in ordered if one.totals is not None]
    held = [one.prediction.memory.total for one in ordered if one.prediction is not None]
    assert costs[1:] == sorted(costs[1:])
    for name, values in (("budget", costs), ("deadline_s", hours), ("memory_nbytes", held)):
        limit = (min(values) + max(values)) / 2
        kept = to_try(MODEL, MACHINES, replace(free, request=replace(free.request, **{name: limit})), 99)
        assert 1 < len(kept) < len(ordered)
        assert [one.plan for one in kept[1:]] == [
            one.plan for one, value in zip(ordered, values, strict=True) if value <= limit and one is not ordered[0]
        ]


def test_words_say_a_precision_that_is_not_the_scripts() -> None:
    plan = Plan(batch=BatchPlan(global_batch_size=8))
    request = PlanRequest(script=plan)
    assert words_in_full(plan, request) == "1 rank, 1 microbatch"
    assert words_in_full(replace(plan, precision="bfloat16"), request) == "1 rank, 1 microbatch, bfloat16"


@pytest.mark.parametrize(
    ("objective", "best"), [("throughput", 1), ("device-hours", 0), ("cost", 0), ("energy", 0), ("memory", 0)]
)
def test_what_is_measured_counts_by_the_objective(objective: Objective, best: int) -> None:
    choice = chosen(objective=objective)
    plans = to_try(MODEL, MACHINES, choice, 99)
    one = next(each for each in plans if each.plan.world_size == 1)
    four = next(each for each in plans if each.plan.world_size == 4)
    counted = weights(MODEL, MACHINES, choice, [one, four])
    trials = [trial("one", 1.0), trial("four", 0.5)]  # twice as fast, with four times the devices
    assert fastest(trials, counted) == best
    assert fastest([trial("one", None, "died"), trial("four", 0.5)], counted) == 1


def test_the_sentence_names_the_objective_that_is_not_time() -> None:
    trials = [trial("one", 1.0), trial("four", 0.5)]
    assert said(trials, 0, "cost") == "2 plans ran, and the choice by cost stands: one measured 1 s."
    assert "choice by cost changes to four" in said(trials, 1, "cost")


def test_where_no_plan_runs_the_reason_is_the_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failure = Failure(
        ranks=(0,), first=0, hosts=("vm",), message="ValueError: no such file", exit_code=1,
        traceback="Traceback (most recent call last):\n  line 3\nValueError: no such file\n",
    )  # fmt: skip
    outcome = Outcome(status="failed", exit_code=1, failure=failure)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan_trials, "check_here", lambda cluster, options: None)
    monkeypatch.setattr("tutti.launch.local_launcher.warm", lambda threads: None)
    monkeypatch.setattr("tutti.launch.supervisor.supervise", lambda *given: outcome)
    options: Any = SimpleNamespace(target=("train.py",), tries=2, try_steps=3)
    with pytest.raises(TrainingError) as error:
        plan_trials.try_plans(MODEL, MACHINES, chosen(), options)
    assert "nothing was measured: rank 0 on host vm failed: ValueError: no such file; fix the cause" in str(error.value)
    assert "/ranks/" in str(error.value)
    assert error.value.exit_code == 1

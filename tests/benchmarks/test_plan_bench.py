"""The plan benchmark: what is folded, what is kept of an interrupted run, regret of a choice, error of predictions."""

import argparse
import importlib
import importlib.util
import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cost_model.examples import cluster as machine
from cost_model.examples import cpu
from tutti.config.cluster import ClusterSpec, DeviceSpec, GemmRate, LinkSpec, NodeSpec, WeightRate
from tutti.config.model import ModelSpec
from tutti.config.plan import BatchPlan, PipelinePlan, Plan
from tutti.profile import describe_model

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """benchmarks/plan.py, which has a namesake among the tests' folders."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), str(ROOT / "examples"), *sys.path])
    spec = importlib.util.spec_from_file_location("plan_benchmark", ROOT / "benchmarks/plan.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_regret_is_against_the_best_measured_and_errors_are_of_what_has_both(bench: Any) -> None:
    rows = [
        {"name": "a", "step_s": [1.0, 9.0, 2.0], "predicted_s": 1.0, "peak_nbytes": 10, "predicted_peak_nbytes": 9},
        {"name": "b", "step_s": [1.0], "not_predicted": "why"},
        {"name": "c", "step_s": [1.5], "predicted_s": 3.0},
        {"name": "d", "refused": "why", "predicted_s": 0.1},
        {"name": "e", "failed": "why"},
    ]
    found = bench.judged(rows, "c")
    assert (found["best"], found["best_s"], found["measured"]) == ("b", 1.0, 3)
    assert (found["planner_s"], found["planner_regret"]) == (1.5, pytest.approx(0.5))
    assert (found["predicted_best"], found["predicted_best_regret"]) == ("a", pytest.approx(1.0))
    assert found["mean_absolute_error"] == pytest.approx((0.5 + 1.0) / 2)
    assert found["mean_error"] == pytest.approx((-0.5 + 1.0) / 2)
    assert (found["refused"], found["failed"], found["not_predicted"]) == (["d"], ["e"], ["b"])
    assert rows[0]["memory_error"] == pytest.approx(-0.1)
    assert "planner_regret" not in bench.judged(rows, None)


def test_errors_and_regret_at_the_pace_that_plans_ran_at(bench: Any) -> None:
    """The choice ran when the machine was half as fast: beside the other at one pace it is the best."""
    rows = [
        {"name": "a", "step_s": [1.0], "predicted_s": 1.0, "pace_part": 1.0, "predicted_at_pace_s": 1.1},
        {"name": "b", "step_s": [1.6], "predicted_s": 0.9, "pace_part": 0.5, "predicted_at_pace_s": 1.8},
        {"name": "c", "step_s": [0.7], "predicted_s": 0.9},
    ]
    found = bench.judged(rows, "b")
    assert found["planner_regret"] == pytest.approx(1.6 / 0.7 - 1)
    assert found["planner_regret_at_pace"] == 0
    assert found["mean_absolute_error_at_pace"] == pytest.approx((0.1 + 0.2 / 1.6) / 2)
    assert found["pace_parts"] == [0.5, 1.0]
    assert bench.judged(rows, "a")["planner_regret_at_pace"] == pytest.approx(1 / 1.1 / 0.8 - 1)


def test_a_machine_at_half_its_pace_computes_twice_as_long_and_sends_as_quickly(bench: Any) -> None:
    model, script = model_of(bench, "mlp"), Plan(batch=BatchPlan(global_batch_size=16))
    plan, machines = replace(script, mesh={"replicate": 2}), cluster()
    rate = GemmRate(dtype="float32", n=512, flops_per_s=4e10)
    weights = WeightRate(dtype="float32", forward=1e9, input_gradient=1e9, weight_gradient=1e9)
    device = replace(machines.devices["cpu"], kernel_overhead_s=1e-6, gemm=(rate,), weight_rates=(weights,))
    machines = replace(machines, devices={"cpu": device})
    cases = [
        bench.Case(
            rate="", ranks=2, workload="mlp", model=model, script=script, cluster=bench.with_speed(machines, part)
        )
        for part in (1.0, 0.5)
    ]
    whole, half = (bench.predicted(case, plan)["predicted_phases"] for case in cases)
    for phase in ("forward", "backward", "optimizer"):
        assert half[phase] == pytest.approx(2 * whole[phase], rel=1e-3)  # some of what a call costs is a constant
    found = {"pace": [bench.usual([cases[0].cluster]) / 2] * 3}
    anew = bench.predicted_at_pace(cases[0], plan, found)
    assert anew["pace_part"] == pytest.approx(0.5)
    assert anew["predicted_at_pace_s"] == pytest.approx(bench.predicted(cases[1], plan)["predicted_s"])
    assert bench.predicted_at_pace(cases[0], plan, {"pace": []}) == {}


def case_of(regret: float, error: float, *, beyond: bool) -> dict[str, Any]:
    plans = [
        {"name": "replicate=2", "error": error},
        {"name": "stage=2, interleaved of 3, 4 microbatches", "error": -error},
        {"name": "split=2"},
    ]
    return {"measured": 2, "planner_regret": regret, "plans": plans, "ranks_beyond_cores": beyond}


def test_the_summary_takes_medians_over_cases_and_means_over_plans(bench: Any) -> None:
    cases = [case_of(0.0, 0.1, beyond=False), case_of(0.5, 0.2, beyond=True), case_of(0.02, 0.3, beyond=True)]
    found = bench.summary(cases)
    assert found["planner_regret"] == {"median": 0.02, "largest": 0.5, "cases": 3}
    assert found["step_time_error"]["mean_absolute"] == pytest.approx(0.2)
    assert found["step_time_error"]["mean"] == pytest.approx(0.0)
    assert found["plans_measured"] == 6
    assert found["with_a_core_for_each_rank"]["step_time_error"]["mean_absolute"] == pytest.approx(0.1)
    kinds = found["by_kind"]
    assert list(kinds) == ["replicate", "stage, interleaved"]
    assert kinds["stage, interleaved"]["predicted_over_measured"] == pytest.approx(0.8)
    assert kinds["stage, interleaved"]["beside_replicas"] == pytest.approx(0.8 / 1.2)


def test_the_table_marks_ranks_beyond_cores(bench: Any) -> None:
    plans = [{"name": "replicate=4", "step_s": [0.1], "predicted_s": 0.11}]
    case = {"rate": "1gbit", "ranks": 4, "model": "mlp", "plans": plans, "planner": {"name": "replicate=4"}}
    cases = [case | bench.judged(plans, "replicate=4") | {"ranks_beyond_cores": beyond} for beyond in (True, False)]
    header, table = bench.rows({"cases": cases, "summary": bench.summary(cases)})
    assert [row[0] for row in table[:2]] == ["1gbit, 4 ranks*, mlp", "1gbit, 4 ranks, mlp"]
    assert table[0][2:5] == ["replicate=4 100 ms", "replicate=4 100 ms", "0.0%"]
    assert len(table) == 4
    assert all(len(row) == len(header) for row in table)


# The space


def cluster(memory_nbytes: int = 16 * GIB) -> ClusterSpec:
    device = DeviceSpec(
        name="cpu", kind="cpu", memory_nbytes=memory_nbytes, memory_bandwidth_bytes_per_s=1e10,
        peak_flops_per_s={"float32": 5e10}, cores=1, source="a test", evidence="assumed",
    )  # fmt: skip
    links = tuple(
        LinkSpec(tier=tier, latency_s=1e-4, bandwidth_bytes_per_s=1e8, source="a test", evidence="assumed")
        for tier in ("network", "node")
    )
    node = NodeSpec(name="host", device="cpu", count=2, memory_nbytes=memory_nbytes)
    return ClusterSpec(name="lab", devices={"cpu": device}, nodes=(node,), links=links)


def model_of(bench: Any, workload: str) -> ModelSpec:
    found = importlib.import_module("workloads").WORKLOADS[workload]
    inputs, target = found.data(4)[:]
    return describe_model(found.model(), (inputs,), {}, target, found.loss, samples=4, name=workload)


@pytest.mark.parametrize(("workload", "ranks"), [("mlp", 2), ("mlp", 4), ("cnn", 4)])
def test_every_feasible_plan_of_the_planner_is_measured_or_stood_for(bench: Any, workload: str, ranks: int) -> None:
    model, script = model_of(bench, workload), Plan(batch=BatchPlan(global_batch_size=16))
    found = bench.plan_space.space(model, cluster(), script, workload, ranks)
    words = found.words()
    assert sum(one.stands_for for one in found.plans.values()) == found.feasible + found.orders
    assert words["folded_to"] + found.orders + words["not_tried_by_the_planner"] == len(found.plans)
    assert found.enumerated == found.feasible > words["folded_to"]
    assert all(one.plan.world_size == ranks for one in found.plans.values())
    assert len({repr(one.plan) for one in found.plans.values()}) == len(found.plans)
    every = bench.plan_space.enumerated(model, cluster(), script, ranks)
    meshes = {tuple(plan.mesh.items()) for plan in every}
    assert meshes <= {tuple(one.plan.mesh.items()) for one in found.plans.values()}
    levels = {plan.sharding.level for plan in (one.plan for one in found.plans.values()) if plan.degree("shard") > 1}
    assert levels == {1, 2, 3}


def test_plans_that_do_not_fit_are_counted_with_the_reason(bench: Any) -> None:
    model, script = model_of(bench, "mlp"), Plan(batch=BatchPlan(global_batch_size=16))
    found = bench.plan_space.space(model, cluster(GIB // 4), script, "mlp", 2)
    assert found.feasible == 0
    assert found.words()["not_feasible"] == {"does not fit in memory": found.enumerated}


def test_what_is_folded(bench: Any) -> None:
    space = bench.plan_space
    again = bench.plan_space.LayoutRule(recompute=True)
    batch = [BatchPlan(global_batch_size=64, num_microbatches=count) for count in (1, 2, 4, 8)]

    def kept(*plans: Plan) -> dict[str, int]:
        return {space.name_of(one.plan): one.stands_for for one in space.fold(plans)}

    alone = [Plan(batch=one, mesh={"replicate": 2}) for one in batch]
    assert kept(*alone) == {"replicate=2": 1, "replicate=2, 2 microbatches": 3}
    both = [Plan(batch=one, mesh={"replicate": 2, "split": 2}) for one in batch]
    assert kept(*both) == {"replicate=2,split=2": 4}
    repeats = [Plan(batch=batch[0], mesh={"split": 2}, layout=(again,)), Plan(batch=batch[0], mesh={"split": 2})]
    assert kept(*repeats) == {"split=2": 2}
    assert kept(repeats[0]) == {"split=2, recomputes": 1}
    one, two = (
        [Plan(batch=some, mesh={"stage": 2}, pipeline=PipelinePlan(schedule=name)) for name in ("1f1b", "gpipe")]
        for some in batch[:2]
    )
    assert kept(*one) == {"stage=2, 1f1b": 2}  # there is but one order of one microbatch
    assert kept(*two) == {"stage=2, 1f1b, 2 microbatches": 1, "stage=2, gpipe, 2 microbatches": 1}


# The journal


def line(name: str, rank: int, **row: Any) -> dict[str, Any]:
    return {"name": name, "rank": rank, **row}


def timed(seconds: float, peak: int) -> dict[str, Any]:
    return {
        "prepare_s": 0.1, "warmup_s": [1.0], "step_s": [seconds], "phases": {"forward": seconds}, "cpu_s": 0.5,
        "sent_nbytes": 7, "peak_nbytes": peak, "stolen": 0.0, "set_aside": 0,
    }  # fmt: skip


def test_an_outcome_is_whole_when_all_ranks_have_said_it_and_a_failure_when_one_has(bench: Any, tmp_path: Path) -> None:
    journal = bench.opened(tmp_path / "kept", bench.QUICK, resume=False)
    rows = [
        line("whole", 1, **timed(9.0, 5)),
        line("whole", 0, **timed(2.0, 3)),
        line("half", 0, **timed(2.0, 3)),
        line("lost", 0, failed="connection closed", peer=True),
        line("lost", 1, failed="out of paper", peer=False),
        line("no", 0, refused="why"),
        line("no", 1, refused="why"),
    ]
    journal.rows_file("a, 2 ranks").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = bench.outcomes(journal.rows_file("a, 2 ranks"), 2)
    assert set(found) == {"whole", "lost", "no"}
    assert (found["whole"]["step_s"], found["whole"]["peak_nbytes"]) == ([2.0], 5)
    assert found["whole"]["phases"] == [{"forward": 2.0}, {"forward": 9.0}]
    assert found["lost"] == {"failed": "rank 1: out of paper"}
    assert found["no"] == {"refused": "why"}


def test_going_on_needs_the_same_sizes_and_starting_anew_keeps_what_was_there(bench: Any, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    with pytest.raises(SystemExit, match="has no run to continue"):
        bench.opened(folder, bench.QUICK, resume=True)
    bench.opened(folder, bench.QUICK, resume=False).keep_cluster("1gbit, 2 ranks", cluster())
    assert bench.opened(folder, bench.QUICK, resume=True).cluster("1gbit, 2 ranks") == cluster()
    with pytest.raises(SystemExit, match="set the same ones"):
        bench.opened(folder, bench.Sizes(), resume=True)
    assert bench.opened(folder, bench.Sizes(), resume=False).cluster("1gbit, 2 ranks") is None
    assert (tmp_path / "kept-before/1gbit-2-ranks.json").exists()


def test_plans_that_end_the_ranks_are_rows_and_the_rest_goes_on(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = {name: Plan(batch=BatchPlan(global_batch_size=8), mesh={"replicate": 2}) for name in "abcde"}
    case = bench.Case(rate="1gbit", ranks=2, workload="mlp", model=None, script=None, cluster=None)
    journal = bench.opened(tmp_path / "kept", bench.QUICK, resume=False)
    file, launches = journal.rows_file(f"{case.words}, visit 0"), []

    def says(name: str) -> None:
        with file.open("a") as rows:
            rows.write("".join(json.dumps(line(name, rank, **timed(1.0, 1))) + "\n" for rank in (0, 1)))

    def trained(lab: Any, words: list[str], cwd: Path, limit_s: float) -> str | None:
        listed = next(word.removeprefix("--plans=") for word in words if word.startswith("--plans="))
        names = [name for name, _ in json.loads(Path(listed).read_text())]
        launches.append(names)
        if "b" in names:
            says(names[0])
            return "lost"
        return "no ranks"

    monkeypatch.setattr(bench, "trained", trained)
    monkeypatch.setattr(bench, "usual", lambda clusters: 0.0)
    says("c")  # before an interruption
    found = bench.measure_plans(None, plans, case, tmp_path / "case", bench.QUICK, journal)
    assert launches == [["a", "b", "d", "e"], ["b", "d", "e"], ["d", "e"], ["d", "e"], ["d", "e"]]
    assert [name for name, row in found.items() if "step_s" in row] == ["a", "b", "c"]
    assert all("the last said: no ranks" in found[name]["failed"] for name in "de")


def test_a_plan_of_several_visits_has_the_middle_one_s_time_and_fails_where_one_fails(bench: Any) -> None:
    visits = [
        {"step_s": seconds, "phases": [{"forward": seconds[0]}], "stolen": 0.1, "set_aside": 1, "peak_nbytes": peak}
        for seconds, peak in (([5.0, 5.0], 3), ([1.0, 1.2], 4), ([2.0, 9.0, 2.2], 2))
    ]
    found = bench.over_visits(visits)
    assert found["visits_s"] == [[5.0, 5.0], [1.0, 1.2], [2.0, 9.0, 2.2]]
    assert (found["phases"], found["peak_nbytes"]) == ([{"forward": 2.0}], 4)
    row = {"name": "a", "predicted_s": 1.1, **found}
    bench.judged([row], None)
    assert (row["measured_s"], row["error"]) == (2.2, pytest.approx(-0.5))
    assert bench.over_visits([visits[0], {"failed": "lost"}, visits[1]]) == {"failed": "lost"}


# A plan's process


@pytest.fixture
def rank(bench: Any) -> Any:
    return importlib.import_module("plan_rank")


def fails() -> None:
    raise ValueError("out of paper")


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (lambda: None, {}),
        (fails, {"failed": "ValueError: out of paper", "peer": False}),
        (lambda: os._exit(3), {"failed": "its process ended with 3", "peer": False}),
        (lambda: os.kill(os.getpid(), 12), {"failed": "its process ended with -12", "peer": False}),
        (lambda: signal_wait(), {"failed": "took longer than 0.5 s, or was killed", "peer": True}),
    ],
)
def test_a_plan_that_ends_its_process_ends_no_other(rank: Any, work: Callable[[], None], said: dict[str, Any]) -> None:
    assert rank.in_child(work, 0.5 if "longer" in str(said) else 60) == said


def test_steps_in_which_the_cores_were_given_to_others_do_not_count(rank: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shares = iter([0.0, 0.3, 0.0, 0.0, 0.0, 0.2, 0.0, 0.0])
    monkeypatch.setattr(rank, "one_step", lambda loop: rank.Step(wall_s=0.1, cpu_s=0.1, stolen=next(shares), pace=1e9))
    args = argparse.Namespace(patience=1.5, seconds=0.25, steps=3, again=15.0, pace=0.0)
    taken = rank.take(iter(()), args)
    assert [(step.warm, step.counts) for step in taken[:4]] == [(True, False)] * 4
    assert [step.stolen for step in taken[4:]] == [0.0, 0.2, 0.0]
    assert [step.stolen for step in taken if step.counts] == [0.0, 0.0]
    late = iter([0.3, 0.4, 0.3, 0.2, 0.3, 0.2, *[0.3] * 9])
    monkeypatch.setattr(rank, "one_step", lambda loop: rank.Step(wall_s=2.0, cpu_s=0.1, stolen=next(late), pace=1e9))
    taken = rank.take(iter(()), args)  # a first step that is disturbed is not the measurement; when patience ends, the
    assert [step.counts for step in taken] == [False] * 3 + [True] + [False] * 5  # least disturbed of the others is


@pytest.mark.parametrize(
    ("seconds", "warm"),
    [
        ([0.5, 0.5, 0.5, 0.5], 4),
        ([0.46, 0.63, 0.52, 0.33, 0.32], 5),
        ([0.5, 0.5, 0.9, 0.5, 0.9, 0.5, 0.9, 0.5], 8),
        ([3.0, 3.0], 2),
        ([7.0], 0),
    ],
)
def test_steps_count_once_they_last_as_long_as_those_before(
    rank: Any, monkeypatch: pytest.MonkeyPatch, seconds: list[float], warm: int
) -> None:
    """The fourth number is not enough where it still falls; a first step of seconds is all there is."""
    walls = iter([*seconds, *[0.3] * 5])
    monkeypatch.setattr(rank, "one_step", lambda loop: rank.Step(wall_s=next(walls), cpu_s=0.1, stolen=0.0, pace=1e9))
    args = argparse.Namespace(patience=6.0, seconds=0.25, steps=3, again=15.0, pace=0.0)
    taken = rank.take(iter(()), args)
    assert sum(step.warm for step in taken) == warm
    assert [step.counts for step in taken[:warm]] == [False] * warm
    assert all(step.counts for step in taken[warm:])


@pytest.mark.parametrize(("probed", "counted"), [(0.0, [80e9, 126e9]), (120e9, [126e9, 110e9]), (80e9, [80e9, 79e9])])
def test_steps_at_another_pace_than_the_probes_do_not_count(
    rank: Any, monkeypatch: pytest.MonkeyPatch, probed: float, counted: list[float]
) -> None:
    paces = iter([100e9] * 4 + [80e9, 126e9, 79e9, 110e9, 100e9])
    monkeypatch.setattr(rank, "one_step", lambda loop: rank.Step(wall_s=0.1, cpu_s=0.1, stolen=0.0, pace=next(paces)))
    args = argparse.Namespace(patience=1.5, seconds=0.25, steps=3, again=15.0, pace=probed)
    assert [step.pace for step in rank.take(iter(()), args) if step.counts] == counted


def test_only_the_first_rank_of_a_core_tells_its_pace(rank: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {1})
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert 0 < rank.pace() < math.inf
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert rank.pace() == math.inf


def test_the_probes_pace_is_that_of_its_products(bench: Any) -> None:
    seen = (("float32", 256, 1e9), ("float32", 512, 2e9), ("float32", 1024, 4e9), ("bfloat16", 256, 9e9))
    rates = tuple(GemmRate(dtype=dtype, n=n, threads=1, flops_per_s=rate) for dtype, n, rate in seen)
    found = machine(cpu(gemm=rates), count=2)
    assert bench.usual([found]) == 2e9
    assert bench.steadiness(found, 0.0) == 0.25


def signal_wait() -> None:
    import signal

    signal.pause()

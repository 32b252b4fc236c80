"""Reports say when loaders or storage cannot keep up with a step, and what helps."""

import dataclasses
from typing import Any

import pytest

from cost_model.examples import cluster, cpu, mlp, plan
from planner.machines import cards
from tutti.config.cluster import ClusterSpec
from tutti.config.model import Loading, ModelSpec, TensorShape
from tutti.config.plan import BatchPlan, Plan
from tutti.cost_model import predict
from tutti.cost_model.cost_notes import seconds
from tutti.cost_model.step_time import load_of
from tutti.planner import PlanRequest, choose
from tutti.planner.loss_reasons import data_wait_remark, sample_nbytes
from tutti.planner.scenarios import what_if, with_storage


def of_pictures() -> ModelSpec:
    shapes = (
        TensorShape(name="x", shape=(3, 1000, 1000), dtype="float32"),
        TensorShape(name="id", shape=(5,), dtype="int64"),
        TensorShape(name="mask", shape=(7,), dtype="bool"),
    )
    return dataclasses.replace(mlp(256, 2), inputs=shapes)


@pytest.mark.parametrize("unit", ["samples", "tokens"])
def test_hosts_read_together_what_a_step_takes(unit: str) -> None:
    """Where the cost of samples is unknown, they count as the model takes them."""
    model = dataclasses.replace(of_pictures(), tokens_per_sample=10)
    assert sample_nbytes(model) == 12e6 + 40 + 7
    slow = with_storage(cards(2, 2), 1e9)
    size = 64 if unit == "samples" else 640
    script = Plan(batch=BatchPlan(global_batch_size=size, unit=unit))  # type: ignore[arg-type]
    choice = choose(model, slow, PlanRequest(script=script, degree=4))
    took = 64 * (12e6 + 47) / 2e9  # two hosts read at once
    as_taken = dataclasses.replace(model, loading=Loading(stored_nbytes=sample_nbytes(model), workers=1))
    assert load_of(as_taken, slow, choice.best).storage_s == pytest.approx(took)
    assert choice.prediction.step_time_s.value < took
    assert any(
        "Storage may be slower than that: reading a step's samples takes 384 ms" in remark for remark in choice.remarks
    )
    uncontended = choose(model, slow, PlanRequest(script=script, degree=1)).best
    assert load_of(as_taken, slow, uncontended).storage_s == pytest.approx(2 * took)
    # the same time is predicted where the cost of samples is known
    known = choose(as_taken, slow, PlanRequest(script=script, degree=4))
    assert known.prediction.step_time_s.value == pytest.approx(took)


def test_nothing_is_said_where_storage_is_quick_or_unknown() -> None:
    model, machines = of_pictures(), cards(2, 2)
    choice = choose(model, machines, PlanRequest(script=Plan(batch=BatchPlan(global_batch_size=64))))
    for hosts in (machines, with_storage(machines, 1e15)):
        assert data_wait_remark(model, hosts, choice.best, choice.prediction) == ""


def said(where: ClusterSpec, how: Plan, **costs: Any) -> str:
    model = dataclasses.replace(mlp(), loading=Loading(**costs))
    return data_wait_remark(model, where, how, predict(model, where, how))


def test_what_a_wait_is_due_to_and_what_helps() -> None:
    here, how = with_storage(cards(1, 2), 1e9), plan(64, 2)
    rest_s = predict(mlp(), here, how).step_time_s.value
    assert said(here, how, core_s=1e-9) == ""
    assert said(here, how, core_s=1e-3) == (
        f"A step waits 32 ms for data ({32e-3 / (32e-3 + rest_s):.0%} of it): ranks load samples between steps; "
        "with prepare(..., num_workers=8) it would take 4 ms"  # as many workers as cores are assumed
    )
    both = said(here, how, core_s=1e-3, stored_nbytes=1e6)
    assert both.endswith("storage gives a batch every 64 ms; faster storage or smaller files would help")
    assert "storage gives a batch every 64 ms" in said(here, how, stored_nbytes=1e6, workers=4)
    few = said(here, how, core_s=1e-3, workers=2)
    assert few.endswith(
        "a rank's workers give a batch every 16 ms; with prepare(..., num_workers=8) it would take 4 ms"
    )
    assert "every rank reads the whole stream" in said(here, how, core_s=1e-3, workers=1, stream=True)
    assert "num_workers" not in said(here, how, core_s=1e-3, workers=1, stream=True)
    crowded = said(cluster(cpu()), how, core_s=1e-3, workers=64)
    assert crowded.endswith("workers and the ranks share the same cores; samples that are cheaper to decode would help")
    # four ranks already load on all four cores, so workers would not help
    assert said(cluster(cpu()), plan(64, 4), core_s=1.0).endswith("ranks load samples between steps")


@pytest.mark.parametrize("workers", [0, 2])
def test_as_many_workers_as_keep_up_are_advised(workers: int) -> None:
    here, how = cards(1, 2), plan(64, 2)
    rest_s = predict(mlp(), here, how).step_time_s.value
    core_s = 3.5 * rest_s / 32  # work for three and a half workers
    advice = said(here, how, core_s=core_s, workers=workers)
    assert f"with prepare(..., num_workers=4) it would take {seconds(rest_s)}" in advice


def test_what_if_storage_were_quicker() -> None:
    here = with_storage(cards(2, 2), 1e9)
    changed, words = what_if(here, "storage=4GB/s")
    assert {node.disk_read_bytes_per_s for node in changed.nodes} == {4e9}
    assert words == "storage that reads 3.7 GiB/s"
    shared = dataclasses.replace(here, shared_read_bytes_per_s=1e9)
    assert what_if(shared, "storage=2 GB/s")[0] == dataclasses.replace(shared, shared_read_bytes_per_s=2e9)
    model = dataclasses.replace(mlp(), loading=Loading(stored_nbytes=1e6, workers=1))
    assert predict(model, changed, plan(64, 4)).step_time_s.value == pytest.approx(8e-3)


def test_a_search_that_waits_for_data_says_why_others_lost() -> None:
    model = dataclasses.replace(mlp(256, 2), loading=Loading(core_s=1e-3))
    choice = choose(model, cards(1, 4), PlanRequest(script=plan(64)))
    assert choice.best.world_size == 4
    assert choice.prediction.phases["data"] == pytest.approx(16e-3)
    assert any("of loading data against 16 ms" in alternative.reason for alternative in choice.alternatives)
    assert any("A step waits 16 ms for data" in remark for remark in choice.remarks)

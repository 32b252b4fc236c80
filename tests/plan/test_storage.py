"""A step that storage cannot feed is said to be one."""

import dataclasses

import pytest

from plan.machines import cards
from predict.examples import mlp
from tutti.plan import Request, choose
from tutti.plan.storage import read_s, sample_nbytes, starved
from tutti.spec.model import ModelSpec, TensorShape
from tutti.spec.plan import BatchPlan, Plan


def of_pictures() -> ModelSpec:
    shapes = (
        TensorShape(name="x", shape=(3, 1000, 1000), dtype="float32"),
        TensorShape(name="id", shape=(5,), dtype="int64"),
        TensorShape(name="mask", shape=(7,), dtype="bool"),
    )
    return dataclasses.replace(mlp(256, 2), inputs=shapes)


@pytest.mark.parametrize("unit", ["samples", "tokens"])
def test_hosts_read_together_what_a_step_takes(unit: str) -> None:
    model = dataclasses.replace(of_pictures(), tokens_per_sample=10)
    assert sample_nbytes(model) == 12e6 + 40 + 7
    machines = cards(2, 2)
    slow = dataclasses.replace(
        machines, nodes=tuple(dataclasses.replace(node, disk_read_bytes_per_s=1e9) for node in machines.nodes)
    )
    size = 64 if unit == "samples" else 640
    script = Plan(batch=BatchPlan(global_batch_size=size, unit=unit))  # type: ignore[arg-type]
    choice = choose(model, slow, Request(script=script, degree=4))
    took = 64 * (12e6 + 47) / 2e9  # both hosts
    assert read_s(model, slow, choice.best, 64) == pytest.approx(took)
    assert choice.prediction.step_time_s.value < took
    assert any(
        "Storage may be slower than that: to read a step's samples takes 384 ms" in one for one in choice.remarks
    )
    alone = choose(model, slow, Request(script=script, degree=1)).best
    assert read_s(model, slow, alone, 64) == pytest.approx(2 * took)


def test_nothing_is_said_where_storage_is_quick_or_unknown() -> None:
    model, machines = of_pictures(), cards(2, 2)
    choice = choose(model, machines, Request(script=Plan(batch=BatchPlan(global_batch_size=64))))
    assert read_s(model, machines, choice.best, 64) is None
    quick = dataclasses.replace(
        machines, nodes=tuple(dataclasses.replace(node, disk_read_bytes_per_s=1e15) for node in machines.nodes)
    )
    for each in (machines, quick):
        assert starved(model, each, choice.best, choice.prediction) == ""

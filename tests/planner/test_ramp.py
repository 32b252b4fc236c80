"""The length of a training whose batch grows."""

from dataclasses import replace

import pytest

from cost_model.examples import cluster, link, mlp
from tutti.config.plan import BatchPlan, Plan
from tutti.cost_model import predict
from tutti.planner import NoiseScale, PlanRequest, choose, samples_to_quality
from tutti.planner.objectives import steps, totals
from tutti.planner.plan_request import sizes_of, sizes_to_quality, step_s

GROWS = BatchPlan(global_batch_size=1024, ramp=((10, 128), (30, 512)))
STAYS = BatchPlan(global_batch_size=1024)


def test_steps_are_those_that_a_run_makes() -> None:
    for samples in (1, 128, 129, 1280, 1281, 11_520, 11_521, 100_000):
        expected, seen, number = dict[int, int](), 0, 0
        while seen < samples:  # the rule by which a run counts
            size = GROWS.size_at(number)
            expected[size] = expected.get(size, 0) + 1
            seen, number = seen + size, number + 1
        assert dict(sizes_of(GROWS, samples)) == expected
    assert sizes_of(STAYS, 5000) == [(1024, 5)]


def test_to_a_quality_small_batches_count_nearly_whole() -> None:
    noise = NoiseScale(critical_batch=500.0, least_samples=10_000.0)
    sizes = sizes_to_quality(GROWS, noise)
    done = sum(many * size / (1 + size / 500) for size, many in sizes)
    assert 10_000 <= done < 10_000 + 1024 / (1 + 1024 / 500)
    samples = sum(size * many for size, many in sizes)
    assert samples < samples_to_quality(1024, noise) + 1024
    ((_, uncontended),) = sizes_to_quality(STAYS, noise)
    assert uncontended == steps(PlanRequest(script=Plan(batch=STAYS), noise=noise), Plan(batch=STAYS))


def test_the_time_is_the_sum_over_sizes() -> None:
    machines, plan = cluster(), Plan(batch=GROWS)
    request = PlanRequest(script=plan, train_samples=1280 + 10_240 + 10 * 1024)
    whole = predict(mlp(), machines, plan)
    whole_training = totals(machines, request, plan, whole)
    assert whole_training.steps == 40
    assert whole_training.time_s == pytest.approx(10 * step_s(whole, 128, 1024) + 20 * step_s(whole, 512, 1024)
                                         + 10 * whole.step_time_s.value)  # fmt: skip
    for size in (128, 512):
        across_hosts = predict(mlp(), machines, replace(plan, batch=BatchPlan(global_batch_size=size)))
        assert step_s(whole, size, 1024) == pytest.approx(across_hosts.step_time_s.value, rel=0.25)
    assert choose(mlp(), machines, request).totals == whole_training


def test_a_step_of_no_less_samples_is_the_predicted_one_and_waits_stay() -> None:
    wires = (link("node"), link("network", 1e-3, 1e7))
    hosts = cluster(links=wires, devices_per_node=1, count=2)
    prediction = predict(mlp(), hosts, Plan(batch=STAYS, mesh={"replicate": 2}))
    assert step_s(prediction, 1024, 1024) == prediction.step_time_s.value
    assert step_s(prediction, 1, 1024) > prediction.phases["exposed_communication"] + prediction.phases["optimizer"]

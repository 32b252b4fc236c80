"""How speed grows with devices and where more stop paying, with made-up numbers and with real searches."""

import dataclasses
from itertools import pairwise

import pytest

from cost_model.examples import cluster, cpu, mlp
from planner.machines import cards
from tutti.commands.planning import search
from tutti.config.plan import BatchPlan, Plan
from tutti.config.prediction import Estimate, ScalingCurve
from tutti.errors import PlanError
from tutti.planner import Choice, PlanRequest, device_counts, scaling
from tutti.planner.scenarios import with_bandwidth

REQUEST = PlanRequest(script=Plan(batch=BatchPlan(global_batch_size=4096)), scope="all")


def curve_of(rates: dict[int, float | None]) -> ScalingCurve:
    """Return the curve for these rates in samples per second by number of devices; None where no plan fits."""
    known = search(mlp(256, 2), cards(), dataclasses.replace(REQUEST, scope="data", max_devices=1))

    def answer(request: PlanRequest) -> Choice:
        rate = rates[request.max_devices or 0]
        if rate is None:
            raise PlanError("nothing fits; buy more memory")
        step = 4096 / rate
        prediction = dataclasses.replace(
            known.prediction, throughput_per_s=rate, step_time_s=Estimate(value=step, low=step / 2, high=step * 2)
        )
        return dataclasses.replace(known, prediction=prediction)

    return scaling(REQUEST, tuple(rates), answer)


def test_devices_pay_while_one_more_brings_half_of_one_before() -> None:
    curve = curve_of({1: 100.0, 2: 190.0, 4: 330.0, 8: 380.0, 16: 800.0})
    assert [point.worth for point in curve.points] == pytest.approx([None, 0.9, 14 / 19, 5 / 33, 42 / 38])
    assert curve.pays_until == 4
    assert (
        "stop paying at 4: up to 8, each additional one adds 15 % of the speed that one before it adds"
        in curve.sentence
    )


def test_a_hurried_search_does_not_make_more_devices_slower() -> None:
    points = curve_of({1: 100.0, 2: 190.0, 4: 150.0, 8: 200.0}).points
    assert [point.throughput_per_s for point in points] == [100.0, 190.0, 190.0, 200.0]
    assert [point.devices for point in points] == [1, 2, 4, 8]
    assert points[2].worth == 0


def test_fewer_devices_may_have_no_plan_at_all() -> None:
    curve = curve_of({1: None, 2: None, 4: 100.0, 8: 200.0})
    assert curve.pays_until == 8
    assert curve.points[0].reason == "nothing fits; buy more memory"
    assert curve.points[2].worth is None
    assert "pay up to all 8" in curve.sentence
    assert curve_of({1: None}).pays_until == 0
    assert "no number of these devices has a plan: nothing fits" in curve_of({1: None}).sentence


def test_not_faster_is_said_as_such() -> None:
    curve = curve_of({1: 100.0, 2: 100.0})
    assert curve.pays_until == 1
    assert curve.sentence == "more devices stop paying at 1: 2 are not faster"


def test_counts_double_and_end_with_all() -> None:
    assert device_counts(cards(3, 4)) == (1, 2, 4, 8, 12)
    assert device_counts(cards(3, 4), most=4) == (1, 2, 4)
    assert device_counts(cards(1, 1)) == (1,)


def test_cores_of_a_cpu_count_as_what_is_planned_for() -> None:
    """Two ranks may be planned on two cores, so the curve must not end at one."""
    assert device_counts(cluster(cpu(cores=2))) == (1, 2)
    assert device_counts(cluster(cpu(cores=4), count=2)) == (1, 2, 4, 8)


def test_slow_links_stop_paying_earlier_and_more_devices_are_never_slower() -> None:
    model = mlp(2048, 4)
    devices_by_bandwidth = {}
    for bandwidth in (1e12, 1e7):
        cluster = with_bandwidth(with_bandwidth(cards(2, 2), "node", bandwidth), "network", bandwidth)
        curve = scaling(REQUEST, (1, 2, 4), lambda request, here=cluster: search(model, here, request))  # type: ignore[misc]
        rates = [point.throughput_per_s for point in curve.points]
        assert all(after >= 0.98 * before for before, after in pairwise(rates))  # plans within 2 % are a tie
        devices_by_bandwidth[bandwidth] = curve.pays_until
    assert devices_by_bandwidth[1e12] == 4
    assert devices_by_bandwidth[1e7] == 1


def test_a_fixed_number_of_ranks_has_no_curve() -> None:
    with pytest.raises(PlanError, match="leave them out"):
        scaling(dataclasses.replace(REQUEST, degree=2), (1, 2), lambda request: curve_of({}))  # type: ignore[arg-type, return-value]

"""Sentences about plans that lost, and about searches without a result, are true."""

import dataclasses
import math
from typing import Any

import pytest

from cost_model.examples import cluster, cpu, link, mlp, plan
from planner.machines import cards
from planner.test_meshes import gpt
from planner.test_mixed import two
from tutti.config.cluster import ClusterSpec
from tutti.config.plan import LayoutRule, Plan
from tutti.config.vocabulary import AxisName
from tutti.cost_model import predict
from tutti.errors import PlanError
from tutti.planner import PlanRequest, choose
from tutti.planner.exploration import Costed
from tutti.planner.loss_reasons import _cause, _compute_cause, _one_device, remarks
from tutti.planner.plan_request import Alternative
from tutti.planner.plan_search import _best

REQUEST = PlanRequest(script=plan(64), scope="all")


def costed(machines: ClusterSpec, intended: Plan, **phases: float) -> Costed:
    """Return a plan on machines, with some phases of its prediction replaced."""
    done = predict(mlp(256, 2), machines, intended)
    done = dataclasses.replace(done, phases={**done.phases, **phases})
    return Costed(plan=intended, prediction=done, cluster=machines, value=done.step_time_s.value)


def test_only_ranks_of_one_host_without_cards_share_a_memory() -> None:
    slow = {"optimizer": 1e3}
    single = costed(cluster(cpu()), plan(64, 1))
    assert _cause(costed(cluster(cpu()), plan(64, 4), **slow), single).startswith("4 ranks that share a memory update")
    hosts = cluster(cpu(), count=2)
    assert _cause(costed(hosts, plan(64, 4), **slow), single).startswith("2 ranks that share a memory update")
    uncontended = costed(cards(2, 2), plan(64, 1))
    assert _cause(costed(cards(2, 2), plan(64, 4), **slow), uncontended).startswith("the optimizer takes ")


def test_one_rank_shares_nothing_and_recomputes_a_part() -> None:
    core = cluster(cpu(cores=1))
    again = plan(64, layout=(LayoutRule(recompute="selective"),))
    full = plan(64, layout=(LayoutRule(recompute=True),))
    best = costed(core, plan(64))
    assert _compute_cause(costed(core, again), best).startswith("part of forward is computed twice; ")
    assert _compute_cause(costed(core, full), best).startswith("forward is computed twice; ")
    assert "share" not in _compute_cause(costed(core, plan(64)), best)
    both = cluster(cpu(cores=2))
    assert _compute_cause(costed(both, plan(64, 2)), best).startswith("ranks share cores and memory bandwidth; ")


@pytest.mark.parametrize(
    ("factor", "reason", "words"),
    [
        (0.981, "1.9% better, which is within the error, but with 2 devices instead of 1", "2 ranks: 1.9%"),
        (1.5, "1.50x slower: a cause", "One device is predicted to be the fastest; 2 ranks would be 1.50x slower"),
    ],
)
def test_one_device_is_called_the_fastest_only_where_it_is(factor: float, reason: str, words: str) -> None:
    chosen = costed(cards(), plan(64))
    time = dataclasses.replace(chosen.prediction.step_time_s, value=chosen.value * factor)
    other = dataclasses.replace(chosen.prediction, step_time_s=time)
    sentence = _one_device(REQUEST, chosen, Alternative(plan=plan(64, 2), prediction=other, reason=reason))
    assert words in sentence
    assert ("fastest" in sentence) == (factor > 1)


@pytest.mark.parametrize(("nodes", "words"), [(3, "1 device of 3 stays idle"), (4, "2 devices of 4 stay idle")])
def test_idle_devices_are_counted(nodes: int, words: str) -> None:
    machines = cards(nodes, 1)
    sentences = remarks(mlp(256, 2), machines, REQUEST, costed(machines, plan(64, 2)), ())
    assert any(sentence.startswith(words) for sentence in sentences)


@pytest.mark.parametrize(
    ("axis", "degree", "words"),
    [("split", 3, "split"), ("expert", 2, "expert"), ("table", 2, "table"), ("space", 2, "space")],
)
def test_a_mesh_that_a_model_cannot_have_is_refused_for_its_own_reason(axis: Any, degree: int, words: str) -> None:
    request = dataclasses.replace(REQUEST, mesh={axis: degree})
    intended = dataclasses.replace(plan(64), mesh={axis: degree})
    with pytest.raises(PlanError) as refusal:
        choose(gpt(2, heads=4), cards(), request)
    with pytest.raises(PlanError) as reason:
        predict(gpt(2, heads=4), cards(), intended)
    assert str(refusal.value) == str(reason.value)
    assert words in str(refusal.value)
    assert "does not fit" not in str(refusal.value)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("scope", ["data", "all"])
def test_a_search_without_any_finite_time_ends_in_a_sentence(scope: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tutti.planner.objectives.value", lambda *_: math.inf)
    with pytest.raises(PlanError, match=r"has a throughput that can be compared .*correct the cluster file"):
        choose(mlp(64, 1), cluster(cpu(), (link("node"),)), dataclasses.replace(REQUEST, scope=scope))


@pytest.mark.parametrize(("gain", "chosen"), [(0.015, "replicate"), (0.03, "shard")])
def test_of_plans_as_good_copies_are_taken(gain: float, chosen: AxisName) -> None:
    """Replicas ask nothing of a model. A plan that divides it must be better by more than the width of a tie."""
    machines = cluster(cpu(), count=2)
    copies = costed(machines, plan(64, 2))
    parts = costed(machines, dataclasses.replace(plan(64), mesh={"shard": 2}))
    parts = dataclasses.replace(parts, value=(1 - gain) * copies.value)
    assert _best([parts, copies], REQUEST).plan.mesh == {chosen: 2}


def test_only_plans_with_samples_to_share_have_equal_shares() -> None:
    """All ranks of one pipeline replica compute every sample, so shares would not help them."""
    machines = two({}, {"peak_flops_per_s": {"float32": 30e12}})
    best = costed(machines, dataclasses.replace(plan(64, 2), shares=(0.5, 1.0)))
    stages = costed(machines, dataclasses.replace(plan(64), mesh={"stage": 2}))
    assert "equal shares on unequal devices" in _compute_cause(costed(machines, plan(64, 2)), best)
    assert "shares" not in _compute_cause(stages, best)

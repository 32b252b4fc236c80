"""Wide linear layers in data-parallel plans: which are divided, and when the search chooses such a plan."""

import dataclasses
from functools import cache
from itertools import chain, combinations

import pytest
import torch
from torch import nn

from cost_model.examples import cluster, cpu, link, plan
from tutti.config.cluster import ClusterSpec
from tutti.config.model import ModelSpec
from tutti.config.plan import LayoutRule, Plan
from tutti.cost_model import predict
from tutti.cost_model.module_costs import model_table
from tutti.errors import PlanError
from tutti.parallel.capabilities import with_capabilities
from tutti.planner import PlanRequest, choose, explain
from tutti.planner.plan_refinement import possible_wide_plans, wide_plans, wide_rules
from tutti.profile import describe_model

LAYERS = ("4", "6", "8")


@cache
def cnn() -> ModelSpec:
    """Return a convolution and a classifier that has nearly all parameters."""
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(2048, 3072), nn.ReLU(),
        nn.Linear(3072, 1024), nn.ReLU(), nn.Linear(1024, 10),
    )  # fmt: skip
    x = torch.zeros(4, 3, 32, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    spec = describe_model(model, (x,), {}, None, lambda output, _: output.square().mean(), optimizer, samples=4)
    return with_capabilities(spec, model, (x,))


def hosts(bandwidth: float, latency: float = 1e-4, count: int = 4) -> ClusterSpec:
    return cluster(
        cpu(), (link("node", 1e-5, 4e9), link("network", latency, bandwidth)), count=count, devices_per_node=1
    )


def divided(batch: int, *rules: LayoutRule, mesh: dict[str, int] | None = None) -> Plan:
    return dataclasses.replace(plan(batch), mesh=mesh or {"table": 4}, layout=rules)  # type: ignore[arg-type]


def seconds(one: Plan, machines: ClusterSpec) -> float:
    return predict(cnn(), machines, one).step_time_s.value


@pytest.mark.parametrize("batch", [16, 64, 512, 4096])
@pytest.mark.parametrize("bandwidth", [1e7, 1e9])
def test_no_choice_of_layers_is_quicker_than_the_one_by_gain(batch: int, bandwidth: float) -> None:
    machines = hosts(bandwidth)
    replicas = divided(batch, mesh={"replicate": 4})
    tried = [replicas, *wide_plans(replicas, machines, model_table(cnn()), batch, 4)]
    best = min(seconds(intended, machines) for intended in tried)
    choices = chain.from_iterable(combinations(LAYERS[:2], count) for count in (1, 2))
    strategies = [divided(batch, *(LayoutRule(modules=name, placement="split") for name in names)) for names in choices]
    assert best <= 1.02 * min(seconds(intended, machines) for intended in (replicas, *strategies))


def test_the_larger_a_rank_s_batch_the_fewer_layers_are_divided() -> None:
    counts = []
    for batch in (16, 1024, 8192, 65536):
        rules = wide_rules(divided(batch), hosts(1e8), model_table(cnn()), batch)
        assert [rule.modules for rule in rules] == list(LAYERS[: len(rules)])
        assert [rule.placement for rule in rules] == ["column", "row"][: len(rules)]
        counts.append(len(rules))
    assert counts == sorted(counts, reverse=True)
    assert (counts[0], counts[-1]) == (2, 0)


def test_waiting_for_exchanges_counts() -> None:
    assert wide_rules(divided(64), hosts(1e9, latency=1e-5), model_table(cnn()), 64)
    assert not wide_rules(divided(64), hosts(1e9, latency=1e-1), model_table(cnn()), 64)


def test_what_the_script_says_of_a_layer_stays() -> None:
    kept = divided(64, LayoutRule(modules="4", placement="replicate"))
    assert [rule.modules for rule in wide_rules(kept, hosts(1e8), model_table(cnn()), 64)] == ["6"]


def test_the_search_divides_the_classifier_where_links_are_slow_and_says_so() -> None:
    request = PlanRequest(script=plan(64), scope="all")
    choice = choose(cnn(), hosts(1.25e8), request)
    assert choice.best.degree("table") > 1
    assert [rule.modules for rule in choice.best.layout if rule.placement != "auto"] == ["4", "6"]
    assert "4 and 6 over table" in explain(choice)
    assert any("'4' and '6' have large weights and small activations" in remark for remark in choice.remarks)
    whole = dataclasses.replace(choice.best, mesh={"replicate": choice.best.world_size}, layout=request.script.layout)
    assert seconds(choice.best, hosts(1.25e8)) < 0.8 * seconds(whole, hosts(1.25e8))
    asked = choose(cnn(), hosts(1.25e8), dataclasses.replace(request, mesh={"replicate": 4}))
    assert not any(rule.placement != "auto" for rule in asked.best.layout)


def test_layers_narrower_than_the_degree_are_refused_in_the_runtime_s_words() -> None:
    with pytest.raises(PlanError) as refusal:
        seconds(divided(64, LayoutRule(modules="8", placement="column"), mesh={"table": 12}), hosts(1e8, count=12))
    assert str(refusal.value) == (
        "layer '8' has 10 outputs, fewer than mesh.table = 12; place it 'replicate', or leave it out of the rule"
    )
    assert seconds(divided(64, LayoutRule(modules="8", placement="row"), mesh={"table": 12}), hosts(1e8, count=12))


def test_a_mesh_that_the_user_gives_is_found_where_it_fits_only_with_layers_divided() -> None:
    """The state of the two wide layers takes 150 MB on a rank. Divided over four ranks, it takes a quarter of that."""
    rules = tuple(LayoutRule(modules=name, placement="split") for name in LAYERS[:2])
    script = dataclasses.replace(plan(16), layout=rules)
    request = PlanRequest(script=script, scope="all", mesh={"table": 4}, memory_nbytes=420e6)
    choice = choose(cnn(), hosts(1e8), request)
    assert choice.best.mesh == {"table": 4}
    assert choice.prediction.memory.total < 420e6


def test_a_link_that_is_not_described_leaves_out_what_needs_it() -> None:
    """With two ranks on each host and no link within it, the search goes on with the plans that can be predicted."""
    machines = cluster(cpu(), (link("network", 1e-4, 1e6),), count=2, devices_per_node=1)
    columns = model_table(cnn())
    assert possible_wide_plans(divided(16, mesh={"replicate": 2}), machines, columns, 16, 2)
    four = divided(16, mesh={"replicate": 4})
    with pytest.raises(PlanError, match="no link of tier 'node'"):
        list(wide_plans(four, machines, columns, 16, 2))
    assert possible_wide_plans(four, machines, columns, 16, 2) == []

"""Unequal devices: shares against all possible shares, memory limits, devices that are better left idle."""

import dataclasses
import itertools
from itertools import permutations
from typing import Any, get_args

import pytest

from cost_model.examples import cpu, gpu, linear, link, mlp, plan
from planner.machines import cards, own_links
from planner.test_meshes import gpt
from tutti.config.cluster import ClusterSpec, NodeSpec
from tutti.config.model import ModelSpec
from tutti.config.plan import Plan
from tutti.cost_model import predict
from tutti.errors import PlanError
from tutti.planner import Choice, NoiseScale, Objective, PlanRequest, choose
from tutti.planner.mixed_hardware import orders

BATCH = 60


def two(first: dict[str, Any], second: dict[str, Any], each: int = 1) -> ClusterSpec:
    """Return two nodes, with cards that differ as the arguments say."""
    devices = {name: gpu(name=name, **changes) for name, changes in (("first", first), ("second", second))}
    nodes = tuple(NodeSpec(name=name, device=name, devices_per_node=each, memory_nbytes=2**36) for name in devices)
    links = (link("node", 1e-6, 1e11), link("network", 1e-6, 1e11))
    return ClusterSpec(name="two", devices=devices, nodes=nodes, links=links)


def wide() -> ModelSpec:
    """Return a layer whose activations take 64 MiB per sample."""
    return ModelSpec(name="wide", modules=(linear("a", 4096, 4096, activation_nbytes=float(2**26)),), optimizer="Adam")


def shared(model: ModelSpec, machines: ClusterSpec) -> Choice:
    """Return the choice for one microbatch on both nodes, where only the shares and their order may differ."""
    ranks = machines.device_count
    return choose(
        model,
        machines,
        PlanRequest(script=plan(BATCH), scope="all", mesh={"replicate": ranks}, keep_microbatches=True),
    )


def every_way(model: ModelSpec, machines: ClusterSpec) -> dict[int, float]:
    """Return the step time for each number of samples of the first of two ranks, where the plan fits."""
    step_s_by_samples = {}
    for first in range(1, BATCH):
        done = predict(
            model, machines, dataclasses.replace(plan(BATCH, 2), shares=(float(first), float(BATCH - first)))
        )
        if done.fits:
            step_s_by_samples[first] = done.step_time_s.value
    return step_s_by_samples


@pytest.mark.parametrize("faster", [1.5, 3.0, 10.0])
def test_shares_by_speed_gain_what_the_best_shares_would(faster: float) -> None:
    machines = two({}, {"peak_flops_per_s": {"float32": faster * 10e12}})
    choice = shared(mlp(4096, 2), machines)
    best = min(every_way(mlp(4096, 2), machines).values())
    even = predict(mlp(4096, 2), machines, plan(BATCH, 2)).step_time_s.value
    assert even - choice.prediction.step_time_s.value >= 0.9 * (even - best) > 0


@pytest.mark.parametrize("faster", [1.0, 3.0])
def test_shares_end_where_memory_ends_and_the_rest_goes_to_the_other(faster: float) -> None:
    """The second card is as fast or faster, and has memory for only a few samples."""
    quick = {"peak_flops_per_s": {"float32": faster * 10e12}, "memory_nbytes": 3 * 2**30}
    machines = two({}, quick)
    every = every_way(wide(), machines)
    assert BATCH // 2 not in every
    choice = shared(wide(), machines)
    assert choice.prediction.fits
    assert choice.prediction.step_time_s.value <= 1.1 * min(every.values())  # to within two samples of what fits
    with pytest.raises(PlanError, match="does not fit"):
        shared(wide(), two({"memory_nbytes": 2**30}, quick))


def test_slow_devices_stay_idle_where_they_would_only_delay() -> None:
    slow = {"peak_flops_per_s": {"float32": 1e9}, "memory_bandwidth_bytes_per_s": 1e9}
    machines = two(slow, {}, each=2)
    choice = choose(mlp(2048, 2), machines, PlanRequest(script=plan(BATCH), scope="all"))
    assert choice.best.world_size <= 2
    assert choice.nodes == ("second", "first")
    seated = dataclasses.replace(machines, nodes=machines.nodes[::-1])
    assert choice.prediction == predict(mlp(2048, 2), seated, choice.best)
    every = Plan(batch=choice.best.batch, mesh={"replicate": 4})
    assert choice.prediction.step_time_s.value < 0.5 * predict(mlp(2048, 2), machines, every).step_time_s.value


def test_a_job_keeps_its_order_and_all_of_its_ranks() -> None:
    """The same machines as above, but in a job that gives each node its ranks: none stays idle, and none is moved."""
    slow = {"peak_flops_per_s": {"float32": 1e9}, "memory_bandwidth_bytes_per_s": 1e9}
    machines = two(slow, {}, each=2)
    nodes = tuple(dataclasses.replace(node, ranks=ranks) for node, ranks in zip(machines.nodes, (1, 2), strict=True))
    job = dataclasses.replace(machines, nodes=nodes)
    request = PlanRequest(script=plan(BATCH), scope="all", keep_microbatches=True)
    choice = choose(mlp(2048, 2), job, request)
    assert (choice.best.world_size, choice.nodes) == (3, ())
    first, second = machines.nodes
    by_hand = dataclasses.replace(machines, nodes=(dataclasses.replace(first, devices_per_node=1), second))
    assert choice.prediction == predict(mlp(2048, 2), by_hand, choice.best)
    with pytest.raises(PlanError, match="--nproc asks for 2 ranks, and the nodes of the job have 3; leave it out"):
        choose(mlp(2048, 2), job, dataclasses.replace(request, degree=2))
    with pytest.raises(PlanError, match="--mesh asks for 4 ranks, and the nodes of the job have 3"):
        choose(mlp(2048, 2), job, dataclasses.replace(request, mesh={"replicate": 4}))


def test_ranks_that_share_a_host_get_less_than_one_that_has_its_own() -> None:
    """One kind of device, and layers for which factors of gradients may pay: shares do not disturb that question."""
    node = NodeSpec(name="a", device="cpu", memory_nbytes=2**36, ranks=1)
    links = (link("node", 1e-6, 1e11), link("network", 1e-6, 1e11))
    nodes = (node, dataclasses.replace(node, name="b", ranks=2))
    job = ClusterSpec(name="job", devices={"cpu": cpu(name="cpu")}, nodes=nodes, links=links)
    choice = choose(mlp(4096, 2), job, PlanRequest(script=plan(BATCH), keep_microbatches=True))
    alone, *sharing = choice.best.shares
    assert 1.0 == alone > 0.8 > sharing[0] == sharing[1]


def three() -> ClusterSpec:
    """Return three kinds of nodes: the fastest, the one that does its work with least money and power, the largest."""
    kinds = {
        "a": {"peak_flops_per_s": {"float32": 60e12}, "price_per_device_hour": 4.0, "power_w": 700.0},
        "b": {"peak_flops_per_s": {"float32": 20e12}, "price_per_device_hour": 0.5, "power_w": 100.0},
        "c": {"peak_flops_per_s": {"float32": 15e12}, "price_per_device_hour": 3.0, "power_w": 500.0},
    }
    devices = {name: gpu(name=name, memory_nbytes=2**34 + (name == "c") * 2**33, **kinds[name]) for name in kinds}
    nodes = tuple(NodeSpec(name=name, device=name, devices_per_node=2, memory_nbytes=2**36) for name in devices)
    return ClusterSpec(name="three", devices=devices, nodes=nodes, links=two({}, {}).links)


@pytest.mark.parametrize("objective", get_args(Objective))
def test_the_answer_does_not_depend_on_the_order_of_nodes_in_the_file(objective: Objective) -> None:
    noise = NoiseScale(critical_batch=6, least_samples=1e4)
    request = PlanRequest(
        script=plan(12), scope="all", objective=objective, noise=noise, keep_microbatches=True, max_devices=4
    )
    choices, tried = [], set()
    for nodes in permutations(three().nodes):
        written = dataclasses.replace(three(), nodes=nodes)
        tried.add(tuple(tuple(node.name for node in order.nodes) for order in orders(written, None, objective)))
        if nodes[0].name == "b":  # two of the six orders are enough, because each takes seconds
            choice = choose(mlp(1024, 2), written, request)
            seated = choice.nodes or tuple(node.name for node in nodes)
            choices.append((choice.best, choice.prediction, choice.totals, seated[: -(-choice.best.world_size // 2)]))
    assert len(tried) == 1
    assert choices[0] == choices[1]


@pytest.mark.parametrize("objective", ["cost", "energy"])
def test_what_is_cheapest_for_its_work_is_used_alone_wherever_it_stands(objective: Objective) -> None:
    """It is neither the fastest nor the one with most memory."""
    for nodes in (three().nodes, three().nodes[::-1]):
        request = PlanRequest(script=plan(12), scope="all", objective=objective, keep_microbatches=True)
        choice = choose(mlp(1024, 2), dataclasses.replace(three(), nodes=nodes), request)
        assert choice.nodes[0] == "b"
        assert choice.best.world_size <= 2


def test_of_equal_devices_those_with_the_quickest_network_are_tried_first() -> None:
    machines = own_links(cards(3, 1))
    nodes = tuple(machines.nodes[i] for i in (1, 0, 2))
    in_orders = orders(dataclasses.replace(machines, nodes=nodes))
    assert machines.nodes in [ordered.nodes for ordered in in_orders]
    assert orders(cards(3, 1)) == (cards(3, 1),)


def test_more_kinds_of_devices_are_never_planned_slower_than_the_quickest_alone() -> None:
    """The time limit is short, and there are many plans between the two. The plan was once 1.5 times as slow."""
    speeds = {"quick": (60e12, 2**35, 1), "middle": (20e12, 2**35, 3), "slow": (8e12, 2**34, 4)}
    devices = {
        name: gpu(name=name, peak_flops_per_s={"float32": rate}, memory_nbytes=size)
        for name, (rate, size, _) in speeds.items()
    }
    nodes = tuple(
        NodeSpec(name=name, device=name, devices_per_node=4, count=count, memory_nbytes=2**38)
        for name, (_, _, count) in speeds.items()
    )
    links = (link("node", 1e-6, 2e11), link("network", 1e-5, 1e9))
    machines = ClusterSpec(name="three kinds", devices=devices, nodes=nodes, links=links)

    def step_s(**wishes: Any) -> float:
        looks = itertools.count()  # the clock counts how often it is read
        request = PlanRequest(script=plan(64), scope="all", **wishes)
        choice = choose(gpt(8, hidden=1024), machines, request, clock=lambda: float(next(looks)), limit_s=150)
        return choice.prediction.step_time_s.value

    assert step_s() <= 1.02 * step_s(max_devices=4)

"""Laws of every prediction, for every architecture, on random clusters: uniform and mixed, fast and slow."""

import dataclasses
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cost_model.examples import cpu, gpu, link, mlp
from tutti.config.cluster import ClusterSpec, LinkSpec, LinkTier, NodeSpec, scale_bandwidth
from tutti.config.model import ModelSpec
from tutti.config.plan import BatchPlan, LayoutRule, PipelinePlan, Plan, ShardingPlan, SyncPlan
from tutti.config.prediction import Prediction
from tutti.config.vocabulary import Precision
from tutti.cost_model import predict
from tutti.cost_model.step_time import loss_s, overhead_s, slowest_of, wait_s, worked_out
from tutti.cost_model.step_timeline import replica_work
from tutti.errors import PlanError
from tutti.planner.scenarios import with_bandwidth, with_memory, with_speed
from tutti.profile.architectures import ARCHITECTURES, architecture

SMALL = {
    "layers": 4, "hidden": 64, "heads": 4, "kv_heads": 2, "seq_len": 512, "vocab": 512, "experts": 4, "image": 32,
    "rows": 1000, "dims": 3, "depth": 18,
}  # fmt: skip
"""Sizes for the architectures; each takes those that it has."""

AXES = ("replicate", "shard", "split", "stage", "context")
OWN_AXIS = {"moe": "expert", "dlrm": "table", "unet": "space", "resnet": "space"}
"""Axes that only some architectures have. Every other plan of theirs uses the axis, which random plans seldom would."""

NAMES = sorted(ARCHITECTURES)


@cache
def model_of(name: str) -> ModelSpec:
    known = {field.name for field in dataclasses.fields(ARCHITECTURES[name])}
    return architecture(name, {key: value for key, value in SMALL.items() if key in known})


def card(draw: st.DrawFn, name: str) -> Any:
    rate = draw(st.floats(1e11, 1e15))
    return gpu(
        name=name,
        peak_flops_per_s={"float32": rate, "bfloat16": rate * draw(st.floats(1, 16))},
        memory_bandwidth_bytes_per_s=draw(st.floats(1e10, 5e12)),
        memory_nbytes=draw(st.integers(2**31, 2**38)),
        kernel_overhead_s=draw(st.sampled_from([0.0, 1e-6, 1e-5])),
    )


@st.composite
def clusters(draw: st.DrawFn) -> ClusterSpec:
    kinds = draw(st.integers(1, 3))
    devices = {f"d{kind}": card(draw, f"d{kind}") for kind in range(kinds)}
    nodes = tuple(
        NodeSpec(
            name=f"n{kind}", device=f"d{kind}", devices_per_node=draw(st.sampled_from([1, 2, 4])),
            count=draw(st.integers(2, 3)), memory_nbytes=2**38, links=tuple(wires(draw, draw(st.sampled_from(OWN)))),
        )
        for kind in range(kinds)
    )  # fmt: skip
    return ClusterSpec(name="drawn", devices=devices, nodes=nodes, links=tuple(wires(draw, ("node", "network"))))


OWN: tuple[tuple[LinkTier, ...], ...] = ((), (), ("network",), ("node", "network"))
"""Links that hosts have of their own; most often none."""


def wires(draw: st.DrawFn, tiers: tuple[LinkTier, ...]) -> Iterator[LinkSpec]:
    for tier in tiers:
        bandwidth, bent = draw(st.floats(1e6, 1e12)), draw(st.booleans())
        large = {"large_nbytes": 2**16, "large_bandwidth_bytes_per_s": bandwidth * draw(st.floats(0.2, 1))}
        yield link(tier, draw(st.floats(1e-7, 1e-3)), bandwidth, **(large if bent else {}))


def powers(low: float, high: float) -> st.SearchStrategy[float]:
    """Draw numbers between two powers of ten, with each order of magnitude equally likely."""
    return st.floats(low, high).map(lambda power: 10.0**power)


@st.composite
def hosts(draw: st.DrawFn) -> ClusterSpec:
    """Draw hosts of one kind as a probe measures them, with latencies and with links that take core time."""
    device = cpu(cores=draw(st.sampled_from([1, 2, 4, 8])), kernel_overhead_s=draw(st.sampled_from([0.0, 1e-6])))
    nodes = (NodeSpec(name="n", device="d", count=draw(st.integers(2, 6)), memory_nbytes=2**38),)
    links = tuple(
        link(tier, draw(powers(-5.5, -2.5)), draw(powers(7, 11)), core_s_per_nbyte=draw(powers(-10.5, -8)))
        for tier in ("node", "network")
    )
    return ClusterSpec(name="drawn", devices={"d": device}, nodes=nodes, links=links)


@st.composite
def plans(draw: st.DrawFn, name: str, precisions: tuple[Precision, ...] = ("full", "bfloat16")) -> Plan:
    special = [OWN_AXIS[name]] if name in OWN_AXIS and draw(st.booleans()) else []
    axes = special + draw(st.lists(st.sampled_from(AXES), min_size=1, max_size=3 - len(special), unique=True))
    axes = draw(st.permutations(axes))
    microbatches = draw(st.sampled_from([1, 2, 4]))
    schedule: Any = draw(st.sampled_from(["1f1b", "gpipe", "zero-bubble"]))
    again: Any = draw(st.sampled_from([None, True, "selective"]))
    return Plan(
        batch=BatchPlan(global_batch_size=32, num_microbatches=microbatches),
        mesh={axis: draw(st.sampled_from([1, 2, 2, 3])) for axis in axes},  # type: ignore[misc]
        sharding=ShardingPlan(level=1 if "stage" in axes else draw(st.sampled_from([1, 2, 3]))),
        pipeline=PipelinePlan(schedule=schedule),
        precision=draw(st.sampled_from(precisions)),
        layout=(LayoutRule(modules="*", recompute=again),),
    )


def predicted(name: str, machines: ClusterSpec, plan: Plan) -> Prediction:
    try:
        return predict(model_of(name), machines, plan)
    except PlanError:  # not a case: this mesh is impossible
        assume(False)
        raise


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=15)
@given(data=st.data(), machines=clusters(), more=st.floats(1.01, 30))
def test_laws_hold_for_every_architecture_on_any_machines(
    name: str, data: st.DataObject, machines: ClusterSpec, more: float
) -> None:
    obeys(name, machines, data.draw(plans(name)), more)


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=15)
@given(data=st.data(), machines=hosts(), more=st.floats(1.01, 30))
def test_laws_hold_where_processors_exchange_beside_their_work(
    name: str, data: st.DataObject, machines: ClusterSpec, more: float
) -> None:
    obeys(name, machines, data.draw(plans(name, ("full",))), more)


def obeys(name: str, machines: ClusterSpec, plan: Plan, more: float) -> None:
    prediction = predicted(name, machines, plan)
    step = prediction.step_time_s.value
    # phases add up to the step, and a single device sends nothing
    assert sum(prediction.phases.values()) == pytest.approx(step)
    assert all(seconds >= 0 for seconds in prediction.phases.values())
    assert prediction.step_time_s.low <= step <= prediction.step_time_s.high
    if plan.world_size == 1:
        assert prediction.phases["exposed_communication"] == prediction.sent_nbytes_per_rank == 0
    # better machines are never slower
    better = {
        "speed": with_speed(machines, more),
        "latency": machines.relinked(lambda spec: dataclasses.replace(spec, latency_s=spec.latency_s / more)),
        "memory": with_memory(machines, more * max(device.memory_nbytes for device in machines.devices.values())),
    }
    for host_link in machines.every_link:  # the links of each kind of host separately
        better[f"{host_link.tier} of {host_link}"] = machines.relinked(
            lambda spec, changed_link=host_link: scale_bandwidth(spec, more) if spec is changed_link else spec
        )
    best = max(link.bandwidth_bytes_per_s for link in machines.every_link)
    for tier in ("node", "network"):
        better[tier] = with_bandwidth(machines, tier, best * more)
    for what, changed in better.items():
        assert predict(model_of(name), changed, plan).step_time_s.value <= step * (1 + 1e-9), what
    if prediction.fits:
        assert predict(model_of(name), better["memory"], plan).fits


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=8)
@given(data=st.data(), machines=clusters())
def test_equal_nodes_may_change_places(name: str, data: st.DataObject, machines: ClusterSpec) -> None:
    """Each kind of node is listed as single nodes with names of their own, in any order within the kind."""
    plan = data.draw(plans(name))
    prediction = predicted(name, machines, plan)
    apart = []
    for node in machines.nodes:
        names = data.draw(st.permutations([f"{node.name}-{at}" for at in range(node.count)]))
        apart += [dataclasses.replace(node, name=node_name, count=1) for node_name in names]
    other = predict(model_of(name), dataclasses.replace(machines, nodes=tuple(apart)), plan)
    assert other.step_time_s.value == pytest.approx(prediction.step_time_s.value)
    assert other.memory == prediction.memory
    assert other.sent_nbytes_per_rank == pytest.approx(prediction.sent_nbytes_per_rank)


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=8)
@given(data=st.data(), machines=clusters())
def test_hosts_that_a_plan_leaves_idle_cost_it_nothing(name: str, data: st.DataObject, machines: ClusterSpec) -> None:
    plan = data.draw(plans(name))
    prediction = predicted(name, machines, plan)
    slow = tuple(link(tier, 1.0, 1.0) for tier in ("node", "network"))
    idle = gpu(name="idle", peak_flops_per_s={"float32": 1.0, "bfloat16": 1.0})
    node = NodeSpec(name="idle", device="idle", devices_per_node=2, memory_nbytes=1, links=slow)
    more = dataclasses.replace(machines, devices={**machines.devices, "idle": idle}, nodes=(*machines.nodes, node))
    assert predict(model_of(name), more, plan) == prediction


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=8)
@given(data=st.data(), machines=clusters())
def test_links_of_a_hosts_own_are_as_good_as_the_clusters(
    name: str, data: st.DataObject, machines: ClusterSpec
) -> None:
    plan, bare = data.draw(plans(name)), tuple(dataclasses.replace(node, links=()) for node in machines.nodes)
    shared = dataclasses.replace(machines, nodes=bare)
    with_links = tuple(dataclasses.replace(node, links=machines.links) for node in bare)
    prediction = predicted(name, shared, plan)
    assert predict(model_of(name), dataclasses.replace(machines, nodes=with_links, links=()), plan) == prediction


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=15)
@given(data=st.data(), machines=clusters())
def test_a_step_is_as_long_as_that_of_the_rank_which_ends_last(
    name: str, data: st.DataObject, machines: ClusterSpec
) -> None:
    """Each rank counts with its own communication, because a rank that computes less may hide less of it."""
    plan = data.draw(plans(name))
    shares = data.draw(
        st.lists(st.floats(0.3, 3), min_size=plan.data_parallel_degree, max_size=plan.data_parallel_degree)
    )
    plan = dataclasses.replace(plan, shares=tuple(shares))
    prediction = predicted(name, machines, plan)
    assert prediction.step_time_s.value == pytest.approx(max(ends_of(model_of(name), machines, plan)), rel=1e-9)


def ends_of(model: ModelSpec, machines: ClusterSpec, plan: Plan) -> list[float]:
    """Return when the different ranks of a plan end a step, each with its own communication."""
    step, ends_s = worked_out(model, machines, plan), []
    for replica in step.replicas:
        for work in replica_work(step.setting, replica):
            exposed_s = slowest_of(step.setting, [work]).sync.exchange.exposed_s
            waits_s = exposed_s + wait_s(step.setting, work, exposed_s) + loss_s(step.setting)
            ends_s.append(work.total_s + waits_s + overhead_s(step.setting, work))
    return ends_s


def test_a_rank_that_computes_less_may_end_last_because_it_hides_less() -> None:
    """One replica spends its time on its passes, the other on its update, and reductions take as long as a pass."""
    computes, updates = (gpu(name=name, peak_flops_per_s={"float32": rate}, memory_bandwidth_bytes_per_s=memory)
                         for name, rate, memory in (("computes", 1.2e10, 1e12), ("updates", 1e14, 2e9)))  # fmt: skip
    nodes = tuple(NodeSpec(name=device.name, device=device.name, memory_nbytes=2**36) for device in (computes, updates))
    machines = ClusterSpec(name="two", devices={"computes": computes, "updates": updates}, nodes=nodes,
                           links=(link("network", 1e-6, 4e8),))  # fmt: skip
    plan = Plan(batch=BatchPlan(global_batch_size=128), mesh={"replicate": 2}, sync=SyncPlan(bucket_nbytes=2**20))
    step = worked_out(mlp(512, 4), machines, plan)
    first, second = (replica_work(step.setting, replica)[0].total_s for replica in step.replicas)
    ends = ends_of(mlp(512, 4), machines, plan)
    assert first > second
    assert ends[0] < ends[1]
    assert predict(mlp(512, 4), machines, plan).step_time_s.value == pytest.approx(ends[1])


def test_a_line_is_as_slow_as_the_slower_of_its_seats_with_its_update() -> None:
    """There are two kinds of cards with passes of about the same length and very different memory bandwidth.

    All of them get faster by several factors.
    """
    slow, quick = (gpu(name=name, peak_flops_per_s={"float32": rate}, memory_bandwidth_bytes_per_s=memory)
                   for name, rate, memory in (("slow", 1e12, 1.3e12), ("quick", 1.2e14, 4.2e12)))  # fmt: skip
    nodes = tuple(
        NodeSpec(name=name, device=name, devices_per_node=2, memory_nbytes=2**36) for name in ("slow", "quick")
    )
    links = (link("node", 9.7e-6, 4e11), link("network", 1.4e-5, 1.99e11))
    machines = ClusterSpec(name="two", devices={"slow": slow, "quick": quick}, nodes=nodes, links=links)
    plan = Plan(batch=BatchPlan(global_batch_size=16, num_microbatches=4), mesh={"split": 4})
    steps = [
        predict(model_of("vit"), with_speed(machines, more), plan).step_time_s.value
        for more in (1, 1.01, 1.1, 1.3, 1.5, 2, 3, 5)
    ]
    assert steps == sorted(steps, reverse=True)

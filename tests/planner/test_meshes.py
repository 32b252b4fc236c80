"""The search over all meshes is as good as trying everything, keeps limits, and serves every objective."""

import dataclasses
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_model.examples import cluster, cpu, gpu, linear, link, mlp, plan
from planner.machines import cards, mixed
from tutti.config.cluster import ClusterSpec
from tutti.config.model import ModelSpec
from tutti.config.plan import LayoutRule, PipelinePlan
from tutti.config.vocabulary import AxisName, ScheduleName
from tutti.cost_model import predict
from tutti.cost_model.work_division import block_globs
from tutti.errors import PlanError
from tutti.planner import NoiseScale, PlanRequest, choose, explain, rows, samples_to_quality
from tutti.planner.candidates import limits_of
from tutti.planner.mesh_enumeration import plan_of, shapes, variants
from tutti.planner.plan_request import batches_to_try, steps_to_quality
from tutti.planner.scenarios import with_bandwidth, with_memory, with_speed
from tutti.profile.architectures import architecture


def gpt(layers: int = 4, **sizes: Any) -> ModelSpec:
    given = {"hidden": 512, "heads": 8, "seq_len": 512, "vocab": 1000, **sizes}
    return architecture("gpt", {"layers": layers, **given})


def ask(batch: int = 16, **wishes: Any) -> PlanRequest:
    return PlanRequest(script=plan(batch), **{"scope": "all", **wishes})


def everything(model: ModelSpec, machines: ClusterSpec, request: PlanRequest) -> float:
    """Return the least predicted step time of all plans that are enumerated and fit."""
    limits = limits_of(model, machines, request)
    meshes = shapes(limits, request)
    strategies = variants(limits, meshes, np.arange(len(meshes), dtype=np.intp))
    steps = []
    for row in range(len(strategies)):
        try:
            prediction = predict(model, machines, plan_of(model, request, meshes, strategies, row, "full"))
        except PlanError:
            continue
        if prediction.fits:
            steps.append(prediction.step_time_s.value)
    return min(steps)


@pytest.mark.parametrize("memory", [2**34, 5 * 10**8 + 10**9])
def test_the_search_finds_what_trying_everything_finds(memory: int) -> None:
    model, machines, request = gpt(), cards(1, 4, memory_nbytes=memory), ask(8)
    choice = choose(model, machines, request)
    assert choice.prediction.step_time_s.value <= 1.02 * everything(model, machines, request)
    assert choice.prediction.fits
    assert choice.coverage is not None
    assert choice.coverage.costed < choice.coverage.considered


@pytest.mark.parametrize(
    ("split", "units", "degrees"),
    [
        ("column", 2219, (1, 2, 3, 4)),  # one column more or less makes no difference
        ("column", 9, (1, 3)),  # 5 of 9 is more than a half, 3 of 9 more than a quarter
        ("column", 0, (1, 2, 3, 4)),  # the number of columns is unknown
        ("heads", 12, (1, 2, 3, 4)),
        ("heads", 10, (1, 2)),
    ],
)
def test_degrees_need_not_divide_many_units(split: Any, units: int, degrees: tuple[int, ...]) -> None:
    model = ModelSpec(name="m", modules=(linear("a", 64, 1000, split=split, split_limit=units),))
    assert limits_of(model, cards(1, 4), ask()).splits == degrees


@pytest.mark.parametrize("bandwidth", [1e8, 1e10])
def test_every_schedule_is_tried(bandwidth: float) -> None:
    """The choice is compared with all schedules, written out here.

    Where messages are slow, the schedule wins that has most microbatches in flight in both directions at once.
    """
    model = gpt(8)
    machines = cluster(gpu(), (link("node", 1e-3, bandwidth),), devices_per_node=4)
    steps = {
        name: min(
            predict(
                model,
                machines,
                dataclasses.replace(
                    plan(16, 1, count), mesh={"stage": 4}, pipeline=PipelinePlan(schedule=name, stages_per_rank=chunks)
                ),
            ).step_time_s.value
            for count in (2, 4, 8, 16)
            for chunks in ((1, 2) if name == "interleaved" else (1,))
        )
        for name in get_args(ScheduleName)
    }
    choice = choose(model, machines, ask(16, mesh={"stage": 4}))
    assert choice.prediction.step_time_s.value <= 1.02 * min(steps.values())
    if bandwidth == 1e8:
        assert min(steps, key=lambda name: steps[name]) == "interleaved"
        assert choice.best.pipeline == PipelinePlan(schedule="interleaved", stages_per_rank=1)


def test_what_is_left_is_never_better_by_more_than_the_gap() -> None:
    ticks = iter(range(10**6))
    model, machines, request = gpt(4), cards(2, 2), ask(16)
    choice = choose(model, machines, request, clock=lambda: float(next(ticks)), limit_s=60.0)
    assert choice.coverage is not None
    assert choice.coverage.left > 0
    bound = choice.prediction.step_time_s.value * (1 - choice.coverage.gap)
    assert everything(model, machines, request) >= bound * (1 - 1e-9)
    assert "none of those can be better by more than" in explain(choice)


def test_a_model_too_large_for_one_rank_is_divided() -> None:
    model = gpt(8, hidden=1024)  # about 1.7 GB of state
    machines = cards(1, 4, memory_nbytes=16 * 10**8)
    with pytest.raises(PlanError, match="data parallelism keeps a copy"):
        choose(model, machines, PlanRequest(script=plan(16)))
    choice = choose(model, machines, ask(16, scope="prefer-data"))
    assert any(choice.best.mesh.get(axis, 1) > 1 for axis in ("shard", "split", "stage"))
    assert "Data parallelism alone does not fit" in explain(choice)
    assert choice.request.scope == "prefer-data"


def test_state_goes_to_the_host_where_all_devices_together_have_too_little_memory() -> None:
    model = gpt(16, hidden=1024)  # 3.3 GB of state; two devices with 2.2 GB each, of which libraries take 1 GB
    machines = cards(1, 2, memory_nbytes=22 * 10**8)
    choice = choose(model, machines, ask(16))
    assert choice.best.sharding.offload != "none"
    assert choice.prediction.fits


def test_data_parallelism_stays_where_it_is_preferred_and_fits() -> None:
    model, machines = gpt(), cards(1, 4)
    assert set(choose(model, machines, ask(16, scope="prefer-data")).best.mesh) == {"replicate"}


def test_annotations_are_demands() -> None:
    choice = choose(gpt(), cards(1, 4), ask(16, demanded={"split": 2}))
    assert choice.best.mesh.get("split", 1) == 2 or choice.best.world_size == 1
    assert all(a.plan.mesh.get("split", 1) == 2 or a.plan.world_size == 1 for a in choice.alternatives if a.prediction)
    script = dataclasses.replace(plan(16), pipeline=PipelinePlan(cuts=("blocks.1",)))
    staged = choose(gpt(), cards(1, 4), PlanRequest(script=script, scope="all", demanded={"stage": 2}))
    assert staged.best.mesh.get("stage", 1) == 2 or staged.best.world_size == 1
    assert staged.best.pipeline.cuts == ("blocks.1",)


def test_a_mesh_that_is_asked_for_is_kept_as_it_is_written() -> None:
    mesh = {"split": 2, "replicate": 2}
    choice = choose(gpt(), cards(1, 4), ask(16, mesh=mesh))
    assert list(choice.best.mesh.items()) == list(mesh.items())
    assert "as asked" in explain(choice)


def test_of_a_mesh_that_is_asked_for_it_is_said_what_one_device_would_do() -> None:
    """One device is near the mesh, within the error of predictions; or clearly better; or not allowed by a limit."""

    def said(model: ModelSpec, machines: ClusterSpec, mesh: dict[AxisName, int], **more: Any) -> str:
        choice = choose(model, machines, ask(16, mesh=mesh, **more))
        assert choice.best.mesh == mesh
        return choice.remarks[0]

    near, machines = gpt(), cards(1, 4)
    uncontended = choose(near, machines, ask(16, mesh={"replicate": 1}))
    staged = choose(near, machines, ask(16, mesh={"stage": 4}))
    ratio = uncontended.prediction.step_time_s.value / staged.prediction.step_time_s.value
    step = staged.prediction.step_time_s
    inside = step.low <= uncontended.prediction.step_time_s.value <= step.high
    words = said(near, machines, {"stage": 4})
    assert words.startswith("The mesh is stage 4, as asked; one device would be ")
    assert (f"{ratio:.2f}x slower" if ratio >= 1 else f"{1 / ratio:.2f}x as fast") in words
    assert ("; that is less than the prediction's interval" in words) == inside
    slow = cluster(cpu(), (link("node", 1e-2, 1e6),))
    assert "x as fast" in said(mlp(512, 8), slow, {"stage": 4})
    assert "interval" not in said(mlp(512, 8), slow, {"stage": 4})
    least = choose(near, machines, ask(16, mesh={"shard": 4}, objective="memory")).prediction.memory.total
    many = said(near, machines, {"shard": 4}, memory_nbytes=1.02 * least)
    assert "; one device is not allowed: takes " in many
    assert said(near, machines, {"replicate": 1}) == "The mesh is 1 rank, as asked"


def test_recompute_of_the_script_is_not_changed() -> None:
    script = plan(16, layout=(LayoutRule(modules="blocks.*", recompute=True),))
    choice = choose(gpt(), cards(1, 4), PlanRequest(script=script, scope="all"))
    assert choice.best.layout == script.layout


def test_blocks_are_named_by_a_glob() -> None:
    assert block_globs(gpt()) == ("blocks.*",)
    assert block_globs(mlp()) == ("*",)


def test_objectives_choose_what_has_least_of_them() -> None:
    model = gpt(4)
    machines = cards(1, 4, power_w=300.0, price_per_device_hour=2.0)
    fast = choose(model, machines, ask(64))
    cheap = choose(model, machines, ask(64, objective="cost", train_samples=64_000.0))
    small = choose(model, machines, ask(64, objective="memory"))
    hours = choose(model, machines, ask(64, objective="device-hours"))
    energy = choose(model, machines, ask(64, objective="energy"))
    assert fast.totals is not None
    assert cheap.totals is not None
    assert cheap.totals.steps == 1000
    assert cheap.totals.cost == pytest.approx(2.0 * cheap.totals.device_hours)
    assert cheap.totals.energy_kwh == pytest.approx(0.3 * cheap.totals.device_hours)
    assert cheap.totals.device_hours / 1000 <= 1.02 * fast.totals.device_hours
    assert small.prediction.memory.total <= fast.prediction.memory.total
    assert hours.best.world_size == energy.best.world_size == cheap.best.world_size
    assert "The whole training: " in explain(cheap)


def test_limits_are_kept_and_what_breaks_them_is_said() -> None:
    model = gpt(2)
    machines = cards(1, 4, price_per_device_hour=2.0)
    fast = choose(model, machines, ask(16, train_samples=16_000.0))
    cheap = choose(model, machines, ask(16, train_samples=16_000.0, objective="cost"))
    assert fast.totals is not None
    assert cheap.totals is not None
    budget = 1.001 * (cheap.totals.cost or 0.0)
    assert budget < (fast.totals.cost or 0.0)
    thrifty = choose(model, machines, ask(16, train_samples=16_000.0, budget=budget))
    assert thrifty.totals is not None
    assert (thrifty.totals.cost or 0.0) <= budget
    assert any("not allowed: costs" in row.reason for row in rows(thrifty))
    with pytest.raises(PlanError, match=r"no plan keeps the limits: .*the deadline is"):
        choose(model, machines, ask(16, train_samples=16_000.0, deadline_s=1e-3))
    with pytest.raises(PlanError, match="length of the whole training, which is unknown"):
        choose(model, machines, ask(16, budget=1.0))
    with pytest.raises(PlanError, match="no power_w"):
        choose(model, machines, ask(16, objective="energy"))


def test_time_to_quality_leaves_a_batch_that_grows_as_it_was_stated() -> None:
    noise = NoiseScale(critical_batch=64.0, least_samples=10_000.0)
    request = ask(16, objective="time-to-quality", noise=noise)
    batch = dataclasses.replace(request.script.batch, ramp=((10, 8),))
    script = dataclasses.replace(request.script, batch=batch)
    choice = choose(gpt(), cards(1, 4), dataclasses.replace(request, script=script))
    assert choice.best.batch.global_batch_size == 16
    assert choice.best.batch.ramp == ((10, 8),)


def test_time_to_quality_may_change_the_batch_and_says_so() -> None:
    noise = NoiseScale(critical_batch=64.0, least_samples=10_000.0)
    assert samples_to_quality(64, noise) == 20_000
    assert steps_to_quality(64, noise) * 64 == pytest.approx(20_000)
    assert {8, 16, 32, 64, 128, 256} <= set(batches_to_try(16, noise, 4))
    choice = choose(gpt(2), cards(1, 4), ask(4, objective="time-to-quality", noise=noise))
    assert choice.best.batch.global_batch_size > 4
    assert "this changes what is computed" in explain(choice)
    assert "the number of steps is assumed" in explain(choice)
    with pytest.raises(PlanError, match="needs a noise scale: how many samples a quality takes"):
        ask(4, objective="time-to-quality")


def test_mixed_devices_get_shares_cuts_or_an_order_of_nodes() -> None:
    choice = choose(mlp(4096, 2), mixed(), ask(600))
    equal = dataclasses.replace(choice.best, shares=())
    assert choice.best.shares or choice.nodes or choice.best.world_size <= 2
    assert choice.prediction.step_time_s.value <= predict(mlp(4096, 2), mixed(), equal).step_time_s.value * 1.001


def test_devices_stay_idle_where_they_do_not_help() -> None:
    slow = cluster(gpu(), (link("node", 1e-5, 1e11), link("network", 1e-3, 1e6)), count=8, devices_per_node=2)
    choice = choose(gpt(4), slow, ask(64))
    assert choice.best.world_size == 2
    assert "14 devices of 16 stay idle" in explain(choice)


@settings(deadline=None, max_examples=6)
@given(more=st.floats(1.1, 8), what=st.sampled_from(["memory", "network", "node", "speed"]))
def test_better_machines_never_get_a_slower_plan(more: float, what: Any) -> None:
    """Plans within 2 % of the best count as equal, so a plainer one of them may be chosen."""
    model, machines = gpt(2), cards(2, 2, memory_nbytes=11 * 10**8)
    if what == "memory":
        better = with_memory(machines, 11e8 * more)
    elif what == "speed":
        better = with_speed(machines, more)
    else:
        link_of = machines.link(what)
        assert link_of is not None
        better = with_bandwidth(machines, what, link_of.bandwidth_bytes_per_s * more)
    before, after = (choose(model, hosts, ask(8)).prediction.step_time_s.value for hosts in (machines, better))
    assert after <= 1.02 * before


def test_permuting_equal_nodes_changes_nothing() -> None:
    joined = cards(4, 2)
    node = dataclasses.replace(joined.nodes[0], count=2)
    listed = dataclasses.replace(joined, nodes=(node, dataclasses.replace(node, name="other")))
    first, second = choose(gpt(), joined, ask(32)), choose(gpt(), listed, ask(32))
    assert first.prediction.step_time_s.value == pytest.approx(second.prediction.step_time_s.value, rel=0.02)


def test_a_70_b_model_is_refused_with_what_would_fit() -> None:
    model = architecture("llama3-70b", {"seq_len": 2048})
    with pytest.raises(PlanError) as refused:
        choose(model, cluster(cpu()), ask(64))
    words = str(refused.value)
    assert words.startswith("model 'llama3-70b' does not fit on cluster 'here': it needs 1,129 GB for parameters,")
    assert "the smallest plan of 4 ranks (" in words
    assert "GB a rank (" in words
    assert "or more ranks of this kind" in words
    ranks = int(words.partition("it would fit on ")[2].partition(" or more")[0])
    assert ranks * 16 * 2**30 > 1_129e9
    assert words.count(". ") == 0  # one sentence


def test_what_would_fit_does_fit() -> None:
    layer = linear("a", 2048, 2048)
    modules = tuple(dataclasses.replace(layer, name=f"layers.{index}.a", block=index) for index in range(16))
    model = ModelSpec(name="wide", modules=modules, optimizer="Adam")  # 1.07 GB of state

    def machines(count: int) -> ClusterSpec:
        cluster = cards(count, 1, memory_nbytes=16 * 10**8)
        nodes = tuple(dataclasses.replace(node, memory_nbytes=10**8) for node in cluster.nodes)  # no room for state
        return dataclasses.replace(cluster, nodes=nodes)

    with pytest.raises(PlanError, match="it would fit on") as refused:
        choose(model, machines(1), ask(64))
    ranks = int(str(refused.value).partition("it would fit on ")[2].partition(" or more")[0])
    assert choose(model, machines(ranks), ask(64)).best.world_size <= ranks
    with pytest.raises(PlanError):
        choose(model, machines(ranks - 1), ask(64))

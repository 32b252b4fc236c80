"""Communication over a shared link: buckets beside that of passes, messages between stages, gathers of shards."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_model.examples_mesh import machines, meshed, part, transformer
from tutti.config.cluster import ClusterSpec
from tutti.config.model import ModelSpec
from tutti.config.plan import PipelinePlan, Plan, ShardingPlan, SyncPlan
from tutti.cost_model import cost_constants, predict
from tutti.cost_model.gradient_sync_cost import fused, summed
from tutti.cost_model.overlap import BucketCost, CommCost, exchange
from tutti.cost_model.sharding_cost import _hidden
from tutti.cost_model.step_time import worked_out
from tutti.cost_model.step_timeline import Setting, actions_of, passes_of, replica_work


def done(backward: Sequence[float], bucket_s: Sequence[float], taken: Sequence[float], after: float = 0.0) -> CommCost:
    """Return the cost of communication with one bucket for each module."""
    fused = [BucketCost(nbytes=1.0, last=index) for index in range(len(backward))]
    every = [np.array(taken)] * len(fused)
    return exchange(backward, fused, bucket_s, taken=every, after=[after] * len(fused))


def test_buckets_have_the_link_for_the_rest_of_the_time() -> None:
    # Modules end at 2, 4 and 6 s. During the second and third, the link is free for 1 of 2 seconds. Bucket 1 takes a
    # free second, from 2 to 4; bucket 2 half of one, from 4 to 5; bucket 3 is ready at 6, when the link is free again.
    assert done([2.0, 2.0, 2.0], [1.0, 0.5, 0.25], [0.0, 1.0, 1.0]).exposed_s == 0.25
    # 3 free seconds from 2 s on, of which 2 are before the end
    assert done([2.0, 2.0, 2.0], [3.0, 0.0, 0.0], [0.0, 1.0, 1.0]).exposed_s == 1.0
    assert done([2.0, 2.0, 2.0], [3.0, 0.0, 0.0], [0.0, 0.0, 0.0]).exposed_s == 0.0
    # the link is taken all the time
    assert done([2.0, 2.0, 2.0], [3.0, 0.0, 0.0], [0.0, 2.0, 2.0]).exposed_s == 3.0
    # a message of a quarter of a second is sent after backward, beside the last bucket
    assert done([2.0, 2.0, 2.0], [1.0, 0.5, 1.0], [0.0, 1.0, 1.0], 0.25) == CommCost(total_s=2.75, exposed_s=1.25)
    assert done([2.0, 2.0, 2.0], [1.0, 0.5, 0.25], [0.0, 1.0, 1.0], 9.0).exposed_s == 0.5  # at most twice as long


seconds = st.lists(st.floats(0, 10), min_size=6, max_size=6)


@settings(deadline=None)
@given(
    backward=seconds, bucket_s=seconds, part_=st.lists(st.floats(0, 1), min_size=6, max_size=6), less=st.floats(0, 1)
)
def test_what_takes_the_link_delays_by_no_more_than_it_takes(
    backward: list[float], bucket_s: list[float], part_: list[float], less: float
) -> None:
    taken = [share * lasts for share, lasts in zip(part_, backward, strict=True)]
    uncontended, shared = done(backward, bucket_s, [0.0] * 6), done(backward, bucket_s, taken)
    partly = done(backward, bucket_s, [less * busy_s for busy_s in taken])
    assert uncontended.exposed_s - 1e-9 <= partly.exposed_s <= shared.exposed_s + 1e-9
    assert shared.exposed_s <= min(shared.total_s, uncontended.exposed_s + sum(taken)) + 1e-9
    assert shared.total_s == uncontended.total_s


def mixture() -> ModelSpec:
    """Return layers with all-to-alls of experts, large dense gradients, and enough work to hide some of both."""
    modules = []
    for index in range(4):
        modules += [
            part(f"blocks.{index}.dense", flops=2e9, parameters=2_000_000, output_nbytes=4096.0, block=index),
            part(f"blocks.{index}.experts", flops=2e9, parameters=4_000_000, output_nbytes=4096.0, expert=True,
                 routed_nbytes=2e6, block=index),
        ]  # fmt: skip
    return ModelSpec(name="mixture", modules=tuple(modules), optimizer="Adam", dtype="bfloat16")


def clicks() -> ModelSpec:
    """Return tables, whose gradients are sent at the end of backward, before a large multilayer perceptron."""
    tables = [part(f"tables.{i}", parameters=1000, output_nbytes=1e6, table=True) for i in range(4)]
    tops = [part(f"top.{i}", flops=1e9, parameters=4_000_000, output_nbytes=4096.0) for i in range(4)]
    return ModelSpec(name="clicks", modules=(*tables, *tops), optimizer="SGD", dtype="bfloat16")


LANGUAGE = transformer(8, s=512, h=256)


def with_links_of_their_own(model: ModelSpec, cluster: ClusterSpec, plan: Plan) -> float:
    """Return the exposed communication of one microbatch if buckets had a link of their own."""
    step = worked_out(model, cluster, plan)
    wires = step.setting.wires
    (passes,) = passes_of(step.setting, step.replicas[0]).values()
    sums = summed(wires.columns, wires.division, wires.network, plan, np.ones(len(model.modules), dtype=np.bool_))
    pairs = fused(sums)
    uncontended = exchange(
        (passes.backward_s + passes.waits.backward_s)[::-1].tolist(),
        [bucket for bucket, _ in pairs],
        [reduction.group.all_reduce(bucket.nbytes) for bucket, reduction in pairs],
    )
    loss = wires.network.group(*plan.mesh).all_reduce(cost_constants.LOSS_NBYTES)
    return uncontended.exposed_s + float((passes.waits.forward_s + passes.waits.backward_s).sum()) + loss


@pytest.mark.parametrize(
    ("model", "mesh", "per_host", "shared"),
    [
        (LANGUAGE, {"replicate": 4, "split": 4}, 4, False),  # split within hosts, replicas between them
        (LANGUAGE, {"replicate": 4, "split": 4}, 2, True),  # both between hosts
        (LANGUAGE, {"replicate": 8, "context": 4}, 2, True),
        (mixture(), {"replicate": 2, "expert": 8}, 4, True),
        (mixture(), {"expert": 8}, 8, True),
        (clicks(), {"table": 8}, 4, True),
    ],
)
def test_axes_on_one_link_are_counted_together(model: ModelSpec, mesh: Any, per_host: int, shared: bool) -> None:
    sync = SyncPlan(bucket_nbytes=2**20)
    plan, cluster = meshed(32, 1, mesh, sync=sync), machines(16, per_host, faster=100.0)
    prediction = predict(model, cluster, plan)
    separate_s = with_links_of_their_own(model, cluster, plan)
    assert sum(prediction.phases.values()) == pytest.approx(prediction.step_time_s.value)
    if shared:
        assert prediction.phases["exposed_communication"] > separate_s * 1.001
    else:
        assert prediction.phases["exposed_communication"] == pytest.approx(separate_s)


def messages(mesh: Any, per_host: int, model: ModelSpec = LANGUAGE) -> tuple[Setting, Any, Any]:
    """Return a step's setting, its seconds of messages (boundaries, microbatches), and those of links in forward."""
    plan = meshed(32, 4, mesh, pipeline=PipelinePlan(schedule="1f1b"))
    step = worked_out(model, machines(16, per_host), plan)
    known = passes_of(step.setting, step.replicas[0])
    (passes,) = known.values()
    return (
        step.setting,
        actions_of(step.setting, step.replicas[0], known).messages.arrive_s,
        passes.waits.forward_link_s,
    )


def test_a_message_between_stages_meets_what_its_sender_exchanges() -> None:
    setting, arrive_s, links = messages({"stage": 2, "split": 4}, 2)  # split over two hosts, as stages are
    (link,) = {setting.wires.network.neighbours("stage")[0]}
    uncontended = link.latency_s + setting.stages.sent[0] * 8 / link.bandwidth_bytes_per_s
    first = links[1][setting.stages.stage == 0].sum()
    assert links[0].sum() == 0
    assert first > 0
    assert arrive_s == pytest.approx(uncontended + min(uncontended, first))
    setting, arrive_s, links = messages({"stage": 2, "split": 4}, 4)  # split within hosts: another link
    (link,) = {setting.wires.network.neighbours("stage")[0]}
    assert arrive_s == pytest.approx(link.latency_s + setting.stages.sent[0] * 8 / link.bandwidth_bytes_per_s)
    assert links[1].sum() == 0
    assert links[0].sum() > 0


def test_the_sums_of_a_stage_meet_its_last_message() -> None:
    plan = meshed(32, 4, {"stage": 2, "replicate": 4}, pipeline=PipelinePlan(schedule="1f1b"))
    for per_host, shared in ((2, True), (4, False)):  # replicas over two hosts, or within one
        step = worked_out(LANGUAGE, machines(16, per_host), plan)
        first, second = (work.taken.after for work in replica_work(step.setting, step.replicas[0]))
        assert first.sum() == 0
        assert second[0] == 0 < second[1]
        assert (step.setting.wires.network.group("replicate").tier == "network") == shared


def test_gathers_have_the_link_after_what_the_unit_before_exchanges() -> None:
    # the second unit's gather takes 3 s and starts with the first unit, which computes for 2 s
    assert _hidden([0.0, 3.0, 0.0], [2.0, 2.0, 0.0], [0.0, 0.0, 0.0]) == (3.0, 1.0)
    # the first unit's own communication takes the link for 1 s
    assert _hidden([0.0, 3.0, 0.0], [2.0, 2.0, 0.0], [1.0, 0.0, 0.0]) == (
        3.0,
        2.0,
    )
    assert _hidden([0.0, 1.0, 0.0], [2.0, 2.0, 0.0], [1.0, 0.0, 0.0]) == (1.0, 0.0)
    # the same for a reduction of 1.5 s behind backward, from the end of the first unit on
    assert _hidden([0.0, 0.0], [2.0, 2.0], [0.0, 1.0], [1.5, 0.0]) == (1.5, 0.5)
    assert _hidden([0.0, 0.0], [2.0, 2.0], [0.0, 0.0], [1.5, 0.0]) == (1.5, 0.0)


def test_gathers_of_shards_wait_for_what_units_exchange() -> None:
    model = transformer(8, s=4096, h=512)
    plan = meshed(32, 1, {"shard": 8, "split": 4}, sharding=ShardingPlan(level=3))
    within, between = (predict(model, machines(16, per_host), plan) for per_host in (4, 2))
    whole = {
        where: prediction.phases["exposed_communication"]
        for where, prediction in (("within", within), ("between", between))
    }
    assert whole["between"] > whole["within"]
    assert sum(between.phases.values()) == pytest.approx(between.step_time_s.value)


@st.composite
def meshed_models(draw: st.DrawFn) -> tuple[ModelSpec, dict[str, int], Any]:
    """Draw a model, a mesh of axes that divide it, and a level of sharding that the mesh allows."""
    model, own = draw(
        st.sampled_from([(mixture(), ["expert"]), (clicks(), ["table"]), (LANGUAGE, ["split", "context"])])
    )
    axes = st.sampled_from(["replicate", "stage", "shard", *own])
    mesh = draw(st.dictionaries(axes, st.sampled_from([2, 4]), min_size=2, max_size=3))
    level = 1 if {"stage", "shard"} <= mesh.keys() else draw(st.sampled_from([1, 2, 3]))
    return model, mesh, level


@settings(deadline=None, max_examples=120)
@given(
    meshed_model=meshed_models(),
    per_host=st.sampled_from([2, 4, 8]),
    microbatches=st.sampled_from([1, 4]),
    faster=st.floats(1, 20),
    network=st.floats(1, 20),
)
def test_better_machines_are_never_slower_where_links_are_shared(
    meshed_model: tuple[ModelSpec, dict[str, int], Any], per_host: int, microbatches: int, faster: float, network: float
) -> None:
    model, mesh, level = meshed_model
    plan = meshed(256, microbatches, mesh, sharding=ShardingPlan(level=level))
    hosts = 256 // per_host
    before = predict(model, machines(hosts, per_host), plan)
    for better in (machines(hosts, per_host, faster=faster), machines(hosts, per_host, network=network)):
        after = predict(model, better, plan)
        assert after.step_time_s.value <= before.step_time_s.value * (1 + 1e-9)
        assert sum(after.phases.values()) == pytest.approx(after.step_time_s.value)

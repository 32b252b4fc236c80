"""predict() as a whole: a step worked out by hand, and the laws of every prediction."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_model.examples import cluster, cpu, gpu, linear, link, mlp, plan
from tutti.config import serialization
from tutti.config.cluster import ClusterSpec, Conditions, NodeSpec
from tutti.config.model import ModelSpec
from tutti.config.plan import BatchPlan, Plan, ShardingPlan, SyncPlan
from tutti.config.prediction import Prediction
from tutti.cost_model import predict
from tutti.cost_model.cost_notes import disturbed
from tutti.errors import PlanError

ONE_LAYER = ModelSpec(name="one", modules=(linear("a", 1000, 1000),), optimizer="Adam")


def test_one_device_by_hand() -> None:
    done = predict(ONE_LAYER, cluster(), plan(batch=8))
    # 16 MFLOP forward and 32 backward at 0.85 x 32 GFLOP/s on 4 threads. Each of three products makes three passes over
    # 4 MB of weights at 20 GB/s. Adam moves 3 x 4 + 2 x 8 MB, at 1.6 times that rate.
    assert done.phases["forward"] == pytest.approx(0.5e-3 / 0.85 + 0.6e-3, rel=1e-12)
    assert done.phases["backward"] == pytest.approx(1e-3 / 0.85 + 1.2e-3, rel=1e-12)
    assert done.phases["optimizer"] == pytest.approx(0.875e-3, rel=1e-12)
    assert done.phases["exposed_communication"] == 0
    assert done.phases["other"] == 0  # its operator calls cost nothing
    assert done.step_time_s.value == pytest.approx(1.5e-3 / 0.85 + 2.675e-3, rel=1e-12)
    assert done.throughput_per_s == pytest.approx(8 / done.step_time_s.value, rel=1e-12)
    assert done.model_flops_per_s == pytest.approx(48e6 / done.step_time_s.value, rel=1e-12)
    assert done.sent_nbytes_per_rank == 0


def test_pythons_part_of_a_step_grows_with_the_cost_of_a_call() -> None:
    slow = cluster(cpu(kernel_overhead_s=2e-6))
    assert predict(ONE_LAYER, slow, plan(batch=8)).phases["other"] == pytest.approx(850 * 2e-6, rel=1e-12)
    card = predict(ONE_LAYER, cluster(gpu()), plan(batch=8))
    assert card.phases["other"] == 0.3e-3


def test_two_ranks_by_hand() -> None:
    done = predict(ONE_LAYER, cluster(), plan(batch=8, ranks=2))
    # Each rank computes 4 samples at 0.85 x 16 GFLOP/s (32 shared by two) and 10 GB/s. The ring moves 4 MB at 1 GB/s
    # with 2 x 0.1 ms of latency, and 16 bytes for the loss. Gradients are copied to their bucket.
    assert done.phases["forward"] == pytest.approx(0.5e-3 / 0.85 + 1.2e-3, rel=1e-12)
    assert done.phases["backward"] == pytest.approx(1e-3 / 0.85 + 2.4e-3, rel=1e-12)
    assert done.phases["optimizer"] == pytest.approx(1.75e-3, rel=1e-12)
    assert done.phases["exposed_communication"] == pytest.approx(4.2e-3 + 0.2e-3 + 16e-9 + 0.8e-3, rel=1e-12)
    assert done.step_time_s.value == pytest.approx(1.5e-3 / 0.85 + 10.550016e-3, rel=1e-12)
    assert done.sent_nbytes_per_rank == 4e6
    assert done.devices == 2


@pytest.mark.parametrize(
    ("hosts", "level", "wire_ms", "copies"),
    [
        (1, 1, 4.2 + 2.1, 2 + 2), (1, 2, 2.1 + 2.1, 2 + 2), (1, 3, 2.1 + 2.1, 2 + 2),
        (2, 1, 34 + 17, 2 + 3), (2, 2, 17 + 17, 3 + 3.5), (2, 3, 17 + 17, 3 + 3.5),
    ],
)  # fmt: skip
def test_two_ranks_with_divided_state_by_hand(hosts: int, level: int, wire_ms: float, copies: float) -> None:
    """The layer is one unit outside of any block, so it is gathered once at every level, and nothing hides that.

    A rank updates its half. Its cores read or write the layer's 4 MB `copies` times, at 10 GB/s where two ranks share a
    host.
    """
    halves = dataclasses.replace(plan(batch=8, ranks=2), mesh={"shard": 2}, sharding=ShardingPlan(level=level))
    done = predict(ONE_LAYER, cluster(count=hosts), halves)
    loss_s = 0.2e-3 + 16e-9 if hosts == 1 else 2e-3 + 16 / 1.25e8
    waited_s = wire_ms * 1e-3 + loss_s + copies * 4e6 / (10e9 * hosts)
    assert done.phases["exposed_communication"] == pytest.approx(waited_s, rel=1e-12)
    assert done.phases["optimizer"] == pytest.approx(0.875e-3 / hosts, rel=1e-12)


def test_cards_hide_communication_behind_backward() -> None:
    # Four layers have a bucket each. All collectives but the last, which is the first layer's, fit behind backward.
    model = mlp(1000, 4)
    devices = cluster(gpu(), devices_per_node=2, links=(link(latency_s=0, bandwidth=1e12, ranks=2),))
    done = predict(model, devices, plan(batch=4096, ranks=2, sync=SyncPlan(bucket_nbytes=1000)))
    assert done.phases["exposed_communication"] == pytest.approx((4e6 + 16) / 1e12, rel=1e-9)
    fused = predict(model, devices, plan(batch=4096, ranks=2, sync=SyncPlan(bucket_nbytes=2**30)))
    assert fused.phases["exposed_communication"] == pytest.approx((16e6 + 16) / 1e12, rel=1e-9)


def test_a_prediction_round_trips_and_phases_add_up() -> None:
    done = predict(mlp(), cluster(), plan(ranks=3, microbatches=2))
    assert serialization.loads(Prediction, serialization.dumps(done)) == done
    assert sum(done.phases.values()) == pytest.approx(done.step_time_s.value, rel=1e-12)
    assert done.step_time_s.low < done.step_time_s.value < done.step_time_s.high
    assert done.plan_digest == serialization.digest(plan(ranks=3, microbatches=2))


sizes = st.tuples(st.integers(1, 6), st.integers(1, 3), st.sampled_from([64, 512]))


@settings(deadline=None)
@given(
    size=sizes,
    what=st.sampled_from(["bandwidth", "latency", "memory bandwidth", "rate", "flops", "overhead"]),
    factor=st.floats(1, 100),
    hosts=st.integers(1, 2),
    bucket=st.sampled_from([1000, 10**6, 25 * 2**20]),
)
def test_a_better_machine_is_never_slower_and_more_work_never_faster(
    size: tuple[int, int, int], what: str, factor: float, hosts: int, bucket: int
) -> None:
    ranks, slices, width = size
    intended = plan(48, ranks, slices, sync=SyncPlan(bucket_nbytes=bucket))

    def step(**scale: Any) -> float:
        device = cpu(
            memory_bandwidth_bytes_per_s=20e9 * scale.get("memory bandwidth", 1),
            kernel_overhead_s=1e-5 / scale.get("overhead", 1),
            gemm=tuple(
                dataclasses.replace(rate, flops_per_s=rate.flops_per_s * scale.get("rate", 1)) for rate in cpu().gemm
            ),
        )
        tiers = [
            link(tier, 1e-4 / scale.get("latency", 1), 1e8 * scale.get("bandwidth", 1)) for tier in ("node", "network")
        ]
        model = mlp(width)
        if "flops" in scale:
            model = dataclasses.replace(
                model, modules=tuple(_fewer(module, scale["flops"]) for module in model.modules)
            )
        return predict(model, cluster(device, tuple(tiers), count=hosts), intended).step_time_s.value

    assert step(**{what: factor}) <= step() * (1 + 1e-12)


def _fewer(module: Any, factor: float) -> Any:
    ops = tuple(
        dataclasses.replace(op, flops_forward=op.flops_forward / factor, flops_backward=op.flops_backward / factor)
        for op in module.ops
    )
    return dataclasses.replace(module, ops=ops)


@settings(deadline=None)
@given(ranks=st.integers(1, 8), slices=st.integers(1, 4), batch=st.integers(8, 100))
def test_communication_is_paid_once_a_step_and_never_by_one_rank(ranks: int, slices: int, batch: int) -> None:
    done = predict(mlp(), cluster(), plan(batch, ranks, slices))
    once = predict(mlp(), cluster(), plan(batch, ranks, 1))
    assert done.sent_nbytes_per_rank == once.sent_nbytes_per_rank
    assert done.phases["exposed_communication"] == pytest.approx(once.phases["exposed_communication"])
    if ranks == 1:
        assert done.sent_nbytes_per_rank == done.phases["exposed_communication"] == 0


def test_more_microbatches_never_save_time() -> None:
    for ranks in (1, 2, 4):
        times = [predict(mlp(), cluster(), plan(64, ranks, m)).step_time_s.value for m in (1, 2, 4, 8, 16)]
        assert times == sorted(times)


def test_more_ranks_than_cores_are_slower_and_the_notes_say_so() -> None:
    fitting, crowded = (predict(mlp(2048), cluster(), plan(64, ranks)) for ranks in (4, 8))
    assert crowded.step_time_s.value > fitting.step_time_s.value
    assert any("8 ranks share 4 cores" in note for note in crowded.notes)


def test_the_slowest_rank_sets_the_step() -> None:
    even = predict(mlp(2048), cluster(), plan(64, 2))
    uneven = predict(mlp(2048), cluster(), plan(64, 2, shares=(3.0, 1.0)))
    assert uneven.phases["forward"] > even.phases["forward"]
    assert uneven.memory.activations == pytest.approx(even.memory.activations * 1.5)


def two_kinds() -> ClusterSpec:
    quick = gpu(name="quick", memory_nbytes=32 * 2**30, peak_flops_per_s={"float32": 30e12})
    return ClusterSpec(
        name="mixed",
        devices={"slow": gpu(name="slow"), "quick": quick},
        nodes=(
            NodeSpec(name="a", device="slow", memory_nbytes=2**36),
            NodeSpec(name="b", device="quick", memory_nbytes=2**36),
        ),
        links=(link("network", 1e-5, 1e10),),
    )


def test_shares_by_speed_help_unequal_devices() -> None:
    model = mlp(4096, 4)
    equal = predict(model, two_kinds(), plan(4096, 2))
    by_speed = predict(model, two_kinds(), plan(4096, 2, shares=(1.0, 3.0)))
    assert by_speed.step_time_s.value < 0.7 * equal.step_time_s.value


def test_intervals_widen_with_weaker_evidence() -> None:
    measured = predict(mlp(), cluster(), plan()).step_time_s
    published = predict(mlp(), cluster(gpu()), plan()).step_time_s
    assert measured.high / measured.value < published.high / published.value
    assert any("published" in note for note in predict(mlp(), cluster(gpu()), plan()).notes)


def test_a_cluster_measured_under_load_is_told() -> None:
    quiet, busy = (
        Conditions(measured_utc="", cores_granted=4, load_at_start=load, load_at_end=0.0, versions={})
        for load in (0.5, 9.0)
    )
    assert not disturbed(dataclasses.replace(cluster(), conditions=quiet))
    done, sure = (predict(mlp(), dataclasses.replace(cluster(), conditions=when), plan()) for when in (busy, quiet))
    assert any("under a load of 9.0 on 4 cores" in note for note in done.notes)
    assert done.step_time_s.value == sure.step_time_s.value
    assert done.step_time_s.high > sure.step_time_s.high


def test_tokens_are_counted_as_tokens() -> None:
    model = mlp(tokens_per_sample=128)
    intended = Plan(batch=BatchPlan(global_batch_size=8192, unit="tokens"))
    done = predict(model, cluster(), intended)
    assert done.throughput_per_s == pytest.approx(8192 / done.step_time_s.value)
    assert done.phases == predict(model, cluster(), plan(64)).phases


def test_more_microbatches_than_samples_are_refused() -> None:
    intended = Plan(batch=BatchPlan(global_batch_size=256, unit="tokens", num_microbatches=4))
    with pytest.raises(PlanError, match="exceeds the 2 samples"):
        predict(mlp(tokens_per_sample=128), cluster(), intended)


def test_predict_is_pure() -> None:
    first = predict(mlp(), cluster(), plan(ranks=2))
    predict(mlp(), cluster(gpu()), plan())
    assert predict(mlp(), cluster(), plan(ranks=2)) == first


def test_a_further_microbatch_adds_its_gradients_to_those_before() -> None:
    """Gradients are read, added to and written: three passes over memory at 20 GB/s, beside the passes themselves."""
    model = mlp()
    once, twice = (predict(model, cluster(), plan(batch, 1, slices)) for batch, slices in ((8, 1), (16, 2)))
    added_s = twice.phases["backward"] - 2 * once.phases["backward"]
    gradients = sum(module.gradient_nbytes for module in model.modules)
    assert added_s == pytest.approx(3 * gradients / 20e9, rel=1e-9)

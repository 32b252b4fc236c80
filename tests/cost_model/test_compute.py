"""The roofline of a rank: rates by size, threads and neighbours; laws of monotony."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_model.examples import cluster, cpu, gpu, mlp
from tutti.config.cluster import ConvolutionRate, DeviceSpec, GemmRate, ImageRate, MemoryRate, VectorRate, WeightRate
from tutti.config.model import ModelSpec, ModuleSpec, OpCost, OpKind
from tutti.config.plan import BatchPlan, Plan
from tutti.cost_model import compute_cost, cost_constants, predict
from tutti.cost_model.compute_cost import op_table
from tutti.cost_model.rank_placement import HostGroup, place_ranks
from tutti.cost_model.worker_speed import Curve, WeightPassTime, Worker, worker_at
from tutti.errors import PlanError

FREE = WeightPassTime(forward_s=0.0, backward_s=0.0)


def host_group(device: DeviceSpec, ranks: int) -> HostGroup:
    return place_ranks(cluster(device), ranks)[0]


def product_s(who: Worker, n: int) -> float:
    return float(who.matrix.time(np.array([2.0 * n**3]))[0])


def rates(**by_n: float) -> tuple[GemmRate, ...]:
    return tuple(GemmRate(dtype="float32", n=int(n[1:]), flops_per_s=rate) for n, rate in by_n.items())


def test_measured_sizes_are_met_and_those_between_lie_between() -> None:
    who = worker_at(host_group(cpu(gemm=rates(n100=1e9, n1000=8e9)), 1), "float32", "full")
    assert product_s(who, 100) == pytest.approx(2e6 / 1e9, rel=1e-12)
    assert product_s(who, 1000) == pytest.approx(2e9 / 8e9, rel=1e-12)
    assert 1e9 < 2 * 300**3 / product_s(who, 300) < 8e9
    assert product_s(who, 10) == pytest.approx(2e3 / 1e9, rel=1e-12)
    assert product_s(who, 4000) == pytest.approx(128e9 / 8e9, rel=1e-12)


@settings(deadline=None)
@given(
    points=st.lists(st.tuples(st.integers(8, 4096), st.floats(1e8, 1e12)), min_size=1, max_size=6),
    flops=st.floats(1, 1e14),
    factor=st.floats(1, 1e3),
)
def test_more_flops_never_take_less_time_whatever_was_measured(
    points: list[tuple[int, float]], flops: float, factor: float
) -> None:
    by_n = dict(points)
    device = cpu(gemm=tuple(GemmRate(dtype="float32", n=n, flops_per_s=rate) for n, rate in by_n.items()))
    curve = worker_at(host_group(device, 1), "float32", "full").matrix
    few, many = curve.time(np.array([flops, flops * factor]))
    assert many >= few * (1 - 1e-12)


def test_threads_between_and_beyond_the_measured_ones() -> None:
    one, two, three, four = (worker_at(host_group(cpu(cores=c), 1), "float32", "full") for c in (1, 2, 3, 4))
    assert [round(2e9 / product_s(who, 1000) / 1e9, 9) for who in (one, two, three, four)] == [10, 20, 26, 32]
    eight = worker_at(host_group(cpu(cores=8), 1), "float32", "full")
    assert product_s(eight, 1000) == product_s(four, 1000)
    half = worker_at(host_group(cpu(gemm=cpu().gemm[1:2], cores=1), 1), "float32", "full")
    assert product_s(half, 1000) == pytest.approx(2e9 / 10e9)


def test_ranks_at_once_do_not_beat_all_threads_together() -> None:
    # Two ranks of two threads: 20 GFLOP/s alone, 32 for all four threads, so 16 each.
    assert 2e9 / product_s(worker_at(host_group(cpu(), 2), "float32", "full"), 1000) == pytest.approx(16e9)


def test_rates_measured_at_once_are_preferred() -> None:
    at_once = GemmRate(dtype="float32", n=1000, threads=2, concurrent=2, flops_per_s=14e9)
    device = cpu(
        gemm_concurrent=(at_once,),
        memory_rates=(
            MemoryRate(threads=4, bytes_per_s=20e9),
            MemoryRate(threads=2, bytes_per_s=9e9, concurrent=2),
            MemoryRate(threads=1, bytes_per_s=3e9),
        ),
    )
    who = worker_at(host_group(device, 2), "float32", "full")
    assert 2e9 / product_s(who, 1000) == pytest.approx(14e9)
    assert who.bandwidth_bytes_per_s == 9e9
    # one thread alone cannot do more
    assert worker_at(host_group(device, 4), "float32", "full").bandwidth_bytes_per_s == 3e9
    assert worker_at(host_group(device, 1), "float32", "full").bandwidth_bytes_per_s == 20e9


def test_more_ranks_than_cores_are_slower_than_with_a_core_each() -> None:
    crowded, full = (worker_at(host_group(cpu(), ranks), "float32", "full") for ranks in (8, 4))
    assert crowded.slowdown == pytest.approx(2 * cost_constants.OVERSUBSCRIBED)
    assert full.slowdown == 1
    assert crowded.bandwidth_bytes_per_s / crowded.slowdown < full.bandwidth_bytes_per_s


def test_hosts_that_take_turns_on_cores_pay_for_switching_and_nothing_twice() -> None:
    """A lab may have more hosts than its machine has cores. Their measured rates already include their turns."""
    for ranks, times in ((4, 1), (8, 2)):
        alone = host_group(cpu(), ranks)
        taking = dataclasses.replace(alone, node=dataclasses.replace(alone.node, turns=2.0))
        assert alone.slowdown == times * (cost_constants.OVERSUBSCRIBED if times > 1 else 1)
        assert taking.slowdown == times * cost_constants.OVERSUBSCRIBED


def test_data_sheet_rates_are_derated_and_say_so() -> None:
    who = worker_at(host_group(gpu(), 1), "float32", "bfloat16")
    large = 2.0 * 16384**3
    reached = large / float(who.matrix.time(np.array([large]))[0])
    assert reached == pytest.approx(cost_constants.DATA_SHEET_EFFICIENCY * 100e12, rel=0.01)
    assert who.evidence == "published"
    assert any("published bfloat16 peak" in sentence for sentence in who.assumptions)
    small = 2.0 * 256**3
    assert small / float(who.matrix.time(np.array([small]))[0]) < 0.1 * reached


def test_precision_without_a_rate_is_refused_with_what_there_is() -> None:
    with pytest.raises(PlanError, match=r"no rate for bfloat16 \(it has float32\)"):
        worker_at(host_group(cpu(), 1), "float32", "bfloat16")
    with pytest.raises(PlanError, match="tf32 needs a float32 model"):
        worker_at(host_group(gpu(), 1), "float64", "tf32")


def test_float64_on_a_cpu_takes_twice_as_long_as_float32_and_says_so() -> None:
    single, double = (worker_at(host_group(cpu(), 1), dtype, "full") for dtype in ("float32", "float64"))
    assert product_s(double, 1000) == pytest.approx(2 * product_s(single, 1000))
    assert double.evidence == "assumed"
    assert any("float64 take 2 times as long" in sentence for sentence in double.assumptions)
    measured = GemmRate(dtype="float64", n=1000, threads=4, flops_per_s=11e9)
    known = worker_at(host_group(cpu(gemm=(*cpu().gemm, measured)), 1), "float64", "full")
    assert 2e9 / product_s(known, 1000) == pytest.approx(11e9)
    with pytest.raises(PlanError, match="no rate for float64"):
        worker_at(host_group(dataclasses.replace(gpu(), peak_flops_per_s={"float32": 10e12}), 1), "float64", "full")


def test_bfloat16_uses_its_own_measured_rates() -> None:
    slow = GemmRate(dtype="bfloat16", n=1000, threads=4, flops_per_s=2e9)
    who = worker_at(host_group(cpu(gemm=(*cpu().gemm, slow)), 1), "float32", "bfloat16")
    assert 2e9 / product_s(who, 1000) == pytest.approx(2e9)
    assert who.vector_rate == pytest.approx(32e9)


def test_roofline_by_hand() -> None:
    ops = (
        OpCost(kind="gemm", flops_forward=64e6, flops_backward=128e6, nbytes_forward=1e6, nbytes_backward=2e6),
        OpCost(kind="norm", flops_forward=1e3, flops_backward=2e3, nbytes_forward=4e6, nbytes_backward=8e6, calls=2),
    )
    model = ModelSpec(name="m", modules=(ModuleSpec(name="a", kind="A", ops=ops),))
    who = worker_at(host_group(cpu(kernel_overhead_s=1e-5), 1), "float32", "full")
    ahead = compute_cost.forward(op_table(model), who, 10, 1)
    # gemm: 640 MFLOP at 0.85 x 32 GFLOP/s + 1 call; norm: 40 MB at 20 GB/s = 2 ms + 2 calls; a call costs 5 x 10 us.
    gemm_s = 20e-3 / 0.85
    assert ahead.seconds[0] == pytest.approx(gemm_s + 2e-3 + 3 * 5e-5, rel=1e-12)
    assert (ahead.compute_s, ahead.memory_s) == (pytest.approx(gemm_s), pytest.approx(2e-3))
    back = compute_cost.backward(op_table(model), who, 10, 1)
    assert back.seconds[0] == pytest.approx(2 * gemm_s + 4e-3 + 6 * 5e-5, rel=1e-12)


def thin(forward: float, backward: float, **changes: int) -> WeightRate:
    """Return a rate of passes over weights whose two gradients take `backward` bytes per second on average."""
    gradients = {"input_gradient": backward / 0.5, "weight_gradient": backward / 1.5}
    return WeightRate(**{"dtype": "float32", "threads": 4, "forward": forward, **gradients, **changes})


def products(first: bool) -> OpCost:
    """Return the products of a linear layer with 1 MB of weights. In a first layer, no input needs a gradient."""
    flops = 1e6 if first else 2e6
    costs = {"flops_forward": 1e6, "flops_backward": flops, "nbytes_forward": 0.0, "nbytes_backward": 0.0}
    return OpCost(kind="gemm", weight_nbytes=1e6, **costs)


@pytest.mark.parametrize(("first", "backward_ms"), [(True, 1.0), (False, 2.0)])
def test_products_go_over_their_weights_besides(first: bool, backward_ms: float) -> None:
    model = ModelSpec(name="m", modules=(ModuleSpec(name="a", kind="A", ops=(products(first),)),))
    who = worker_at(host_group(cpu(weight_rates=(thin(2e9, 1e9),)), 1), "float32", "full")
    ahead, back = (
        cost_of_pass(op_table(model), who, 3, 1) for cost_of_pass in (compute_cost.forward, compute_cost.backward)
    )
    flops_s = 3e6 / (0.85 * 32e9)
    assert ahead.seconds[0] == pytest.approx(flops_s + 0.5e-3, rel=1e-12)
    assert back.seconds[0] == pytest.approx(flops_s * (1 if first else 2) + backward_ms * 1e-3, rel=1e-12)
    assert (ahead.compute_s, ahead.memory_s) == (pytest.approx(flops_s), pytest.approx(0.5e-3))


def test_how_weights_are_gone_over_is_taken_from_what_is_most_alike() -> None:
    beside = thin(1e9, 1e9, threads=2, concurrent=2)
    device = cpu(weight_rates=(thin(4e9, 4e9), thin(2e9, 2e9, threads=2), beside))
    assert worker_at(host_group(device, 1), "float32", "full").weights.forward_s == pytest.approx(1 / 4e9)
    assert worker_at(host_group(device, 2), "float32", "full").weights.forward_s == pytest.approx(1 / 1e9)
    uncontended = worker_at(host_group(cpu(weight_rates=(thin(2e9, 2e9, threads=2),)), 2), "float32", "full")
    assert uncontended.weights.forward_s == pytest.approx(1 / 2e9)
    unknown = worker_at(host_group(device, 4), "float32", "full")
    assert unknown.weights.forward_s == cost_constants.WEIGHT_PASSES["cpu"] / unknown.bandwidth_bytes_per_s
    assert any("goes over its weights 3 times" in sentence for sentence in unknown.assumptions)
    assert worker_at(host_group(gpu(), 1), "float32", "full").weights.forward_s == 0


def test_convolutions_go_over_their_weights_at_their_own_pace_where_it_was_measured() -> None:
    convolution = dataclasses.replace(products(first=False), kind="conv")
    model = ModelSpec(name="m", modules=(ModuleSpec(name="a", kind="A", ops=(convolution,)),))
    gemm, conv = thin(8e9, 8e9), dataclasses.replace(thin(2e9, 1e9), kind="conv")
    alike, measured = (
        worker_at(host_group(cpu(weight_rates=rates), 1), "float32", "full") for rates in ((gemm,), (gemm, conv))
    )
    assert alike.convolution_weights == alike.weights == measured.weights
    ahead, back = (
        [way(op_table(model), who, 3, 1).memory_s for who in (alike, measured)]
        for way in (compute_cost.forward, compute_cost.backward)
    )
    assert ahead == pytest.approx([1e6 / 8e9, 1e6 / 2e9])
    assert back == pytest.approx([2 * 1e6 / 8e9, 2 * 1e6 / 1e9])


def test_convolutions_have_the_rate_of_their_size() -> None:
    """1 MB of weights is halfway between 0.01 and 100 MB on a logarithmic scale.

    Beyond the points, the nearest one counts. Operators other than convolutions have no such rate.
    """
    sizes = tuple(ConvolutionRate(weight_nbytes=n, relative=part) for n, part in ((100e6, 1.25), (1e4, 0.75)))
    device = cpu(efficiency={"conv": 0.5, "gemm": 0.85}, convolution_rates=sizes)
    who = worker_at(host_group(device, 1), "float32", "full")

    def compute_s(kind: OpKind, nbytes: float) -> float:
        op = dataclasses.replace(products(first=False), kind=kind, weight_nbytes=nbytes)
        model = ModelSpec(name="m", modules=(ModuleSpec(name="a", kind="A", ops=(op,)),))
        return compute_cost.forward(op_table(model), dataclasses.replace(who, weights=FREE, convolution_weights=FREE),
                               3000, 1).compute_s  # fmt: skip

    uncontended = 3e9 / 32e9
    times_s = [compute_s("conv", nbytes) for nbytes in (1e6, 1e4, 10.0, 100e6, 200e6)]
    assert times_s == pytest.approx([uncontended / (0.5 * part) for part in (1.0, 0.75, 0.75, 1.25, 1.25)])
    assert compute_s("gemm", 1e4) == pytest.approx(uncontended / 0.85)


def test_convolutions_on_cards_have_the_rate_of_their_dtype_and_memory_format() -> None:
    """The dtype counts before the format; a dtype that was not measured has the rate of float32."""
    rates_here = tuple(
        ConvolutionRate(weight_nbytes=10**6, relative=part, dtype=dtype, channels_last=last)
        for dtype, last, part in (
            ("float32", False, 1.0), ("float32", True, 0.8), ("bfloat16", False, 0.5), ("bfloat16", True, 0.9),
            ("tf32", False, 0.7),
        )
    )  # fmt: skip
    place = host_group(gpu(efficiency={"conv": 0.5}, convolution_rates=rates_here), 1)
    found = {
        (precision, last): float(
            worker_at(place, "float32", precision, channels_last=last).convolutions.at(np.array([1e6]))[0]
        )
        for precision in ("full", "bfloat16", "tf32", "float16")
        for last in (False, True)
    }
    assert found == {
        ("full", False): 1.0, ("full", True): 0.8, ("bfloat16", False): 0.5, ("bfloat16", True): 0.9,
        ("tf32", False): 0.7, ("tf32", True): 0.7, ("float16", False): 1.0, ("float16", True): 0.8,
    }  # fmt: skip


def test_a_step_of_a_card_takes_at_least_the_launches_of_its_kernels() -> None:
    """Forward, two kernels in backward for each of them, and the update."""
    model, launch_s = mlp(64, 3), 1e-1
    device = gpu(launch_s=launch_s)
    plan_here = Plan(batch=BatchPlan(global_batch_size=8), mesh={"replicate": 1})
    slow = predict(model, cluster(device), plan_here)
    ops = [op for module in model.modules for op in module.ops]
    ahead = sum(op.calls for op in ops)
    back = sum(2 * op.calls for op in ops if op.flops_backward or op.nbytes_backward)
    assert (
        slow.phases["forward"] >= ahead * launch_s > 100 * predict(model, cluster(gpu()), plan_here).phases["forward"]
    )
    assert slow.phases["backward"] >= back * launch_s
    assert slow.phases["optimizer"] >= launch_s
    on_host = predict(model, cluster(cpu(launch_s=launch_s)), plan_here).step_time_s
    assert on_host == predict(model, cluster(cpu()), plan_here).step_time_s


def test_convolutions_have_the_rate_of_their_images() -> None:
    """There are 1000 weights and 2000 FLOPs per pixel; halfway between images of 4 x 4 and 16 x 16 is 8 x 8."""
    images = tuple(ImageRate(pixels=n, relative=part) for n, part in ((256, 1.0), (16, 1.25)))
    who = worker_at(host_group(cpu(efficiency={"conv": 0.5}, image_rates=images), 1), "float32", "full")
    who = dataclasses.replace(who, weights=FREE, convolution_weights=FREE)

    def compute_s(pixels: int, kind: OpKind = "conv") -> float:
        op = dataclasses.replace(products(first=False), kind=kind, weight_nbytes=4000, flops_forward=2000.0 * pixels)
        model = ModelSpec(name="m", modules=(ModuleSpec(name="a", kind="A", ops=(op,)),))
        return compute_cost.forward(op_table(model), who, 6000 * 256 // pixels, 1).compute_s

    uncontended = 6000 * 256 * 2000 / 32e9
    times_s = [compute_s(pixels) for pixels in (16, 64, 256, 4, 1024)]
    assert times_s == pytest.approx([uncontended / (0.5 * part) for part in (1.25, 1.125, 1.0, 1.25, 1.0)])
    assert compute_s(16, "gemm") == pytest.approx(compute_s(256, "gemm"))


def test_elements_of_slow_kinds_have_rates_of_each_pass() -> None:
    """The rates are for 3 samples of a million elements at 10 GFLOP/s.

    Measured rates come first, then `efficiency`, which is for both passes, then what is assumed of a CPU. A GPU is
    assumed to be equally fast at all kinds.
    """
    op = dataclasses.replace(products(first=False), kind="pool", flops_backward=1e6, flops_forward=1e6)
    model = ModelSpec(name="m", modules=(ModuleSpec(name="a", kind="A", ops=(op,)),))

    def rates(device: DeviceSpec) -> list[float]:
        who = dataclasses.replace(worker_at(host_group(device, 1), "float32", "full"), bandwidth_bytes_per_s=1e18)
        return [
            3e6 / way(op_table(model), who, 3, 1).compute_s / who.vector_rate
            for way in (compute_cost.forward, compute_cost.backward)
        ]

    measured = (VectorRate(kind="pool", forward=0.002, backward=0.03), VectorRate(kind="norm", forward=9, backward=9))
    assert rates(cpu(vector_rates=measured, efficiency={"pool": 0.5})) == pytest.approx([0.002, 0.03])
    assert rates(cpu(efficiency={"pool": 0.5})) == pytest.approx([0.5, 0.5])
    assert rates(cpu()) == pytest.approx(cost_constants.CPU_VECTORS["pool"])
    assert rates(gpu()) == pytest.approx([cost_constants.EFFICIENCY["pool"]] * 2)


@pytest.mark.parametrize("changes", [{}, {"gemm": (), "peak_flops_per_s": {"float32": 40e9}}])
def test_random_numbers_are_drawn_by_one_thread_of_several(changes: dict[str, Any]) -> None:
    def seconds(kind: OpKind, threads: int) -> float:
        op = dataclasses.replace(products(first=False), kind=kind, flops_forward=1e6)
        model = ModelSpec(name="m", modules=(ModuleSpec(name="a", kind="A", ops=(op,)),))
        rank = dataclasses.replace(host_group(cpu(**changes), 1), threads=threads)
        who = dataclasses.replace(worker_at(rank, "float32", "full"), bandwidth_bytes_per_s=1e18)
        return compute_cost.forward(op_table(model), who, 3, 1).compute_s

    assert seconds("random", 1) == pytest.approx(seconds("random", 4), rel=1e-12)
    assert seconds("norm", 4) < 0.5 * seconds("norm", 1)


def test_no_samples_no_time() -> None:
    model = mlp()
    who = worker_at(host_group(cpu(), 1), "float32", "full")
    assert not compute_cost.forward(op_table(model), who, 0, len(model.modules)).seconds.any()


def test_curve_of_no_flops_takes_no_time() -> None:
    curve = Curve(flops=np.array([1.0]), seconds=np.array([1.0]), ramp_s=5.0)
    assert curve.time(np.array([0.0, 2.0])).tolist() == [0.0, 7.0]


@settings(deadline=None)
@given(
    field=st.sampled_from([f.name for f in dataclasses.fields(OpCost) if f.name != "kind"]), factor=st.integers(1, 9)
)
def test_more_of_any_cost_never_takes_less_time(field: str, factor: int) -> None:
    cost = OpCost(
        kind="conv",
        flops_forward=1e7,
        flops_backward=2e7,
        nbytes_forward=1e7,
        nbytes_backward=2e7,
        weight_nbytes=1e6,
        calls=3,
    )
    more = dataclasses.replace(cost, **{field: getattr(cost, field) * factor})
    times = []
    for op in (cost, more):
        table = op_table(ModelSpec(name="m", modules=(ModuleSpec(name="a", kind="A", ops=(op,)),)))
        who = worker_at(host_group(cpu(kernel_overhead_s=1e-5), 1), "float32", "full")
        times.append(
            compute_cost.forward(table, who, 4, 1).seconds[0] + compute_cost.backward(table, who, 4, 1).seconds[0]
        )
    assert times[1] >= times[0]

"""Parts of layers by speed: what the planner proposes where devices of a split group are unequal, and its bounds."""

import contextlib
import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_model.examples import cpu, gpu, linear, link, plan
from planner.machines import cards
from planner.test_mixed import two
from tutti.config.cluster import ClusterSpec, DeviceSpec, GemmRate, NodeSpec
from tutti.config.model import ModelSpec
from tutti.config.plan import Plan
from tutti.config.vocabulary import AxisName
from tutti.cost_model import predict
from tutti.cost_model.best_case import BestCase
from tutti.cost_model.best_case_memory import BestCaseMemory
from tutti.cost_model.plan_bounds import shape_bounds, variant_bounds
from tutti.errors import PlanError
from tutti.planner import Choice, PlanRequest, choose
from tutti.planner.candidates import limits_of
from tutti.planner.exploration import Explorer
from tutti.planner.mesh_enumeration import plan_of, shapes, variants
from tutti.planner.mixed_hardware import MicrobatchTime, improved, parts_finishing_together
from tutti.planner.plan_description import plan_words
from tutti.planner.plan_explanation import difference, explain
from tutti.profile.architectures import architecture

GPT = {"layers": 6, "hidden": 1024, "heads": 16, "seq_len": 512, "vocab": 1000}


def model(**sizes: Any) -> ModelSpec:
    return architecture("gpt", {**GPT, **sizes})


def faster(times: float, **changes: Any) -> ClusterSpec:
    return two({}, {"peak_flops_per_s": {"float32": times * 10e12}, **changes})


def chosen(machines: ClusterSpec, mesh: dict[AxisName, int], batch: int = 8) -> Choice:
    request = PlanRequest(script=plan(batch), scope="all", mesh=mesh, keep_microbatches=True)
    return choose(model(), machines, request)


def every_way(machines: ClusterSpec, batch: int = 8) -> dict[int, float]:
    """Return the step time for each number of heads on the first of two ranks, where the plan fits."""
    step_s_by_heads = {}
    for first in range(1, GPT["heads"]):
        shares = (float(first), float(GPT["heads"] - first))
        done = predict(model(), machines, dataclasses.replace(plan(batch), mesh={"split": 2}, split_shares=shares))
        if done.fits:
            step_s_by_heads[first] = done.step_time_s.value
    return step_s_by_heads


@pytest.mark.parametrize("times", [1.5, 3.0, 7.0])
def test_parts_by_speed_gain_what_the_best_parts_would(times: float) -> None:
    machines = faster(times)
    choice = chosen(machines, {"split": 2})
    every, even = every_way(machines), predict(model(), machines, dataclasses.replace(plan(8), mesh={"split": 2}))
    assert choice.best.split_weights
    seated = machines if not choice.nodes else dataclasses.replace(machines, nodes=machines.nodes[::-1])
    assert choice.prediction == predict(model(), seated, choice.best)
    gained, most = (
        even.step_time_s.value - value for value in (choice.prediction.step_time_s.value, min(every.values()))
    )
    assert gained >= 0.85 * most > 0
    assert any("Parts of layers along split follow the devices' speeds" in remark for remark in choice.remarks)
    assert "on the fullest rank" in explain(choice)
    assert any("equal parts of layers on unequal devices" in other.reason for other in choice.alternatives)


def test_equal_devices_get_equal_parts() -> None:
    choice = chosen(cards(2, 1), {"split": 2})
    assert choice.best.split_shares == ()


def test_parts_end_where_memory_ends() -> None:
    """The fast card has no memory for half of the model. The proposed part fits it; a part by speed alone would not."""
    start, free = dataclasses.replace(plan(8), mesh={"split": 2}), faster(3.0)
    whole = predict(model(), free, start)
    room = int(whole.memory.reserve + 0.75 * (whole.memory.total - whole.memory.reserve))
    tight = faster(3.0, memory_nbytes=room)
    by_speed, clipped = (
        improved(BestCaseMemory(BestCase(model(), machines, "full"), plan(8)), machines, start, whole, 8)[-1]
        for machines in (free, tight)
    )
    assert by_speed.split_shares[0] < by_speed.split_shares[1]
    assert not predict(model(), tight, by_speed).fits
    assert predict(model(), tight, clipped).fits
    every = every_way(tight)
    assert GPT["heads"] // 2 not in every
    assert predict(model(), tight, clipped).step_time_s.value <= 1.15 * min(every.values())


def test_parts_beside_replicas_and_stages() -> None:
    """Every split group has hosts of both kinds."""
    machines = faster(3.0)
    pairs = dataclasses.replace(machines, nodes=tuple(
        dataclasses.replace(machines.nodes[index % 2], name=f"n{index}") for index in range(4)
    ))  # fmt: skip
    for axis in ("replicate", "stage"):
        mesh: dict[AxisName, int] = {axis: 2, "split": 2}
        start = dataclasses.replace(plan(8, microbatches=2), mesh=mesh)
        done = predict(model(), pairs, start)
        best_memory = BestCaseMemory(BestCase(model(), pairs, "full"), plan(8))
        better = [
            predict(model(), pairs, proposal)
            for proposal in improved(best_memory, pairs, start, done, 8)
            if proposal.split_shares
        ]
        assert min(prediction.step_time_s.value for prediction in better) < 0.8 * done.step_time_s.value


def alternating(slow: DeviceSpec, quick: DeviceSpec) -> ClusterSpec:
    """Return four hosts of one device each, slow and fast ones in turn."""
    nodes = tuple(
        NodeSpec(name=f"n{index}", device=("slow", "quick")[index % 2], memory_nbytes=2**36) for index in range(4)
    )
    links = (link("node", 1e-7, 1e12), link("network", 1e-7, 1e12))
    return ClusterSpec(name="four", devices={"slow": slow, "quick": quick}, nodes=nodes, links=links)


def quicker(times: float) -> DeviceSpec:
    """Return a card that is `times` as fast in every respect, and has much more memory than the other cards."""
    card = gpu()
    return dataclasses.replace(
        card,
        peak_flops_per_s={name: times * rate for name, rate in card.peak_flops_per_s.items()},
        memory_bandwidth_bytes_per_s=times * card.memory_bandwidth_bytes_per_s,
        kernel_overhead_s=card.kernel_overhead_s / times,
        memory_nbytes=2**38,
        name="quick",
    )


def core(times: float) -> DeviceSpec:
    """Return a core on which small products are slow."""
    rates = {20: 1e8, 100: 1e9, 400: 10e9}
    gemm = tuple(GemmRate(dtype="float32", n=n, threads=1, flops_per_s=times * rate) for n, rate in rates.items())
    return cpu(name=f"{times:g}", cores=1, gemm=gemm, memory_bandwidth_bytes_per_s=times * 1e12)


def columns() -> ModelSpec:
    """Return layers that are divided by their outputs, and nothing else."""
    layers = tuple(linear(f"layers.{index}", 400, 400, split="column") for index in range(4))
    return ModelSpec(name="columns", modules=layers, optimizer="SGD")


BOUNDED = {
    "cards, 3 times": (model(heads=8, hidden=768, vocab=999), alternating(gpu(), quicker(3.0)), 3.0),
    "cards, 1.4 times": (model(heads=12, hidden=768, vocab=999), alternating(gpu(), quicker(1.4)), 1.4),
    "cores, 9 times": (columns(), alternating(core(1.0), core(9.0)), 9.0),
}


@pytest.mark.parametrize("case", BOUNDED)
def test_bounds_are_not_above_plans_of_unequal_parts(case: str) -> None:
    spec, machines, times = BOUNDED[case]
    request, batch = PlanRequest(script=plan(96), scope="all"), 96
    limits = limits_of(spec, machines, request)
    meshes, best_case = shapes(limits, request), BestCase(spec, machines, "full")
    best_memory, checked = BestCaseMemory(best_case, plan(batch)), 0
    (branch,) = Explorer(spec, (machines,), dataclasses.replace(request, objective="memory"), ["full"]).branches
    strategies = variants(limits, meshes, np.flatnonzero(meshes.split > 1))
    bounds, (coarse_s, _) = (
        variant_bounds(best_memory, meshes, strategies, batch),
        shape_bounds(best_case, meshes, batch),
    )
    for row in np.random.default_rng(4).permutation(len(strategies))[:40].tolist():
        intended = plan_of(spec, request, meshes, strategies, row, "full")
        for share in (times, times**2, 1.0001, 1 / times) if intended.context == "ring" else ():
            unequal = dataclasses.replace(intended, split_shares=(1.0, share) * (intended.degree("split") // 2))
            with contextlib.suppress(PlanError):  # too few heads
                done = predict(spec, machines, unequal)
                step_s = done.step_time_s.value * (1 + 1e-9)
                assert bounds.step_s[row] <= step_s, plan_words(unequal)
                assert coarse_s[int(strategies.shape[row])] <= step_s, plan_words(unequal)
                assert bounds.emptiest_nbytes[row] <= done.memory.total, plan_words(unequal)
                assert branch.least[strategies.shape[row]] <= done.memory.total, plan_words(unequal)
                checked += 1
    assert checked >= 60


def test_bounds_of_memory_leave_room_for_little_parts() -> None:
    """A prediction reports the rank with the least memory left.

    It may hold only a sixteenth of a model that is mostly state.
    """
    spec, machines = model(layers=24, hidden=4096), alternating(gpu(), quicker(3.0))
    request = PlanRequest(script=plan(2), scope="all", mesh={"split": 2}, objective="memory")
    (branch,) = Explorer(spec, (machines,), request, ["full"]).branches
    little = dataclasses.replace(plan(2), mesh={"split": 2}, split_shares=(1.0, 15.0))
    assert branch.least.max() <= predict(spec, machines, little).memory.total


@given(
    whole=st.lists(st.floats(0, 1), min_size=2, max_size=5),
    part=st.lists(st.floats(0.1, 10), min_size=5, max_size=5),
    most=st.lists(st.floats(0.05, 1), min_size=5, max_size=5),
)
def test_parts_add_up_and_all_with_room_finish_together(
    whole: list[float], part: list[float], most: list[float]
) -> None:
    times = [MicrobatchTime(a, b) for a, b in zip(whole, part, strict=False)]
    limits, least = np.array(most[: len(times)]), 0.01
    shares = parts_finishing_together(times, limits, least)
    assert shares.sum() == pytest.approx(1.0)
    if limits.sum() <= 1:
        return
    free = (shares > least * (1 + 1e-9)) & (shares < limits * (1 - 1e-9))
    ends = [time.total_s(share) for time, share in zip(times, shares, strict=True)]
    if free.any():
        together_s = [end for end, is_free in zip(ends, free, strict=True) if is_free]
        assert max(together_s) == pytest.approx(min(together_s))


def test_unequal_parts_are_told_apart_in_words() -> None:
    even = Plan(batch=plan(8).batch, mesh={"split": 2})
    unequal = dataclasses.replace(even, split_shares=(1.0, 0.5))
    assert plan_words(unequal) == "split 2 (1:0.5), 1 microbatch"
    assert difference(even, unequal) == ("Parts of layers along split: equal in A, 1:0.5 in B",)
    assert difference(even, dataclasses.replace(even, split_shares=(2.0, 2.0))) == ()

"""Predictions of plans that compress: bytes by the formula, less time on a slow network, more memory."""

from dataclasses import replace
from typing import Any

import pytest

from cost_model.examples import cluster, cpu, link, mlp, plan
from tutti.config.cluster import CompressRate
from tutti.config.compression import bucket_sent_nbytes, parse_compression
from tutti.config.plan import Plan, SyncPlan
from tutti.config.sync_notation import parse_sync
from tutti.cost_model import predict
from tutti.cost_model.compressed_sync_cost import kernel_s, slowed
from tutti.planner import objectives
from tutti.planner.plan_request import PlanRequest

METHODS = ("bfloat16", "bytegrad", "qsgd", "terngrad", "one-bit", "top-k", "dgc", "top16-q4", "powersgd")


@pytest.mark.parametrize("words", METHODS)
def test_bytes_are_those_of_the_formula(words: str) -> None:
    how, model = parse_compression(words), mlp(512, 3)
    done = predict(model, cluster(), plan(ranks=4, sync=SyncPlan(compress=how)))
    shape = (512, 512) if words == "powersgd" else (512 * 512,)
    assert done.sent_nbytes_per_rank == pytest.approx(bucket_sent_nbytes(how, [shape] * 3, 4, 4), rel=1e-9)
    assert done.sent_nbytes_per_rank < predict(model, cluster(), plan(ranks=4)).sent_nbytes_per_rank


def test_it_pays_on_a_slow_network_and_not_on_a_fast_one() -> None:
    for bandwidth, pays in ((1e7, True), (1e11, False)):
        hosts = cluster(devices_per_node=1, count=2, links=(link("node"), link("network", 1e-5, bandwidth)))
        exact = predict(mlp(), hosts, plan(ranks=2))
        short = predict(mlp(), hosts, plan(ranks=2, sync=SyncPlan(compress=parse_compression("one-bit"))))
        assert (short.step_time_s.value < exact.step_time_s.value) == pays


def test_what_is_kept_back_is_held() -> None:
    exact, keeps = (
        predict(mlp(), cluster(), plan(ranks=2, sync=SyncPlan(compress=how))).memory
        for how in (parse_compression("bfloat16"), parse_compression("one-bit"))
    )
    assert keeps.communication - exact.communication == pytest.approx(2 * 4 * 3 * 512 * 512)


RATE = CompressRate(method="qsgd,bits=4", numel=2**18, encode_s=2e-3, decode_s=5e-4)
LARGE = CompressRate(method="qsgd,bits=4", numel=2**20, encode_s=1.6e-2, decode_s=4e-3)


def kernels(words: str, ranks: int = 4, numel: int = 2**18, **changes: Any) -> float:
    how = parse_compression(words)
    return kernel_s(plan(ranks=ranks, sync=SyncPlan(compress=how)), cpu(**changes), ranks, 0.5, 4.0 * numel)


def test_measured_kernels_count_by_phases_and_size() -> None:
    measured = {"compress_rates": (RATE, LARGE)}
    # reduce-scatter: all values encoded and as many added; all-gather: one part encoded, all decoded
    assert kernels("qsgd,bits=4", **measured) == pytest.approx(2e-3 * 1.25 + 2 * 5e-4)
    # the rate of the method, because these settings have none
    assert kernels("qsgd,bits=8", **measured) == kernels("qsgd,bits=4", **measured)
    assert kernels("qsgd,bits=4", numel=2**21, **measured) == pytest.approx(2 * (1.6e-2 * 1.25 + 2 * 4e-3))
    assert kernels("qsgd,bits=4", numel=5 * 2**17, **measured) == pytest.approx(9e-3 * 1.25 + 2 * 2.25e-3)
    assert kernels("qsgd,bits=4", numel=2**10, **measured) == pytest.approx((2e-3 * 1.25 + 2 * 5e-4) / 256)
    gathered = CompressRate(method="top-k,density=0.01", numel=2**18, encode_s=1e-3, decode_s=1e-5)
    assert kernels("top-k,density=0.01", ranks=8, compress_rates=(gathered,)) == pytest.approx(1e-3 + 8 * 1e-5)
    matrices = CompressRate(method="powersgd,rank=2", numel=2**18, encode_s=3e-3, decode_s=0.0)
    assert kernels("powersgd,rank=2", compress_rates=(matrices,)) == pytest.approx(3e-3)
    both = (replace(RATE, method="top16-q4"), replace(RATE, encode_s=4e-3, decode_s=1e-3))
    assert kernels("top16-q4", compress_rates=both) == pytest.approx(2e-3 + 5e-4 + 4e-3 / 4 + 1e-3)


def test_kernels_that_were_not_measured_are_assumed_and_said_to_be() -> None:
    how = SyncPlan(compress=parse_compression("one-bit"))
    assert kernels("one-bit", compress_rates=(RATE,)) == pytest.approx(8e-9 * 2**18, rel=0.15)
    assert kernels("powersgd", compress_rates=(RATE,)) == pytest.approx(2e-8 * 2**18)
    assert any(
        "assumed: kernels of one-bit" in note for note in predict(mlp(), cluster(), plan(ranks=2, sync=how)).notes
    )
    known = cluster(cpu(compress_rates=(replace(RATE, method="one-bit"),)))
    assert any("as measured by tutti probe" in note for note in predict(mlp(), known, plan(ranks=2, sync=how)).notes)


@pytest.mark.parametrize("words", METHODS)
def test_slower_kernels_take_longer_by_what_is_said(words: str) -> None:
    how, device = parse_compression(words), cpu(compress_rates=(RATE,))
    here = plan(ranks=4, sync=SyncPlan(compress=how))
    once, twice, four_times = (kernel_s(here, slowed(device, factor), 4, 0.5, 2**22) for factor in (1.0, 2.0, 4.0))
    assert four_times == pytest.approx(2 * twice) == pytest.approx(4 * once)
    assert once == pytest.approx(kernel_s(here, device, 4, 0.5, 2**22))


def test_kernels_behind_backward_take_their_time_from_it() -> None:
    """With an infinitely fast link and one core, the step is longer by the whole time of the kernels."""
    rates = tuple(replace(rate, encode_s=rate.encode_s / 100, decode_s=rate.decode_s / 100) for rate in (RATE, LARGE))
    wires = (link("node", 0.0, 1e15), link("network", 0.0, 1e15))
    device = cpu(cores=1, compress_rates=rates)
    hosts = cluster(device, wires, devices_per_node=1, count=4)
    sync = SyncPlan(compress=parse_compression("qsgd,bits=4"), bucket_nbytes=2**20)
    done, exact = (
        predict(mlp(), hosts, plan(4096, 4, sync=settings)) for settings in (sync, SyncPlan(bucket_nbytes=2**20))
    )
    whole = 3 * kernels("qsgd,bits=4", compress_rates=rates)
    assert done.step_time_s.value - exact.step_time_s.value == pytest.approx(whole, rel=1e-4)


def in_code(mode: str, code: str) -> SyncPlan:
    return replace(parse_sync(mode), compress=parse_compression(code))


@pytest.mark.parametrize(
    ("sync", "first"),
    [
        (SyncPlan(compress=parse_compression("one-bit-adam,freeze_step=100")), {92: SyncPlan(), 100: SyncPlan()}),
        (
            SyncPlan(compress=parse_compression("dgc,density=0.01,warmup_steps=8")),
            {
                updates: SyncPlan(compress=parse_compression(f"dgc,density={density}"))
                for updates, density in ((2, 0.25), (4, 0.0625), (6, 0.015625))
            },
        ),
        (parse_sync("post-local:4,after=50"), {50: SyncPlan()}),
        (in_code("post-local:4,after=50", "qsgd,bits=4"), {50: SyncPlan(compress=parse_compression("qsgd,bits=4"))}),
        (in_code("post-local:4,after=50", "one-bit"), {50: SyncPlan()}),  # its residual would be lost
    ],
)
def test_a_training_is_as_long_as_its_phases_are(sync: SyncPlan, first: dict[int, SyncPlan]) -> None:
    hosts = cluster(devices_per_node=1, count=4, links=(link("node"), link("network", 1e-4, 1e7)))

    def costed(each: SyncPlan) -> tuple[Plan, float]:
        return (intended := plan(64, 4, sync=each)), predict(mlp(), hosts, intended).step_time_s.value

    whole, later_s = costed(sync)
    prediction = predict(mlp(), hosts, whole)
    assert {phase.until for phase in prediction.first} == set(first)
    for phase in prediction.first:
        assert phase.step_time_s == pytest.approx(costed(first[phase.until])[1], rel=1e-9)
    for steps in (1000, 60, 3):  # the last two end within the warm-up
        expected, done = 0.0, 0
        for until, settings in first.items():
            expected += (min(until, steps) - done) * costed(settings)[1]
            done = min(until, steps)
        expected += (steps - done) * later_s
        request = PlanRequest(script=whole, train_samples=64.0 * steps)
        totals = objectives.totals(hosts, request, whole, prediction)
        assert totals.time_s == pytest.approx(expected, rel=1e-9)
        assert totals.steps == steps

"""Predictions of plans whose replicas diverge: bytes as in docs/consistency.md, average time, copies that are held."""

from dataclasses import replace
from itertools import pairwise

import pytest

from cost_model.examples import cluster, gpu, link, mlp, plan
from tutti.config.cluster import ClusterSpec, DeviceKind
from tutti.config.compression import all_reduce_sent_nbytes, parse_compression
from tutti.config.consistency_modes import CONSISTENCY_MODES
from tutti.config.prediction import Prediction
from tutti.config.sync_notation import parse_sync
from tutti.cost_model import predict
from tutti.cost_model.group_links import network
from tutti.cost_model.rank_placement import place_ranks
from tutti.cost_model.rank_tracks import timeline
from tutti.cost_model.relaxed_sync_cost import (
    CompressedExchange,
    Trained,
    _behind_updates,
    _traffic,
    diverged_exchange,
    waited_parts,
)
from tutti.errors import PlanError
from tutti.local_sgd import delayed_reduction

N = 4.0 * 3 * 512 * 512
"""Bytes of the example's parameters."""

PARTS = 8
"""Number of parts into which an encoded reduction is divided where ranks wait for it."""


def hosts(count: int, bandwidth: float = 1.25e8, latency_s: float = 1e-4) -> ClusterSpec:
    return cluster(devices_per_node=1, count=count, links=(link("node"), link("network", latency_s, bandwidth)))


def costed(words: str, ranks: int = 4, machines: ClusterSpec | None = None, batch: int = 64) -> Prediction:
    return predict(mlp(), machines or hosts(ranks), plan(batch, ranks, sync=parse_sync(words)))


@pytest.mark.parametrize(
    ("words", "vectors"),
    [
        ("local:1", {2: 1.0, 3: 4 / 3, 4: 1.5, 8: 1.75}),
        ("local:8", {4: 1.5 / 8}),
        ("local:period=8,delay=8", {4: 1.5 / 8}),
        ("local:4,optimizer_state=averaged", {4: 3 * 1.5 / 4}),  # Adam's state is twice the parameters
        ("local:4,optimizer_state=corrected", {4: 1.5 / 4}),
        ("post-local:8,after=10", {4: 1.5 / 8}),
        ("diloco:50", {4: 1.5 / 50}),
        ("one-shot", {4: 0.0}),
        ("adasum", {2: 1.0, 4: 2.0, 5: 3.0, 8: 3.0}),
        ("ring", {2: 1.0, 3: 2.0, 4: 2.0}),
        ("ring:4", {4: 0.5}),
        ("shift-one", {2: 1.0, 4: 1.0}),
        ("push", {2: 1.0, 3: 1.0, 4: 1.0}),
        ("elastic:2", {4: 0.75}),
        ("stale:3", {2: 1.0, 4: 1.5}),
        ("asynchronous", {4: 1.5}),
        ("ad-psgd", {2: 1.0, 4: 1.0, 3: 2.0, 5: 1.5}),
        ("hogwild", {2: 0.0, 4: 0.0}),
        ("ensemble", {4: 0.0}),
    ],
)
def test_bytes_are_those_of_the_modes_table(words: str, vectors: dict[int, float]) -> None:
    for ranks, vectors_per_step in vectors.items():
        machines = cluster() if words == "hogwild" else hosts(ranks, 1e10)
        assert costed(words, ranks, machines, 4096).sent_nbytes_per_rank == pytest.approx(
            vectors_per_step * N, rel=1e-12
        )


def test_correcting_moments_takes_three_passes_in_every_step() -> None:
    plain, corrected = (costed(f"local:5,optimizer_state={state}") for state in ("own", "corrected"))
    assert corrected.step_time_s.value - plain.step_time_s.value == pytest.approx(3 * N / 20e9, rel=1e-6)
    assert corrected.memory.total == plain.memory.total
    assert any("moments are corrected" in note for note in corrected.notes)
    assert not any("moments are corrected" in note for note in plain.notes)


@pytest.mark.parametrize("words", ["local:5", "diloco:5"])
def test_changes_in_a_code_take_its_bytes_its_kernels_and_some_copies(words: str) -> None:
    machines, how = hosts(4, 1e7, 1e-3), parse_compression("qsgd,bits=4")
    sync = parse_sync(words)
    plain, coded = (
        predict(mlp(), machines, plan(64, 4, sync=settings)) for settings in (sync, replace(sync, compress=how))
    )
    values = int(N) // 4
    sent = all_reduce_sent_nbytes(how, [(values,)], 4, 4)
    assert coded.sent_nbytes_per_rank == pytest.approx(sent / 5, rel=1e-12)
    assert any("kernels of qsgd" in note for note in coded.notes)
    # assumed: encoded, added, one part encoded again, decoded
    kernels_s = values * 8e-9 * (0.5 + 0.25 + 0.5 / 4 + 0.25)
    meanwhile_s = (1 - 1 / PARTS) * 0.7 * kernels_s  # the other parts are in flight, and the cores do a part of that
    passes = {"local:5": 3, "diloco:5": 1}[words]  # DiLoCo renews its base values anyway
    saved_s = (1.5 * N - sent) / 1e7 - kernels_s + meanwhile_s - passes * N / 20e9
    assert plain.step_time_s.value - coded.step_time_s.value == pytest.approx(saved_s / 5, rel=1e-6)
    more = {"local:5": 1, "diloco:5": 0}[words]
    assert coded.memory.total - plain.memory.total == pytest.approx(more * N, rel=1e-9)
    kept = predict(mlp(), machines, plan(64, 4, sync=replace(sync, compress=parse_compression("one-bit"))))
    assert kept.memory.total - plain.memory.total == pytest.approx((more + 2) * N, rel=1e-9)


def passed_s(found: Prediction) -> float:
    """Return the time that a transfer in the background has: the passes and the update."""
    return found.phases["forward"] + found.phases["backward"] + found.phases["optimizer"]


@pytest.mark.parametrize("delay", [1, 3, 5])
def test_delayed_averages_travel_behind_so_many_steps(delay: int) -> None:
    """Ranks wait for what does not fit behind these steps, and the cores do a part of the transfer of the rest."""
    machines = hosts(4, 4e7, 1e-3)
    free = costed("one-shot", machines=machines)
    passes_s = passed_s(free)
    wire_s = 6 * 1e-3 + 1.5 * N / 4e7
    hidden_s = min(wire_s, max(1, delay - 1) * passes_s)
    prediction = costed(f"local:period=5,delay={delay}", machines=machines)
    expected_s = (8 * N / 20e9 + wire_s - 0.7 * hidden_s) / 5
    assert prediction.step_time_s.value - free.step_time_s.value == pytest.approx(expected_s, rel=1e-6)
    waited = costed("local:5", machines=machines)
    assert prediction.memory.total - waited.memory.total == pytest.approx(N, rel=1e-9)
    assert any("applied after them" in note for note in prediction.notes)


def test_codes_of_pairs_travel_behind_all_of_the_steps() -> None:
    """These codecs run in a thread of their own. Reductions of thin matrices, and work that runs in order on a GPU,
    have one step less.
    """
    host_group = place_ranks(hosts(4, 4e7, 1e-3), 4)[0]
    gpu = replace(host_group, device=replace(host_group.device, kind="cuda"))
    sync = parse_sync("local:period=8,delay=4")
    for code, behind in (("qsgd", 4), ("one-bit", 4), ("powersgd", 3), ("terngrad", 3)):
        coded = replace(sync, compress=parse_compression(code))
        assert (_behind_updates(coded, host_group), _behind_updates(coded, gpu)) == (behind, 3)
    assert _behind_updates(sync, host_group) == 3


@pytest.mark.parametrize(("kind", "more_s"), [("cpu", 7 / 8 * 2.5), ("cuda", 0.0)])
def test_a_thread_sends_one_part_while_it_codes_or_hands_on_another(kind: DeviceKind, more_s: float) -> None:
    sync = replace(parse_sync("local:period=5,delay=1"), compress=parse_compression("qsgd,bits=4"))
    host_groups = place_ranks(hosts(4), 4)
    host_group = replace(host_groups[0], device=replace(host_groups[0].device, kind=kind))
    nothing = Trained(parameters=0.0, optimizer=0.0, statistics=0.0)
    coded = CompressedExchange(seconds=10.0, kernels_s=2.0, cores_s=0.5, sent_nbytes=0.0, parts=8)
    group = network(hosts(4, latency_s=0.0), host_groups, plan(64, 4)).group("replicate")
    diverged = diverged_exchange(sync, group, host_group, nothing, 1.0, coded)
    hidden_s = 1.0 + more_s
    assert diverged.exchange.exposed_s == pytest.approx((10.0 - hidden_s + 0.5 * hidden_s / 8.0) / 5, rel=1e-9)


def test_kernels_of_delayed_averages_are_waited_for() -> None:
    """With a fast link, everything is hidden but encoding and decoding; without a delay, all parts but one are."""
    machines, how = hosts(4, 1e10, 0.0), parse_compression("qsgd,bits=4")
    words = ("local:5", "local:period=5,delay=5")
    plain, delayed = (
        predict(mlp(), machines, plan(64, 4, sync=replace(parse_sync(mode), compress=how))) for mode in words
    )
    wire_s = all_reduce_sent_nbytes(how, [(int(N) // 4,)], 4, 4) / 1e10
    saved_s = plain.step_time_s.value - delayed.step_time_s.value
    assert saved_s == pytest.approx((0.7 * wire_s / PARTS - 3 * N / 20e9) / 5, rel=1e-6)


@pytest.mark.parametrize(
    ("code", "nbytes", "parts"),
    [("qsgd", 1e6, 3), ("qsgd", 1e9, 8), ("qsgd", 100.0, 1), ("powersgd", 1e9, 1), ("top-k,sparse=true", 1e9, 1)],
)
def test_sums_that_are_waited_for_go_in_the_runtimes_parts(code: str, nbytes: float, parts: int) -> None:
    how = parse_compression(code)
    assert waited_parts(how, nbytes) == parts
    values = int(nbytes) // 4
    if not how.settings.get("sparse") and how.method != "powersgd":
        assert len(delayed_reduction.split_into_chunks(values, delayed_reduction.BLOCKING_CHUNKS)) == parts


def test_every_mode_is_predicted() -> None:
    modes = [mode for mode in CONSISTENCY_MODES if mode != "synchronous"]
    assert all(CONSISTENCY_MODES[mode].traffic is not None for mode in modes)
    for mode in modes:
        words = ",".join(
            f"{name}=4" for name, parameter in CONSISTENCY_MODES[mode].parameters.items() if parameter.default is None
        )
        assert costed(f"{mode}:{words}" if words else mode, machines=cluster()).fits


def test_one_memory_is_of_one_host_of_processors() -> None:
    assert costed("hogwild", machines=cluster()).phases["exposed_communication"] == 0  # not even the losses are reduced
    with pytest.raises(PlanError, match="share no memory; use ranks of one host"):
        costed("hogwild")
    with pytest.raises(PlanError, match="devices, which share no memory"):
        costed("hogwild", machines=cluster(gpu(), devices_per_node=4))
    assert costed("hogwild", 1).fits


def test_pairs_meet_once_a_step_or_as_often_as_the_wire_lets_them() -> None:
    free = costed("ensemble", batch=4096)
    passes_s = passed_s(free)
    for bandwidth in (1e10, 1e8, 1e6):
        prediction = costed("ad-psgd", machines=hosts(4, bandwidth), batch=4096)
        there_and_back_s = 2 * (1e-4 + N / bandwidth)
        often = min(1.0, passes_s / there_and_back_s)
        assert prediction.sent_nbytes_per_rank == pytest.approx(often * N)
        extra_s = prediction.step_time_s.value - free.step_time_s.value - 41 * N / 20e9
        # ranks never wait for it, but their cores do 0.3 of the work
        assert extra_s == pytest.approx(0.3 * often * there_and_back_s, rel=1e-6)
    assert often < 0.1


def test_the_wire_takes_what_arithmetic_says() -> None:
    machines = hosts(4, 1e7, 1e-3)
    free = costed("one-shot", machines=machines).step_time_s.value
    copies = {"local:5": 6, "push": 18, "adasum": 12 + 25 * 2}
    wire = {
        "local:5": 6 * 1e-3 + 1.5 * N / 1e7,  # a ring of 4
        "push": 1e-3 + N / 1e7,
        "adasum": 2 * (1e-3 + N / 1e7),
    }
    for words, seconds in wire.items():
        often = 5 if words == "local:5" else 1
        # one rank has a host of 20 GB/s
        expected = free + (seconds + copies[words] * N / 20e9) / often
        assert costed(words, machines=machines).step_time_s.value == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("words", "messages"), [("ring", 2), ("shift-one", 1), ("elastic", 6)])
def test_what_travels_behind_a_step_is_waited_for_only_beyond_it(words: str, messages: int) -> None:
    copies_s = _traffic(parse_sync(words).mode).passes(4) * N / 20e9
    for bandwidth, beyond in ((1e9, False), (1e5, True)):
        exchanging, free = (costed(mode, machines=hosts(4, bandwidth), batch=4096) for mode in (words, "one-shot"))
        passes_s = passed_s(free)
        wire_s = messages * 1e-4 + exchanging.sent_nbytes_per_rank / bandwidth
        extra_s = exchanging.step_time_s.value - free.step_time_s.value - copies_s
        assert (wire_s > passes_s) == beyond
        # the cores do 0.3 of the work
        assert extra_s == pytest.approx(wire_s - 0.7 * passes_s if beyond else 0.3 * wire_s, rel=1e-6)


@pytest.mark.parametrize(
    "words", ["local:4", "diloco:4", "adasum", "ring", "shift-one", "push", "elastic", "ad-psgd", "stale:2"]
)
def test_laws(words: str) -> None:
    times = [costed(words, machines=hosts(4, bandwidth)).step_time_s.value for bandwidth in (1e6, 1e7, 1e8, 1e9)]
    rounding = 1 + 1e-15  # ad-psgd waits equally long on all links that are too slow for one exchange a step
    assert all(quick <= slow * rounding for slow, quick in pairwise(times))
    often = words.partition(":")[0]
    if "period" in CONSISTENCY_MODES[parse_sync(words).mode].parameters:
        periods = [costed(f"{often}:{period}").step_time_s.value for period in (1, 2, 8, 32)]
        assert periods == sorted(periods, reverse=True)
    assert costed(words, 1).step_time_s.value == pytest.approx(predict(mlp(), hosts(1), plan()).step_time_s.value)


def test_copies_are_held_beside_the_parameters() -> None:
    for words, vectors in (("local:8", 1), ("diloco:8", 3), ("elastic", 5), ("one-shot", 1)):
        assert costed(words).memory.communication == pytest.approx(vectors * N)
    assert costed("diloco:8", 1).memory.communication == 0


def test_batch_statistics_are_a_replicas_own_and_running_ones_are_averaged() -> None:
    model = mlp(modules=tuple(replace(module, batch_statistics=True, buffer_nbytes=4000) for module in mlp().modules))
    apart, bare = (predict(spec, hosts(4), plan(ranks=4, sync=parse_sync("local:1"))) for spec in (model, mlp()))
    assert apart.sent_nbytes_per_rank - bare.sent_nbytes_per_rank == pytest.approx(1.5 * 12000)
    never = predict(model, hosts(4), plan(ranks=4, sync=parse_sync("one-shot")))
    assert never.phases["forward"] == pytest.approx(costed("one-shot").phases["forward"])


def test_it_says_what_it_leaves_out_and_the_picture_adds_up() -> None:
    words = "post-local:8,after=100"
    prediction = costed(words)
    assert any("one of 8 steps" in note for note in prediction.notes)
    assert any("first 100 updates are synchronous" in note for note in prediction.notes)
    drawn = timeline(mlp(), hosts(4), plan(ranks=4, sync=parse_sync(words)))
    for track in drawn.tracks:
        total = sum(seconds for doing, seconds in track.seconds.items() if doing != "hidden")
        assert total == pytest.approx(prediction.step_time_s.value, rel=1e-6)

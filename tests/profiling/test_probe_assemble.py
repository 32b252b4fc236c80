"""Findings put together: equal hosts are merged, the slowest counts, and what disturbed the probe is said."""

from dataclasses import replace
from typing import Literal

import pytest

from tutti.config import serialization
from tutti.config.cluster import (
    ClusterSpec,
    CompressRate,
    ConvolutionRate,
    CopyRate,
    DeviceKind,
    GemmRate,
    ImageRate,
    LinkPoint,
    LinkSpec,
    MemoryRate,
    VectorRate,
    WeightRate,
)
from tutti.profile.probe.cluster_assembly import (
    DeviceRates,
    Findings,
    RankFacts,
    SharedRates,
    assemble,
    at_once,
    group_by_speed,
    is_oversubscribed,
    merge_hosts,
    oversubscription,
    rename_by_speed,
)
from tutti.profile.probe.host_facts import HostFacts

GB = 10**9


def fact(host: str, *, cores: int = 4, memory: int = 64 * GB, load: float = 0.1, device: str = "") -> RankFacts:
    kind: DeviceKind = "cuda" if device else "cpu"
    return RankFacts(
        host=HostFacts(name=host, cpu="CPU", cores=cores, memory_nbytes=memory, load=load),
        kind=kind,
        device=device or f"CPU, {cores} cores",
        device_memory_nbytes=16 * GB if device else memory,
        visible=4 if device else 1,
        versions={"torch": "2.6.0"},
    )


def link(bandwidth: float) -> LinkSpec:
    return LinkSpec(
        tier="node",
        latency_s=1e-5,
        bandwidth_bytes_per_s=bandwidth,
        fitted_to="all_reduce",
        points=(LinkPoint(nbytes=10**6, time_s=1e6 / bandwidth),),
        source="test",
        evidence="measured",
    )


RATES = DeviceRates(
    gemm=(
        GemmRate(dtype="float32", n=256, threads=1, flops_per_s=1e9),
        GemmRate(dtype="float32", n=512, threads=4, flops_per_s=3e9),
        GemmRate(dtype="bfloat16", n=512, threads=4, flops_per_s=2e9),
    ),
    memory=(MemoryRate(threads=1, bytes_per_s=1e10), MemoryRate(threads=4, bytes_per_s=3e10)),
    kernel_overhead_s=1e-6,
    notes=("something was skipped",),
    weights=(WeightRate(dtype="float32", forward=4e9, input_gradient=5e9, weight_gradient=6e9),),
    efficiency={"conv": 0.5},
    convolutions=(ConvolutionRate(weight_nbytes=1000, relative=0.9),),
    images=(ImageRate(pixels=16, relative=1.2),),
    vectors=(VectorRate(kind="pool", forward=0.002, backward=0.03),),
    codes=(CompressRate(method="one-bit", numel=1000, encode_s=4e-6, decode_s=2e-6),),
    copies=(
        CopyRate(direction="to_device", pinned=False, bytes_per_s=6e9),
        CopyRate(direction="to_device", pinned=True, bytes_per_s=26e9),
        CopyRate(direction="to_host", pinned=True, bytes_per_s=24e9),
    ),
    launch_s=5e-6,
)


def findings(facts: list[RankFacts]) -> Findings:
    return Findings(
        facts=facts,
        exclusive={fact.device: RATES for fact in facts},
        shared=[SharedRates() for _ in facts],
        node_links=[() for _ in facts],
        network_links=[() for _ in facts],
        disk_read_bytes_per_s=[1e9] * len(facts),
        load_at_end=[0.2] * len(facts),
    )


def test_one_host_of_two_ranks() -> None:
    cluster = assemble(findings([fact("a"), fact("a")]), measured_utc="2026-01-01T00:00:00Z")
    (node,) = cluster.nodes
    assert (cluster.name, node.count, node.devices_per_node, cluster.device_count) == ("a", 1, 1, 1)
    device = cluster.devices["CPU, 4 cores"]
    assert device.peak_flops_per_s == {"float32": 3e9, "bfloat16": 2e9}
    assert device.compress_rates == RATES.codes
    assert (device.convolution_rates, device.vector_rates) == (RATES.convolutions, RATES.vectors)
    assert device.image_rates == RATES.images
    assert (node.copy_rates, device.launch_s) == (RATES.copies, 5e-6)
    assert node.host_link_bytes_per_s == 24e9  # the slower direction from and to pinned memory
    assert (device.weight_rates, device.efficiency) == (RATES.weights, {"conv": 0.5})
    assert (device.memory_bandwidth_bytes_per_s, device.cores, device.evidence) == (3e10, 4, "measured")
    assert cluster.conditions is not None
    assert cluster.conditions.notes == ("something was skipped",)
    assert serialization.loads(ClusterSpec, serialization.dumps(cluster)) == cluster


def test_equal_hosts_are_one_node_with_a_count() -> None:
    facts = [fact("a"), fact("a"), fact("b", memory=63 * GB), fact("c", cores=8), fact("d", memory=32 * GB)]
    found = replace(findings(facts), disk_read_bytes_per_s=[2e9, None, 1e9, 3e9, 4e9])
    cluster = assemble(found)
    assert cluster.name == "a and 3 more"
    assert [(n.name, n.device, n.count, n.memory_nbytes // GB, n.disk_read_bytes_per_s) for n in cluster.nodes] == [
        ("a", "CPU, 4 cores", 2, 63, 1e9),
        ("c", "CPU, 8 cores", 1, 64, 3e9),
        ("d", "CPU, 4 cores", 1, 32, 4e9),
    ]
    assert set(cluster.devices) == {"CPU, 4 cores", "CPU, 8 cores"}


def test_nodes_are_in_the_order_of_their_ranks() -> None:
    facts = [fact("a"), fact("b", cores=8), fact("c", cores=8), fact("d")]
    assert [(node.name, node.count) for node in assemble(findings(facts)).nodes] == [("a", 1), ("b", 2), ("d", 1)]


def test_gpus_of_a_host_are_counted_by_kind() -> None:
    facts = [fact("a", device="V100"), fact("a", device="V100"), fact("b", device="V100"), fact("c", device="T4")]
    cluster = assemble(findings(facts))
    assert [(n.name, n.device, n.devices_per_node, n.count) for n in cluster.nodes] == [
        ("a", "V100", 4, 2),
        ("c", "T4", 4, 1),
    ]
    assert cluster.devices["V100"].memory_nbytes == 16 * GB
    assert cluster.devices["V100"].cores == 0


def test_rates_of_ranks_at_once_are_medians_of_what_all_have() -> None:
    def shared(rate: float, *more: int) -> SharedRates:
        gemm = tuple(
            GemmRate(dtype="float32", n=n, threads=2, flops_per_s=rate, concurrent=2, spread=rate) for n in (256, *more)
        )
        copied = MemoryRate(threads=2, bytes_per_s=10 * rate, concurrent=2)
        passed = WeightRate(
            dtype="float32", threads=2, forward=rate, input_gradient=2 * rate, weight_gradient=3 * rate, concurrent=2
        )
        return SharedRates(gemm=gemm, memory=(copied,), weights=(passed,))

    found = replace(findings([fact("a"), fact("a")]), shared=[shared(1.0, 512), shared(2.0)])
    device = assemble(found).devices["CPU, 4 cores"]
    assert device.gemm == RATES.gemm
    (rate,) = device.gemm_concurrent  # N = 512 was measured by one of them only
    assert (rate.n, rate.threads, rate.concurrent, rate.flops_per_s, rate.spread) == (256, 2, 2, 1.5, 2.0)
    assert device.memory_rates[-1] == MemoryRate(threads=2, bytes_per_s=15.0, concurrent=2)
    passed = device.weight_rates[-1]
    assert (passed.forward, passed.input_gradient, passed.weight_gradient) == (1.5, 3.0, 4.5)


def test_the_slowest_host_gives_the_link() -> None:
    links = [(link(3e9),), (link(3e9),), (link(1e9),), (link(2e9),)]
    found = replace(findings([fact("a"), fact("a"), fact("b"), fact("b")]), node_links=links)
    spec = assemble(found).link("node")
    assert spec is not None
    assert spec.bandwidth_bytes_per_s == 1e9
    assert assemble(found).link("network") is None


def test_what_may_have_disturbed_is_said() -> None:
    facts = [fact("a"), replace(fact("b", load=3.0), versions={"torch": "2.5.0"})]
    found = replace(findings(facts), disk_read_bytes_per_s=[None, 1e9], load_at_end=[0.5, 2.0])
    seen = assemble(found).conditions
    assert seen is not None
    assert (seen.cores_granted, seen.load_at_start, seen.load_at_end) == (4, 3.0, 2.0)
    notes = "\n".join(seen.notes)
    assert "host b had a load of 3.0 on 4 cores" in notes
    assert "host a had a load" not in notes
    assert "host b has different versions" in notes
    assert "the disk of host a was not read" in notes


@pytest.mark.parametrize("tier", ["node", "network"])
def test_times_that_disagree_are_said(tier: Literal["node", "network"]) -> None:
    points = (LinkPoint(nbytes=1024, time_s=1e-4, median_s=1.4e-4), LinkPoint(nbytes=10**6, time_s=1e-3, median_s=4e-3))
    for kept, notes in ((points, 1), (points[:1], 0)):
        one = replace(link(1e9), tier=tier, points=kept)
        links = {f"{tier}_links": [(one,), (), (one,)]}
        cluster = assemble(replace(findings([fact("a")] * 3), **links))  # type: ignore[arg-type]
        assert cluster.conditions is not None
        said = [note for note in cluster.conditions.notes if "disagreed" in note]
        assert len(said) == notes
    one = replace(link(1e9), tier=tier, points=points)
    cluster = assemble(replace(findings([fact("a")]), **{f"{tier}_links": [(one,)]}))  # type: ignore[arg-type]
    assert cluster.conditions is not None
    assert "(of 1000000 bytes: lower quartile 1 ms, median 4 ms)" in cluster.conditions.notes[-1]


def test_one_rank_of_each_host_measures_at_once() -> None:
    def on(host: str, machine: str, device: str = "", cores: int = 4) -> RankFacts:
        found = fact(host, device=device, cores=cores)
        return replace(found, host=replace(found.host, machine=machine))

    lab = [on("a", "m"), on("a", "m"), on("b", "m"), on("b", "m", cores=2), on("c", "other")]
    assert at_once(lab, 0) == [0, 2, 4]  # those of a host are measured together besides
    assert at_once([*lab, on("d", "m", cores=8), on("e", "n", cores=8)], 0) == [0, 2, 4, 5]  # as slow as its neighbours
    assert at_once([on("a", "m", "card"), on("a", "m", "other card"), on("b", "m", "card")], 0) == [0, 2]
    assert at_once([on("a", "m", "card"), on("a", "m", "other card"), on("b", "m", "card")], 1) == [1]


def test_more_hosts_than_cores_of_one_machine_are_oversubscribed() -> None:
    def on(host: str, machine: str, machine_cores: int) -> RankFacts:
        found = fact(host, cores=1)
        return replace(found, host=replace(found.host, machine=machine, machine_cores=machine_cores))

    lab = [on("a", "m", 2), on("b", "m", 2), on("c", "m", 2), on("d", "other", 1), on("e", "", 0)]
    assert is_oversubscribed(lab, [0, 1, 2, 3, 4])
    assert not is_oversubscribed(lab, [0, 2, 3, 4])
    assert oversubscription(lab, [0, 1, 2, 3, 4]) == 1.5
    assert oversubscription(lab, [0, 3, 4]) == oversubscription(lab, [4]) == 1


def test_of_hosts_that_measured_at_once_the_slowest_products_count_and_else_the_middle() -> None:
    def rates(relative_speed: float, *more: int) -> DeviceRates:
        gemm = tuple(GemmRate(dtype="float32", n=n, flops_per_s=relative_speed * n) for n in (256, *more))
        passed = WeightRate(
            dtype="float32", forward=relative_speed, input_gradient=5.0 - relative_speed, weight_gradient=1.0
        )
        code = CompressRate(method="qsgd", numel=8, encode_s=1 / relative_speed, decode_s=0.1)
        return replace(RATES, gemm=gemm, memory=(MemoryRate(bytes_per_s=relative_speed),), weights=(passed,),
                       codes=(code,),
                       kernel_overhead_s=1 / relative_speed, efficiency={"conv": relative_speed},
                       convolutions=(ConvolutionRate(weight_nbytes=1000, relative=relative_speed),),
                       images=(ImageRate(pixels=16, relative=relative_speed),),
                       vectors=(VectorRate(kind="pool", forward=relative_speed,
                                           backward=10 * relative_speed),))  # fmt: skip

    found = merge_hosts({"a": rates(2.0, 512), "b": rates(1.0), "c": rates(2.2, 512)})
    assert [(rate.n, rate.flops_per_s) for rate in found.gemm] == [(256, 256.0)]  # b skipped N = 512
    assert found.memory[0].bytes_per_s == 2.0
    assert (found.weights[0].forward, found.weights[0].input_gradient) == (2.0, 3.0)
    assert (found.codes[0].encode_s, found.kernel_overhead_s, found.efficiency) == (0.5, 0.5, {"conv": 2.0})
    assert [rate.relative for rate in found.convolutions] == [2.0]
    assert [rate.relative for rate in found.images] == [2.0]
    assert found.notes[0] == RATES.notes[0]
    assert [note.split(",")[0] for note in found.notes[1:]] == [
        "host b runs matrix products at 50% of the median speed of its kind of device"
    ]
    assert merge_hosts({"a": rates(2.0), "b": rates(1.0)}).notes == RATES.notes  # which of two is the usual one?
    assert merge_hosts({"a": rates(2.0, 512)}) == rates(2.0, 512)


def test_a_host_that_multiplies_far_slower_has_another_device_whatever_its_name() -> None:
    def rates(*flops: float) -> DeviceRates:
        return replace(RATES, gemm=tuple(GemmRate(dtype="float32", n=n, flops_per_s=value)
                                         for n, value in zip((256, 512), flops, strict=False)))  # fmt: skip

    found = {
        "a": rates(4.0, 5.0),
        "b": rates(10.0, 11.0),
        "c": rates(9.0, 7.0),
        "d": rates(4.4, 4.0),
        "e": rates(1.0, 1.2),
    }
    groups = group_by_speed(found)
    assert [list(group) for group in groups] == [["b", "c"], ["a", "d"], ["e"]]
    assert [group[host] for group in groups for host in group] == [found[host] for host in "bcade"]
    assert group_by_speed({"a": rates(10.0, 10.0), "b": rates(6.0, 7.1)}) == [
        {"a": rates(10.0, 10.0), "b": rates(6.0, 7.1)}
    ]
    assert group_by_speed({"a": rates(10.0), "b": rates()}) == [{"a": rates(10.0), "b": rates()}]  # nothing to compare
    assert group_by_speed({"a": rates(10.0)}) == [{"a": rates(10.0)}]

    facts = rename_by_speed([*map(fact, "aabcde"), fact("g", device="GPU")], "CPU, 4 cores", groups)
    slow = "CPU, 4 cores, slower"
    assert [one.device for one in facts] == [slow, slow, *["CPU, 4 cores"] * 2, slow, f"{slow} (2)", "GPU"]


def test_hosts_with_devices_of_another_pace_are_nodes_of_their_own() -> None:
    facts = rename_by_speed([*map(fact, "abc")], "CPU, 4 cores", [{"a": RATES, "c": RATES}, {"b": RATES}])
    half = replace(RATES, gemm=tuple(replace(rate, flops_per_s=rate.flops_per_s / 2) for rate in RATES.gemm))
    cluster = assemble(
        Findings(
            facts=facts,
            exclusive={"CPU, 4 cores": RATES, "CPU, 4 cores, slower": half},
            shared=[SharedRates()] * 3,
            node_links=[()] * 3,
            network_links=[()] * 3,
            disk_read_bytes_per_s=[None] * 3,
            load_at_end=[0.0] * 3,
        ),
        measured_utc="2026-01-01T00:00:00Z",
    )
    assert [(node.name, node.device, node.count) for node in cluster.nodes] == [
        ("a", "CPU, 4 cores", 1),
        ("b", "CPU, 4 cores, slower", 1),
        ("c", "CPU, 4 cores", 1),
    ]
    assert cluster.devices["CPU, 4 cores, slower"].peak_flops_per_s["float32"] == 1.5e9
    assert cluster.conditions is not None
    assert [note.partition(": ")[0] for note in cluster.conditions.notes[:2]] == [
        "CPU, 4 cores",
        "CPU, 4 cores, slower",
    ]

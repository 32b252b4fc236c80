"""The shipped devices and links: sourced, dense, consistent with published arithmetic, and easy to put together."""

import json
from pathlib import Path
from typing import Any

import pytest

from tutti.config import serialization
from tutti.config.cluster import ClusterSpec
from tutti.errors import SpecError
from tutti.profile.catalog import cluster_from_parts, device, link, parts

_FILE = Path(__file__).parents[1] / "data" / "machine_examples.json"
EXAMPLES: dict[str, Any] = {entry["id"]: entry for entry in json.loads(_FILE.read_text(encoding="utf-8"))["examples"]}
DTYPES = {"float64", "float32", "tf32", "bfloat16", "float16", "float8"}
A100, V100 = "A100-SXM4-80GB", "V100-SXM2-16GB"


@pytest.mark.parametrize("name", parts().devices)
def test_every_device_is_sourced_and_plausible(name: str) -> None:
    part = parts().devices[name]
    assert part.evidence == "published"
    assert part.year is not None
    assert str(part.year) in part.source or str(part.year - 1) in part.source
    assert any(maker in part.source for maker in ("NVIDIA", "AMD"))
    assert part.peak_flops_per_s.keys() <= DTYPES
    assert "float32" in part.peak_flops_per_s
    ordered = [
        part.peak_flops_per_s[d] for d in ("float32", "tf32", "bfloat16", "float8") if d in part.peak_flops_per_s
    ]
    assert ordered == sorted(ordered), "a narrower type is never slower"
    assert all(1e12 < peak < 1e16 for peak in part.peak_flops_per_s.values())
    assert 1e11 < part.memory_bandwidth_bytes_per_s < 1e13
    assert 1e10 < part.memory_nbytes < 1e12
    assert part.gemm == ()


@pytest.mark.parametrize("name", parts().links)
def test_every_link_is_sourced_and_says_what_is_assumed(name: str) -> None:
    part = parts().links[name]
    assert part.tier in ("node", "network")
    assert part.latency_s > 0
    assert "Bandwidth:" in part.source
    assert "Latency" in part.source
    assert ("assumed" in part.source) == (part.evidence == "assumed")


def test_the_named_devices_are_there() -> None:
    for family in ("K80", "P100", "V100", "T4", "A100", "H100", "H200", "B200", "L4", "A10", "RTX-4090"):
        assert any(name.split("-")[0] == family.split("-")[0] for name in parts().devices), family


PEAKS = {
    "A100 FP16 TC": (A100, "float16"),
    "V100 FP16 TC": (V100, "float16"),
    "V100 FP32": (V100, "float32"),
    "V100 FP64": (V100, "float64"),
    "A100 FP32": (A100, "float32"),
    "P100 FP32": ("P100-SXM2-16GB", "float32"),
}


@pytest.mark.parametrize(
    "case", [c for c in EXAMPLES["gpu_peaks"]["cases"] if c["gpu"] in PEAKS], ids=lambda c: c["gpu"]
)
def test_peaks_follow_from_units_and_clock(case: dict[str, Any]) -> None:
    """Units x FLOP a clock x clock is the printed peak, and the data sheet's within its rounding."""
    name, dtype = PEAKS[case["gpu"]]
    clock = case.get("ghz", 1.53) * 1e9
    flops = case["sm"] * case["flop_per_clk_sm"] * clock if "sm" in case else case["cores"] * 2 * clock
    assert flops == pytest.approx(case["tflops"] * 1e12, rel=1e-3)
    assert device(name).peak_flops_per_s[dtype] == pytest.approx(flops, rel=5e-3)


def test_a_board_of_eight_a100_is_dense() -> None:
    """Printed boards quote 2.5 and 5 PFLOP/s with sparsity; dense is half, and float32 x 8 is 156 TFLOP/s."""
    board = {dtype: 8 * peak for dtype, peak in device(A100).peak_flops_per_s.items()}
    assert board["tf32"] == pytest.approx(1.25e15, rel=2e-3)
    assert board["float16"] == pytest.approx(2.5e15, rel=2e-3)
    assert board["float32"] == pytest.approx(156e12, rel=1e-3)


RATIOS = {
    "FP16 TC": ("float16", "float16"),
    "FP32": ("float32", "float32"),
    "TF32 vs V100 FP32": ("tf32", "float32"),
    "FP64 TC": ("float64", "float64"),
}


@pytest.mark.parametrize("row", EXAMPLES["gpu_speedup_ratios"]["rows"], ids=lambda row: row[0])
def test_ratios_of_two_generations(row: list[Any]) -> None:
    what, newer, older, ratio = row
    assert round(newer / older, 2) == pytest.approx(ratio, abs=0.15)
    if what in RATIOS:
        to, of = RATIOS[what]
        assert device(A100).peak_flops_per_s[to] == newer * 1e12
        assert device(V100).peak_flops_per_s[of] == older * 1e12
    if "sparse" in what:
        assert newer * 1e12 != device(A100).peak_flops_per_s["tf32" if "TF32" in what else "float16"]


def test_a_k80_is_one_of_its_two_gpus() -> None:
    part = device("K80")
    assert part.memory_nbytes == 24 * 10**9 // 2
    assert part.peak_flops_per_s["float32"] == pytest.approx(8.74e12 / 2)
    assert part.memory_bandwidth_bytes_per_s == 480e9 / 2


def test_a_cluster_from_parts() -> None:
    cluster = cluster_from_parts(
        "dgx",
        "a100-sxm4-80gb",
        devices_per_node=8,
        nodes=4,
        node_link="NVLink3",
        network="InfiniBand-HDR-200",
        network_ports=8,
    )
    assert cluster.device_count == 32
    assert cluster.devices[cluster.nodes[0].device] == device(A100)
    assert cluster.nodes[0].memory_nbytes == 8 * device(A100).memory_nbytes
    assert cluster.link("node") == link("NVLink3", "node")
    network = cluster.link("network")
    assert network is not None
    assert network.bandwidth_bytes_per_s == 8 * 25e9
    assert network.latency_s == link("InfiniBand-HDR-200", "network").latency_s
    assert cluster.conditions is None
    assert serialization.loads(ClusterSpec, serialization.dumps(cluster)) == cluster


def test_one_device_needs_no_link() -> None:
    assert cluster_from_parts("one", "T4").links == ()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"device_name": "A100"}, ["no device 'A100'", A100]),
        ({"device_name": "H100-SXM"}, ["no device 'H100-SXM'", "H100-SXM5-80GB"]),
        ({"device_name": "T4", "devices_per_node": 2}, ["2 devices in a node need a node link", "PCIe3-x16"]),
        ({"device_name": "T4", "nodes": 2}, ["2 nodes need a network link", "Ethernet-10G"]),
        ({"device_name": "T4", "nodes": 2, "network": "NVLink3"}, ["no network link 'NVLink3'", "Ethernet"]),
        ({"device_name": "T4", "devices_per_node": 2, "node_link": "nvlink"}, ["no node link 'nvlink'", "NVLink1"]),
        ({"device_name": "T4", "nodes": 0}, ["nodes = 0", "1 or more"]),
    ],
)
def test_wrong_parts_are_refused_with_a_remedy(arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(SpecError) as refused:
        cluster_from_parts("x", **arguments)
    for word in words:
        assert word in str(refused.value)

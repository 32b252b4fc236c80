"""Recorded outputs of nvidia-smi are read as they are meant; each file in topologies/ names where it was published."""

from pathlib import Path

import pytest

from tutti.launch import doctor_checks
from tutti.launch.gpu_topology import describe, inactive_links, parse_peers, parse_topology

RECORDED = Path(__file__).parent / "topologies"


def recorded(name: str) -> str:
    return (RECORDED / f"{name}.txt").read_text(encoding="utf-8")


def test_dgx_a100() -> None:
    topology = parse_topology(recorded("dgx_a100"))
    assert topology.links[0, 7] == topology.links[7, 0] == "NV12"
    assert {nic for (gpu, nic), kind in topology.nics.items() if gpu == 2 and kind == "PXB"} == {"NIC2", "NIC3"}
    assert topology.cores == {0: "48-63,176-191", 1: "48-63,176-191", 2: "16-31,144-159", 3: "16-31,144-159"}
    assert describe(topology).startswith("12 NVLinks between GPUs; NIC0 near GPU 0, 1; NIC1 near GPU 0, 1; NIC2 near")


def test_hgx_h100() -> None:
    topology = parse_topology(recorded("hgx_h100"))
    assert len(topology.links) == 56
    assert set(topology.links.values()) == {"NV18"}
    assert topology.nics[3, "NIC5"] == "PIX"
    assert topology.cores[7] == "56-111,168-223"


def test_pcie_boxes() -> None:
    assert describe(parse_topology(recorded("pcie_5090"))) == "PHB: the processor's PCIe host bridge between GPUs"
    links = parse_topology(recorded("pcie_epyc")).links
    assert (links[3, 4], links[0, 1]) == ("PHB", "NODE")
    assert parse_peers(recorded("pcie_5090_p2p")) == {(0, 1): "GNS", (1, 0): "GNS"}


def test_cards_get_their_names_from_the_legend() -> None:
    table = "\tGPU0\tNIC0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tPIX\t0-3\t0\nNIC0\tPIX\t X \n"
    text = f"{table}\nNIC Legend:\n\n  NIC0: mlx5_2\n"
    assert parse_topology(text).nics == {(0, "mlx5_2"): "PIX"}


def test_links_that_are_down() -> None:
    assert inactive_links(recorded("nvlink_v100")) == {3: [3, 5]}
    assert inactive_links("GPU 0: A\n\t Link 0: <inactive>\n\t Link 1: <inactive>\n") == {}, "no NVLink is plugged in"


def replies(**outputs: str) -> doctor_checks.Ask:
    return lambda *arguments: outputs.get("_".join(arguments).replace("-", ""))


def test_the_doctor_names_what_is_wrong_with_links() -> None:
    finding = doctor_checks.gpu_links(
        replies(topo_m=recorded("hgx_h100"), nvlink_s=recorded("nvlink_v100"), topo_p2p_r=recorded("pcie_5090_p2p"))
    )
    assert not finding.ok
    assert "links 3, 5 of GPU 3 are down" in finding.found
    healthy = doctor_checks.gpu_links(replies(topo_m=recorded("pcie_5090"), topo_p2p_r=recorded("pcie_5090_p2p")))
    assert healthy.ok
    assert "no peer access between GPUs 0-1: the GPU does not support it" in healthy.found
    assert doctor_checks.gpu_links(replies()).ok


@pytest.mark.parametrize(
    ("shown", "built", "ok"),
    [
        ("13.0", "13.0", True),
        ("12.8", "12.4", True),
        ("12.2", "12.8", True),
        ("12.8", "13.0", False),
        ("11.4", "12.1", False),
    ],
)
def test_a_driver_that_is_too_old_for_torch(shown: str, built: str, ok: bool) -> None:
    table = f"| NVIDIA-SMI 580.1   Driver Version: 580.1   CUDA Version: {shown}  |"
    finding = doctor_checks.gpu_driver(lambda *_: table, built)
    assert finding.ok is ok
    assert ok or "torch was built for CUDA" in finding.found


def test_another_nccl_before_torchs_own(tmp_path: Path) -> None:
    (tmp_path / "libnccl.so.2").touch()
    finding = doctor_checks.nccl_library(str(tmp_path), bundled=True)
    assert not finding.ok
    assert str(tmp_path) in finding.found
    assert doctor_checks.nccl_library(f":{tmp_path / 'absent'}", bundled=True).ok

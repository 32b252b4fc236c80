"""Clusters in one line."""

import pytest

from tutti.errors import SpecError
from tutti.profile.catalog import parts, with_ports
from tutti.profile.catalog.text_models import cluster_from_text, is_cluster_text


def test_one_line_says_nodes_devices_and_links() -> None:
    cluster = cluster_from_text("4x8:a100-80gb,nvlink3,8*ib-hdr")
    assert cluster.device_count == 32
    assert cluster.nodes[0].device == parts().devices["A100-SXM4-80GB"].name
    node, network = cluster.link("node"), cluster.link("network")
    assert node == parts().links["NVLink3"]
    assert network is not None
    assert network.bandwidth_bytes_per_s == 8 * parts().links["InfiniBand-HDR-200"].bandwidth_bytes_per_s


def test_groups_of_different_nodes_share_the_slowest_link() -> None:
    cluster = cluster_from_text("2x8:h100,nvlink4,400*eth-1g+3x4:v100-32gb,nvlink2,ib-edr")
    assert [node.count * node.devices_per_node for node in cluster.nodes] == [16, 12]
    assert len(cluster.devices) == 2
    assert "H100-SXM5-80GB" in parts().devices
    assert parts().devices["H100-SXM5-80GB"].name in cluster.devices
    assert cluster.link("node") == parts().links["NVLink2"]
    assert cluster.link("network") == parts().links["InfiniBand-EDR-100"]


def test_groups_of_nodes_have_links_of_their_own() -> None:
    quick, slow = cluster_from_text("2x8:h100,nvlink4,8*ib-ndr+3x4:v100-32gb,nvlink2,ib-edr").nodes
    known = parts().links
    assert quick.links == (known["NVLink4"], with_ports(known["InfiniBand-NDR-400"], 8))
    assert slow.links == (known["NVLink2"], known["InfiniBand-EDR-100"])
    # what a group does not say is the next one's, or the last one's before, whatever else is in the line
    first, second, third = cluster_from_text("2x8:h100,nvlink4+1x1:t4,ib-edr+2x4:v100-32gb,eth-1g").nodes
    assert first.links == second.links == (known["NVLink4"], known["InfiniBand-EDR-100"])
    assert third.links == (known["NVLink4"], known["Ethernet-1G"])
    assert cluster_from_text("2x8:h100,nvlink4,ib-ndr").nodes[0].links == ()  # one kind: the cluster's


def test_one_device_needs_no_link() -> None:
    assert cluster_from_text("1x1:t4").links == ()


@pytest.mark.parametrize("name", [*parts().devices])
def test_every_device_is_found_by_its_own_name(name: str) -> None:
    assert cluster_from_text(f"1x1:{name.lower()}").nodes[0].device == parts().devices[name].name


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("4x8:a100-80gb,nvlink3", "no network link"),
        ("1x8:a100-80gb", "no node link"),
        ("0x8:a100-80gb,nvlink3", "1 or more"),
        ("1x2:a1000,nvlink3", "no device 'a1000'"),
        ("1x2:a100,nvlunk", "no link"),
        ("1x2:a100,x*nvlink3", "ports"),
        ("1x2:a100,nvlink3+2", "group"),
    ],
)
def test_what_cannot_be_read_is_said_with_the_remedy(text: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        cluster_from_text(text)


def test_files_are_not_taken_for_clusters() -> None:
    assert not any(is_cluster_text(name) for name in ("cluster.json", "my4x8.json", "4x8.json"))
    assert is_cluster_text("4x8:a100")

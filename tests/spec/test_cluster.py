"""A cluster file written by hand: quantities with units, what may be left out, what is refused."""

from typing import Any

import pytest

from tutti.errors import SpecError
from tutti.spec import codec
from tutti.spec.cluster import ClusterSpec
from tutti.spec.quantities import BYTES, BYTES_PER_S, SECONDS, quantity


def written(**changes: Any) -> dict[str, Any]:
    """A short file; `changes`: of the parts device, node and link."""
    device = {
        "name": "card", "kind": "cuda", "memory_nbytes": "80 GB", "memory_bandwidth_bytes_per_s": "2 TB/s",
        "peak_flops_per_s": {"float32": "19.5 TFLOP/s"}, "price_per_device_hour": 2, "power_w": 400,
    } | changes.get("device", {})  # fmt: skip
    node = {"name": "host", "device": "card", "devices_per_node": 4, "count": 2, "memory_nbytes": 512e9} | changes.get(
        "node", {}
    )
    link = {"tier": "network", "latency_s": "10 us", "bandwidth_bytes_per_s": "100 Gbit/s"} | changes.get("link", {})
    return {"name": "ours", "devices": {"card": device}, "nodes": [node], "links": [link]}


def test_quantities_have_units_and_what_is_not_said_is_assumed() -> None:
    cluster = codec.from_data(ClusterSpec, written())
    card, (node,), (link,) = cluster.devices["card"], cluster.nodes, cluster.links
    assert (card.memory_nbytes, card.memory_bandwidth_bytes_per_s) == (80 * 10**9, 2e12)
    assert card.peak_flops_per_s == {"float32": 19.5e12}
    assert (node.memory_nbytes, type(node.memory_nbytes)) == (512 * 10**9, int)
    assert (link.latency_s, link.bandwidth_bytes_per_s) == (pytest.approx(1e-5), 12.5e9)
    assert card.evidence == link.evidence == "assumed"
    assert codec.loads(ClusterSpec, codec.dumps(cluster)) == cluster


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": {"memory_nbytes": "much"}}, r"devices.card.memory_nbytes: 'much' is not understood.*'80 GB'"),
        ({"device": {"memory_nbytes": 0}}, "memory_nbytes = 0; give a number above 0"),
        ({"device": {"memory_nbytes": 80.5}}, "memory_nbytes = 80.5 is not allowed"),
        ({"device": {"price_per_device_hour": -1}}, "price_per_device_hour = -1; give 0"),
        ({"node": {"count": 0}}, "count = 0"),
        ({"link": {"bandwidth_bytes_per_s": "100 Gb"}}, "'100 Gb' is not understood.*'100 Gbit/s'"),
        ({"link": {"bandwidth_bytes_per_s": -1.0}}, "the network link: bandwidth_bytes_per_s = -1"),
    ],
)
def test_what_cannot_be_is_refused_with_its_field(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        codec.from_data(ClusterSpec, written(**changes))


def test_kinds_of_nodes_have_names_of_their_own() -> None:
    data = written()
    data["nodes"] *= 2
    with pytest.raises(SpecError, match="2 kinds of nodes are named 'host'"):
        codec.from_data(ClusterSpec, data)


def test_bits_are_told_from_bytes_by_more_than_a_capital() -> None:
    assert (
        quantity("12.5 GB/s", BYTES_PER_S) == quantity("100Gbit/s", BYTES_PER_S) == quantity("1e11 bit/s", BYTES_PER_S)
    )
    assert quantity("10 Gb/s", BYTES_PER_S) is None  # bits or bytes?
    assert quantity("1 KiB", BYTES) == 1024
    assert quantity("5 us", SECONDS) == pytest.approx(5e-6)
    assert quantity("1.2.3", BYTES) is None

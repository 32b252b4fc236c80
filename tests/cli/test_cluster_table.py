"""What a cluster's tables say of hosts that differ from the others."""

import dataclasses
import io

from rich.console import Console

from cost_model.examples import cluster, gpu
from tutti.cli.cluster_view import cluster_tables
from tutti.config.cluster import ClusterSpec, CopyRate, LinkSpec


def printed(machines: ClusterSpec) -> str:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(*cluster_tables(machines), sep="\n")
    return console.export_text()


def test_links_of_hosts_and_hosts_that_share_a_core_are_shown() -> None:
    machines = cluster()
    (node,) = machines.nodes
    slow = LinkSpec(tier="network", backend="gloo", latency_s=1e-3, bandwidth_bytes_per_s=11e6)
    others = [dataclasses.replace(node, name=name, count=2, links=(slow,), turns=2.0) for name in ("slow", "slower")]
    plain = printed(machines)
    assert "in place of" not in plain
    assert "hosts per core" not in plain
    text = printed(dataclasses.replace(machines, nodes=(node, *others)))
    assert "links of slow and 1 more, slower and 1 more, in place of the cluster's" in text
    assert "11 MB/s" in text
    assert "hosts per core" in text


def test_copies_and_launches_are_shown_where_they_were_measured() -> None:
    rates = tuple(
        CopyRate(direction=way, pinned=pinned, bytes_per_s=rate)
        for way, pinned, rate in (("to_device", False, 6e9), ("to_device", True, 26e9), ("to_host", True, 24e9))
    )
    text = printed(cluster(gpu(launch_s=5e-6), copy_rates=rates))
    assert "to and from a device" in text
    assert "26 GB/s, 24 GB/s" in text
    assert "launch of a kernel: 5 us of the host" in text
    plain = printed(cluster(gpu()))
    assert "to and from a device" not in plain
    assert "launch of a kernel" not in plain

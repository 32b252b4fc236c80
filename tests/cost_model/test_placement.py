"""Where ranks are placed, and which link their ring uses."""

import dataclasses
from typing import Any

import pytest

from cost_model.examples import cluster, cpu, gpu, link, mlp, plan
from tutti.config.cluster import ClusterSpec, NodeSpec, slowest_link
from tutti.config.compression import Compression
from tutti.config.consistency_modes import Relaxed
from tutti.config.plan import SyncPlan
from tutti.cost_model import cost_constants, predict
from tutti.cost_model.rank_placement import link_of_tier, place_ranks, ring_link, ring_tier
from tutti.errors import PlanError


def cards(count: int = 2, per_node: int = 4) -> ClusterSpec:
    return cluster(gpu(), count=count, devices_per_node=per_node)


def test_cuda_ranks_fill_hosts_in_order() -> None:
    host_groups = place_ranks(cards(), 6)
    assert [(host_group.hosts, host_group.ranks_per_host) for host_group in host_groups] == [(1, 4), (1, 2)]
    assert place_ranks(cards(), 8)[0].hosts == 2
    assert ring_tier(place_ranks(cards(), 4)) == "node"
    assert ring_tier(place_ranks(cards(), 5)) == "network"


def test_more_ranks_than_cuda_devices_are_refused() -> None:
    with pytest.raises(PlanError, match=r"9 ranks, .* has 8 devices; set mesh.replicate to at most 8"):
        place_ranks(cards(), 9)


@pytest.mark.parametrize(("ranks", "threads", "sharing"), [(1, 4, 1), (2, 2, 2), (3, 1, 3), (4, 1, 4), (8, 1, 8)])
def test_ranks_of_a_cpu_host_share_its_cores(ranks: int, threads: int, sharing: int) -> None:
    (host_group,) = place_ranks(cluster(), ranks)
    assert (host_group.threads, host_group.sharing, host_group.ranks) == (threads, sharing, ranks)
    assert host_group.oversubscribed == max(1, ranks / 4)
    assert host_group.memory_nbytes == 16 * 2**30 / ranks


@pytest.mark.parametrize(("cores", "ranks"), [(1, 2), (1, 5), (2, 3), (2, 4), (4, 6)])
@pytest.mark.parametrize(
    "sync",
    [
        SyncPlan(),
        SyncPlan(mode="local", relaxed=Relaxed(period=2)),
        SyncPlan(mode="ring"),
        SyncPlan(compress=Compression(method="one-bit")),
    ],
    ids=["sums", "averages", "neighbours", "codes"],
)
def test_ranks_beyond_cores_take_as_much_longer_as_cores_are_lacking(cores: int, ranks: int, sync: SyncPlan) -> None:
    """All work of a rank takes longer than with a core for each rank, by the ratio of ranks to cores and a factor.

    Links take no time here. The factor for switching is the only number that does not follow from the cluster.
    """

    def step_s(cores: int) -> float:
        rates: dict[str, Any] = {"peak_flops_per_s": {"float32": 1e9 * cores}, "gemm": ()}
        device = cpu(cores=cores, memory_bandwidth_bytes_per_s=1e9 * cores, **rates)
        machines = cluster(device, (link("node", 0.0, 1e21),))
        assert place_ranks(machines, ranks)[0].threads == 1
        return predict(mlp(64), machines, plan(12 * ranks, ranks=ranks, sync=sync)).step_time_s.value

    (host_group,) = place_ranks(cluster(cpu(cores=cores)), ranks)
    assert host_group.slowdown == pytest.approx(ranks / cores * cost_constants.OVERSUBSCRIBED)
    assert step_s(cores) == pytest.approx(host_group.slowdown * step_s(ranks), rel=1e-9)


def test_cpu_hosts_take_one_rank_each_before_they_share() -> None:
    hosts = cluster(count=2)
    assert [
        (host_group.hosts, host_group.ranks_per_host, host_group.threads) for host_group in place_ranks(hosts, 2)
    ] == [(2, 1, 4)]
    assert [
        (host_group.hosts, host_group.ranks_per_host, host_group.threads) for host_group in place_ranks(hosts, 4)
    ] == [(2, 2, 2)]


def test_unequal_cpu_hosts_take_ranks_by_their_cores() -> None:
    machines = ClusterSpec(
        name="two kinds",
        devices={"small": cpu(cores=2), "large": cpu(cores=6)},
        nodes=(
            NodeSpec(name="a", device="small", memory_nbytes=2**33),
            NodeSpec(name="b", device="large", memory_nbytes=2**33),
        ),
        links=(link("network"),),
    )
    assert [(host_group.node.name, host_group.ranks_per_host) for host_group in place_ranks(machines, 8)] == [
        ("a", 2),
        ("b", 6),
    ]


def test_hosts_have_the_ranks_that_their_job_gives_them() -> None:
    plain = cluster(count=2)
    nodes = (replace_node(plain, name="a", ranks=2, count=1), replace_node(plain, name="b", ranks=1, count=2))
    job = dataclasses.replace(plain, nodes=nodes)
    placed = [(group.node.name, group.hosts, group.ranks_per_host, group.threads) for group in place_ranks(job, 4)]
    assert placed == [("a", 1, 2, 2), ("b", 2, 1, 4)]
    assert sum(group.ranks for group in place_ranks(job, 3)) == 3, "another plan than the job's is placed as ever"
    few = dataclasses.replace(cards(), nodes=(replace_node(cards(), ranks=3),))
    assert [(group.hosts, group.ranks_per_host) for group in place_ranks(few, 6)] == [(2, 3)]


def replace_node(machines: ClusterSpec, **changes: Any) -> NodeSpec:
    return dataclasses.replace(machines.nodes[0], **changes)


def test_ring_takes_the_link_of_its_slowest_tier() -> None:
    both = cluster(count=2)
    assert ring_link(both, place_ranks(both, 4)).bandwidth_bytes_per_s == 1.25e8
    host = cluster()
    assert ring_link(host, place_ranks(host, 4)).bandwidth_bytes_per_s == 1e9


def test_copies_between_more_ranks_than_cores_share_the_cores() -> None:
    host = cluster()
    crowded = ring_link(host, place_ranks(host, 8))
    assert (crowded.bandwidth_bytes_per_s, crowded.latency_s) == (0.5e9, 2e-4)


def test_a_missing_link_is_named_with_the_remedy() -> None:
    uncontended = cluster(links=())
    with pytest.raises(PlanError, match=r"no link of tier 'node' \(it has: none\), which 2 ranks need; measure it"):
        ring_link(uncontended, place_ranks(uncontended, 2))


def test_of_the_hosts_in_use_the_slowest_link_counts_in_each_respect() -> None:
    far, thin = link("network", 1e-3, 1e9), link("network", 1e-6, 1e8, evidence="published", ranks=2)
    near = (link("node", 1e-5, 1e10),)
    node = NodeSpec(name="far", device="d", devices_per_node=2, memory_nbytes=2**30, links=(far, *near))
    other = dataclasses.replace(node, name="thin", links=(thin, *near))
    idle = dataclasses.replace(node, name="single", devices_per_node=1, links=())
    machines = ClusterSpec(name="three", devices={"d": gpu()}, nodes=(node, other, idle), links=())
    assert link_of_tier(machines, place_ranks(machines, 2), "network") == far
    both = link_of_tier(machines, place_ranks(machines, 4), "network")
    assert both is not None
    assert (both.latency_s, both.bandwidth_bytes_per_s) == (1e-3, 1e8)
    assert (both.evidence, both.ranks) == ("published", 2)
    assert link_of_tier(machines, place_ranks(machines, 5), "network") is None
    assert link_of_tier(machines, place_ranks(machines, 5), "node") == near[0]  # one device alone needs none
    with pytest.raises(PlanError, match="no link of tier 'network'"):
        ring_link(machines, place_ranks(machines, 5))


def test_a_bend_of_one_link_counts_where_another_is_straight() -> None:
    bent = link("network", 1e-6, 4e9, large_nbytes=2**20, large_bandwidth_bytes_per_s=1e9, core_s_per_nbyte=1e-9)
    straight = link("network", 1e-6, 2e9, core_s_per_nbyte=3e-9)
    both = slowest_link([bent, straight, bent])
    assert (both.large_nbytes, both.large_bandwidth_bytes_per_s) == (2**20, 1e9)
    assert both.core_s_per_nbyte == 3e-9
    assert slowest_link([bent, bent]) == bent

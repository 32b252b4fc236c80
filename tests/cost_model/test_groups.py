"""Where the groups of a mesh lie, and which of them share a link."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_model.examples import cluster, gpu, link, mlp
from cost_model.examples_mesh import machines, meshed, part
from tutti.config.model import ModelSpec
from tutti.config.plan import SyncPlan
from tutti.cost_model import predict
from tutti.cost_model.group_links import Network, Span, network, span_of
from tutti.cost_model.rank_placement import place_ranks
from tutti.errors import PlanError


def net(mesh: Any, machine: Any = None) -> Network:
    plan = meshed(64, mesh=mesh)
    machine = machine or machines(hosts=4, per_host=8)
    return network(machine, place_ranks(machine, plan.world_size), plan)


def test_the_mesh_order_says_which_axis_stays_within_a_host() -> None:
    inner = net({"replicate": 4, "split": 8})
    assert inner.group("split").span == Span(ranks=8, hosts=1, per_host=8, sharing_groups=1, leaving=0, fewest=8)
    # every card of a host has replicas on the other hosts: 8 groups meet at each host's connection
    assert inner.group("replicate").span == Span(ranks=4, hosts=4, per_host=1, sharing_groups=8, leaving=8)
    outer = net({"split": 8, "replicate": 4})
    assert outer.group("split").span == Span(ranks=8, hosts=4, per_host=2, sharing_groups=4, leaving=4, fewest=2)
    assert outer.group("replicate").span.hosts == 1
    assert inner.group("replicate", "split").span == Span(
        ranks=32, hosts=4, per_host=8, sharing_groups=1, leaving=1, fewest=8
    )


def test_groups_that_straddle_hosts_count_where_they_meet() -> None:
    # with 3 ranks per group on hosts of 4, groups 1 and 2 straddle hosts; at most two of them share a connection
    span = span_of((("replicate", 4), ("split", 3)), ("split",), ((3, 4),))
    assert (span.ranks, span.hosts, span.per_host, span.sharing_groups) == (3, 2, 3, 2)


def test_shared_connections_divide_the_bandwidth() -> None:
    uncontended, shared = net({"replicate": 4}, machines(4, 1)), net({"replicate": 4, "split": 8})
    assert shared.group("replicate").pass_on(1e9) == pytest.approx(
        8 * uncontended.group("replicate").pass_on(1e9), rel=1e-3
    )
    assert shared.group("replicate").all_to_all(1e9) == pytest.approx(
        8 * uncontended.group("replicate").all_to_all(1e9), rel=1e-3
    )


def test_cards_take_the_quickest_way_and_gloo_the_ring() -> None:
    everyone = net({"replicate": 32}).group("replicate")
    small, large = everyone.all_reduce(1e3), everyone.all_reduce(1e9)
    ring = 2 * 31 * 5e-6 + 2 * 31 / 32 * 1e9 / 2.5e10
    assert small < 2 * 31 * 5e-6  # a tree has fewer hops
    assert large < ring  # within hosts first, then an eighth over each connection's share
    hosts = cluster(count=4)
    ranks = network(hosts, place_ranks(hosts, 4), meshed(64, mesh={"replicate": 4})).group("replicate")
    assert ranks.all_reduce(1e6) == pytest.approx(6 * 1e-3 + 1.5 * 1e6 / 1.25e8)


@pytest.mark.parametrize(
    ("core_ns", "ranks", "share"),
    [
        (None, 2, 0.3),
        (0.0, 2, 0.0),
        (4.0, 2, 0.125),
        (4.0, 4, 0.125),
        (4.0, 8, 0.125),
        (4.0, 16, 0.125),
        (99.0, 8, 1.0),
    ],
)
def test_what_exchanges_take_of_a_ranks_cores(core_ns: float | None, ranks: int, share: float) -> None:
    """4 ns per byte at 0.125 GB/s take half a core: an eighth of the four cores of a rank that is alone on its host.

    Where ranks share both the cores and the connection, the fraction is the same. Latencies take no core. An assumed
    fraction applies to the whole time.
    """
    core_s = None if core_ns is None else core_ns * 1e-9
    machine = cluster(count=2, links=(link("node"), link("network", 1e-3, 1.25e8, core_s_per_nbyte=core_s)))
    host_groups = place_ranks(machine, ranks)
    inside = {"replicate": 2, "split": ranks // 2}
    plan = meshed(64, mesh=inside if ranks > 2 else {"replicate": 2})
    group = network(machine, host_groups, plan).group("replicate")
    sent_s = group.all_reduce(1e6) - (0 if core_ns is None else 2 * 1e-3)
    assert group.on_cores(host_groups[0]).all_reduce(1e6) == pytest.approx(share * sent_s)


def test_of_a_core_that_hosts_take_turns_on_a_rank_has_its_part() -> None:
    """A byte takes 4 ns of a core. A rank has four cores, or two where two hosts take turns on each core."""
    machine = cluster(count=2, links=(link("network", 1e-3, 1.25e8, core_s_per_nbyte=4e-9),))
    taken = []
    for turns in (1.0, 2.0):
        shared = replace(machine, nodes=tuple(replace(node, turns=turns) for node in machine.nodes))
        host_groups = place_ranks(shared, 2)
        group = network(shared, host_groups, meshed(64, mesh={"replicate": 2})).group("replicate")
        taken.append(group.on_cores(host_groups[0]).all_reduce(1e6))
    assert taken == pytest.approx([1e6 * 4e-9 / 4, 1e6 * 4e-9 / 2])


@given(
    core_ns=st.floats(0, 100), bandwidth=st.floats(1e6, 1e11), more=st.floats(1, 100), large=st.floats(0.1, 1),
    nbytes=st.floats(1, 1e9),
)  # fmt: skip
def test_quicker_links_take_no_more_of_the_cores(
    core_ns: float, bandwidth: float, more: float, large: float, nbytes: float
) -> None:
    def taken(small: float, beyond: float) -> tuple[float, float]:
        spec = link("network", 1e-3, small, core_s_per_nbyte=core_ns * 1e-9, large_nbytes=2**20,
                    large_bandwidth_bytes_per_s=beyond)  # fmt: skip
        machine = cluster(count=2, links=(spec,))
        host_groups = place_ranks(machine, 2)
        group = network(machine, host_groups, meshed(64, mesh={"replicate": 2})).group("replicate")
        return group.all_reduce(nbytes), group.on_cores(host_groups[0]).all_reduce(nbytes)

    lasts_s, cores_s = taken(bandwidth, large * bandwidth)
    assert cores_s <= min(lasts_s, core_ns * 1e-9 * nbytes / 4) * (1 + 1e-9)
    for quicker in ((more, more), (more, 1.0), (1.0, min(more, 1 / large))):
        _, less_s = taken(quicker[0] * bandwidth, quicker[1] * large * bandwidth)
        assert less_s <= cores_s * (1 + 1e-9)


@pytest.mark.parametrize(("each", "said"), [(None, "assumed: {}"), (4e-9, "{}: 4 ns a byte (measured)")])
def test_a_prediction_says_whether_what_exchanges_take_was_measured(each: float | None, said: str) -> None:
    machine = cluster(count=2, links=(link("node"), link("network", 1e-3, 1.25e8, core_s_per_nbyte=each)))
    notes = predict(mlp(), machine, meshed(64, mesh={"replicate": 2})).notes
    assert said.format("communication hidden behind backward takes core time from it") in notes


def test_cards_exchange_beside_their_work() -> None:
    machine = machines(hosts=2, per_host=1)
    host_groups = place_ranks(machine, 2)
    group = network(machine, host_groups, meshed(64, mesh={"replicate": 2})).group("replicate")
    assert group.on_cores(host_groups[0]).all_reduce(1e9) == 0


def test_gradients_of_hosts_with_several_cpu_ranks_are_summed_in_two_tiers() -> None:
    """As in comm/hierarchical.py, a host sends as much as one rank in a ring of hosts, however many ranks it has."""
    links = (link("node", 1e-5, 1e9), link("network", 1e-3, 1e8))
    hosts = cluster(count=2, links=links)
    four = network(hosts, place_ranks(hosts, 4), meshed(64, mesh={"replicate": 4})).group("replicate")
    assert four.all_reduce(1e6) == pytest.approx(6 * 1e-3 + 1.5 * 1e6 / 1e8)
    inside = 2 * 1e-5 + 1e6 / 1e9
    assert four.summed(1e6) == pytest.approx(inside + 2 * 1e-3 + 1e6 / 1e8)
    assert four.summed(0) == 0
    two = network(hosts, place_ranks(hosts, 2), meshed(64, mesh={"replicate": 2})).group("replicate")
    assert two.summed(1e6) == two.all_reduce(1e6) == pytest.approx(2 * 1e-3 + 1e6 / 1e8)
    # two groups with one rank per host: nothing to reduce inside a host, and they share the connection
    crossed = network(hosts, place_ranks(hosts, 4), meshed(64, mesh={"replicate": 2, "split": 2})).group("replicate")
    assert crossed.summed(1e6) == crossed.all_reduce(1e6) == pytest.approx(2 * 1e-3 + 1e6 / 0.5e8)


def test_what_sharding_divides_crosses_to_each_host_of_several_cpu_ranks_once() -> None:
    """As in comm/hierarchical.py, a host of two ranks gets half of 1 MB from the other host.

    A rank reads half of that from its neighbour. Other gathers are rings over all ranks.
    """
    hosts = cluster(count=2, links=(link("node", 1e-5, 1e9), link("network", 1e-3, 1e8)))
    four = network(hosts, place_ranks(hosts, 4), meshed(64, mesh={"shard": 4})).group("shard")
    assert four.divided(1e6) == pytest.approx(1e-5 + 0.5e6 / 1e9 + 1e-3 + 0.5e6 / 1e8)
    assert four.divided(0) == 0
    assert four.scatter(1e6) == pytest.approx(3 * 1e-3 + 0.75e6 / 1e8)
    two = network(hosts, place_ranks(hosts, 2), meshed(64, mesh={"shard": 2})).group("shard")
    assert two.divided(1e6) == two.scatter(1e6) == pytest.approx(1e-3 + 0.5e6 / 1e8)


def test_a_stage_with_more_to_send_has_the_connection_alone_once_the_others_are_done() -> None:
    """Two stages on each of two hosts send 1 and 3 MB: at half the rate until 2 MB are sent, the rest at full rate."""
    hosts = cluster(count=2, links=(link("node", 1e-5, 1e9), link("network", 1e-3, 1e8)))
    crossed = network(hosts, place_ranks(hosts, 4), meshed(64, mesh={"replicate": 2, "stage": 2}))
    uneven = [crossed.of_stage(stage, (1e6, 3e6)).group("replicate") for stage in range(2)]
    assert uneven[0].all_reduce(1e6) == pytest.approx(2 * 1e-3 + 2e6 / 1e8)
    assert uneven[1].all_reduce(3e6) == pytest.approx(2 * 1e-3 + 4e6 / 1e8)
    assert all(crossed.of_stage(stage, (3e6, 3e6)) is crossed for stage in range(2))
    assert crossed.of_stage(0, (0.0, 3e6)).group("replicate").all_reduce(0) == 0
    # stages on hosts of their own share no connection
    apart = network(hosts, place_ranks(hosts, 4), meshed(64, mesh={"stage": 2, "replicate": 2}))
    assert apart.of_stage(1, (1e6, 3e6)) is apart
    small, large = (part(name, flops=1.0, parameters=count) for name, count in (("small", 10**6), ("large", 3 * 10**6)))
    done = predict(ModelSpec(name="m", modules=(small, large)), hosts, meshed(64, 2, mesh={"replicate": 2, "stage": 2}))
    # gradients of 2 bytes take 0.08 s and 9 ms of latencies and copies; with half the rate throughout, 0.12 s
    assert done.phases["exposed_communication"] == pytest.approx(8e6 / 1e8, rel=0.15)


def test_all_to_all_waits_for_the_connection() -> None:
    spread = net({"expert": 32}).group("expert")
    # each rank sends 24 of its 32 MB to other hosts, over a connection that 8 ranks share
    assert spread.all_to_all(32e6) == pytest.approx(31 * 5e-6 + 8 * 24e6 / 2.5e10)
    within = net({"expert": 8}).group("expert")
    assert within.all_to_all(32e6) == pytest.approx(7 * 1e-6 + 28e6 / 3e11)


def test_dims_of_a_grid_have_links_of_their_own() -> None:
    """There are two hosts of two ranks. In a grid of 2 x 2, both columns cross between hosts at once and rows do not.

    In a row of four, only the middle crosses; the ranks inside meanwhile send to one neighbour on their host.
    """
    hosts = cluster(count=2, links=(link("node", 1e-5, 1e9), link("network", 1e-3, 1e8)))
    along = network(hosts, place_ranks(hosts, 4), meshed(64, mesh={"space": 4})).along_grid
    assert along((2, 2), 0).to_neighbours(1e6) == pytest.approx(1e-3 + 2 * 1e6 / 1e8)
    assert along((2, 2), 1).to_neighbours(1e6) == pytest.approx(1e-5 + 1e6 / 1e9)
    assert along((1, 4), 1).to_neighbours(1e6) == pytest.approx(1e-3 + 1e6 / 1e8)
    assert along((1, 4), 0).to_neighbours(1e6) == along((4,), 0).to_neighbours(0) == 0
    # inside a row of four on four hosts a rank sends to both sides
    uncontended = cluster(count=4, links=(link("network", 1e-3, 1e8),))
    row = network(uncontended, place_ranks(uncontended, 4), meshed(64, mesh={"space": 4})).along_grid((4,), 0)
    assert row.to_neighbours(1e6) == pytest.approx(1e-3 + 2 * 1e6 / 1e8)


def test_neighbours_on_a_host_do_not_use_the_network() -> None:
    links = net({"stage": 4, "replicate": 4}).neighbours("stage")
    # four ranks per stage, two stages per host; the last stage's neighbour is the first
    assert [link.latency_s for link in links] == [1e-6, 5e-6, 1e-6, 5e-6]
    assert links[1].bandwidth_bytes_per_s == 2.5e10 / 4


def test_a_missing_link_is_named() -> None:
    machine = cluster(gpu(), (link("node"),), count=2, devices_per_node=2)
    net({"replicate": 2, "split": 2}, machine).group("split")
    with pytest.raises(PlanError, match="no link of tier 'network'"):
        net({"replicate": 2, "split": 2}, machine).group("replicate")


@settings(deadline=None)
@given(
    degrees=st.permutations([("replicate", 4), ("split", 2), ("stage", 4)]),
    nbytes=st.floats(1.0, 1e9),
    factor=st.floats(1.0, 100.0),
)
def test_more_bandwidth_is_never_slower_and_bytes_never_quicker(degrees: Any, nbytes: float, factor: float) -> None:
    slow, quick = net(dict(degrees)), net(dict(degrees), machines(network=factor))
    for axis, _ in degrees:
        for way in ("all_reduce", "scatter", "all_to_all", "pass_on"):
            seconds = getattr(slow.group(axis), way)
            assert getattr(quick.group(axis), way)(nbytes) <= seconds(nbytes) * (1 + 1e-12)
            assert seconds(nbytes) <= seconds(2 * nbytes)
            assert seconds(0.0) == 0.0


@pytest.mark.parametrize("hidden", [True, False])
def test_where_hosts_take_turns_less_of_an_exchange_is_hidden(hidden: bool) -> None:
    """The more hosts take turns on a core, the longer ranks wait for a link of a given speed.

    For a link that takes no time they never wait. (Switching costs the same for any number of hosts above one.)
    """
    slow = link("network", 1e-4, 1.5e7, core_s_per_nbyte=0.0)
    machine = cluster(count=2, links=(slow if hidden else link("network", 0.0, 1e18),))
    copies = replace(meshed(2048, mesh={"replicate": 2}), sync=SyncPlan(bucket_nbytes=2**20))
    waited = []
    for turns in (1.5, 2.0, 4.0):
        shared = replace(machine, nodes=tuple(replace(node, turns=turns) for node in machine.nodes))
        waited.append(predict(mlp(512, 6), shared, copies).phases["exposed_communication"])
    assert (waited[1] > 1.01 * waited[0] and waited[2] > 1.01 * waited[1]) == hidden
    assert hidden or waited == pytest.approx([waited[0]] * 3)

"""Who carries what between hosts of several ranks."""

import pytest

from tutti.comm.hierarchical import make_relay_routes

HOSTS = [
    [[0, 1], [2, 3]],
    [[0, 1, 2], [3]],
    [[0], [1, 2], [3, 4]],
    [[0, 2, 4, 6, 8], [1, 3], [5, 7, 9]],
]


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_what_is_a_ranks_crosses_to_each_other_host_once(hosts: list[list[int]]) -> None:
    """Who sends to whom and who expects it from whom are the same; it lies where `carried` says."""
    routes = {place: make_relay_routes(hosts, place) for places in hosts for place in places}
    for place, own in routes.items():
        assert [
            next(host for host, places in enumerate(hosts) if one in places) for one in own.relay_peers
        ] == own.others
        assert sorted(other for other in routes if place in routes[other].relay_peers) == sorted(own.relayed_ranks)
        assert len(own.relayed_ranks) <= own.max_relayed_ranks
        for other in routes:
            if other in hosts[own.host]:
                continue
            carrier, row = own.carried(other)
            assert routes[hosts[own.host][carrier]].relayed_ranks[row] == other


def test_ranks_of_hosts_of_one_size_have_one_partner_each() -> None:
    for place in range(4):
        routes = make_relay_routes([[0, 1], [2, 3]], place)
        assert routes.relay_peers == routes.relayed_ranks == [(place + 2) % 4]


def test_a_rank_of_this_host_is_carried_by_nobody() -> None:
    with pytest.raises(ValueError, match="rank 1 is on this host"):
        make_relay_routes([[0, 1], [2, 3]], 0).carried(1)

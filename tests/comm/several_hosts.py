"""Ranks that take themselves to be on several hosts, told apart by a name given here."""

from tutti.comm import Desk, TieredDesk, make_desk_or_tiers, rooms
from tutti.comm.world import join


def on_hosts(hosts: tuple[int, ...]) -> tuple[int, Desk | TieredDesk | None]:
    """This rank's place and desk, where hosts have so many ranks."""
    world = join()
    own = [host for host, ranks in enumerate(hosts) for _ in range(ranks)][world.rank]
    rooms.host_identity = lambda: f"host {own}"
    return world.rank, make_desk_or_tiers()


def tiered(hosts: tuple[int, ...]) -> tuple[int, TieredDesk]:
    """The same where one of them has several."""
    rank, desk = on_hosts(hosts)
    assert isinstance(desk, TieredDesk)
    return rank, desk

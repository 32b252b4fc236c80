"""Ranks that take themselves to be on several hosts, told apart by a name given here."""

from tutti.comm import shared_segment
from tutti.comm.hierarchical import HierarchicalCommunicator, make_communicator
from tutti.comm.shared_memory import SharedMemoryCommunicator
from tutti.comm.world import join_world


def on_hosts(hosts: tuple[int, ...]) -> tuple[int, SharedMemoryCommunicator | HierarchicalCommunicator | None]:
    """This rank's place and desk, where hosts have so many ranks."""
    world = join_world()
    own = [host for host, ranks in enumerate(hosts) for _ in range(ranks)][world.rank]
    shared_segment.host_identity = lambda: f"host {own}"
    return world.rank, make_communicator()


def tiered(hosts: tuple[int, ...]) -> tuple[int, HierarchicalCommunicator]:
    """The same where one of them has several."""
    rank, communicator = on_hosts(hosts)
    assert isinstance(communicator, HierarchicalCommunicator)
    return rank, communicator

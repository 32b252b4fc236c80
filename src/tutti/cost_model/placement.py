"""Which device each rank of a plan computes on, and what it has there: cores, memory, its share of the links.

Ranks are seated in order of the cluster's nodes, `devices_per_node` on each host. A cluster of CPU hosts takes more
ranks than devices: they then share the cores, each host in proportion to its own.
"""

from dataclasses import dataclass
from itertools import groupby

from tutti.config.cluster import ClusterSpec, DeviceSpec, LinkSpec, LinkTier, NodeSpec, slowest_link
from tutti.cost_model import constants
from tutti.cost_model.counts import cut_sizes
from tutti.cost_model.network import Link, link_of
from tutti.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Consecutive ranks, on `hosts` equal hosts with `ranks_per_host` ranks each.

    `sharing`: ranks on one device (1 on CUDA). `threads`: cores each rank computes with.
    """

    node: NodeSpec
    device: DeviceSpec
    hosts: int
    ranks_per_host: int
    sharing: int
    threads: int

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host

    @property
    def oversubscribed(self) -> float:
        """Ranks for each core where there are more ranks than cores, else 1."""
        cores = max(1, self.device.cores)
        return max(1.0, self.sharing / cores) if self.device.kind == "cpu" else 1.0

    @property
    def slowdown(self) -> float:
        """How many times as long the work of a rank's cores takes because ranks take turns on them: so many times as
        there are ranks for a core, and what switching costs. Of hosts that take turns the first is in their rates."""
        switching = self.oversubscribed > 1 or (self.device.kind == "cpu" and self.node.turns > 1)
        return self.oversubscribed * (constants.OVERSUBSCRIBED if switching else 1.0)

    @property
    def memory_nbytes(self) -> float:
        """Memory that one rank may fill: a CUDA device's own; on CPU its part of the host's."""
        if self.device.kind == "cuda":
            return self.device.memory_nbytes
        return self.node.memory_nbytes / self.ranks_per_host


def place(cluster: ClusterSpec, ranks: int) -> tuple[Seat, ...]:
    """Seat `ranks` ranks. Raises PlanError where there are too few CUDA devices."""
    capacity = sum(node.count * node.devices_per_node for node in cluster.nodes)
    if ranks > capacity:
        return _sharing(cluster, ranks, capacity)
    seats: list[Seat] = []
    for node in cluster.nodes:
        each = node.devices_per_node
        hosts = min(node.count, ranks // each)
        rest = min(ranks - hosts * each, each) if hosts < node.count else 0
        seats += [_seat(cluster, node, count, many) for count, many in ((hosts, each), (1, rest)) if count and many]
        ranks -= hosts * each + rest
    return tuple(seats)


def _sharing(cluster: ClusterSpec, ranks: int, capacity: int) -> tuple[Seat, ...]:
    """More ranks than devices: they share the cores of the hosts, each host in proportion to its own."""
    if any(cluster.devices[node.device].kind != "cpu" for node in cluster.nodes):
        raise PlanError(
            f"the plan has {ranks} ranks, but cluster {cluster.name!r} has {capacity} devices; "
            f"set mesh.replicate to at most {capacity}"
        )
    cores = [
        max(1, cluster.devices[node.device].cores) * node.devices_per_node
        for node in cluster.nodes
        for _ in range(node.count)
    ]
    seats: list[Seat] = []
    sizes = iter(cut_sizes(ranks, len(cores), cores))
    for node in cluster.nodes:
        for each, alike in groupby(next(sizes) for _ in range(node.count)):
            seats += [_seat(cluster, node, len(list(alike)), each)] if each else []
    return tuple(seats)


def _seat(cluster: ClusterSpec, node: NodeSpec, hosts: int, ranks_per_host: int) -> Seat:
    device = cluster.devices[node.device]
    sharing = -(-ranks_per_host // node.devices_per_node) if device.kind == "cpu" else 1
    threads = max(1, device.cores // sharing) if device.kind == "cpu" else 1
    return Seat(node=node, device=device, hosts=hosts, ranks_per_host=ranks_per_host, sharing=sharing, threads=threads)


def ring_tier(seats: tuple[Seat, ...]) -> LinkTier:
    """The slowest tier a flat ring over all ranks crosses: the network as soon as there are two hosts."""
    return "network" if sum(seat.hosts for seat in seats) > 1 else "node"


def seated_link(cluster: ClusterSpec, seats: tuple[Seat, ...], tier: LinkTier) -> LinkSpec | None:
    """The link of a tier that groups of these seats' ranks use, whichever hosts they span: the slowest of all hosts
    that have ranks. None where one that needs it has none. A host that cannot have two ranks needs none within it."""
    nodes = [
        seat.node for seat in seats if tier != "node" or seat.device.kind == "cpu" or seat.node.devices_per_node > 1
    ]
    links = [cluster.link_at(node, tier) for node in nodes] or [cluster.link(tier)]
    known = [link for link in links if link is not None]
    return slowest_link(known) if len(known) == len(links) else None


def no_link(cluster: ClusterSpec, seats: tuple[Seat, ...], tier: LinkTier) -> PlanError:
    """That a host which needs a link of a tier has none, and the remedy."""
    have = ", ".join(dict.fromkeys(link.tier for link in cluster.every_link)) or "none"
    return PlanError(
        f"cluster {cluster.name!r} has no link of tier {tier!r} (it has: {have}), which "
        f"{sum(seat.ranks for seat in seats)} ranks need; measure it with tutti probe or write it down in links"
    )


def ring_link(cluster: ClusterSpec, seats: tuple[Seat, ...]) -> Link:
    """The link that a flat ring's slowest hop sees. Raises PlanError where the cluster does not say.

    A ring of consecutive ranks enters and leaves each host once, so the network is not shared among a host's ranks.
    Between CPU ranks of one host all hops are copies by the same cores: beyond the ranks the link was measured
    with, and beyond the cores, they share its bandwidth.
    """
    tier = ring_tier(seats)
    spec = seated_link(cluster, seats, tier)
    if spec is None:
        raise no_link(cluster, seats, tier)
    flows = 1.0
    if tier == "node" and seats[0].device.kind == "cpu":
        flows = max(1.0, seats[0].ranks / max(spec.ranks, seats[0].device.cores, 1))
    return link_of(spec, flows)

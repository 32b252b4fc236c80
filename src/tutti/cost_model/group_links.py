"""Groups of ranks along axes of the mesh: which links each uses, who shares them, and what collectives cost.

Ranks are numbered row-major over the mesh (outermost axis first) and placed in that order, so the mesh's order
decides which hosts a group spans. All groups along the same axes communicate at the same time; groups that cross
one host's connection to the network share it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import cast

import numpy as np
from numpy.typing import NDArray

import tutti.cost_model.cost_constants as cost_constants
from tutti.config.cluster import ClusterSpec, LinkTier
from tutti.config.plan import Plan
from tutti.config.vocabulary import AxisName
from tutti.cost_model.rank_placement import (
    HostGroup,
    Link,
    hierarchical_all_reduce,
    link_of,
    link_of_tier,
    message,
    no_link,
    ring_all_reduce,
    ring_reduce_scatter,
    tree_all_reduce,
)

Mesh = tuple[tuple[AxisName, int], ...]


Hosts = tuple[tuple[int, int], ...]
"""(hosts, ranks on each of them), in rank order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The hosts over which the groups along some axes extend.

    Attributes:
        ranks: ranks of a group.
        hosts: the most hosts that one group spans.
        per_host: the most of its ranks on one host.
        fewest: the fewest of its ranks on one host.
        sharing_groups: the most groups that cross one host's connection.
        leaving: the most ranks of a host whose next neighbour along the axes is on another host.
    """

    ranks: int
    hosts: int
    per_host: int
    sharing_groups: int
    leaving: int
    fewest: int = 1


@lru_cache(maxsize=4096)
def span_of(mesh: Mesh, axes: tuple[AxisName, ...], hosts: Hosts) -> Span:
    """Return the span of the groups along `axes`."""
    rows = _members(mesh, axes, hosts)
    ranks = rows.shape[1]
    if ranks == 1:
        return Span(ranks=1, hosts=1, per_host=1, sharing_groups=1, leaving=0)
    enters = np.concatenate([np.ones((len(rows), 1), dtype=bool), rows[:, 1:] != rows[:, :-1]], axis=1)
    runs = enters.sum(axis=1)
    crossing = runs > 1
    begins = np.flatnonzero(enters)
    lengths = np.diff(np.append(begins, rows.size))
    met = rows[enters & crossing[:, None]]
    away = rows != np.roll(rows, -1, axis=1)
    return Span(
        ranks=ranks,
        hosts=int(runs.max()),
        per_host=int(lengths.max()),
        sharing_groups=int(np.bincount(met).max()) if len(met) else 1,
        leaving=int(np.bincount(rows[away]).max()) if away.any() else 0,
        fewest=int(lengths.min()),
    )


def _members(mesh: Mesh, axes: tuple[AxisName, ...], hosts: Hosts) -> NDArray[np.intp]:
    """Return (groups, ranks of a group): the host of each rank. Hosts ascend along a group, as ranks do."""
    ranks = np.repeat([per_host for _, per_host in hosts], [count for count, _ in hosts])
    host = np.repeat(np.arange(len(ranks)), ranks).reshape([degree for _, degree in mesh])
    inside = [place for place, (axis, _) in enumerate(mesh) if axis in axes]
    outside = [place for place in range(len(mesh)) if place not in inside]
    count = int(np.prod([mesh[place][1] for place in inside], dtype=int))
    members: NDArray[np.intp] = host.transpose(outside + inside).reshape(-1, count)
    return members


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """The ranks along some axes, with the links they use.

    Attributes:
        node: the link within a host; None where no rank needs it.
        network: one group's share of a host's connection; None within a host.
        chooses: the library takes the fastest of ring, tree and hierarchical form, as NCCL does. Otherwise it
            always takes a ring over all ranks, as Gloo does, except for exchanges along split and the
            data-parallel axes.
    """

    span: Span
    node: Link | None = None
    network: Link | None = None
    chooses: bool = False

    @property
    def ranks(self) -> int:
        return self.span.ranks

    @property
    def tier(self) -> LinkTier:
        return "network" if self.network is not None else "node"

    @property
    def link(self) -> Link:
        """The link of a flat ring's slowest hop."""
        link = self.network or self.node
        assert link is not None
        return link

    def on_cores(self, host_group: HostGroup) -> "RankGroup":
        """Return the group with its times in the seconds that a hidden exchange takes from a rank's own work,
        because CPU cores do both.

        They are at most the time of the exchange. Where hosts take turns on a core, a rank has only its turns.
        """
        cores = max(1, host_group.device.cores) / host_group.sharing / host_group.node.turns

        def taken(link: Link | None, tier: LinkTier) -> Link | None:
            if link is None or host_group.device.kind == "cpu":
                return link and link.on_cores(cores, cost_constants.CPU_COMMUNICATION_SHARE[tier])
            return replace(link, core_s_per_nbyte=0.0).on_cores(cores, 0.0)

        return replace(self, node=taken(self.node, "node"), network=taken(self.network, "network"))

    def all_reduce(self, nbytes: float) -> float:
        """Return the seconds of an all-reduce of `nbytes`; 0 for one rank or no bytes."""
        span = self.span
        if span.ranks == 1 or nbytes <= 0:
            return 0.0
        flat = ring_all_reduce(self.link, nbytes, span.ranks)
        if not self.chooses:
            return flat
        return min(flat, tree_all_reduce(self.link, nbytes, span.ranks), self._hierarchical(nbytes))

    def summed(self, nbytes: float) -> float:
        """Return the seconds of an all-reduce of a gradient bucket, or of an activation along split.

        Where hosts have several CPU ranks, ranks reduce inside each host first, and each then reduces a part
        between hosts (comm/hierarchical.py).
        """
        return self._hierarchical(nbytes) if self.tiers and nbytes > 0 else self.all_reduce(nbytes)

    @property
    def tiers(self) -> bool:
        """Whether reductions are made inside each host first: CPU ranks, several on some of several hosts."""
        return not self.chooses and self.network is not None and self.node is not None

    def tiered(self, nbytes: float, between: float) -> float:
        """Return the seconds of a hierarchical all-reduce of `nbytes` that crosses between hosts as `between`
        bytes.
        """
        assert self.node is not None
        assert self.network is not None
        inside = ring_all_reduce(self.node, nbytes, self.span.per_host)
        return inside + ring_all_reduce(self.network, between, self.span.hosts)

    def scatter(self, nbytes: float) -> float:
        """Return the seconds of a reduce-scatter of `nbytes`, or of an all-gather to `nbytes`."""
        if self.span.ranks == 1 or nbytes <= 0:
            return 0.0
        flat = ring_reduce_scatter(self.link, nbytes, self.span.ranks)
        return min(flat, self._hierarchical(nbytes) / 2) if self.chooses else flat

    def divided(self, nbytes: float) -> float:
        """Return the same as `scatter`, for the exchanges of sharding and split.

        Where hosts have several CPU ranks, data crosses to each host once (comm/hierarchical.py).
        """
        return self._hierarchical(nbytes) / 2 if self.tiers and nbytes > 0 else self.scatter(nbytes)

    def _hierarchical(self, nbytes: float) -> float:
        if self.network is None or self.node is None:
            return math.inf
        return hierarchical_all_reduce(self.node, self.network, nbytes, self.span.per_host, self.span.hosts)

    def all_to_all(self, nbytes: float) -> float:
        """Return the seconds of an all-to-all in which every rank sends `nbytes` in equal parts, one of them to
        itself.
        """
        n, span = self.ranks, self.span
        if n == 1 or nbytes <= 0:
            return 0.0
        inside = self.node.carry(nbytes * (span.per_host - 1) / n, nbytes) if self.node else 0.0
        if self.network is None:
            return (n - 1) * self.link.latency_s + inside
        away = nbytes * (n - span.per_host) / n
        outside = self.network.carry(away * span.per_host, nbytes)
        return (n - 1) * self.network.latency_s + max(inside, outside)

    def to_neighbours(self, nbytes: float) -> float:
        """Return the seconds in which every rank sends `nbytes` to both neighbours along the axes, on its host and
        on others at once.
        """
        span = self.span
        if nbytes <= 0:
            return 0.0
        away = message(self.network, min(2, span.hosts - 1) * nbytes) if self.network is not None else 0.0
        here = message(self.node, min(2, span.per_host - 1) * nbytes) if self.node is not None else 0.0
        return max(away, here)

    def pass_on(self, nbytes: float) -> float:
        """Return the seconds in which every rank sends `nbytes` to its next neighbour along the axes."""
        span = self.span
        if span.ranks == 1 or nbytes <= 0:
            return 0.0
        flows = span.leaving / span.sharing_groups if self.network is not None else 1.0
        return message(self.link, nbytes * max(flows, 1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The links of a cluster under a plan's ranks: of each tier, the slowest link of the hosts with ranks.

    Attributes:
        hosts: ranks on each host.
        concurrent_fraction: mean fraction of the groups at a host's connection that communicate at the same time as
            one of them.
        known: cache of groups.
    """

    cluster: ClusterSpec
    host_groups: tuple[HostGroup, ...]
    mesh: Mesh
    hosts: Hosts
    concurrent_fraction: float = 1.0
    known: dict[tuple[AxisName, ...], RankGroup] = field(default_factory=dict, compare=False)

    def group(self, *axes: AxisName) -> RankGroup:
        """Return the group along `axes`.

        Raises:
            PlanError: the cluster does not describe a link that the group needs.
        """
        named = tuple(axis for axis, degree in self.mesh if axis in axes and degree > 1)
        if named not in self.known:
            self.known[named] = self._group(named)
        return self.known[named]

    def of_stage(self, stage: int, nbytes: Sequence[float]) -> "Network":
        """Return the network as one stage sees it, while all stages reduce their gradients at the same time.

        Stages of the same host with fewer bytes finish first and leave the connection to the others.

        Args:
            nbytes: bytes that each stage reduces.
        """
        together, stage_nbytes = sharing(self.mesh, self.hosts)[stage], nbytes[stage]
        if not stage_nbytes:
            return self
        part = sum(min(nbytes[other], stage_nbytes) for other in together) / (len(together) * stage_nbytes)
        return self if part == 1 else replace(self, concurrent_fraction=part, known={})

    def _group(self, axes: tuple[AxisName, ...]) -> RankGroup:
        return self._rank_group(span_of(self.mesh, axes, self.hosts))

    def _rank_group(self, span: Span) -> RankGroup:
        """Return the groups of a span with the links they use."""
        if span.ranks == 1:
            return RankGroup(span=span)
        flows = max(1.0, self.concurrent_fraction * span.sharing_groups)
        network = self._link("network").shared(flows) if span.hosts > 1 else None
        node = self._link("node") if span.hosts == 1 or link_of_tier(self.cluster, self.host_groups, "node") else None
        return RankGroup(
            span=span,
            node=node if span.per_host > 1 else None,
            network=network,
            chooses=self.host_groups[0].device.kind == "cuda",
        )

    def along_grid(self, grid: Sequence[int], dim: int) -> RankGroup:
        """Return the group along one dim of the grid into which the space axis is folded, row-major."""
        (place,) = [place for place, (axis, _) in enumerate(self.mesh) if axis == "space"]
        folded = tuple((cast(AxisName, f"space {number}"), parts) for number, parts in enumerate(grid))
        mesh = (*self.mesh[:place], *folded, *self.mesh[place + 1 :])
        return self._rank_group(span_of(mesh, (folded[dim][0],), self.hosts))

    def neighbours(self, axis: AxisName, at_once: int | None = None) -> tuple[Link, ...]:
        """Return the link from each place along `axis` to the next, and from the last to the first.

        Args:
            at_once: the most ranks of a host that send there at the same moment; None: all of them.
        """
        flows = [
            count if at_once is None else min(count, at_once) for count in crossings(self.mesh, (axis,), self.hosts)
        ]
        links = {count: self._link("network").shared(count) if count else self._link("node") for count in set(flows)}
        return tuple(links[count] for count in flows)

    def across_hosts(self, axis: AxisName) -> tuple[bool, ...]:
        """Return whether each place along `axis`, the last included, sends to its next one over a host's
        connection.
        """
        return tuple(flows > 0 for flows in crossings(self.mesh, (axis,), self.hosts))

    def _link(self, tier: LinkTier) -> Link:
        spec = link_of_tier(self.cluster, self.host_groups, tier)
        if spec is None:
            raise no_link(self.cluster, self.host_groups, tier)
        flows = 1.0
        if tier == "node" and self.host_groups[0].device.kind == "cpu":
            # all hops are copies by the same cores, which they share if there are more ranks than cores and than the
            # link was measured with
            most = max(host_group.ranks_per_host for host_group in self.host_groups)
            flows = max(1.0, most / max(spec.ranks, self.host_groups[0].device.cores, 1))
        return link_of(spec, flows)


def network(cluster: ClusterSpec, host_groups: tuple[HostGroup, ...], plan: Plan) -> Network:
    """Return the links under `plan`."""
    return Network(cluster=cluster, host_groups=host_groups, mesh=tuple(plan.mesh.items()), hosts=hosts_of(host_groups))


def hosts_of(host_groups: tuple[HostGroup, ...]) -> Hosts:
    """Return the ranks on each host, in rank order."""
    return tuple((host_group.hosts, host_group.ranks_per_host) for host_group in host_groups)


def host_group_of_ranks(host_groups: tuple[HostGroup, ...]) -> NDArray[np.intp]:
    """Return the index of each rank's host group."""
    return np.repeat(np.arange(len(host_groups)), [host_group.ranks for host_group in host_groups])


@lru_cache(maxsize=4096)
def sharing(mesh: Mesh, hosts: Hosts) -> tuple[tuple[int, ...], ...]:
    """Return for each place on the stage axis the places that have ranks on the same hosts, itself among them."""
    rows = _members(mesh, ("stage",), hosts)
    there = np.zeros((rows.shape[1], int(rows.max()) + 1), dtype=np.intp)
    there[np.arange(rows.shape[1]), rows] = 1
    return tuple(tuple(np.flatnonzero(row).tolist()) for row in there @ there.T)


@lru_cache(maxsize=4096)
def crossings(mesh: Mesh, axes: tuple[AxisName, ...], hosts: Hosts) -> tuple[int, ...]:
    """Return for each pair of neighbours along `axes`, last and first included, the most ranks of one host that
    send to another host there.

    It is 0 where all neighbours share a host.
    """
    rows = _members(mesh, axes, hosts)
    away = rows != np.roll(rows, -1, axis=1)
    return tuple(int(np.bincount(rows[here, place]).max()) if here.any() else 0 for place, here in enumerate(away.T))

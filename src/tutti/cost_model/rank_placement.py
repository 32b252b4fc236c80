"""Which device each rank of a plan computes on, and its cores, its memory and its share of the links.

Ranks are placed in the order of the cluster's nodes, `devices_per_node` on each host. A cluster of CPU hosts
takes more ranks than devices: ranks then share the cores, and each host gets ranks in proportion to its cores.
Where a job fixes the ranks of each host, it has these.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

import tutti.cost_model.cost_constants as cost_constants
from tutti.config.cluster import ClusterSpec, DeviceSpec, LinkSpec, LinkTier, NodeSpec, slowest_link
from tutti.config.partitioning import cut
from tutti.config.vocabulary import Evidence, LastBatch
from tutti.errors import PlanError

Array = NDArray[np.float64]
Numbers = TypeVar("Numbers", float, Array)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGroup:
    """Consecutive ranks on equal hosts.

    Attributes:
        hosts: number of hosts.
        ranks_per_host: ranks on each of them.
        sharing: ranks on one device (1 on CUDA).
        threads: cores that each rank computes with.
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
        """Ranks per core where there are more ranks than cores, else 1."""
        cores = max(1, self.device.cores)
        return max(1.0, self.sharing / cores) if self.device.kind == "cpu" else 1.0

    @property
    def slowdown(self) -> float:
        """Factor by which a rank's work takes longer because ranks take turns on cores.

        It is the number of ranks per core, times the cost of switching. Where whole hosts take turns on a
        machine, their measured rates include the number of turns.
        """
        switching = self.oversubscribed > 1 or (self.device.kind == "cpu" and self.node.turns > 1)
        return self.oversubscribed * (cost_constants.OVERSUBSCRIBED if switching else 1.0)

    @property
    def memory_nbytes(self) -> float:
        """Memory that one rank may fill: that of its CUDA device, or its part of the host's memory."""
        if self.device.kind == "cuda":
            return self.device.memory_nbytes
        return self.node.memory_nbytes / self.ranks_per_host


def place_ranks(cluster: ClusterSpec, ranks: int) -> tuple[HostGroup, ...]:
    """Return where `ranks` ranks are placed.

    Raises:
        PlanError: there are fewer CUDA devices than ranks.
    """
    if ranks == cluster.fixed_ranks:
        return tuple(_host_group(cluster, node, node.count, node.ranks) for node in cluster.nodes if node.ranks)
    capacity = sum(node.count * node.devices_per_node for node in cluster.nodes)
    if ranks > capacity:
        return _sharing(cluster, ranks, capacity)
    host_groups: list[HostGroup] = []
    for node in cluster.nodes:
        per_host = node.devices_per_node
        hosts = min(node.count, ranks // per_host)
        rest = min(ranks - hosts * per_host, per_host) if hosts < node.count else 0
        host_groups += [
            _host_group(cluster, node, count, many) for count, many in ((hosts, per_host), (1, rest)) if count and many
        ]
        ranks -= hosts * per_host + rest
    return tuple(host_groups)


def _sharing(cluster: ClusterSpec, ranks: int, capacity: int) -> tuple[HostGroup, ...]:
    """Place more ranks than devices. They share the cores of the hosts, each of which gets ranks in proportion to
    its cores.
    """
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
    host_groups: list[HostGroup] = []
    sizes = iter(cut_sizes(ranks, len(cores), cores))
    for node in cluster.nodes:
        for per_host, alike in groupby(next(sizes) for _ in range(node.count)):
            host_groups += [_host_group(cluster, node, len(list(alike)), per_host)] if per_host else []
    return tuple(host_groups)


def _host_group(cluster: ClusterSpec, node: NodeSpec, hosts: int, ranks_per_host: int) -> HostGroup:
    """Return the host group of `hosts` equal hosts of `node`."""
    device = cluster.devices[node.device]
    sharing = -(-ranks_per_host // node.devices_per_node) if device.kind == "cpu" else 1
    threads = max(1, device.cores // sharing) if device.kind == "cpu" else 1
    return HostGroup(
        node=node, device=device, hosts=hosts, ranks_per_host=ranks_per_host, sharing=sharing, threads=threads
    )


def ring_tier(host_groups: tuple[HostGroup, ...]) -> LinkTier:
    """Return the slowest tier that a flat ring over all ranks crosses: the network as soon as there are two hosts."""
    return "network" if sum(host_group.hosts for host_group in host_groups) > 1 else "node"


def link_of_tier(cluster: ClusterSpec, host_groups: tuple[HostGroup, ...], tier: LinkTier) -> LinkSpec | None:
    """Return the link of a tier for groups of these ranks: the slowest of all hosts that have ranks.

    It is None where a host that needs the link has none. A host that cannot have two ranks needs no link within
    it.
    """
    nodes = [
        host_group.node
        for host_group in host_groups
        if tier != "node" or host_group.device.kind == "cpu" or host_group.node.devices_per_node > 1
    ]
    links = [cluster.link_at(node, tier) for node in nodes] or [cluster.link(tier)]
    known = [link for link in links if link is not None]
    return slowest_link(known) if len(known) == len(links) else None


def no_link(cluster: ClusterSpec, host_groups: tuple[HostGroup, ...], tier: LinkTier) -> PlanError:
    """Return the error for a host without a link that it needs."""
    have = ", ".join(dict.fromkeys(link.tier for link in cluster.every_link)) or "none"
    return PlanError(
        f"cluster {cluster.name!r} has no link of tier {tier!r} (it has: {have}), which "
        f"{sum(host_group.ranks for host_group in host_groups)} ranks need; measure it with tutti probe or "
        f"write it down in links"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The constants of a link as one flow sees them, and their evidence.

    Attributes:
        large_nbytes: size beyond which a vector takes `large_s_per_nbyte` as well.
        large_s_per_nbyte: additional seconds per byte sent, for the part of a vector beyond `large_nbytes`.
        core_s_per_nbyte: seconds of a core for each byte that a rank sends; None where it was not measured.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    evidence: Evidence = "assumed"
    large_nbytes: float = math.inf
    large_s_per_nbyte: float = 0.0
    core_s_per_nbyte: float | None = None

    def carry(self, sent: float, nbytes: float) -> float:
        """Return the transfer seconds of `sent` bytes, in the exchange of a vector of `nbytes`."""
        if nbytes <= self.large_nbytes:
            return sent / self.bandwidth_bytes_per_s
        beyond = 1.0 - self.large_nbytes / nbytes
        return sent / self.bandwidth_bytes_per_s + sent * beyond * self.large_s_per_nbyte

    def shared(self, flows: float) -> "Link":
        """Return the link as each of the `flows` flows that share it sees it."""
        return replace(
            self,
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s / flows,
            large_s_per_nbyte=self.large_s_per_nbyte * flows,
        )

    def on_cores(self, cores: float, assumed: float) -> "Link":
        """Return the link with its times in seconds of a rank's `cores`.

        They are as measured for each byte, but at most the transfer time; latency takes no core. Where nothing
        was measured, they are the fraction `assumed` of the whole time.
        """
        if self.core_s_per_nbyte is None:
            lasts = (self.latency_s, 1 / self.bandwidth_bytes_per_s, self.large_s_per_nbyte)
            latency_s, small_s, large_s = (assumed * part for part in lasts)
        else:
            each_s, lasts_s = self.core_s_per_nbyte / cores, 1 / self.bandwidth_bytes_per_s
            latency_s, small_s = 0.0, min(lasts_s, each_s)
            large_s = min(lasts_s + self.large_s_per_nbyte, each_s) - small_s
        return replace(
            self,
            latency_s=latency_s,
            bandwidth_bytes_per_s=1 / small_s if small_s else math.inf,
            large_s_per_nbyte=large_s,
        )


def ring_link(cluster: ClusterSpec, host_groups: tuple[HostGroup, ...]) -> Link:
    """Return the link of a flat ring's slowest hop.

    A ring of consecutive ranks enters and leaves each host once, so the network is not shared among a host's
    ranks. Between CPU ranks of one host, all hops are copies by the same cores. They share the link's bandwidth
    once there are more ranks than it was measured with, and more than cores.

    Raises:
        PlanError: the cluster does not describe the link.
    """
    tier = ring_tier(host_groups)
    spec = link_of_tier(cluster, host_groups, tier)
    if spec is None:
        raise no_link(cluster, host_groups, tier)
    flows = 1.0
    if tier == "node" and host_groups[0].device.kind == "cpu":
        flows = max(1.0, host_groups[0].ranks / max(spec.ranks, host_groups[0].device.cores, 1))
    return link_of(spec, flows)


def link_of(spec: LinkSpec, flows: float = 1.0) -> Link:
    """Return the link that `spec` describes, where `flows` of its copies use the same cores at once."""
    large, bandwidth = spec.large_bandwidth_bytes_per_s, spec.bandwidth_bytes_per_s
    return Link(
        latency_s=spec.latency_s * flows,
        bandwidth_bytes_per_s=bandwidth / flows,
        evidence=spec.evidence,
        large_nbytes=math.inf if spec.large_nbytes is None else float(spec.large_nbytes),
        large_s_per_nbyte=0.0 if large is None else max(0.0, 1 / large - 1 / bandwidth) * flows,
        core_s_per_nbyte=spec.core_s_per_nbyte,
    )


def message(link: Link, nbytes: float) -> float:
    """Return the seconds of one message between two ranks."""
    return link.latency_s + link.carry(nbytes, nbytes)


def ring_all_reduce(link: Link, nbytes: float, ranks: int) -> float:
    """Return the seconds of a ring all-reduce, 2 (n - 1) a + 2 (n - 1) / n S / b; 0 for one rank."""
    return 2 * (ranks - 1) * link.latency_s + link.carry(ring_sent_nbytes(nbytes, ranks), nbytes)


def ring_reduce_scatter(link: Link, nbytes: float, ranks: int) -> float:
    """Return the seconds of a ring reduce-scatter, (n - 1) a + (n - 1) / n S / b.

    An all-gather of S bytes in total takes as long.
    """
    return ring_all_reduce(link, nbytes, ranks) / 2


def tree_all_reduce(link: Link, nbytes: float, ranks: int) -> float:
    """Return the seconds of a pipelined binary tree, up and down: 2 ceil(log2 n) a + 2 S / b; 0 for one rank."""
    if ranks == 1:
        return 0.0
    return 2 * math.ceil(math.log2(ranks)) * link.latency_s + link.carry(2 * nbytes, nbytes)


def hierarchical_all_reduce(inner: Link, outer: Link, nbytes: float, per_node: int, nodes: int) -> float:
    """Return the seconds of a reduce-scatter within each node, an all-reduce of a 1/g part between nodes, and an
    all-gather within each node.

    Args:
        inner: link within a node.
        outer: a node's link to the network. The simultaneous rings of its g ranks share it, so each gets 1/g of
            it.
        per_node: ranks of a node (g).
        nodes: number of nodes.
    """
    return ring_all_reduce(inner, nbytes, per_node) + ring_all_reduce(outer.shared(per_node), nbytes / per_node, nodes)


def iterations_per_epoch(samples: int, global_batch_size: int, last_batch: LastBatch = "keep") -> int:
    """Return the steps of an epoch over `samples`; a short last batch counts as a step when it is kept."""
    full, rest = divmod(samples, global_batch_size)
    return full + (1 if rest and last_batch == "keep" else 0)


def global_batch_of(local_batch_size: int, ranks: int, num_microbatches: int = 1) -> int:
    """Return the samples of a step in which each of `ranks` ranks takes `local_batch_size` in each microbatch."""
    return local_batch_size * ranks * num_microbatches


def cut_sizes(total: int, parts: int, weights: Sequence[float] = ()) -> tuple[int, ...]:
    """Return the sizes of `parts` contiguous runs of `total` items, in proportion to `weights` (none: equal).

    They add up to `total`; equal runs differ by at most one.
    """
    return tuple(end - start for start, end in pairwise(cut(total, parts, weights)))


def rank_samples(
    samples: int, num_microbatches: int, ranks: int, shares: Sequence[float] = ()
) -> list[tuple[tuple[int, int], ...]]:
    """Return each rank's samples, as (samples, number of such microbatches); the last entry has the last
    microbatch.

    Microbatches have at most two sizes, the larger ones last. A rank without a share still computes one sample
    with weight 0, because it takes part in the collectives.
    """
    base, larger = divmod(samples, num_microbatches)
    slices = [(size, times) for size, times in ((base, num_microbatches - larger), (base + 1, larger)) if times]
    cuts = [(cut_sizes(size, ranks, shares), times) for size, times in slices]
    return [tuple((max(1, sizes[rank]), times) for sizes, times in cuts) for rank in range(ranks)]


def samples_of(size: int, unit: str, tokens_per_sample: int) -> int:
    """Return the samples of a global batch of `size` units, at least one.

    Raises:
        PlanError: the unit is tokens, and the tokens of a sample are unknown.
    """
    if unit == "samples":
        return size
    if tokens_per_sample < 1:
        raise PlanError(
            f"global_batch_size = {size} tokens, but the model's tokens_per_sample is unknown; give the batch in "
            "samples, or set tokens_per_sample in the model file"
        )
    return max(1, size // tokens_per_sample)


@dataclass(frozen=True, slots=True, kw_only=True)
class RingCounts:
    """The counts of one all-reduce of N elements over a ring of P ranks.

    Attributes:
        chunks: elements of each chunk.
        sent: elements that each rank sends.
        additions: elements that each rank adds.
        messages: messages that each rank sends.
    """

    chunks: tuple[int, ...]
    sent: tuple[int, ...]
    additions: tuple[int, ...]
    messages: int

    @property
    def total_sent(self) -> int:
        return sum(self.sent)


def ring_counts(elements: int, ranks: int) -> RingCounts:
    """Count a ring all-reduce: P - 1 steps of reduce-scatter, then P - 1 of all-gather.

    In reduce-scatter, rank r sends chunks r, r - 1, ..., r - P + 2 and adds into chunks r - 1, ..., r - P + 1.
    In all-gather it sends the chunk it completed, r + 1, and passes on r, ..., r - P + 3 (all modulo P). So it
    sends every chunk but one in each half: 2 (P - 1) / P N elements when P divides N (Patarasuk and Yuan 2009).
    """
    chunks = cut_sizes(elements, ranks)
    if ranks == 1:
        return RingCounts(chunks=chunks, sent=(0,), additions=(0,), messages=0)
    sent = tuple(2 * elements - chunks[(rank + 1) % ranks] - chunks[(rank + 2) % ranks] for rank in range(ranks))
    additions = tuple(elements - chunks[rank] for rank in range(ranks))
    return RingCounts(chunks=chunks, sent=sent, additions=additions, messages=2 * (ranks - 1))


def naive_all_reduce_sent(elements: int, ranks: int) -> int:
    """Return the elements that cross links, over all ranks, when a root gathers, adds and sends back: 2 N (P - 1)."""
    return 2 * elements * (ranks - 1)


def ring_sent_nbytes(nbytes: Numbers, ranks: int | Numbers) -> Numbers:
    """Return the bytes that each rank sends in a ring all-reduce, 2 (n - 1) / n S. No algorithm sends fewer."""
    return 2 * (ranks - 1) / ranks * nbytes


def least_all_reduce(latency_s: float, bandwidth_bytes_per_s: float, nbytes: Array, ranks: int) -> Array:
    """Return a lower bound of the seconds of any all-reduce of `nbytes`: a tree's latency and a ring's bytes; 0 for
    no bytes.
    """
    least_s = 2 * math.ceil(math.log2(ranks)) * latency_s
    return np.where(nbytes > 0, least_s + ring_sent_nbytes(nbytes, ranks) / bandwidth_bytes_per_s, 0.0)

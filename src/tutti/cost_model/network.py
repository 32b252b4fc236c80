"""Time of collectives in the alpha-beta model: a message of S bytes takes latency + S / bandwidth.

Formulas: Thakur, Rabenseifner and Gropp 2005; the pipelined tree as NCCL describes it. n ranks; S is the size of the
whole vector. Additions are not charged separately: on the links measured here they are part of the fit. On links that
were measured so, what lies beyond a size takes longer (where vectors outgrow caches, or a limited connection's burst).
"""

import math
from dataclasses import dataclass, replace

from tutti.config.cluster import LinkSpec
from tutti.config.vocabulary import Evidence
from tutti.cost_model.counts import ring_sent_nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The constants of a link as one flow on it sees them, and where they come from. `large_s_per_nbyte`: what each
    byte sent takes longer of the part of a vector beyond `large_nbytes`. `core_s_per_nbyte`: seconds of a core for each
    byte that a rank sends, None where nobody measured it."""

    latency_s: float
    bandwidth_bytes_per_s: float
    evidence: Evidence = "assumed"
    large_nbytes: float = math.inf
    large_s_per_nbyte: float = 0.0
    core_s_per_nbyte: float | None = None

    def carry(self, sent: float, nbytes: float) -> float:
        """Seconds that `sent` bytes take on the wire, of the exchange of a vector of `nbytes`."""
        if nbytes <= self.large_nbytes:
            return sent / self.bandwidth_bytes_per_s
        beyond = 1.0 - self.large_nbytes / nbytes
        return sent / self.bandwidth_bytes_per_s + sent * beyond * self.large_s_per_nbyte

    def shared(self, flows: float) -> "Link":
        """What each of so many flows gets that meet on it."""
        return replace(
            self,
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s / flows,
            large_s_per_nbyte=self.large_s_per_nbyte * flows,
        )

    def on_cores(self, cores: float, assumed: float) -> "Link":
        """The link in seconds that it takes of a rank's `cores`: of each byte what was measured, at most the time it is
        on its way, and nothing of the latency, in which nobody computes; where nobody measured it, the part `assumed`
        of all of the time."""
        if self.core_s_per_nbyte is None:
            lasts = (self.latency_s, 1 / self.bandwidth_bytes_per_s, self.large_s_per_nbyte)
            latency_s, small_s, large_s = (assumed * one for one in lasts)
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


def link_of(spec: LinkSpec, flows: float = 1.0) -> Link:
    """The link that `spec` describes, of which `flows` of its copies at once have to do with the same cores."""
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
    """One message between two ranks."""
    return link.latency_s + link.carry(nbytes, nbytes)


def ring_all_reduce(link: Link, nbytes: float, ranks: int) -> float:
    """2 (n - 1) a + 2 (n - 1) / n S / b; zero for one rank."""
    return 2 * (ranks - 1) * link.latency_s + link.carry(ring_sent_nbytes(nbytes, ranks), nbytes)


def ring_reduce_scatter(link: Link, nbytes: float, ranks: int) -> float:
    """(n - 1) a + (n - 1) / n S / b; an all-gather of S bytes in total takes as long."""
    return ring_all_reduce(link, nbytes, ranks) / 2


def tree_all_reduce(link: Link, nbytes: float, ranks: int) -> float:
    """Pipelined binary tree, up and down: 2 ceil(log2 n) a + 2 S / b; zero for one rank."""
    if ranks == 1:
        return 0.0
    return 2 * math.ceil(math.log2(ranks)) * link.latency_s + link.carry(2 * nbytes, nbytes)


def hierarchical_all_reduce(inner: Link, outer: Link, nbytes: float, per_node: int, nodes: int) -> float:
    """Reduce-scatter within each node, all-reduce of a 1/g part between nodes, all-gather within each node.

    `outer` is a node's link to the network: its g ranks' simultaneous rings share it, so each gets 1/g of it.
    """
    return ring_all_reduce(inner, nbytes, per_node) + ring_all_reduce(outer.shared(per_node), nbytes / per_node, nodes)

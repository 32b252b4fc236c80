"""Time of collectives in the alpha-beta model: a message of S bytes takes latency + S / bandwidth.

Formulas: Thakur, Rabenseifner and Gropp 2005; the pipelined tree as NCCL describes it. n ranks; S is the size of the
whole vector. Additions are not charged separately: on the links measured here they are part of the fit.
"""

import math
from dataclasses import dataclass

from tutti.predict.counts import ring_sent_nbytes
from tutti.spec.words import Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The two constants of a link as one flow on it sees them, and where they come from. `core_s_per_nbyte`: seconds of
    a core for each byte that a rank sends, None where nobody measured it."""

    latency_s: float
    bandwidth_bytes_per_s: float
    evidence: Evidence = "assumed"
    core_s_per_nbyte: float | None = None


def message(link: Link, nbytes: float) -> float:
    """One message between two ranks."""
    return link.latency_s + nbytes / link.bandwidth_bytes_per_s


def ring_all_reduce(link: Link, nbytes: float, ranks: int) -> float:
    """2 (n - 1) a + 2 (n - 1) / n S / b; zero for one rank."""
    return 2 * (ranks - 1) * link.latency_s + ring_sent_nbytes(nbytes, ranks) / link.bandwidth_bytes_per_s


def ring_reduce_scatter(link: Link, nbytes: float, ranks: int) -> float:
    """(n - 1) a + (n - 1) / n S / b; an all-gather of S bytes in total takes as long."""
    return ring_all_reduce(link, nbytes, ranks) / 2


def tree_all_reduce(link: Link, nbytes: float, ranks: int) -> float:
    """Pipelined binary tree, up and down: 2 ceil(log2 n) a + 2 S / b; zero for one rank."""
    if ranks == 1:
        return 0.0
    return 2 * math.ceil(math.log2(ranks)) * link.latency_s + 2 * nbytes / link.bandwidth_bytes_per_s


def hierarchical_all_reduce(inner: Link, outer: Link, nbytes: float, per_node: int, nodes: int) -> float:
    """Reduce-scatter within each node, all-reduce of a 1/g part between nodes, all-gather within each node.

    `outer` is a node's link to the network: its g ranks' simultaneous rings share it, so each gets 1/g of it.
    """
    shared = Link(
        latency_s=outer.latency_s,
        bandwidth_bytes_per_s=outer.bandwidth_bytes_per_s / per_node,
        evidence=outer.evidence,
    )
    return ring_all_reduce(inner, nbytes, per_node) + ring_all_reduce(shared, nbytes / per_node, nodes)

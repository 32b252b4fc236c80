"""Parts of a mixed cluster that are searched by themselves first: the fastest kind, it and the next, every kind alone.

On fewer kinds there are fewer plans, and where all devices are alike bounds are sharp: what a part does is found in a
fraction of the time. So all devices are seldom answered with a slower plan than some of them are: it still happens
where the time is too short for the part (docs/planner.md).
"""

import dataclasses
import math
from collections.abc import Iterator
from itertools import islice

from tutti.config.cluster import ClusterSpec
from tutti.config.model import ModelSpec
from tutti.config.vocabulary import Precision
from tutti.cost_model.worker import best_rate, matrix_dtype
from tutti.errors import PlanError
from tutti.planner.candidates import precisions
from tutti.planner.choice import Request
from tutti.planner.explore import Clock, Explorer
from tutti.planner.polish import polish
from tutti.planner.tables import is_mixed, ranks_of_node

_TIME = 0.35
"""Part of the time that the first of them is searched for, at most; each other has half of what the one before had."""

_MOST = 4
"""Parts that are searched."""

_TAKEN = 6
"""Plans of each part that the search of the whole begins with."""


def search_parts(whole: Explorer, clusters: tuple[ClusterSpec, ...], clock: Clock | None, limit_s: float) -> None:
    """Give a search of `limit_s`, before it runs, the best plans of the parts of its `clusters` (its orders of nodes).

    A part may compute in a precision that not all devices have; only its quickest is looked at.
    """
    model, request, share_s = whole.model, whole.request, limit_s * _TIME
    for cluster, part in islice(parts(clusters, request), _MOST):
        try:
            explorer = Explorer(model, (part,), request, [_quickest(model, part, request)], clock, share_s)
        except PlanError:  # nothing of it serves the request
            continue
        explorer.run(than=whole.best)
        polish(explorer)
        good = sorted((one for one in explorer.costed if one.good), key=lambda one: one.value)
        for one in good[:_TAKEN]:
            whole.cost(one.plan, cluster)
        share_s /= 2


def _quickest(model: ModelSpec, part: ClusterSpec, request: Request) -> Precision:
    """Of the precisions that may be chosen, the one in which the slowest device has the highest rate."""
    devices = [part.devices[node.device] for node in part.nodes]

    def rate(precision: Precision) -> float:
        return min(best_rate(device, matrix_dtype(model.dtype, precision)) for device in devices)

    given = precisions(model, part, request)
    return max(given, key=rate) if len(given) > 1 else given[0]


def parts(clusters: tuple[ClusterSpec, ...], request: Request) -> Iterator[tuple[ClusterSpec, ClusterSpec]]:
    """(cluster, its first nodes alone), where these are fewer kinds than all and the request lets others be idle: of
    the first order the first kind, then two, four ...; of the others the first."""
    if request.degree is not None or request.mesh is not None:
        return
    seen = set[frozenset[str]]()
    for index, cluster in enumerate(clusters):
        ends = _ends(cluster)
        for many in (2**power for power in range(len(ends).bit_length())) if index == 0 else (1,):
            nodes = cluster.nodes[: ends[many - 1]] if many < len(ends) else ()
            names = frozenset(node.name for node in nodes)
            ranks = sum(node.count * ranks_of_node(cluster, node) for node in nodes)
            if nodes and names not in seen and ranks < (request.max_devices or math.inf):
                seen.add(names)
                yield cluster, dataclasses.replace(cluster, nodes=nodes)


def _ends(cluster: ClusterSpec) -> list[int]:
    """Up to where the first nodes are of one kind, of two, ..."""
    nodes, starts = cluster.nodes, [0]
    for at in range(1, len(nodes)):
        if is_mixed(dataclasses.replace(cluster, nodes=nodes[starts[-1] : at + 1])):
            starts.append(at)
    return [*starts[1:], len(nodes)]

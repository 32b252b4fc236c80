"""Wide linear layers in data-parallel plans: which of them are divided over ranks that have samples of their own.

Krizhevsky 2014 (arXiv 1404.5997): layers with few parameters and large activations stay replicated, layers with many
parameters and small activations are divided, so that activations travel in the place of gradients. What a layer gains
does not depend on the others, so layers are taken in the order of their gain; whole plans are predicted.
"""

import dataclasses
from collections.abc import Iterator

from tutti.config.cluster import ClusterSpec
from tutti.config.model import ModelSpec
from tutti.config.plan import LayoutRule, Plan, by_columns, find_placement
from tutti.config.vocabulary import AxisName
from tutti.cost_model.counts import samples_of
from tutti.cost_model.division import division
from tutti.cost_model.groups import network
from tutti.cost_model.placement import place
from tutti.cost_model.table import ModelTable, model_table
from tutti.cost_model.words import nbytes
from tutti.errors import PlanError
from tutti.planner.explore import Costed, Explorer

MOST_TABLE = 64
MOST_LAYERS = 32
"""Layers that one plan divides, those that gain most."""

_BASES = 4
"""Data-parallel plans that were costed and are tried so, besides one for every power of two of ranks."""

_WAITS = 5
"""Exchanges of a divided layer in a microbatch: two each way, and of how many rows there are."""


def widen(explorer: Explorer) -> None:
    """Cost data-parallel plans with their wide linear layers divided, where that may send less."""
    request = explorer.request
    columns = model_table(explorer.model)
    if request.mesh is not None or request.demanded or not (columns.linear > 0).any():
        return
    if any((rule.chunks or 1) > 1 for rule in request.script.layout):
        return
    for plan, cluster in list(_bases(explorer)):
        for degree in _degrees(plan.degree("replicate"), explorer.limits.per_node):
            for one in able_plans(plan, cluster, columns, explorer.samples, degree):
                if explorer.over():
                    return
                explorer.cost(one, cluster)


def able_plans(base: Plan, cluster: ClusterSpec, columns: ModelTable, samples: int, degree: int) -> list[Plan]:
    """`wide_plans`; none where the cluster does not describe a link that they need."""
    try:
        return list(wide_plans(base, cluster, columns, samples, degree))
    except PlanError:
        return []


def wide_plans(base: Plan, cluster: ClusterSpec, columns: ModelTable, samples: int, degree: int) -> Iterator[Plan]:
    """`base` (replicas only) with the layers that gain divided over `degree` of its ranks: all of them, and the one
    that gains most."""
    ranks = base.degree("replicate")
    mesh: dict[AxisName, int] = {"replicate": ranks // degree, "table": degree} if degree < ranks else {"table": degree}
    plan = dataclasses.replace(base, mesh=mesh)
    rules = wide_rules(plan, cluster, columns, samples)
    for count in sorted({len(rules), min(len(rules), 1)} - {0}):
        yield dataclasses.replace(plan, layout=(*plan.layout, *rules[:count]))


def wide_rules(plan: Plan, cluster: ClusterSpec, columns: ModelTable, samples: int) -> tuple[LayoutRule, ...]:
    """Rules for the linear layers that would send less over the plan's `table` axis than their gradients are, what they
    gain most first. An exchange more that is waited for counts as the bytes which its link could send meanwhile."""
    group = network(cluster, place(cluster, plan.world_size), plan).group("table")
    waits = _WAITS * plan.batch.num_microbatches * group.all_to_all(1.0) * group.link.bandwidth_bytes_per_s
    found = []
    for index in (columns.linear * columns.gradients).nonzero()[0].tolist():
        name = columns.names[index]
        if find_placement(plan.layout, name) != "auto" or columns.parameters[index] < (4 * plan.degree("table")) ** 2:
            continue
        by_outputs = by_columns("split", columns.linear[index], columns.outputs[index])
        sent, spared = _traffic(columns, index, plan, samples, by_outputs=by_outputs)
        if spared > sent + waits:
            rule = LayoutRule(modules=name, placement="column" if by_outputs else "row")
            found.append((spared - sent, rule))
    found.sort(key=lambda pair: -pair[0])
    return tuple(rule for _, rule in found[:MOST_LAYERS])


def _traffic(columns: ModelTable, index: int, plan: Plan, samples: int, *, by_outputs: bool) -> tuple[float, float]:
    """Bytes that a rank sends in a step for a divided layer's rows, and those of its gradient that it need not send."""
    n, ranks = plan.degree("table"), plan.data_parallel_degree
    here = samples / ranks * (0.5 if plan.precision in ("bfloat16", "float16") else 1.0)
    into, out = float(columns.linear[index]), float(columns.outputs[index])
    sent = 2 * here * (n - 1) * (into + out / n if by_outputs else into / n + out)
    rest = ranks // n
    spared = 2 * float(columns.gradients[index]) * ((ranks - 1) / ranks - (rest - 1) / rest / n)
    return sent, spared


def wide_remark(model: ModelSpec, plan: Plan) -> str:
    """What a plan that divides linear layers over `table` gains by it, in a sentence; empty for others."""
    if plan.degree("table") == 1:
        return ""
    columns, part = model_table(model), division(model, plan)
    samples = samples_of(plan.batch.global_batch_size, plan.batch.unit, model.tokens_per_sample)
    layers = part.linear.nonzero()[0].tolist()
    if not layers:
        return ""
    pairs = [_traffic(columns, i, plan, samples, by_outputs=bool(part.by_outputs[i])) for i in layers]
    sent, spared = (sum(values) for values in zip(*pairs, strict=True))
    named = [repr(columns.names[i]) for i in layers[:3]] + ([f"{len(layers) - 3} more"] if len(layers) > 3 else [])
    names = " and ".join([", ".join(named[:-1]), named[-1]] if len(named) > 1 else named)
    return (
        f"{names} {'has' if len(layers) == 1 else 'have'} large weights and small activations: each rank keeps a part "
        f"of the weights and sends activations, {nbytes(sent)} in a step instead of {nbytes(spared)} of gradients"
    )


def _degrees(ranks: int, per_node: int) -> list[int]:
    """Degrees of `table` that divide `ranks`: all, those of a host, two."""
    return sorted({one for one in (ranks, per_node, 2) if 1 < one <= MOST_TABLE and ranks % one == 0}, reverse=True)


def _bases(explorer: Explorer) -> Iterator[tuple[Plan, ClusterSpec]]:
    """Plans of replicas: the best that were costed, and one for each power of two of ranks that none was costed for."""
    alike = sorted((one for one in explorer.costed if set(one.plan.mesh) == {"replicate"}), key=_rank)
    best: dict[int, Costed] = {}
    for one in alike:
        best.setdefault(one.plan.degree("replicate"), one)
    known = [one for degree, one in best.items() if degree > 1]
    yield from ((one.plan, one.cluster) for one in known[:_BASES])
    limits, lane = explorer.limits, next(iter(explorer.lanes), None)
    most = min(limits.most_ranks, limits.samples)
    wanted = {most} | {2**power for power in range(1, most.bit_length())}
    tried = {one.plan.degree("replicate") for one in known[:_BASES]}
    for degree in sorted(one for one in wanted - tried if max(2, limits.least_ranks) <= one and lane is not None):
        assert lane is not None
        count = limits.microbatches or max(1, min(limits.own_microbatches, limits.samples // degree))
        script = explorer.request.script
        batch = dataclasses.replace(script.batch, num_microbatches=count)
        yield (
            dataclasses.replace(
                script, batch=batch, mesh={"replicate": degree}, shares=(), split_shares=(), precision=lane.precision
            ),
            lane.cluster,
        )


def _rank(one: Costed) -> tuple[bool, float]:
    return not one.good, one.value

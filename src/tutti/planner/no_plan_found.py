"""Explain why no plan can hold a model: what it needs, what the cluster has, and what would be enough."""

import dataclasses

import numpy as np

import tutti.planner.objectives as objectives
from tutti.config.cluster import ClusterSpec, LinkSpec
from tutti.config.model import ModelSpec
from tutti.config.prediction import Prediction
from tutti.config.refusals import check_plan
from tutti.config.vocabulary import Precision
from tutti.cost_model import predict
from tutti.cost_model.best_case import BestCase
from tutti.cost_model.best_case_memory import BestCaseMemory
from tutti.cost_model.cost_notes import count, nbytes
from tutti.cost_model.plan_bounds import shape_bounds, variant_bounds
from tutti.cost_model.rank_placement import place_ranks
from tutti.errors import PlanError
from tutti.planner.candidates import limits_of
from tutti.planner.exploration import Costed
from tutti.planner.mesh_enumeration import plan_of, shapes, variants
from tutti.planner.plan_description import plan_words
from tutti.planner.plan_request import PlanRequest

_MOST_RANKS = 2**20
"""Clusters with more ranks than this are not suggested."""

_MAX_MESHES = 3000
_MAX_PREDICTED = 6
_REFUSALS = 5
"""A combination of axes is not tried again after this many refusals."""


def smallest(model: ModelSpec, cluster: ClusterSpec, request: PlanRequest) -> Costed | None:
    """Return the plan whose fullest rank needs the least memory; None if no plan can be predicted.

    Plans that fit are preferred. Only the plans with the least estimated memory are predicted.

    Args:
        model: what is trained.
        cluster: the machines.
        request: what may vary.
    """
    precision: Precision = request.script.precision
    if request.precision != "script" and request.precision != "auto":
        precision = request.precision
    try:
        limits = limits_of(model, cluster, request)
        meshes, best_case = shapes(limits, request), BestCase(model, cluster, precision, request.script.layout)
        _, least = shape_bounds(best_case, meshes, limits.samples)
    except PlanError:
        return None
    rank_samples = np.maximum(1, limits.samples // meshes.data)
    # numbers of microbatches in between need no less memory
    rows = np.flatnonzero((meshes.microbatches == 1) | (meshes.microbatches >= rank_samples))
    order = rows[np.argsort(least[rows], kind="stable")][:_MAX_MESHES]
    levels = tuple(sorted({limits.levels[0], limits.levels[-1]}))
    strategies = variants(
        dataclasses.replace(limits, recompute=limits.recompute[-1:], levels=levels, blocks=0), meshes, order
    )
    if not len(strategies):
        return None
    sizes = variant_bounds(BestCaseMemory(best_case, request.script), meshes, strategies, limits.samples).fullest_nbytes
    costed: list[Costed] = []
    refused: dict[tuple[str, ...], int] = {}
    for row in np.argsort(sizes, kind="stable").tolist():
        plan = plan_of(model, request, meshes, strategies, row, precision)
        kind = tuple(sorted(axis for axis, degree in plan.mesh.items() if degree > 1))
        if refused.get(kind, 0) >= _REFUSALS:
            continue
        try:
            prediction = predict(model, cluster, plan)
        except PlanError:
            refused[kind] = refused.get(kind, 0) + 1
            continue
        value = prediction.memory.total
        costed.append(Costed(plan=plan, prediction=prediction, cluster=cluster, value=value))
        if len(costed) == _MAX_PREDICTED or prediction.fits:
            break
    return min(costed, key=lambda candidate: (not candidate.prediction.fits, candidate.value), default=None)


def no_usable_plan(model: ModelSpec, cluster: ClusterSpec, request: PlanRequest, costed: list[Costed]) -> str:
    """Explain a search without a usable plan: all are too large, break a limit, or have a value that is not finite.

    Args:
        model: what is trained.
        cluster: the machines.
        request: what was asked.
        costed: all plans that were predicted.
    """
    fitting = [candidate for candidate in costed if candidate.prediction.fits]
    if not fitting:
        return no_fit(model, cluster, request, costed)
    if any(candidate.broken for candidate in fitting):
        return all_break_limits(request, fitting)
    return _not_finite(model, cluster, request, fitting[0])


def no_fit(model: ModelSpec, cluster: ClusterSpec, request: PlanRequest, costed: list[Costed]) -> str:
    """Explain that no plan fits: compare the smallest need with the memory of the cluster, and name a remedy.

    Args:
        model: what is trained.
        cluster: the machines.
        request: what was asked.
        costed: all plans that were predicted.
    """
    nearest = min(
        costed,
        key=lambda candidate: (
            candidate.prediction.memory.total - objectives.capacity_nbytes(candidate.cluster, candidate.plan)
        ),
        default=None,
    )
    wide = request.scope == "all"
    if wide:
        least = smallest(model, cluster, request)
        if least is not None and (nearest is None or least.prediction.memory.total < nearest.prediction.memory.total):
            nearest = least
    if nearest is None:
        return _refused(model, cluster, request) or (
            f"model {model.name!r} does not fit on cluster {cluster.name!r}, and no plan can be predicted for it"
        )
    plan, memory, capacity = (
        nearest.plan,
        nearest.prediction.memory,
        objectives.capacity_nbytes(nearest.cluster, nearest.plan),
    )
    device = place_ranks(nearest.cluster, plan.world_size)[0].device.name
    if not wide:
        return (
            f"model {model.name!r} does not fit on cluster {cluster.name!r}: the smallest plan "
            f"({count(plan.world_size, 'rank')}, {count(plan.batch.num_microbatches, 'microbatch')}) needs "
            f"{_need(nearest.prediction)}, but {device} has {nbytes(capacity)}; {_remedy(nearest, capacity)}"
        )
    state = sum(module.parameter_nbytes + module.gradient_nbytes + module.optimizer_nbytes for module in model.modules)
    return (
        f"model {model.name!r} does not fit on cluster {cluster.name!r}: it needs {gigabytes(state)} for parameters, "
        f"gradients and {model.optimizer or 'the optimizer'}'s state; the smallest plan of "
        f"{count(plan.world_size, 'rank')} ({plan_words(plan)}) needs {gigabytes(memory.total)} a rank "
        f"({_parts(nearest.prediction)}), but {device} has {gigabytes(capacity)}; "
        f"{what_fits(model, cluster, request, nearest)}"
    )


def _refused(model: ModelSpec, cluster: ClusterSpec, request: PlanRequest) -> str:
    """Return why the request contradicts itself or is impossible with this model; empty where neither is so."""
    script = request.script
    asked = request.mesh or {axis: max(2, degree) for axis, degree in request.demanded.items()} or script.mesh
    try:
        plan = dataclasses.replace(script, shares=()).on(asked)
        check_plan(plan)
        predict(model, cluster, plan)
    except PlanError as error:
        return str(error)
    return ""


def _need(prediction: Prediction) -> str:
    """Describe the memory of a rank, part by part."""
    memory = prediction.memory
    return (
        f"{nbytes(memory.total)} for each rank (parameters {nbytes(memory.parameters)}, gradients "
        f"{nbytes(memory.gradients)}, optimizer state {nbytes(memory.optimizer)}, activations "
        f"{nbytes(memory.activations)})"
    )


def _parts(prediction: Prediction) -> str:
    """Name the two largest parts of a rank's memory, in decimal units."""
    memory = prediction.memory
    state = memory.parameters + memory.gradients + memory.optimizer
    parts = {
        "state": state,
        "activations": memory.activations,
        "communication buffers": memory.communication,
        "libraries and allocator": memory.reserve,
        "the script's own data": memory.script,
    }
    ordered = sorted(parts.items(), key=lambda item: -item[1])[:2]
    return ", ".join(f"{name} {gigabytes(value)}" for name, value in ordered)


def _remedy(costed: Costed, capacity: float) -> str:
    """Name what would make a data-parallel plan fit."""
    memory = costed.prediction.memory
    if memory.parameters + memory.gradients + memory.optimizer > capacity:
        copies = "data parallelism keeps a copy of all of that on every rank"
        return f"{copies}; use devices with more memory or a smaller model"
    return "use a smaller global_batch_size, more microbatches, recompute in the layout, or devices with more memory"


def what_fits(model: ModelSpec, cluster: ClusterSpec, request: PlanRequest, least: Costed) -> str:
    """Return a phrase with the smallest number of such ranks that holds the model, and the memory that would be enough.

    Args:
        model: what is trained.
        cluster: the machines.
        request: what was asked.
        least: the plan that needs the least memory on this cluster.
    """
    memory = f"on these {least.plan.world_size} with {gigabytes(least.prediction.memory.total)} each"
    if least.plan.world_size == 1:
        memory = f"on one rank with {gigabytes(least.prediction.memory.total)}"
    solution = enough(model, cluster, request)
    if solution is None:
        return (
            f"no number of ranks of this kind holds it with a global batch of {request.script.batch.global_batch_size} "
            f"{request.script.batch.unit}; it would fit {memory}"
        )
    grown, fitting = solution
    nodes = sum(node.count for node in grown.nodes)
    ranks = f"{fitting.plan.world_size} or more ranks of this kind"
    where = f" ({nodes} nodes)" if nodes > 1 and nodes != fitting.plan.world_size else ""
    return f"it would fit on {ranks}{where} as {plan_words(fitting.plan)}, or {memory}"


def enough(model: ModelSpec, cluster: ClusterSpec, request: PlanRequest) -> tuple[ClusterSpec, Costed] | None:
    """Return the smallest multiple of the cluster on which some plan fits, and that plan; None if there is none.

    The multiple is found by doubling and then bisection.

    Args:
        model: what is trained.
        cluster: the machines, of which every node is repeated.
        request: what was asked. Its mesh, number of ranks, scope and objective are ignored.
    """
    free = dataclasses.replace(
        request, degree=None, max_devices=None, mesh=None, demanded={}, scope="all", objective="memory"
    )

    def fits(factor: int) -> tuple[ClusterSpec, Costed] | None:
        devices = factor * cluster.device_count  # more CPU ranks would only share the hosts' memory
        limited = dataclasses.replace(free, max_devices=devices)
        nodes = tuple(dataclasses.replace(node, count=node.count * factor) for node in cluster.nodes)
        grown = dataclasses.replace(cluster, nodes=nodes, links=_links(cluster))
        candidate = smallest(model, grown, limited)
        return (grown, candidate) if candidate is not None and candidate.prediction.fits else None

    high = 1
    while (result := fits(high)) is None:
        high *= 2
        if high * cluster.device_count > _MOST_RANKS:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        trial = fits(middle)
        low, high, result = (low, middle, trial) if trial is not None else (middle, high, result)
    return result


def _links(cluster: ClusterSpec) -> tuple[LinkSpec, ...]:
    """Return the links of a repeated cluster.

    A cluster without a network gets one like its own first link. Its speed has no effect: only memory is compared.
    """
    if any(link.tier == "network" for link in cluster.every_link) or not cluster.links:
        return cluster.links
    return (*cluster.links, dataclasses.replace(cluster.links[0], tier="network"))


def all_break_limits(request: PlanRequest, costed: list[Costed]) -> str:
    """Explain that all plans that fit break a limit of the request, and name the plan that is nearest to keeping it.

    Args:
        request: what was asked.
        costed: plans that fit.
    """
    fitting = [candidate for candidate in costed if candidate.broken]

    def over(costed: Costed) -> float:
        totals = objectives.totals(costed.cluster, request, costed.plan, costed.prediction)
        return objectives.over_limits(request, totals, costed.prediction)

    best = min(fitting, key=over)
    totals = objectives.totals(best.cluster, request, best.plan, best.prediction)
    return (
        f"no plan keeps the limits: the nearest ({plan_words(best.plan)}, {objectives.duration(totals.time_s)}) "
        f"{best.broken}; relax that limit, or allow other devices"
    )


def _not_finite(model: ModelSpec, cluster: ClusterSpec, request: PlanRequest, costed: Costed) -> str:
    """Explain that the value of the objective is not a finite number."""
    return (
        f"no plan of model {model.name!r} on cluster {cluster.name!r} has a {request.objective} that can be compared "
        f"(the first, {plan_words(costed.plan)}, has {costed.value}): a rate, size or price is out of range; "
        "correct the cluster file or the model"
    )


def gigabytes(value: float) -> str:
    """Return bytes as text in decimal units, as data sheets do: 1,120 GB, 9.85 GB, 350 MB."""
    if value >= 1e9:
        return f"{value / 1e9:,.0f} GB" if value >= 99.5e9 else f"{value / 1e9:.3g} GB"
    return f"{value / 1e6:,.0f} MB"

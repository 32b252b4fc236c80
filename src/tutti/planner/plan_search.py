"""Choose a plan: predict the promising candidates, take the best that fits, and say why each of the others lost."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import tutti.planner.objectives as objectives
from tutti.config.cluster import ClusterSpec
from tutti.config.compression import MOMENTUM_CODECS
from tutti.config.model import ModelSpec
from tutti.config.plan import Plan
from tutti.config.vocabulary import Precision
from tutti.cost_model import predict
from tutti.cost_model.best_case import is_mixed, ranks_of_node
from tutti.cost_model.gradient_sync_cost import may_pay
from tutti.cost_model.rank_placement import place_ranks
from tutti.cost_model.worker_speed import best_rate, matrix_dtype
from tutti.errors import PlanError
from tutti.planner.candidates import LOWER, candidates, possible, precisions
from tutti.planner.exploration import Clock, Costed, Explorer
from tutti.planner.loss_reasons import remarks, why
from tutti.planner.mixed_hardware import orders
from tutti.planner.no_plan_found import no_usable_plan, smallest
from tutti.planner.plan_refinement import polish
from tutti.planner.plan_request import Alternative, Choice, Coverage, Objective, PlanRequest, batches_to_try
from tutti.planner.relaxed_search import search_relaxed
from tutti.planner.scenarios import changes

TIE = 0.02
"""Plans within this fraction of the best value count as equal; `choose` says which of them is taken."""

CHANGES = 0.1
"""Additional time for finding what would have to change for other plans to win, as a fraction of the time limit."""

SHOWN_FAMILIES = 12
"""Largest number of plans with other meshes, and again of kinds of meshes, that are listed among the alternatives."""


def choose(
    model: ModelSpec,
    cluster: ClusterSpec,
    request: PlanRequest,
    *,
    clock: Clock | None = None,
    limit_s: float = math.inf,
) -> Choice:
    """Choose the plan that fits, keeps the request's limits, and has the least value of its objective.

    Gradient reduction stays exact, or uses a strategy that the request's relaxation level allows
    (relaxed_strategies.py). Plans within 2 % of the best value count as equal. Among them the order of preference
    is: the fastest (where time is not the objective), the fewest devices, the script's own precision, the fewest
    mechanisms, the fewest microbatches.

    Args:
        model: what is trained.
        cluster: the machines.
        request: what may vary, the objective and the limits.
        clock: returns seconds; needed for `limit_s`.
        limit_s: seconds after which a long search ends early. The choice's coverage says what was left open.

    Raises:
        PlanError: no plan fits, or none can be predicted. The message has the numbers.
    """
    request = _of_job(cluster, request)
    choice = _exact_choice(model, cluster, dataclasses.replace(request, relax="exact"), clock, limit_s)
    plain = _is_plain(request.script) and len(cluster.devices) == 1
    if request.relax == "exact" and not (plain and may_pay(model, choice.best)):
        return choice
    relaxed = search_relaxed(model, cluster, request, choice, clock, limit_s / 2)
    if request.relax == "exact" and not (relaxed.relaxation is not None and relaxed.relaxation.chosen):
        return choice  # a strategy that loses nothing is mentioned only if it is chosen
    return relaxed


def _of_job(cluster: ClusterSpec, request: PlanRequest) -> PlanRequest:
    """Return the request with the number of ranks of a job that fixes them.

    Raises:
        PlanError: another number is asked for.
    """
    ranks = cluster.fixed_ranks
    if ranks is None:
        return request
    mesh = None if request.mesh is None else math.prod(request.mesh.values())
    for name, asked in (("--nproc", request.degree), ("--mesh", mesh), ("--max-devices", request.max_devices)):
        if asked is not None and (asked < ranks if name == "--max-devices" else asked != ranks):
            raise PlanError(f"{name} asks for {asked} ranks, and the nodes of the job have {ranks}; leave it out")
    return dataclasses.replace(request, degree=ranks)


def _is_plain(script: Plan) -> bool:
    """Return whether the script leaves open how gradients are reduced."""
    return script.sync.compress is None and script.sync.mode == "synchronous"


def _exact_choice(
    model: ModelSpec, cluster: ClusterSpec, request: PlanRequest, clock: Clock | None, limit_s: float
) -> Choice:
    """Return the best plan that reduces gradients as the script does."""
    objectives.check(cluster, request)
    if request.scope == "all" or request.mesh is not None or request.demanded:
        return _search(model, cluster, request, clock, limit_s)
    outcome = _data_parallel(model, cluster, request)
    if isinstance(outcome, Choice):
        return outcome
    if request.scope == "data":
        raise PlanError(outcome)
    wider = dataclasses.replace(request, scope="all")
    choice = _search(model, cluster, wider, clock, limit_s)
    sentence = "Data parallelism alone does not fit, so the model is divided: " + outcome.partition("; ")[0]
    return dataclasses.replace(choice, request=request, remarks=(*choice.remarks, sentence))


def _data_parallel(model: ModelSpec, cluster: ClusterSpec, request: PlanRequest) -> Choice | str:
    """Predict all data-parallel plans and return the best, or the reason why none is possible."""
    costed, impossible = _cost(model, cluster, request, candidates(model, cluster, request))
    if not costed:
        return impossible[0].reason
    if not any(candidate.good for candidate in costed):
        return no_usable_plan(model, cluster, request, costed)
    coverage = Coverage(
        considered=len(costed) + len(impossible), too_large=0, too_slow=0, costed=len(costed),
        refused=len(impossible), left=0, gap=0.0,
    )  # fmt: skip
    return _choice(model, cluster, request, costed, impossible, coverage)


def _search(
    model: ModelSpec, cluster: ClusterSpec, request: PlanRequest, clock: Clock | None, limit_s: float
) -> Choice:
    """Return the best plan of all meshes.

    Several global batch sizes are tried where the objective lets the size change.
    """
    given = precisions(model, cluster, request)
    requests = [request]
    batch = request.script.batch
    # a growing batch is the user's choice
    if request.objective == "time-to-quality" and request.noise is not None and not batch.ramp:
        sizes = batches_to_try(batch.global_batch_size, request.noise, cluster.device_count)
        requests = [_with_batch(request, size) for size in sizes]
    costed: list[Costed] = []
    impossible: list[Alternative] = []
    coverages: list[Coverage] = []
    whole_s, node_orders = limit_s, orders(cluster, model.loading, request.objective)
    for index, sized_request in enumerate(requests):
        remaining = limit_s / (len(requests) - index) if math.isfinite(limit_s) else limit_s
        began = clock() if clock is not None else 0.0
        try:
            explorer = Explorer(model, node_orders, sized_request, given, clock, remaining)
        except PlanError as error:
            if len(requests) == 1:
                raise
            impossible.append(Alternative(plan=sized_request.script, prediction=None, reason=str(error)))
            continue
        search_parts(explorer, node_orders, clock, remaining)
        explorer.run()
        share = remaining
        for tier in (1, 2) if explorer.limits.may_shard or explorer.limits.least_ranks == 1 else ():
            if any(predicted.prediction.fits for predicted in explorer.costed) or (
                tier == 2 and not objectives.nvme_path(cluster)
            ):
                break
            spent_s = clock() - began if clock is not None else 0.0
            remaining = max(share - spent_s, 0.3 * limit_s)
            explorer = Explorer(model, node_orders, sized_request, given, clock, remaining, offload=tier)
            explorer.run()
        if not any(predicted.good for predicted in explorer.costed):
            # No plan with a low value of the objective keeps the limits: minimise the limited quantity instead.
            explorer.add(_best_by_limit(model, cluster, sized_request, given, clock, remaining))
        polish(explorer)
        costed += explorer.costed
        impossible += explorer.impossible.values()
        coverages.append(explorer.coverage())
        limit_s -= clock() - began if clock is not None else 0.0
    if not costed and impossible and not any(coverage.too_large for coverage in coverages):
        raise PlanError(impossible[0].reason)
    if not any(candidate.good for candidate in costed):
        raise PlanError(no_usable_plan(model, cluster, request, costed))
    over = _ending(clock, CHANGES * whole_s)
    return _choice(model, cluster, request, costed, impossible, _total_coverage(coverages), over)


def _ending(clock: Clock | None, seconds: float) -> Callable[[], bool]:
    """Return a function that says whether this many seconds from now have passed."""
    if clock is None:
        return lambda: False
    end = clock() + seconds
    return lambda: clock() >= end


def _best_by_limit(
    model: ModelSpec,
    cluster: ClusterSpec,
    request: PlanRequest,
    given: list[Precision],
    clock: Clock | None,
    limit_s: float,
) -> Costed | None:
    """Return the plan with the least of the quantity that a limit restricts: price, time or memory."""
    if request.budget is None and request.deadline_s is None:
        return smallest(model, cluster, request)
    objective: Objective = "cost" if request.budget is not None else "throughput"
    free = dataclasses.replace(request, objective=objective, budget=None, deadline_s=None)
    explorer = Explorer(model, orders(cluster, model.loading, objective), free, given, clock, limit_s)
    explorer.run()
    return min(
        (candidate for candidate in explorer.costed if candidate.good),
        key=lambda candidate: candidate.value,
        default=None,
    )


def _with_batch(request: PlanRequest, size: int) -> PlanRequest:
    """Return the request with another global batch size."""
    batch = dataclasses.replace(request.script.batch, global_batch_size=size)
    return dataclasses.replace(request, script=dataclasses.replace(request.script, batch=batch))


def _total_coverage(coverages: Sequence[Coverage]) -> Coverage:
    """Add up the coverage of several searches."""
    names = [field.name for field in dataclasses.fields(Coverage) if field.name != "gap"]
    counts = {name: sum(getattr(coverage, name) for coverage in coverages) for name in names}
    return Coverage(**counts, gap=max((coverage.gap for coverage in coverages), default=0.0))


def _choice(
    model: ModelSpec,
    cluster: ClusterSpec,
    request: PlanRequest,
    costed: list[Costed],
    impossible: Sequence[Alternative],
    coverage: Coverage,
    over: Callable[[], bool] = lambda: False,
) -> Choice:
    """Choose the best of the predicted plans, and explain the choice."""
    best = _as_written(cluster, _best([candidate for candidate in costed if candidate.good], request))
    wide = request.scope != "data" or request.mesh is not None
    others = _families(costed, best) if wide else _representatives(costed, best)
    lost = [
        Alternative(
            plan=candidate.plan,
            prediction=candidate.prediction,
            reason=why(request, candidate, best),
            totals=objectives.totals(candidate.cluster, request, candidate.plan, candidate.prediction),
        )
        for candidate in sorted(
            others, key=lambda candidate: (not candidate.good, not candidate.prediction.fits, candidate.value)
        )
    ]
    alternatives = (*lost, *_not_allowed(model, cluster, request, best), *impossible)
    nodes = tuple(node.name for node in best.cluster.nodes)
    return Choice(
        model=model.name,
        cluster=cluster.name,
        request=request,
        best=best.plan,
        prediction=best.prediction,
        alternatives=alternatives,
        remarks=remarks(model, cluster, request, best, alternatives),
        totals=objectives.totals(best.cluster, request, best.plan, best.prediction),
        changes=changes(model, best, [candidate for candidate in others if candidate.good], request, over)
        if wide
        else (),
        coverage=coverage,
        nodes=() if best.cluster.nodes == cluster.nodes else nodes,
    )


def _cost(
    model: ModelSpec, cluster: ClusterSpec, request: PlanRequest, plans: list[Plan]
) -> tuple[list[Costed], list[Alternative]]:
    """Predict all plans; return the predicted ones, and one unpredictable plan for each reason of refusal."""
    costed: list[Costed] = []
    impossible: dict[str, Alternative] = {}
    for plan in plans:
        try:
            prediction = predict(model, cluster, plan)
        except PlanError as error:
            impossible.setdefault(str(error), Alternative(plan=plan, prediction=None, reason=str(error)))
            continue
        totals = objectives.totals(cluster, request, plan, prediction)
        costed.append(
            Costed(
                plan=plan,
                prediction=prediction,
                cluster=cluster,
                value=objectives.value(cluster, request, plan, prediction),
                broken=objectives.broken_limit(request, totals, prediction),
            )
        )
    return costed, list(impossible.values())


def _best(good: list[Costed], request: PlanRequest) -> Costed:
    """Return the simplest of the plans that count as equal to the best."""
    least = min(candidate.value for candidate in good)
    equal = [candidate for candidate in good if candidate.value <= least * (1 + TIE)]
    # many devices may cost no more than few and take less time
    if request.objective not in ("throughput", "time-to-quality"):
        fastest = min(candidate.prediction.step_time_s.value for candidate in equal)
        equal = [candidate for candidate in equal if candidate.prediction.step_time_s.value <= fastest * (1 + TIE)]
    script = request.script

    def plainness(costed: Costed) -> tuple[object, ...]:
        return (
            costed.plan.world_size,
            costed.plan.precision != script.precision,
            mechanisms(costed.plan),
            costed.plan.degree("replicate") < costed.plan.world_size,  # pure replication needs no change of the model
            costed.plan.batch.num_microbatches,
            len(costed.plan.shares) + len(costed.plan.split_shares),
            len(costed.plan.layout),
            costed.value,
        )

    return min(equal, key=plainness)


def _as_written(cluster: ClusterSpec, best: Costed) -> Costed:
    """Return the best plan with the cluster's own order of nodes, if that places its ranks on the same nodes."""
    if best.cluster.nodes == cluster.nodes:
        return best
    world = best.plan.world_size
    same = place_ranks(cluster, world) == place_ranks(best.cluster, world)
    return dataclasses.replace(best, cluster=cluster) if same else best


def mechanisms(plan: Plan) -> int:
    """Return the number of axes and settings that a plan combines."""
    axes = sum(degree > 1 for degree in plan.mesh.values())
    extra = plan.mesh.get("stage", 1) > 1 and plan.pipeline.schedule != "1f1b"
    recompute = any(rule.recompute for rule in plan.layout)
    return axes + extra + recompute + (plan.sharding.offload != "none") + bool(plan.pipeline.cuts)


def _representatives(costed: list[Costed], best: Costed) -> list[Costed]:
    """Return the data-parallel plans to list besides the chosen one.

    These are the best plans of every group with the same degree, precision and kind of shares (equal or not). From the
    group of the chosen plan, these are the plans that do not fit and the two fastest that do.
    """

    def group(costed: Costed) -> tuple[int, str, bool]:
        return (costed.plan.world_size, costed.plan.precision, bool(costed.plan.shares))

    chosen = _firsts([candidate for candidate in costed if group(candidate) != group(best)], group)
    same = sorted(
        (candidate for candidate in costed if group(candidate) == group(best) and candidate is not best), key=_rank
    )
    too_large = [candidate for candidate in same if not candidate.prediction.fits]
    return [*chosen, *too_large, *[candidate for candidate in same if candidate.prediction.fits][:2]]


def _families(costed: list[Costed], best: Costed) -> list[Costed]:
    """Return the plans to list besides the chosen one: the best with other meshes, and the best of each kind."""

    def mesh(costed: Costed) -> object:
        by_speed = bool(costed.plan.shares or costed.plan.split_shares)
        return (tuple(costed.plan.mesh.items()), _level(costed.plan), costed.plan.precision, by_speed)

    def kind(costed: Costed) -> object:
        axes = tuple(sorted(axis for axis, degree in costed.plan.mesh.items() if degree > 1))
        return (
            axes,
            _level(costed.plan),
            costed.plan.precision if costed.plan.precision != best.plan.precision else "",
        )

    meshes = [candidate for candidate in _firsts(costed, mesh) if mesh(candidate) != mesh(best)]
    nearest = sorted(meshes, key=_rank)[:SHOWN_FAMILIES]
    kinds = sorted(_firsts([candidate for candidate in meshes if candidate not in nearest], kind), key=_rank)
    simple = sorted(kinds, key=lambda candidate: (mechanisms(candidate.plan), _rank(candidate)))[:SHOWN_FAMILIES]
    same = [
        candidate
        for candidate in costed
        if mesh(candidate) == mesh(best) and candidate is not best and candidate.plan != best.plan
    ]
    return [*nearest, *simple, *sorted(same, key=_rank)[:2]]


def _firsts(costed: Sequence[Costed], key: Callable[[Costed], object]) -> list[Costed]:
    """Return the best plan of each group."""
    chosen: dict[object, Costed] = {}
    for candidate in costed:
        rival = chosen.get(key(candidate))
        if rival is None or _rank(candidate) < _rank(rival):
            chosen[key(candidate)] = candidate
    return list(chosen.values())


def _level(plan: Plan) -> int:
    """Return the sharding level of a plan; 0 where nothing is sharded."""
    return plan.sharding.level if plan.mesh.get("shard", 1) > 1 else 0


def _rank(costed: Costed) -> tuple[bool, bool, float]:
    """Return a sort key within a group: plans that fit, by value; then the others, by the memory they need."""
    fits = costed.prediction.fits
    return (not fits, bool(costed.broken), costed.value if fits else costed.prediction.memory.total)


def _not_allowed(model: ModelSpec, cluster: ClusterSpec, request: PlanRequest, best: Costed) -> tuple[Alternative, ...]:
    """Return faster plans in a lower precision that the request rules out, so that the user can choose them."""
    if request.precision != "script" or best.plan.precision != "full":
        return ()
    faster = []
    for precision in LOWER:
        codec = best.plan.sync.compress
        # Momentum compression does not work with a loss scale, which float16 needs.
        scaled = precision == "float16" and codec is not None and codec.method in MOMENTUM_CODECS
        if scaled or not possible(model, cluster, precision):
            continue
        plan = dataclasses.replace(best.plan, precision=precision)
        prediction = predict(model, best.cluster, plan)
        gain = best.prediction.step_time_s.value / prediction.step_time_s.value
        if gain > 1.05 and prediction.fits:
            reason = f"{gain:.1f}x faster, but changes the numbers: --precision auto allows it"
            faster.append(Alternative(plan=plan, prediction=prediction, reason=reason))
    return tuple(faster)


_PART_TIME = 0.35
"""Fraction of the time limit for the first part of the cluster at most. Each later part has half of the one before."""

_MAX_PARTS = 4
"""Largest number of parts of the cluster that are searched."""

_PLANS_PER_PART = 6
"""Number of plans from each part with which the search of the whole cluster begins."""


def search_parts(whole: Explorer, clusters: tuple[ClusterSpec, ...], clock: Clock | None, limit_s: float) -> None:
    """Seed a search, before it runs, with the best plans for parts of its cluster.

    Each part is searched only in its fastest precision, which may be one that not all devices of the cluster have.

    Args:
        whole: the search of the whole cluster; it receives the plans.
        clusters: the cluster, once for every order of its nodes.
        clock: returns seconds; needed for `limit_s`.
        limit_s: time limit of the whole search, in seconds.
    """
    model, request, share_s = whole.model, whole.request, limit_s * _PART_TIME
    for cluster, part in islice(cluster_parts(clusters, request), _MAX_PARTS):
        try:
            explorer = Explorer(model, (part,), request, [_fastest_precision(model, part, request)], clock, share_s)
        except PlanError:  # no plan of this part serves the request
            continue
        explorer.run(better_than=whole.best)
        polish(explorer)
        good = sorted(
            (candidate for candidate in explorer.costed if candidate.good), key=lambda candidate: candidate.value
        )
        for candidate in good[:_PLANS_PER_PART]:
            whole.cost(candidate.plan, cluster)
        share_s /= 2


def _fastest_precision(model: ModelSpec, part: ClusterSpec, request: PlanRequest) -> Precision:
    """Return the allowed precision in which the slowest device has the highest rate."""
    devices = [part.devices[node.device] for node in part.nodes]

    def rate(precision: Precision) -> float:
        return min(best_rate(device, matrix_dtype(model.dtype, precision)) for device in devices)

    given = precisions(model, part, request)
    return max(given, key=rate) if len(given) > 1 else given[0]


def cluster_parts(clusters: tuple[ClusterSpec, ...], request: PlanRequest) -> Iterator[tuple[ClusterSpec, ClusterSpec]]:
    """Yield pairs of a cluster and its first nodes, if the request lets the other nodes stay idle.

    For the first order of nodes, these are the first 1, 2, 4 ... kinds of nodes; for the other orders, the first kind.

    Args:
        clusters: the cluster, once for every order of its nodes.
        request: what was asked.
    """
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
    """Return for every run of nodes with equal devices the index after its last node."""
    nodes, starts = cluster.nodes, [0]
    for at in range(1, len(nodes)):
        if is_mixed(dataclasses.replace(cluster, nodes=nodes[starts[-1] : at + 1])):
            starts.append(at)
    return [*starts[1:], len(nodes)]

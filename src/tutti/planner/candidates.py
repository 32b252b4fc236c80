"""List what the planner tries: data-parallel plans, and for other meshes the degrees of every axis."""

import dataclasses
from dataclasses import dataclass

import numpy as np

from tutti.config.cluster import ClusterSpec
from tutti.config.compression import MOMENTUM_CODECS
from tutti.config.model import ModelSpec
from tutti.config.plan import PipelinePlan, Plan, ShardingPlan
from tutti.config.vocabulary import AxisName, Precision
from tutti.cost_model import compute_cost
from tutti.cost_model.best_case import ranks_of_node
from tutti.cost_model.module_costs import model_table
from tutti.cost_model.plan_table import Array
from tutti.cost_model.rank_placement import HostGroup, place_ranks, samples_of
from tutti.cost_model.worker_speed import best_rate, matrix_dtype, supports, worker_at
from tutti.errors import PlanError
from tutti.planner.plan_request import PlanRequest

LOWER: tuple[Precision, ...] = ("tf32", "bfloat16", "float16")
"""Precisions below full. Those that keep the range of float32 come first; float16 needs loss scaling."""


def candidates(model: ModelSpec, cluster: ClusterSpec, request: PlanRequest) -> list[Plan]:
    """Return all data-parallel plans of the script's batch that are worth predicting, one device included.

    No plan leaves a rank idle. On unequal devices, each plan is also tried with shares by speed.

    Args:
        model: what is trained.
        cluster: the machines.
        request: what may vary.
    """
    samples = samples_of(request.script.batch.global_batch_size, request.script.batch.unit, model.tokens_per_sample)
    plans = []
    for degree in degrees(cluster, request, samples):
        for precision in precisions(model, cluster, request):
            for slices in microbatches(model, request, samples, degree):
                plan = dataclasses.replace(
                    request.script,
                    batch=dataclasses.replace(request.script.batch, num_microbatches=slices),
                    mesh={"replicate": degree},
                    shares=(),
                    split_shares=(),
                    precision=precision,
                )
                plans.append(plan)
                shares = _shares(model, cluster, plan, samples)
                if shares:
                    plans.append(dataclasses.replace(plan, shares=shares))
    return plans


def degrees(cluster: ClusterSpec, request: PlanRequest, samples: int) -> list[int]:
    """Return the data-parallel degrees to try, ascending.

    These are all up to 16, then divisors of the batch, whole nodes, powers of two and the largest possible. CPU hosts
    can take a rank for each core.

    Args:
        cluster: the machines.
        request: what was asked.
        samples: samples in the global batch.

    Raises:
        PlanError: the request fixes a degree above the number of samples.
    """
    if request.degree is not None:
        if request.degree > samples:
            raise PlanError(
                f"{request.degree} ranks cannot share a global batch of {samples} samples without idle ranks; "
                f"ask for at most {samples} ranks or a larger global_batch_size"
            )
        return [request.degree]
    most = min(max_unshared_ranks(cluster), samples, request.max_devices or samples)
    per_node = {node.devices_per_node for node in cluster.nodes}
    wanted = set(range(1, min(most, 16) + 1)) | {most}
    wanted |= {degree for degree in range(17, min(most, 4096) + 1) if samples % degree == 0}
    power = 1
    while power <= most:
        wanted |= {power} | {power * count for count in per_node if power * count <= most}
        power *= 2
    return sorted(wanted)


def precisions(model: ModelSpec, cluster: ClusterSpec, request: PlanRequest) -> list[Precision]:
    """Return the precisions to try: a single one, unless the request leaves the choice.

    Where the choice is open, every device must have a rate for a precision. float16 is tried only where a device is
    faster in it than in bfloat16, because it takes as much memory and needs loss scaling. Momentum compression does
    not work with loss scaling, so float16 is not tried with it either.
    """
    if request.precision == "script":
        return [request.script.precision]
    if request.precision != "auto":
        return [request.precision]
    lower = [precision for precision in LOWER if possible(model, cluster, precision)]
    if "bfloat16" in lower and "float16" in lower:
        devices = [cluster.devices[node.device] for node in cluster.nodes]
        if all(best_rate(device, "bfloat16") >= best_rate(device, "float16") for device in devices):
            lower.remove("float16")
    code = request.script.sync.compress
    if code is not None and code.method in MOMENTUM_CODECS and "float16" in lower:
        lower.remove("float16")
    return ["full", *lower]


def possible(model: ModelSpec, cluster: ClusterSpec, precision: Precision) -> bool:
    """Return whether every device has a rate in this precision, and the model is float32, so that it may be lowered."""
    if model.dtype != "float32":
        return False
    dtype = matrix_dtype(model.dtype, precision)
    return all(supports(cluster.devices[node.device], dtype) for node in cluster.nodes)


def microbatches(model: ModelSpec, request: PlanRequest, samples: int, degree: int) -> list[int]:
    """Return the numbers of microbatches to try: the script's, and powers of two where results allow a change.

    Numbers that leave a microbatch with fewer samples than ranks are left out.

    Args:
        model: what is trained.
        request: what was asked.
        samples: samples in the global batch.
        degree: number of data-parallel ranks.
    """
    script_count = request.script.batch.num_microbatches
    fixed = request.keep_microbatches or (model.batch_statistics and not request.allow_microbatches)
    if fixed:
        return [script_count]
    counts = {script_count} | {2**power for power in range(samples.bit_length())}
    return sorted(count for count in counts if samples // count >= degree) or [script_count]


def _shares(model: ModelSpec, cluster: ClusterSpec, plan: Plan, samples: int) -> tuple[float, ...]:
    """Return shares by speed for a data-parallel plan; empty where ranks are equal or the plan is impossible."""
    if plan.world_size == 1:
        return ()
    try:
        return proportional_shares(
            model, cluster, plan.world_size, plan.precision, samples // plan.batch.num_microbatches
        )
    except PlanError:
        return ()  # predicting this plan will raise the same error, with its reason


MOST_SPLIT = 64
MOST_EXPERT = 512
MOST_TABLE = 64
MOST_SPACE = 64
LEAST_TOKENS = 256
"""The context axis is not used where a rank would have fewer tokens than this."""

UNEVEN = 1.1
"""A degree divides a layer well only if no rank has more than this multiple of an equal share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The degrees to try along every axis, and what else restricts the search.

    Attributes:
        samples: samples in the global batch.
        least_ranks: smallest number of ranks.
        most_ranks: largest number of ranks.
        devices: number of devices of the cluster; more ranks than this share them.
        per_node: most ranks that a node takes without two of them sharing a core.
        splits, stages, contexts, experts, tables, spaces: degrees to try along each axis.
        blocks: number of blocks between which a pipeline can be cut.
        cuts: number of cuts that the script marks.
        levels: sharding levels to try.
        may_shard: whether the shard axis is tried.
        must_shard: whether the script asks for the shard axis.
        recompute: indices into plan_table.RECOMPUTE to try.
        microbatches: the only number that is allowed, if it is fixed.
        own_microbatches: the script's number of microbatches.
        pipeline: schedule and stages per rank that the script asks for, if any.
        axes: fixed degrees of "shard" and of "copies" (replicate times shard), if any.
        single_device: whether one rank is tried too, although the script asks for axes that need several.
        staged: whether pipeline stages are asked for.
    """

    samples: int
    least_ranks: int
    most_ranks: int
    devices: int
    per_node: int
    splits: tuple[int, ...]
    stages: tuple[int, ...]
    contexts: tuple[int, ...]
    experts: tuple[int, ...]
    tables: tuple[int, ...]
    spaces: tuple[int, ...]
    blocks: int
    cuts: int
    levels: tuple[int, ...]
    may_shard: bool
    must_shard: bool
    recompute: tuple[int, ...]
    microbatches: int | None
    own_microbatches: int
    pipeline: PipelinePlan | None
    axes: dict[str, int] | None
    single_device: bool
    staged: bool


def limits_of(model: ModelSpec, cluster: ClusterSpec, request: PlanRequest) -> Limits:
    """Return the limits that model, cluster and request set to a search.

    Raises:
        PlanError: the script asks for an axis along which nothing of the model can be divided, or the number of
            samples in the batch is unknown.
    """
    script = request.script
    samples = samples_of(script.batch.global_batch_size, script.batch.unit, model.tokens_per_sample)
    most = max_unshared_ranks(cluster)
    if request.max_devices is not None:
        most = min(most, request.max_devices)
    least = 1
    fixed = request.mesh
    exact = request.degree if fixed is None else _product(fixed)
    if exact is not None:
        least = most = exact
    per_node = max(ranks_of_node(cluster, node) for node in cluster.nodes)
    blocks = len({module.block for module in model.modules if module.block >= 0})
    cuts = len(script.pipeline.cuts)
    fixed_microbatches = request.keep_microbatches or (model.batch_statistics and not request.allow_microbatches)
    script_recomputes = any(rule.recompute is not None for rule in script.layout)
    fixed_level = "shard" in request.demanded or (
        fixed is not None and dataclasses.replace(script.sharding, engine="auto") != ShardingPlan()
    )
    levels = (script.sharding.level,) if fixed_level else (1, 2, 3)
    return Limits(
        samples=samples,
        least_ranks=least,
        most_ranks=most,
        devices=cluster.device_count,
        per_node=per_node,
        splits=_axis(request, "split", _splits(model, most, per_node)),
        stages=_axis(request, "stage", _stages(blocks, cuts, most) if not model.own_losses else (1,)),
        contexts=_axis(request, "context", _contexts(model, most)),
        experts=_axis(request, "expert", _experts(model, most)),
        tables=_axis(request, "table", _tables(model, most)),
        spaces=_axis(request, "space", _spaces(model, most)),
        blocks=max(blocks, cuts + 1),
        cuts=cuts,
        levels=levels,
        may_shard=_may_shard(request),
        must_shard="shard" in request.demanded and request.demanded["shard"] != 1,
        recompute=(0,) if script_recomputes else (0, 1, 2),
        microbatches=script.batch.num_microbatches if fixed_microbatches else None,
        own_microbatches=script.batch.num_microbatches,
        pipeline=script.pipeline if script.pipeline != PipelinePlan(cuts=script.pipeline.cuts) else None,
        axes=_fixed_axes(request),
        single_device=bool(request.demanded) and least == 1,
        staged=fixed is not None or "stage" in request.demanded,
    )


def max_unshared_ranks(cluster: ClusterSpec) -> int:
    """Return the number of ranks that the cluster takes without two ranks sharing a core."""
    return sum(node.count * ranks_of_node(cluster, node) for node in cluster.nodes)


def _product(mesh: dict[AxisName, int]) -> int:
    """Return the number of ranks of a mesh."""
    total = 1
    for degree in mesh.values():
        total *= degree
    return total


def _fixed_axes(request: PlanRequest) -> dict[str, int] | None:
    """Return the degrees of shard and of replicate times shard that the request fixes; None where it fixes neither."""
    mesh = request.mesh
    if mesh is None:
        shard = request.demanded.get("shard", 0)
        return {"shard": shard} if shard > 1 else None
    return {"copies": mesh.get("replicate", 1) * mesh.get("shard", 1), "shard": mesh.get("shard", 1)}


def _may_shard(request: PlanRequest) -> bool:
    """Return whether the request lets plans use the shard axis."""
    return request.scope != "data" and (request.mesh is None or request.mesh.get("shard", 1) > 1)


def _axis(request: PlanRequest, axis: AxisName, possible_degrees: tuple[int, ...]) -> tuple[int, ...]:
    """Return the degrees to try along one axis: those that the model allows, or the one that was asked for."""
    if request.mesh is not None:
        return (request.mesh.get(axis, 1),)
    if request.scope == "data":
        return (1,)
    wanted = request.demanded.get(axis)
    if wanted is None:
        return possible_degrees
    if wanted > 1:
        return (wanted,)
    divided = tuple(degree for degree in possible_degrees if degree > 1)
    if wanted == 0 and not divided:
        raise PlanError(
            f"the script asks for the {axis} axis, but no part of the model can be divided over 2 or more ranks; "
            "remove it from the script"
        )
    return divided if wanted == 0 else (1,)


def _powers(most: int) -> list[int]:
    """Return the powers of two up to `most`."""
    return [2**power for power in range(max(1, most).bit_length())]


def _splits(model: ModelSpec, most: int, per_node: int) -> tuple[int, ...]:
    """Return the degrees that divide most of the work of the layers that can be split.

    All degrees within a node are considered, and powers of two up to 8 or twice a node.
    """
    divided = [module for module in model.modules if module.split]
    if not divided:
        return (1,)
    weights = {id(module): 1.0 + sum(op.flops_forward for op in module.ops) for module in divided}
    total = sum(weights.values())
    highest = min(most, MOST_SPLIT, max(8, 2 * per_node))
    degrees = []
    for degree in range(1, highest + 1):
        if degree > per_node and degree & (degree - 1):
            continue
        limited = [module for module in divided if module.split_limit]
        if any(m.split_limit < degree or (m.split == "heads" and m.split_limit % degree) for m in limited):
            continue
        uneven = sum(weights[id(module)] for module in limited if _uneven(module.split_limit, degree))
        if uneven < 0.5 * total:
            degrees.append(degree)
    return tuple(degrees) or (1,)


def _uneven(units: int, degree: int) -> bool:
    """Return whether one of `degree` ranks gets more of a layer's units than `UNEVEN` times an equal share."""
    return -(-units // degree) * degree > UNEVEN * units


def _stages(blocks: int, cuts: int, most: int) -> tuple[int, ...]:
    """Return numbers of pipeline ranks: the fewest for each number of blocks on the fullest rank, and powers of two."""
    if cuts:
        return tuple(dict.fromkeys(degree for degree in (1, cuts + 1) if degree <= most))
    highest = min(most, blocks)
    wanted = {1} | set(_powers(highest)) | {-(-blocks // blocks_per_rank) for blocks_per_rank in range(1, blocks + 1)}
    if highest <= 8:
        wanted |= set(range(1, highest + 1))
    return tuple(sorted(degree for degree in wanted if degree == 1 or degree <= highest))


def _contexts(model: ModelSpec, most: int) -> tuple[int, ...]:
    """Return the degrees along which each sequence is divided; 1 for short sequences and models without attention."""
    if not any(module.key_value_nbytes for module in model.modules) or model.tokens_per_sample < 2 * LEAST_TOKENS:
        return (1,)
    return tuple(_powers(min(most, model.tokens_per_sample // LEAST_TOKENS, MOST_SPLIT)))


def _experts(model: ModelSpec, most: int) -> tuple[int, ...]:
    """Return the degrees over which experts are divided: powers of two, and three times these."""
    if not any(module.expert for module in model.modules):
        return (1,)
    highest = min(most, MOST_EXPERT)
    thrice = [3 * power for power in _powers(highest) if 3 * power <= highest]
    return tuple(sorted({*_powers(highest), *thrice}))


def _tables(model: ModelSpec, most: int) -> tuple[int, ...]:
    """Return the degrees over which embedding tables are divided."""
    return tuple(_powers(min(most, MOST_TABLE))) if any(module.table for module in model.modules) else (1,)


def _spaces(model: ModelSpec, most: int) -> tuple[int, ...]:
    """Return the degrees over which images or volumes are divided."""
    return tuple(_powers(min(most, MOST_SPACE))) if any(module.spatial for module in model.modules) else (1,)


def marked(script: Plan) -> bool:
    """Return whether the script's own plan asks for more than data parallelism."""
    return bool(script.pipeline.cuts) or any(rule.placement != "auto" for rule in script.layout)


ROUNDS = 4
"""How often shares are recomputed at the speeds that they lead to. Work that does not depend on the share, such as
reading weights, weighs more in a small share.
"""


def speeds(model: ModelSpec, host_groups: tuple[HostGroup, ...], precision: Precision, loads: Array) -> Array:
    """Return the samples per second of the whole model on every rank, relative to the fastest rank, (ranks,).

    Args:
        model: what is trained.
        host_groups: where the ranks run.
        precision: precision of the computation.
        loads: samples that each rank computes at once, (ranks,).
    """
    table, modules = model_table(model).ops, len(model.modules)
    rates, known, first = np.ones(len(loads)), {}, 0
    for host_group in host_groups:
        worker = worker_at(host_group, model.dtype, precision, channels_last=model.channels_last)
        rank_samples = np.maximum(1, np.round(loads[first : first + host_group.ranks])).astype(np.int64)
        for count in np.unique(rank_samples).tolist():
            key = (host_group.device.name, host_group.sharing, host_group.threads, count)
            if key not in known:
                passes = (compute_cost.forward, compute_cost.backward)
                whole = sum(float(cost_of_pass(table, worker, count, modules).seconds.sum()) for cost_of_pass in passes)
                known[key] = count / whole if whole > 0 else 1.0
            rates[first : first + host_group.ranks][rank_samples == count] = known[key]
        first += host_group.ranks
    return np.asarray(rates / rates.max(), dtype=np.float64)


def proportional_shares(
    model: ModelSpec, cluster: ClusterSpec, ranks: int, precision: Precision, samples: int
) -> tuple[float, ...]:
    """Return a share for each rank such that all finish together, relative to the largest; empty where all are equal.

    Args:
        model: what is trained.
        cluster: the machines.
        ranks: number of data-parallel ranks.
        precision: precision of the computation.
        samples: samples in a microbatch, over all ranks.
    """
    host_groups, loads = place_ranks(cluster, ranks), np.full(ranks, samples / ranks)
    for _ in range(ROUNDS):
        rates = speeds(model, host_groups, precision, loads)
        loads = rates / rates.sum() * samples
    return listed(loads)


def listed(loads: Array) -> tuple[float, ...]:
    """Return loads as the shares of a plan, relative to the largest, in thousandths; empty where all are equal."""
    shares = tuple(round(float(load), 3) for load in loads / loads.max())
    return shares if min(shares) < 1 else ()

"""What a model, a cluster and a request leave open: which degrees each axis may have at all."""

from dataclasses import dataclass

from tutti.config.cluster import ClusterSpec
from tutti.config.model import ModelSpec
from tutti.config.plan import PipelinePlan, Plan, ShardingPlan
from tutti.config.vocabulary import AxisName
from tutti.cost_model.counts import samples_of
from tutti.errors import PlanError
from tutti.planner.choice import Request
from tutti.planner.tables import ranks_of_node

MOST_SPLIT = 64
MOST_EXPERT = 512
MOST_TABLE = 64
MOST_SPACE = 64
LEAST_TOKENS = 256
"""Fewer tokens on a rank than this and the context axis has nothing to divide."""

UNEVEN = 1.1
"""Times its share of a layer that a rank may have at most, else the layer is none that a degree divides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Degrees to try along every axis. `devices`: beyond which ranks share them (the cores of CPUs). `axes`: of a mesh
    that was asked for, with `copies` for replicate times shard; `microbatches`: the only number allowed, if one is;
    `pipeline`: schedule and stages per rank that the script asks for; `cuts`: stages that the script marks;
    `recompute`: indices into enumerate.RECOMPUTE; `alone`: one rank is tried too, where annotations ask for axes that
    it does not have; `staged`: stages are asked for.
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
    alone: bool
    staged: bool


def limits_of(model: ModelSpec, cluster: ClusterSpec, request: Request) -> Limits:
    """The limits for a request. Raises PlanError for more ranks than there can be, or a batch of unknown size."""
    script = request.script
    samples = samples_of(script.batch.global_batch_size, script.batch.unit, model.tokens_per_sample)
    most = seats(cluster)
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
    held = request.keep_microbatches or (model.batch_statistics and not request.allow_microbatches)
    asks = any(rule.recompute is not None for rule in script.layout)
    stated = "shard" in request.demanded or (fixed is not None and script.sharding != ShardingPlan())
    levels = (script.sharding.level,) if stated else (1, 2, 3)
    return Limits(
        samples=samples,
        least_ranks=least,
        most_ranks=most,
        devices=cluster.device_count,
        per_node=per_node,
        splits=_axis(request, "split", _splits(model, most, per_node)),
        stages=_axis(request, "stage", _stages(blocks, cuts, most)),
        contexts=_axis(request, "context", _contexts(model, most)),
        experts=_axis(request, "expert", _experts(model, most)),
        tables=_axis(request, "table", _tables(model, most)),
        spaces=_axis(request, "space", _spaces(model, most)),
        blocks=max(blocks, cuts + 1),
        cuts=cuts,
        levels=levels,
        may_shard=_may_shard(request),
        must_shard="shard" in request.demanded and request.demanded["shard"] != 1,
        recompute=(0,) if asks else (0, 1, 2),
        microbatches=script.batch.num_microbatches if held else None,
        own_microbatches=script.batch.num_microbatches,
        pipeline=script.pipeline if script.pipeline != PipelinePlan(cuts=script.pipeline.cuts) else None,
        axes=_fixed_axes(request),
        alone=bool(request.demanded) and least == 1,
        staged=fixed is not None or "stage" in request.demanded,
    )


def seats(cluster: ClusterSpec) -> int:
    """How many ranks the cluster takes without making cores serve two."""
    return sum(node.count * ranks_of_node(cluster, node) for node in cluster.nodes)


def _product(mesh: dict[AxisName, int]) -> int:
    total = 1
    for degree in mesh.values():
        total *= degree
    return total


def _fixed_axes(request: Request) -> dict[str, int] | None:
    mesh = request.mesh
    if mesh is None:
        shard = request.demanded.get("shard", 0)
        return {"shard": shard} if shard > 1 else None
    return {"copies": mesh.get("replicate", 1) * mesh.get("shard", 1), "shard": mesh.get("shard", 1)}


def _may_shard(request: Request) -> bool:
    return request.scope != "data" and (request.mesh is None or request.mesh.get("shard", 1) > 1)


def _axis(request: Request, axis: AxisName, able: tuple[int, ...]) -> tuple[int, ...]:
    """The degrees of one axis: what the model is able to, or what was asked for."""
    if request.mesh is not None:
        return (request.mesh.get(axis, 1),)
    if request.scope == "data":
        return (1,)
    wanted = request.demanded.get(axis)
    if wanted is None:
        return able
    if wanted > 1:
        return (wanted,)
    divided = tuple(degree for degree in able if degree > 1)
    if wanted == 0 and not divided:
        raise PlanError(
            f"the script asks for the {axis} axis, but nothing in this model can be divided over it in 2 ranks or more"
        )
    return divided if wanted == 0 else (1,)


def _powers(most: int) -> list[int]:
    return [2**power for power in range(max(1, most).bit_length())]


def _splits(model: ModelSpec, most: int, per_node: int) -> tuple[int, ...]:
    """Degrees that divide most of what can be split: within a node, and powers of two a little beyond."""
    divided = [module for module in model.modules if module.split]
    if not divided:
        return (1,)
    weights = {id(module): 1.0 + sum(op.flops_forward for op in module.ops) for module in divided}
    total = sum(weights.values())
    highest = min(most, MOST_SPLIT, max(8, 2 * per_node))
    found = []
    for degree in range(1, highest + 1):
        if degree > per_node and degree & (degree - 1):
            continue
        limited = [module for module in divided if module.split_limit]
        if any(m.split_limit < degree or (m.split == "heads" and m.split_limit % degree) for m in limited):
            continue
        uneven = sum(weights[id(module)] for module in limited if _uneven(module.split_limit, degree))
        if uneven < 0.5 * total:
            found.append(degree)
    return tuple(found) or (1,)


def _uneven(units: int, degree: int) -> bool:
    """Whether one of so many equal ranks gets more of a layer's units than `UNEVEN` of its share."""
    return -(-units // degree) * degree > UNEVEN * units


def _stages(blocks: int, cuts: int, most: int) -> tuple[int, ...]:
    """Numbers of ranks in a pipeline: the fewest for each number of blocks on the fullest, and powers of two."""
    if cuts:
        return tuple(dict.fromkeys(degree for degree in (1, cuts + 1) if degree <= most))
    highest = min(most, blocks)
    wanted = {1} | set(_powers(highest)) | {-(-blocks // each) for each in range(1, blocks + 1)}
    if highest <= 8:
        wanted |= set(range(1, highest + 1))
    return tuple(sorted(degree for degree in wanted if degree == 1 or degree <= highest))


def _contexts(model: ModelSpec, most: int) -> tuple[int, ...]:
    if not any(module.key_value_nbytes for module in model.modules) or model.tokens_per_sample < 2 * LEAST_TOKENS:
        return (1,)
    return tuple(_powers(min(most, model.tokens_per_sample // LEAST_TOKENS, MOST_SPLIT)))


def _experts(model: ModelSpec, most: int) -> tuple[int, ...]:
    if not any(module.expert for module in model.modules):
        return (1,)
    highest = min(most, MOST_EXPERT)
    thrice = [3 * power for power in _powers(highest) if 3 * power <= highest]
    return tuple(sorted({*_powers(highest), *thrice}))


def _tables(model: ModelSpec, most: int) -> tuple[int, ...]:
    return tuple(_powers(min(most, MOST_TABLE))) if any(module.table for module in model.modules) else (1,)


def _spaces(model: ModelSpec, most: int) -> tuple[int, ...]:
    return tuple(_powers(min(most, MOST_SPACE))) if any(module.spatial for module in model.modules) else (1,)


def marked(script: Plan) -> bool:
    """Whether the plan that a script implies says more than data parallelism."""
    return bool(script.pipeline.cuts) or any(rule.placement != "auto" for rule in script.layout)

"""Predict small changes to the best plans that the enumeration of meshes leaves out.

These are the order of axes, numbers of microbatches between powers of two, divisions of space in several dims,
blocks that need not recompute, and wide layers that are divided.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tutti.config.cluster import ClusterSpec
from tutti.config.model import ModelSpec
from tutti.config.plan import LayoutRule, Plan, by_columns, find_placement
from tutti.config.vocabulary import AxisName
from tutti.cost_model.best_case_memory import BestCaseMemory
from tutti.cost_model.cost_notes import nbytes
from tutti.cost_model.group_links import network
from tutti.cost_model.memory_cost import kept
from tutti.cost_model.module_costs import ModelTable, model_table
from tutti.cost_model.pipeline_cost import times_held
from tutti.cost_model.plan_table import RECOMPUTE, Array
from tutti.cost_model.rank_placement import place_ranks, samples_of
from tutti.cost_model.work_division import block_roots, division
from tutti.errors import PlanError
from tutti.planner.exploration import Costed, Explorer
from tutti.planner.mixed_hardware import state_of

_POLISHED_PLANS = 4
"""Number of plans whose neighbours are predicted in a round."""

_POLISH_ROUNDS = 3

_MAX_RELIEVED_MESHES = 6
"""Number of meshes for which the fewest recomputing blocks are searched."""


def polish(explorer: Explorer) -> None:
    """Predict data-parallel plans with wide layers divided, then neighbours of the best plans as long as that gains.

    Last, predict plans that recompute fewer blocks.
    """
    try_wide_layers(explorer)
    seen = {_key(candidate.plan) for candidate in explorer.costed}
    for _ in range(_POLISH_ROUNDS):
        good = sorted(
            (candidate for candidate in explorer.costed if candidate.good), key=lambda candidate: candidate.value
        )[:_POLISHED_PLANS]
        before = good[0].value if good else 0.0
        for candidate in good:
            for plan in neighbours(candidate, explorer):
                if _key(plan) not in seen and not explorer.over():
                    seen.add(_key(plan))
                    explorer.cost(plan, candidate.cluster)
        if not good or min(candidate.value for candidate in explorer.costed if candidate.good) >= before:
            break
    _recompute_fewer_blocks(explorer)


def _recompute_fewer_blocks(explorer: Explorer) -> None:
    """For the best plans that recompute all blocks, predict plans that recompute only some of them.

    This is done where the plan would win if it did not recompute at all.
    """
    if len(explorer.limits.recompute) == 1:
        return
    recomputing = [
        candidate
        for candidate in explorer.costed
        if candidate.good and any(rule.recompute for rule in candidate.plan.layout)
    ]
    ranked = sorted(recomputing, key=lambda candidate: candidate.value)
    meshes = {tuple(candidate.plan.mesh.items()): candidate for candidate in reversed(ranked)}  # the best of each mesh
    for candidate in sorted(meshes.values(), key=lambda candidate: candidate.value)[:_MAX_RELIEVED_MESHES]:
        best = min(rival.value for rival in explorer.costed if rival.good)
        without_recompute = explorer.cost(
            dataclasses.replace(candidate.plan, layout=explorer.request.script.layout), candidate.cluster
        )
        if without_recompute is None or without_recompute.value >= best or explorer.over():
            continue

        def fits(plan: Plan, cluster: ClusterSpec = candidate.cluster) -> bool:
            costed = None if explorer.over() else explorer.cost(plan, cluster)
            return costed is not None and costed.good

        same_precision = (branch for branch in explorer.branches if branch.precision == candidate.plan.precision)
        best_memory = next(
            (branch.best_memory for branch in same_precision if branch.cluster is candidate.cluster), None
        )
        # None for a plan of a part of the cluster, in a precision that the whole does not have
        if best_memory is not None:
            offer_less_recompute(best_memory, candidate.plan, explorer.samples, fits)


def _key(plan: Plan) -> tuple[object, ...]:
    """Return what identifies a plan, including the order of the mesh's axes."""
    return (tuple(plan.mesh.items()), plan.batch, plan.layout, plan.shares, plan.split_shares,
            plan.precision, plan.sharding,
            plan.pipeline, plan.space_grid, plan.context)  # fmt: skip


def neighbours(costed: Costed, explorer: Explorer) -> Iterator[Plan]:
    """Yield plans that differ from `costed` in the microbatches, the order of two axes, or the division of space."""
    plan = costed.plan
    if explorer.limits.microbatches is None:
        most = explorer.samples // plan.data_parallel_degree
        microbatches = plan.batch.num_microbatches
        wanted = {
            microbatches + plan.mesh.get("stage", 1),
            2 * microbatches,
            microbatches // 2,
            microbatches * 3 // 2,
            microbatches * 3 // 4,
        }
        for count in sorted(count for count in wanted if 1 <= count <= most and count != microbatches):
            yield dataclasses.replace(plan, batch=dataclasses.replace(plan.batch, num_microbatches=count))
    if explorer.request.mesh is None:
        for mesh in _orders(plan.mesh):
            yield dataclasses.replace(plan, mesh=mesh)
    yield from (dataclasses.replace(plan, space_grid=grid) for grid in _grids(plan, explorer))


def _orders(mesh: dict[AxisName, int]) -> Iterator[dict[AxisName, int]]:
    """Yield the mesh with each pair of neighbouring axes swapped."""
    axes = list(mesh)
    for at in range(len(axes) - 1):
        changed = [*axes[:at], axes[at + 1], axes[at], *axes[at + 2 :]]
        yield {axis: mesh[axis] for axis in changed}


def _grids(plan: Plan, explorer: Explorer) -> Iterator[tuple[int, ...]]:
    """Yield divisions of space in two or three dims at once."""
    degree = plan.mesh.get("space", 1)
    dims = max((len(module.halo_nbytes_by_dim) for module in explorer.model.modules), default=0)
    if plan.space_grid or degree < 4 or dims < 2:
        return
    for first in range(2, degree):
        if degree % first == 0:
            rest = degree // first
            yield (first, rest) + (1,) * (dims - 2)
            if dims == 3:
                yield from ((first, second, rest // second) for second in range(2, rest) if rest % second == 0)


_UNITS = 400
"""Number of units into which a budget of bytes is divided. What a block holds is rounded up to whole units."""

_TRIES = 7
"""Number of steps of the bisection that finds the budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLoad:
    """Memory and time of blocks in each form of recompute (none, selective, full).

    Attributes:
        names: the blocks.
        nbytes: bytes that the block saves when its pipeline rank saves most, (forms, blocks).
        within: additional bytes while the block is recomputed, (forms, blocks).
        seconds: time of recomputing the block in a step, (forms, blocks).
        pipeline_rank: rank of each block along the stage axis, (blocks,).
        fixed: bytes of each pipeline rank that do not depend on the form, (pipeline ranks,).
    """

    names: tuple[str, ...]
    nbytes: Array
    within: Array
    seconds: Array
    pipeline_rank: NDArray[np.intp]
    fixed: Array

    def needed(self, form: int) -> Array:
        """Return the bytes of each pipeline rank if all of its blocks have this form, (pipeline ranks,)."""
        sums = self.fixed.copy()
        np.add.at(sums, self.pipeline_rank, self.nbytes[form])
        most = np.zeros(len(sums))
        np.maximum.at(most, self.pipeline_rank, self.within[form])
        return np.asarray(sums + most, dtype=np.float64)


def offer_less_recompute(best_memory: BestCaseMemory, plan: Plan, samples: int, fits: Callable[[Plan], bool]) -> None:
    """Offer plans to `fits` that recompute less than `plan` does, and search for the largest budget of bytes that fits.

    Nothing is offered where the model has no blocks, or a block lies on several pipeline ranks.

    Args:
        best_memory: the memory and work of the model on this cluster.
        plan: a plan that recomputes all blocks.
        samples: samples in the global batch.
        fits: predicts a plan and returns whether it fits.
    """
    load = block_load(best_memory, plan, samples)
    if load is None:
        return
    low, high = float(load.needed(len(RECOMPUTE) - 1).min()), float(load.needed(0).max())
    seen: set[tuple[int, ...]] = set()
    for _ in range(_TRIES):
        budget = (low + high) / 2
        forms = least_recompute(load, np.full(len(load.fixed), budget))
        if forms is None:
            low = budget
            continue
        key = tuple(forms.tolist())
        if key not in seen and not fits(with_forms(plan, load.names, key)):
            high = budget
        else:
            low = budget
        seen.add(key)


def block_load(best_memory: BestCaseMemory, plan: Plan, samples: int) -> BlockLoad | None:
    """Return the memory and time of the model's blocks under the mesh and schedule of a plan.

    The result is None where the model has no blocks, a block lies on several pipeline ranks, or the plan has cuts of
    its own or is impossible.

    Args:
        best_memory: the memory and work of the model on this cluster.
        plan: the plan.
        samples: samples in the global batch.
    """
    model, work = best_memory.best_case.model, best_memory.work
    roots, stage, chunks = block_roots(model), plan.degree("stage"), plan.pipeline.stages_per_rank
    chunks = chunks if stage > 1 else 1
    assignment = work.stages(stage, chunks)
    degrees = tuple(plan.degree(axis) for axis in ("split", "context", "expert", "table", "space"))
    count = plan.batch.num_microbatches
    rank_samples = max(1, -(-(samples // count) // plan.data_parallel_degree))
    passes = work.passes((*degrees, rank_samples, best_memory.best_case.ground(plan.world_size).best))
    block = np.array(
        [list(roots).index(module.block) if module.block >= 0 else -1 for module in model.modules], dtype=np.intp
    )
    if (
        not roots
        or assignment is None
        or passes is None
        or plan.pipeline.cuts
        or all(not name for name in roots.values())
    ):
        return None
    inside, rank_of_module = np.flatnonzero(block >= 0), assignment.stage % stage
    first = np.array(
        [rank_of_module[np.flatnonzero(block == number)[0]] for number in range(len(roots))], dtype=np.intp
    )
    if (first[block[inside]] != rank_of_module[inside]).any():
        return None
    part = work.part(degrees)
    often = times_held(plan.pipeline.schedule, chunks, stage, count).reshape(-1)[assignment.stage] * rank_samples
    keeps = [kept(work.columns, part, regions, half=best_memory.best_case.half) for regions in work.regions]
    outside_blocks = np.where(block < 0, often * keeps[0].always, 0.0) + state_of(work.columns, part, plan)
    fixed = np.bincount(rank_of_module, weights=outside_blocks, minlength=stage)
    most = np.zeros(stage)
    np.maximum.at(most, rank_of_module, rank_samples * keeps[0].output)

    def by_block(values: Array) -> Array:
        return np.bincount(block[inside], weights=values[inside], minlength=len(roots)).astype(np.float64)

    return BlockLoad(
        names=tuple(roots.values()),
        nbytes=np.stack([by_block(often * saved.always) for saved in keeps]),
        within=np.stack([by_block(rank_samples * saved.within) for saved in keeps]),
        seconds=np.stack([by_block(count * again) for again in passes.again]),
        pipeline_rank=first,
        fixed=np.asarray(fixed + most, dtype=np.float64),
    )


def least_recompute(load: BlockLoad, budget: Array) -> NDArray[np.intp] | None:
    """Return the form of each block that keeps every pipeline rank within its budget and recomputes least, (blocks,).

    Args:
        load: memory and time of the blocks.
        budget: bytes that each pipeline rank may hold, (pipeline ranks,).

    Returns:
        Indices into the forms, or None where no choice of forms keeps the budget.
    """
    forms = np.zeros(len(load.names), dtype=np.intp)
    for pipeline_rank, most in enumerate(budget.tolist()):
        members = np.flatnonzero(load.pipeline_rank == pipeline_rank)
        free = most - float(load.fixed[pipeline_rank])
        if float(load.nbytes[0, members].sum() + load.within[0, members].max(initial=0.0)) <= free:
            continue
        picked = _knapsack(
            load.nbytes[:, members], load.seconds[:, members], free - float(load.within[:, members].max())
        )
        if picked is None:
            return None
        forms[members] = picked
    return forms


def _knapsack(nbytes: Array, seconds: Array, capacity: float) -> NDArray[np.intp] | None:
    """Return the form of each block with which all fit into the capacity in the least seconds, (blocks,).

    The result is None where no forms fit. `nbytes` and `seconds` are (forms, blocks). After block b, best[j] is the
    least of best[j - size] + seconds over the forms of b, for j units of the capacity.
    """
    if capacity <= 0:
        return None
    sizes = np.ceil(nbytes / (capacity / _UNITS) - 1e-9).astype(np.int64)
    best, picks = np.zeros(_UNITS + 1), []
    for block in range(nbytes.shape[1]):
        options = np.full((len(nbytes), _UNITS + 1), np.inf)
        for form, size in enumerate(sizes[:, block].tolist()):
            if size <= _UNITS:
                options[form, size:] = best[: _UNITS + 1 - size] + seconds[form, block]
        picks.append(options.argmin(axis=0))
        best = options.min(axis=0)
    if not np.isfinite(best[-1]):
        return None
    forms, left = np.zeros(nbytes.shape[1], dtype=np.intp), _UNITS
    for block in range(nbytes.shape[1] - 1, -1, -1):
        forms[block] = picks[block][left]
        left -= int(sizes[forms[block], block])
    return forms


def with_forms(plan: Plan, names: tuple[str, ...], forms: tuple[int, ...]) -> Plan:
    """Return the plan with a rule for every block that recomputes, instead of rules that name all blocks.

    Args:
        plan: the plan.
        names: the blocks.
        forms: for each block, the index of its form in plan_table.RECOMPUTE.
    """
    others = tuple(rule for rule in plan.layout if rule.recompute is None)
    rules = tuple(
        LayoutRule(modules=name, recompute=True if RECOMPUTE[form] == "full" else "selective")
        for name, form in zip(names, forms, strict=True)
        if RECOMPUTE[form] != "none"
    )
    return dataclasses.replace(plan, layout=(*others, *rules))


MOST_TABLE = 64
MOST_LAYERS = 32
"""Largest number of layers that a plan divides. Those that gain most are taken."""

_BASES = 4
"""Number of the best data-parallel plans that are tried with divided layers. Plans for other powers of two of ranks are
tried too.
"""

_WAITS = 5
"""Number of exposed communications of a divided layer in a microbatch: two in each direction, and one for the row
counts.
"""


def try_wide_layers(explorer: Explorer) -> None:
    """Predict data-parallel plans whose wide linear layers are divided, where that may send less."""
    request = explorer.request
    columns = model_table(explorer.model)
    if request.mesh is not None or request.demanded or not (columns.linear > 0).any():
        return
    if any((rule.chunks or 1) > 1 for rule in request.script.layout):
        return
    for plan, cluster in list(_bases(explorer)):
        for degree in _degrees(plan.degree("replicate"), explorer.limits.per_node):
            for wide_plan in possible_wide_plans(plan, cluster, columns, explorer.samples, degree):
                if explorer.over():
                    return
                explorer.cost(wide_plan, cluster)


def possible_wide_plans(base: Plan, cluster: ClusterSpec, columns: ModelTable, samples: int, degree: int) -> list[Plan]:
    """Return `wide_plans` as a list; empty where the cluster does not describe a link that they need."""
    try:
        return list(wide_plans(base, cluster, columns, samples, degree))
    except PlanError:
        return []


def wide_plans(base: Plan, cluster: ClusterSpec, columns: ModelTable, samples: int, degree: int) -> Iterator[Plan]:
    """Yield variants of a plan with linear layers divided: all layers that gain, then only the one that gains most.

    Args:
        base: a plan of replicas only.
        cluster: the machines, in the order in which ranks are placed.
        columns: the model's modules.
        samples: samples in the global batch.
        degree: number of ranks over which layers are divided.
    """
    ranks = base.degree("replicate")
    mesh: dict[AxisName, int] = {"replicate": ranks // degree, "table": degree} if degree < ranks else {"table": degree}
    plan = dataclasses.replace(base, mesh=mesh)
    rules = wide_rules(plan, cluster, columns, samples)
    for count in sorted({len(rules), min(len(rules), 1)} - {0}):
        yield dataclasses.replace(plan, layout=(*plan.layout, *rules[:count]))


def wide_rules(plan: Plan, cluster: ClusterSpec, columns: ModelTable, samples: int) -> tuple[LayoutRule, ...]:
    """Return rules for the linear layers that send fewer bytes if they are divided over the `table` axis.

    A divided layer sends activations instead of the gradients of its weights. The largest gain comes first. Each
    additional exposed communication counts as the bytes that its link could send meanwhile.

    Args:
        plan: the plan with the `table` axis.
        cluster: the machines, in the order in which ranks are placed.
        columns: the model's modules.
        samples: samples in the global batch.
    """
    group = network(cluster, place_ranks(cluster, plan.world_size), plan).group("table")
    waits = _WAITS * plan.batch.num_microbatches * group.all_to_all(1.0) * group.link.bandwidth_bytes_per_s
    gains = []
    for index in (columns.linear * columns.gradients).nonzero()[0].tolist():
        name = columns.names[index]
        if find_placement(plan.layout, name) != "auto" or columns.parameters[index] < (4 * plan.degree("table")) ** 2:
            continue
        by_outputs = by_columns("split", columns.linear[index], columns.outputs[index])
        sent, saved = _traffic(columns, index, plan, samples, by_outputs=by_outputs)
        if saved > sent + waits:
            rule = LayoutRule(modules=name, placement="column" if by_outputs else "row")
            gains.append((saved - sent, rule))
    gains.sort(key=lambda pair: -pair[0])
    return tuple(rule for _, rule in gains[:MOST_LAYERS])


def _traffic(columns: ModelTable, index: int, plan: Plan, samples: int, *, by_outputs: bool) -> tuple[float, float]:
    """Return the bytes of activations that a rank sends per step for a divided layer, and of gradients it saves."""
    n, ranks = plan.degree("table"), plan.data_parallel_degree
    float32_samples = samples / ranks * (0.5 if plan.precision in ("bfloat16", "float16") else 1.0)
    inputs, outputs = float(columns.linear[index]), float(columns.outputs[index])
    sent = 2 * float32_samples * (n - 1) * (inputs + outputs / n if by_outputs else inputs / n + outputs)
    rest = ranks // n
    saved = 2 * float(columns.gradients[index]) * ((ranks - 1) / ranks - (rest - 1) / rest / n)
    return sent, saved


def wide_remark(model: ModelSpec, plan: Plan) -> str:
    """Return a sentence on what a plan gains by dividing linear layers over `table`; empty for other plans."""
    if plan.degree("table") == 1:
        return ""
    columns, part = model_table(model), division(model, plan)
    samples = samples_of(plan.batch.global_batch_size, plan.batch.unit, model.tokens_per_sample)
    layers = part.linear.nonzero()[0].tolist()
    if not layers:
        return ""
    pairs = [_traffic(columns, i, plan, samples, by_outputs=bool(part.by_outputs[i])) for i in layers]
    sent, saved = (sum(values) for values in zip(*pairs, strict=True))
    named = [repr(columns.names[i]) for i in layers[:3]] + ([f"{len(layers) - 3} more"] if len(layers) > 3 else [])
    names = " and ".join([", ".join(named[:-1]), named[-1]] if len(named) > 1 else named)
    return (
        f"{names} {'has' if len(layers) == 1 else 'have'} large weights and small activations: each rank keeps a part "
        f"of the weights and sends activations, {nbytes(sent)} in a step instead of {nbytes(saved)} of gradients"
    )


def _degrees(ranks: int, per_node: int) -> list[int]:
    """Return the degrees of `table` that divide `ranks`: all ranks, those of a host, and two."""
    return sorted(
        {degree for degree in (ranks, per_node, 2) if 1 < degree <= MOST_TABLE and ranks % degree == 0}, reverse=True
    )


def _bases(explorer: Explorer) -> Iterator[tuple[Plan, ClusterSpec]]:
    """Yield plans of replicas: the best that were predicted, and one for each other power of two of ranks."""
    replicated = sorted(
        (candidate for candidate in explorer.costed if set(candidate.plan.mesh) == {"replicate"}), key=_rank
    )
    best: dict[int, Costed] = {}
    for candidate in replicated:
        best.setdefault(candidate.plan.degree("replicate"), candidate)
    known = [candidate for degree, candidate in best.items() if degree > 1]
    yield from ((candidate.plan, candidate.cluster) for candidate in known[:_BASES])
    limits, branch = explorer.limits, next(iter(explorer.branches), None)
    most = min(limits.most_ranks, limits.samples)
    wanted = {most} | {2**power for power in range(1, most.bit_length())}
    tried = {candidate.plan.degree("replicate") for candidate in known[:_BASES]}
    for degree in sorted(
        ranks for ranks in wanted - tried if max(2, limits.least_ranks) <= ranks and branch is not None
    ):
        assert branch is not None
        count = limits.microbatches or max(1, min(limits.own_microbatches, limits.samples // degree))
        script = explorer.request.script
        batch = dataclasses.replace(script.batch, num_microbatches=count)
        yield (
            dataclasses.replace(
                script, batch=batch, mesh={"replicate": degree}, shares=(), split_shares=(), precision=branch.precision
            ),
            branch.cluster,
        )


def _rank(costed: Costed) -> tuple[bool, float]:
    """Return a sort key: good plans first, by value."""
    return not costed.good, costed.value

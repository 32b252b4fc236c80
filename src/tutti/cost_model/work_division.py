"""The part of each module that one rank has: of its work, its parameters and its activations."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

import tutti.cost_model.cost_constants as cost_constants
from tutti.config.model import ModelSpec
from tutti.config.partitioning import cut, cut_units
from tutti.config.plan import LayoutRule, Plan, by_columns, find_chunks, find_offload, find_placement, find_recompute
from tutti.config.refusals import check_parts_not_empty, check_width, format_degrees
from tutti.cost_model.compute_cost import OpTable, PassCost
from tutti.cost_model.module_costs import Flags, ModelTable, model_table, remembered
from tutti.cost_model.worker_speed import Array, Worker
from tutti.errors import PlanError

Weights = tuple[float, ...]
"""Relative sizes of the parts along the split axis; empty where they are equal."""

Degrees = tuple[int, int, int, int, int]
"""Degrees of split, context, expert, table and space."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """The part of each module that a rank has, as factors by module.

    Attributes:
        work: part of a sample's operators.
        saved: part of the activations kept for backward.
        weight: part of the parameters, and so of gradients and optimizer state.
        passed: part of the whole values that are sent between modules.
        split: whether the module is divided over the split axis.
        linear: whether it is a linear layer divided over the table axis.
        by_outputs: whether it is divided by its outputs, otherwise by its inputs.
        holders: ranks of the table axis.
        ops: the operators that this rank has.
        padded: bytes sent over bytes of a module's output when it is gathered over split; None where parts are
            equal.
    """

    work: Array
    saved: Array
    weight: Array
    passed: Array
    split: Flags
    linear: Flags
    by_outputs: Flags
    holders: int
    ops: OpTable
    padded: Array | None = None


def division(model: ModelSpec, plan: Plan) -> Division:
    """Return how `plan` divides `model`: the largest part of each module that a rank has.

    Raises:
        PlanError: an axis divides nothing of the model, or does not divide it evenly.
    """
    return _division(model, _degrees(plan), plan.layout, plan.split_weights, LARGEST)


def parts(model: ModelSpec, plan: Plan) -> tuple[Division, ...]:
    """Return the division of each place along the split axis if these have unequal parts, else the one division."""
    places = range(len(plan.split_weights)) if plan.split_weights else (LARGEST,)
    return tuple(_division(model, _degrees(plan), plan.layout, plan.split_weights, place) for place in places)


def mean_division(model: ModelSpec, plan: Plan) -> Division:
    """Return the mean division over the split axis, however unequal its parts are."""
    return _division(model, _degrees(plan), plan.layout, (), MEAN)


def _degrees(plan: Plan) -> Degrees:
    split, context, expert, table, space = (
        plan.degree(axis) for axis in ("split", "context", "expert", "table", "space")
    )
    return split, context, expert, table, space


LARGEST, MEAN = -1, -2
"""Instead of the number of a place along the split axis: the largest part of any place, and the mean of all places."""


@remembered(128)
def _division(
    model: ModelSpec, degrees: Degrees, layout: tuple[LayoutRule, ...], weights: Weights, place: int
) -> Division:
    """Return the division of a model for the rank at `place` along the split axis."""
    split, context, expert, table, space = degrees
    columns = model_table(model)
    placements = _placements(columns, layout)
    whole = np.array([name == "replicate" for name in placements], dtype=np.bool_)
    linear, by_outputs = _linears(columns, placements, piecewise=table > 1 and split == 1)
    _check(model, columns, degrees, bool(linear.any()))
    _check_widths(model, columns, linear, by_outputs, table)
    has = np.array([bool(kind) for kind in columns.kinds], dtype=np.bool_)
    divided = has & ~whole if split > 1 else np.zeros(len(columns), dtype=np.bool_)
    if split > 1 and not divided.any():
        raise PlanError(
            f"mesh.split = {split}, but the model file does not say how any module is divided (ModuleSpec.split); "
            "describe the model again, or use another axis"
        )
    _check_heads(columns, divided, split, weights)
    passed = np.full(len(columns), 1.0 / context)
    passed = np.where(columns.spatial, passed / space, passed)
    part = np.full(len(columns), 1.0 / split) if place == MEAN else _split_part(columns, split, weights, place)
    work = np.where(divided, passed * part, np.where(columns.sequence & (split > 1), passed / split, passed))
    weight = np.where(divided, part, 1.0)
    weight = np.where(columns.expert & ~whole, weight / expert, weight)
    weight = np.where((columns.table & ~whole) | linear, weight / table, weight)
    # A layer that is divided by its outputs keeps its whole input, unless that is kept as parts of the sequence.
    column = np.array([kind == "column" for kind in columns.kinds], dtype=np.bool_) & (columns.parameters > 0)
    saved = np.where(divided & column, passed, work) if not columns.sequence.any() else work
    # A look-up, an expert and a linear layer over `table` do as much work as before: each rank computes the samples of
    # all ranks with its part of the weights.
    return Division(
        work=work,
        saved=np.where(linear, 0.0, saved),
        weight=weight,
        passed=passed,
        split=divided,
        linear=linear,
        by_outputs=by_outputs,
        holders=table,
        ops=columns.ops.divided(work, weight),
        padded=split * _split_part(columns, split, weights, LARGEST) if weights else None,
    )


def divided_linears(model: ModelSpec, layout: tuple[LayoutRule, ...]) -> Flags:
    """Return the linear layers of `model` that the rules of `layout` divide, for a mesh with a table axis and no
    split axis.
    """
    columns = model_table(model)
    return _linears(columns, _placements(columns, layout), piecewise=True)[0]


def _linears(columns: ModelTable, placements: list[str], *, piecewise: bool) -> tuple[Flags, Flags]:
    """Return (linear layers divided over the table axis, those of them divided by outputs)."""
    none = np.zeros(len(columns), dtype=np.bool_)
    if not piecewise or all(name in ("auto", "replicate") for name in placements):
        return none, none
    stated = np.array([name not in ("auto", "replicate") for name in placements], dtype=np.bool_)
    linear = stated & (columns.linear > 0)
    pairs = zip(placements, columns.linear.tolist(), columns.outputs.tolist(), strict=True)
    return linear, linear & np.array([by_columns(name, a, b) for name, a, b in pairs], dtype=np.bool_)  # type: ignore[arg-type]


def _split_part(columns: ModelTable, split: int, weights: Weights = (), place: int = LARGEST) -> Array:
    """Return the part of each module that the rank at `place` has, or the largest part that any rank has.

    Where heads or units do not divide evenly, some ranks have more.
    """
    limit = np.maximum(columns.limit, 1)
    if not weights:
        return np.where(columns.limit > 0, -(-limit // split) / limit, 1.0 / split)
    kinds, back = np.unique(np.stack([columns.limit, columns.groups]), axis=1, return_inverse=True)
    parts_of_kinds = np.array([_sizes(int(limit), int(groups), weights) for limit, groups in kinds.T])
    parts_of_kinds = parts_of_kinds.max(axis=1) if place == LARGEST else parts_of_kinds[:, place]
    return np.asarray(parts_of_kinds[back.reshape(-1)], dtype=np.float64)


def _sizes(limit: int, groups: int, weights: Weights) -> list[float]:
    """Return the part of each place along the split axis, by the runtime's rule
    (parallel/tensor/partition_ranges.py).

    Groups of heads or units stay whole as long as there is one for every place.
    """
    for units in (groups, limit):
        sizes = [end - start for start, end in pairwise(cut_units(units, len(weights), weights))]
        if units and (0 not in sizes or units == limit):
            return [size / units for size in sizes]
    return [weight / sum(weights) for weight in weights]


def _placements(columns: ModelTable, layout: tuple[LayoutRule, ...]) -> list[str]:
    """Return the placement of each module in the layout."""
    if all(rule.placement == "auto" for rule in layout):
        return ["auto"] * len(columns)
    return [find_placement(layout, name) for name in columns.names]


def _check(model: ModelSpec, columns: ModelTable, degrees: Degrees, linear: bool) -> None:
    """Refuse axes that divide nothing of the model."""
    _, context, expert, table, space = degrees
    attends = columns.key_value.any() or any(op.kind == "attention" for module in model.modules for op in module.ops)
    asked = (
        ("context", context, attends or model.tokens_per_sample > 0, "no attention whose sequences could be cut"),
        ("expert", expert, columns.expert.any(), "no experts to divide"),
        ("table", table, columns.table.any() or linear, "no embedding tables, and the layout divides no linear layers"),
        ("space", space, columns.spatial.any(), "no convolution whose input could be cut in space"),
    )
    for axis, degree, there, lacking in asked:
        if degree > 1 and not there:
            raise PlanError(f"mesh.{axis} = {degree}, but the model has {lacking}; use another axis")


def _check_widths(model: ModelSpec, columns: ModelTable, linear: Flags, by_outputs: Flags, table: int) -> None:
    """Refuse layers with fewer outputs or inputs than ranks that divide them, as the runtime does."""
    for index in np.flatnonzero(linear):
        parameters, into, out = model.modules[index].parameters, columns.linear[index], columns.outputs[index]
        features = _features(parameters, float(into), float(out))
        if features is not None:
            columns_cut = bool(by_outputs[index])
            check_width(columns.names[index], features[columns_cut], columns=columns_cut, degree=table)


def _features(parameters: int, into: float, out: float) -> tuple[int, int] | None:
    """Return (inputs, outputs) of a linear layer, from its number of parameters and the bytes of its input and
    output.

    The layer may have a bias. The result is None where no whole numbers fit; with a given ratio at most one pair
    does.
    """
    ratio = into / out if out > 0 else 0.0
    for bias in (1, 0) if ratio > 0 else ():
        outputs = round((math.sqrt(bias + 4 * ratio * parameters) - bias) / (2 * ratio))
        inputs = round(ratio * outputs)
        if outputs * (inputs + bias) == parameters and math.isclose(inputs * out, outputs * into):
            return inputs, outputs
    return None


def _check_heads(columns: ModelTable, divided: Flags, split: int, weights: Weights) -> None:
    """Refuse modules whose heads or units the split axis does not divide."""
    for index in np.flatnonzero(divided & (columns.limit > 0)):
        limit = int(columns.limit[index])
        if weights:
            sizes = [end - start for start, end in pairwise(cut(limit, split, weights))]
            what = "attention heads" if columns.kinds[index] == "heads" else "units"
            check_parts_not_empty(columns.names[index], sizes, weights, what)
            continue
        if limit % split and columns.kinds[index] == "heads":
            raise PlanError(
                f"module {columns.names[index]!r} has {limit} attention heads, which mesh.split = {split} does not "
                f"divide ({limit} % {split} = {limit % split}); use {format_degrees(limit)}"
            )
        if limit < split:
            raise PlanError(
                f"module {columns.names[index]!r} can be divided among at most {limit} ranks, but "
                f"mesh.split = {split}; use a degree of at most {limit}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A module whose activations are dropped after forward, with all modules inside it. Modules are named by index.

    Attributes:
        root: the module.
        members: the module and all modules inside it.
        selective: whether outputs of expensive operators are kept.
        chunks: number of parts of the batch that run, and are recomputed, one after another.
    """

    root: int
    members: tuple[int, ...]
    selective: bool = False
    chunks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Regions as columns: (modules in regions,) for `member` and `of`, (regions,) for the others.

    Attributes:
        member: indices of the modules that are in a region.
        of: for each of these, the index of its region.
        root: root of each region.
        selective: as in Region.
        chunks: as in Region.
    """

    member: NDArray[np.intp]
    of: NDArray[np.intp]
    root: NDArray[np.intp]
    selective: NDArray[np.bool_]
    chunks: NDArray[np.intp]


@lru_cache(maxsize=64)
def marks(regions: tuple[Region, ...]) -> Marks:
    """Return the columns of `regions`."""
    return Marks(
        member=np.array([index for region in regions for index in region.members], dtype=np.intp),
        of=np.array([at for at, region in enumerate(regions) for _ in region.members], dtype=np.intp),
        root=np.array([region.root for region in regions], dtype=np.intp),
        selective=np.array([region.selective for region in regions], dtype=np.bool_),
        chunks=np.array([region.chunks for region in regions], dtype=np.intp),
    )


def recompute_regions(model: ModelSpec, plan: Plan) -> tuple[Region, ...]:
    """Return the outermost modules that recompute or run in chunks, each with everything inside it.

    The model itself is not a region: a rule for "*" means every module directly inside it.
    """
    if not any(rule.recompute or (rule.chunks or 1) > 1 for rule in plan.layout):
        return ()
    return _regions(model, plan.layout)


@remembered(64)
def _regions(model: ModelSpec, layout: tuple[LayoutRule, ...]) -> tuple[Region, ...]:
    """Return the recomputed or chunked regions of a layout; see `recompute_regions`."""
    names = [module.name for module in model.modules]
    how = {name: (find_recompute(layout, name), find_chunks(layout, name)) for name in names if name}
    asked = {name for name, (again, chunks) in how.items() if again or chunks > 1}
    roots = [name for name in names if name in asked and not any(parent in asked for parent in _parents(name))]
    members: dict[str, list[int]] = {root: [] for root in roots}
    for index, name in enumerate(names):
        for candidate in (name, *_parents(name)):
            if candidate in members:
                members[candidate].append(index)
                break
    return tuple(
        Region(
            root=names.index(root),
            members=tuple(members[root]),
            selective=how[root] == ("selective", 1),
            chunks=how[root][1],
        )
        for root in roots
    )


@remembered(64)
def offload_regions(model: ModelSpec, layout: tuple[LayoutRule, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the outermost modules whose activations a layout keeps on the host, each as what is inside it."""
    if not any(rule.offload for rule in layout):
        return ()
    members: dict[str, list[int]] = {}
    asked = {module.name for module in model.modules if module.name and find_offload(layout, module.name)}
    for index, module in enumerate(model.modules):
        inside = [name for name in (module.name, *_parents(module.name)) if name in asked]
        if inside:
            members.setdefault(inside[-1], []).append(index)
    return tuple(tuple(indices) for indices in members.values())


def _parents(name: str) -> list[str]:
    """Return the dotted names of the modules that contain a module, innermost first."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1)]


def computed_in_pieces(
    columns: ModelTable,
    part: Division,
    grid: Sequence[int],
    worker: Worker,
    samples: int,
    passes: tuple[PassCost, PassCost],
    *,
    on_cpu: bool,
    least: bool = False,
) -> tuple[PassCost, PassCost]:
    """Return forward and backward of a microbatch under spatial parallelism
    (parallel/spatial/spatial_convolution.py).

    Inputs, outputs and their gradients are read and written more often. Where the interior is computed while
    halos are in transit, every slab reads the weights again, and its few rows take longer than as many rows of a
    larger part.

    Args:
        grid: parts along each dim.
        samples: samples of the microbatch.
        passes: forward and backward without these costs.
        least: return a lower bound over all grids with as many parts.
    """
    ahead, back = passes
    cut = (columns.halo > 0).any(axis=1) & (columns.outputs > 0)
    if max(grid) == 1 or not cut.any() or not samples:
        return ahead, back
    inside = _least_interior(columns, max(grid)) if least else interior(columns, grid)
    piecewise = cut & (inside >= cost_constants.LEAST_INTERIOR)
    inputs = np.where(cut, samples * part.passed * columns.activations, 0.0)
    outputs = np.where(piecewise, samples * part.passed * columns.outputs, 0.0)
    slabs = 1 if least else sum(min(2, parts - 1) for parts in grid)
    weights = np.where(piecewise, columns.parameters * part.weight, 0.0) * slabs
    share = np.where(piecewise & (not least), 1 - inside, 0.0)
    moved_s = 1 / worker.bandwidth_bytes_per_s

    def longer(work: PassCost, direction: Literal["forward", "backward"], over_weights_s: float) -> PassCost:
        (of_inputs, of_outputs), calls = (
            cost_constants.PIECEWISE_PASSES[direction],
            cost_constants.PIECEWISE_CALLS[direction],
        )
        slow = 1 / cost_constants.SLAB_EFFICIENCY[direction] - 1 if on_cpu else 0.0
        of_inputs_here = np.where(piecewise, of_inputs, cost_constants.HALO_PASSES[direction])
        traffic = moved_s * (of_inputs_here * inputs + of_outputs * outputs) + over_weights_s * weights
        each_s = worker.call_s if worker.gap_s is None else worker.gap_s  # a GPU's host runs ahead of it
        calls_here = np.where(piecewise, calls, cost_constants.HALO_CALLS[direction])
        called = worker.slowdown * each_s * np.where(cut, calls_here, 0.0)
        more = np.stack([share * slow * work.seconds, worker.slowdown * traffic, called])
        return PassCost(seconds=work.seconds + more.sum(axis=0), limits=work.limits + more)

    weight_pass_time = worker.convolution_weights
    return longer(ahead, "forward", weight_pass_time.forward_s), longer(
        back, "backward", 2 * weight_pass_time.backward_s + 3 * moved_s
    )


def interior(columns: ModelTable, grid: Sequence[int]) -> Array:
    """Return (modules,): the fraction of a rank's rows that needs neither halo nor padding; 0 where every row needs
    some.
    """
    whole = np.where(columns.activations > 0, columns.activations, np.inf)
    inside = np.ones(len(columns))
    for dim, parts in enumerate(grid[:3]):
        if parts > 1:
            inside *= 1 - np.minimum(parts * columns.halo[:, dim] / whole, 1.0)
    return inside


def _least_interior(columns: ModelTable, parts: int) -> Array:
    """Return the smallest interior of any grid with that many parts, which has all parts along one dim."""
    least: Array = np.min([interior(columns, (*(1,) * dim, parts)) for dim in range(3)], axis=0)
    return least


@remembered(64)
def block_globs(model: ModelSpec) -> tuple[str, ...]:
    """Return globs over the names of the model's repeated blocks.

    They are like layers.* for layers.0, layers.1, ...; "*" without blocks.
    """
    roots = block_roots(model)
    return tuple(dict.fromkeys(f"{root.rpartition('.')[0]}.*" if "." in root else "*" for root in roots.values())) or (
        "*",
    )


def block_roots(model: ModelSpec) -> dict[int, str]:
    """Return for each block the dotted name that all of its modules share."""
    members: dict[int, list[list[str]]] = {}
    for module in model.modules:
        if module.block >= 0:
            members.setdefault(module.block, []).append(module.name.split("."))
    roots = {}
    for block, names in members.items():
        common = []
        for parts in zip(*names, strict=False):
            if len(set(parts)) > 1:
                break
            common.append(parts[0])
        roots[block] = ".".join(common)
    return roots

"""Where a model is cut into pipeline stages, by the runtime's rule: units of about equal cost.

A unit is a repeated block, or a module outside of blocks. A unit that is too heavy for equal stages is divided
into the modules inside it.
"""

from bisect import bisect_right
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tutti.config.model import ModelSpec
from tutti.config.pipeline_schedule import cut_balanced
from tutti.config.plan import Plan
from tutti.cost_model.module_costs import ModelTable, model_table, remembered
from tutti.cost_model.worker_speed import Array
from tutti.errors import PlanError

VALUE_FLOPS = 10.0
"""FLOPs that one value of a unit's output counts for, as in the runtime."""

TOO_HEAVY = 0.75
"""The largest fraction of an equal stage's cost that one unit may have, as in the runtime."""

MOST_OPENED = 64
"""Maximum number of units that are divided, as in the runtime."""

_ITEM_NBYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_WHOLE = ("MultiheadAttention", "TransformerEncoderLayer", "TransformerDecoderLayer", "LSTM", "GRU", "RNN")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCuts:
    """Where a model is cut.

    Attributes:
        count: number of stages.
        stage: (modules,), the stage of each module.
        sent: (boundaries,), bytes of one sample that stage k sends to later stages on other ranks. Where only
            the modules' outputs are known, these go to stage k + 1.
        fixed: (boundaries,), bytes of a microbatch that stage k sends, whatever its samples.
        by_rank: (2, ranks), bytes that each rank sends in both passes: for one sample, and for a microbatch
            whatever its samples.
        ties: pairs (module, owner) that share parameters over two ranks of the stage axis.
        followed: (units, operator calls of the code between them) that every rank traces on shapes for each
            microbatch.
    """

    count: int
    stage: NDArray[np.intp]
    sent: Array
    fixed: Array
    by_rank: Array
    ties: tuple[tuple[int, int], ...]
    followed: tuple[int, float]


def stages_of(model: ModelSpec, plan: Plan) -> StageCuts:
    """Return where `plan` cuts `model`.

    Raises:
        PlanError: the model cannot be cut like this.
    """
    return _stages(model, plan.degree("stage"), plan.pipeline.stages_per_rank, plan.pipeline.cuts)


@remembered(256)
def _stages(model: ModelSpec, ranks: int, stages_per_rank: int, cuts: tuple[str, ...]) -> StageCuts:
    """Return where a model is cut; see `stages_of`."""
    columns, count = model_table(model), ranks * stages_per_rank
    if count == 1:
        stage = np.zeros(len(columns), dtype=np.intp)
        nothing = np.zeros(0)
        return StageCuts(count=1, stage=stage, sent=nothing, fixed=nothing, by_rank=np.zeros((2, ranks)), ties=(),
                      followed=(0, 0.0))  # fmt: skip
    if cuts:
        first = _named(columns, cuts, count)
        stage = np.searchsorted(np.array(first), np.arange(len(columns)), side="right")
        sent = np.array([_last(columns.outputs[:begin]) for begin in first])
        units = (*(unit.name for unit in _whole_units(model)), *cuts)
    else:
        known, sent, units = _balanced(model, count)
        stage = known.copy()
    unnamed = np.array([not name for name in columns.names], dtype=np.bool_)
    stage[unnamed] = count - 1  # the model's own operators: mostly the loss
    ties = tuple(
        (index, int(owner))
        for index, owner in enumerate(columns.owner)
        if owner >= 0 and stage[index] % ranks != stage[owner] % ranks
    )
    fixed, by_rank = np.zeros(count - 1), np.zeros((2, ranks))
    if columns.flow.known:
        values = columns.flow.crossings(stage, count)
        place = np.arange(count) % ranks
        values = np.where(place[:, None] != place, values, 0.0)
        sent, fixed = values[:, 0, :-1].sum(axis=2)
        for kind, (ahead, back) in enumerate(values):  # stages that received values send their gradients
            by_rank[kind] = np.bincount(place, weights=ahead.sum(axis=1) + back.sum(axis=0), minlength=ranks)
    else:
        for boundary, nbytes in enumerate(sent):
            by_rank[0, [boundary % ranks, (boundary + 1) % ranks]] += nbytes
    return StageCuts(
        count=count,
        stage=stage,
        sent=sent,
        fixed=fixed,
        by_rank=by_rank,
        ties=ties,
        followed=_followed(columns, units),
    )


def _followed(columns: ModelTable, units: tuple[str, ...]) -> tuple[int, float]:
    """Return (calls of units, operator calls of their containers' code) in a trace.

    The model's own code is not counted, because it is mostly the loss. Nested Sequentials are traced once,
    because only torch's code runs there.
    """
    parts = [name.split(".") for name in units]
    around = {".".join(path[:end]) for path in parts for end in range(1, len(path))} | {""}
    containers = [index for index, name in enumerate(columns.names) if name in around]
    if all(columns.classes[index] == "Sequential" for index in containers):
        return 0, 0.0
    ops = columns.ops
    calls = np.bincount(ops.module, weights=ops.calls[ops.row], minlength=len(columns))
    called = sum(name not in around and name.rpartition(".")[0] in around for name in columns.names)
    return called, float(sum(calls[index] for index in containers if columns.names[index]))


def _last(outputs: Array) -> float:
    """Return the output of the last module that returns anything."""
    there = np.flatnonzero(outputs > 0)
    return float(outputs[there[-1]]) if len(there) else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """Modules that stay together, in order of execution.

    Attributes:
        name: name of the module that contains them, or of the first of them.
        members: indices of the modules.
        output: bytes of one sample's output.
        cost: FLOPs, with those that the output counts for.
        around: bytes that bypass the unit inside the module that was divided around it (a residual connection).
    """

    name: str
    members: tuple[int, ...]
    output: float
    cost: float
    around: float = 0.0


@remembered(256)
def _balanced(model: ModelSpec, count: int) -> tuple[NDArray[np.intp], Array, tuple[str, ...]]:
    """Return (each module's stage, bytes of a sample that cross each boundary, names of units) of the automatic
    cut.
    """
    columns, byte_flops = model_table(model), _byte_flops(model)
    units = _opened(columns, list(_whole_units(model)), count, byte_flops)
    counted = [place for place, unit in enumerate(units) if unit.cost > 0]
    if len(counted) < count:
        raise PlanError(
            f"the pipeline has {count} stages, but the model can be cut into only {len(counted)} parts; use at most "
            f"{max(len(counted), 1)} stages (mesh.stage times pipeline.stages_per_rank)"
        )
    first = [counted[at] for at in cut_balanced([units[place].cost for place in counted], count)]
    stage = np.zeros(len(columns), dtype=np.intp)
    for place, unit in enumerate(units):
        stage[list(unit.members)] = bisect_right(first, place)
    outputs = np.array([unit.output for unit in units])
    sent = [_last(outputs[:begin]) for begin in first]
    passing = [units[begin].around if units[begin - 1].around else 0.0 for begin in first]
    return stage, np.array(sent) + np.array(passing), tuple(unit.name for unit in units)


def _byte_flops(model: ModelSpec) -> float:
    """Return the FLOPs that one byte of a unit's output counts for."""
    return VALUE_FLOPS / _ITEM_NBYTES.get(model.dtype, 4)


@remembered(16)
def _whole_units(model: ModelSpec) -> tuple[_Unit, ...]:
    """Return the model's units before any is divided.

    A module that only contains other units is not a unit; its own operators belong to the first of them.
    """
    columns, byte_flops = model_table(model), _byte_flops(model)
    groups: dict[int, list[int]] = {}
    for index, unit in enumerate(columns.unit.tolist()):
        if columns.names[index]:
            groups.setdefault(unit, []).append(index)
    inside: dict[str, set[int]] = {}
    for index, unit in enumerate(columns.unit.tolist()):
        path = columns.names[index].split(".")
        for end in range(1, len(path)):
            inside.setdefault(".".join(path[:end]), set()).add(unit)
    units, around = list[_Unit](), list[int]()
    for unit, members in groups.items():
        if all(inside.get(columns.names[index], set()) - {unit} for index in members):
            around += members
            continue
        units.append(_with_own(_unit(columns, tuple(members), byte_flops), around))
        around = []
    return (*units[:-1], _with_own(units[-1], around)) if units else ()


def _with_own(unit: _Unit, own: list[int]) -> _Unit:
    """Return the unit with modules that contain it; their own operators are not counted, as in the runtime."""
    return replace(unit, members=(*unit.members, *own)) if own else unit


def _unit(columns: ModelTable, members: tuple[int, ...], byte_flops: float, around: float = 0.0) -> _Unit:
    """Return a unit of the modules `members`.

    It returns its first module's output where that module contains the others, else its last module's.
    """
    names = [columns.names[index] for index in members]
    contains = len(members) == 1 or all(name.startswith(names[0] + ".") for name in names[1:])
    output = float(columns.outputs[members[0]]) if contains else 0.0
    output = output or _last(columns.outputs[list(members)])
    cost = float(columns.flops[list(members)].sum()) + byte_flops * output
    return _Unit(name=names[0], members=members, output=output, cost=cost, around=around)


def _opened(columns: ModelTable, units: list[_Unit], count: int, byte_flops: float) -> list[_Unit]:
    """Return units that are small enough for `count` stages of about equal cost, as far as units can be divided."""
    for _ in range(MOST_OPENED):
        total = sum(unit.cost for unit in units)
        able = [place for place, unit in enumerate(units) if _can_open(columns, unit)]
        if not able:
            break
        heaviest = max(able, key=lambda place: units[place].cost)
        if len(units) >= count and units[heaviest].cost <= TOO_HEAVY * total / count:
            break
        units[heaviest : heaviest + 1] = _parts(columns, units[heaviest], byte_flops)
    return units


def _can_open(columns: ModelTable, unit: _Unit) -> bool:
    """Return whether a unit can be divided: it contains several modules, and its code is not torch's own."""
    inner = sum(not _contains(columns.names[index], unit.name) for index in unit.members)
    return inner > 1 and columns.classes[unit.members[0]] not in _WHOLE


def _contains(name: str, other: str) -> bool:
    """Return whether the module `name` contains the module `other`."""
    return other.startswith(name + ".")


def _parts(columns: ModelTable, unit: _Unit, byte_flops: float) -> list[_Unit]:
    """Return the units inside a unit; its own operators belong to the first."""
    parts: dict[str, list[int]] = {}
    containers: list[int] = []
    for index in unit.members:
        name = columns.names[index]
        inside = name.startswith(unit.name + ".")
        if name == unit.name or _contains(name, unit.name):
            containers.append(index)
            continue
        parts.setdefault(f"{unit.name}.{name[len(unit.name) + 1 :].split('.')[0]}" if inside else name, []).append(
            index
        )
    # In a chain each part gets what the previous one returns, and what bypasses the chain bypasses every part.
    chain = columns.classes[unit.members[0]] == "Sequential"
    passing = unit.around if chain else unit.output
    result = [_unit(columns, tuple(members), byte_flops, passing) for members in parts.values()]
    if containers:
        result[0] = replace(_with_own(result[0], containers), around=unit.around)
    return result


def _named(columns: ModelTable, cuts: tuple[str, ...], count: int) -> list[int]:
    """Return the first module of each stage but the first, as the plan names them."""
    if len(cuts) != count - 1:
        raise PlanError(
            f"pipeline.cuts names {len(cuts)} modules, but {count} stages (mesh.stage times pipeline.stages_per_rank) "
            f"need {count - 1}; name the first module of every stage but the first"
        )
    first: list[int] = []
    for cut in cuts:
        at = next((i for i, name in enumerate(columns.names) if name == cut or name.startswith(cut + ".")), None)
        if at is None or at <= (first[-1] if first else 0):
            why = "the model has no such module" if at is None else "it does not come after the previous stage's start"
            raise PlanError(f"pipeline.cuts: {cut!r} cannot begin a stage ({why}); name modules in order of execution")
        first.append(at)
    return first

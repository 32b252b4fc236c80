"""Assigns the operations of a traced forward to stages, which determines the values sent between stages.

Stages are contiguous ranges of the calls of units, in order of execution. An operation runs on the stage of its
latest input. An operation that needs only parameters runs on a stage that holds them, or where its result is
first needed. A value is sent directly from the stage that computes it to every stage that needs it, without
relays.
"""

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from tutti.config.pipeline_schedule import cut_balanced
from tutti.errors import PlanError
from tutti.nn.annotations import read_synchronization
from tutti.nn.mixture import MixtureOfExperts
from tutti.parallel.expert.expert_parallel import is_stacked
from tutti.parallel.pipeline.stage_program import Program, ProgramCall, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class StageHolders:
    """The stages that hold each unit and each parameter, by name. A tied parameter has its first name."""

    units: dict[str, frozenset[int]]
    parameters: Mapping[str, frozenset[int]]


@dataclass(slots=True, kw_only=True)
class StagePart:
    """The operations of one stage.

    Attributes:
        nodes: the calls, in order.
        receives: source stage -> numbers of the values received from it.
        sends: target stage -> numbers of the values sent to it.
        copied: values that the stage overwrites after they were to be sent, so a copy is sent.
    """

    nodes: list[ProgramCall] = field(default_factory=list)
    receives: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    sends: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    copied: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A program with its stages.

    Attributes:
        program: the traced forward.
        stages: the stage of each node.
        parts: the operations of each stage.
        arguments: leaves of the arguments of the model's call, if the program is reused for several forwards.
    """

    program: Program
    stages: tuple[int, ...]
    parts: tuple[StagePart, ...]
    arguments: tuple[Any, ...] = ()


Call = tuple[str, int]
"""A call of a unit: its name, and the number of earlier calls of it in the same forward."""


def place(program: Program, starts: tuple[Call, ...], holders: StageHolders | None) -> Placement:
    """Divide `program` into stages that begin at `starts`.

    Args:
        program: the traced forward.
        starts: the first call of each of the stages 1, 2, ...
        holders: what each stage holds; None while the stages are being decided.

    Raises:
        PlanError: the program needs a unit or parameter on a stage that does not hold it, or changes a tensor in place
            through a view across two stages.
    """
    stage_of: dict[int, int] = {}
    starts = _present_starts(program, starts)
    stages = _assign_by_inputs(program, starts, holders, stage_of)
    _assign_parameter_only(program, len(starts), stages, stage_of, holders)
    chosen = tuple(stage if stage is not None else 0 for stage in stages)
    if holders is not None:
        _check_parameters(program, chosen, holders)
    _check_views(program, chosen, stage_of)
    return Placement(program=program, stages=chosen, parts=_parts(program, chosen, stage_of, len(starts)))


def _present_starts(program: Program, starts: tuple[Call, ...]) -> tuple[Call, ...]:
    """Replace a start whose unit has been divided since the model was cut by the first unit called in it."""
    units = dict.fromkeys(node.unit for node in program.nodes if node.unit)
    present = []
    for unit, number in starts:
        inner = None if unit in units else next((name for name in units if begins(unit, name)), None)
        present.append((inner or unit, number))
    return tuple(present)


def _assign_by_inputs(
    program: Program, starts: tuple[Call, ...], holders: StageHolders | None, stage_of: dict[int, int]
) -> list[int | None]:
    """Stages of all nodes, with None for nodes that depend on parameters only. Fills `made`: value -> its stage."""
    begin = {call: number for number, call in enumerate(starts, 1)}
    seen: Counter[str] = Counter()
    current, stages = 0, []
    for node in program.nodes:
        inputs = [stage_of[key] for key in node.uses if key in stage_of]
        stage = max(inputs, default=None)
        if node.unit:
            current = max(current, begin.get((node.unit, seen[node.unit]), 0))
            seen[node.unit] += 1
            stage = current if holders is None else _stage_of_call(node, current, stage or 0, holders)
        stages.append(stage)
        if stage is not None:
            _record_stage(node, stage, stage_of)
    return stages


def _stage_of_call(node: ProgramCall, current: int, earliest: int, holders: StageHolders) -> int:
    """The stage of a unit's call: `current` if it holds the unit, else the first holder at or after `earliest`."""
    holding = holders.units.get(node.unit, frozenset())
    if current in holding:
        return current
    later = [stage for stage in sorted(holding) if stage >= earliest]
    if not later:
        raise PlanError(
            f"mesh.stage: this forward calls {node.unit} on stage {max(current, earliest)}, which does not hold it; "
            f"it ran on stages {sorted(holding)} when the model was cut; call modules in the same order in every "
            "forward, or choose pipeline.cuts that suit all forwards"
        )
    return later[0]


def _record_stage(node: ProgramCall, stage: int, stage_of: dict[int, int]) -> None:
    stage_of.update(dict.fromkeys(node.makes, stage))
    stage_of.update(dict.fromkeys((new for _, new in node.views), stage))


def _assign_parameter_only(
    program: Program, last: int, stages: list[int | None], stage_of: dict[int, int], holders: StageHolders | None
) -> None:
    """Fill in the stages of nodes that depend on parameters only: where these are held, or the result is needed."""
    free = [at for at, stage in enumerate(stages) if stage is None]
    if not free:
        return
    held = holders.parameters if holders is not None else _stages_by_owner(program, stages)
    needed: dict[int, int] = {}
    for key in program.ends:
        needed[key] = last
    chosen: dict[int, int] = {}
    for at in reversed(range(len(stages))):
        node, stage = program.nodes[at], stages[at]
        if stage is None:
            first = min((needed[key] for key in _all_values(node) if key in needed), default=last)
            options = [s for name in node.parameters for s in held.get(name, ()) if s <= first]
            stage = chosen[at] = max(options, default=first)
        for key in node.uses:
            needed[key] = min(needed.get(key, last), stage)
    for at in free:
        node = program.nodes[at]
        inputs = [stage_of[key] for key in node.uses]
        stage = max([chosen[at], *inputs]) if node.parameters or not inputs else max(inputs)
        stages[at] = stage
        _record_stage(node, stage, stage_of)


def _all_values(node: ProgramCall) -> list[int]:
    return node.makes + [new for _, new in node.views]


def _stages_by_owner(program: Program, stages: list[int | None]) -> dict[str, frozenset[int]]:
    """Parameter -> stages of the units that own it (its name begins with the unit's name)."""
    homes: dict[str, set[int]] = defaultdict(set)
    units: dict[str, set[int]] = defaultdict(set)
    for node, stage in zip(program.nodes, stages, strict=True):
        if node.unit and stage is not None:
            units[node.unit].add(stage)
    for node in program.nodes:
        for name in node.parameters:
            for unit, where in units.items():
                if name.startswith(unit + "."):
                    homes[name] |= where
    return {name: frozenset(where) for name, where in homes.items()}


def _check_parameters(program: Program, stages: tuple[int, ...], holders: StageHolders) -> None:
    for node, stage in zip(program.nodes, stages, strict=True):
        for name in node.parameters:
            if stage not in holders.parameters.get(name, ()):
                raise PlanError(
                    f"mesh.stage: this forward uses parameter {name} on stage {stage}, which does not hold it; use the "
                    "same parameters in every forward, from the first one on"
                )


def _check_views(program: Program, stages: tuple[int, ...], stage_of: dict[int, int]) -> None:
    """Refuse a tensor that is changed through a view of it on another stage."""
    used = {key for node in program.nodes for key in node.uses}
    used |= set(program.ends)
    for node, stage in zip(program.nodes, stages, strict=True):
        sources = [stage_of[leaf.key] for at, _ in node.written if isinstance(leaf := node.leaves[at], Value)]
        for old, new in node.views:
            if new in used and any(source != stage for source in (stage_of[old], *sources)):
                raise PlanError(
                    "mesh.stage: forward changes a tensor in place through a view of it on another stage; make a new "
                    "tensor instead, or choose other pipeline.cuts"
                )


def _parts(program: Program, stages: tuple[int, ...], stage_of: dict[int, int], last: int) -> tuple[StagePart, ...]:
    parts = tuple(StagePart() for _ in range(last + 1))
    uses: list[tuple[int, int]] = []
    for node, stage in zip(program.nodes, stages, strict=True):
        parts[stage].nodes.append(node)
        uses += [(key, stage) for key in node.uses]
    uses += [(key, last) for key in program.ends]
    for key, stage in dict.fromkeys(uses):
        source = stage_of[key]
        if source != stage:
            parts[stage].receives[source].append(key)
            parts[source].sends[stage].append(key)
    for part in parts:
        sent = {key for keys in part.sends.values() for key in keys}
        for node in part.nodes:
            changed = [leaf.key for at, _ in node.written if isinstance(leaf := node.leaves[at], Value)]
            part.copied |= sent & {*changed, *(old for old, _ in node.views)}
    return parts


_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """The parts of a model that stages consist of. Every parameter belongs to a unit or directly to a glue module.

    Attributes:
        glue: names of the modules whose own code is traced; the model itself ("") is one of them.
        names: names of the units, in the model's order.
    """

    glue: frozenset[str]
    names: tuple[str, ...]

    def owners(self, names: Iterable[str]) -> set[str]:
        """The units that are, or contain, the modules `names`."""
        known = set(self.names)
        prefixes = {name[:end] for name in names for end in range(len(name) + 1) if name[end : end + 1] in ("", ".")}
        return known & prefixes

    def opened(self, model: nn.Module, name: str) -> "Units":
        """These units, with the unit `name` divided into its children."""
        return choose_units(model, (*self.glue, name))


def choose_units(model: nn.Module, opened: Iterable[str] = ()) -> Units:
    """Units of `model`: the entries of its outermost lists of modules, and the smallest modules outside lists.

    Args:
        model: the whole model.
        opened: names of modules that are always divided into their children.
    """
    glue, names = {""}, []
    divided = set(opened)

    def walk(name: str, module: nn.Module, in_list: bool) -> None:
        children = [] if _is_indivisible(module) else list(module.named_children())
        is_list = isinstance(module, _LISTS)
        if children and (not name or is_list or name in divided or not in_list):
            glue.add(name)
            for key, child in children:
                walk(f"{name}.{key}" if name else key, child, is_list)
        elif name:
            names.append(name)

    walk("", model, in_list=False)
    return Units(glue=frozenset(glue), names=tuple(names))


def can_open(model: nn.Module, name: str) -> bool:
    """Whether the unit `name` can be divided into children."""
    module = model.get_submodule(name)
    return not _is_indivisible(module) and any(True for _ in module.children())


def open_for_cuts(model: nn.Module, cuts: Iterable[str]) -> Units:
    """Units of which one begins at every name in `cuts`.

    Raises:
        PlanError: the model has no module of that name.
    """
    known = dict(model.named_modules())
    opened: list[str] = []
    for cut in cuts:
        if cut not in known or not cut:
            near = [name for name in known if name.rpartition(".")[2] == cut.rpartition(".")[2]] or list(known)[1:9]
            raise PlanError(f"pipeline.cuts: the model has no module {cut!r}; it has {', '.join(near[:8])}")
        parts = cut.split(".")
        opened += [".".join(parts[:count]) for count in range(1, len(parts))]
    return choose_units(model, opened)


def begins(cut: str, unit: str) -> bool:
    """Whether `unit` is the module called `cut`, or a part of it."""
    return unit == cut or unit.startswith(cut + ".")


def heaviest_to_open(
    model: nn.Module, costs: Mapping[str, float], stages: int, closed: Container[str] = ()
) -> str | None:
    """The unit to divide next because it is too expensive for `stages` equal stages, or None.

    Args:
        model: the whole model.
        costs: FLOPs of each unit.
        stages: number of stages.
        closed: units that cannot be divided.
    """
    total = sum(costs.values())
    able = [name for name in costs if name not in closed and can_open(model, name)]
    if not able:
        return None
    heaviest = max(able, key=lambda name: costs[name])
    return heaviest if len(costs) < stages or costs[heaviest] > 0.75 * total / stages else None


def _is_indivisible(module: nn.Module) -> bool:
    """Whether a module is never divided.

    These are torch's own modules (their code reads their children's weights), parametrised modules, BatchNorms and
    synchronised modules (their code changes buffers), and experts, which route by values.
    """
    from_torch = type(module).__module__.startswith("torch.nn.") and not isinstance(module, _LISTS)
    containers = (nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)
    experts = isinstance(module, MixtureOfExperts) or is_stacked(module)
    writes = isinstance(module, _BatchNorm) or read_synchronization(module) is not None
    kept_whole = experts or writes or parametrize.is_parametrized(module)
    return kept_whole or (from_torch and not isinstance(module, containers))


def calls_of(program: Program) -> list[Call]:
    """The calls of units, in order."""
    seen: Counter[str] = Counter()
    calls = []
    for node in program.nodes:
        if node.unit:
            calls.append((node.unit, seen[node.unit]))
            seen[node.unit] += 1
    return calls


def automatic_starts(calls: Sequence[Call], costs: Sequence[float], stages: int) -> tuple[Call, ...]:
    """The first calls of stages 1, 2, ..., such that stages cost about the same.

    Raises:
        PlanError: there are fewer calls than stages.
    """
    if len(calls) < stages:
        raise PlanError(
            f"the pipeline has {stages} stages, but the model can be divided into only {len(calls)} parts; use at "
            f"most {max(len(calls), 1)} stages (mesh.stage times pipeline.stages_per_rank)"
        )
    return tuple(calls[start] for start in cut_balanced(costs, stages))


def named_starts(calls: Sequence[Call], cuts: Sequence[str], stages: int) -> tuple[Call, ...]:
    """The first calls of the modules named in `cuts`.

    Raises:
        PlanError: the cuts do not match the number of stages or the order of the calls.
    """
    if len(cuts) != stages - 1:
        raise PlanError(
            f"pipeline.cuts names {len(cuts)} modules, but {stages} stages (mesh.stage times pipeline.stages_per_rank) "
            f"need {stages - 1}; name the first module of every stage but the first"
        )
    starts: list[int] = []
    for cut in cuts:
        index = next((number for number, (unit, _) in enumerate(calls) if begins(cut, unit)), None)
        if index is None:
            raise PlanError(f"pipeline.cuts: forward never calls {cut!r}; name a module that it calls")
        if index <= (starts[-1] if starts else 0):
            raise PlanError(
                f"pipeline.cuts: forward calls {cut!r} "
                + ("first" if not index else "before the start of the preceding stage")
                + "; name modules in the order of their first calls, at least one call per stage"
            )
        starts.append(index)
    return tuple(calls[start] for start in starts)

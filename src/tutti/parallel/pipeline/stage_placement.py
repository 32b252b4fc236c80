"""Place: which stage computes what of a program, and which values travel between stages.

Calls of units are cut in order of execution. An operation runs on the stage of its latest input. One that needs only
parameters runs on the stage that holds them, or where its result is first needed. A value goes from the stage that
computes it straight to every stage that needs it, however far.
"""

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from tutti.config.pipeline_schedule import cut_balanced
from tutti.errors import PlanError
from tutti.nn.mixture import MixtureOfExperts
from tutti.parallel.expert.expert_parallel import is_stacked
from tutti.parallel.pipeline.stage_program import Program, ProgramCall, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class StageHolders:
    """Which stages hold each unit and each parameter, by name (parameters by their first)."""

    units: Mapping[str, frozenset[int]]
    parameters: Mapping[str, frozenset[int]]


@dataclass(slots=True, kw_only=True)
class StagePart:
    """One stage's part of a program. `receives`, `sends`: numbers of values by the other stage; `copied`: values to
    send that the stage itself overwrites later.
    """

    nodes: list[ProgramCall] = field(default_factory=list)
    receives: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    sends: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    copied: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A program on its stages. `stages`: of each node; `arguments`: leaves of the model's call, where the program
    serves several forwards.
    """

    program: Program
    stages: tuple[int, ...]
    parts: tuple[StagePart, ...]
    arguments: tuple[Any, ...] = ()


Call = tuple[str, int]
"""A call of a unit: its name, and how many calls of it came before in the same forward."""


def place(program: Program, starts: tuple[Call, ...], holders: StageHolders | None) -> Placement:
    """The parts of `program` for stages that begin at `starts`.

    `holders`: None while the stages are made; later, what each of them got: a program that needs anything else is
    refused with PlanError.
    """
    made: dict[int, int] = {}
    stages = _fixed(program, starts, holders, made)
    _free(program, len(starts), stages, made, holders)
    chosen = tuple(stage if stage is not None else 0 for stage in stages)
    if holders is not None:
        _check_parameters(program, chosen, holders)
    _check_views(program, chosen, made)
    return Placement(program=program, stages=chosen, parts=_parts(program, chosen, made, len(starts)))


def _fixed(
    program: Program, starts: tuple[Call, ...], holders: StageHolders | None, made: dict[int, int]
) -> list[int | None]:
    """Stages of all nodes but those that depend on nothing except parameters."""
    begin = {call: number for number, call in enumerate(starts, 1)}
    seen: Counter[str] = Counter()
    current, stages = 0, []
    for node in program.nodes:
        inputs = [made[key] for key in node.uses if key in made]
        stage = max(inputs, default=None)
        if node.unit:
            current = max(current, begin.get((node.unit, seen[node.unit]), 0))
            seen[node.unit] += 1
            stage = current if holders is None else _held(node, current, stage or 0, holders)
        stages.append(stage)
        if stage is not None:
            _make(node, stage, made)
    return stages


def _held(node: ProgramCall, current: int, earliest: int, holders: StageHolders) -> int:
    """The stage for a call of a unit: the one the forward has come to if it holds the unit, else one it may go to."""
    held = holders.units.get(node.unit, frozenset())
    if current in held:
        return current
    later = [stage for stage in sorted(held) if stage >= earliest]
    if not later:
        raise PlanError(
            f"mesh.stage: this forward calls {node.unit} on stage {max(current, earliest)}, which does not hold it: "
            f"when the stages were cut it ran on {sorted(held)}; call modules in the same order in every forward, or "
            "name pipeline.cuts that suit all of them"
        )
    return later[0]


def _make(node: ProgramCall, stage: int, made: dict[int, int]) -> None:
    made.update(dict.fromkeys(node.makes, stage))
    made.update(dict.fromkeys((new for _, new in node.views), stage))


def _free(
    program: Program, last: int, stages: list[int | None], made: dict[int, int], holders: StageHolders | None
) -> None:
    """Stages of nodes that depend on parameters only: where the result is first needed, or where they are held."""
    free = [at for at, stage in enumerate(stages) if stage is None]
    if not free:
        return
    held = holders.parameters if holders is not None else _held_by_units(program, stages)
    needed: dict[int, int] = {}
    for key in program.ends:
        needed[key] = last
    chosen: dict[int, int] = {}
    for at in reversed(range(len(stages))):
        node, stage = program.nodes[at], stages[at]
        if stage is None:
            first = min((needed[key] for key in _all_made(node) if key in needed), default=last)
            options = [s for name in node.parameters for s in held.get(name, ()) if s <= first]
            stage = chosen[at] = max(options, default=first)
        for key in node.uses:
            needed[key] = min(needed.get(key, last), stage)
    for at in free:
        node = program.nodes[at]
        inputs = [made[key] for key in node.uses]
        stage = max([chosen[at], *inputs]) if node.parameters or not inputs else max(inputs)
        stages[at] = stage
        _make(node, stage, made)


def _all_made(node: ProgramCall) -> list[int]:
    return node.makes + [new for _, new in node.views]


def _held_by_units(program: Program, stages: list[int | None]) -> dict[str, frozenset[int]]:
    """Stages of parameters that belong to units (their own names begin with the unit's)."""
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


def _check_views(program: Program, stages: tuple[int, ...], made: dict[int, int]) -> None:
    """A tensor that changes through a view of it must live on one stage together with the view."""
    used = {key for node in program.nodes for key in node.uses}
    used |= set(program.ends)
    for node, stage in zip(program.nodes, stages, strict=True):
        sources = [made[leaf.key] for at, _ in node.written if isinstance(leaf := node.leaves[at], Value)]
        for old, new in node.views:
            if new in used and any(source != stage for source in (made[old], *sources)):
                raise PlanError(
                    "mesh.stage: forward changes a tensor in place through a view of it, across the border of two "
                    "stages; make a new tensor instead, or name pipeline.cuts elsewhere"
                )


def _parts(program: Program, stages: tuple[int, ...], made: dict[int, int], last: int) -> tuple[StagePart, ...]:
    parts = tuple(StagePart() for _ in range(last + 1))
    wanted: list[tuple[int, int]] = []
    for node, stage in zip(program.nodes, stages, strict=True):
        parts[stage].nodes.append(node)
        wanted += [(key, stage) for key in node.uses]
    wanted += [(key, last) for key in program.ends]
    for key, stage in dict.fromkeys(wanted):
        source = made[key]
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
    """`glue`: names of the modules whose own code is traced, the model ("") among them; `names`: the units, in the
    model's order. Every parameter belongs to a unit or directly to a module of the glue.
    """

    glue: frozenset[str]
    names: tuple[str, ...]

    def opened(self, model: nn.Module, name: str) -> "Units":
        """The same with the unit `name` taken apart into its parts."""
        return choose_units(model, (*self.glue, name))


def choose_units(model: nn.Module, opened: Iterable[str] = ()) -> Units:
    """Units of `model`: the entries of its outermost lists of modules, and the smallest modules outside lists.

    `opened`: names of modules that are taken apart in any case.
    """
    glue, names = {""}, []
    wanted = set(opened)

    def walk(name: str, module: nn.Module, in_list: bool) -> None:
        children = [] if _whole(module) else list(module.named_children())
        is_list = isinstance(module, _LISTS)
        if children and (not name or is_list or name in wanted or not in_list):
            glue.add(name)
            for key, child in children:
                walk(f"{name}.{key}" if name else key, child, is_list)
        elif name:
            names.append(name)

    walk("", model, in_list=False)
    return Units(glue=frozenset(glue), names=tuple(names))


def can_open(model: nn.Module, name: str) -> bool:
    """Whether the unit `name` has parts of its own."""
    module = model.get_submodule(name)
    return not _whole(module) and any(True for _ in module.children())


def open_for_cuts(model: nn.Module, cuts: Iterable[str]) -> Units:
    """Units such that every name in `cuts` begins one. Raises PlanError for a name the model does not have."""
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
    """Whether a call of `unit` is a call of (a part of) the module called `cut`."""
    return unit == cut or unit.startswith(cut + ".")


def heaviest_to_open(
    model: nn.Module, costs: Mapping[str, float], stages: int, closed: Container[str] = ()
) -> str | None:
    """The unit to take apart because it is too large a part for `stages` equal stages; None where all is well.
    `closed`: units that cannot be taken apart."""
    total = sum(costs.values())
    able = [name for name in costs if name not in closed and can_open(model, name)]
    if not able:
        return None
    heaviest = max(able, key=lambda name: costs[name])
    return heaviest if len(costs) < stages or costs[heaviest] > 0.75 * total / stages else None


def _whole(module: nn.Module) -> bool:
    """Modules never taken apart: torch's own (their code reads their parts' weights), parametrised ones, and experts,
    which route by values."""
    own = type(module).__module__.startswith("torch.nn.") and not isinstance(module, _LISTS)
    coders = (nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)
    experts = isinstance(module, MixtureOfExperts) or is_stacked(module)
    return (own and not isinstance(module, coders)) or experts or parametrize.is_parametrized(module)


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
    """The first calls of stages 1, 2, ... Raises PlanError where there are fewer calls than stages."""
    if len(calls) < stages:
        raise PlanError(
            f"the pipeline has {stages} stages, but the model only {len(calls)} parts that can be told apart; use at "
            f"most {max(len(calls), 1)} stages (mesh.stage times pipeline.stages_per_rank)"
        )
    return tuple(calls[start] for start in cut_balanced(costs, stages))


def named_starts(calls: Sequence[Call], cuts: Sequence[str], stages: int) -> tuple[Call, ...]:
    """The first calls of the modules named in `cuts`. Raises PlanError for cuts that make no pipeline."""
    if len(cuts) != stages - 1:
        raise PlanError(
            f"pipeline.cuts names {len(cuts)} modules, but {stages} stages (mesh.stage times pipeline.stages_per_rank) "
            f"need {stages - 1}; name the first module of every stage but the first"
        )
    starts: list[int] = []
    for cut in cuts:
        at = next((number for number, (unit, _) in enumerate(calls) if begins(cut, unit)), None)
        if at is None:
            raise PlanError(f"pipeline.cuts: forward never calls {cut!r}; name a module that it calls")
        if at <= (starts[-1] if starts else 0):
            raise PlanError(
                f"pipeline.cuts: forward calls {cut!r} "
                + ("first" if not at else "before the module that begins the stage before")
                + "; name modules in the order of their first calls, each stage with at least one"
            )
        starts.append(at)
    return tuple(calls[start] for start in starts)

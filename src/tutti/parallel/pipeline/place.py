"""Place: which stage computes what of a program, and which values travel between stages.

Calls of units are cut in order of execution. An operation runs on the stage of its latest input. One that needs only
parameters runs on the stage that holds them, or where its result is first needed. A value goes from the stage that
computes it straight to every stage that needs it, however far.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tutti.errors import PlanError
from tutti.parallel.pipeline.cut import Call
from tutti.parallel.pipeline.program import Node, Program, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Holders:
    """Which stages hold each unit and each parameter, by name (parameters by their first)."""

    units: Mapping[str, frozenset[int]]
    parameters: Mapping[str, frozenset[int]]


@dataclass(slots=True, kw_only=True)
class StagePart:
    """One stage's part of a program. `receives`, `sends`: numbers of values by the other stage; `copied`: values to
    send that the stage itself overwrites later.
    """

    nodes: list[Node] = field(default_factory=list)
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


def place(program: Program, starts: tuple[Call, ...], holders: Holders | None) -> Placement:
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
    program: Program, starts: tuple[Call, ...], holders: Holders | None, made: dict[int, int]
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


def _held(node: Node, current: int, earliest: int, holders: Holders) -> int:
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


def _make(node: Node, stage: int, made: dict[int, int]) -> None:
    made.update(dict.fromkeys(node.makes, stage))
    made.update(dict.fromkeys((new for _, new in node.views), stage))


def _free(program: Program, last: int, stages: list[int | None], made: dict[int, int], holders: Holders | None) -> None:
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


def _all_made(node: Node) -> list[int]:
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


def _check_parameters(program: Program, stages: tuple[int, ...], holders: Holders) -> None:
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

"""Cut: where stages begin, by name or so that the slowest stage is as quick as can be."""

from collections import Counter
from collections.abc import Sequence

from tutti.config.pipeline_schedule import cut_balanced
from tutti.errors import PlanError
from tutti.parallel.pipeline.program import Program
from tutti.parallel.pipeline.units import begins

Call = tuple[str, int]
"""A call of a unit: its name, and how many calls of it came before in the same forward."""


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

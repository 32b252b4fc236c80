"""Cut: where stages begin, by name or so that the slowest stage is as quick as can be."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import accumulate

from tutti.errors import PlanError
from tutti.runtime.stage.program import Program
from tutti.runtime.stage.units import begins

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


def balanced(costs: Sequence[float], parts: int) -> list[int]:
    """Where parts 1, 2, ... begin when `costs` are cut into contiguous parts whose largest sum is the least possible.

    Every part has at least one entry; by dynamic programming over prefixes.
    """
    count, sums = len(costs), [0.0, *accumulate(costs)]
    best = [sums[1:]]  # best[k][j]: the least largest sum of entries 0 .. j in k + 1 parts
    begin: list[list[int]] = [[0] * count]
    for part in range(1, parts):
        row, first = [float("inf")] * count, [0] * count
        for last in range(part, count):
            # the last part begins at i: its sum falls with i, the others' largest sum rises
            others, end = best[part - 1], sums[last + 1]
            crossing = bisect_left(range(part, last + 1), 0.0, key=partial(_excess, others, sums, end))
            for i in {min(part + crossing, last), max(part + crossing - 1, part)}:
                value = max(best[part - 1][i - 1], sums[last + 1] - sums[i])
                if value < row[last]:
                    row[last], first[last] = value, i
        best.append(row)
        begin.append(first)
    starts, last = [], count - 1
    for part in range(parts - 1, 0, -1):
        starts.append(begin[part][last])
        last = starts[-1] - 1
    return starts[::-1]


def _excess(others: list[float], sums: list[float], end: float, begin: int) -> float:
    """By how much the parts before `begin` exceed the part from there."""
    return others[begin - 1] - (end - sums[begin])


def automatic_starts(calls: Sequence[Call], costs: Sequence[float], stages: int) -> tuple[Call, ...]:
    """The first calls of stages 1, 2, ... Raises PlanError where there are fewer calls than stages."""
    if len(calls) < stages:
        raise PlanError(
            f"the pipeline has {stages} stages, but the model only {len(calls)} parts that can be told apart; use at "
            f"most {max(len(calls), 1)} stages (mesh.stage times pipeline.stages_per_rank)"
        )
    return tuple(calls[start] for start in balanced(costs, stages))


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

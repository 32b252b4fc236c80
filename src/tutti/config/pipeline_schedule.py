"""Pipeline schedules: the order in which every rank computes the microbatches of its stages, and where stages are cut.

Stage s lives on rank s mod `ranks`. An action is a forward (F), a whole backward (B), or one half of a backward:
gradients of the stage's inputs (I) or of its weights (W).

GPipe: Huang et al. 2019, arXiv 1811.06965. 1F1B: Narayanan et al. 2019 (PipeDream-Flush, arXiv 2006.09503).
Interleaved: Narayanan et al. 2021, arXiv 2104.04473. Zero-bubble (H1): Qi et al. 2023, arXiv 2401.10241.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from typing import Literal

from tutti.config.vocabulary import ScheduleName
from tutti.errors import PlanError

Kind = Literal["F", "B", "I", "W"]

COSTS: Mapping[Kind, int] = {"F": 1, "B": 2, "I": 1, "W": 1}
"""Time of each kind of action, in units of one stage's forward."""


@dataclass(frozen=True, slots=True)
class Action:
    """One piece of a stage's work on one microbatch."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind} of stage {self.stage}, microbatch {self.microbatch}"


_NEVER = 2**62

Orders = list[list[Action]]
"""The actions of each rank, in order."""

Queues = list[dict[Kind, deque[Action]]]
"""The remaining actions of each rank, by kind."""


def build_schedule(name: ScheduleName, ranks: int, stages_per_rank: int, microbatches: int) -> Orders:
    """Build a schedule and check that it does not deadlock.

    Args:
        name: the schedule.
        ranks: ranks of the stage axis.
        stages_per_rank: stages that each rank owns.
        microbatches: microbatches per step.

    Returns:
        The actions of each rank, in order.

    Raises:
        PlanError: the schedule would deadlock (a defect of the schedule, found before it runs).
    """
    orders = build_orders(name, ranks, stages_per_rank, microbatches)
    simulate(orders)
    return orders


def build_orders(name: ScheduleName, ranks: int, stages_per_rank: int, microbatches: int) -> Orders:
    """Build a schedule without checking it, for callers that simulate it themselves."""
    return _BUILDERS[name](ranks, stages_per_rank, microbatches)


def forward_orders(ranks: int, stages_per_rank: int) -> Orders:
    """Return the actions of each rank in one forward without gradients."""
    stages = ranks * stages_per_rank
    return [[Action("F", stage, 0) for stage in range(rank, stages, ranks)] for rank in range(ranks)]


def simulate(orders: Orders, costs: Mapping[Kind, int] = COSTS) -> dict[Action, int]:
    """Compute when each action begins, if it takes its cost, messages take no time and sends never wait.

    Args:
        orders: the actions of each rank, in order.
        costs: time of each kind of action.

    Raises:
        PlanError: an action waits forever; the message names the first.
    """
    ranks = len(orders)
    stages = 1 + max((action.stage for order in orders for action in order), default=0)
    count = 1 + max((action.microbatch for order in orders for action in order), default=0)
    # Ends of forwards, of gradients of inputs, and of half backwards for inputs, by stage and microbatch.
    # Plain lists, because large pipelines have a hundred thousand actions.
    forward, gradient, half = ([_NEVER] * (stages * count) for _ in range(3))
    began: dict[Action, int] = {}
    free, position = [0] * ranks, [0] * ranks
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            now = free[rank]
            while position[rank] < len(order):
                action = order[position[rank]]
                kind, at = action.kind, action.stage * count + action.microbatch
                if kind == "F":
                    ready = forward[at - count] if action.stage else 0
                elif kind == "W":
                    ready = half[at]
                else:
                    ready = forward[at]
                    if action.stage < stages - 1:
                        ready = max(ready, gradient[at + count])
                if ready == _NEVER:
                    break
                begin = max(now, ready)
                now = begin + costs[kind]
                began[action] = begin
                if kind == "F":
                    forward[at] = now
                elif kind != "W":
                    gradient[at] = min(gradient[at], now)
                if kind == "I":
                    half[at] = now
                position[rank], moved = position[rank] + 1, True
            free[rank] = now
    for rank, order in enumerate(orders):
        if position[rank] < len(order):
            raise PlanError(
                f"the pipeline's schedule deadlocks: on rank {rank} of the stage axis, {order[position[rank]]} waits "
                "for an action that never ends; choose another schedule"
            )
    return began


def needed_before(action: Action, stages: int) -> list[tuple[Action, ...]]:
    """Return what must have ended before an action begins: one action of each tuple."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind == "F":
        return [(Action("F", stage - 1, microbatch),)] if stage else []
    if action.kind == "W":
        return [(Action("I", stage, microbatch),)]
    needs: list[tuple[Action, ...]] = [(Action("F", stage, microbatch),)]
    if stage < stages - 1:
        needs.append((Action("B", stage + 1, microbatch), Action("I", stage + 1, microbatch)))
    return needs


def total_time(orders: Orders, costs: Mapping[Kind, int] = COSTS) -> int:
    """Return the time at which the last action ends."""
    return max(begin + costs[action.kind] for action, begin in simulate(orders, costs).items())


def max_activations(order: list[Action]) -> int:
    """Return the largest number of (stage, microbatch) pairs whose activations a rank holds at once."""
    held, most = 0, 0
    for action in order:
        held += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
        most = max(most, held)
    return most


def _gpipe(ranks: int, _: int, microbatches: int) -> Orders:
    return [[Action(kind, rank, m) for kind in ("F", "B") for m in range(microbatches)] for rank in range(ranks)]


def _one_forward_one_backward(ranks: int, _: int, microbatches: int) -> Orders:
    orders = []
    for rank in range(ranks):
        ahead = min(microbatches, ranks - rank - 1)
        order = [Action("F", rank, m) for m in range(ahead)]
        for m in range(ahead, microbatches):
            order += [Action("F", rank, m), Action("B", rank, m - ahead)]
        orders.append(order + [Action("B", rank, m) for m in range(microbatches - ahead, microbatches)])
    return orders


def _interleaved(ranks: int, chunks: int, microbatches: int) -> Orders:
    """Interleaved 1F1B: groups of `ranks` microbatches pass chunk after chunk (Narayanan et al. 2021, figure 4)."""
    groups = [range(m, min(m + ranks, microbatches)) for m in range(0, microbatches, ranks)]
    forward = [(chunk, m) for group in groups for chunk in range(chunks) for m in group]
    backward = [(chunk, m) for group in groups for chunk in reversed(range(chunks)) for m in group]
    limits = [2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1 for rank in range(ranks)]
    queues: Queues = [
        {
            "F": deque(Action("F", chunk * ranks + rank, m) for chunk, m in forward),
            "B": deque(Action("B", chunk * ranks + rank, m) for chunk, m in backward),
        }
        for rank in range(ranks)
    ]

    def preferences(rank: int, held: int, waiting: Mapping[Kind, deque[Action]]) -> list[Kind]:
        return ["F", "B"] if held < limits[rank] and waiting["F"] else ["B"]

    return _greedy(queues, preferences, ranks * chunks)


def _zero_bubble(ranks: int, _: int, microbatches: int) -> Orders:
    """ZB-H1: weight gradients fill the bubbles. No rank holds more activations than the first rank of 1F1B does."""
    kinds: tuple[Kind, ...] = ("F", "I", "W")
    queues: Queues = [
        {kind: deque(Action(kind, rank, m) for m in range(microbatches)) for kind in kinds} for rank in range(ranks)
    ]

    def preferences(rank: int, held: int, waiting: Mapping[Kind, deque[Action]]) -> list[Kind]:
        return ["I", "F", "W"] if held < ranks else ["I", "W"]

    return _greedy(queues, preferences, ranks)


def _greedy(
    queues: Queues,
    preferences: Callable[[int, int, Mapping[Kind, deque[Action]]], list[Kind]],
    stages: int,
) -> Orders:
    """Simulate forward in time: a free rank takes the first ready action in its order of preference.

    Where all ranks wait and nothing can move, a rank may take any ready action.

    Args:
        queues: the actions of each rank, by kind.
        preferences: (rank, held, waiting) -> kinds, most preferred first; `held` is the number of activations on the
            rank.
        stages: number of stages.
    """
    ranks, now = len(queues), 0
    orders: Orders = [[] for _ in queues]
    count = 1 + max(
        (action.microbatch for waiting in queues for queue in waiting.values() for action in queue), default=0
    )
    forward, gradient, half = ([_NEVER] * (stages * count) for _ in range(3))
    free, held = [0] * ranks, [0] * ranks

    def ready(action: Action) -> bool:
        at = action.stage * count + action.microbatch
        if action.kind == "F":
            return action.stage == 0 or forward[at - count] <= now
        if action.kind == "W":
            return half[at] <= now
        return forward[at] <= now and (action.stage == stages - 1 or gradient[at + count] <= now)

    def end(action: Action, then: int) -> None:
        at = action.stage * count + action.microbatch
        if action.kind == "F":
            forward[at] = then
        elif action.kind != "W":
            gradient[at] = min(gradient[at], then)
        if action.kind == "I":
            half[at] = then

    left = sum(len(queue) for waiting in queues for queue in waiting.values())
    while left:
        moved = False
        stuck = max(free) <= now
        for relaxed in (False, True) if stuck else (False,):
            for rank, waiting in enumerate(queues):
                if free[rank] > now or (moved and relaxed):
                    continue
                kinds = list(waiting) if relaxed else preferences(rank, held[rank], waiting)
                kind = next((k for k in kinds if waiting[k] and ready(waiting[k][0])), None)
                if kind is None:
                    continue
                action = waiting[kind].popleft()
                orders[rank].append(action)
                free[rank] = now + COSTS[action.kind]
                end(action, free[rank])
                held[rank] += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
                moved, left = True, left - 1
        if stuck and not moved:
            raise PlanError("the pipeline's schedule deadlocks: no rank has an action that can begin")
        now += 1
    return orders


_BUILDERS: dict[ScheduleName, Callable[[int, int, int], Orders]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved": _interleaved,
    "zero-bubble": _zero_bubble,
}


def cut_balanced(costs: Sequence[float], parts: int) -> list[int]:
    """Cut `costs` into contiguous parts so that the largest sum is minimal, by dynamic programming over prefixes.

    Returns:
        Where parts 1, 2, ... begin. Every part has at least one entry.
    """
    count, sums = len(costs), [0.0, *accumulate(costs)]
    best, begin = _cuts(tuple(costs))
    for part in range(len(best), parts):
        row, first = [float("inf")] * count, [0] * count
        for last in range(part, count):
            # The last part begins at i. As i grows, its sum falls and the largest sum of the others rises, so the best
            # i lies next to where the two cross.
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


@lru_cache(maxsize=8)
def _cuts(costs: tuple[float, ...]) -> tuple[list[list[float]], list[list[int]]]:
    """The table that `cut_balanced` extends, cached because a planner asks for many numbers of parts of the same costs.

    best[k][j] is the smallest possible largest sum when entries 0 .. j are cut into k + 1 parts. begin[k][j] is where
    the last of these parts begins.
    """
    return [list(accumulate(costs))], [[0] * len(costs)]


def _excess(others: list[float], sums: list[float], end: float, begin: int) -> float:
    """By how much the parts before `begin` exceed the part that starts there."""
    return others[begin - 1] - (end - sums[begin])

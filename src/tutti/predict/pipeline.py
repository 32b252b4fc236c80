"""A pipeline's time line: the schedule's actions one after another, with the real times of unequal stages.

An action begins when its rank is free and what it needs has arrived; it arrives a message's time after it was made.
Nothing is approximated but very long runs: a schedule becomes periodic, and what is beyond some periods is added
period by period.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tutti.spec.plan import Plan
from tutti.spec.schedule import Action, schedule, simulate
from tutti.spec.words import ScheduleName

Array = NDArray[np.float64]
Places = NDArray[np.intp]

PERIODS = 4
"""Microbatches that are played out at most, in numbers of stages; the rest repeats the last of them."""

MOST_PUT_OFF = 4096
"""With weight gradients apart: so many microbatches times ranks are played out in any case."""

_GROWS = (1, -1, 0, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A schedule's actions in an order in which each comes after what it needs. Of action i: its `rank`, `stage`,
    `microbatch` and `kind` (0 forward, 1 backward, 2 and 3 its halves for inputs and weights); `after`: the action
    whose result it needs, -1 for none; `link`: the boundary between stages that the result crosses.
    """

    rank: tuple[int, ...]
    after: tuple[int, ...]
    stage: Places
    microbatch: Places
    kind: Places
    link: Places


@lru_cache(maxsize=512)
def order_of(name: ScheduleName, ranks: int, stages_per_rank: int, microbatches: int) -> Order:
    """The runtime's schedule, ready to be played out."""
    orders = schedule(name, ranks, stages_per_rank, microbatches)
    began = simulate(orders)
    stages = ranks * stages_per_rank
    rank_of = {action: rank for rank, order in enumerate(orders) for action in order}
    place = {action: at for order in orders for at, action in enumerate(order)}
    actions = sorted(began, key=lambda action: (began[action], place[action]))
    index = {action: at for at, action in enumerate(actions)}
    after, link = [], []
    for action in actions:
        needs, boundary = _needed(action, stages)
        found = [index[one] for one in needs if one in index]
        after.append(found[0] if found else -1)
        link.append(boundary)
    return Order(
        rank=tuple(rank_of[action] for action in actions),
        after=tuple(after),
        stage=np.array([action.stage for action in actions], dtype=np.intp),
        microbatch=np.array([action.microbatch for action in actions], dtype=np.intp),
        kind=np.array(["FBIW".index(action.kind) for action in actions], dtype=np.intp),
        link=np.array(link, dtype=np.intp),
    )


def _needed(action: Action, stages: int) -> tuple[tuple[Action, ...], int]:
    """The actions of another stage, one of which an action needs, and the boundary between the stages."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind == "F" and stage:
        return (Action("F", stage - 1, microbatch),), stage - 1
    if action.kind in ("B", "I") and stage < stages - 1:
        return (Action("B", stage + 1, microbatch), Action("I", stage + 1, microbatch)), stage
    return (), 0


def play(order: Order, seconds: Array, message_s: Array) -> list[float]:
    """When each rank has ended. `seconds`: (kinds, stages, microbatches); `message_s`: (boundaries, microbatches)."""
    return moments(order, seconds, message_s)[0]


def moments(order: Order, seconds: Array, message_s: Array) -> tuple[list[float], list[float]]:
    """(when each rank has ended, when each action has); shapes as in `play`."""
    ranks = max(order.rank) + 1
    free, ended = [0.0] * ranks, [0.0] * len(order.rank)
    durations = seconds[order.kind, order.stage, order.microbatch].tolist()
    messages = message_s[order.link, order.microbatch].tolist()
    for at, (rank, after, lasts) in enumerate(zip(order.rank, order.after, durations, strict=True)):
        start = free[rank]
        if after >= 0:
            arrived = ended[after] + messages[at]
            if arrived > start:
                start = arrived
        free[rank] = ended[at] = start + lasts
    return free, ended


def ends(plan: Plan, seconds: Array, message_s: Array) -> list[float]:
    """When each rank of the stage axis has done all its actions; shapes as in `play`, with all microbatches.

    Long runs of equal microbatches are played out for some periods, and continued at the last one's pace.
    """
    pipeline, ranks = plan.pipeline, plan.degree("stage")
    count = seconds.shape[2]
    played = shortened(pipeline.schedule, count, ranks)
    if played == count or not _equal(seconds):
        return play(order_of(pipeline.schedule, ranks, pipeline.stages_per_rank, count), seconds, message_s)
    early, late = (
        np.array(
            play(
                order_of(pipeline.schedule, ranks, pipeline.stages_per_rank, some),
                seconds[:, :, :some],
                message_s[:, :some],
            )
        )
        for some in (played - ranks, played)
    )
    pace = (late - early) / ranks
    if pipeline.schedule != "gpipe":  # forward and backward take turns: not quicker than the busiest rank for long
        work = _work(pipeline.schedule, seconds[:, :, 0])
        pace = np.maximum(pace, max(work[rank::ranks].sum() for rank in range(ranks)))
    continued: list[float] = (late + (count - played) * pace).tolist()
    return continued


def _work(name: ScheduleName, seconds: Array) -> Array:
    """(stages,): seconds of all actions on one microbatch. `seconds`: (kinds, stages)."""
    halves = name == "zero-bubble"
    work: Array = seconds[0] + (seconds[2] + seconds[3] if halves else seconds[1])
    return work


def shortened(name: ScheduleName, microbatches: int, ranks: int) -> int:
    """How many microbatches of a long run are played out: some periods, and what is left over."""
    most = (PERIODS + 2) * ranks
    if name == "zero-bubble":  # weight gradients are put off for long, and its order is not quite periodic
        most = max(most, MOST_PUT_OFF // ranks)
    if microbatches <= most:
        return microbatches
    return most - 2 * ranks + (microbatches - most) % ranks


def _equal(seconds: Array) -> bool:
    return bool(np.all(seconds == seconds[:, :, :1]))


def most_held(plan: Plan, nbytes: Array, rank: int) -> tuple[float, int]:
    """The most bytes of activations that `rank` of the stage axis holds at once, and of how many microbatches.

    `nbytes`: (stages, microbatches), what each stage keeps of each.
    """
    pipeline, ranks = plan.pipeline, plan.degree("stage")
    own = range(rank, nbytes.shape[0], ranks)
    count = nbytes.shape[1]
    if pipeline.schedule == "gpipe":
        return float(nbytes[list(own)].sum()), count
    played = shortened(pipeline.schedule, count, ranks)
    grows, stage, microbatch = _growth(pipeline.schedule, ranks, pipeline.stages_per_rank, played, rank)
    most = nbytes[:, ::-1] if played < count else nbytes  # the last microbatches are the largest
    running = np.cumsum(grows * most[stage, microbatch])
    peak = int(np.argmax(running)) if len(running) else 0
    return float(running[peak]), int(grows[: peak + 1].sum())


@lru_cache(maxsize=2048)
def _growth(
    name: ScheduleName, ranks: int, stages_per_rank: int, microbatches: int, rank: int
) -> tuple[Places, Places, Places]:
    order = order_of(name, ranks, stages_per_rank, microbatches)
    own = np.flatnonzero(np.array(order.rank) == rank)
    return np.array(_GROWS, dtype=np.intp)[order.kind[own]], order.stage[own], order.microbatch[own]

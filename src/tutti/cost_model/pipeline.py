"""A pipeline's time line: the schedule's actions one after another, with the real times of unequal stages.

An action begins when its rank is free and what it needs has arrived. A message leaves when it has been made and the one
before it on the same way, from one rank to another, is on it whole; it arrives its own time after that.
Nothing is approximated but very long runs: a schedule becomes periodic, and what is beyond some periods is added
period by period.
"""

from collections import deque
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tutti.config.pipeline_schedule import Orders, build_orders
from tutti.config.plan import Plan
from tutti.config.vocabulary import ScheduleName
from tutti.errors import PlanError

Array = NDArray[np.float64]
Places = NDArray[np.intp]

PERIODS = 4
"""Microbatches that are played out at most, in numbers of stages; the rest repeats the last of them."""

MOST_PUT_OFF = 4096
"""With weight gradients apart: so many microbatches times ranks are played out in any case."""

_KIND = {"F": 0, "B": 1, "I": 2, "W": 3}
_NOTHING, _NOT_YET = -1, -2
_GROWS = (1, -1, 0, -1)
_PUT_OFF = (0, 0, 1, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A schedule's actions in an order in which each comes after what it needs. Of action i: its `rank`, `stage`,
    `microbatch` and `kind` (0 forward, 1 backward, 2 and 3 its halves for inputs and weights); `after`: the action
    whose result it needs, -1 for none; `way`: the number of the way between two ranks that its own result takes, -1 for
    none; `crosses`: the boundary between stages that this result crosses.
    """

    rank: tuple[int, ...]
    after: tuple[int, ...]
    stage: Places
    microbatch: Places
    kind: Places
    way: tuple[int, ...]
    crosses: Places


@lru_cache(maxsize=512)
def order_of(name: ScheduleName, ranks: int, stages_per_rank: int, microbatches: int) -> Order:
    """The runtime's schedule, ready to be played out."""
    if name in ("1f1b", "gpipe"):
        return _regular(name, ranks, microbatches)
    return _walked(build_orders(name, ranks, stages_per_rank, microbatches), ranks * stages_per_rank, microbatches)


def _regular(name: ScheduleName, ranks: int, count: int) -> Order:
    """GPipe and 1F1B, whose actions begin at known times where all last equally long: in that order.

    On place r of p forward m begins at r + m and, of 1F1B once p - r - 1 are ahead, at r + 2 m; backward m of 1F1B at
    2 p - 1 - r + 2 m, and of GPipe as much later as all forwards take.
    """
    rank, m = np.divmod(np.arange(ranks * count), count)
    if name == "gpipe":
        ahead, back = rank + m, 2 * ranks + count - 1 - rank + m
    else:
        ahead, back = rank + np.where(m < ranks - rank - 1, m, 2 * m), 2 * ranks - 1 - rank + 2 * m
    order = np.argsort(np.concatenate([ahead, back]), kind="stable")
    at = np.empty(len(order), dtype=np.intp)
    at[order] = np.arange(len(order))
    forward, backward = at.reshape(2, ranks, count)
    none = np.full((1, count), -1, dtype=np.intp)
    after = np.concatenate([none, forward[:-1], backward[1:], none]).reshape(-1)[order]
    kind = np.repeat([0, 1], ranks * count)[order]
    stage, microbatch = np.tile(rank, 2)[order], np.tile(m, 2)[order]
    link = np.where(after < 0, 0, stage - 1 + kind)
    return _order(stage, after, stage, microbatch, kind, link)


def _walked(orders: Orders, stages: int, count: int) -> Order:
    """Any schedule: each rank's actions as soon as what they need is there. Raises PlanError where that never is."""
    forward, gradient = [_NOT_YET] * (stages * count), [_NOT_YET] * (stages * count)
    rows: list[tuple[int, int, int, int, int, int]] = []
    waiting = [deque(order) for order in orders]
    while any(waiting):
        before = len(rows)
        for rank, order in enumerate(waiting):
            while order:
                kind, stage, microbatch = _KIND[order[0].kind], order[0].stage, order[0].microbatch
                at, after, link = stage * count + microbatch, _NOTHING, 0
                if kind == 0 and stage:
                    after, link = forward[at - count], stage - 1
                elif kind in (1, 2) and stage < stages - 1:
                    after, link = gradient[at + count], stage
                if after == _NOT_YET:
                    break
                if kind == 0:
                    forward[at] = len(rows)
                elif kind < 3:
                    gradient[at] = len(rows)
                rows.append((rank, after, stage, microbatch, kind, link))
                order.popleft()
        if len(rows) == before:
            raise PlanError("the pipeline's schedule deadlocks: no rank has an action that can begin")
    return _order(*np.array(rows, dtype=np.intp).reshape(-1, 6).T)


def _order(rank: Places, after: Places, stage: Places, microbatch: Places, kind: Places, link: Places) -> Order:
    """`link`: the boundary that what each action needs has crossed."""
    takers = np.flatnonzero(after >= 0)  # each result is taken once
    makers, ranks = after[takers], int(rank.max(initial=0)) + 1
    apart = rank[makers] != rank[takers]
    way, crosses = np.full(len(rank), -1, dtype=np.intp), np.zeros(len(rank), dtype=np.intp)
    way[makers] = np.where(apart, rank[makers] * ranks + rank[takers], -1)
    crosses[makers] = link[takers]
    return Order(
        rank=tuple(rank.tolist()),
        after=tuple(after.tolist()),
        stage=stage,
        microbatch=microbatch,
        kind=kind,
        way=tuple(way.tolist()),
        crosses=crosses,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """(boundaries, microbatches) each, in seconds. `arrive_s`: from when a message leaves until it has arrived;
    `occupy_s`: until the next may leave on its way, which is less by the latency."""

    arrive_s: Array
    occupy_s: Array

    def of(self, microbatches: Places | slice) -> "Messages":
        return Messages(arrive_s=self.arrive_s[:, microbatches], occupy_s=self.occupy_s[:, microbatches])


def play(order: Order, seconds: Array, messages: Messages) -> list[float]:
    """When each rank has ended. `seconds`: (kinds, stages, microbatches)."""
    return moments(order, seconds, messages)[0]


def moments(order: Order, seconds: Array, messages: Messages) -> tuple[list[float], list[float]]:
    """(when each rank has ended, when each action has); shapes as in `play`."""
    ranks = max(order.rank) + 1
    free, ended, arrived = [0.0] * ranks, [0.0] * len(order.rank), [0.0] * len(order.rank)
    open_from = [0.0] * (ranks * ranks)
    durations = seconds[order.kind, order.stage, order.microbatch].tolist()
    arrive = messages.arrive_s[order.crosses, order.microbatch].tolist()
    occupy = messages.occupy_s[order.crosses, order.microbatch].tolist()
    rows = zip(order.rank, order.after, order.way, durations, strict=True)
    for at, (rank, after, way, lasts) in enumerate(rows):
        start = free[rank]
        if after >= 0 and arrived[after] > start:
            start = arrived[after]
        end = start + lasts
        free[rank] = ended[at] = arrived[at] = end
        if way >= 0:
            leaves = max(open_from[way], end)
            open_from[way], arrived[at] = leaves + occupy[at], leaves + arrive[at]
    return free, ended


def ends(plan: Plan, seconds: Array, messages: Messages) -> list[float]:
    """When each rank of the stage axis has done all its actions; shapes as in `play`, with all microbatches.

    Long runs of equal microbatches are played out for some periods, and continued at the last one's pace.
    """
    pipeline, ranks = plan.pipeline, plan.degree("stage")
    count = seconds.shape[2]
    played = shortened(pipeline.schedule, count, ranks)
    if played == count or not equal(seconds):
        return play(order_of(pipeline.schedule, ranks, pipeline.stages_per_rank, count), seconds, messages)
    early, late = (
        np.array(
            play(
                order_of(pipeline.schedule, ranks, pipeline.stages_per_rank, some),
                seconds[:, :, :some],
                messages.of(slice(some)),
            )
        )
        for some in (played - 2 * ranks, played)
    )
    pace = (late - early) / (2 * ranks)  # 1F1B may take turns of two microbatches, whatever the ranks
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
    return most - 2 * ranks + (microbatches - most) % (2 * ranks)


def equal(seconds: Array) -> bool:
    """Whether actions last equally long on all microbatches."""
    return bool(np.all(seconds == seconds[:, :, :1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Besides:
    """What a rank holds of microbatches besides what it keeps for backward. `put_off`: (stages, microbatches), between
    the halves of a backward, gradients of what modules with weights return; `sent`: (boundaries, microbatches), a
    message, which is there while it is used, and one action before."""

    put_off: Array
    sent: Array

    def reversed(self) -> "Besides":
        return Besides(put_off=self.put_off[:, ::-1], sent=self.sent[:, ::-1])

    def message(self, kind: int, stage: int, microbatch: int) -> float:
        """Bytes that come for an action."""
        boundary = {0: stage - 1, 1: stage, 2: stage}.get(kind, -1)
        return float(self.sent[boundary, microbatch]) if 0 <= boundary < len(self.sent) else 0.0


def most_held(plan: Plan, nbytes: Array, rank: int, besides: Besides | None = None) -> tuple[float, int]:
    """The most bytes of activations that `rank` of the stage axis holds at once, and of how many microbatches.

    `nbytes`: (stages, microbatches), what each stage keeps of each.
    """
    pipeline, ranks = plan.pipeline, plan.degree("stage")
    own = range(rank, nbytes.shape[0], ranks)
    count = nbytes.shape[1]
    if pipeline.schedule == "gpipe":
        coming = besides.sent[rank, -2:].sum() if besides is not None and rank < ranks - 1 else 0.0
        return float(nbytes[list(own)].sum() + coming), count
    played = shortened(pipeline.schedule, count, ranks)
    kind, stage, microbatch = _growth(pipeline.schedule, ranks, pipeline.stages_per_rank, played, rank)
    if played < count:  # the last microbatches are the largest
        nbytes, besides = nbytes[:, ::-1], besides.reversed() if besides is not None else None
    grows = np.array(_GROWS)[kind]
    changes = grows * nbytes[stage, microbatch]
    if besides is not None:
        changes = changes + np.array(_PUT_OFF)[kind] * besides.put_off[stage, microbatch]
    running = np.cumsum(changes)
    peak = int(np.argmax(running)) if len(running) else 0
    found = float(running[peak])
    if besides is not None:  # the next action's, and the one's after it
        after = range(peak + 1, min(peak + 3, len(kind)))
        found += sum(besides.message(int(kind[at]), int(stage[at]), int(microbatch[at])) for at in after)
    return found, int(grows[: peak + 1].sum())


@lru_cache(maxsize=2048)
def _growth(
    name: ScheduleName, ranks: int, stages_per_rank: int, microbatches: int, rank: int
) -> tuple[Places, Places, Places]:
    order = order_of(name, ranks, stages_per_rank, microbatches)
    own = np.flatnonzero(np.array(order.rank) == rank)
    return order.kind[own], order.stage[own], order.microbatch[own]

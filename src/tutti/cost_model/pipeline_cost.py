"""Simulation of a pipeline: the schedule's actions one by one, with the times of unequal stages.

An action begins when its rank is free and its input has arrived. A message leaves once it exists and the
previous message on the same link has left; it then takes its own time. Only very long runs are approximated: a
schedule becomes periodic, and further periods repeat the last one.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

import tutti.cost_model.cost_constants as cost_constants
from tutti.config.pipeline_schedule import Orders, build_orders
from tutti.config.plan import Plan
from tutti.config.vocabulary import DATA_AXES, ScheduleName
from tutti.cost_model.group_links import host_group_of_ranks
from tutti.cost_model.rank_placement import HostGroup, rank_samples
from tutti.errors import PlanError

Array = NDArray[np.float64]
Places = NDArray[np.intp]

PERIODS = 4
"""Long runs are simulated for at least this many microbatches per rank of the stage axis. Beyond them, the last
period is repeated.
"""

MOST_PUT_OFF = 4096
"""With delayed weight gradients, the product of microbatches and ranks up to which all microbatches are simulated."""

_KIND = {"F": 0, "B": 1, "I": 2, "W": 3}
_NOTHING, _NOT_YET = -1, -2
_GROWS = (1, -1, 0, -1)
_PUT_OFF = (0, 0, 1, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionOrder:
    """A schedule's actions, each after the actions on which it depends. Every field has one entry for each action.

    Attributes:
        rank: the rank that runs it, by place on the stage axis.
        after: the action whose result it needs, -1 for none.
        kind: 0 forward, 1 backward, 2 and 3 the halves of backward for inputs and for weights.
        link: the link between two ranks over which its own result is sent, -1 for none.
        crosses: the boundary between stages that its own result crosses.
    """

    rank: tuple[int, ...]
    after: tuple[int, ...]
    stage: Places
    microbatch: Places
    kind: Places
    link: tuple[int, ...]
    crosses: Places


@lru_cache(maxsize=512)
def order_of(name: ScheduleName, ranks: int, stages_per_rank: int, microbatches: int) -> ActionOrder:
    """Return the runtime's schedule in a form that can be simulated."""
    if name in ("1f1b", "gpipe"):
        return _regular(name, ranks, microbatches)
    return _walked(build_orders(name, ranks, stages_per_rank, microbatches), ranks * stages_per_rank, microbatches)


def _regular(name: ScheduleName, ranks: int, count: int) -> ActionOrder:
    """Return GPipe or 1F1B, in the order of the times at which equally long actions begin.

    On place r of p, forward m begins at r + m; in 1F1B, once p - r - 1 forwards are ahead, at r + 2 m. In 1F1B,
    backward m begins at 2 p - 1 - r + 2 m; in GPipe, backwards begin after all forwards.
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
    boundary = np.where(after < 0, 0, stage - 1 + kind)
    return _order(stage, after, stage, microbatch, kind, boundary)


def _walked(orders: Orders, stages: int, count: int) -> ActionOrder:
    """Return any schedule, with each rank's actions as soon as their inputs exist.

    Raises:
        PlanError: the schedule deadlocks.
    """
    forward, gradient = [_NOT_YET] * (stages * count), [_NOT_YET] * (stages * count)
    rows: list[tuple[int, int, int, int, int, int]] = []
    waiting = [deque(order) for order in orders]
    while any(waiting):
        before = len(rows)
        for rank, order in enumerate(waiting):
            while order:
                kind, stage, microbatch = _KIND[order[0].kind], order[0].stage, order[0].microbatch
                at, after, boundary = stage * count + microbatch, _NOTHING, 0
                if kind == 0 and stage:
                    after, boundary = forward[at - count], stage - 1
                elif kind in (1, 2) and stage < stages - 1:
                    after, boundary = gradient[at + count], stage
                if after == _NOT_YET:
                    break
                if kind == 0:
                    forward[at] = len(rows)
                elif kind < 3:
                    gradient[at] = len(rows)
                rows.append((rank, after, stage, microbatch, kind, boundary))
                order.popleft()
        if len(rows) == before:
            raise PlanError("the pipeline's schedule deadlocks: no rank has an action that can begin")
    return _order(*np.array(rows, dtype=np.intp).reshape(-1, 6).T)


def _order(
    rank: Places, after: Places, stage: Places, microbatch: Places, kind: Places, boundary: Places
) -> ActionOrder:
    """Return the actions as an ActionOrder.

    Args:
        boundary: the boundary between stages that each action's input has crossed.
    """
    takers = np.flatnonzero(after >= 0)  # each result is taken once
    makers, ranks = after[takers], int(rank.max(initial=0)) + 1
    other_rank = rank[makers] != rank[takers]
    link, crosses = np.full(len(rank), -1, dtype=np.intp), np.zeros(len(rank), dtype=np.intp)
    link[makers] = np.where(other_rank, rank[makers] * ranks + rank[takers], -1)
    crosses[makers] = boundary[takers]
    return ActionOrder(
        rank=tuple(rank.tolist()),
        after=tuple(after.tolist()),
        stage=stage,
        microbatch=microbatch,
        kind=kind,
        link=tuple(link.tolist()),
        crosses=crosses,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """Seconds of messages, (boundaries, microbatches) each.

    Attributes:
        arrive_s: from the departure of a message to its arrival.
        occupy_s: from its departure until the next message may leave on the same link; shorter by the latency.
    """

    arrive_s: Array
    occupy_s: Array

    def of(self, microbatches: Places | slice) -> "Messages":
        """Return the messages of some microbatches."""
        return Messages(arrive_s=self.arrive_s[:, microbatches], occupy_s=self.occupy_s[:, microbatches])


def play(order: ActionOrder, seconds: Array, messages: Messages) -> list[float]:
    """Return when each rank has finished.

    Args:
        seconds: (kinds of action, stages, microbatches).
    """
    return moments(order, seconds, messages)[0]


def moments(order: ActionOrder, seconds: Array, messages: Messages) -> tuple[list[float], list[float]]:
    """Return (when each rank has finished, when each action has ended); shapes as in `play`."""
    ranks = max(order.rank) + 1
    free, ended, arrived = [0.0] * ranks, [0.0] * len(order.rank), [0.0] * len(order.rank)
    open_from = [0.0] * (ranks * ranks)
    durations = seconds[order.kind, order.stage, order.microbatch].tolist()
    arrive = messages.arrive_s[order.crosses, order.microbatch].tolist()
    occupy = messages.occupy_s[order.crosses, order.microbatch].tolist()
    rows = zip(order.rank, order.after, order.link, durations, strict=True)
    for at, (rank, after, link, lasts) in enumerate(rows):
        start = free[rank]
        if after >= 0 and arrived[after] > start:
            start = arrived[after]
        end = start + lasts
        free[rank] = ended[at] = arrived[at] = end
        if link >= 0:
            leaves = max(open_from[link], end)
            open_from[link], arrived[at] = leaves + occupy[at], leaves + arrive[at]
    return free, ended


def ends(plan: Plan, seconds: Array, messages: Messages) -> list[float]:
    """Return when each rank of the stage axis has finished all microbatches; shapes as in `play`.

    Of long runs of equal microbatches, some periods are simulated and continued at the rate of the last period.
    """
    pipeline, ranks = plan.pipeline, plan.degree("stage")
    count = seconds.shape[2]
    played = shortened(pipeline.schedule, count, ranks)
    if played == count or not equal(seconds):
        return play(order_of(pipeline.schedule, ranks, pipeline.stages_per_rank, count), seconds, messages)
    early, late = (
        np.array(
            play(
                order_of(pipeline.schedule, ranks, pipeline.stages_per_rank, simulated),
                seconds[:, :, :simulated],
                messages.of(slice(simulated)),
            )
        )
        for simulated in (played - 2 * ranks, played)
    )
    microbatch_s = (late - early) / (2 * ranks)  # 1F1B may repeat every two microbatches, however many ranks
    if pipeline.schedule != "gpipe":  # forward and backward alternate, so in the long run the busiest rank is a limit
        work = _work(pipeline.schedule, seconds[:, :, 0])
        microbatch_s = np.maximum(microbatch_s, max(work[rank::ranks].sum() for rank in range(ranks)))
    continued: list[float] = (late + (count - played) * microbatch_s).tolist()
    return continued


def _work(name: ScheduleName, seconds: Array) -> Array:
    """Return (stages,): seconds of all actions on one microbatch.

    Args:
        seconds: (kinds of action, stages).
    """
    halves = name == "zero-bubble"
    work: Array = seconds[0] + (seconds[2] + seconds[3] if halves else seconds[1])
    return work


def shortened(name: ScheduleName, microbatches: int, ranks: int) -> int:
    """Return how many microbatches of a long run are simulated: some periods and the remainder."""
    most = (PERIODS + 2) * ranks
    if name == "zero-bubble":  # weight gradients are delayed for long, and its order is not quite periodic
        most = max(most, MOST_PUT_OFF // ranks)
    if microbatches <= most:
        return microbatches
    return most - 2 * ranks + (microbatches - most) % (2 * ranks)


def equal(seconds: Array) -> bool:
    """Return whether actions take equally long on all microbatches."""
    return bool(np.all(seconds == seconds[:, :, :1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Besides:
    """What a rank holds of microbatches besides the activations that it keeps for backward.

    Attributes:
        put_off: (stages, microbatches), bytes of output gradients held between the halves of a backward.
        sent: (boundaries, microbatches), bytes of a message, held while it is used and during the action before.
    """

    put_off: Array
    sent: Array

    def reversed(self) -> "Besides":
        """Return the same with the microbatches in reverse order."""
        return Besides(put_off=self.put_off[:, ::-1], sent=self.sent[:, ::-1])

    def message(self, kind: int, stage: int, microbatch: int) -> float:
        """Return the bytes of an action's input message."""
        boundary = {0: stage - 1, 1: stage, 2: stage}.get(kind, -1)
        return float(self.sent[boundary, microbatch]) if 0 <= boundary < len(self.sent) else 0.0


def most_held(plan: Plan, nbytes: Array, rank: int, besides: Besides | None = None) -> tuple[float, int]:
    """Return (the most bytes of activations that `rank` holds at once, the number of microbatches they belong to).

    Args:
        rank: place on the stage axis.
        nbytes: (stages, microbatches), bytes that each stage keeps of each microbatch.
        besides: what the rank holds besides activations; None: nothing.
    """
    pipeline, ranks = plan.pipeline, plan.degree("stage")
    stages = range(rank, nbytes.shape[0], ranks)
    count = nbytes.shape[1]
    if pipeline.schedule == "gpipe":
        coming = besides.sent[rank, -2:].sum() if besides is not None and rank < ranks - 1 else 0.0
        return float(nbytes[list(stages)].sum() + coming), count
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
    most_nbytes = float(running[peak])
    if besides is not None:  # messages of the next two actions
        after = range(peak + 1, min(peak + 3, len(kind)))
        most_nbytes += sum(besides.message(int(kind[at]), int(stage[at]), int(microbatch[at])) for at in after)
    return most_nbytes, int(grows[: peak + 1].sum())


@lru_cache(maxsize=2048)
def _growth(
    name: ScheduleName, ranks: int, stages_per_rank: int, microbatches: int, rank: int
) -> tuple[Places, Places, Places]:
    """Return (kind, stage, microbatch) of the actions of `rank`, in order."""
    order = order_of(name, ranks, stages_per_rank, microbatches)
    actions = np.flatnonzero(np.array(order.rank) == rank)
    return order.kind[actions], order.stage[actions], order.microbatch[actions]


@dataclass(frozen=True, slots=True, kw_only=True)
class Oversubscription:
    """Cores that are shared by places on the stage axis. Every field has one entry for each place.

    Attributes:
        host: the host of the place.
        cores: cores of that host.
        ranks: number of the plan's ranks on that host at this place. They do the same at the same moment.
        slowed: factor by which the prediction has slowed the place's work, as if all ranks of the host always
            computed.
    """

    host: tuple[int, ...]
    cores: tuple[int, ...]
    ranks: tuple[int, ...]
    slowed: tuple[float, ...]

    @property
    def uncontended(self) -> list[float]:
        """By place, the factor by which its work takes longer while no other place's ranks compute."""
        return [_slower(ranks / cores) for ranks, cores in zip(self.ranks, self.cores, strict=True)]

    def speeds(self, computing: Iterable[int]) -> dict[int, float]:
        """Return the speeds of the places that compute now, relative to a rank with a core of its own."""
        wanted: dict[int, int] = {}
        for place in computing:
            wanted[self.host[place]] = wanted.get(self.host[place], 0) + self.ranks[place]
        return {place: 1 / _slower(wanted[self.host[place]] / self.cores[place]) for place in computing}


def _slower(ranks_per_core: float) -> float:
    """Return the factor by which work takes longer with this many ranks for each core."""
    return ranks_per_core * cost_constants.OVERSUBSCRIBED if ranks_per_core > 1 else 1.0


def oversubscription_of(host_groups: tuple[HostGroup, ...], where: Places) -> Oversubscription:
    """Return how the places of the first data-parallel rank share cores.

    Args:
        where: (data-parallel ranks, places on the stage axis, others): ranks.
    """
    host_group_at = host_group_of_ranks(host_groups)
    sizes = [host_group.ranks_per_host for host_group in host_groups for _ in range(host_group.hosts)]
    host_at = np.repeat(np.arange(len(sizes)), sizes)
    first = where[0, :, 0]
    return Oversubscription(
        host=tuple(host_at[first].tolist()),
        cores=tuple(_cores(host_groups[host_group]) for host_group in host_group_at[first].tolist()),
        ranks=tuple(int((host_at[where[:, place]] == host_at[rank]).sum()) for place, rank in enumerate(first)),
        slowed=tuple(host_groups[host_group].slowdown for host_group in host_group_at[first].tolist()),
    )


def _cores(host_group: HostGroup) -> int:
    """Return the cores of a host."""
    return max(1, host_group.device.cores) * host_group.node.devices_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A simulated schedule: when each rank finished, and when each action began and ended.

    Attributes:
        free: when each rank finished.
        busy_s: seconds of each rank's own work.
    """

    free: list[float]
    began: list[float]
    ended: list[float]
    busy_s: list[float]


def in_turns(order: ActionOrder, work: Array, oversubscription: Oversubscription) -> Played:
    """Simulate ranks that share cores.

    Args:
        work: (kinds of action, stages, microbatches), seconds on a core of one's own.
    """
    game = _Game(order, work, oversubscription)
    while game.go_on():
        pass
    return Played(free=game.free, began=game.began, ended=game.ended, busy_s=game.busy_s)


class _Game:
    """A simulation that advances from the end of one action to the next."""

    def __init__(self, order: ActionOrder, work: Array, oversubscription: Oversubscription) -> None:
        self._after, self._oversubscription = order.after, oversubscription
        self._work = work[order.kind, order.stage, order.microbatch].tolist()
        count, ranks = len(order.rank), max(order.rank) + 1
        self.free, self.busy_s = [0.0] * ranks, [0.0] * ranks
        self.began, self.ended = [0.0] * count, [0.0] * count
        self._done = [False] * count
        self._queue: list[list[int]] = [[] for _ in range(ranks)]
        for at in range(count - 1, -1, -1):
            self._queue[order.rank[at]].append(at)
        self._now = 0.0
        self._left: dict[int, float] = {}

    def go_on(self) -> bool:
        """Advance until the next action ends; return False if nothing is left."""
        for place, queue in enumerate(self._queue):
            if queue and place not in self._left and (self._after[queue[-1]] < 0 or self._done[self._after[queue[-1]]]):
                self.began[queue[-1]], self._left[place] = self._now, self._work[queue[-1]]
        if not self._left:
            return False
        speeds = self._oversubscription.speeds(self._left)
        step_s = min(left / speeds[place] for place, left in self._left.items())
        self._now += step_s
        for place, left in list(self._left.items()):
            self.busy_s[place] += step_s
            self._left[place] = left - step_s * speeds[place]
            if self._left[place] <= 1e-12 * (left + self._now):
                self._end(place)
        return True

    def _end(self, place: int) -> None:
        """End the action that runs on a place."""
        at = self._queue[place].pop()
        self.free[place] = self.ended[at] = self._now
        self._done[at] = True
        del self._left[place]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineReplica:
    """A pipeline replica, or several of them with the same samples.

    Attributes:
        samples: (samples of a microbatch, number of such microbatches); the last entry has the last microbatch.
        host_groups: for each place on the stage axis, the kinds of its ranks (see `kinds_of_ranks`).
    """

    samples: tuple[tuple[int, int], ...]
    host_groups: tuple[tuple[int, ...], ...]

    @property
    def microbatches(self) -> list[int]:
        """Samples of each microbatch, in order."""
        return [count for count, times in self.samples for _ in range(times)]


def replicas_of(plan: Plan, host_groups: tuple[HostGroup, ...], samples: int) -> list[PipelineReplica]:
    """Return the pipeline replicas of a plan that differ from each other. Equal shares all count as the largest of
    them.
    """
    return list({id(replica): replica for replica in replicas_by_share(plan, host_groups, samples)}.values())


def replicas_by_share(plan: Plan, host_groups: tuple[HostGroup, ...], samples: int) -> list[PipelineReplica]:
    """Return the pipeline replica of each data-parallel rank; equal replicas are the same object."""
    degree, stages = plan.data_parallel_degree, plan.degree("stage")
    count = plan.batch.num_microbatches
    if plan.shares:
        counts = rank_samples(samples, count, degree, plan.shares)
    else:
        (whole,) = rank_samples(samples, count, 1)
        counts = [tuple((-(-size // degree), times) for size, times in whole)] * degree
    alike = len(host_groups) == 1 and not plan.split_weights
    if alike and not plan.shares:
        return [PipelineReplica(samples=counts[0], host_groups=((0,),) * stages)] * degree
    if alike:
        uncontended = {
            share: PipelineReplica(samples=share, host_groups=((0,),) * stages) for share in dict.fromkeys(counts)
        }
        return [uncontended[share] for share in counts]
    where = by_share_and_stage(plan, kinds_of_ranks(plan, host_groups))
    rows, index = np.unique(where.reshape(degree, -1), axis=0, return_inverse=True)
    kinds = [tuple(tuple(sorted(set(place))) for place in row.reshape(stages, -1).tolist()) for row in rows]
    pairs = list(zip(counts, index.reshape(-1).tolist(), strict=True))
    replica_of = {pair: PipelineReplica(samples=pair[0], host_groups=kinds[pair[1]]) for pair in dict.fromkeys(pairs)}
    return [replica_of[pair] for pair in pairs]


def by_share_and_stage(plan: Plan, of_ranks: Places) -> Places:
    """Return (data-parallel ranks, places on the stage axis, others): the values `of_ranks`, given in the mesh's
    order.
    """
    axes = list(plan.mesh)
    data = [place for place, axis in enumerate(axes) if axis in DATA_AXES]
    stage = [place for place, axis in enumerate(axes) if axis == "stage"]
    others = [place for place in range(len(axes)) if place not in (*data, *stage)]
    where: Places = of_ranks.reshape(list(plan.mesh.values())).transpose(data + stage + others)
    return where.reshape(plan.data_parallel_degree, plan.degree("stage"), -1)


def kinds_of_ranks(plan: Plan, host_groups: tuple[HostGroup, ...]) -> Places:
    """Return a number for each rank; ranks with the same number are alike.

    The number is the index of the host group. Where parts along the split axis are unequal, (host group, place
    along split) is numbered row by row.
    """
    at = host_group_of_ranks(host_groups)
    if not plan.split_weights:
        return at
    degrees = list(plan.mesh.values())
    places = np.indices(degrees, dtype=np.intp)[list(plan.mesh).index("split")].reshape(-1)
    kinds: Places = at * len(plan.split_weights) + places
    return kinds


def by_place(plan: Plan, host_groups: tuple[HostGroup, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the host groups of the ranks at each place along the split axis."""
    rows = np.moveaxis(
        host_group_of_ranks(host_groups).reshape(list(plan.mesh.values())), list(plan.mesh).index("split"), 0
    )
    return tuple(tuple(np.unique(row).tolist()) for row in rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Actions:
    """Times of actions.

    Attributes:
        seconds: (kinds of action, stages, microbatches).
        waits: the part of `seconds` spent waiting for other ranks at the same place of the stage axis.
        oversubscription: how ranks share cores; None where each rank has its own.
    """

    seconds: Array
    waits: Array
    messages: Messages
    oversubscription: Oversubscription | None

    def of(self, microbatches: Places | slice) -> "Actions":
        """Return the actions of some microbatches."""
        seconds, waits = (times[:, :, microbatches] for times in (self.seconds, self.waits))
        return replace(self, seconds=seconds, waits=waits, messages=self.messages.of(microbatches))

    def played(self, order: ActionOrder) -> Played:
        """Simulate the actions in a schedule's order.

        Where ranks share cores, the result is the longer of two bounds: ranks that take turns, with messages
        that take no time; and messages that take their time, without contention for cores.
        """
        uncontended = self._uncontended(order)
        if self.oversubscription is None:
            return uncontended
        turned = in_turns(order, self._work, self.oversubscription)
        return turned if max(turned.free) > max(uncontended.free) * (1 + 1e-9) else uncontended

    def ends(self, plan: Plan) -> tuple[list[float], list[float]]:
        """Return (when each rank has finished, the duration of its own work over the predicted one)."""
        ranks, count, name = plan.degree("stage"), self.seconds.shape[2], plan.pipeline.schedule
        uncontended = ends(plan, self._own, self.messages)
        if self.oversubscription is None:
            return uncontended, [1.0] * ranks
        whole = shortened(name, count, ranks) if equal(self.seconds) else count
        free, busy = self._turned(plan, whole)
        if whole < count:  # the microbatches beyond repeat the last period
            early, worked = self._turned(plan, whole - 2 * ranks)
            periods = (count - whole) / (2 * ranks)
            free, busy = free + periods * (free - early), busy + periods * (busy - worked)
        predicted = (self.seconds - self.waits)[[0, 2, 3] if name == "zero-bubble" else [0, 1]]
        whole_s = np.array([predicted[:, rank::ranks].sum() for rank in range(ranks)])
        return np.maximum(free, uncontended).tolist(), (busy / np.where(whole_s > 0, whole_s, 1.0)).tolist()

    @property
    def _work(self) -> Array:
        """Seconds of each rank's own work on a core of its own."""
        slowed = [1.0] if self.oversubscription is None else self.oversubscription.slowed
        work: Array = (self.seconds - self.waits) / np.resize(slowed, self.seconds.shape[1])[:, None]
        return work

    @property
    def _own(self) -> Array:
        """Seconds of actions while no other place's ranks compute."""
        if self.oversubscription is None:
            return self.seconds
        own: Array = (
            self._work * np.resize(self.oversubscription.uncontended, self.seconds.shape[1])[:, None] + self.waits
        )
        return own

    def _uncontended(self, order: ActionOrder) -> Played:
        """Simulate the actions without contention for cores."""
        free, ended = moments(order, self._own, self.messages)
        picked = (order.kind, order.stage, order.microbatch)
        lasts = self._own[picked]
        busy = np.bincount(order.rank, weights=lasts - self.waits[picked], minlength=len(free))
        return Played(free=free, began=(np.array(ended) - lasts).tolist(), ended=ended, busy_s=busy.tolist())

    def _turned(self, plan: Plan, microbatches: int) -> tuple[Array, Array]:
        """Return (when each rank has finished, seconds of its own work) for the first microbatches, with ranks that
        take turns.
        """
        assert self.oversubscription is not None
        pipe = plan.pipeline
        order = order_of(pipe.schedule, plan.degree("stage"), pipe.stages_per_rank, microbatches)
        played = in_turns(order, self._work[:, :, :microbatches], self.oversubscription)
        return np.array(played.free), np.array(played.busy_s)


@lru_cache(maxsize=4096)
def times_held(schedule: ScheduleName, chunks: int, stage: int, count: int) -> Array:
    """Return (stages per rank, places): of how many microbatches each stage holds activations at its place's peak.

    It is a lower bound for a step of `count` microbatches. 1F1B holds one microbatch for its own place and for
    each place that follows; zero-bubble holds as many as there are places. An interleaved schedule runs as many
    forwards before its first backward as Narayanan et al. 2021 (arXiv 2104.04473) say. They come in groups of as
    many microbatches as there are places, chunk by chunk. From the second group on, only the first chunk is sure
    to be there in time.
    """
    places = np.arange(stage)
    if stage == 1:
        return np.ones((chunks, 1))
    if schedule == "gpipe":
        return np.full((chunks, stage), float(count))
    if chunks == 1 and schedule != "interleaved":
        live = np.minimum(count, stage if schedule == "zero-bubble" else stage - places)
        return np.asarray(np.broadcast_to(live, (1, stage)), dtype=np.float64)
    group = min(count, stage)
    sure = group * chunks + min(max(0, count - stage), stage)
    most = np.minimum(2 * (stage - 1 - places) + (chunks - 1) * stage + 1, sure)
    often = np.clip(most - group * np.arange(chunks)[:, None], 0, group)
    often[0] += np.maximum(0, most - group * chunks)
    return often.astype(np.float64)


@lru_cache(maxsize=4096)
def least_held(schedule: ScheduleName, chunks: int, stage: int, count: int) -> tuple[Array, Array, Array, Array]:
    """Return four arrays (stages per rank, places): lower bounds of what a place holds at its peak.

    They are `times_held`, and the numbers of microbatches whose weight gradients the place delays, of which it
    holds a message from the next stage, and of which it holds a message from the previous stage. A message is
    held while it is used, and during the action before. For interleaved schedules no message is counted. For
    schedules that delay weight gradients, the delayed ones are counted and no message, because what follows the
    peak depends on the bytes there.
    """
    often = times_held(schedule, chunks, stage, count)
    pending, back, on = (np.zeros_like(often) for _ in range(3))
    places = np.arange(stage)
    if stage > 1 and schedule == "gpipe":
        back[:] = np.where(places < stage - 1, min(count, 2), 0)
    elif stage > 1 and schedule in ("1f1b", "interleaved") and chunks == 1:
        more = count > often[0]  # after the first backward comes one more forward, else a backward
        back[:] = np.where(places < stage - 1, np.where(more | (count == 1), 1, 2), 0)
        on[:] = np.where(more & (places > 0), 1, 0)
    elif stage > 1 and schedule == "zero-bubble" and count >= stage:
        pending[:] = places
    return often, pending, back, on

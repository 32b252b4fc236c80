"""A pipeline whose ranks take turns on cores, where a host has more ranks than cores: a rank that waits leaves them.

Ranks of a host that compute at the same moment share its cores evenly, each at most one; what an action waits for takes
no core. So a light stage beside a heavy one slows it down for as long as it computes, not for the whole step.
"""

from dataclasses import dataclass

import numpy as np

from tutti.predict import constants
from tutti.predict.groups import seat_of_ranks
from tutti.predict.pipeline import Array, Messages, Order, Places
from tutti.predict.placement import Seat


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """Of each place on the stage axis: its `host`, the host's `cores`, how many `ranks` of the plan are there at this
    place (they do the same at the same moment), and by how much the prediction has `slowed` its work, as if all ranks
    of the host always computed."""

    host: tuple[int, ...]
    cores: tuple[int, ...]
    ranks: tuple[int, ...]
    slowed: tuple[float, ...]

    def speeds(self, computing: set[int]) -> dict[int, float]:
        """Of the places that compute now, beside one with a core of its own."""
        wanted: dict[int, int] = {}
        for place in computing:
            wanted[self.host[place]] = wanted.get(self.host[place], 0) + self.ranks[place]
        found = {}
        for place in computing:
            crowded = wanted[self.host[place]] / self.cores[place]
            found[place] = 1.0 if crowded <= 1 else 1.0 / (crowded * constants.OVERSUBSCRIBED)
        return found


def crowd_of(seats: tuple[Seat, ...], where: Places) -> Crowd:
    """`where`: (data-parallel ranks, places on the stage axis, others), the rank. Of the first of them."""
    seat_at = seat_of_ranks(seats)
    sizes = [seat.ranks_per_host for seat in seats for _ in range(seat.hosts)]
    host_at = np.repeat(np.arange(len(sizes)), sizes)
    first = where[0, :, 0]
    return Crowd(
        host=tuple(host_at[first].tolist()),
        cores=tuple(_cores(seats[seat]) for seat in seat_at[first].tolist()),
        ranks=tuple(int((host_at[where[:, place]] == host_at[rank]).sum()) for place, rank in enumerate(first)),
        slowed=tuple(seats[seat].slowdown for seat in seat_at[first].tolist()),
    )


def _cores(seat: Seat) -> int:
    return max(1, seat.device.cores) * seat.node.devices_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """When each rank has ended, when each action began and ended; `busy_s`: of each rank, of its own work."""

    free: list[float]
    began: list[float]
    ended: list[float]
    busy_s: list[float]


def in_turns(order: Order, seconds: Array, waits: Array, messages: Messages, crowd: Crowd) -> Played:
    """`seconds`: (kinds, stages, microbatches) as predicted, all work slowed; `waits`: those of them in which a rank
    waits for others of its place."""
    game = _Game(order, seconds, waits, messages, crowd)
    while game.go_on():
        pass
    return Played(free=game.free, began=game.began, ended=game.ended, busy_s=game.busy_s)


class _Game:
    """The actions under way, from event to event: one begins, has no work left, has waited, or a message arrives."""

    def __init__(self, order: Order, seconds: Array, waits: Array, messages: Messages, crowd: Crowd) -> None:
        self._order, self._crowd = order, crowd
        picked = (order.kind, order.stage, order.microbatch)
        slowed = np.array(crowd.slowed)[np.array(order.rank)]
        self._wait = np.minimum(waits[picked], seconds[picked])
        self._work = (seconds[picked] - self._wait) / slowed
        self._arrive = messages.arrive_s[order.crosses, order.microbatch].tolist()
        self._occupy = messages.occupy_s[order.crosses, order.microbatch].tolist()
        count, ranks = len(order.rank), max(order.rank) + 1
        self.free, self.busy_s = [0.0] * ranks, [0.0] * ranks
        self.began, self.ended = [0.0] * count, [0.0] * count
        self._arrived: list[float | None] = [None] * count
        self._open_from = [0.0] * (ranks * ranks)
        self._queue: list[list[int]] = [[] for _ in range(ranks)]
        for at in range(count - 1, -1, -1):
            self._queue[order.rank[at]].append(at)
        self._now = 0.0
        self._working: dict[int, float] = {}
        self._waiting: dict[int, float] = {}

    def go_on(self) -> bool:
        """To the next event; False where nothing is left."""
        self._begin()
        speeds = self._crowd.speeds(set(self._working))
        next_s = [left / speeds[place] for place, left in self._working.items()]
        next_s += [until - self._now for until in self._waiting.values()]
        next_s += [arrives - self._now for arrives in self._expected()]
        if not next_s:
            return False
        step_s = max(0.0, min(next_s))
        self._now += step_s
        for place, left in list(self._working.items()):
            self.busy_s[place] += step_s
            self._working[place] = left - step_s * speeds[place]
            if self._working[place] <= 1e-12 * (left + self._now):
                del self._working[place]
                self._waiting[place] = self._now + float(self._wait[self._queue[place][-1]])
        for place, until in list(self._waiting.items()):
            if until <= self._now:
                del self._waiting[place]
                self._end(place)
        return True

    def _begin(self) -> None:
        for place, queue in enumerate(self._queue):
            if not queue or place in self._working or place in self._waiting:
                continue
            after = self._order.after[queue[-1]]
            arrived = 0.0 if after < 0 else self._arrived[after]
            if arrived is not None and arrived <= self._now:
                self.began[queue[-1]] = self._now
                self._working[place] = float(self._work[queue[-1]])

    def _expected(self) -> list[float]:
        """When what idle ranks wait for arrives, where it is under way."""
        found = []
        for place, queue in enumerate(self._queue):
            if queue and place not in self._working and place not in self._waiting:
                arrives = self._arrived[self._order.after[queue[-1]]]
                if arrives is not None:
                    found.append(arrives)
        return found

    def _end(self, place: int) -> None:
        at = self._queue[place].pop()
        self.free[place] = self.ended[at] = self._arrived[at] = self._now
        way = self._order.way[at]
        if way >= 0:
            leaves = max(self._open_from[way], self._now)
            self._open_from[way] = leaves + self._occupy[at]
            self._arrived[at] = leaves + self._arrive[at]

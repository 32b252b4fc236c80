"""A pipeline whose ranks take turns on cores, where a host has more ranks than cores: a rank that waits leaves them.

Ranks of a host that compute at the same moment share its cores evenly, each at most one. So a light stage beside a
heavy one slows it down for as long as it computes, not for the whole step. Messages take no time here: if they did,
quicker ones could make a step longer, for what they let begin takes a core from what everyone waits for. What they take
is counted beside (predict.actions).
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tutti.cost_model import constants
from tutti.cost_model.groups import seat_of_ranks
from tutti.cost_model.pipeline import Array, Order, Places
from tutti.cost_model.placement import Seat


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """Of each place on the stage axis: its `host`, the host's `cores`, how many `ranks` of the plan are there at this
    place (they do the same at the same moment), and by how much the prediction has `slowed` its work, as if all ranks
    of the host always computed."""

    host: tuple[int, ...]
    cores: tuple[int, ...]
    ranks: tuple[int, ...]
    slowed: tuple[float, ...]

    @property
    def alone(self) -> list[float]:
        """By place, how many times as long its work takes when no other place's ranks compute."""
        return [_slower(ranks / cores) for ranks, cores in zip(self.ranks, self.cores, strict=True)]

    def speeds(self, computing: Iterable[int]) -> dict[int, float]:
        """Of the places that compute now, beside one with a core of its own."""
        wanted: dict[int, int] = {}
        for place in computing:
            wanted[self.host[place]] = wanted.get(self.host[place], 0) + self.ranks[place]
        return {place: 1 / _slower(wanted[self.host[place]] / self.cores[place]) for place in computing}


def _slower(ranks_per_core: float) -> float:
    return ranks_per_core * constants.OVERSUBSCRIBED if ranks_per_core > 1 else 1.0


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


def in_turns(order: Order, work: Array, crowd: Crowd) -> Played:
    """`work`: (kinds, stages, microbatches), seconds on a core of one's own."""
    game = _Game(order, work, crowd)
    while game.go_on():
        pass
    return Played(free=game.free, began=game.began, ended=game.ended, busy_s=game.busy_s)


class _Game:
    """The actions under way, from one's end to the next."""

    def __init__(self, order: Order, work: Array, crowd: Crowd) -> None:
        self._after, self._crowd = order.after, crowd
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
        """Until the next action ends; False where nothing is left."""
        for place, queue in enumerate(self._queue):
            if queue and place not in self._left and (self._after[queue[-1]] < 0 or self._done[self._after[queue[-1]]]):
                self.began[queue[-1]], self._left[place] = self._now, self._work[queue[-1]]
        if not self._left:
            return False
        speeds = self._crowd.speeds(self._left)
        step_s = min(left / speeds[place] for place, left in self._left.items())
        self._now += step_s
        for place, left in list(self._left.items()):
            self.busy_s[place] += step_s
            self._left[place] = left - step_s * speeds[place]
            if self._left[place] <= 1e-12 * (left + self._now):
                self._end(place)
        return True

    def _end(self, place: int) -> None:
        at = self._queue[place].pop()
        self.free[place] = self.ended[at] = self._now
        self._done[at] = True
        del self._left[place]

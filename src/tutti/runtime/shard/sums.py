"""Sums of gradients over ranks, of which each rank gets its part: once a step, in one order on all ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tutti.runtime.shard.exchange import Exchange, scatter_sum
from tutti.runtime.shard.unit import Pack, Unit
from tutti.runtime.traffic import Lane, ring_nbytes
from tutti.spec.words import AxisName

IN_FLIGHT = 2
"""Packs whose whole gradients may wait for their sums: they are what a step holds beside its own part."""


@dataclass(slots=True, eq=False)
class _Flight:
    """A sum on its way. `there`: gradients this rank had; `received`: what it gets, and once landed, its part."""

    pack: Pack
    there: list[bool]
    received: torch.Tensor
    exchange: Exchange
    landed: bool = False


class Sums:
    """`order`: units in the order in which their gradients leave; `groups`: process groups by axes; `lanes`: where sums
    over them are counted.
    """

    def __init__(
        self,
        order: list[Unit],
        groups: Callable[[tuple[AxisName, ...]], Any],
        lanes: Callable[[tuple[AxisName, ...]], Lane],
    ) -> None:
        self.order = order
        self._lanes = lanes
        self.sent_nbytes = 0
        self._groups = groups
        self._ready: set[Unit] = set()
        self._next = 0
        self._flights: list[_Flight] = []

    def open(self) -> None:
        """A step's last backward begins."""
        self._ready, self._next, self._flights = set(), 0, []

    def complete(self, unit: Unit) -> None:
        """A unit's gradients are there: send all whose turn has come."""
        self._ready.add(unit)
        while self._next < len(self.order) and self.order[self._next] in self._ready:
            self._send(self.order[self._next])
            self._next += 1

    def finish(self) -> None:
        """Send what is left, and give every shard its gradient."""
        for unit in self.order[self._next :]:
            self._send(unit)
        self._next = len(self.order)
        for flight in self._flights:
            self._land(flight)
        for flight in self._flights:
            flight.exchange.wait()
            flight.pack.give_gradients(flight.received, flight.there)
        self._flights = []

    def _send(self, unit: Unit) -> None:
        for pack in unit.packs:
            if not any(one.shard.requires_grad for one in pack.parameters):
                continue
            waiting = [flight for flight in self._flights if not flight.landed]
            for flight in waiting[: len(waiting) - IN_FLIGHT + 1]:
                self._land(flight)
            self._flights.append(self._start(pack))

    def _start(self, pack: Pack) -> _Flight:
        buffer, there = pack.take_gradients()
        group = self._groups(("shard",))
        self.sent_nbytes += buffer[1:].numel() * buffer.element_size()
        on_host = buffer.device.type == "cpu"
        numel = buffer.numel() if on_host else buffer.shape[1]
        received = pack.rooms.take(numel, buffer.dtype, buffer.device)
        received = received.view(-1, buffer.shape[1])
        return _Flight(pack, there, received, scatter_sum(buffer, received, group, self._lanes(("shard",))))

    def _land(self, flight: _Flight) -> None:
        """This rank's part is there; start to sum it over the other axes, if there are any."""
        if flight.landed:
            return
        flight.exchange.wait()
        part, flight.landed = flight.pack.sum_of(flight.received), True
        for buffer in flight.exchange.tensors:
            flight.pack.rooms.give(buffer)
        flight.received, flight.exchange = part, Exchange(None, ())
        others = flight.pack.others
        if others:
            group = self._groups(others)
            size = dist.get_world_size(group)
            nbytes = ring_nbytes(part, size)
            self.sent_nbytes += nbytes
            work = dist.all_reduce(part, group=group, async_op=True)
            flight.exchange = Exchange(self._lanes(others).start([work], nbytes), (part,))

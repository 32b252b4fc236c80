"""Sums of gradients over ranks, of which each rank gets its part: once a step, in one order on all ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tutti.runtime.shard.unit import Pack, Unit
from tutti.spec.words import AxisName

IN_FLIGHT = 2
"""Packs whose whole gradients may wait for their sums: they are what a step holds beside its own part."""

_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(slots=True, eq=False)
class _Flight:
    """A sum on its way. `buffer`: what is sent, then what the other ranks sent; `result`: this rank's part."""

    pack: Pack
    there: list[bool]
    buffer: torch.Tensor | None
    received: torch.Tensor | None
    result: torch.Tensor
    work: Any


class Sums:
    """`order`: units in the order in which their gradients leave; `groups`: process groups by axes."""

    def __init__(self, order: list[Unit], groups: Callable[[tuple[AxisName, ...]], Any]) -> None:
        self.order = order
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
            flight.work.wait()
            flight.pack.give_gradients(flight.result, flight.there)
        self._flights = []

    def _send(self, unit: Unit) -> None:
        for pack in unit.packs:
            if not any(one.shard.requires_grad for one in pack.parameters):
                continue
            waiting = [flight for flight in self._flights if flight.buffer is not None]
            for flight in waiting[: len(waiting) - IN_FLIGHT + 1]:
                self._land(flight)
            self._flights.append(self._start(pack))

    def _start(self, pack: Pack) -> _Flight:
        buffer, there = pack.take_gradients()
        group = self._groups(("shard",))
        self.sent_nbytes += buffer[1:].numel() * buffer.element_size()
        if buffer.device.type == "cpu":  # Gloo's own reduce-scatter takes two to three times as long
            received = torch.empty_like(buffer)
            work = dist.all_to_all_single(received, buffer, group=group, async_op=True)
            return _Flight(pack, there, buffer, received, buffer[0], work)
        result = torch.empty_like(buffer[0])
        work = _reduce_scatter(result, buffer.view(-1), group=group, async_op=True)
        return _Flight(pack, there, buffer, None, result, work)

    def _land(self, flight: _Flight) -> None:
        """This rank's part is there; start to sum it over the other axes, if there are any."""
        if flight.buffer is None:
            return
        flight.work.wait()
        if flight.received is not None:
            flight.result = flight.received.sum(0)
        flight.buffer = flight.received = None
        others = flight.pack.others
        if others:
            group = self._groups(others)
            size = dist.get_world_size(group)
            self.sent_nbytes += 2 * (size - 1) * flight.result.numel() * flight.result.element_size() // size
            flight.work = dist.all_reduce(flight.result, group=group, async_op=True)

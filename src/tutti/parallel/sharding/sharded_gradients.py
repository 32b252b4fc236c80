"""What of a model's states is divided, as the step and the optimizers see it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from tutti.comm.shared_memory import SharedMemoryCommunicator
from tutti.comm.traffic import CommHandle
from tutti.config.vocabulary import AxisName
from tutti.parallel.sharding.shard_collectives import Rows, ShardExchange, ShardGroup, addends, scatter_sum, start_sum
from tutti.parallel.sharding.sharded_unit import Pack, Unit


class CompressedSum(Protocol):
    """A sum in fewer bytes: see compressed/parts.py."""

    @property
    def sent_nbytes(self) -> int: ...

    def start(self) -> tuple[torch.Tensor, list[bool], CommHandle]: ...


class Shards:
    """Nothing is divided; what is, overrides. All ranks call the same methods in the same order."""

    @property
    def sent_nbytes(self) -> int:
        """Bytes that this rank has sent for parameters and gradients in the last step."""
        return 0

    def memory(self) -> list[torch.Tensor]:
        """Tensors without memory that a built model's parameters lie in."""
        return []

    def materialise(self, real: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> None:
        """Give those memory: `real` finds it; what computes does so on `device`."""

    def bind(self, optimizers: Iterable[Optimizer]) -> None:
        """Optimizers hold the model's parameters as they are now; check them, or give them their part."""

    def packs(self) -> list[Pack]:
        """Parameters whose gradients are summed into parts, together; in one order on all ranks and in all runs."""
        return []

    def sum_by(self, coded: Mapping[Pack, CompressedSum]) -> None:
        """Sum the gradients of these packs in fewer bytes."""

    def clear(self) -> None:
        """A step begins: gradients are none."""

    def begin(self) -> None:
        """The backward that comes is the step's last: sum gradients from here on."""

    def send(self) -> None:
        """Backward has returned: begin the sums that it has left out."""

    def finish(self) -> None:
        """Wait for all sums."""

    @contextmanager
    def whole_gradients(self, optimizer: Optimizer) -> Iterator[None]:
        """Inside, the optimizer's groups list every parameter whose gradient this rank holds."""
        yield

    def wholes(
        self, optimizer: Optimizer, of: Callable[[nn.Parameter], torch.Tensor | None]
    ) -> dict[nn.Parameter, torch.Tensor]:
        """By parameter whose state is divided: a tensor of its shape, whole on every rank. `of`: this rank's part, by
        what the optimizer has in the parameter's place; None: zeros. Collective.
        """
        return {}


MAX_PENDING_SUMS = 2
"""Packs whose whole gradients may wait for their sums: they are what a step holds beside its own part. In memory that
all ranks share one: its sum is a rank's own work, and sums over other axes, maybe between hosts, wait for it."""


@dataclass(slots=True, eq=False)
class _PendingSum:
    """A sum on its way. `there`: gradients this rank had; `received`: what is added up, and once landed, its part."""

    pack: Pack
    there: list[bool]
    received: Rows
    exchange: ShardExchange
    landed: bool = False


class Sums:
    """`order`: units in the order in which their gradients leave; `shard_groups`: by axes, who sums over them; `coded`:
    packs that are summed in fewer bytes.
    """

    def __init__(self, order: list[Unit], shard_groups: Mapping[tuple[AxisName, ...], ShardGroup]) -> None:
        self.order = order
        self.sent_nbytes = 0
        self.coded: Mapping[Pack, CompressedSum] = {}
        self._shard_groups = shard_groups
        self._ready: set[Unit] = set()
        self._next = 0
        self._pending_sums: list[_PendingSum] = []

    def open(self) -> None:
        """A step's last backward begins."""
        self._ready, self._next, self._pending_sums = set(), 0, []

    def complete(self, unit: Unit) -> None:
        """A unit's gradients are there: send all whose turn has come."""
        self._ready.add(unit)
        while self._next < len(self.order) and self.order[self._next] in self._ready:
            self._send(self.order[self._next])
            self._next += 1

    def send(self) -> None:
        """Send what is left."""
        for unit in self.order[self._next :]:
            self._send(unit)
        self._next = len(self.order)

    def finish(self) -> None:
        """Give every shard its gradient."""
        for handle in self._pending_sums:
            self._land(handle)
        for handle in self._pending_sums:
            handle.exchange.wait()
            assert isinstance(handle.received, torch.Tensor)
            handle.pack.give_gradients(handle.received, handle.there)
        self._pending_sums = []

    def _send(self, unit: Unit) -> None:
        for pack in unit.packs:
            if not any(one.shard.requires_grad for one in pack.parameters):
                continue
            waiting = [handle for handle in self._pending_sums if not handle.landed]
            most = (
                1
                if isinstance(self._shard_groups[("shard",)].communicator, SharedMemoryCommunicator)
                else MAX_PENDING_SUMS
            )
            for handle in waiting[: len(waiting) - most + 1]:
                self._land(handle)
            self._pending_sums.append(self._start(pack))

    def _start(self, pack: Pack) -> _PendingSum:
        if pack in self.coded:
            return self._start_coded(pack, self.coded[pack])
        shard_group = self._shard_groups[("shard",)]
        buffer, there = pack.take_gradients(shard_group)
        self.sent_nbytes += buffer[1:].numel() * buffer.element_size()
        received = pack.receiving(buffer, shard_group)
        exchange = scatter_sum(buffer, received, shard_group)
        return _PendingSum(pack, there, addends(buffer, received, shard_group), exchange)

    def _start_coded(self, pack: Pack, coded: CompressedSum) -> _PendingSum:
        """Its gradients are written in code at once: nothing whole waits."""
        self.sent_nbytes += coded.sent_nbytes
        received, there, handle = coded.start()
        return _PendingSum(pack, there, received, ShardExchange(handle), landed=True)

    def _land(self, handle: _PendingSum) -> None:
        """This rank's part is there; start to sum it over the other axes, if there are any."""
        if handle.landed:
            return
        handle.exchange.wait()
        part, handle.landed = handle.pack.sum_of(handle.received), True
        for buffer in handle.exchange.tensors:
            handle.pack.rooms.give(buffer)
        handle.received, handle.exchange = part, ShardExchange(None)
        others = handle.pack.others
        if others:
            handle.exchange, nbytes = start_sum(part, self._shard_groups[others])
            self.sent_nbytes += nbytes

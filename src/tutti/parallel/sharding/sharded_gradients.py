"""Sharded gradients, as the step and the optimizers see them."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from tutti.comm.shared_memory import SharedMemoryCommunicator
from tutti.comm.traffic import CommHandle
from tutti.config.vocabulary import AxisName
from tutti.errors import ScriptError
from tutti.parallel.sharding.shard_collectives import Rows, ShardExchange, ShardGroup, addends, scatter_sum, start_sum
from tutti.parallel.sharding.sharded_unit import Pack, Unit


class CompressedSum(Protocol):
    """A compressed reduce-scatter: see compressed/sharded_reduction.py."""

    @property
    def sent_nbytes(self) -> int: ...

    def start(self) -> tuple[torch.Tensor, list[bool], CommHandle]: ...


class Shards:
    """The interface of sharding; this base class shards nothing. All ranks call the same methods in the same order.

    Attributes:
        gathers_in_forward: ranks wait for each other inside forward.
        transports: what gradients are reduced through, for reports, where it is no transport of tutti's.
    """

    gathers_in_forward = False
    transports: tuple[str, ...] = ()

    @property
    def sent_nbytes(self) -> int:
        """Bytes that this rank has sent for parameters and gradients in the last step."""
        return 0

    def memory(self) -> list[torch.Tensor]:
        """Tensors without memory that the parameters of a model from `job.build` are views of."""
        return []

    def materialise(self, real: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> None:
        """Replace those tensors by what `real` returns for them; parameters compute on `device`."""

    def bind(self, optimizers: Iterable[Optimizer]) -> None:
        """Check the optimizers, or give them this rank's part, once they hold the model's present parameters."""

    def parts(self) -> dict[str, tuple[torch.Tensor, ...]]:
        """Tensors that modules hold in place of whole parameters, by the parameter's name."""
        return {}

    def whole_versions(self) -> dict[str, int]:
        """How often the whole parameters of each unit were written in place."""
        return {}

    def packs(self) -> list[Pack]:
        """Packs whose gradients are reduce-scattered, in one order on all ranks and in all runs."""
        return []

    def sum_by(self, coded: Mapping[Pack, CompressedSum]) -> None:
        """Reduce the gradients of these packs in compressed form."""

    def clear(self) -> None:
        """Forward and backward begin: count what is sent from here on."""

    def rest(self) -> None:
        """Free what is gathered, so that modules hold the shards."""

    def gather_for_loss(self, name: str) -> None:
        """Put the whole parameter of this name into its modules, because the loss reads it outside of their forward."""

    @contextmanager
    def loss_reads(self) -> Iterator[None]:
        """Within the context, `gather_for_loss` may be called, in a step or outside of it."""
        yield

    def begin(self) -> None:
        """The next backward is the step's last: reduce gradients from here on."""

    def send(self) -> None:
        """Backward has returned: start the reductions that have not begun."""

    def finish(self) -> None:
        """Wait for all reductions."""

    @contextmanager
    def whole_gradients(self, optimizer: Optimizer) -> Iterator[None]:
        """Within the context, the optimizer's groups list every parameter whose gradient this rank holds."""
        yield

    def wholes(
        self, optimizer: Optimizer, of: Callable[[nn.Parameter], torch.Tensor | None]
    ) -> dict[nn.Parameter, torch.Tensor]:
        """For each parameter with divided state, a tensor of its shape, gathered on every rank. Collective.

        `of` gives this rank's part for the tensor that the optimizer holds; None: zeros.
        """
        return {}


def uncompiled(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook, which torch.compile must not trace: it compiles what is between such hooks."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and its import takes seconds
        return hook
    return torch.compiler.disable(hook)  # type: ignore[no-any-return, no-untyped-call]


MAX_PENDING_SUMS = 2
"""Packs whose whole gradients may wait for their reduction; a step holds them beside its own part.

In memory that all ranks share it is one: the rank itself computes that sum, and reductions over other axes, perhaps
between hosts, wait for it.
"""


@dataclass(slots=True, eq=False)
class _PendingSum:
    """A reduction in progress.

    Attributes:
        there: the gradients that this rank had.
        received: the rows to add up; once they have arrived, this rank's part; None once that has left the device.
        landed: this rank's part has arrived.
        complete: it has also been reduced over the other axes.
    """

    pack: Pack
    there: list[bool]
    received: Rows | None
    exchange: ShardExchange
    landed: bool = False
    complete: bool = False


class Sums:
    """Reduce-scatters of a step's gradients.

    Attributes:
        order: units in the order in which their gradients are reduced.
        shard_groups: the ranks that reduce, by axes.
        coded: packs that are reduced in compressed form.
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
        """A unit's gradients are complete: start the reductions whose turn has come."""
        self._ready.add(unit)
        while self._next < len(self.order) and self.order[self._next] in self._ready:
            self._send(self.order[self._next])
            self._next += 1

    def check_all_sent(self) -> None:
        """Check that no gradient has arrived after its unit's reduction had begun.

        Raises:
            ScriptError: one has.
        """
        for unit in self.order[: self._next]:
            for parameter in unit.parameters:
                if parameter.whole.grad is not None:
                    raise ScriptError(
                        f"parameter {parameter.name!r} got another gradient after its block's backward had ended; use "
                        "torch.utils.checkpoint with use_reentrant=False, or sharding level 1"
                    )

    def send(self) -> None:
        """Start the remaining reductions."""
        for unit in self.order[self._next :]:
            self._send(unit)
        self._next = len(self.order)

    def finish(self) -> None:
        """Give every shard its gradient."""
        for handle in self._pending_sums:
            self._land(handle)
        for handle in self._pending_sums:
            self._complete(handle)
            assert handle.received is None or isinstance(handle.received, torch.Tensor)
            handle.pack.give_gradients(handle.received, handle.there)
        self._pending_sums = []

    def drain(self) -> None:
        """A backward has ended that is not the step's last: gradients of packs that nobody else adds to leave."""
        self.send()
        self.open()

    def _send(self, unit: Unit) -> None:
        for pack in unit.packs:
            if not any(parameter.shard.requires_grad for parameter in pack.parameters):
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
            if pack.leaves:
                for handle in self._pending_sums[: None if pack.degree == 1 and not pack.others else -most]:
                    self._land(handle)
                    self._complete(handle)

    def _start(self, pack: Pack) -> _PendingSum:
        if pack in self.coded:
            return self._start_coded(pack, self.coded[pack])
        shard_group = self._shard_groups[("shard",)]
        if pack.degree == 1 and not pack.others and all(p.whole.grad is None for p in pack.parameters):
            nothing = [False] * len(pack.parameters)
            return _PendingSum(pack, nothing, None, ShardExchange(None), landed=True, complete=True)
        buffer, there = pack.take_gradients(shard_group)
        if pack.degree == 1:
            return _PendingSum(pack, there, buffer, ShardExchange(None))
        self.sent_nbytes += buffer[1:].numel() * buffer.element_size()
        received = pack.receiving(buffer, shard_group)
        exchange = scatter_sum(buffer, received, shard_group)
        return _PendingSum(pack, there, addends(buffer, received, shard_group), exchange)

    def _start_coded(self, pack: Pack, coded: CompressedSum) -> _PendingSum:
        """Compress the pack's gradients at once, so that no whole gradient waits."""
        self.sent_nbytes += coded.sent_nbytes
        received, there, handle = coded.start()
        return _PendingSum(pack, there, received, ShardExchange(handle), landed=True)

    def _land(self, handle: _PendingSum) -> None:
        """This rank's part has arrived; start to reduce it over the other axes, if there are any."""
        if handle.landed:
            return
        handle.exchange.wait()
        assert handle.received is not None
        part, handle.landed = handle.pack.sum_of(handle.received), True
        for buffer in handle.exchange.tensors:
            handle.pack.rooms.give(buffer)
        handle.received, handle.exchange = part, ShardExchange(None)
        others = handle.pack.others
        if others:
            handle.exchange, nbytes = start_sum(part, self._shard_groups[others])
            self.sent_nbytes += nbytes

    def _complete(self, handle: _PendingSum) -> None:
        """Wait until this rank's part is reduced over the other axes; it leaves the device if the pack is offloaded."""
        if handle.complete:
            return
        handle.exchange.wait()
        handle.complete = True
        if handle.pack.leaves:
            assert isinstance(handle.received, torch.Tensor)
            handle.pack.take_away(handle.received, handle.there)
            handle.received = None

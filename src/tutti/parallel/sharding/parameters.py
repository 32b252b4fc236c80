"""Levels 2 and 3: parameters, gradients and optimizer state divided among the ranks of `shard`."""

from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from tutti.config.plan import ShardingPlan
from tutti.config.vocabulary import AxisName
from tutti.errors import ScriptError
from tutti.parallel.layout import Layout
from tutti.parallel.sharding.blocks import make_units
from tutti.parallel.sharding.elementwise import check_takes_parts
from tutti.parallel.sharding.exchange import Party
from tutti.parallel.sharding.passes import Passes
from tutti.parallel.sharding.shards import Shards
from tutti.parallel.sharding.sums import Coded, Sums
from tutti.parallel.sharding.unit import Pack, Unit


class Parameters(Shards):
    """Divided parameters: whole while a block computes, see Passes; their gradients are summed into parts, see Sums."""

    def __init__(self, model: nn.Module, layout: Layout, sharding: ShardingPlan) -> None:
        mesh = layout.mesh
        home = torch.device("cpu") if sharding.offload != "none" else None
        units, blocks = make_units(model, layout, home)
        self.layout, self.units = layout, units
        self._packs = [pack for unit in units for pack in unit.packs]  # `units` will change its order
        self._sent_nbytes = 0
        self._learned = False
        self._passes = Passes(model, units, blocks, keep=sharding.level == 2)
        self._passes.party = Party.meet(mesh.new_group("shard"), layout.channel("parameters", "shard"))
        self._sums = Sums(self._sending_order(), self._parties())

    @property
    def sent_nbytes(self) -> int:
        return self._sent_nbytes

    def memory(self) -> list[torch.Tensor]:
        return [pack.flat for unit in self.units for pack in unit.packs if pack.flat.is_meta]

    def materialise(self, real: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> None:
        for unit in self.units:
            for pack in unit.packs:
                if pack.flat.is_meta:
                    pack.materialise(real(pack.flat), device)
            unit.show("shard")

    def packs(self) -> list[Pack]:
        return self._packs

    def sum_by(self, coded: Mapping[Pack, Coded]) -> None:
        self._sums.coded = coded

    def bind(self, optimizers: Iterable[Optimizer]) -> None:
        for optimizer in optimizers:
            check_takes_parts(optimizer)

    def begin(self) -> None:
        if not self._learned and self._devices:
            self._learn(self._devices[0])
        self._sums.open()
        self._passes.complete = self._sums.complete

    def send(self) -> None:
        self._passes.complete = None
        self._passes.release()
        for unit in self.units:
            for one in unit.parameters:
                if one.shard.grad is not None:
                    raise ScriptError(
                        f"the loss uses parameter {one.name!r} outside of the modules' forward, where a rank sees only "
                        "its part; use the optimizer's weight decay instead of a penalty, or sharding level 1"
                    )
        self._sums.send()

    def finish(self) -> None:
        self._sums.finish()
        self._passes.party.settle()  # who is behind may still read what the update will change
        self._sent_nbytes = self._passes.sent_nbytes + self._sums.sent_nbytes
        self._passes.sent_nbytes = self._sums.sent_nbytes = 0

    @property
    def _devices(self) -> list[torch.device]:
        return [pack.device for unit in self.units for pack in unit.packs]

    def _parties(self) -> dict[tuple[AxisName, ...], Party]:
        """Who sums gradients: the shards, and for each pack's other axes those; all ranks meet them in one order."""
        layout, mesh = self.layout, self.layout.mesh
        parties: dict[tuple[AxisName, ...], Party] = {}
        parties[("shard",)] = Party.meet(mesh.new_group("shard"), layout.channel("gradients", "shard"))
        for axes in sorted({pack.others for unit in self.units for pack in unit.packs if pack.others}):
            parties[axes] = Party.meet(mesh.group(*axes), layout.channel("gradients", *axes))
        return parties

    def _sending_order(self) -> list[Unit]:
        """What backward reaches first leaves first; what lies outside of blocks is complete last."""
        return [*self._passes.units[:0:-1], self._passes.units[0]]

    def _learn(self, device: torch.device) -> None:
        """After the first forward: take the order in which the first of all ranks that exchange has run its units."""
        mesh, count = self.layout.mesh, len(self.units)
        others = {axis for unit in self.units for pack in unit.packs for axis in pack.others}
        group, first = mesh.group("shard", *others), mesh.ranks("shard", *others)[0]
        order = torch.tensor(self._passes.seen())
        repeats = torch.tensor([unit.repeats for unit in self._passes.units], dtype=torch.int64)
        both = torch.cat([order, repeats]).to(device)
        dist.broadcast(both[:count], src=first, group=group)
        dist.all_reduce(both[count:], dist.ReduceOp.MAX, group=group)
        self._passes.reorder(both[:count].tolist(), [bool(flag) for flag in both[count:].tolist()])
        self._sums.order = self._sending_order()
        self._learned = True

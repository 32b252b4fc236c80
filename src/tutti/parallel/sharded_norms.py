"""Norms of global tensors on sharded ranks, for optimizers that scale steps by norms (LARS, LAMB, NVLAMB, NovoGrad)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.comm.point_to_point import ring_all_reduce_nbytes
from tutti.comm.world import World
from tutti.optim.large_batch import LAMB, NormScaledOptimizer
from tutti.parallel.layout import Layout, to_local

_TURNS = 2
"""The most norms of one tensor in a step: that of the parameter, and that of its gradient or step."""


class WholeNorms:
    """Adds up the squared norms of one optimizer's shards over all ranks; each shard counts once.

    Args:
        layout: the layout, with owners assigned.
        world: all ranks.
        names: this rank's parameters -> names in the user's model.
        cut: names of sharded tensors, equal on all ranks.
    """

    def __init__(self, layout: Layout, world: World, names: dict[nn.Parameter, str], cut: Sequence[str]) -> None:
        self._layout, self._world = layout, world
        self._counted = {p: layout.counts_state(name) for p, name in names.items()}
        places = {name: place for place, name in enumerate(cut)}
        first = {p: layout.first_name(name) for p, name in names.items()}
        self._places = {p: places[name] for p, name in first.items() if name in places}
        self._count = len(cut)

    @property
    def parted(self) -> bool:
        """Whether any tensor is sharded."""
        return self._count > 0

    def over_parts(self, squares: Tensor, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Return the squared norms of whole tensors. Collective, also for a rank that has nothing to add.

        Args:
            squares: (n,), squared norms of this rank's shards.
            parameters: the n parameters that they belong to.
        """
        sums = torch.zeros(_TURNS * self._count, dtype=torch.float64, device=self._world.device)
        turns: dict[nn.Parameter, int] = {}
        positions: list[tuple[int, int]] = []
        for index, parameter in enumerate(parameters):
            turn = turns[parameter] = turns.get(parameter, -1) + 1
            if parameter in self._places:
                positions.append((index, turn * self._count + self._places[parameter]))
                if self._counted[parameter]:
                    sums[positions[-1][1]] += squares[index].to(sums.device)
        self._sum(sums)
        whole = squares.clone()
        for index, place in positions:
            whole[index] = sums[place]
        return whole

    def global_norm(self, parameters: Sequence[nn.Parameter]) -> float:
        """Return the norm of all gradients, each shard counted once over all ranks. Collective."""
        total = torch.zeros((), dtype=torch.float64, device=self._world.device)
        for parameter in parameters:
            if parameter.grad is not None and self._counted[parameter]:
                total += to_local(parameter.grad).detach().double().square().sum().to(total.device)
        return math.sqrt(float(self._sum(total)))

    def _sum(self, numbers: Tensor) -> Tensor:
        with self._layout.channel("scalars").waiting(ring_all_reduce_nbytes(numbers, self._world.world_size)):
            return self._world.sum(numbers)


def bind_norms(optimizers: Sequence[Optimizer], model: nn.Module, layout: Layout, world: World) -> None:
    """Give optimizers that scale by norms the norms of global tensors, where tensors are sharded. Collective.

    The layout must have its owners assigned.
    """
    known = layout.state_names(model, optimizers)
    for number, optimizer in enumerate(optimizers):
        if not isinstance(optimizer, NormScaledOptimizer):
            continue
        norms = whole_norms(known[number], layout, world)
        if norms is None:
            continue
        if norms.parted:
            optimizer.over_parts = norms.over_parts
        if isinstance(optimizer, LAMB):
            optimizer.global_norm = norms.global_norm


def whole_norms(names: dict[nn.Parameter, str], layout: Layout, world: World) -> WholeNorms | None:
    """Return the norms over the shards of an optimizer's parameters. Collective.

    Args:
        names: this rank's parameters -> names in the user's model.
        layout: the layout, with owners assigned.
        world: all ranks.

    Returns:
        None if every rank holds all of these parameters whole.
    """
    here = {layout.first_name(name): bool(layout.state_shard_of(name).cuts) for name in names.values()}
    everyone = world.gather(here)
    if all(theirs == here for theirs in everyone) and not any(here.values()):
        return None
    sharded = {name for theirs in everyone for name, is_cut in theirs.items() if is_cut}
    return WholeNorms(layout, world, names, [name for name in layout.names if name in sharded])

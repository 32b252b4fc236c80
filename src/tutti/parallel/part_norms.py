"""Norms of whole tensors for optimizers that step by them (LARS, LAMB, NVLAMB, NovoGrad), where ranks hold parts."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.comm.point_to_point import ring_all_reduce_nbytes
from tutti.comm.world import World
from tutti.optim.large_batch import LAMB, ByNorms
from tutti.parallel.layout import Layout, local

_TURNS = 2
"""Norms of one tensor in a step at most: of the parameter, and of its gradient or step."""


class WholeNorms:
    """Adds up, over all ranks, the squared norms of one optimizer's parts; each part counts once.

    `names`: this rank's parameters by the name in the user's model; `cut`: names of tensors of which some rank holds a
    part only, the same and in the same order on all ranks.
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
        """Whether some rank holds a part of a tensor only."""
        return self._count > 0

    def over_parts(self, squares: Tensor, parameters: Sequence[nn.Parameter]) -> Tensor:
        """See large_batch.OverParts. Collective: also where this rank has nothing to add."""
        sums = torch.zeros(_TURNS * self._count, dtype=torch.float64, device=self._world.device)
        turns: dict[nn.Parameter, int] = {}
        found: list[tuple[int, int]] = []
        for index, parameter in enumerate(parameters):
            turn = turns[parameter] = turns.get(parameter, -1) + 1
            if parameter in self._places:
                found.append((index, turn * self._count + self._places[parameter]))
                if self._counted[parameter]:
                    sums[found[-1][1]] += squares[index].to(sums.device)
        self._sum(sums)
        whole = squares.clone()
        for index, place in found:
            whole[index] = sums[place]
        return whole

    def global_norm(self, parameters: Sequence[nn.Parameter]) -> float:
        """See large_batch.GlobalNorm. Collective."""
        total = torch.zeros((), dtype=torch.float64, device=self._world.device)
        for parameter in parameters:
            if parameter.grad is not None and self._counted[parameter]:
                total += local(parameter.grad).detach().double().square().sum().to(total.device)
        return math.sqrt(float(self._sum(total)))

    def _sum(self, numbers: Tensor) -> Tensor:
        with self._layout.channel("scalars").waiting(ring_all_reduce_nbytes(numbers, self._world.world_size)):
            return self._world.sum(numbers)


def bind_norms(optimizers: Sequence[Optimizer], model: nn.Module, layout: Layout, world: World) -> None:
    """Give optimizers that step by norms those of whole tensors, where ranks hold different parts. Collective.

    The layout is settled.
    """
    known = layout.state_names(model, optimizers)
    for number, optimizer in enumerate(optimizers):
        if not isinstance(optimizer, ByNorms):
            continue
        norms = whole_norms(known[number], layout, world)
        if norms is None:
            continue
        if norms.parted:
            optimizer.over_parts = norms.over_parts
        if isinstance(optimizer, LAMB):
            optimizer.global_norm = norms.global_norm


def whole_norms(names: dict[nn.Parameter, str], layout: Layout, world: World) -> WholeNorms | None:
    """Of an optimizer with parameters of these `names`; None where all ranks hold all of them. Collective."""
    mine = {layout.first_name(name): bool(layout.state_of(name).cuts) for name in names.values()}
    everyone = world.gather(mine)
    if all(theirs == mine for theirs in everyone) and not any(mine.values()):
        return None
    parted = {name for theirs in everyone for name, is_cut in theirs.items() if is_cut}
    return WholeNorms(layout, world, names, [name for name in layout.names if name in parted])

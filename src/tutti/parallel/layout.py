"""The layout: which part of every parameter and buffer this rank holds, and over which ranks its gradient is summed.

Mechanisms write it while they take a model apart; whatever needs whole tensors (checkpoints, norms, verification)
reads it and need not know the mechanisms. Names are those of the user's model; a mechanism keeps them.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from tutti.comm.point_to_point import ring_all_reduce_nbytes
from tutti.comm.traffic import CommChannel, Traffic
from tutti.comm.world import World
from tutti.config.vocabulary import DATA_AXES, AxisName, TrafficKind
from tutti.parallel.mesh import Mesh

Range = tuple[int, int]
"""(start, stop) along a dim of the whole tensor."""

SUMMED: tuple[AxisName, ...] = (*DATA_AXES, "context")
"""Axes over whose ranks gradients differ by default, because they saw different samples or tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A tensor's part along one dim: its global `ranges`, which lie one behind another in the local tensor."""

    dim: int
    ranges: tuple[Range, ...]

    @property
    def size(self) -> int:
        """Local size along the dim."""
        return sum(stop - start for start, stop in self.ranges)

    def narrowed(self, start: int, stop: int) -> "Cut":
        """The part start .. stop - 1 (local positions) of this part."""
        ranges, offset = [], 0
        for low, high in self.ranges:
            begin, end = max(start - offset, 0), min(stop - offset, high - low)
            if begin < end:
                ranges.append((low + begin, low + end))
            offset += high - low
        return Cut(dim=self.dim, ranges=tuple(ranges))


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What this rank holds of one tensor. `shape`: of the whole; `cuts`: at most one a dim; `sums`: axes over which
    its gradient is summed.
    """

    shape: tuple[int, ...]
    cuts: tuple[Cut, ...] = ()
    sums: tuple[AxisName, ...] = SUMMED

    def cut(self, dim: int, *ranges: Range) -> "Held":
        """Also cut along `dim`; ranges are local positions where the dim was cut before, global ones otherwise."""
        before = next((cut for cut in self.cuts if cut.dim == dim), None)
        if before is None:
            new = Cut(dim=dim, ranges=tuple(ranges))
        else:
            parts = [before.narrowed(start, stop).ranges for start, stop in ranges]
            new = Cut(dim=dim, ranges=tuple(part for some in parts for part in some))
        others = tuple(cut for cut in self.cuts if cut.dim != dim)
        return replace(self, cuts=tuple(sorted((*others, new), key=lambda cut: cut.dim)))

    @property
    def local_shape(self) -> tuple[int, ...]:
        sizes = list(self.shape)
        for cut in self.cuts:
            sizes[cut.dim] = cut.size
        return tuple(sizes)

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole tensor (a view where one range is cut)."""
        part = whole
        for cut in self.cuts:
            pieces = [part.narrow(cut.dim, start, stop - start) for start, stop in cut.ranges]
            if not pieces:
                part = part.narrow(cut.dim, 0, 0)
            else:
                part = pieces[0] if len(pieces) == 1 else torch.cat(pieces, cut.dim)
        return part

    def put(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Write this part into the whole tensor."""
        whole[self._grid(whole.device)] = part.to(whole.dtype)

    def _grid(self, device: torch.device) -> Any:
        """Indices of the part, one tensor a dim, that broadcast against each other."""
        if not self.shape:
            return ...
        rows = []
        for dim, size in enumerate(self.shape):
            cut = next((cut for cut in self.cuts if cut.dim == dim), None)
            parts = [torch.arange(a, b, device=device) for a, b in (cut.ranges if cut else ((0, size),))]
            index = torch.cat(parts) if parts else torch.arange(0, device=device)
            rows.append(index.reshape([-1 if d == dim else 1 for d in range(len(self.shape))]))
        return tuple(rows)


@dataclass(slots=True)
class OptimizerLayout:
    """What optimizers hold where it is not simply the model's parameters.

    `groups[optimizer][group]`: names in the user's order, also of parameters that other ranks hold; `held`: how the
    state of a parameter is cut, where it is cut otherwise than the parameter; `stand_ins`: parameters that are not the
    model's, by the name they stand for; `loaded`: called after parameters got new values from a file, so that copies
    of them (stand-ins, master weights) follow.
    """

    groups: list[list[list[str]]] = field(default_factory=list)
    held: dict[str, Held] = field(default_factory=dict)
    stand_ins: dict[nn.Parameter, str] = field(default_factory=dict)
    loaded: list[Callable[[], None]] = field(default_factory=list)
    sole: dict[str, bool] = field(default_factory=dict)


@dataclass(slots=True)
class Layout:
    """Every parameter and buffer of the model by its name in the user's model, as this rank holds it.

    `held`: what is not whole on every rank, or is summed otherwise; `names`: every name and whole shape of the user's
    model, in its order, also of tensors that other ranks hold; `tied`: groups of names that are one tensor; `states`:
    the same of the optimizers' state; `traffic`: what is exchanged with other ranks; `parameters`: how many values all
    ranks' parameters have, tied ones once.
    """

    mesh: Mesh
    names: dict[str, tuple[int, ...]]
    tied: list[list[str]] = field(default_factory=list)
    held: dict[str, Held] = field(default_factory=dict)
    sole: dict[str, bool] = field(default_factory=dict)
    states: OptimizerLayout = field(default_factory=OptimizerLayout)
    traffic: Traffic = field(default_factory=Traffic)
    parameters: int = 0

    @classmethod
    def of(cls, model: nn.Module, mesh: Mesh, optimizers: Iterable[Optimizer] = ()) -> "Layout":
        """The layout of a model that no mechanism has touched: everything whole, everywhere."""
        same: dict[int, list[str]] = {}
        for name, tensor in _all(model):
            same.setdefault(id(tensor), []).append(name)
        first = {key: names[0] for key, names in same.items()}
        groups = [[[first[id(p)] for p in group["params"]] for group in one.param_groups] for one in optimizers]
        return cls(
            mesh,
            {name: tuple(tensor.shape) for name, tensor in _all(model)},
            [names for names in same.values() if len(names) > 1],
            states=OptimizerLayout(groups=groups),
            parameters=sum(parameter.numel() for parameter in model.parameters()),
        )

    def channel(self, carried: TrafficKind, *axes: AxisName) -> CommChannel:
        """Where exchanges over `axes` are counted and timed (all of the mesh's, if none are named)."""
        return self.traffic.channel(carried, [axis for axis in self.mesh.degrees if not axes or axis in axes])

    def of_name(self, name: str) -> Held:
        """How the tensor called `name` is held here."""
        return self.held.get(name) or Held(shape=self.names[name])

    def cut(self, name: str, dim: int, *ranges: Range) -> None:
        """Note that this rank holds only `ranges` of `name` along `dim` (see Held.cut)."""
        for one in self._aliases(name):
            self.held[one] = self.of_name(one).cut(dim, *ranges)

    def sum_over(self, name: str, axes: Iterable[AxisName]) -> None:
        """Note over which axes the gradient of `name` is summed."""
        for one in self._aliases(name):
            self.held[one] = replace(self.of_name(one), sums=tuple(axes))

    def state_of(self, name: str) -> Held:
        """How the optimizer's state of the parameter called `name` is held here, where its shape is the parameter's."""
        return self.states.held.get(name) or self.of_name(name)

    def cut_state(self, name: str, dim: int, *ranges: Range) -> None:
        """Note that this rank's optimizer holds only `ranges` of the state of `name` (see Held.cut); the parameter's
        own cuts are included, so `ranges` are positions in this rank's part of the parameter where it is cut."""
        for one in self._aliases(name):
            self.states.held[one] = self.state_of(one).cut(dim, *ranges)

    def settle(self, model: nn.Module, world: World, optimizers: Iterable[Optimizer] = ()) -> None:
        """After all mechanisms: find out which rank counts each part (the first that holds it). Collective."""
        mine = [(name, self._aliases(name)[0], self.of_name(name).cuts) for name, _ in local_tensors(model)]
        names = [name for some in self.state_names(model, optimizers).values() for name in some.values()]
        states = [(name, self._aliases(name)[0], self.state_of(name).cuts) for name in names]
        owner: dict[Any, int] = {}
        for rank, theirs in enumerate(world.gather(([part[1:] for part in mine], [part[1:] for part in states]))):
            for kind, parts in enumerate(theirs):
                for part in parts:
                    owner.setdefault((kind, *part), rank)
        self.sole = {part[0]: owner[(0, *part[1:])] == world.rank for part in mine}
        self.states.sole = {part[0]: owner[(1, *part[1:])] == world.rank for part in states}

    def state_names(self, model: nn.Module, optimizers: Iterable[Optimizer]) -> dict[int, dict[nn.Parameter, str]]:
        """By optimizer: the name in the user's model of every parameter that it holds on this rank."""
        known = {p: name for name, p in model.named_parameters()} | self.states.stand_ins
        return {
            index: {p: known[p] for group in one.param_groups for p in group["params"] if p in known}
            for index, one in enumerate(optimizers)
        }

    def counts(self, name: str) -> bool:
        """Whether this rank is the one whose copy of the part counts: for norms, and for writing it to disk."""
        return self.sole.get(name, self.mesh.rank == 0)

    def counts_state(self, name: str) -> bool:
        """Whether this rank's copy of the optimizer's state of `name` is the one that is written to disk."""
        return self.states.sole.get(name, self.counts(name))

    def first_name(self, name: str) -> str:
        """The name under which a tied tensor is known; `name` itself where nothing is tied."""
        return self._aliases(name)[0]

    def _aliases(self, name: str) -> list[str]:
        return next((names for names in self.tied if name in names), [name])


def local_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every parameter and persistent buffer on this rank, tied ones once."""
    persistent = set(model.state_dict(keep_vars=True))
    yield from model.named_parameters()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in persistent)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor: itself, or what a DTensor holds here."""
    part = getattr(tensor, "to_local", None)
    return tensor if part is None else part()


def gather_whole(layout: Layout, world: World, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Whole tensors from every rank's `parts` (by name, as held), on every rank's CPU. For small models and tests."""
    dense = {name: part.to_dense() if part.is_sparse else part for name, part in parts.items()}
    mine = {name: (layout.of_name(name), part.detach().cpu()) for name, part in dense.items() if layout.counts(name)}
    wholes: dict[str, torch.Tensor] = {}
    for theirs in world.gather(mine):
        for name, (held, part) in theirs.items():
            if name not in wholes:
                wholes[name] = torch.zeros(held.shape, dtype=part.dtype)
            held.put(wholes[name], part)
    return wholes


def norm_squared(layout: Layout, named: Iterable[tuple[str, torch.Tensor]], device: torch.device) -> torch.Tensor:
    """Sum of squares over all ranks' parts, every part counted once; float64, the same on every rank."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for name, tensor in named:
        if layout.counts(name):
            part = local(tensor)
            values = part.coalesce().values() if part.is_sparse else part
            total += torch.linalg.vector_norm(values).double() ** 2
    if layout.mesh.world_size > 1:
        with layout.channel("scalars").waiting(ring_all_reduce_nbytes(total, layout.mesh.world_size)):
            dist.all_reduce(total)
    return total


def _all(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)

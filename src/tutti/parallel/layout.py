"""The layout: this rank's shard of every parameter and buffer, and the axes that its gradient is reduced over.

Mechanisms of parallelism write it while they divide a model. Checkpoints, norms and verification read it, so they need
not know the mechanisms. Names are those of the user's model.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
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
"""(start, stop) along a dim of the global tensor."""

GRADIENT_AXES: tuple[AxisName, ...] = (*DATA_AXES, "context")
"""Axes that gradients are reduced over by default: their ranks compute different samples or tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A tensor's part along one dim: `ranges` of the global tensor, concatenated in the local tensor."""

    dim: int
    ranges: tuple[Range, ...]

    @property
    def size(self) -> int:
        """Local size along the dim."""
        return sum(stop - start for start, stop in self.ranges)

    def narrowed(self, start: int, stop: int) -> "Cut":
        """Return the part from `start` to `stop` (local positions) of this part."""
        ranges, offset = [], 0
        for low, high in self.ranges:
            begin, end = max(start - offset, 0), min(stop - offset, high - low)
            if begin < end:
                ranges.append((low + begin, low + end))
            offset += high - low
        return Cut(dim=self.dim, ranges=tuple(ranges))


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShard:
    """This rank's shard of one tensor.

    Attributes:
        shape: shape of the global tensor.
        cuts: at most one for each dim; a dim without one is whole.
        sums: axes that the gradient is reduced over.
    """

    shape: tuple[int, ...]
    cuts: tuple[Cut, ...] = ()
    sums: tuple[AxisName, ...] = GRADIENT_AXES

    def cut(self, dim: int, *ranges: Range) -> "TensorShard":
        """Cut further along `dim`.

        Args:
            dim: the dim to cut.
            ranges: the parts to keep: local positions if the dim is already cut, otherwise global ones.
        """
        before = next((cut for cut in self.cuts if cut.dim == dim), None)
        if before is None:
            new = Cut(dim=dim, ranges=tuple(ranges))
        else:
            nested = [before.narrowed(start, stop).ranges for start, stop in ranges]
            new = Cut(dim=dim, ranges=tuple(part for parts in nested for part in parts))
        others = tuple(cut for cut in self.cuts if cut.dim != dim)
        return replace(self, cuts=tuple(sorted((*others, new), key=lambda cut: cut.dim)))

    @property
    def local_shape(self) -> tuple[int, ...]:
        sizes = list(self.shape)
        for cut in self.cuts:
            sizes[cut.dim] = cut.size
        return tuple(sizes)

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this shard of a global tensor; a view if each cut has one range."""
        part = whole
        for cut in self.cuts:
            pieces = [part.narrow(cut.dim, start, stop - start) for start, stop in cut.ranges]
            if not pieces:
                part = part.narrow(cut.dim, 0, 0)
            else:
                part = pieces[0] if len(pieces) == 1 else torch.cat(pieces, cut.dim)
        return part

    def put(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Write this shard into a global tensor."""
        whole[self._grid(whole.device)] = part.to(whole.dtype)

    def _grid(self, device: torch.device) -> Any:
        """Indices of the shard, one tensor for each dim, that broadcast against each other."""
        if not self.shape:
            return ...
        rows = []
        for dim, size in enumerate(self.shape):
            cut = next((cut for cut in self.cuts if cut.dim == dim), None)
            parts = [torch.arange(a, b, device=device) for a, b in (cut.ranges if cut else ((0, size),))]
            index = torch.cat(parts) if parts else torch.arange(0, device=device)
            rows.append(index.reshape([-1 if d == dim else 1 for d in range(len(self.shape))]))
        return tuple(rows)


def _allocate(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype)


@dataclass(slots=True)
class OptimizerLayout:
    """What the optimizers hold, where it differs from the model's parameters.

    Attributes:
        groups: parameter names by optimizer and group, in the user's order, including parameters on other ranks.
        shards: shards of optimizer state that is cut differently from its parameter, by name.
        substitutes: parameters that the optimizer holds in place of the model's -> the model's name.
        after_load: called after parameters were loaded from a file, to update copies (substitutes, master weights).
        sole: whether this rank's copy of the state is the one that is written, by name.
        allocate: (shape, dtype) -> where the state of a checkpoint is read to.
    """

    groups: list[list[list[str]]] = field(default_factory=list)
    shards: dict[str, TensorShard] = field(default_factory=dict)
    substitutes: dict[nn.Parameter, str] = field(default_factory=dict)
    after_load: list[Callable[[], None]] = field(default_factory=list)
    sole: dict[str, bool] = field(default_factory=dict)
    allocate: Callable[[Sequence[int], torch.dtype], torch.Tensor] = _allocate


@dataclass(slots=True)
class Layout:
    """This rank's shards of all parameters and buffers, by name in the user's model.

    Attributes:
        mesh: the mesh of the run.
        names: global shape of every parameter and buffer, in the model's order, including those on other ranks.
        tied: groups of names that denote one tensor.
        shards: tensors that are not whole on every rank, or whose gradient is not reduced over GRADIENT_AXES.
        sole: whether this rank's copy is the one that counts, by name.
        states: the same for optimizer state.
        traffic: accounting of communication.
        parameters: number of values in the parameters of all ranks; tied ones count once.
    """

    mesh: Mesh
    names: dict[str, tuple[int, ...]]
    tied: list[list[str]] = field(default_factory=list)
    shards: dict[str, TensorShard] = field(default_factory=dict)
    sole: dict[str, bool] = field(default_factory=dict)
    states: OptimizerLayout = field(default_factory=OptimizerLayout)
    traffic: Traffic = field(default_factory=Traffic)
    parameters: int = 0

    @classmethod
    def of(cls, model: nn.Module, mesh: Mesh, optimizers: Iterable[Optimizer] = ()) -> "Layout":
        """Return the layout of an undivided model: every tensor is whole on every rank."""
        same: dict[int, list[str]] = {}
        for name, tensor in _all(model):
            same.setdefault(id(tensor), []).append(name)
        first = {key: names[0] for key, names in same.items()}
        groups = [[[first[id(p)] for p in group["params"]] for group in o.param_groups] for o in optimizers]
        return cls(
            mesh,
            {name: tuple(tensor.shape) for name, tensor in _all(model)},
            [names for names in same.values() if len(names) > 1],
            states=OptimizerLayout(groups=groups),
            parameters=sum(parameter.numel() for parameter in model.parameters()),
        )

    def channel(self, carried: TrafficKind, *axes: AxisName) -> CommChannel:
        """Return the accounting channel for communication over `axes`, or over all axes if none are named."""
        return self.traffic.channel(carried, [axis for axis in self.mesh.degrees if not axes or axis in axes])

    def shard_of(self, name: str) -> TensorShard:
        """Return this rank's shard of the tensor called `name`."""
        return self.shards.get(name) or TensorShard(shape=self.names[name])

    def cut(self, name: str, dim: int, *ranges: Range) -> None:
        """Record that this rank holds only `ranges` of `name` along `dim` (see TensorShard.cut)."""
        for alias in self._aliases(name):
            self.shards[alias] = self.shard_of(alias).cut(dim, *ranges)

    def set_reduce_axes(self, name: str, axes: Iterable[AxisName]) -> None:
        """Record the axes that the gradient of `name` is reduced over."""
        for alias in self._aliases(name):
            self.shards[alias] = replace(self.shard_of(alias), sums=tuple(axes))

    def state_shard_of(self, name: str) -> TensorShard:
        """Return this rank's shard of optimizer state that has the shape of the parameter called `name`."""
        return self.states.shards.get(name) or self.shard_of(name)

    def cut_state_of(self, name: str, dim: int, *ranges: Range) -> None:
        """Record that this rank's optimizer holds only `ranges` of the state of `name` along `dim`.

        Ranges are positions in this rank's shard of the parameter if it is cut along `dim` (see TensorShard.cut).
        """
        for alias in self._aliases(name):
            self.states.shards[alias] = self.state_shard_of(alias).cut(dim, *ranges)

    def assign_owners(self, model: nn.Module, world: World, optimizers: Iterable[Optimizer] = ()) -> None:
        """Make the first rank that holds a shard its owner. Collective; called after all mechanisms."""
        parameter_parts = [(name, self._aliases(name)[0], self.shard_of(name).cuts) for name, _ in local_tensors(model)]
        names = [
            name for of_optimizer in self.state_names(model, optimizers).values() for name in of_optimizer.values()
        ]
        states = [(name, self._aliases(name)[0], self.state_shard_of(name).cuts) for name in names]
        owner: dict[Any, int] = {}
        for rank, theirs in enumerate(
            world.gather(([part[1:] for part in parameter_parts], [part[1:] for part in states]))
        ):
            for kind, parts in enumerate(theirs):
                for part in parts:
                    owner.setdefault((kind, *part), rank)
        self.sole = {part[0]: owner[(0, *part[1:])] == world.rank for part in parameter_parts}
        self.states.sole = {part[0]: owner[(1, *part[1:])] == world.rank for part in states}

    def state_names(self, model: nn.Module, optimizers: Iterable[Optimizer]) -> dict[int, dict[nn.Parameter, str]]:
        """Return, by optimizer, the parameters that it holds on this rank with their names in the user's model."""
        known = {p: name for name, p in model.named_parameters()} | self.states.substitutes
        return {
            index: {p: known[p] for group in optimizer.param_groups for p in group["params"] if p in known}
            for index, optimizer in enumerate(optimizers)
        }

    def counts(self, name: str) -> bool:
        """Return whether this rank owns the shard of `name`: it counts the shard in norms and writes it to disk."""
        return self.sole.get(name, self.mesh.rank == 0)

    def counts_state(self, name: str) -> bool:
        """Return whether this rank writes the optimizer state of `name` to disk."""
        return self.states.sole.get(name, self.counts(name))

    def first_name(self, name: str) -> str:
        """Return the first name of a tied tensor; `name` itself if it is not tied."""
        return self._aliases(name)[0]

    def _aliases(self, name: str) -> list[str]:
        return next((names for names in self.tied if name in names), [name])


def local_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for every parameter and persistent buffer on this rank, tied parameters once."""
    yield from model.named_parameters()
    passing = {
        f"{path}.{key}" if path else key
        for path, module in model.named_modules(remove_duplicate=False)
        for key in module._non_persistent_buffers_set
    }
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name not in passing)


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor: the tensor itself, or the local tensor of a DTensor."""
    part = getattr(tensor, "to_local", None)
    return tensor if part is None else part()


def gather_whole(layout: Layout, world: World, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gather the global tensors to every rank's CPU. Collective; for small models and tests.

    Args:
        layout: the layout.
        world: all ranks.
        parts: this rank's shards by name.

    Returns:
        The global tensors by name.
    """
    dense = {name: part.to_dense() if part.is_sparse else part for name, part in parts.items()}
    owned = {name: (layout.shard_of(name), part.detach().cpu()) for name, part in dense.items() if layout.counts(name)}
    wholes: dict[str, torch.Tensor] = {}
    for theirs in world.gather(owned):
        for name, (shards, part) in theirs.items():
            if name not in wholes:
                wholes[name] = torch.zeros(shards.shape, dtype=part.dtype)
            shards.put(wholes[name], part)
    return wholes


def square_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of this rank's part, a 0-d float64 tensor; sparse tensors count each row once."""
    part = to_local(tensor)
    values = part.coalesce().values() if part.is_sparse else part
    squared: torch.Tensor = torch.linalg.vector_norm(values).double() ** 2
    return squared


def norm_squared(layout: Layout, named: Iterable[tuple[str, torch.Tensor]], device: torch.device) -> torch.Tensor:
    """Return the sum of squares over the shards of all ranks, each counted once. Collective.

    Args:
        layout: the layout.
        named: names and tensors of this rank.
        device: where the result is.

    Returns:
        A 0-d float64 tensor, equal on all ranks.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for name, tensor in named:
        if layout.counts(name):
            total += square_of(tensor)
    if layout.mesh.world_size > 1:
        with layout.channel("scalars").waiting(ring_all_reduce_nbytes(total, layout.mesh.world_size)):
            dist.all_reduce(total)
    return total


def _all(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)

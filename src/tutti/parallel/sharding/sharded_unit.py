"""A unit: the parameters of one block, divided among ranks at rest, gathered whole while the block computes.

Three tensors stand for a parameter and take turns in its module: its shard (at rest: optimizers hold it), the whole
(while the block computes; its memory is freed in between, and the tensors that autograd saved come back with it), and
one without memory (inside a forward pass, until the block's turn: who reaches for it fails and computes nothing wrong).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

import torch
from torch import nn

from tutti.config.vocabulary import AxisName
from tutti.parallel.layout import TensorShard
from tutti.parallel.mesh import Mesh
from tutti.parallel.sharding.gather_buffers import Memory, Rooms, memory_of
from tutti.parallel.sharding.shard_collectives import Rows, ShardExchange, ShardGroup, gather

Place = tuple[nn.Module, str]
"""A module and the name under which it has a parameter."""


@dataclass(slots=True, kw_only=True, eq=False)
class Sharded:
    """One parameter. `name`: the first of its names in the model; `places`: all of them; `held`: what this rank and
    those it shares with hold of it together.
    """

    name: str
    places: list[Place]
    held: TensorShard | None = None
    shard: nn.Parameter
    absent: nn.Parameter
    whole: nn.Parameter

    def show(self, which: Literal["shard", "whole", "absent"]) -> None:
        """Make the modules see one of the three."""
        parameter: nn.Parameter = getattr(self, which)
        for module, key in self.places:
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters[key] = parameter
            else:  # an RNN keeps a list of its weights
                setattr(module, key, parameter)

    def follow(self, arrived: Callable[[torch.Tensor], None]) -> None:
        """Be trainable where the shard is; `arrived` is called once a backward has the whole's gradient."""
        wanted = self.shard.requires_grad
        if wanted != self.whole.requires_grad:
            self.whole.requires_grad_(wanted)
            self.absent.requires_grad_(wanted)
            if wanted:
                self.whole.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]


class Pack:
    """Parameters of one unit that travel together: of one dtype, and summed over the same `others` beside `shard`.

    `flat`: this rank's segment, of which the shards are views; `device`: where the wholes are; `home`: where the
    segment lies, if elsewhere; `loads`: see even_bounds.
    """

    def __init__(
        self,
        named: list[tuple[str, list[Place]]],
        *,
        loads: list[int],
        rooms: Rooms,
        rank: int,
        others: tuple[AxisName, ...],
        home: torch.device | None = None,
    ) -> None:
        given = [getattr(*places[0]) for _, places in named]
        degree, self.rooms = len(loads), rooms
        self.degree, self.rank, self.others, self.device = degree, rank, others, given[0].device
        self.pieces = ShardPieces.cut([p.shape for p in given], [even_bounds(p.shape, loads) for p in given], degree)
        self.mine = self.pieces.ranks[rank]
        self.home = home or self.device
        where = self.device if self.device.type == "meta" else self.home
        self.flat = torch.zeros(self.pieces.size, dtype=given[0].dtype, device=where)
        self.parameters = []
        for (name, places), parameter, piece in zip(named, given, self.mine, strict=True):
            part = piece.within(self.flat)
            part.copy_(piece.of(parameter.detach()))
            absent = torch.empty_like(parameter, device="meta")
            self.parameters.append(
                Sharded(
                    name=name,
                    places=places,
                    shard=_like(parameter, part, trainable=parameter.requires_grad),
                    absent=_like(parameter, absent, trainable=parameter.requires_grad),
                    whole=_like(parameter, absent, trainable=False),
                )
            )
        self._memory: Memory | None = None
        self._summed: torch.Tensor | None = None
        self._gathered: torch.Tensor | None = None
        self._exchange: ShardExchange | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of a segment."""
        return self.flat.numel() * self.flat.element_size()

    def materialise(self, flat: torch.Tensor, device: torch.device) -> None:
        """Have memory, where there was none; wholes will be on `device`."""
        self.flat = flat.to(device if self.home.type == "meta" else self.home)
        self.device = device
        for one, piece in zip(self.parameters, self.mine, strict=True):
            one.shard = _like(one.shard, piece.within(self.flat), trainable=one.shard.requires_grad)

    def launch(self, shard_group: ShardGroup) -> None:
        """Start to gather the whole parameters."""
        self._move(shard_group.shown(self.flat))
        self._exchange = gather(self.flat.to(self.device), shard_group, self._rows, self._place)

    def fill(self, arrived: Callable[[torch.Tensor], None]) -> None:
        """Wait for what was launched, and have it in the whole parameters."""
        assert self._exchange is not None
        self._settle()
        for one in self.parameters:
            one.follow(arrived)

    def drop(self) -> None:
        """Free the whole parameters' memory, also of what is on its way."""
        self._settle()
        if self._memory is not None:
            self._memory.free()

    def _move(self, flat: torch.Tensor) -> None:
        """Have the segment, and with it the shards, in other memory that holds the same."""
        if flat is not self.flat:
            self.flat = flat
            for one, piece in zip(self.parameters, self.mine, strict=True):
                one.shard.data = piece.within(flat)

    def _rows(self) -> torch.Tensor:
        """Where segments arrive, if they cannot be read where they lie."""
        self._gathered = self.rooms.take(self.degree * self.flat.numel(), self.flat.dtype, self.device)
        self._gathered = self._gathered.view(self.degree, -1)
        return self._gathered

    def _place(self, segments: Rows) -> None:
        """Put every rank's segment into the whole parameters."""
        if self._memory is None:
            self._memory = memory_of(sum(one.absent.numel() for one in self.parameters), self.flat.dtype, self.device)
        self._memory.have()
        offset = 0
        for one in self.parameters:  # all wholes lie in one storage
            if one.whole.is_meta:
                view = self._memory.tensor.as_strided(one.absent.size(), one.absent.stride(), offset)
                one.whole = _like(one.absent, view, trainable=False)
            offset += one.whole.numel()
        # through .data, because autograd must not take it for a change of what it saved
        self.pieces.scatter(segments, [one.whole.data for one in self.parameters])

    def _settle(self) -> None:
        if self._exchange is not None:
            self._exchange.wait()
        if self._gathered is not None:
            self.rooms.give(self._gathered)
        self._gathered = self._exchange = None

    def take_gradients(self, shard_group: ShardGroup) -> tuple[torch.Tensor, list[bool]]:
        """The wholes' gradients, as (rank, segment and a flag for each parameter), to be summed by `shard_group`, and
        which there are; freed.
        """
        gradients = [one.whole.grad for one in self.parameters]
        there = [gradient is not None for gradient in gradients]
        width = self.pieces.size + len(there)
        numel = self.degree * width
        buffer = shard_group.buffer(self.rooms, numel, self.flat.dtype, self.device).view(self.degree, width)
        self.pieces.collect(buffer, gradients)
        for index, (one, has) in enumerate(zip(self.parameters, there, strict=True)):
            buffer[:, self.pieces.size + index] = float(has)
            one.whole.grad = None
        return buffer, there

    def receiving(self, buffer: torch.Tensor, shard_group: ShardGroup) -> torch.Tensor:
        """Where the sum of `buffer` over ranks comes: rows to be added, or in shared memory the sum itself."""
        width = buffer.shape[1]
        if shard_group.communicator is not None:
            return self._sum(width, buffer).view(1, width)
        return self.rooms.take((self.degree if shard_group.rows else 1) * width, buffer.dtype, buffer.device).view(
            -1, width
        )

    def sum_of(self, rows: Rows) -> torch.Tensor:
        """Their sum, until the next step: on the host always in the same memory, for what lasts splits the heap."""
        if not isinstance(rows, torch.Tensor):
            first, second = rows
            return torch.add(first, second, out=self._sum(len(first), first))
        if rows.device.type != "cpu":
            return rows.sum(0)
        total = self._sum(rows.shape[1], rows)
        return total if total.data_ptr() == rows.data_ptr() else torch.sum(rows, 0, out=total)

    def _sum(self, width: int, like: torch.Tensor) -> torch.Tensor:
        if self._summed is None:
            self._summed = torch.empty(width, dtype=like.dtype, device=like.device)
        return self._summed

    def give_gradients(self, segment: torch.Tensor, there: list[bool]) -> None:
        """Make the summed gradients the shards'; one that no rank had stays None. `there`: those this rank had."""
        for index, (one, piece) in enumerate(zip(self.parameters, self.mine, strict=True)):
            if one.shard.requires_grad and (there[index] or float(segment[self.pieces.size + index]) > 0):
                one.shard.grad = piece.within(segment).to(self.flat.device)


@dataclass(slots=True, kw_only=True, eq=False)
class Unit:
    """A block's packs. `whole`: gathered; `launched`: on its way; `held`: kept until someone drops it; `repeats`: runs
    several times in one pass; `entered`: calls of it that have not returned.
    """

    name: str
    packs: list[Pack]
    whole: bool = False
    launched: bool = False
    held: bool = False
    repeats: bool = False
    entered: int = 0
    missing: int = field(default=0)

    @property
    def parameters(self) -> list[Sharded]:
        return [one for pack in self.packs for one in pack.parameters]

    def launch(self, shard_group: ShardGroup) -> int:
        """Start to gather, unless that has been done; returns the bytes that this rank sends."""
        if self.whole or self.launched:
            return 0
        for pack in self.packs:
            pack.launch(shard_group)
        self.launched = True
        return sum((pack.degree - 1) * pack.nbytes for pack in self.packs)

    def fill(self, arrived: Callable[[torch.Tensor], None]) -> None:
        """Wait for the whole parameters, and let the modules see them."""
        if self.whole:
            return
        for pack in self.packs:
            pack.fill(arrived)
        self.whole, self.launched = True, False
        self.show("whole")

    def drop(self, show: Literal["shard", "absent"]) -> None:
        """Free the whole parameters."""
        for pack in self.packs:
            pack.drop()
        self.whole = self.launched = self.held = False
        self.show(show)

    def show(self, which: Literal["shard", "whole", "absent"]) -> None:
        for one in self.parameters:
            one.show(which)


def _like(parameter: nn.Parameter, data: torch.Tensor, *, trainable: bool) -> nn.Parameter:
    """A parameter with other data, and what the user has written on this one."""
    new = nn.Parameter(data, requires_grad=trainable)
    new.__dict__.update(parameter.__dict__)
    return new


Bounds = tuple[int, tuple[int, ...]]
"""(dim, degree + 1 boundaries along it)."""


class Loads:
    """Elements that every rank of `shard` has so far, to be added to (see even_bounds). Counted apart for each set of
    other axes over which gradients are summed: their ranks must cut alike, whatever else they hold (tables, experts).
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._counts: dict[tuple[AxisName, ...], list[int]] = {}

    def others(self, sums: Iterable[AxisName]) -> tuple[AxisName, ...]:
        """The mesh's axes among `sums`, without `shard`."""
        wanted = {axis for axis in sums if axis != "shard"}
        return tuple(axis for axis in self._mesh.degrees if axis in wanted)

    def beside(self, sums: Iterable[AxisName]) -> list[int]:
        """The counts for parameters whose gradients are summed over `sums`."""
        return self._counts.setdefault(self.others(sums), [0] * self._mesh.degree("shard"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """start .. stop - 1 along `dim` of the tensor at `index`, from `offset` on in its rank's segment; `shape` of it."""

    index: int
    dim: int
    start: int
    stop: int
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The piece of a whole tensor, a view."""
        return whole.narrow(self.dim, self.start, self.stop - self.start) if whole.dim() else whole

    def within(self, segment: torch.Tensor) -> torch.Tensor:
        """The piece in its rank's segment, a view in the piece's shape."""
        return segment[self.offset : self.offset + self.numel].view(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPieces:
    """`ranks[r]`: rank r's piece of every tensor, maybe without elements; `size`: of a segment, equal on all ranks."""

    ranks: tuple[tuple[Piece, ...], ...]
    size: int

    @classmethod
    def cut(cls, shapes: Sequence[torch.Size], bounds: Sequence[Bounds], degree: int) -> "ShardPieces":
        """Pieces of tensors of `shapes`, each cut at its `bounds`."""
        ranks, sizes = [], []
        for rank in range(degree):
            pieces, offset = [], 0
            for index, (shape, (dim, edges)) in enumerate(zip(shapes, bounds, strict=True)):
                start, stop = edges[rank], edges[rank + 1]
                local = tuple(stop - start if d == dim else size for d, size in enumerate(shape))
                numel = torch.Size(local).numel() if stop > start else 0
                if not shape and not numel:
                    local = (0,)
                pieces.append(Piece(index=index, dim=dim, start=start, stop=stop, shape=local, offset=offset))
                offset += numel
            ranks.append(tuple(pieces))
            sizes.append(offset)
        return cls(ranks=tuple(ranks), size=max(sizes))

    def scatter(self, segments: Iterable[torch.Tensor], wholes: Sequence[torch.Tensor]) -> None:
        """Write all ranks' segments, each of at least `size`, into the whole tensors."""
        pairs = list(self._pairs(segments, wholes))
        torch._foreach_copy_([to for to, _ in pairs], [part for _, part in pairs])

    def collect(self, segments: Sequence[torch.Tensor] | torch.Tensor, wholes: Sequence[torch.Tensor | None]) -> None:
        """Write the whole tensors into the ranks' segments; zeros where there is none."""
        pairs = list(self._pairs(segments, wholes))
        if pairs:
            torch._foreach_copy_([part for _, part in pairs], [whole for whole, _ in pairs])
        for segment, pieces in zip(segments, self.ranks, strict=True):
            for piece in pieces:
                if wholes[piece.index] is None:
                    piece.within(segment).zero_()

    def _pairs(
        self, segments: Iterable[torch.Tensor], wholes: Sequence[torch.Tensor | None]
    ) -> "list[tuple[torch.Tensor, torch.Tensor]]":
        found = []
        for segment, pieces in zip(segments, self.ranks, strict=True):
            for piece in pieces:
                whole = wholes[piece.index]
                if whole is not None and piece.numel:
                    found.append((piece.of(whole), piece.within(segment)))
        return found


def even_bounds(shape: torch.Size, loads: list[int]) -> Bounds:
    """Cut along dim 0 where it divides, else along the largest dim; parts differ by one slice at most.

    `loads`: elements that each rank has so far; who has least gets the larger parts, and they are added to it. `shape`
    has at least one dim.
    """
    degree = len(loads)
    dim = 0 if shape[0] % degree == 0 else max(range(len(shape)), key=lambda d: (shape[d], -d))
    slices, left = divmod(shape[dim], degree)
    sizes = [slices] * degree
    for rank in sorted(range(degree), key=loads.__getitem__)[:left]:
        sizes[rank] += 1
    for rank, size in enumerate(sizes):
        loads[rank] += size * (shape.numel() // max(shape[dim], 1))
    return dim, tuple(accumulate(sizes, initial=0))

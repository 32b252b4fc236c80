"""A unit: the parameters of one block, sharded at rest and gathered while the block computes.

Each parameter has three tensors that take turns in its module. The shard is there at rest, and optimizers hold it. The
whole is there while the block computes; its memory is freed in between, and tensors that autograd saved see it again
after the next gather. The absent one has no memory: during a forward pass it stands in until the block's turn, so that
an early access fails instead of computing with wrong values.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, Protocol

import torch
from torch import nn

from tutti.config.vocabulary import AxisName
from tutti.errors import PlanError
from tutti.parallel.layout import Layout, TensorShard
from tutti.parallel.mesh import Mesh
from tutti.parallel.sharding.gather_buffers import Memory, Rooms, memory_of
from tutti.parallel.sharding.shard_collectives import Rows, ShardExchange, ShardGroup, SharedSegments, gather

Place = tuple[nn.Module, str]
"""A module and the name of a parameter in it."""


class Offload(Protocol):
    """What makes packs whose segments are on the host (parallel/offload)."""

    def copied_dtype(self, places: list[Place]) -> torch.dtype:
        """The dtype of the device's copy of a parameter whose gradient no other rank adds to."""

    def make_pack(self, named: list[tuple[str, list[Place]]], **arguments: Any) -> "Pack":
        """Make a pack, with the arguments of `Pack`."""


_CONTAINERS = (nn.Sequential, nn.ModuleList)


@dataclass(slots=True, kw_only=True, eq=False)
class Sharded:
    """One sharded parameter.

    Attributes:
        name: the first of its names in the model.
        places: all modules that hold it.
        held: the part of the tensor that this rank and the ranks along `shard` hold together.
        trained: whether it requires a gradient. The script may change that on whichever tensor its modules hold.
        watched: the whole tells when its gradient is complete.
        arrived: the whole's gradient is complete in the present backward.
    """

    name: str
    places: list[Place]
    held: TensorShard | None = None
    shard: nn.Parameter
    absent: nn.Parameter
    whole: nn.Parameter
    trained: bool
    watched: bool = False
    arrived: bool = False

    def show(self, which: Literal["shard", "whole", "absent"]) -> None:
        """Put one of the three tensors into the modules."""
        self._follow_script()
        parameter: nn.Parameter = getattr(self, which)
        for module, key in self.places:
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters[key] = parameter
            else:  # an RNN keeps a list of its weights
                setattr(module, key, parameter)

    def watch(self, arrived: Callable[["Sharded"], None]) -> None:
        """Let the whole require a gradient where the shard does.

        `arrived` is called in each backward once the whole's gradient is complete.
        """
        self._follow_script()
        if self.trained and not self.watched and not self.whole.is_meta:  # else it has not been gathered yet
            self.watched = True
            self.whole.requires_grad_()
            self.whole.register_post_accumulate_grad_hook(lambda _: arrived(self))  # type: ignore[no-untyped-call]

    def _follow_script(self) -> None:
        """Let all three tensors require a gradient if the script has switched that on for one of them; or none."""
        trained, known = self.trained, self.watched or not self.trained  # before, the whole does not require one yet
        if self.shard.requires_grad is not trained or self.absent.requires_grad is not trained:
            changed = True
        else:
            changed = known and self.whole.requires_grad is not trained
        if changed:
            self.trained = not trained
            for tensor in (self.shard, self.absent, self.whole) if known else (self.shard, self.absent):
                tensor.requires_grad_(self.trained)


class Pack:
    """Parameters of one unit that are communicated together.

    They have one dtype, and their gradients are reduced over the same axes `others` beside `shard`.

    Attributes:
        flat: this rank's segment; the shards are views of it.
        device: where the whole parameters are.
        dtype: dtype of the whole parameters.
        home: where the segment is, if it is offloaded.
        leaves: gradients leave the device as soon as they are reduced (parallel/offload).
        index: its number among all packs.
        loads: elements that each rank holds so far (see even_bounds).
    """

    leaves = False

    def __init__(
        self,
        named: list[tuple[str, list[Place]]],
        *,
        loads: list[int],
        rooms: Rooms,
        rank: int,
        others: tuple[AxisName, ...],
        home: torch.device | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        given = [getattr(*places[0]) for _, places in named]
        degree, self.rooms, self.index = len(loads), rooms, 0
        self.degree, self.rank, self.others, self.device = degree, rank, others, device or given[0].device
        self.dtype = dtype or given[0].dtype
        self.pieces = ShardPieces.cut([p.shape for p in given], [even_bounds(p.shape, loads) for p in given], degree)
        self.mine = self.pieces.ranks[rank]
        self.home = home or self.device
        where = given[0].device if given[0].is_meta else self.home
        self.flat = self._at_rest(self.pieces.size, given[0].dtype, where)
        self.parameters = []
        for (name, places), parameter, piece in zip(named, given, self.mine, strict=True):
            part = piece.within(self.flat)
            part.copy_(piece.of(parameter.detach()))
            absent = torch.empty_like(parameter, device="meta")
            self.parameters.append(
                Sharded(
                    name=name,
                    places=places,
                    shard=like_parameter(parameter, part, trainable=parameter.requires_grad),
                    absent=like_parameter(parameter, absent, trainable=parameter.requires_grad),
                    whole=like_parameter(parameter, absent, trainable=False),
                    trained=parameter.requires_grad,
                )
            )
        self._memory: Memory | None = None
        self._summed: torch.Tensor | None = None
        self._gathered: torch.Tensor | None = None
        self._exchange: ShardExchange | None = None

    @property
    def nbytes(self) -> int:
        """Size of a segment in bytes."""
        return self.flat.numel() * self.flat.element_size()

    def materialise(self, flat: torch.Tensor, device: torch.device) -> None:
        """Replace a segment without memory; the whole parameters will be on `device`."""
        self.flat = flat.to(device if self.home.type == "meta" else self.home)
        self.device = device
        for parameter, piece in zip(self.parameters, self.mine, strict=True):
            parameter.shard = like_parameter(
                parameter.shard, piece.within(self.flat), trainable=parameter.shard.requires_grad
            )

    def launch(self, shard_group: ShardGroup) -> None:
        """Start to gather the whole parameters."""
        self.move(shard_group.shown(self.flat))
        self._exchange = gather(self.flat.to(self.device), shard_group, self._rows, self._place)

    def fill(self) -> None:
        """Wait until the whole parameters are gathered."""
        assert self._exchange is not None
        self._settle()

    def read(self, rows: Rows, shard_group: ShardGroup) -> None:
        """Gather the whole parameters from the other ranks' segments, which lie in shared memory."""
        with shard_group.channel.waiting((self.degree - 1) * self.nbytes):
            self._place(rows)

    def drop(self) -> None:
        """Free the memory of the whole parameters, also of those still being gathered."""
        self._settle()
        if self._memory is not None:
            self._memory.free()

    @property
    def storage(self) -> int:
        """Identity of the storage of the whole parameters, which have been gathered before."""
        assert self._memory is not None
        return int(self._memory.tensor.untyped_storage()._cdata)

    def move(self, flat: torch.Tensor) -> None:
        """Move the segment, and with it the shards, to other memory with the same values."""
        if flat is not self.flat:
            self.flat = flat
            for parameter, piece in zip(self.parameters, self.mine, strict=True):
                parameter.shard.data = piece.within(flat)

    def _at_rest(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for the segment, filled with zeros."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def _rows(self) -> torch.Tensor:
        """The receive buffer of the gather, where segments cannot be read in place."""
        self._gathered = self.rooms.take(self.degree * self.flat.numel(), self.dtype, self.device)
        self._gathered = self._gathered.view(self.degree, -1)
        return self._gathered

    def _place(self, segments: Rows) -> None:
        """Copy every rank's segment into the whole parameters."""
        self._allocate_whole()
        # through .data, so that autograd does not count it as a change of tensors that it saved
        self.pieces.scatter(segments, [parameter.whole.data for parameter in self.parameters])

    def _allocate_whole(self) -> None:
        """Allocate the memory of the whole parameters."""
        if self._memory is None:
            self._memory = memory_of(
                sum(parameter.absent.numel() for parameter in self.parameters), self.dtype, self.device
            )
        self._memory.have()
        offset = 0
        for parameter in self.parameters:  # all whole parameters lie in one storage
            if parameter.whole.is_meta:
                view = self._memory.tensor.as_strided(parameter.absent.size(), parameter.absent.stride(), offset)
                parameter.whole = like_parameter(parameter.absent, view, trainable=False)
            offset += parameter.whole.numel()

    def _settle(self) -> None:
        if self._exchange is not None:
            self._exchange.wait()
        if self._gathered is not None:
            self.rooms.give(self._gathered)
        self._gathered = self._exchange = None

    def take_gradients(self, shard_group: ShardGroup) -> tuple[torch.Tensor, list[bool]]:
        """Move the gradients of the whole parameters into a buffer for the reduce-scatter.

        Returns:
            The buffer, (ranks, segment and one flag per parameter), and which parameters have a gradient.
        """
        gradients = [parameter.whole.grad for parameter in self.parameters]
        present = [gradient is not None for gradient in gradients]
        width = self.pieces.size + len(present)
        numel = self.degree * width
        buffer = shard_group.buffer(self.rooms, numel, self.dtype, self.device).view(self.degree, width)
        self.pieces.collect(buffer, gradients)
        for index, (parameter, has) in enumerate(zip(self.parameters, present, strict=True)):
            buffer[:, self.pieces.size + index] = float(has)
            parameter.whole.grad = None
        return buffer, present

    def receiving(self, buffer: torch.Tensor, shard_group: ShardGroup) -> torch.Tensor:
        """The receive buffer of the reduce-scatter: rows to add up, or the sum itself in shared memory."""
        width = buffer.shape[1]
        if shard_group.communicator is not None:
            return self._sum(width, buffer).view(1, width)
        return self.rooms.take((self.degree if shard_group.rows else 1) * width, buffer.dtype, buffer.device).view(
            -1, width
        )

    def sum_of(self, rows: Rows) -> torch.Tensor:
        """The sum of the rows, valid until the next step.

        On the host it is always in the same memory, because allocations that last split the heap.
        """
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

    def take_away(self, segment: torch.Tensor, there: list[bool]) -> None:
        """The reduced gradients are complete; a pack that `leaves` copies them to the host."""

    def give_gradients(self, segment: torch.Tensor | None, there: list[bool]) -> None:
        """Give the reduced gradients to the shards; a parameter without a gradient on any rank keeps None.

        `there` says which parameters have one on this rank.
        """
        assert segment is not None
        for index, (parameter, piece) in enumerate(zip(self.parameters, self.mine, strict=True)):
            if parameter.shard.requires_grad and (there[index] or float(segment[self.pieces.size + index]) > 0):
                parameter.shard.grad = piece.within(segment).to(self.flat.device)


@dataclass(slots=True, kw_only=True, eq=False)
class Unit:
    """The packs of a block.

    Attributes:
        whole: the parameters are gathered.
        launched: the gather has begun.
        held: the parameters stay gathered until someone drops them.
        repeats: the block runs several times in one pass.
        entered: calls of the block that have not returned.
        calls: calls of the block in this step, without those that recompute it.
        missing: parameters whose gradients have not arrived in the present backward.
        frozen: some parameters are not trained, so backward may still need them once `missing` is 0.
        spent: backward has their gradients; the whole parameters may be freed when it reaches another unit.
    """

    name: str
    packs: list[Pack]
    whole: bool = False
    launched: bool = False
    held: bool = False
    repeats: bool = False
    entered: int = 0
    calls: int = 0
    missing: int = 0
    frozen: bool = False
    spent: bool = False

    @property
    def parameters(self) -> list[Sharded]:
        return [parameter for pack in self.packs for parameter in pack.parameters]

    def launch(self, shard_group: ShardGroup) -> int:
        """Start to gather unless that has been done; returns the bytes that this rank sends."""
        if self.whole or self.launched:
            return 0
        for pack in self.packs:
            pack.launch(shard_group)
        self.launched = True
        return sum((pack.degree - 1) * pack.nbytes for pack in self.packs)

    def fill(self) -> None:
        """Wait for the whole parameters."""
        for pack in self.packs:
            pack.fill()

    def read(self, segments: SharedSegments, shard_group: ShardGroup) -> int:
        """Read the whole parameters from shared memory; returns the bytes as `launch` does."""
        for pack in self.packs:
            pack.read(segments.rows(pack.index), shard_group)
        return sum((pack.degree - 1) * pack.nbytes for pack in self.packs)

    def filled(self, arrived: Callable[[Sharded], None]) -> None:
        """Put the whole parameters into the modules; `arrived` is told of each gradient that is complete."""
        for parameter in self.parameters:
            parameter.watch(arrived)
        self.whole, self.launched = True, False
        self.show("whole")

    def expect(self, arrived: Callable[[Sharded], None]) -> None:
        """A backward begins, which will tell `arrived` of each gradient that is complete."""
        for parameter in self.parameters:
            parameter.watch(arrived)
            parameter.arrived = False
        trained = [parameter.trained for parameter in self.parameters]
        self.missing, self.frozen, self.spent = sum(trained), not all(trained), not any(trained)

    def drop(self, show: Literal["shard", "absent"]) -> None:
        """Free the whole parameters."""
        for pack in self.packs:
            pack.drop()
        self.whole = self.launched = self.held = self.spent = False
        self.show(show)

    def show(self, which: Literal["shard", "whole", "absent"]) -> None:
        for parameter in self.parameters:
            parameter.show(which)


def like_parameter(parameter: nn.Parameter, data: torch.Tensor, *, trainable: bool) -> nn.Parameter:
    """A parameter with other data that keeps the attributes the user has set."""
    new = nn.Parameter(data, requires_grad=trainable)
    new.__dict__.update(parameter.__dict__)
    return new


Bounds = tuple[int, tuple[int, ...]]
"""(dim, degree + 1 boundaries along it)."""


class Loads:
    """The number of elements that each rank along `shard` holds so far (see even_bounds).

    It is counted separately for each set of other axes over which gradients are reduced. Ranks along those axes must
    cut alike, whatever else they hold (tables, experts).
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._counts: dict[tuple[AxisName, ...], list[int]] = {}

    def others(self, sums: Iterable[AxisName]) -> tuple[AxisName, ...]:
        """The mesh's axes among `sums`, without `shard`."""
        wanted = {axis for axis in sums if axis != "shard"}
        return tuple(axis for axis in self._mesh.degrees if axis in wanted)

    def beside(self, sums: Iterable[AxisName]) -> list[int]:
        """The counts for parameters whose gradients are reduced over `sums`."""
        return self._counts.setdefault(self.others(sums), [0] * self._mesh.degree("shard"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One rank's piece of one tensor.

    It covers start .. stop - 1 along `dim` of the tensor at `index`, and begins at `offset` in the rank's segment.
    """

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
        """The piece of a whole tensor, as a view."""
        return whole.narrow(self.dim, self.start, self.stop - self.start) if whole.dim() else whole

    def within(self, segment: torch.Tensor) -> torch.Tensor:
        """The piece in its rank's segment, as a view in the piece's shape."""
        return segment[self.offset : self.offset + self.numel].view(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPieces:
    """The pieces of all tensors of a pack.

    Attributes:
        ranks: for each rank, its piece of every tensor; a piece may be empty.
        size: elements of a segment, equal on all ranks.
    """

    ranks: tuple[tuple[Piece, ...], ...]
    size: int

    @classmethod
    def cut(cls, shapes: Sequence[torch.Size], bounds: Sequence[Bounds], degree: int) -> "ShardPieces":
        """Cut tensors of `shapes`, each at its `bounds`."""
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
        """Copy all ranks' segments, each of `size` elements or more, into the whole tensors."""
        pairs = list(self._pairs(segments, wholes))
        torch._foreach_copy_([to for to, _ in pairs], [part for _, part in pairs])

    def collect(self, segments: Sequence[torch.Tensor] | torch.Tensor, wholes: Sequence[torch.Tensor | None]) -> None:
        """Copy the whole tensors into the ranks' segments; a missing tensor gives zeros."""
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
        pairs = []
        for segment, pieces in zip(segments, self.ranks, strict=True):
            for piece in pieces:
                whole = wholes[piece.index]
                if whole is not None and piece.numel:
                    pairs.append((piece.of(whole), piece.within(segment)))
        return pairs


def even_bounds(shape: torch.Size, loads: list[int]) -> Bounds:
    """Cut along dim 0 if it divides, else along the largest dim; parts differ by at most one slice.

    Args:
        shape: of the tensor, with one dim or more.
        loads: elements that each rank holds so far. Ranks with fewer get the larger parts; their parts are added here.
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


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The repeated blocks of a model: elements of module lists and sequences that have parameters, outermost first.

    An element that is itself a list, or a sequence that holds more than leaves, is searched as well.
    """
    return list(_blocks(model, "", within=False, seen=set()))


def members_of(model: nn.Module, layout: Layout) -> tuple[list[tuple[str, nn.Module]], list[dict[str, list[Place]]]]:
    """Assign the parameters that are sharded to the blocks that hold them.

    Args:
        model: the model.
        layout: says which gradients are reduced along `shard`.

    Returns:
        The blocks, and the parameters of each with their places: first those outside of blocks and those tied between
        blocks, then those of each block.

    Raises:
        PlanError: for sparse embeddings.
    """
    blocks = blocks_of(model)
    home = {module: index for index, (_, block) in enumerate(blocks, 1) for module in block.modules()}
    members: list[dict[str, list[Place]]] = [{} for _ in range(len(blocks) + 1)]
    for name, places in _places(model).items():
        parameter = getattr(*places[0])
        if "shard" in layout.shard_of(name).sums and parameter.dim() and parameter.numel():
            _check_dense(name, places)
            homes = {home.get(module, 0) for module, _ in places}
            members[homes.pop() if len(homes) == 1 else 0][name] = places
    return blocks, members


def make_units(
    model: nn.Module, layout: Layout, offload: "Offload | None" = None
) -> tuple[list[Unit], dict[nn.Module, Unit]]:
    """Divide the model's parameters among the ranks of `shard`, and write this rank's parts into `layout`.

    Parameters whose gradients are not reduced along `shard`, without dims or without elements stay whole.

    Args:
        model: the model, changed in place.
        layout: gets the shard of every parameter.
        offload: makes the packs whose segments are on the host; None: segments are where the parameters are.

    Returns:
        The units, and the unit of every block. The first unit holds the parameters outside of blocks and those tied
        between blocks.

    Raises:
        PlanError: for sparse embeddings.
    """
    blocks, members = members_of(model, layout)
    loads, rooms = Loads(layout.mesh), Rooms()
    units = [Unit(name="", packs=_packs(members[0], layout, offload, loads, rooms))]
    of_block = {}
    for (name, block), inside in zip(blocks, members[1:], strict=True):
        if inside:
            of_block[block] = Unit(name=name, packs=_packs(inside, layout, offload, loads, rooms))
            units.append(of_block[block])
    for unit in units:
        unit.show("shard")
    return units, of_block


def _blocks(module: nn.Module, name: str, *, within: bool, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    for key, child in module.named_children():
        path = f"{name}.{key}" if name else key
        if id(child) in seen or not any(True for _ in child.parameters()):
            continue
        listed = isinstance(module, _CONTAINERS)
        if listed and not _holds_blocks(child):
            seen.add(id(child))
            yield path, child
        else:
            yield from _blocks(child, path, within=listed, seen=seen)


def _holds_blocks(module: nn.Module) -> bool:
    return isinstance(module, _CONTAINERS) and any(True for child in module.children() for _ in child.children())


def _places(model: nn.Module) -> dict[str, list[Place]]:
    """The modules that hold each parameter, by the parameter's first name."""
    first: dict[nn.Parameter, str] = {}
    places: dict[str, list[Place]] = {}
    for path, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = first.setdefault(parameter, f"{path}.{key}" if path else key)
            places.setdefault(name, []).append((module, key))
    return places


def _packs(
    members: dict[str, list[Place]], layout: Layout, offload: "Offload | None", loads: Loads, rooms: Rooms
) -> list[Pack]:
    kinds: dict[tuple[torch.dtype, torch.dtype, tuple[AxisName, ...]], list[tuple[str, list[Place]]]] = {}
    divided = layout.mesh.degree("shard") > 1
    for name, places in members.items():
        others = loads.others(layout.shard_of(name).sums)
        copied = offload.copied_dtype(places) if offload and not (divided or others) else None
        dtype = getattr(*places[0]).dtype
        kinds.setdefault((dtype, copied or dtype, others), []).append((name, places))
    packs = []
    for (_, copied_dtype, others), named in kinds.items():
        rank, make = layout.mesh.index("shard"), Pack if offload is None else offload.make_pack
        pack = make(named, loads=loads.beside(others), rooms=rooms, rank=rank, others=others, dtype=copied_dtype)
        for parameter, piece in zip(pack.parameters, pack.mine, strict=True):
            parameter.held = layout.shard_of(parameter.name)
            if divided:
                layout.cut(parameter.name, piece.dim, *([(piece.start, piece.stop)] if piece.numel else []))
            layout.set_reduce_axes(parameter.name, ())
        packs.append(pack)
    return packs


def _check_dense(name: str, places: list[Place]) -> None:
    for module, _ in places:
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise PlanError(
                f"{name!r} has sparse gradients, which sharding levels 2 and 3 do not divide, nor offload moves; make "
                "the embedding with sparse=False, or use sharding level 1"
            )

"""Compressed sums of which each rank gets its part (sharding levels 2 and 3): one for every pack of parameters.

Codes of the parts go to their owners over `shard`; sums over the other axes follow, of the part, as sums of buckets are
made. powersgd sums whole matrices in thin ones, which all ranks get anyway: of them each takes its part.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tutti.comm.traffic import CommChannel, CommHandle
from tutti.compression.exchange import Exchange, Rounds, Wire, all_finite
from tutti.compression.scatter import ScatterSum
from tutti.config.compression import Compression, flags_sent_nbytes, parts_sent_nbytes, sum_sent_nbytes
from tutti.parallel.compressed.courier import Courier
from tutti.parallel.compressed.methods import make_exchange, make_scatter
from tutti.parallel.layout import TensorShard
from tutti.parallel.sharding.sharded_unit import Pack, Piece, Sharded


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Ranks that sum the gradients of some packs: process groups that nothing else uses. `number`: of it for the
    courier; `shard`: who has parts; `others`: over whom parts are summed besides, None where there is nobody, `exactly`
    or not; `everyone`: both together.
    """

    number: int
    shard: Any
    others: Any
    everyone: Any
    exactly: bool
    channel: CommChannel


@dataclass(frozen=True, slots=True)
class Row:
    """A tensor of a flat gradient: its parameter's name, its shape and strides there, and what of the whole it is."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    held: TensorShard


@dataclass(frozen=True, slots=True)
class Keeping:
    """What an exchange keeps back, by the tensors that lie in its flat gradient one behind the other. `holders`: ranks
    that have equal shares of what a checkpoint's ranks kept; 0: it begins with nothing.
    """

    exchange: Exchange
    rows: list[Row]
    holders: int


class PartSum:
    """The sums of one pack: `there` over `shard`, `across` over the other axes."""

    def __init__(self, pack: Pack, how: Compression, route: Route, courier: Courier, seed: int) -> None:
        self.pack, self._how, self._route, self._courier = pack, how, route, courier
        self._ranks = dist.get_world_size(route.everyone)
        self._lengths = [sum(piece.numel for piece in pieces) for pieces in pack.pieces.ranks]
        self._shapes = [tuple(one.absent.shape) for one in pack.parameters]
        self._made = {"dtype": pack.flat.dtype, "device": pack.device}
        scatter = make_scatter(how.code, self._lengths, group=route.shard, seed=seed, **self._made)
        self.there: Exchange = scatter or make_exchange(
            how.code, self._shapes, group=route.shard, seed=seed, **self._made
        )
        self.across: Exchange | None = None
        if route.others is not None and not route.exactly and self._lengths[pack.rank]:
            mine = [piece.shape for piece in pack.mine if piece.numel]
            self.across = make_exchange(how.code, mine, group=route.others, seed=~seed, **self._made)
        width = pack.pieces.size + len(pack.parameters) + 1
        self._received = torch.zeros(width, **self._made)
        self._sent: tuple[int, int] | None = None

    def start(self) -> tuple[torch.Tensor, list[bool], CommHandle]:
        """Begin to sum the pack's gradients: what comes (this rank's segment, and a flag for each parameter), which
        gradients this rank has, and what to wait for.
        """
        pack, received = self.pack, self._received
        numel = sum(self._lengths)
        flat = pack.rooms.take(numel, pack.flat.dtype, pack.device)
        there = self._take(flat)
        flags = received[pack.pieces.size :]
        flags.copy_(torch.tensor([*there, not all_finite(flat)], dtype=flags.dtype))
        work = dist.all_reduce(flags, group=self._route.everyone, async_op=True)
        parcel = self._courier.start(self._route.number, self._rounds(flat, received[: self._lengths[pack.rank]]))
        said = self.sent_nbytes
        self._sent = said, self._counted
        return received, there, self._route.channel.start([work, parcel], said)

    @property
    def sent_nbytes(self) -> int:
        """Bytes of the next sum, by the formula."""
        itemsize, shard = self.pack.flat.element_size(), len(self._lengths)
        how = self._how.at(self.there.states["worker"].count)
        assert how is not None
        sent = flags_sent_nbytes(len(self._shapes) + 1, self._ranks, itemsize)
        if isinstance(self.there, ScatterSum):
            sent += parts_sent_nbytes(how, max(self._lengths), shard)
        else:
            sent += sum_sent_nbytes(how, self._shapes, shard, itemsize)
        if self._route.others is not None:
            mine = [piece.shape for piece in self.pack.mine if piece.numel]
            across = how if self.across is not None else None
            sent += sum_sent_nbytes(across, mine, self._ranks // shard, itemsize)
        return sent

    def settle(self, finite: bool) -> None:
        """After the sums of a step, if this one was made. `finite`: the update may be made, alike on all ranks."""
        if self._sent is None:
            return
        said, counted = self._sent
        if self._how.settings.get("sparse") and self.across is not None:  # how many, the values say
            flags = flags_sent_nbytes(len(self._shapes) + 1, self._ranks, self.pack.flat.element_size())
            self._route.channel.correct_nbytes(flags + self._counted - counted - said)
        *used, spoilt = self._received[self.pack.pieces.size :].tolist()
        counts = finite and not spoilt
        for index, flag in enumerate(used if counts else ()):
            if not flag:
                self._undo(index)
        for exchange in self._exchanges():
            exchange.settle(counts)
        self._sent = None

    def rescale(self, factor: float) -> None:
        """Gradients are `factor` times as large from now on."""
        for exchange in self._exchanges():
            exchange.rescale(factor)

    def keeping(self) -> Iterator[Keeping]:
        """What this rank keeps back."""
        if isinstance(self.there, ScatterSum):
            rows = [self._row(rank, index) for rank, index in self._order() if self._piece(rank, index).numel]
        else:
            rows = [_row(one, one.held, shape) for one, shape in zip(self.pack.parameters, self._shapes, strict=True)]
        yield Keeping(self.there, rows, self._ranks)
        if self.across is not None:
            mine = [self._row(self.pack.rank, index) for index, piece in enumerate(self.pack.mine) if piece.numel]
            yield Keeping(self.across, mine, 0)

    @property
    def _counted(self) -> int:
        return sum(exchange.wire.sent_nbytes for exchange in self._exchanges())

    def _exchanges(self) -> list[Exchange]:
        return [self.there] if self.across is None else [self.there, self.across]

    def _take(self, flat: torch.Tensor) -> list[bool]:
        """The wholes' gradients into `flat`, as the exchange wants them, and which there are; freed."""
        gradients = [one.whole.grad for one in self.pack.parameters]
        if isinstance(self.there, ScatterSum):
            self.pack.pieces.collect([flat[begin:end] for begin, end in self.there.parts], gradients)
        else:
            for gradient, view in zip(gradients, self._views(flat), strict=True):
                view.zero_() if gradient is None else view.copy_(gradient)
        for one in self.pack.parameters:
            one.whole.grad = None
        return [gradient is not None for gradient in gradients]

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        parts = torch.split(flat, [torch.Size(shape).numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def _rounds(self, flat: torch.Tensor, part: torch.Tensor) -> Rounds:
        if isinstance(self.there, ScatterSum):
            self.there.write(flat)
            self.pack.rooms.give(flat)
            yield from self.there.send(part)
        else:
            yield from self.there.rounds(flat)
            for piece, whole in zip(self.pack.mine, self._views(flat), strict=True):
                if piece.numel:
                    piece.within(part).copy_(piece.of(whole))
            self.pack.rooms.give(flat)
        if self.across is not None:
            yield from self.across.rounds(part)
        elif self._route.others is not None and part.numel():
            yield [Wire(self._route.others).all_reduce(part)]

    def _undo(self, index: int) -> None:
        """No rank has used the parameter: nothing of it was sent."""
        if isinstance(self.there, ScatterSum):
            for rank, (begin, _) in enumerate(self.there.parts):
                piece = self._piece(rank, index)
                self.there.undo(begin + piece.offset, begin + piece.offset + piece.numel)
        else:
            start = sum(torch.Size(shape).numel() for shape in self._shapes[:index])
            self.there.undo(start, start + torch.Size(self._shapes[index]).numel())
        if self.across is not None:
            piece = self.pack.mine[index]
            self.across.undo(piece.offset, piece.offset + piece.numel)

    def _order(self) -> Iterator[tuple[int, int]]:
        """(rank, parameter) of the pieces as they lie in the flat gradient."""
        return ((rank, index) for rank in range(len(self._lengths)) for index in range(len(self._shapes)))

    def _piece(self, rank: int, index: int) -> Piece:
        return self.pack.pieces.ranks[rank][index]

    def _row(self, rank: int, index: int) -> Row:
        piece, one = self._piece(rank, index), self.pack.parameters[index]
        assert one.held is not None
        return _row(one, one.held.cut(piece.dim, (piece.start, piece.stop)), piece.shape)


def _row(one: Sharded, held: TensorShard | None, shape: tuple[int, ...]) -> Row:
    assert held is not None
    return Row(one.name, shape, torch.empty(shape, device="meta").stride(), held)

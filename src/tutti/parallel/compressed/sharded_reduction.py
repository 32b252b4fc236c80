"""Compressed reduce-scatters of gradients (sharding levels 2 and 3): one for every pack of parameters.

Messages of the parts go to their owners over `shard`; all-reduces of the part over the other axes follow, as for
buckets. powersgd sums whole matrices, which all ranks get anyway; each takes its part of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tutti.comm.traffic import CommChannel, CommHandle
from tutti.compression.codecs import make_reducer, make_scatter_reducer
from tutti.compression.dense_reducers import ReduceScatterReducer
from tutti.compression.reducer import CountedCollectives, GradientReducer, Rounds, all_finite
from tutti.config.compression import Compression, all_reduce_sent_nbytes, flags_sent_nbytes, reduce_scatter_sent_nbytes
from tutti.parallel.compressed.comm_thread import ReductionThread
from tutti.parallel.layout import TensorShard
from tutti.parallel.sharding.sharded_unit import Pack, Piece, Sharded


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionGroups:
    """Ranks that sum the gradients of some packs: process groups that nothing else uses.

    Args:
        number: of the group for the communication thread.
        shard: ranks that have parts.
        others: ranks over which parts are summed besides; None if there are none.
        everyone: both together.
        exactly: whether the sum over `others` is exact.
        lane: accounting of the traffic.
    """

    number: int
    shard: Any
    others: Any
    everyone: Any
    exactly: bool
    channel: CommChannel


@dataclass(frozen=True, slots=True)
class FlatTensorRow:
    """A tensor of a flat gradient: its parameter's name, its shape and strides there, and which part of the whole it
    is."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    held: TensorShard


@dataclass(frozen=True, slots=True)
class ReducerContents:
    """The state of a reducer, with the tensors that lie in its flat gradient one after another.

    `contributors`: ranks that have equal shares of what a checkpoint's ranks kept; 0: it begins with nothing.
    """

    exchange: GradientReducer
    rows: list[FlatTensorRow]
    contributors: int


class ShardedReduction:
    """The reductions of one pack: `there` over `shard`, `across` over the other axes."""

    def __init__(
        self, pack: Pack, compression: Compression, route: ReductionGroups, comm_thread: ReductionThread, seed: int
    ) -> None:
        self.pack, self._compression, self._route, self._comm_thread = pack, compression, route, comm_thread
        self._ranks = dist.get_world_size(route.everyone)
        self._lengths = [sum(piece.numel for piece in pieces) for pieces in pack.pieces.ranks]
        self._shapes = [tuple(one.absent.shape) for one in pack.parameters]
        self._made = {"dtype": pack.flat.dtype, "device": pack.device}
        scatter = make_scatter_reducer(compression.code, self._lengths, group=route.shard, seed=seed, **self._made)
        self.there: GradientReducer = scatter or make_reducer(
            compression.code, self._shapes, group=route.shard, seed=seed, **self._made
        )
        self.across: GradientReducer | None = None
        if route.others is not None and not route.exactly and self._lengths[pack.rank]:
            mine = [piece.shape for piece in pack.mine if piece.numel]
            self.across = make_reducer(compression.code, mine, group=route.others, seed=~seed, **self._made)
        width = pack.pieces.size + len(pack.parameters) + 1
        self._received = torch.zeros(width, **self._made)
        self._sent: tuple[int, int] | None = None

    def start(self) -> tuple[torch.Tensor, list[bool], CommHandle]:
        """Start to reduce the pack's gradients.

        Returns:
            (what arrives: this rank's segment and a flag for each parameter; which gradients this rank has; the work).
        """
        pack, received = self.pack, self._received
        numel = sum(self._lengths)
        flat = pack.rooms.take(numel, pack.flat.dtype, pack.device)
        there = self._take(flat)
        flags = received[pack.pieces.size :]
        flags.copy_(torch.tensor([*there, not all_finite(flat)], dtype=flags.dtype))
        work = dist.all_reduce(flags, group=self._route.everyone, async_op=True)
        rounds_work = self._comm_thread.start(
            self._route.number, self._rounds(flat, received[: self._lengths[pack.rank]])
        )
        said = self.sent_nbytes
        self._sent = said, self._counted
        return received, there, self._route.channel.start([work, rounds_work], said)

    @property
    def sent_nbytes(self) -> int:
        """Bytes of the next reduction, by the formula."""
        itemsize, shard = self.pack.flat.element_size(), len(self._lengths)
        compression = self._compression.at(self.there.states["worker"].count)
        assert compression is not None
        sent = flags_sent_nbytes(len(self._shapes) + 1, self._ranks, itemsize)
        if isinstance(self.there, ReduceScatterReducer):
            sent += reduce_scatter_sent_nbytes(compression, max(self._lengths), shard)
        else:
            sent += all_reduce_sent_nbytes(compression, self._shapes, shard, itemsize)
        if self._route.others is not None:
            mine = [piece.shape for piece in self.pack.mine if piece.numel]
            across = compression if self.across is not None else None
            sent += all_reduce_sent_nbytes(across, mine, self._ranks // shard, itemsize)
        return sent

    def finish_step(self, finite: bool) -> None:
        """After the sums of a step, if this one was made. `finite`: whether the update may be made, alike on all
        ranks."""
        if self._sent is None:
            return
        said, counted = self._sent
        if self._compression.settings.get("sparse") and self.across is not None:  # how many, the values say
            flags = flags_sent_nbytes(len(self._shapes) + 1, self._ranks, self.pack.flat.element_size())
            self._route.channel.correct_nbytes(flags + self._counted - counted - said)
        *used, spoilt = self._received[self.pack.pieces.size :].tolist()
        counts = finite and not spoilt
        for index, flag in enumerate(used if counts else ()):
            if not flag:
                self._undo(index)
        for exchange in self._exchanges():
            exchange.finish_step(counts)
        self._sent = None

    def rescale(self, factor: float) -> None:
        """Gradients are `factor` times as large from now on."""
        for exchange in self._exchanges():
            exchange.rescale(factor)

    def keeping(self) -> Iterator[ReducerContents]:
        """The state that this rank keeps."""
        if isinstance(self.there, ReduceScatterReducer):
            rows = [self._row(rank, index) for rank, index in self._order() if self._piece(rank, index).numel]
        else:
            rows = [_row(one, one.held, shape) for one, shape in zip(self.pack.parameters, self._shapes, strict=True)]
        yield ReducerContents(self.there, rows, self._ranks)
        if self.across is not None:
            mine = [self._row(self.pack.rank, index) for index, piece in enumerate(self.pack.mine) if piece.numel]
            yield ReducerContents(self.across, mine, 0)

    @property
    def _counted(self) -> int:
        return sum(exchange.collectives.sent_nbytes for exchange in self._exchanges())

    def _exchanges(self) -> list[GradientReducer]:
        return [self.there] if self.across is None else [self.there, self.across]

    def _take(self, flat: torch.Tensor) -> list[bool]:
        """Copy the whole gradients into `flat` as the reducer wants them, and free them; returns which gradients there
        are."""
        gradients = [one.whole.grad for one in self.pack.parameters]
        if isinstance(self.there, ReduceScatterReducer):
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
        if isinstance(self.there, ReduceScatterReducer):
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
            yield [CountedCollectives(self._route.others).all_reduce(part)]

    def _undo(self, index: int) -> None:
        """No rank has used the parameter, so nothing of it was sent."""
        if isinstance(self.there, ReduceScatterReducer):
            for rank, (begin, _) in enumerate(self.there.parts):
                piece = self._piece(rank, index)
                self.there.revert(begin + piece.offset, begin + piece.offset + piece.numel)
        else:
            start = sum(torch.Size(shape).numel() for shape in self._shapes[:index])
            self.there.revert(start, start + torch.Size(self._shapes[index]).numel())
        if self.across is not None:
            piece = self.pack.mine[index]
            self.across.revert(piece.offset, piece.offset + piece.numel)

    def _order(self) -> Iterator[tuple[int, int]]:
        """(rank, parameter) of the pieces as they lie in the flat gradient."""
        return ((rank, index) for rank in range(len(self._lengths)) for index in range(len(self._shapes)))

    def _piece(self, rank: int, index: int) -> Piece:
        return self.pack.pieces.ranks[rank][index]

    def _row(self, rank: int, index: int) -> FlatTensorRow:
        piece, one = self._piece(rank, index), self.pack.parameters[index]
        assert one.held is not None
        return _row(one, one.held.cut(piece.dim, (piece.start, piece.stop)), piece.shape)


def _row(one: Sharded, held: TensorShard | None, shape: tuple[int, ...]) -> FlatTensorRow:
    assert held is not None
    return FlatTensorRow(one.name, shape, torch.empty(shape, device="meta").stride(), held)

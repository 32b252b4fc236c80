"""Compressed reduce-scatters of gradients (sharding levels 2 and 3): one for every pack of parameters.

Encoded parts go to their owners over the axis `shard`. The owners then all-reduce their part over the other axes, as
buckets are. PowerSGD reduces whole matrices, which all ranks receive anyway; each rank takes its part of the result.
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
    """The groups of ranks that reduce the gradients of some packs. Nothing else uses these process groups.

    Args:
        number: number of the group in the communication thread.
        shard: group of the ranks along `shard`, each of which owns a part.
        others: group of the ranks over which parts are reduced as well; None if there are none.
        everyone: group of all ranks of both.
        exactly: whether the reduction over `others` is exact.
        channel: accounting of the traffic.
    """

    number: int
    shard: Any
    others: Any
    everyone: Any
    exactly: bool
    channel: CommChannel


@dataclass(frozen=True, slots=True)
class FlatTensorRow:
    """One tensor in a flat gradient.

    Attributes:
        name: name of its parameter.
        shape: its shape in the flat gradient.
        strides: its strides there.
        held: the part of the whole parameter that it is.
    """

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    held: TensorShard


@dataclass(frozen=True, slots=True)
class ReducerContents:
    """The state of one reducer, as a checkpoint stores it.

    Attributes:
        exchange: the reducer.
        rows: the tensors of its flat gradient, one after another.
        contributors: number of ranks that get equal shares of the residuals in a checkpoint; 0 where the reducer starts
            without residuals.
    """

    exchange: GradientReducer
    rows: list[FlatTensorRow]
    contributors: int


class ShardedReduction:
    """The reductions of one pack: `there` over the axis `shard`, then `across` over the other axes.

    Args:
        pack: the parameters, reduced together.
        compression: the plan's compression.
        route: the groups of ranks.
        comm_thread: runs the rounds.
        seed: seed of the codec's random numbers.
    """

    def __init__(
        self, pack: Pack, compression: Compression, route: ReductionGroups, comm_thread: ReductionThread, seed: int
    ) -> None:
        self.pack, self._compression, self._route, self._comm_thread = pack, compression, route, comm_thread
        self._ranks = dist.get_world_size(route.everyone)
        self._lengths = [sum(piece.numel for piece in pieces) for pieces in pack.pieces.ranks]
        self._shapes = [tuple(parameter.absent.shape) for parameter in pack.parameters]
        self._made: dict[str, Any] = {"dtype": pack.flat.dtype, "device": pack.device}
        scatter = make_scatter_reducer(compression.code, self._lengths, group=route.shard, seed=seed, **self._made)
        self.there: GradientReducer = scatter or make_reducer(
            compression.code, self._shapes, group=route.shard, seed=seed, **self._made
        )
        self.across: GradientReducer | None = None
        if route.others is not None and not route.exactly and self._lengths[pack.rank]:
            piece_shapes = [piece.shape for piece in pack.mine if piece.numel]
            self.across = make_reducer(compression.code, piece_shapes, group=route.others, seed=~seed, **self._made)
        width = pack.pieces.size + len(pack.parameters) + 1
        self._received = torch.zeros(width, **self._made)
        self._sent: tuple[int, int] | None = None

    def start(self) -> tuple[torch.Tensor, list[bool], CommHandle]:
        """Start to reduce the pack's gradients.

        Returns:
            The buffer that receives this rank's segment and a flag for each parameter; for each parameter, whether this
            rank has a gradient; and the handle to wait for.
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
        sent = self.sent_nbytes
        self._sent = sent, self._counted
        return received, there, self._route.channel.start([work, rounds_work], sent)

    @property
    def sent_nbytes(self) -> int:
        """Bytes of the next reduction, from the codec's size formula."""
        itemsize, shard = self.pack.flat.element_size(), len(self._lengths)
        compression = self._compression.at(self.there.states["worker"].count)
        assert compression is not None
        sent = flags_sent_nbytes(len(self._shapes) + 1, self._ranks, itemsize)
        if isinstance(self.there, ReduceScatterReducer):
            sent += reduce_scatter_sent_nbytes(compression, max(self._lengths), shard)
        else:
            sent += all_reduce_sent_nbytes(compression, self._shapes, shard, itemsize)
        if self._route.others is not None:
            piece_shapes = [piece.shape for piece in self.pack.mine if piece.numel]
            across = compression if self.across is not None else None
            sent += all_reduce_sent_nbytes(across, piece_shapes, self._ranks // shard, itemsize)
        return sent

    def finish_step(self, finite: bool) -> None:
        """End a step after its reductions; do nothing if this pack was not reduced.

        Args:
            finite: whether the update may be made, the same on all ranks.
        """
        if self._sent is None:
            return
        sent, counted = self._sent
        if self._compression.settings.get("sparse") and self.across is not None:  # bytes depend on the values
            flags = flags_sent_nbytes(len(self._shapes) + 1, self._ranks, self.pack.flat.element_size())
            self._route.channel.correct_nbytes(flags + self._counted - counted - sent)
        *used, spoilt = self._received[self.pack.pieces.size :].tolist()
        counts = finite and not spoilt
        for index, flag in enumerate(used if counts else ()):
            if not flag:
                self._undo(index)
        for exchange in self._exchanges():
            exchange.finish_step(counts)
        self._sent = None

    def rescale(self, factor: float) -> None:
        """Multiply the residuals by `factor`, because gradients are that many times as large from now on."""
        for exchange in self._exchanges():
            exchange.rescale(factor)

    def keeping(self) -> Iterator[ReducerContents]:
        """Yield the reducers whose state this rank keeps."""
        if isinstance(self.there, ReduceScatterReducer):
            rows = [self._row(rank, index) for rank, index in self._order() if self._piece(rank, index).numel]
        else:
            rows = [
                _row(parameter, parameter.held, shape)
                for parameter, shape in zip(self.pack.parameters, self._shapes, strict=True)
            ]
        yield ReducerContents(self.there, rows, self._ranks)
        if self.across is not None:
            local_rows = [self._row(self.pack.rank, index) for index, piece in enumerate(self.pack.mine) if piece.numel]
            yield ReducerContents(self.across, local_rows, 0)

    @property
    def _counted(self) -> int:
        return sum(exchange.collectives.sent_nbytes for exchange in self._exchanges())

    def _exchanges(self) -> list[GradientReducer]:
        return [self.there] if self.across is None else [self.there, self.across]

    def _take(self, flat: torch.Tensor) -> list[bool]:
        """Move the whole gradients into `flat` in the reducer's order, and free them.

        Returns which parameters have a gradient.
        """
        gradients = [parameter.whole.grad for parameter in self.pack.parameters]
        if isinstance(self.there, ReduceScatterReducer):
            self.pack.pieces.collect([flat[begin:end] for begin, end in self.there.parts], gradients)
        else:
            for gradient, view in zip(gradients, self._views(flat), strict=True):
                view.zero_() if gradient is None else view.copy_(gradient)
        for parameter in self.pack.parameters:
            parameter.whole.grad = None
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
        """Restore the residuals of a parameter that no rank has used, so that nothing of it counts as sent."""
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
        """Yield (rank, parameter) of the pieces in the order of the flat gradient."""
        return ((rank, index) for rank in range(len(self._lengths)) for index in range(len(self._shapes)))

    def _piece(self, rank: int, index: int) -> Piece:
        return self.pack.pieces.ranks[rank][index]

    def _row(self, rank: int, index: int) -> FlatTensorRow:
        piece, parameter = self._piece(rank, index), self.pack.parameters[index]
        assert parameter.held is not None
        return _row(parameter, parameter.held.cut(piece.dim, (piece.start, piece.stop)), piece.shape)


def _row(one: Sharded, held: TensorShard | None, shape: tuple[int, ...]) -> FlatTensorRow:
    assert held is not None
    return FlatTensorRow(one.name, shape, torch.empty(shape, device="meta").stride(), held)

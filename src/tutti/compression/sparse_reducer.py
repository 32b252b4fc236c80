"""Sparse all-reduce that may become dense (SparCML, Renggli et al. 2019): (position, value) pairs while shorter.

A pair takes 4 bytes for the position and 4 for the value, so with more than N/2 pairs a dense slice is shorter (delta =
N v / (c + v)). With the algorithm "split", every rank adds up one slice, and the slices are then gathered, sparse or
dense; a codec may encode a dense slice. With "doubling", ranks exchange and merge pairs with partners at distance 1, 2,
4, ...: fewer rounds, which is faster for few values.
"""

from collections.abc import Generator
from typing import Any, Literal

import torch
from torch import Tensor

from tutti.compression.codec import Codec
from tutti.compression.codec_state import rank_seed
from tutti.compression.reducer import CountedCollectives, GradientReducer, Rounds, Span
from tutti.compression.top_k import TopK
from tutti.config.codec_registry import chunk_length
from tutti.errors import PlanError

RoundsWithResult = Generator[list[Any], None, Tensor]
"""Rounds that return the dense sum, or the pairs received."""


class SparseReducer(GradientReducer):
    """All-reduces the values that a top-k codec selects from every rank's gradient.

    Args:
        codec: top-k or DGC.
        numel: number of values in the flat gradient.
        group: process group, None for all ranks.
        algorithm: "split" or "doubling", see the module's docstring.
        return_codec: codec of dense slices when they are gathered, with its own error feedback at the slice's owner
            ("split" only). A codec without error feedback should be unbiased.
        dtype: dtype of the gradient.
        device: device of the gradient.
        seed: seed of the codec's random numbers.

    Attributes:
        switched: whether the last sum became dense.
    """

    def __init__(
        self,
        codec: TopK,
        numel: int,
        *,
        group: Any = None,
        algorithm: Literal["split", "doubling"] = "split",
        return_codec: Codec | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        if return_codec is not None and algorithm != "split":
            raise PlanError(
                "`return_codec`, a codec of dense slices, needs the algorithm 'split'; with 'doubling' leave it out"
            )
        collectives = CountedCollectives(group)
        self.codec, self.numel, self.algorithm, self.return_codec = codec, numel, algorithm, return_codec
        seed = rank_seed(seed, collectives.rank)
        states = {"worker": codec.state(numel, dtype=dtype, device=device, seed=seed)}
        if return_codec is not None:
            local = _slice(collectives.rank, numel, collectives.size)
            states["server"] = return_codec.state(local[1] - local[0], dtype=dtype, device=device, seed=~seed)
        super().__init__(collectives, states)
        self.switched = False

    @property
    def spans(self) -> dict[str, list[Span]]:
        local = (
            {"server": [_slice(self.collectives.rank, self.numel, self.collectives.size)]}
            if "server" in self.states
            else {}
        )
        return {"worker": [(0, self.numel)], **local}

    def rounds(self, flat: Tensor) -> Rounds:
        codec = self.codec.at_step(self.states["worker"].count)
        message = codec.encode(flat, self.states["worker"])
        positions, values = codec.pairs(message, self.numel)
        values = values.to(torch.float64 if flat.dtype is torch.float64 else torch.float32)
        if self.algorithm == "split":
            total = yield from self._split(positions, values)
        else:
            total = yield from self._doubling(positions, values)
        flat.copy_(total)

    def _split(self, positions: Tensor, values: Tensor) -> RoundsWithResult:
        collectives, size = self.collectives, self.collectives.size
        begin, end = _slice(collectives.rank, self.numel, size)
        length = chunk_length(self.numel, size)
        bounds = torch.arange(size + 1, device=positions.device, dtype=torch.int32) * length
        edges = torch.searchsorted(positions, bounds)
        send_counts = edges.diff()
        receive_counts = torch.empty_like(send_counts)
        yield [collectives.all_to_all(receive_counts, send_counts)]
        pairs = _pairs(positions, values.float())
        received = pairs.new_empty(int(receive_counts.sum()), 2)
        yield [collectives.all_to_all(received, pairs, (receive_counts.tolist(), send_counts.tolist()))]
        local = values.new_zeros(end - begin)
        touched = torch.zeros(end - begin, dtype=torch.bool, device=values.device)
        for rank_pairs in torch.split(received, receive_counts.tolist()):  # in the order of ranks
            local.index_add_(0, rank_pairs[:, 0] - begin, _values(rank_pairs, torch.float32).to(local.dtype))
            touched[rank_pairs[:, 0] - begin] = True
        nnz = touched.sum().view(1)
        counts = torch.empty(size, dtype=nnz.dtype, device=nnz.device)
        yield [collectives.all_gather(counts, nnz)]
        self.switched = is_dense(int(counts.sum()), self.numel, local.element_size())
        if self.switched:
            return (yield from self._gather_dense(local, length))
        touched_positions = touched.nonzero()[:, 0].to(torch.int32)
        local_pairs = _pairs(touched_positions + begin, local[touched_positions])
        everything = local_pairs.new_empty(int(counts.sum()), local_pairs.shape[1])
        to_each = local_pairs.repeat(size, 1)
        yield [collectives.all_to_all(everything, to_each, (counts.tolist(), [len(local_pairs)] * size))]
        return _dense(everything, self.numel, values)

    def _gather_dense(self, local: Tensor, length: int) -> RoundsWithResult:
        size = self.collectives.size
        if self.return_codec is None:
            padded = local.new_zeros(length)
            padded[: local.numel()] = local
            gathered = local.new_empty(size * length)
            yield [self.collectives.all_gather(gathered, padded)]
            return gathered[: self.numel]
        message = torch.zeros(self.return_codec.nbytes(length), dtype=torch.uint8, device=local.device)
        state = self.states["server"]
        self.return_codec.encode(local, state, message)
        coded = message.new_empty(size * message.numel())
        yield [self.collectives.all_gather(coded, message)]
        total = local.new_zeros(self.numel)
        for rank, rank_message in enumerate(coded.view(size, -1)):
            start, stop = _slice(rank, self.numel, size)
            self.return_codec.decode_add(rank_message, total[start:stop])
        return total

    def _doubling(self, positions: Tensor, values: Tensor) -> RoundsWithResult:
        """Merge with partners at doubling distance.

        Ranks beyond the largest power of two send their pairs to a partner first, and receive the sum at the end.
        """
        collectives, rank = self.collectives, self.collectives.rank
        power = 1 << (collectives.size.bit_length() - 1)
        local_pairs = _pairs(positions, values)
        self.switched = False
        if rank >= power:
            yield from _send(collectives, local_pairs, rank - power)
            local_pairs = yield from _receive(collectives, rank - power, self.numel, values)
            self.switched = local_pairs.dim() == 1
            return _dense(local_pairs, self.numel, values)
        if rank + power < collectives.size:
            other = yield from _receive(collectives, rank + power, self.numel, values)
            local_pairs = self._merged(local_pairs, other, values)
        distance = 1
        while distance < power:
            other = yield from _swap_operands(collectives, local_pairs, rank ^ distance, self.numel, values)
            local_pairs = self._merged(local_pairs, other, values)
            distance *= 2
        if rank + power < collectives.size:
            yield from _send(collectives, local_pairs, rank + power)
        return _dense(local_pairs, self.numel, values)

    def _merged(self, operand: Tensor, other: Tensor, like: Tensor) -> Tensor:
        """Return the sum of two operands, each pairs or dense. The sum is dense if that is shorter."""
        if operand.dim() == 2 and other.dim() == 2:
            both = torch.cat([operand, other])
            positions, at = torch.unique(both[:, 0], return_inverse=True)
            if not is_dense(positions.numel(), self.numel, like.element_size()):
                return _pairs(positions, like.new_zeros(positions.numel()).index_add_(0, at, _values(both, like.dtype)))
        self.switched = True
        return _dense(operand, self.numel, like) + _dense(other, self.numel, like)


def is_dense(nnz: int, numel: int, value_nbytes: int = 4) -> bool:
    """Return whether `nnz` pairs take more bytes than all values: nnz > N v / (c + v), with c = 4 bytes a position."""
    return nnz * (4 + value_nbytes) > numel * value_nbytes


def _slice(rank: int, numel: int, ranks: int) -> tuple[int, int]:
    length = chunk_length(numel, ranks)
    return min(rank * length, numel), min((rank + 1) * length, numel)


def _pairs(positions: Tensor, values: Tensor) -> Tensor:
    """Return (nnz, 2) int32, or 3 columns for float64: the position, then the bits of the value."""
    words = values.contiguous().view(torch.int32).view(len(values), values.element_size() // 4)
    return torch.cat([positions.to(torch.int32)[:, None], words], dim=1)


def _values(pairs: Tensor, dtype: torch.dtype) -> Tensor:
    return pairs[:, 1:].clone(memory_format=torch.contiguous_format).view(dtype).view(-1)


def _dense(operand: Tensor, numel: int, like: Tensor) -> Tensor:
    """Return all values, in the dtype of `like`, from pairs or from a tensor that is already dense."""
    if operand.dim() == 1:
        return operand
    total = like.new_zeros(numel)
    total[operand[:, 0]] = _values(operand, like.dtype)
    return total


def _header(operand: Tensor) -> Tensor:
    """Return the number of pairs that follow; -1 announces all values."""
    return torch.tensor([len(operand) if operand.dim() == 2 else -1], dtype=torch.int64, device=operand.device)


def _receive_buffer(header: Tensor, numel: int, like: Tensor) -> Tensor:
    """Return a buffer for the operand that the header announces."""
    pairs = int(header)
    if pairs < 0:
        return like.new_empty(numel)
    return like.new_empty(pairs, 1 + like.element_size() // 4, dtype=torch.int32)


def _swap_operands(
    collectives: CountedCollectives, local_pairs: Tensor, partner: int, numel: int, like: Tensor
) -> RoundsWithResult:
    """Send this rank's operand to the partner, and return the partner's."""
    header = like.new_empty(1, dtype=torch.int64)
    yield collectives.swap(header, _header(local_pairs), partner)
    other = _receive_buffer(header, numel, like)
    yield collectives.swap(other, local_pairs.contiguous(), partner)
    return other


def _send(collectives: CountedCollectives, local_pairs: Tensor, partner: int) -> Rounds:
    yield collectives.swap(None, _header(local_pairs), partner)
    yield collectives.swap(None, local_pairs.contiguous(), partner)


def _receive(collectives: CountedCollectives, partner: int, numel: int, like: Tensor) -> RoundsWithResult:
    header = like.new_empty(1, dtype=torch.int64)
    yield collectives.swap(header, None, partner)
    other = _receive_buffer(header, numel, like)
    yield collectives.swap(other, None, partner)
    return other

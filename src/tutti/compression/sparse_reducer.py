"""Sparse all-reduce that may become dense (SparCML, Renggli et al. 2019): (place, value) pairs while these are shorter.

A pair takes 4 bytes for the place and 4 for the value, so beyond N/2 places a dense slice is shorter (delta = N v / (c
+ v)). With the algorithm "split", every rank adds up one slice, and the slices are then gathered, sparse or dense; a
codec may encode a dense slice. With "doubling", ranks exchange and merge pairs with partners at distance 1, 2, 4, ...:
fewer rounds, which is faster for few values.
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

Found = Generator[list[Any], None, Tensor]
"""Rounds that return the dense sum, or the pairs received."""


class SparseReducer(GradientReducer):
    """All-reduces what a top-k codec selects of every rank's gradient.

    Args:
        codec: top-k or DGC.
        numel: number of values in the flat gradient.
        group: process group, None for all ranks.
        algorithm: "split" or "doubling", see the module's docstring.
        back: codec of dense slices when they are gathered, with its own error feedback at the slice's owner ("split"
            only). A codec without error feedback should be unbiased.
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
        back: Codec | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        if back is not None and algorithm != "split":
            raise PlanError(
                "`back`, a codec of dense slices, needs the algorithm 'split'; with 'doubling' leave it out"
            )
        collectives = CountedCollectives(group)
        self.codec, self.numel, self.algorithm, self.back = codec, numel, algorithm, back
        seed = rank_seed(seed, collectives.rank)
        states = {"worker": codec.state(numel, dtype=dtype, device=device, seed=seed)}
        if back is not None:
            local = _slice(collectives.rank, numel, collectives.size)
            states["server"] = back.state(local[1] - local[0], dtype=dtype, device=device, seed=~seed)
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
        places, values = codec.pairs(message, self.numel)
        values = values.to(torch.float64 if flat.dtype is torch.float64 else torch.float32)
        if self.algorithm == "split":
            total = yield from self._split(places, values)
        else:
            total = yield from self._doubling(places, values)
        flat.copy_(total)

    def _split(self, places: Tensor, values: Tensor) -> Found:
        collectives, size = self.collectives, self.collectives.size
        begin, end = _slice(collectives.rank, self.numel, size)
        length = chunk_length(self.numel, size)
        bounds = torch.arange(size + 1, device=places.device, dtype=torch.int32) * length
        edges = torch.searchsorted(places, bounds)
        to = edges.diff()
        come = torch.empty_like(to)
        yield [collectives.all_to_all(come, to)]
        pairs = _pairs(places, values.float())
        received = pairs.new_empty(int(come.sum()), 2)
        yield [collectives.all_to_all(received, pairs, (come.tolist(), to.tolist()))]
        local = values.new_zeros(end - begin)
        touched = torch.zeros(end - begin, dtype=torch.bool, device=values.device)
        for part in torch.split(received, come.tolist()):  # in the order of ranks
            local.index_add_(0, part[:, 0] - begin, _values(part, torch.float32).to(local.dtype))
            touched[part[:, 0] - begin] = True
        nnz = touched.sum().view(1)
        counts = torch.empty(size, dtype=nnz.dtype, device=nnz.device)
        yield [collectives.all_gather(counts, nnz)]
        self.switched = is_dense(int(counts.sum()), self.numel, local.element_size())
        if self.switched:
            return (yield from self._gather_dense(local, length))
        places_touched = touched.nonzero()[:, 0].to(torch.int32)
        local_pairs = _pairs(places_touched + begin, local[places_touched])
        everything = local_pairs.new_empty(int(counts.sum()), local_pairs.shape[1])
        to_each = local_pairs.repeat(size, 1)
        yield [collectives.all_to_all(everything, to_each, (counts.tolist(), [len(local_pairs)] * size))]
        return _dense(everything, self.numel, values)

    def _gather_dense(self, local: Tensor, length: int) -> Found:
        size = self.collectives.size
        if self.back is None:
            padded = local.new_zeros(length)
            padded[: local.numel()] = local
            gathered = local.new_empty(size * length)
            yield [self.collectives.all_gather(gathered, padded)]
            return gathered[: self.numel]
        message = torch.zeros(self.back.nbytes(length), dtype=torch.uint8, device=local.device)
        state = self.states["server"]
        self.back.encode(local, state, message)
        coded = message.new_empty(size * message.numel())
        yield [self.collectives.all_gather(coded, message)]
        total = local.new_zeros(self.numel)
        for rank, part in enumerate(coded.view(size, -1)):
            start, stop = _slice(rank, self.numel, size)
            self.back.decode_add(part, total[start:stop])
        return total

    def _doubling(self, places: Tensor, values: Tensor) -> Found:
        """Merge with partners at doubling distance.

        Ranks beyond the largest power of two hand over their pairs first, and receive the sum at the end.
        """
        collectives, power, rank = (
            self.collectives,
            1 << (self.collectives.size.bit_length() - 1),
            self.collectives.rank,
        )
        local_pairs = _pairs(places, values)
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
            other = yield from _trade(collectives, local_pairs, rank ^ distance, self.numel, values)
            local_pairs = self._merged(local_pairs, other, values)
            distance *= 2
        if rank + power < collectives.size:
            yield from _send(collectives, local_pairs, rank + power)
        return _dense(local_pairs, self.numel, values)

    def _merged(self, left: Tensor, other: Tensor, like: Tensor) -> Tensor:
        """Return the sum of two operands, each pairs or dense; it is dense from the switching point on."""
        if left.dim() == 2 and other.dim() == 2:
            both = torch.cat([left, other])
            places, at = torch.unique(both[:, 0], return_inverse=True)
            if not is_dense(places.numel(), self.numel, like.element_size()):
                return _pairs(places, like.new_zeros(places.numel()).index_add_(0, at, _values(both, like.dtype)))
        self.switched = True
        return _dense(left, self.numel, like) + _dense(other, self.numel, like)


def is_dense(nnz: int, numel: int, value_nbytes: int = 4) -> bool:
    """Return whether `nnz` pairs take more bytes than all values: nnz > N v / (c + v), with places of c = 4 bytes."""
    return nnz * (4 + value_nbytes) > numel * value_nbytes


def _slice(rank: int, numel: int, ranks: int) -> tuple[int, int]:
    length = chunk_length(numel, ranks)
    return min(rank * length, numel), min((rank + 1) * length, numel)


def _pairs(places: Tensor, values: Tensor) -> Tensor:
    """Return (nnz, 2) int32, or 3 columns for float64: the place, then the bits of the value."""
    words = values.contiguous().view(torch.int32).view(len(values), values.element_size() // 4)
    return torch.cat([places.to(torch.int32)[:, None], words], dim=1)


def _values(pairs: Tensor, dtype: torch.dtype) -> Tensor:
    return pairs[:, 1:].clone(memory_format=torch.contiguous_format).view(dtype).view(-1)


def _dense(left: Tensor, numel: int, like: Tensor) -> Tensor:
    """Return all values, in the dtype of `like`, from pairs or from a tensor that is already dense."""
    if left.dim() == 1:
        return left
    total = like.new_zeros(numel)
    total[left[:, 0]] = _values(left, like.dtype)
    return total


def _header(left: Tensor) -> Tensor:
    """Return the number of pairs that follow; -1 announces all values."""
    return torch.tensor([len(left) if left.dim() == 2 else -1], dtype=torch.int64, device=left.device)


def _room(header: Tensor, numel: int, like: Tensor) -> Tensor:
    """Return a receive buffer for what the header announces."""
    pairs = int(header)
    if pairs < 0:
        return like.new_empty(numel)
    return like.new_empty(pairs, 1 + like.element_size() // 4, dtype=torch.int32)


def _trade(collectives: CountedCollectives, local_pairs: Tensor, partner: int, numel: int, like: Tensor) -> Found:
    header = like.new_empty(1, dtype=torch.int64)
    yield collectives.swap(header, _header(local_pairs), partner)
    other = _room(header, numel, like)
    yield collectives.swap(other, local_pairs.contiguous(), partner)
    return other


def _send(collectives: CountedCollectives, local_pairs: Tensor, partner: int) -> Rounds:
    yield collectives.swap(None, _header(local_pairs), partner)
    yield collectives.swap(None, local_pairs.contiguous(), partner)


def _receive(collectives: CountedCollectives, partner: int, numel: int, like: Tensor) -> Found:
    header = like.new_empty(1, dtype=torch.int64)
    yield collectives.swap(header, None, partner)
    other = _room(header, numel, like)
    yield collectives.swap(other, None, partner)
    return other

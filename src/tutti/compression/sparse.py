"""Sparse all-reduce that becomes dense (SparCML, Renggli et al. 2019): pairs of place and value while those are fewer.

A pair costs 4 bytes for the place and 4 for the value, so beyond N/2 places a dense slice is shorter (delta = N v /
(c + v)). `split`: owners of slices add up, then slices are gathered, sparse or dense, and a dense one may be written
in a codec. `doubling`: ranks exchange and merge with partners at distance 1, 2, 4, ...: fewer rounds, for few values.
"""

from collections.abc import Generator
from typing import Any, Literal

import torch
from torch import Tensor

from tutti.compression.codec import Codec
from tutti.compression.exchange import Exchange, Rounds, Span, Wire
from tutti.compression.state import rank_seed
from tutti.compression.topk import TopK
from tutti.compression.two_phase import chunk_length
from tutti.errors import PlanError

Found = Generator[list[Any], None, Tensor]
"""Rounds that return the dense sum."""


class SparseSum(Exchange):
    """The sum of what a top-k codec keeps of every rank's gradient.

    `back`: a codec for dense slices on the way back, with its own error feedback at the slice's owner (`split` only;
    without error feedback take one that is unbiased). `switched`: whether the last sum became dense.
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
            raise PlanError("a codec for the way back needs the algorithm 'split'; with 'doubling' leave `back` out")
        wire = Wire(group)
        self.codec, self.numel, self.algorithm, self.back = codec, numel, algorithm, back
        seed = rank_seed(seed, wire.rank)
        states = {"worker": codec.state(numel, dtype=dtype, device=device, seed=seed)}
        if back is not None:
            own = _slice(wire.rank, numel, wire.size)
            states["server"] = back.state(own[1] - own[0], dtype=dtype, device=device, seed=~seed)
        super().__init__(wire, states)
        self.switched = False

    @property
    def spans(self) -> dict[str, list[Span]]:
        own = {"server": [_slice(self.wire.rank, self.numel, self.wire.size)]} if "server" in self.states else {}
        return {"worker": [(0, self.numel)], **own}

    def rounds(self, flat: Tensor) -> Rounds:
        codec = self.codec.now(self.states["worker"].count)
        message = codec.encode(flat, self.states["worker"])
        places, found = codec.pairs(message, self.numel)
        found = found.to(torch.float64 if flat.dtype is torch.float64 else torch.float32)
        if self.algorithm == "split":
            total = yield from self._split(places, found)
        else:
            total = yield from self._doubling(places, found)
        flat.copy_(total)

    def _split(self, places: Tensor, found: Tensor) -> Found:
        wire, size = self.wire, self.wire.size
        begin, end = _slice(wire.rank, self.numel, size)
        length = chunk_length(self.numel, size)
        bounds = torch.arange(size + 1, device=places.device, dtype=torch.int32) * length
        edges = torch.searchsorted(places, bounds)
        to = edges.diff()
        come = torch.empty_like(to)
        yield [wire.all_to_all(come, to)]
        pairs = _pairs(places, found.float())
        received = pairs.new_empty(int(come.sum()), 2)
        yield [wire.all_to_all(received, pairs, (come.tolist(), to.tolist()))]
        own = found.new_zeros(end - begin)
        touched = torch.zeros(end - begin, dtype=torch.bool, device=found.device)
        for part in torch.split(received, come.tolist()):  # in the order of ranks
            own.index_add_(0, part[:, 0] - begin, _values(part, torch.float32).to(own.dtype))
            touched[part[:, 0] - begin] = True
        nnz = touched.sum().view(1)
        counts = torch.empty(size, dtype=nnz.dtype, device=nnz.device)
        yield [wire.all_gather(counts, nnz)]
        self.switched = is_dense(int(counts.sum()), self.numel, own.element_size())
        if self.switched:
            return (yield from self._gather_dense(own, length))
        kept = touched.nonzero()[:, 0].to(torch.int32)
        mine = _pairs(kept + begin, own[kept])
        everything = mine.new_empty(int(counts.sum()), mine.shape[1])
        to_each = mine.repeat(size, 1)
        yield [wire.all_to_all(everything, to_each, (counts.tolist(), [len(mine)] * size))]
        return _dense(everything, self.numel, found)

    def _gather_dense(self, own: Tensor, length: int) -> Found:
        size = self.wire.size
        if self.back is None:
            padded = own.new_zeros(length)
            padded[: own.numel()] = own
            gathered = own.new_empty(size * length)
            yield [self.wire.all_gather(gathered, padded)]
            return gathered[: self.numel]
        message = torch.zeros(self.back.nbytes(length), dtype=torch.uint8, device=own.device)
        state = self.states["server"]
        self.back.encode(own, state, message)
        coded = message.new_empty(size * message.numel())
        yield [self.wire.all_gather(coded, message)]
        total = own.new_zeros(self.numel)
        for rank, part in enumerate(coded.view(size, -1)):
            start, stop = _slice(rank, self.numel, size)
            self.back.decode_add(part, total[start:stop])
        return total

    def _doubling(self, places: Tensor, found: Tensor) -> Found:
        """Ranks beyond the largest power of two hand theirs over first, and get the sum at the end."""
        wire, power, rank = self.wire, 1 << (self.wire.size.bit_length() - 1), self.wire.rank
        mine = _pairs(places, found)
        self.switched = False
        if rank >= power:
            yield from _send(wire, mine, rank - power)
            mine = yield from _receive(wire, rank - power, self.numel, found)
            self.switched = mine.dim() == 1
            return _dense(mine, self.numel, found)
        if rank + power < wire.size:
            other = yield from _receive(wire, rank + power, self.numel, found)
            mine = self._merged(mine, other, found)
        distance = 1
        while distance < power:
            other = yield from _trade(wire, mine, rank ^ distance, self.numel, found)
            mine = self._merged(mine, other, found)
            distance *= 2
        if rank + power < wire.size:
            yield from _send(wire, mine, rank + power)
        return _dense(mine, self.numel, found)

    def _merged(self, one: Tensor, other: Tensor, like: Tensor) -> Tensor:
        """The sum of two, each pairs or all values: all values from the switching point on."""
        if one.dim() == 2 and other.dim() == 2:
            both = torch.cat([one, other])
            places, at = torch.unique(both[:, 0], return_inverse=True)
            if not is_dense(places.numel(), self.numel, like.element_size()):
                return _pairs(places, like.new_zeros(places.numel()).index_add_(0, at, _values(both, like.dtype)))
        self.switched = True
        return _dense(one, self.numel, like) + _dense(other, self.numel, like)


def is_dense(nnz: int, numel: int, value_nbytes: int = 4) -> bool:
    """Whether so many pairs are longer than all values: nnz > N v / (c + v), places of c = 4 bytes."""
    return nnz * (4 + value_nbytes) > numel * value_nbytes


def _slice(rank: int, numel: int, ranks: int) -> tuple[int, int]:
    length = chunk_length(numel, ranks)
    return min(rank * length, numel), min((rank + 1) * length, numel)


def _pairs(places: Tensor, found: Tensor) -> Tensor:
    """(nnz, 2) int32, 3 of float64: the place, and the bits of the value."""
    words = found.contiguous().view(torch.int32).view(len(found), found.element_size() // 4)
    return torch.cat([places.to(torch.int32)[:, None], words], dim=1)


def _values(pairs: Tensor, dtype: torch.dtype) -> Tensor:
    return pairs[:, 1:].clone(memory_format=torch.contiguous_format).view(dtype).view(-1)


def _dense(one: Tensor, numel: int, like: Tensor) -> Tensor:
    """All values, in the dtype of `like`, of pairs or of what is dense already."""
    if one.dim() == 1:
        return one
    total = like.new_zeros(numel)
    total[one[:, 0]] = _values(one, like.dtype)
    return total


def _header(one: Tensor) -> Tensor:
    """How many pairs follow; -1: all values."""
    return torch.tensor([len(one) if one.dim() == 2 else -1], dtype=torch.int64, device=one.device)


def _room(header: Tensor, numel: int, like: Tensor) -> Tensor:
    pairs = int(header)
    if pairs < 0:
        return like.new_empty(numel)
    return like.new_empty(pairs, 1 + like.element_size() // 4, dtype=torch.int32)


def _trade(wire: Wire, mine: Tensor, partner: int, numel: int, like: Tensor) -> Found:
    header = like.new_empty(1, dtype=torch.int64)
    yield wire.swap(header, _header(mine), partner)
    other = _room(header, numel, like)
    yield wire.swap(other, mine.contiguous(), partner)
    return other


def _send(wire: Wire, mine: Tensor, partner: int) -> Rounds:
    yield wire.swap(None, _header(mine), partner)
    yield wire.swap(None, mine.contiguous(), partner)


def _receive(wire: Wire, partner: int, numel: int, like: Tensor) -> Found:
    header = like.new_empty(1, dtype=torch.int64)
    yield wire.swap(header, None, partner)
    other = _room(header, numel, like)
    yield wire.swap(other, None, partner)
    return other

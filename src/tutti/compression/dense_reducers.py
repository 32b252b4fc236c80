"""All-reduce and reduce-scatter of encoded messages.

Two-phase all-reduce: every rank owns a chunk. Messages of chunks go to the owners, who decode and add them, encode the
sum and send it to all ranks. Encoded messages cannot be added on the way as in a ring. A rank sends 2 (p - 1) messages
of 1/p of the gradient, as many bytes as a ring all-reduce of dense values of that width. All-gather: every rank gets
every rank's message of the whole gradient. Reduce-scatter: the first of the two phases, so only the workers keep a
residual.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tutti.compression.blocks import count
from tutti.compression.codec import FLOATS, Codec
from tutti.compression.codec_state import rank_seed
from tutti.compression.qsgd import Levels
from tutti.compression.reducer import CountedCollectives, GradientReducer, Rounds, Span
from tutti.compression.terngrad import TernGrad
from tutti.config.codec_registry import chunk_length


class TwoPhaseReducer(GradientReducer):
    """All-reduce in two phases: messages to the owners of chunks, then the owners' sums to all ranks.

    The encoding error of a sum stays with the chunk's owner, who adds it to the sum of the next step. All ranks of
    `group` make the reducer with the same arguments.

    Args:
        codec: codec of the gradients.
        numel: number of values in the flat gradient.
        group: process group, None for all ranks.
        return_codec: codec of the sums; None: `codec`, or for TernGrad its `return_codec`.
        dtype: dtype of the gradient.
        device: device of the gradient.
        seed: seed of the codec's random numbers.
    """

    def __init__(
        self,
        codec: Codec,
        numel: int,
        *,
        group: Any = None,
        return_codec: Codec | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        collectives = CountedCollectives(group)
        self.codec, self.return_codec, self.numel = codec, return_codec or _return_codec(codec, collectives.size), numel
        self.length = chunk_length(numel, collectives.size)
        own_chunk = self._span(collectives.rank)
        seed = rank_seed(seed, collectives.rank)
        states = {
            "worker": codec.state(numel, dtype=dtype, device=device, seed=seed),
            "server": self.return_codec.state(own_chunk[1] - own_chunk[0], dtype=dtype, device=device, seed=~seed),
        }
        super().__init__(collectives, states)
        own_numel = own_chunk[1] - own_chunk[0]
        self._sum = torch.zeros(own_numel, dtype=dtype if dtype in FLOATS else torch.float32, device=device)
        chunk_nbytes, sum_nbytes = codec.nbytes(self.length), self.return_codec.nbytes(self.length)
        self._out, self._in = (
            torch.zeros(collectives.size, chunk_nbytes, dtype=torch.uint8, device=device) for _ in range(2)
        )
        self._all = torch.zeros(collectives.size, sum_nbytes, dtype=torch.uint8, device=device)
        self._own = torch.zeros(sum_nbytes, dtype=torch.uint8, device=device)

    @property
    def spans(self) -> dict[str, list[Span]]:
        return {"worker": [(0, self.numel)], "server": [self._span(self.collectives.rank)]}

    @property
    def step_nbytes(self) -> int:
        """Bytes that a rank sends in a step: (p - 1) chunk messages in each phase, and TernGrad's shared scales."""
        p = self.collectives.size
        scales = 4 * p * count(self.length, self.codec.block) if isinstance(self.codec, TernGrad) else 0
        return (p - 1) * (self._out.shape[1] + self._own.numel()) + 2 * (p - 1) * scales // p

    def rounds(self, flat: Tensor) -> Rounds:
        collectives, (start, stop) = self.collectives, self._span(self.collectives.rank)
        scales = None
        if isinstance(self.codec, TernGrad):
            flat_scales = self._scales(flat, self.codec)
            yield [collectives.all_reduce(flat_scales, dist.ReduceOp.MAX)]
            scales = flat_scales.masked_fill_(flat_scales.isinf(), torch.nan).view(collectives.size, -1)
        for rank in range(collectives.size):
            begin, end = self._span(rank)
            self._encode(flat[begin:end], rank, begin, end, scales)
        yield [collectives.all_to_all(self._in, self._out)]
        total = self._sum.zero_()
        for message in self._in:
            self.codec.decode_add(message, total)
        if (
            scales is not None
            and isinstance(self.return_codec, Levels)
            and self.return_codec.levels >= collectives.size
        ):
            scales_of_sum = (
                scales[collectives.rank, : count(stop - start, self.return_codec.block)] * self.return_codec.levels
            )
            self.return_codec.encode_with_scales(total, self.states["server"], self._own, scales_of_sum)
        else:
            self.return_codec.encode(total, self.states["server"], self._own)
        yield [collectives.all_gather(self._all.view(-1), self._own)]
        for rank, message in enumerate(self._all):
            begin, end = self._span(rank)
            _decode(self.return_codec, message, flat[begin:end])

    def _span(self, rank: int) -> tuple[int, int]:
        """Return the chunk that a rank owns."""
        return min(rank * self.length, self.numel), min((rank + 1) * self.length, self.numel)

    def _encode(self, values: Tensor, rank: int, begin: int, end: int, scales: Tensor | None) -> None:
        state = self.states["worker"].part(begin, end)
        if scales is None or not isinstance(self.codec, TernGrad):
            self.codec.encode(values, state, self._out[rank])
        else:
            values = self.codec.clipped(values if values.dtype in FLOATS else values.float())
            chunk_scales = scales[rank, : count(end - begin, self.codec.block)]
            self.codec.encode_with_scales(values, state, self._out[rank], chunk_scales)

    def _scales(self, flat: Tensor, codec: TernGrad) -> Tensor:
        """Return the scales of this rank's blocks, chunk by chunk.

        A scale is infinite where a value is not finite, because a maximum over ranks may drop NaN.
        """
        per_chunk = count(self.length, codec.block)
        block_scales = torch.zeros(self.collectives.size, per_chunk, dtype=torch.float32, device=flat.device)
        for rank in range(self.collectives.size):
            begin, end = self._span(rank)
            if end > begin:
                values = flat[begin:end] if flat.dtype in FLOATS else flat[begin:end].float()
                local_scales = codec.scales(codec.clipped(values))
                block_scales[rank, : local_scales.numel()] = local_scales
        return block_scales.masked_fill_(block_scales.isnan(), torch.inf).flatten()


class AllGatherReducer(GradientReducer):
    """All-reduce by an all-gather of every rank's message of the whole gradient, added up in the order of ranks.

    It suits codecs whose messages are short for any number of ranks (top-k, DGC). It also suits any codec between two
    ranks: that takes as many bytes as two phases, in one round, and the sum is not encoded again.

    Args:
        codec: codec of the gradients.
        numel: number of values in the flat gradient.
        group: process group, None for all ranks.
        dtype: dtype of the gradient.
        device: device of the gradient.
        seed: seed of the codec's random numbers.
    """

    def __init__(
        self,
        codec: Codec,
        numel: int,
        *,
        group: Any = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        collectives = CountedCollectives(group)
        self.codec, self.numel = codec, numel
        state = codec.state(numel, dtype=dtype, device=device, seed=rank_seed(seed, collectives.rank))
        super().__init__(collectives, {"worker": state})

    @property
    def step_nbytes(self) -> int:
        """Bytes that a rank sends in the next step."""
        return (self.collectives.size - 1) * self.codec.at_step(self.states["worker"].count).nbytes(self.numel)

    def write(self, flat: Tensor) -> Tensor:
        """Encode the gradient and return this rank's message."""
        return self.codec.at_step(self.states["worker"].count).encode(flat, self.states["worker"])

    def read(self, message: Tensor, total: Tensor) -> None:
        """Add the values of a message to `total`."""
        self.codec.at_step(self.states["worker"].count).decode_add(message, total)

    def rounds(self, flat: Tensor) -> Rounds:
        message = self.write(flat)
        gathered = message.new_empty(self.collectives.size, message.numel())
        if self.collectives.size == 2 and message.device.type == "cpu":  # Gloo's collectives mostly send one way first
            gathered[self.collectives.rank] = message
            yield self.collectives.swap(
                gathered[1 - self.collectives.rank], gathered[self.collectives.rank], 1 - self.collectives.rank
            )
        else:
            yield [self.collectives.all_gather(gathered.view(-1), message)]
        total = flat.zero_() if flat.dtype in FLOATS else torch.zeros_like(flat, dtype=torch.float32)
        for rank_message in gathered:
            self.read(rank_message, total)
        if total is not flat:
            flat.copy_(total)


def _return_codec(codec: Codec, ranks: int) -> Codec:
    return codec.return_codec(ranks) if isinstance(codec, TernGrad) else codec


def _decode(codec: Codec, message: Tensor, into: Tensor) -> None:
    """Replace `into` by the values of a message."""
    if into.dtype in FLOATS:
        codec.decode_add(message, into.zero_())
    else:
        wide = torch.zeros_like(into, dtype=torch.float32)
        codec.decode_add(message, wide)
        into.copy_(wide)


class ReduceScatterReducer(GradientReducer):
    """Reduce-scatter of a flat gradient in which part r, of `lengths[r]` values, belongs to rank r.

    All ranks make it with the same arguments. TernGrad's blocks are scaled on each rank separately here, because shared
    scales are needed only where a sum is encoded again.

    Args:
        codec: codec of the gradients.
        lengths: number of values of each rank's part.
        group: process group, None for all ranks.
        dtype: dtype of the gradient.
        device: device of the gradient.
        seed: seed of the codec's random numbers.

    Attributes:
        parts: (start, stop) of each rank's part in the flat gradient.
    """

    def __init__(
        self,
        codec: Codec,
        lengths: Sequence[int],
        *,
        group: Any = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        collectives = CountedCollectives(group)
        ends = [0, *accumulate(lengths)]
        self.codec, self.numel, self.parts = codec, ends[-1], list(pairwise(ends))
        self._longest, self._dtype = max(lengths), dtype if dtype in FLOATS else torch.float32
        self._out = torch.zeros(0, 0, dtype=torch.uint8, device=device)
        state = codec.state(self.numel, dtype=dtype, device=device, seed=rank_seed(seed, collectives.rank))
        super().__init__(collectives, {"worker": state})

    @property
    def local_span(self) -> tuple[int, int]:
        """(start, stop) of this rank's part of the flat gradient."""
        return self.parts[self.collectives.rank]

    def write(self, flat: Tensor) -> None:
        """Encode all parts; `flat` is not needed afterwards."""
        state = self.states["worker"]
        codec = self.codec.at_step(state.count)
        self._out = torch.zeros(
            self.collectives.size, codec.nbytes(self._longest), dtype=torch.uint8, device=flat.device
        )
        for message, (begin, end) in zip(self._out, self.parts, strict=True):
            codec.encode(flat[begin:end], state.part(begin, end), message)

    def send(self, part: Tensor) -> Rounds:
        """Send the encoded parts to their owners, and leave the sum of this rank's part in `part`."""
        codec = self.codec.at_step(self.states["worker"].count)
        received = torch.empty_like(self._out)
        yield [self.collectives.all_to_all(received, self._out)]
        total = torch.zeros_like(part, dtype=self._dtype)
        for message in received:
            codec.decode_add(message, total)
        part.copy_(total)

    def rounds(self, flat: Tensor) -> Rounds:
        """Leave the sum in this rank's part of `flat`; the other parts are not changed."""
        self.write(flat)
        yield from self.send(flat[slice(*self.local_span)])

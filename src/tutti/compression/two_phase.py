"""The two-phase sum: chunks to their owners, decoded and added there, written anew, and gathered by everyone.

Codes cannot be added up on the way as a ring does. A rank sends 2 (p - 1) codes of 1/p of the gradient, as many bytes
as a ring sends of dense values in that width.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tutti.compression.blocks import count
from tutti.compression.codec import FLOATS, Codec
from tutti.compression.exchange import Exchange, Rounds, Span, Wire
from tutti.compression.levels import Levels
from tutti.compression.state import rank_seed
from tutti.compression.terngrad import TernGrad


class TwoPhase(Exchange):
    """`codec` on the way there and `back` (the same one by default) on the way back, each with its own state.

    What the owner of a chunk cannot write is kept at the owner and added to the next step's sum. All ranks of `group`
    make it with the same arguments.
    """

    def __init__(
        self,
        codec: Codec,
        numel: int,
        *,
        group: Any = None,
        back: Codec | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        wire = Wire(group)
        self.codec, self.back, self.numel = codec, back or _way_back(codec, wire.size), numel
        self.length = chunk_length(numel, wire.size)
        own = self._span(wire.rank)
        seed = rank_seed(seed, wire.rank)
        states = {
            "worker": codec.state(numel, dtype=dtype, device=device, seed=seed),
            "server": self.back.state(own[1] - own[0], dtype=dtype, device=device, seed=~seed),
        }
        super().__init__(wire, states)
        self._sum = torch.zeros(own[1] - own[0], dtype=dtype if dtype in FLOATS else torch.float32, device=device)
        there, again = codec.nbytes(self.length), self.back.nbytes(self.length)
        self._out, self._in = (torch.zeros(wire.size, there, dtype=torch.uint8, device=device) for _ in range(2))
        self._all = torch.zeros(wire.size, again, dtype=torch.uint8, device=device)
        self._own = torch.zeros(again, dtype=torch.uint8, device=device)

    @property
    def spans(self) -> dict[str, list[Span]]:
        return {"worker": [(0, self.numel)], "server": [self._span(self.wire.rank)]}

    @property
    def step_nbytes(self) -> int:
        """Bytes a rank sends in a step: (p - 1) codes of a chunk there and back, and the shared scales of TernGrad."""
        p = self.wire.size
        scales = 4 * p * count(self.length, self.codec.block) if isinstance(self.codec, TernGrad) else 0
        return (p - 1) * (self._out.shape[1] + self._own.numel()) + 2 * (p - 1) * scales // p

    def rounds(self, flat: Tensor) -> Rounds:
        wire, (start, stop) = self.wire, self._span(self.wire.rank)
        scales = None
        if isinstance(self.codec, TernGrad):
            flat_scales = self._scales(flat, self.codec)
            yield [wire.all_reduce(flat_scales, dist.ReduceOp.MAX)]
            scales = flat_scales.masked_fill_(flat_scales.isinf(), torch.nan).view(wire.size, -1)
        for rank in range(wire.size):
            begin, end = self._span(rank)
            self._encode(flat[begin:end], rank, begin, end, scales)
        yield [wire.all_to_all(self._in, self._out)]
        total = self._sum.zero_()
        for message in self._in:
            self.codec.decode_add(message, total)
        if scales is not None and isinstance(self.back, Levels) and self.back.levels >= wire.size:
            given = scales[wire.rank, : count(stop - start, self.back.block)] * self.back.levels
            self.back.encode_with_scales(total, self.states["server"], self._own, given)
        else:
            self.back.encode(total, self.states["server"], self._own)
        yield [wire.all_gather(self._all.view(-1), self._own)]
        for rank, message in enumerate(self._all):
            begin, end = self._span(rank)
            _decode(self.back, message, flat[begin:end])

    def _span(self, rank: int) -> tuple[int, int]:
        """The chunk that a rank owns."""
        return min(rank * self.length, self.numel), min((rank + 1) * self.length, self.numel)

    def _encode(self, values: Tensor, rank: int, begin: int, end: int, scales: Tensor | None) -> None:
        state = self.states["worker"].part(begin, end)
        if scales is None or not isinstance(self.codec, TernGrad):
            self.codec.encode(values, state, self._out[rank])
        else:
            values = self.codec.clipped(values if values.dtype in FLOATS else values.float())
            given = scales[rank, : count(end - begin, self.codec.block)]
            self.codec.encode_with_scales(values, state, self._out[rank], given)

    def _scales(self, flat: Tensor, codec: TernGrad) -> Tensor:
        """The scales of this rank's blocks, chunk by chunk; infinite where a value is not finite, since NaN may lose
        a maximum.
        """
        per_chunk = count(self.length, codec.block)
        found = torch.zeros(self.wire.size, per_chunk, dtype=torch.float32, device=flat.device)
        for rank in range(self.wire.size):
            begin, end = self._span(rank)
            if end > begin:
                values = flat[begin:end] if flat.dtype in FLOATS else flat[begin:end].float()
                own = codec.scales(codec.clipped(values))
                found[rank, : own.numel()] = own
        return found.masked_fill_(found.isnan(), torch.inf).flatten()


class Gathered(Exchange):
    """Every rank's code of the whole gradient, gathered and added up in the order of ranks: (p - 1) codes a rank.

    For codes that are short whatever the number of ranks: top-k, DGC. And for any code between two ranks: as many bytes
    as in two phases, in one round, and what is summed is not written anew.
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
        wire = Wire(group)
        self.codec, self.numel = codec, numel
        state = codec.state(numel, dtype=dtype, device=device, seed=rank_seed(seed, wire.rank))
        super().__init__(wire, {"worker": state})

    @property
    def step_nbytes(self) -> int:
        """Bytes a rank sends in the next step."""
        return (self.wire.size - 1) * self.codec.now(self.states["worker"].count).nbytes(self.numel)

    def write(self, flat: Tensor) -> Tensor:
        """This rank's message."""
        return self.codec.now(self.states["worker"].count).encode(flat, self.states["worker"])

    def read(self, message: Tensor, total: Tensor) -> None:
        """Add what a message says to `total`."""
        self.codec.now(self.states["worker"].count).decode_add(message, total)

    def rounds(self, flat: Tensor) -> Rounds:
        message = self.write(flat)
        gathered = message.new_empty(self.wire.size, message.numel())
        if self.wire.size == 2 and message.device.type == "cpu":  # Gloo's collectives mostly send one way first
            gathered[self.wire.rank] = message
            yield self.wire.swap(gathered[1 - self.wire.rank], gathered[self.wire.rank], 1 - self.wire.rank)
        else:
            yield [self.wire.all_gather(gathered.view(-1), message)]
        total = flat.zero_() if flat.dtype in FLOATS else torch.zeros_like(flat, dtype=torch.float32)
        for part in gathered:
            self.read(part, total)
        if total is not flat:
            flat.copy_(total)


def chunk_length(numel: int, ranks: int) -> int:
    """Values of a chunk: a multiple of 8, so that chunks are whole bytes of any code; the last ones may be short."""
    return 8 * -(-numel // (8 * ranks))


def _way_back(codec: Codec, ranks: int) -> Codec:
    return codec.way_back(ranks) if isinstance(codec, TernGrad) else codec


def _decode(codec: Codec, message: Tensor, into: Tensor) -> None:
    """The values of a message, in place of what was there."""
    if into.dtype in FLOATS:
        codec.decode_add(message, into.zero_())
    else:
        wide = torch.zeros_like(into, dtype=torch.float32)
        codec.decode_add(message, wide)
        into.copy_(wide)

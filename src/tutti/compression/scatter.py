"""The sum of which each rank gets its part: codes of the parts go to their owners, who decode and add up.

The first of two phases: a rank sends p - 1 codes of a part, half of what a sum for all takes, and no sum is written
anew. So the workers alone keep something back.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from tutti.compression.codec import FLOATS, Codec
from tutti.compression.exchange import Exchange, Rounds, Wire
from tutti.compression.state import rank_seed


class ScatterSum(Exchange):
    """Of a flat gradient in which part r, of `lengths[r]` values, is rank r's. All ranks make it with the same values.

    terngrad's blocks have scales of their own here: ranks need share none where no sum is written anew.
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
        wire = Wire(group)
        ends = [0, *accumulate(lengths)]
        self.codec, self.numel, self.parts = codec, ends[-1], list(pairwise(ends))
        self._longest, self._dtype = max(lengths), dtype if dtype in FLOATS else torch.float32
        self._out = torch.zeros(0, 0, dtype=torch.uint8, device=device)
        state = codec.state(self.numel, dtype=dtype, device=device, seed=rank_seed(seed, wire.rank))
        super().__init__(wire, {"worker": state})

    @property
    def own(self) -> tuple[int, int]:
        """Where this rank's part is in the flat gradient."""
        return self.parts[self.wire.rank]

    def write(self, flat: Tensor) -> None:
        """Write all parts in code; `flat` is not needed any more."""
        state = self.states["worker"]
        codec = self.codec.now(state.count)
        self._out = torch.zeros(self.wire.size, codec.nbytes(self._longest), dtype=torch.uint8, device=flat.device)
        for message, (begin, end) in zip(self._out, self.parts, strict=True):
            codec.encode(flat[begin:end], state.part(begin, end), message)

    def send(self, part: Tensor) -> Rounds:
        """What was written to its owners; the sum of this rank's part in `part`."""
        codec = self.codec.now(self.states["worker"].count)
        received = torch.empty_like(self._out)
        yield [self.wire.all_to_all(received, self._out)]
        total = torch.zeros_like(part, dtype=self._dtype)
        for message in received:
            codec.decode_add(message, total)
        part.copy_(total)

    def rounds(self, flat: Tensor) -> Rounds:
        """The sum in this rank's part of `flat`; what is in the others is left."""
        self.write(flat)
        yield from self.send(flat[slice(*self.own)])

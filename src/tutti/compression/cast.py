"""Casts to float16 or bfloat16 (2 bytes), or to the gradient's own width or a wider one, which loses nothing.

Sums are formed in the gradient's own precision: values are cast before they are sent and added after they arrive.
Values too large for float16 become infinite, which every rank sees.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tutti.compression.codec import Codec, parts, residuals
from tutti.compression.codec_state import CodecState
from tutti.config.codec_registry import up_to_4
from tutti.config.compression import Compression

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}


CACHE_CHUNK_NUMEL = 1 << 16
"""Number of values that a CPU processes at once, so that they stay in a core's cache from one pass to the next.

Converting 2-byte values this way before adding takes 0.6 ns a value; adding tensors of two dtypes takes 2.3 ns.
"""


@dataclass(frozen=True, slots=True)
class Cast(Codec):
    """Sends as many bytes a value as the dtype `to` has.

    Args:
        to: name of the dtype.
        feedback: use error feedback, which keeps the rounding error.
    """

    to: Literal["bfloat16", "float16", "float32", "float64"] = "bfloat16"
    feedback: bool = False

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("residual",) if self.feedback else ()

    def nbytes(self, numel: int) -> int:
        return up_to_4(_DTYPES[self.to].itemsize * numel)

    def encode_by_torch(self, values: Tensor, state: CodecState, message: Tensor) -> None:
        old, new = residuals(state, values)
        (half,) = self._parts(message, values.numel())
        if self.feedback:
            torch.add(values, old, out=new)
            half.copy_(new)
            new.sub_(half)
        else:
            half.copy_(values)

    def decode_add_by_torch(self, message: Tensor, into: Tensor) -> None:
        (half,) = self._parts(message, into.numel())
        if half.dtype is into.dtype or into.device.type != "cpu":
            into += half
            return
        for total, part in zip(torch.split(into, CACHE_CHUNK_NUMEL), torch.split(half, CACHE_CHUNK_NUMEL), strict=True):
            total += part.to(into.dtype)

    def _parts(self, message: Tensor, numel: int) -> list[Tensor]:
        return parts(message, (_DTYPES[self.to], numel))


def from_compression(compression: Compression) -> Cast:
    """Make the cast that a plan names by its dtype."""
    return Cast(compression.method, feedback=bool(compression.settings.get("feedback")))  # type: ignore[arg-type]

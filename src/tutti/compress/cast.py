"""Half precision: every value in 2 bytes, as float16 or bfloat16.

Sums are formed in the gradient's own precision: values are cast before they travel and after they are added up, never
in between. What is too large for float16 becomes infinite, which every rank sees.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tutti.compress.codec import Codec, parts, residuals, up_to_4
from tutti.compress.state import State


@dataclass(frozen=True, slots=True)
class Cast(Codec):
    """2 bytes a value. `feedback`: what rounding takes away is kept."""

    to: Literal["bfloat16", "float16"] = "bfloat16"
    feedback: bool = False

    @property
    def keeps(self) -> tuple[str, ...]:
        return ("residual",) if self.feedback else ()

    def nbytes(self, numel: int) -> int:
        return up_to_4(2 * numel)

    def encode_by_torch(self, values: Tensor, state: State, message: Tensor) -> None:
        old, new = residuals(state, values)
        (half,) = self._parts(message, values.numel())
        if self.feedback:
            torch.add(values, old, out=new)
            half.copy_(new)
            new.sub_(half)
        else:
            half.copy_(values)

    def decode_add_by_torch(self, message: Tensor, into: Tensor) -> None:
        into += self._parts(message, into.numel())[0]

    def _parts(self, message: Tensor, numel: int) -> list[Tensor]:
        dtype = torch.bfloat16 if self.to == "bfloat16" else torch.float16
        return parts(message, (dtype, numel))

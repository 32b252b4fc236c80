"""A codec of another package: levels of one scale for the whole message. One file, one registration."""

from dataclasses import dataclass

import torch
from torch import Tensor

from local_sgd.replicas import Seen, Told, train
from tutti.compression.codec import Codec, parts
from tutti.compression.codec_state import CodecState
from tutti.config.codec_registry import CodecEntry, KernelCost, register_codec, up_to_4
from tutti.config.compression import Compression
from tutti.config.registry import Parameter

NAME = "toy-levels"


@dataclass(frozen=True, slots=True)
class ToyLevels(Codec):
    """A float32 scale, then a byte a value: round(levels x / scale)."""

    levels: int = 100

    def nbytes(self, numel: int) -> int:
        return 4 + up_to_4(numel)

    def encode_by_torch(self, values: Tensor, state: CodecState, message: Tensor) -> None:
        scale, codes = parts(message, (torch.float32, 1), (torch.int8, values.numel()))
        scale.copy_(values.abs().max())
        codes.copy_((values / scale.clamp(min=1e-30).to(values.dtype) * self.levels).round())

    def decode_add_by_torch(self, message: Tensor, into: Tensor) -> None:
        scale, codes = parts(message, (torch.float32, 1), (torch.int8, into.numel()))
        into += codes.to(into.dtype) * scale.to(into.dtype) / self.levels


def make_toy_levels(how: Compression) -> ToyLevels:
    """The factory of the entry."""
    return ToyLevels(int(how.settings["levels"]))


ENTRY = CodecEntry(
    name=NAME,
    summary="levels of one scale for the whole message",
    parameters={
        "levels": Parameter(
            default=100,
            allowed=lambda levels: 1 <= levels <= 127,
            requirement="give a number of levels from 1 to 127",
        )
    },
    message_nbytes=lambda settings, numel: 4 + up_to_4(numel),
    excludes={"mesh.stage": "it was never tried with stages; use one-bit"},
    kernel_cost=KernelCost(cpu_factor=3.0),
    make_codec="compression.toy_codec:make_toy_levels",
)


def train_with_it(told: Told) -> Seen:
    """Train on two ranks, in processes that register it first."""
    register_codec(ENTRY)
    return train(told, 2)

"""The codecs under test, gradients that are hard on them, and what a codec makes of them."""

from typing import Literal

import torch
from torch import Tensor

from tutti.compression.bucketed_top_k import TOP16_Q4, BucketedTopK
from tutti.compression.bytegrad import ByteGrad
from tutti.compression.cast import Cast
from tutti.compression.codec import Codec
from tutti.compression.dgc import DGC
from tutti.compression.one_bit import OneBit
from tutti.compression.qsgd import Levels, qsgd
from tutti.compression.terngrad import TernGrad
from tutti.compression.top_k import TopK

FEEDBACK: dict[str, Codec] = {
    "onebit": OneBit(),
    "onebit-short": OneBit(block=16),
    "bytegrad": ByteGrad(feedback=True),
    "fp16": Cast("float16", feedback=True),
    "bf16": Cast(feedback=True),
    "4-bit": Levels(4, feedback=True),
    "2-bit": Levels(2, block=64, rounding="nearest", feedback=True),
    "8-bit-l2": Levels(8, norm="l2", feedback=True),
    "topk": TopK(0.01),
    "topk-third": TopK(0.34),
    "top16-q4": TOP16_Q4,
    "top5of32": BucketedTopK(32, 5),
}
"""By name, those that keep what they do not send."""

WITHOUT: dict[str, Codec] = {
    "onebit-plain": OneBit(feedback=False),
    "bytegrad-plain": ByteGrad(block=512),
    "fp16-plain": Cast("float16"),
    "bf16-plain": Cast(),
    "qsgd": qsgd(),
    "qsgd-2": qsgd(2, block=64),
    "qsgd-8-l2": qsgd(8, norm="l2"),
    "terngrad": TernGrad(),
}

DGCS: dict[str, Codec] = {"dgc": DGC(0.01), "dgc-plain": DGC(0.1, momentum=0.0)}

CODECS = FEEDBACK | WITHOUT | DGCS

KINDS = ("normal", "zeros", "heavy", "tiny", "equal", "sparse", "nan", "infinite", "negative zero")


def gradient(kind: str, numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """A flat gradient of a kind."""
    x = torch.randn(numel, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    if kind == "zeros":
        x.zero_()
    elif kind == "heavy":
        x = x**7
    elif kind == "tiny":
        x *= 1e-41
    elif kind == "equal":
        x.fill_(-0.3)
    elif kind == "sparse":
        x[x.abs() < 1.5] = 0
    elif kind == "nan":
        x[numel // 2] = torch.nan
    elif kind == "infinite":
        x[numel // 2] = -torch.inf
    elif kind == "negative zero":
        x[x < 0] = -0.0
    return x


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal bit for bit, so that NaN is equal to itself and 0 is not to -0."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def two_steps(
    codec: Codec, kind: str, numel: int, dtype: torch.dtype, way: Literal["numba", "triton", "torch"]
) -> list[Tensor]:
    """Of each of two steps: the message, what is decoded and added to ones, and what is kept; "numba" by dispatch."""
    state, found = codec.state(numel, dtype=dtype, seed=3), []
    encode = {"numba": codec.encode, "triton": codec.encode_by_triton, "torch": codec.encode_by_torch}[way]
    decode_add = {
        "numba": codec.decode_add,
        "triton": codec.decode_add_by_triton,
        "torch": codec.decode_add_by_torch,
    }[way]
    for step in range(2):
        message, into = torch.zeros(codec.nbytes(numel), dtype=torch.uint8), torch.ones(numel, dtype=dtype)
        encode(gradient(kind, numel, dtype, step), state, message)
        decode_add(message, into)
        found += [message, into, *(tensor.clone() for tensor in state.new.values())]
        state.commit()
    return found

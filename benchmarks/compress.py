"""Compression kernels on one core: nanoseconds a parameter to encode, and to decode and add, beside plain torch.

Times are CPU times of this process, and the fastest of several passes counts, so that other work on the machine has
little effect. The gradient does not fit into the caches. An encode includes the error feedback, if the codec has
it. "torch" is the reference with which the kernels are compared bit for bit; it is not the fastest possible code.
With a CUDA device, Triton's kernels and plain torch are also timed there, by the clock.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.benchmark import Timer

from tutti.compression.bucketed_top_k import TOP16_Q4
from tutti.compression.bytegrad import ByteGrad
from tutti.compression.cast import Cast
from tutti.compression.codec import Codec
from tutti.compression.dgc import DGC
from tutti.compression.one_bit import OneBit
from tutti.compression.qsgd import Levels, qsgd
from tutti.compression.top_k import TopK

CODECS: dict[str, tuple[Codec, float | None]] = {
    "bf16": (Cast(), None),
    "1-bit, feedback": (OneBit(), 4),
    "4-bit, feedback": (Levels(4, feedback=True), 4),
    "4-bit QSGD": (qsgd(), 4),
    "8-bit, feedback": (Levels(8, rounding="nearest", feedback=True), 4),
    "8-bit ByteGrad": (ByteGrad(), 4),
    "8-bit ByteGrad, feedback": (ByteGrad(feedback=True), 4),
    "top 0.1 %, feedback": (TopK(0.001), 6),
    "top 1 %, feedback": (TopK(0.01), 6),
    "DGC 0.1 %": (DGC(0.001), 6),
    "Top16_Q4, feedback": (TOP16_Q4, None),
}
"""Name -> the codec, and the aim for encoding in nanoseconds; the aim for decoding and adding is 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is timed: gradients of `numel` float32 values, `repeats` passes of the kernels and 3 of torch."""

    numel: int = 2**24
    repeats: int = 15


QUICK = Sizes(numel=2**22, repeats=5)


def measure(sizes: Sizes) -> dict[str, Any]:
    """Time all codecs. Returns {"summary": {codec: {"bytes", "encode_ns", "decode_add_ns", "torch_encode_ns",
    ...}}}, for one parameter.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    values = torch.randn(sizes.numel)
    summary = {name: _one(codec, aim, values, sizes) for name, (codec, aim) in CODECS.items()}
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
        summary |= {f"{name}, {device}": on_device(codec, values.cuda()) for name, (codec, _) in CODECS.items()}
    return {"summary": summary}


def on_device(codec: Codec, values: torch.Tensor, least_s: float = 0.5) -> dict[str, Any]:
    """Return the entry of `summary` for the device of `values`: medians of the time by the clock until the device is
    done.
    """
    numel, device = values.numel(), values.device
    state, into = codec.state(numel, dtype=values.dtype, device=device), torch.zeros_like(values)
    message = torch.zeros(codec.nbytes(numel), dtype=torch.uint8, device=device)
    calls: dict[str, Callable[[], object]] = {
        "encode_ns": lambda: codec.encode(values, state, message),
        "decode_add_ns": lambda: codec.decode_add(message, into),
        "torch_encode_ns": lambda: codec.encode_by_torch(values, state, message),
        "torch_decode_add_ns": lambda: codec.decode_add_by_torch(message, into),
    }
    times = {
        name: Timer("call()", globals={"call": torch.no_grad()(call)}).blocked_autorange(min_run_time=least_s).median
        for name, call in calls.items()
    }
    aims = {"aim_ns": None, "decode_add_aim_ns": None}
    return {"bytes": codec.nbytes(numel) / numel, **{name: s / numel * 1e9 for name, s in times.items()}, **aims}


def _one(codec: Codec, aim: float | None, values: torch.Tensor, sizes: Sizes) -> dict[str, Any]:
    numel = values.numel()
    state = codec.state(numel, dtype=values.dtype)
    message = torch.zeros(codec.nbytes(numel), dtype=torch.uint8)
    into = torch.zeros(numel)

    def encode() -> None:
        codec.encode(values, state, message)
        state.commit()

    def encode_by_torch() -> None:
        codec.encode_by_torch(values, state, message)
        state.commit()

    return {
        "bytes": codec.nbytes(numel) / numel,
        "encode_ns": _least_ns(encode, sizes.repeats, numel),
        "decode_add_ns": _least_ns(lambda: codec.decode_add(message, into), sizes.repeats, numel),
        "torch_encode_ns": _least_ns(encode_by_torch, 3, numel),
        "torch_decode_add_ns": _least_ns(lambda: codec.decode_add_by_torch(message, into), 3, numel),
        "aim_ns": aim,
        "decode_add_aim_ns": 2,
    }


def _least_ns(call: Callable[[], None], repeats: int, numel: int) -> float:
    """Return the CPU nanoseconds a parameter of the fastest of `repeats` calls, after one that is not counted."""
    call()
    seconds = []
    for _ in range(repeats):
        begin = time.process_time()
        call()
        seconds.append(time.process_time() - begin)
    return min(seconds) / numel * 1e9


def rows(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the table: bytes and nanoseconds a parameter."""
    header = ["codec", "bytes", "encode ns", "aim", "decode-add ns", "aim", "torch encode ns", "torch decode-add ns"]
    table = []
    for name, entry in result["summary"].items():
        aim, decode_aim = ("" if entry[key] is None else f"{entry[key]:.0f}" for key in ("aim_ns", "decode_add_aim_ns"))
        torch_ns = [f"{entry[f'torch_{step}_ns']:.1f}" for step in ("encode", "decode_add")]
        numbers = [
            f"{entry['bytes']:.4f}",
            f"{entry['encode_ns']:.2f}",
            aim,
            f"{entry['decode_add_ns']:.2f}",
            decode_aim,
        ]
        table.append([name, *numbers, *torch_ns])
    return header, table

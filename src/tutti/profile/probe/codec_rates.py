"""Measure how long this device takes to encode and decode gradients, codec by codec.

The codecs are those that plans are likely to choose; the cost model uses the nearest one for other settings.
"""

import math
import time
from collections.abc import Callable, Mapping

import torch

import tutti.profile.probe.probe_timing as probe_timing
from tutti.compression.bucketed_top_k import TOP16_Q4
from tutti.compression.bytegrad import ByteGrad
from tutti.compression.cast import Cast
from tutti.compression.codec import Codec
from tutti.compression.one_bit import OneBit
from tutti.compression.powersgd import PowerSGDReducer
from tutti.compression.qsgd import qsgd
from tutti.compression.terngrad import TernGrad
from tutti.compression.top_k import TopK
from tutti.config.cluster import CompressRate
from tutti.profile.probe.probe_timing import Effort

CODECS: Mapping[str, Codec] = {
    "top-k,density=0.01": TopK(0.01),
    "qsgd,bits=4": qsgd(4),
    "bytegrad": ByteGrad(),
    "bfloat16": Cast("bfloat16"),
    "top16-q4": TOP16_Q4,
    "qsgd,bits=8": qsgd(8),
    "one-bit": OneBit(),
    "terngrad": TernGrad(),
}
"""Codecs by their option text."""

POWERSGD_RANKS = (1, 2, 4)
"""Ranks of PowerSGD's matrices that are timed."""


def measure(device: torch.device, effort: Effort) -> tuple[CompressRate, ...]:
    """Measure every codec at the effort's sizes, on one thread of the CPU, as ranks run them.

    After `codes_budget_s` the remaining codecs are left out. Compiling their kernels, once per machine, is not counted.

    Args:
        device: the device that holds the gradients.
        effort: how much to measure.
    """
    if not effort.codes_numel:
        return ()
    rates, left_s = list[CompressRate](), effort.codes_budget_s
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for method, calls in _calls_by_method(device, max(effort.codes_numel)).items():
            for call in calls(min(effort.codes_numel)):
                call()
            began = time.monotonic()
            rates += [_rate(method, calls, numel, device, effort) for numel in effort.codes_numel]
            left_s -= time.monotonic() - began
            if left_s <= 0:
                break
    finally:
        torch.set_num_threads(before)
    return tuple(rates)


Calls = tuple[Callable[[], object], Callable[[], object]]
"""A call that encodes a message, and one that decodes and adds it."""


def _calls_by_method(device: torch.device, max_numel: int) -> dict[str, Callable[[int], Calls]]:
    """Return, for each codec, a function that makes its calls for a number of elements."""
    values = torch.randn(max_numel, generator=torch.Generator().manual_seed(0)).to(device)
    matrices = {f"powersgd,rank={rank}": _powersgd_calls(rank, values) for rank in POWERSGD_RANKS}
    return matrices | {method: _codec_calls(codec, values) for method, codec in CODECS.items()}


def _codec_calls(codec: Codec, values: torch.Tensor) -> Callable[[int], Calls]:
    """Return calls that encode and decode a gradient."""

    def calls(numel: int) -> Calls:
        gradient, total = values[:numel], torch.zeros(numel, device=values.device)
        state = codec.state(numel, dtype=torch.float32, device=values.device)
        message = torch.zeros(codec.nbytes(numel), dtype=torch.uint8, device=values.device)
        codec.encode(gradient, state, message)
        return lambda: codec.encode(gradient, state, message), lambda: codec.decode_add(message, total)

    return calls


def _powersgd_calls(rank: int, values: torch.Tensor) -> Callable[[int], Calls]:
    """Return calls that do all arithmetic of PowerSGD on one square matrix, without sending anything."""

    def calls(numel: int) -> Calls:
        side = math.isqrt(numel)
        exchange = PowerSGDReducer([(side, side)], rank=rank, lone=True, device=values.device)
        flat = values[: side * side].clone()

        def run() -> None:
            with torch.no_grad():
                for _ in exchange.rounds(flat):
                    pass

        return run, lambda: None

    return calls


def _rate(method: str, calls: Callable[[int], Calls], numel: int, device: torch.device, effort: Effort) -> CompressRate:
    """Measure one codec at one size."""
    encode, decode = calls(numel)
    budget = effort.codes_budget_s / 50
    encoding = probe_timing.repeated(encode, device, repeats=effort.repeats, budget_s=budget)
    decoding = probe_timing.repeated(decode, device, repeats=effort.repeats, budget_s=budget)
    return CompressRate(
        method=method, numel=numel, encode_s=encoding.quartile_s, decode_s=decoding.quartile_s, spread=encoding.spread
    )

"""Each codec's kernel bit for bit against its reference in torch, and its time against a copy; kinds of attention."""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from compression.codecs import CODECS
from gpu_run import PartRun, Row, skipped
from tutti.compression.codec import Codec
from tutti.compression.one_bit import OneBit
from tutti.compression.qsgd import Levels
from tutti.nn.sparse_attention import big_bird, block_sparse_attention

BANDWIDTH_AIM = 0.7
"""Smallest share of a copy's bandwidth that a kernel reaches."""

SCALE_TOLERANCE = 2e-6
"""Of codecs whose scale is a sum, which the kernel adds in another order."""


def measure(run: PartRun) -> Iterator[Row]:
    """Yield a row for each codec and each kind of attention."""
    from importlib.util import find_spec

    by_triton = run.device != "cpu" and find_spec("triton") is not None
    copied = copy_bytes_per_s(run)
    yield {"what": "copy on the device", "bytes_per_s": copied}
    for name, codec in CODECS.items():
        if not codec.has_triton_kernels:
            continue
        if run.device != "cpu" and not by_triton:
            yield skipped(f"codec {name}", "Triton is not installed")
        elif run.left_s() < 3:
            yield skipped(f"codec {name}", "no time was left")
        else:
            yield codec_row(name, codec, copied, run)
    yield from attention(run)


def copy_bytes_per_s(run: PartRun) -> float:
    """Return the bytes a second that a copy reads and writes."""
    source = torch.empty(2**12 if run.tiny else 2**28, device=run.device)
    target = torch.empty_like(source)
    return 8 * source.numel() / seconds(lambda: target.copy_(source), run)


def codec_row(name: str, codec: Codec, copied: float, run: PartRun) -> Row:
    """Encode and decode one gradient by the kernels and by torch; time the kernels."""
    numel = 4100 if run.tiny else 2**25 + 3
    by_kernel = run_codec(codec, numel, run, reference=False)
    by_torch = run_codec(codec, numel, run, reference=True)
    message, into, _ = by_kernel
    same = all(equal_bits(a, b) for a, b in zip(by_kernel[:2], by_torch[:2], strict=True))
    summed = isinstance(codec, OneBit) or (isinstance(codec, Levels) and codec.norm == "l2")
    error = float((into - by_torch[1]).norm() / by_torch[1].norm())
    right = same or (summed and error <= SCALE_TOLERANCE)
    moved = 2 * 4 * numel + 2 * message.numel() + sum(2 * 4 * numel for _ in by_kernel[2])
    share = moved / by_kernel_s(codec, numel, run) / copied
    fast = run.tiny or share >= BANDWIDTH_AIM
    figures = {"same_bits": same, "difference": error, "share_of_bandwidth": share}
    return {"what": f"codec {name}", **figures, "ok": right and fast}


def run_codec(codec: Codec, numel: int, run: PartRun, *, reference: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return the message, what decoding adds to zeros, and the new residuals."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(run.device)
    state = codec.state(numel, dtype=torch.float32, seed=3, device=torch.device(run.device))
    message = torch.zeros(codec.nbytes(numel), dtype=torch.uint8, device=run.device)
    into = torch.zeros(numel, device=run.device)
    encode, decode = kernels(codec, run, reference=reference)
    encode(values, state, message)
    decode(message, into)
    return message, into, list(state.new.values())


def kernels(codec: Codec, run: PartRun, *, reference: bool) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return how a codec encodes and decodes on the device: by torch, or by kernels (Numba's on the CPU)."""
    if reference:
        return codec.encode_by_torch, codec.decode_add_by_torch
    if run.device == "cpu":
        return codec.encode_by_numba, codec.decode_add_by_numba
    return codec.encode_by_triton, codec.decode_add_by_triton


def by_kernel_s(codec: Codec, numel: int, run: PartRun) -> float:
    """Return the seconds that the kernels take to encode and decode."""
    values = torch.randn(numel, device=run.device)
    state = codec.state(numel, dtype=torch.float32, seed=3, device=torch.device(run.device))
    message = torch.zeros(codec.nbytes(numel), dtype=torch.uint8, device=run.device)
    into = torch.zeros(numel, device=run.device)
    encode, decode = kernels(codec, run, reference=False)

    def both() -> None:
        encode(values, state, message)
        decode(message, into)

    return seconds(both, run)


def equal_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def attention(run: PartRun) -> Iterator[Row]:
    """Yield the time of forward and backward of SDPA, block-sparse attention and FlexAttention, causal or BigBird."""
    length, width, block = (64, 16, 16) if run.tiny else (8192, 64, 64)
    dtype = torch.float32 if run.device == "cpu" else torch.bfloat16
    tensors = [torch.randn(1, 8, length, width, device=run.device, dtype=dtype, requires_grad=True) for _ in range(3)]
    pattern = big_bird(length, block)
    kinds: dict[str, Callable[..., Any]] = {
        "scaled_dot_product_attention, causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "block_sparse_attention, BigBird": lambda q, k, v: block_sparse_attention(q, k, v, pattern),
    }
    if run.device != "cpu":
        kinds["flex_attention, causal, compiled"] = flex(length, run)
    for name, function in kinds.items():
        if run.left_s() < 5:
            yield skipped(name, "no time was left")
            continue
        took = seconds(lambda function=function: torch.autograd.grad(function(*tensors).sum(), tensors), run)
        yield {"what": f"{name}, {length} tokens", "ms": took * 1e3}


def flex(length: int, run: PartRun) -> Callable[..., Any]:
    """Return compiled causal FlexAttention."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, device=run.device)
    compiled = torch.compile(flex_attention)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)


def seconds(work: Callable[[], Any], run: PartRun) -> float:
    """Return the median seconds of `work` on the device, after it was run twice."""
    for _ in range(1 if run.tiny else 2):
        work()
    samples = []
    for _ in range(1 if run.tiny else 9):
        if run.device != "cpu":
            torch.accelerator.synchronize()
        began = time.perf_counter()
        work()
        if run.device != "cpu":
            torch.accelerator.synchronize()
        samples.append(time.perf_counter() - began)
    return statistics.median(samples)

"""Attention by sequence length: block-sparse beside dense, seconds and memory of forward and backward.

"softmax" is one masked softmax over all pairs. "dense" is torch's scaled_dot_product_attention, which computes
every pair and keeps no probabilities. "sparse" is tutti's block-sparse attention with a BigBird pattern. Each runs
in its own process, so that peaks of memory are its own.
"""

import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

KINDS = ("sparse", "dense", "softmax")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is timed: sequences of 2 ** `shortest` to 2 ** `longest` tokens, `repeats` times after one that is not
    counted.

    The masked softmax stops at 2 ** `softmax_longest`; longer ones need too much memory.
    """

    shortest: int = 10
    longest: int = 15
    softmax_longest: int = 13
    heads: int = 4
    width: int = 64
    block: int = 64
    repeats: int = 3


QUICK = Sizes(shortest=8, longest=9, softmax_longest=9, heads=2, width=16, block=32, repeats=2)


def measure(sizes: Sizes) -> dict[str, Any]:
    """Measure all lengths, in seconds and bytes.

    Returns:
        {"samples": {kind: {length: {"s": [...], "peak_nbytes": ..}}}, "summary": {length: ..}}.
    """
    from harness import run_ranks  # the tests' harness; a fresh process with torch loaded

    samples: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
    for power in range(sizes.shortest, sizes.longest + 1):
        for kind in KINDS:
            if kind != "softmax" or power <= sizes.softmax_longest:
                samples[kind][str(2**power)] = run_ranks(_one, 1, kind, 2**power, sizes, timeout_s=600)[0]
    return {"samples": samples, "summary": summary(samples)}


def summary(samples: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return, for each length, median seconds and peak bytes of each kind, and the time of dense over sparse."""
    row_by_length: dict[str, Any] = {}
    for length in samples["sparse"]:
        row = {
            kind: {"s": statistics.median(runs[length]["s"]), "peak_nbytes": runs[length]["peak_nbytes"]}
            for kind, runs in samples.items()
            if length in runs
        }
        row_by_length[length] = {**row, "dense_s_over_sparse": row["dense"]["s"] / row["sparse"]["s"]}
    return row_by_length


def _one(kind: str, length: int, sizes: Sizes) -> dict[str, Any]:
    """Return seconds of forward and backward, and the peak bytes that they need beyond their inputs."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = (1, sizes.heads, length, sizes.width)
    tensors = [torch.randn(shape, device=device, requires_grad=True) for _ in range(3)]
    function = _function(kind, length, sizes.block)
    before = _peak_nbytes(device)
    seconds = [_timed(function, tensors, device) for _ in range(1 + sizes.repeats)]
    return {"s": seconds[1:], "peak_nbytes": _peak_nbytes(device) - before}


def _function(kind: str, length: int, block: int) -> Callable[..., Tensor]:
    from tutti.nn.sparse_attention import big_bird, block_sparse_attention, dense_attention

    pattern = big_bird(length, block)
    if kind == "sparse":
        return lambda q, k, v: block_sparse_attention(q, k, v, pattern)
    if kind == "softmax":
        return lambda q, k, v: dense_attention(q, k, v, pattern)
    return F.scaled_dot_product_attention


def _timed(function: Callable[..., Tensor], tensors: list[Tensor], device: torch.device) -> float:
    begin = time.perf_counter()
    torch.autograd.grad(function(*tensors).sum(), tensors)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def _peak_nbytes(device: torch.device) -> int:
    """Return the peak memory of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def rows(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the table: milliseconds and mebibytes of all kinds."""
    header = ["tokens", *(f"{kind} ms" for kind in KINDS), "dense / sparse", *(f"{kind} MiB" for kind in KINDS)]
    table = []
    for length, row in result["summary"].items():
        times = [f"{1e3 * row[kind]['s']:.1f}" if kind in row else "" for kind in KINDS]
        memory = [f"{row[kind]['peak_nbytes'] / 2**20:.1f}" if kind in row else "" for kind in KINDS]
        table.append([length, *times, f"{row['dense_s_over_sparse']:.2f}", *memory])
    return header, table

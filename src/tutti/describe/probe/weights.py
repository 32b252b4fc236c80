"""How fast matrix products go over their weights: what a product of few rows takes beyond its FLOPs.

Weights take turns, more of them than caches hold: in a training, all other weights, their gradients and the optimizer's
state come between two uses of one. Of a single one of 17 MB, beside a cache of 32 MB, gradients in float32 and all
products in bfloat16 seemed about twice as fast.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Sequence

import torch

from tutti.describe.probe import gemm, host, timing
from tutti.describe.probe.effort import Effort
from tutti.spec.cluster import WeightRate

ROWS = (16, 128)
"""Two products with the same weights; beyond their FLOPs, which grow with the rows, both go over the weights once."""

ROUNDS = 3
"""The two are timed one right after the other, so many times, and the middle pace counts: a machine that changes its
own between the two makes a pace that is of neither."""

MOST = 32
"""Weights that take turns, at most."""

DTYPES = ("float64", "float32", "bfloat16")
"""Those that CPUs multiply natively. An emulated one is so slow at its FLOPs that nothing else shows."""


def measure(
    device: torch.device,
    effort: Effort,
    *,
    threads: tuple[int, ...],
    dtypes: tuple[str, ...],
    concurrent: int = 1,
    meet: timing.Meet | None = None,
) -> tuple[WeightRate, ...]:
    """For each dtype and number of threads; none on devices that load weights while they compute, such as GPUs. `meet`:
    before each sample, of those that measure at the same time in the same memory."""
    if device.type != "cpu" or not effort.weight_size:
        return ()
    rates = []
    for dtype in (name for name in dtypes if name in DTYPES):
        for count in threads:
            with gemm.on_threads(count):
                forward, back, gradient = _paces(device, effort, gemm.DTYPES[dtype], meet)
            rates.append(
                WeightRate(
                    dtype=dtype,
                    threads=count,
                    forward=forward,
                    input_gradient=back,
                    weight_gradient=gradient,
                    concurrent=concurrent,
                )
            )
    return tuple(rates)


def pace(nbytes: float, few_s: float, many_s: float) -> float:
    """Bytes of weights a second, of products of `ROWS` rows that take `few_s` and `many_s`: t(rows) = rows x + nbytes /
    pace. What is within a hundredth of the shorter time is not told from nothing."""
    few, many = ROWS
    each = max(0.0, (many_s - few_s) / (many - few))
    return nbytes / max(few_s - few * each, few_s / 100)


def _paces(device: torch.device, effort: Effort, dtype: torch.dtype, meet: timing.Meet | None) -> list[float]:
    """Of forward, the gradient of the input and that of the weights."""
    n = effort.weight_size
    nbytes = n * n * dtype.itemsize
    count = min(MOST, max(1, math.ceil(effort.weight_caches * host.cache_nbytes() / nbytes)))
    weights = [torch.randn(n, n, device=device).to(dtype) for _ in range(count)]
    gradients = [torch.empty_like(one) for one in weights]
    both = []
    for rows in ROWS:
        input, output = (torch.randn(rows, n, device=device).to(dtype) for _ in range(2))
        both.append(_products(weights, gradients, input, output))

    def took(call: Callable[[], object]) -> float:
        if meet is not None:
            return timing.in_step(call, device, meet).quartile_s
        budget_s = effort.gemm_budget_s / ROUNDS
        return timing.repeated(call, device, repeats=effort.repeats, budget_s=budget_s).quartile_s

    products = list(zip(*both, strict=True))
    rounds = [[pace(float(nbytes), took(few), took(many)) for few, many in products] for _ in range(ROUNDS)]
    return [statistics.median(paces) for paces in zip(*rounds, strict=True)]


def _products(
    weights: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], input: torch.Tensor, output: torch.Tensor
) -> list[Callable[[], object]]:
    """The three products of a linear layer, of the next weights each time. Memory is there before, as where a training
    reuses it."""
    result = torch.empty_like(output)
    own, back, into = (itertools.cycle(some) for some in (weights, weights, gradients))
    return [
        lambda: torch.mm(input, next(own).t(), out=result),
        lambda: torch.mm(output, next(back), out=result),
        lambda: torch.mm(output.t(), input, out=next(into)),
    ]

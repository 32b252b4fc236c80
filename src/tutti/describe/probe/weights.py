"""How fast matrix products go over their weights: what a product of few rows takes beyond its FLOPs."""

from collections.abc import Callable

import torch

from tutti.describe.probe import gemm, timing
from tutti.describe.probe.effort import Effort
from tutti.spec.cluster import WeightRate

ROWS = (16, 128)
"""Two products with the same weights; beyond their FLOPs, which grow with the rows, both go over the weights once."""

DTYPES = ("float64", "float32", "bfloat16")
"""Those that CPUs multiply natively. An emulated one is so slow at its FLOPs that nothing else shows."""


def measure(
    device: torch.device, effort: Effort, *, threads: tuple[int, ...], dtypes: tuple[str, ...], concurrent: int = 1
) -> tuple[WeightRate, ...]:
    """For each dtype and number of threads; none on devices that load weights while they compute, such as GPUs."""
    if device.type != "cpu" or not effort.weight_size:
        return ()
    rates = []
    for dtype in (name for name in dtypes if name in DTYPES):
        for count in threads:
            with gemm.on_threads(count):
                forward, back, gradient = _paces(device, effort, gemm.DTYPES[dtype])
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


def _paces(device: torch.device, effort: Effort, dtype: torch.dtype) -> list[float]:
    """Of forward, the gradient of the input and that of the weights."""
    n = effort.weight_size
    weights = torch.randn(n, n, device=device).to(dtype)
    gradient = torch.empty_like(weights)
    times: list[list[float]] = []
    for rows in ROWS:
        input, output = (torch.randn(rows, n, device=device).to(dtype) for _ in range(2))
        calls = _products(weights, gradient, input, output)
        took = [timing.repeated(call, device, repeats=effort.repeats, budget_s=effort.gemm_budget_s) for call in calls]
        times.append([one.quartile_s for one in took])
    nbytes = float(weights.numel() * weights.element_size())
    return [pace(nbytes, few, many) for few, many in zip(*times, strict=True)]


def _products(
    weights: torch.Tensor, gradient: torch.Tensor, input: torch.Tensor, output: torch.Tensor
) -> list[Callable[[], object]]:
    """The three products of a linear layer. Memory is there before, as where a training reuses it."""
    result = torch.empty_like(output)
    return [
        lambda: torch.mm(input, weights.t(), out=result),
        lambda: torch.mm(output, weights, out=result),
        lambda: torch.mm(output.t(), input, out=gradient),
    ]

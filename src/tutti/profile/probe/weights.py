"""How fast matrix products go over their weights: what a product of few rows takes beyond its FLOPs.

Weights take turns, more of them than caches hold: in a training, all other weights, their gradients and the optimizer's
state come between two uses of one. Of a single one of 17 MB, beside a cache of 32 MB, gradients in float32 and all
products in bfloat16 seemed about twice as fast.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tutti.config.cluster import WeightKind, WeightRate
from tutti.profile.probe import gemm, host, timing
from tutti.profile.probe.effort import Effort

ROWS = (16, 128)
"""Two products with the same weights; beyond their FLOPs, which grow with the rows, both go over the weights once."""

PER_CHANNEL, SIDE, IMAGES = 8, 4, (2, 16)
"""The same of a 3 x 3 convolution on images of few pixels, with a channel for so many of the products' rows and columns
of weights: 256 for 2,048. oneDNN's order of its weights is another than that of products, and took two to three times
as long on one core of an AMD EPYC."""

ROUNDS = 3
"""The two are timed one right after the other, so many times, and the middle pace counts: a machine that changes its
own between the two makes a pace that is of neither."""

MOST = 32
"""Weights that take turns, at most."""

KINDS: dict[str, tuple[WeightKind, ...]] = {"float64": ("gemm",), "float32": ("gemm", "conv"), "bfloat16": ("gemm",)}
"""What is timed in which dtype: those that CPUs multiply natively."""

EMULATED, TRIED = 8, 192
"""A dtype in which a product of this size takes so many times as long as in float32 is emulated. It is so slow at its
FLOPs that nothing else shows, and takes minutes: bfloat16 on an AMD EPYC without AVX-512, 60 times as long."""


def emulated(device: torch.device) -> tuple[str, ...]:
    """The dtypes of `KINDS` that the device emulates."""
    taken = {}
    for name in KINDS:
        one, other, result = (torch.ones(TRIED, TRIED, device=device, dtype=gemm.DTYPES[name]) for _ in range(3))
        with gemm.on_threads(1):
            taken[name] = min(timing.once(lambda: torch.mm(one, other, out=result), device) for _ in range(4))  # noqa: B023
    return tuple(name for name, seconds in taken.items() if seconds > EMULATED * taken["float32"])


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
    for dtype in (name for name in dtypes if name in KINDS):
        for count in threads:
            for kind in KINDS[dtype]:
                with gemm.on_threads(count):
                    forward, back, gradient = _paces(
                        _subject(kind, effort.weight_size), device, effort, gemm.DTYPES[dtype], meet
                    )
                rates.append(
                    WeightRate(
                        kind=kind,
                        dtype=dtype,
                        threads=count,
                        forward=forward,
                        input_gradient=back,
                        weight_gradient=gradient,
                        concurrent=concurrent,
                    )
                )
    return tuple(rates)


def pace(nbytes: float, few_s: float, many_s: float, amounts: tuple[int, int] = ROWS) -> float:
    """Bytes of weights a second, of products of `amounts` rows that take `few_s` and `many_s`: t(rows) = rows x +
    nbytes / pace. What is within a hundredth of the shorter time is not told from nothing."""
    few, many = amounts
    each = max(0.0, (many_s - few_s) / (many - few))
    return nbytes / max(few_s - few * each, few_s / 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subject:
    """Operators to be timed at two `amounts` of rows or images, each a tensor `through` them. `products`: of weights,
    room for their gradients, input and gradient of the output, calls of the three products."""

    shape: tuple[int, ...]
    amounts: tuple[int, int]
    through: tuple[int, ...]
    products: Callable[..., list[Callable[[], object]]]


def _subject(kind: WeightKind, n: int) -> _Subject:
    if kind == "gemm":
        return _Subject(shape=(n, n), amounts=ROWS, through=(n,), products=_products)
    channels = max(1, n // PER_CHANNEL)
    shape, through = (channels, channels, 3, 3), (channels, SIDE, SIDE)
    return _Subject(shape=shape, amounts=IMAGES, through=through, products=_convolutions)


def _paces(
    one: _Subject, device: torch.device, effort: Effort, dtype: torch.dtype, meet: timing.Meet | None
) -> list[float]:
    """Of forward, the gradient of the input and that of the weights."""
    nbytes = math.prod(one.shape) * dtype.itemsize
    count = min(MOST, max(1, math.ceil(effort.weight_caches * host.cache_nbytes() / nbytes)))
    weights = [torch.randn(one.shape, device=device).to(dtype) for _ in range(count)]
    gradients = [torch.empty_like(weight) for weight in weights]
    both = []
    for amount in one.amounts:
        input, output = (torch.randn(amount, *one.through, device=device).to(dtype) for _ in range(2))
        both.append(one.products(weights, gradients, input, output))

    def took(call: Callable[[], object]) -> float:
        if meet is not None:
            return timing.in_step(call, device, meet).quartile_s
        budget_s = effort.gemm_budget_s / ROUNDS
        return timing.repeated(call, device, repeats=effort.repeats, budget_s=budget_s).quartile_s

    products = list(zip(*both, strict=True))
    rounds = [
        [pace(float(nbytes), took(few), took(many), one.amounts) for few, many in products] for _ in range(ROUNDS)
    ]
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


def _convolutions(
    weights: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], input: torch.Tensor, output: torch.Tensor
) -> list[Callable[[], object]]:
    """The three of a convolution, of the next weights each time. Its `gradients` have room of their own."""
    own, back, into = (itertools.cycle(weights) for _ in range(3))

    def gradient(weight: torch.Tensor, *wanted: bool) -> object:
        ones = [1, 1]
        return torch.ops.aten.convolution_backward(
            output, input, weight, None, ones, ones, ones, False, [0, 0], 1, [*wanted, False]
        )

    return [
        lambda: torch.conv2d(input, next(own), padding=1),
        lambda: gradient(next(back), True, False),
        lambda: gradient(next(into), False, True),
    ]

"""Measure compute rates of this device: square matrix products by size, dtype and threads, and other operators.

The rates of other operators are relative to square products. An operator and a square product are timed alternately,
so that a change of the machine's speed affects both.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.nn.functional as F

import tutti.profile.probe.host_facts as host_facts
import tutti.profile.probe.probe_timing as probe_timing
from tutti.config.cluster import ConvolutionRate, GemmRate, ImageRate, VectorRate, WeightKind, WeightRate
from tutti.config.model import OpKind, VectorKind
from tutti.float32_precision import allow_tf32
from tutti.profile.probe.probe_timing import Effort

PRODUCT_OF = 64
"""Sides of square products are multiples of this, like the products whose rates predictions use. On one core of an AMD
EPYC, a side of 845 took 1.25 to 1.6 times as long per FLOP as 832.
"""

HEAP_NBYTES = 2**24
"""Freed blocks up to this size stay in the heap. All tensors of the timed operators are smaller."""

LAYERS = 2
"""Linear layers, which most models consist of, are timed this many times as often as others: two single measurements
within an hour gave 0.93 and 1.12 of the rate of products.
"""

BACKWARD = 2
"""Products in backward per product in forward: one for the input's gradient and one for the weight's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedOperator:
    """An operator to time.

    Attributes:
        flops: FLOPs of its forward.
        weight_nbytes: bytes of its weights.
        pixels: pixels of each sample of its output.
    """

    forward: Callable[[], torch.Tensor]
    flops: float
    weight_nbytes: int = 0
    pixels: int = 0


def convolutions() -> list[TimedOperator]:
    """Return 3 x 3 convolutions, from few channels and many pixels to many channels and few pixels.

    On one core of an AMD EPYC these reached 0.6, 0.7, 0.75 to 0.78 and 0.84 to 0.88 of the rate of products. With
    oneDNN's code for SSE 4.1 they reached 0.5, 0.7, 0.9 and 1.07 to 1.13.
    """
    return [_convolution(2, 16, 64), _convolution(4, 32, 32), _convolution(8, 64, 16), _convolution(4, 256, 16)]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRates:
    """Rates of operators relative to square products.

    Attributes:
        efficiency: relative rate by kind of operator.
        convolutions: how the rate of convolutions depends on the bytes of their weights.
        images: how the rate of convolutions depends on the number of pixels.
    """

    efficiency: dict[OpKind, float] = field(default_factory=dict)
    convolutions: tuple[ConvolutionRate, ...] = ()
    images: tuple[ImageRate, ...] = ()


def measure_operator_rates(device: torch.device, effort: Effort, *, threads: int = 1) -> OperatorRates:
    """Measure the float32 rate of forward and backward together, relative to square products, by kind.

    Args:
        device: the device to measure.
        effort: how much to measure.
        threads: number of threads.

    Returns:
        Nothing if the effort leaves no time for it, or on GPUs, which choose other kernels for every dtype.
    """
    if device.type != "cpu" or not effort.kinds:
        return OperatorRates()
    _keep_freed_blocks()
    with on_threads(threads):
        linear = _paired_times_s(layers(), device, replace(effort, kinds=LAYERS * effort.kinds))
        attended = _paired_times_s([attention()], device, effort)
        convolved = {operator.weight_nbytes: _paired_times_s([operator], device, effort) for operator in convolutions()}
        small = {
            operator.pixels: _relative([_paired_times_s([operator], device, effort)]) for operator in small_images()
        }
    reference = convolutions()[-1]
    reference_rate = _relative([convolved[reference.weight_nbytes]])
    mean_rate = _relative(convolved.values())
    return OperatorRates(
        efficiency={"gemm": _relative([linear]), "conv": mean_rate, "attention": _relative([attended])},
        convolutions=tuple(
            ConvolutionRate(weight_nbytes=nbytes, relative=_relative([took]) / mean_rate)
            for nbytes, took in convolved.items()
        ),
        images=(
            ImageRate(pixels=reference.pixels, relative=1.0),
            *(ImageRate(pixels=pixels, relative=relative / reference_rate) for pixels, relative in small.items()),
        ),
    )


def layers() -> list[TimedOperator]:
    """Return linear layers, one wider, one narrower and one of equal width: (rows, in, out).

    They have so many rows that streaming the weights, which predictions count separately, takes a hundredth of the
    time. With 512 rows it took a twentieth.
    """
    return [_layer(2048, 256, 1024), _layer(2048, 1024, 256), _layer(1024, 1024, 1024)]


def small_images() -> list[TimedOperator]:
    """Return convolutions like the last of `convolutions`, with as many FLOPs on images of 4 x 4 and 2 x 2.

    Of the 9 multiplications per pixel, 2.75 and 5 fall outside the image but are counted. On one core of an AMD EPYC
    these reached 1.17 and 1.05 times the rate of that convolution. Kernels of 1 x 1, which have no padding, are not
    distinguished: they reached 1.08 and 0.87.
    """
    return [_convolution(64, 256, 4), _convolution(256, 256, 2)]


def attention() -> TimedOperator:
    """Return attention of 4 samples, 4 heads of 64 and 256 positions: two products of 2 s^2 d FLOPs per head."""
    batch, heads, positions, width = 4, 4, 256, 64
    query, key, value = (torch.randn(batch, heads, positions, width, requires_grad=True) for _ in range(3))
    return TimedOperator(
        forward=lambda: F.scaled_dot_product_attention(query, key, value),
        flops=4.0 * batch * heads * positions**2 * width,
    )


def _layer(rows: int, inputs: int, outputs: int) -> TimedOperator:
    weight, bias = torch.randn(outputs, inputs, requires_grad=True), torch.randn(outputs, requires_grad=True)
    values = torch.randn(rows, inputs, requires_grad=True)
    return TimedOperator(forward=lambda: F.linear(values, weight, bias), flops=2.0 * rows * inputs * outputs)


def _convolution(samples: int, channels: int, side: int) -> TimedOperator:
    weight = torch.randn(channels, channels, 3, 3, requires_grad=True)
    image = torch.randn(samples, channels, side, side, requires_grad=True)
    return TimedOperator(
        forward=lambda: F.conv2d(image, weight, padding=1),
        flops=2.0 * weight.numel() * samples * side * side,
        weight_nbytes=weight.numel() * weight.itemsize,
        pixels=side * side,
    )


def _keep_freed_blocks() -> None:
    """Keep freed blocks in the heap, as a training run does.

    glibc returns blocks to the system that are larger than any freed before, and each page of the next block costs a
    fault. A process's first convolution took nearly twice as long as later ones.
    """
    torch.empty(HEAP_NBYTES, dtype=torch.uint8)


def _relative(took: Iterable[tuple[float, float]]) -> float:
    """Return the rate of operators relative to products: their seconds for as many FLOPs, products over operators."""
    products_s, operators_s = zip(*took, strict=True)
    return float(sum(products_s) / sum(operators_s))


def _paired_times_s(operators: list[TimedOperator], device: torch.device, effort: Effort) -> tuple[float, float]:
    """Return the seconds of square products and of operators with as many FLOPs, timed alternately: the shortest."""
    products_s, operators_s = 0.0, 0.0
    for operator in operators:
        times = [
            ((1 + BACKWARD) * product_s(operator.flops, device, effort), _forward_backward_s(operator, device, effort))
            for _ in range(effort.kinds)
        ]
        products_s += min(took_s for took_s, _ in times)
        operators_s += min(took_s for _, took_s in times)
    return products_s, operators_s


def product_s(flops: float, device: torch.device, effort: Effort) -> float:
    """Return the seconds that a square product takes for this many FLOPs."""
    n = PRODUCT_OF * max(1, round((flops / 2) ** (1 / 3) / PRODUCT_OF))
    left, right, out = (torch.randn(n, n) for _ in range(3))
    took = probe_timing.repeated(lambda: torch.mm(left, right, out=out), device, repeats=effort.repeats, budget_s=0.1)
    return float(took.quartile_s * flops / (2.0 * n**3))


def _forward_backward_s(operator: TimedOperator, device: torch.device, effort: Effort) -> float:
    """Return the seconds of an operator's forward and backward."""
    gradient = torch.ones_like(operator.forward())

    def call() -> None:
        torch.autograd.backward(operator.forward(), gradient)

    return probe_timing.repeated(call, device, repeats=effort.repeats, budget_s=0.2).quartile_s


REFERENCE_FLOPS = 2.0 * 768**3
"""FLOPs of the product that operators are compared with: large enough that larger ones run no faster."""

BUDGET_S = 0.05

Call = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorOperators:
    """Operators of one kind, all applied to values of one shape."""

    kind: VectorKind
    shape: tuple[int, ...]
    calls: tuple[Call, ...]

    @property
    def numel(self) -> int:
        return int(torch.Size(self.shape).numel())


def vector_operators() -> list[VectorOperators]:
    """Return operators of each kind on about 0.5 million elements: as many as a layer of a small model has.

    Their work takes much longer than the call.
    """
    rows, images = (2048, 256), (16, 32, 32, 32)
    weight, bias = torch.ones(256), torch.zeros(256)
    return [
        VectorOperators(kind="norm", shape=rows, calls=(lambda x: F.layer_norm(x, (256,), weight, bias),)),
        VectorOperators(kind="batch_norm", shape=images, calls=(lambda x: F.batch_norm(x, None, None, training=True),)),
        VectorOperators(kind="pool", shape=images, calls=(lambda x: F.max_pool2d(x, 2),)),
        VectorOperators(kind="exponential", shape=rows, calls=(F.gelu, F.silu, partial(F.softmax, dim=-1))),
        VectorOperators(kind="function", shape=rows, calls=(torch.tanh, partial(F.gelu, approximate="tanh"))),
        VectorOperators(kind="random", shape=rows, calls=(lambda x: torch.empty_like(x).bernoulli_(0.9),)),
    ]


def measure_vector_rates(device: torch.device, effort: Effort, *, threads: int = 1) -> tuple[VectorRate, ...]:
    """Measure the elements that operators visit in the time of one FLOP of products, forward and backward, by kind.

    Args:
        device: the device to measure.
        effort: how much to measure.
        threads: number of threads.

    Returns:
        Nothing if the effort leaves no time for it, or on GPUs, where memory traffic takes longer than these operators.
    """
    if device.type != "cpu" or not effort.kinds:
        return ()
    with on_threads(threads):
        return tuple(_rate(vectors, device, effort) for vectors in vector_operators())


def _rate(vectors: VectorOperators, device: torch.device, effort: Effort) -> VectorRate:
    """Return the rates of one kind, from the shortest time of each operator and of the product."""
    times = [
        (product_s(REFERENCE_FLOPS, device, effort), *_vector_forward_backward_s(vectors, device, effort))
        for _ in range(effort.kinds)
    ]
    reference_s, forward_s, backward_s = (min(column) for column in zip(*times, strict=True))
    a_flop_s, elements = reference_s / REFERENCE_FLOPS, vectors.numel * len(vectors.calls)
    return VectorRate(
        kind=vectors.kind, forward=a_flop_s * elements / forward_s, backward=a_flop_s * elements / backward_s
    )


def _vector_forward_backward_s(vectors: VectorOperators, device: torch.device, effort: Effort) -> tuple[float, float]:
    """Return the seconds of all calls of a kind, and of their backward; a call without a backward counts again."""
    values, ahead_s, back_s = torch.randn(vectors.shape, requires_grad=True), 0.0, 0.0
    for call in vectors.calls:
        out = call(values)
        forward = partial(call, values.detach())
        ahead = _vector_time_s(forward, device, effort)
        ahead_s += ahead
        if out.requires_grad:
            back_s += _vector_time_s(partial(_gradient, out, values, torch.ones_like(out)), device, effort)
        else:
            back_s += ahead
    return ahead_s, back_s


def _gradient(out: torch.Tensor, values: torch.Tensor, of_out: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(out, values, of_out, retain_graph=True)[0]


def _vector_time_s(call: Callable[[], object], device: torch.device, effort: Effort) -> float:
    return probe_timing.repeated(call, device, repeats=effort.repeats, budget_s=BUDGET_S).quartile_s


ROWS = (16, 128)
"""Rows of two thin products with the same weights. Their FLOPs grow with the rows, but both stream the weights once."""

PER_CHANNEL, SIDE, IMAGES = 8, 4, (2, 16)
"""The same for 3 x 3 convolutions: numbers of images, each of `SIDE` x `SIDE` pixels. The convolution has one channel
for every `PER_CHANNEL` rows of the products' weights: 256 for 2,048. oneDNN orders a convolution's weights differently,
which took two to three times as long on one core of an AMD EPYC.
"""

ROUNDS = 3
"""The two amounts are timed one right after the other, this many times, and the median rate counts. A round in which
the machine's speed changes between the two gives a wrong rate.
"""

MAX_WEIGHTS = 32
"""Largest number of weights that are used in turn."""

KINDS: dict[str, tuple[WeightKind, ...]] = {"float64": ("gemm",), "float32": ("gemm", "conv"), "bfloat16": ("gemm",)}
"""The operators timed in each dtype. These are the dtypes that CPUs multiply natively, if their processor can."""

EMULATED, EMULATION_SIZE = 8, 192
"""A dtype is emulated if a product of the second size takes this many times as long as in float32. Its FLOPs then take
minutes and hide everything else: bfloat16 took 60 times as long on an AMD EPYC without AVX-512.
"""


def emulated(device: torch.device) -> tuple[str, ...]:
    """Return the dtypes of `KINDS` that the device emulates."""
    taken = {}
    for name in KINDS:
        shape, dtype = (EMULATION_SIZE, EMULATION_SIZE), DTYPES[name]
        left, right, result = (torch.ones(shape, device=device, dtype=dtype) for _ in range(3))
        with on_threads(1):
            taken[name] = min(probe_timing.once(lambda: torch.mm(left, right, out=result), device) for _ in range(4))  # noqa: B023
    return tuple(name for name, seconds in taken.items() if seconds > EMULATED * taken["float32"])


def measure_weight_rates(
    device: torch.device,
    effort: Effort,
    *,
    threads: tuple[int, ...],
    dtypes: tuple[str, ...],
    concurrent: int = 1,
    barrier: probe_timing.Barrier | None = None,
) -> tuple[WeightRate, ...]:
    """Measure the rates of streaming weights, for each dtype and number of threads.

    More weights are used in turn than caches hold. In training, all other weights, their gradients and the optimizer
    state are used between two uses of one weight. With a single weight of 17 MB and a cache of 32 MB, float32 gradients
    and all bfloat16 products seemed about twice as fast.

    Args:
        device: the device to measure.
        effort: how much to measure.
        threads: the numbers of threads to measure with.
        dtypes: the dtypes to measure.
        concurrent: number of processes of the host that measure at once.
        barrier: waits, before each sample, for ranks that measure at the same time in the same memory.

    Returns:
        The rates; nothing on devices that load weights while they compute, such as GPUs.
    """
    if device.type != "cpu" or not effort.weight_size:
        return ()
    rates = []
    for dtype in (name for name in dtypes if name in KINDS):
        for count in threads:
            for kind in KINDS[dtype]:
                with on_threads(count):
                    forward, back, gradient = _medians_of_rounds(
                        _weight_operator(kind, effort.weight_size), device, effort, DTYPES[dtype], barrier
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


def stream_rate(nbytes: float, few_s: float, many_s: float, amounts: tuple[int, int] = ROWS) -> float:
    """Return the bytes of weights per second, from two products that differ only in their rows.

    A product takes t(rows) = rows x + nbytes / rate. The constant part counts as at least a hundredth of the shorter
    time.

    Args:
        nbytes: bytes of the weights.
        few_s, many_s: seconds of the two products.
        amounts: rows of the two products.
    """
    few, many = amounts
    per_row = max(0.0, (many_s - few_s) / (many - few))
    return nbytes / max(few_s - few * per_row, few_s / 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightOperator:
    """Operators that stream weights, to time with two amounts of rows or images.

    Attributes:
        shape: shape of the weights.
        amounts: the two numbers of rows or images.
        item_shape: shape of each row or image.
        products: makes the three products from weights, memory for their gradients, input and gradient of the output.
    """

    shape: tuple[int, ...]
    amounts: tuple[int, int]
    item_shape: tuple[int, ...]
    products: Callable[..., list[Callable[[], object]]]


def _weight_operator(kind: WeightKind, n: int) -> WeightOperator:
    if kind == "gemm":
        return WeightOperator(shape=(n, n), amounts=ROWS, item_shape=(n,), products=_products)
    channels = max(1, n // PER_CHANNEL)
    shape, item_shape = (channels, channels, 3, 3), (channels, SIDE, SIDE)
    return WeightOperator(shape=shape, amounts=IMAGES, item_shape=item_shape, products=_convolutions)


def _medians_of_rounds(
    op: WeightOperator, device: torch.device, effort: Effort, dtype: torch.dtype, barrier: probe_timing.Barrier | None
) -> list[float]:
    """Return the bytes of weights per second in forward, for the input gradient and for the weight gradient."""
    nbytes = math.prod(op.shape) * dtype.itemsize
    count = min(MAX_WEIGHTS, max(1, math.ceil(effort.weight_caches * host_facts.cache_nbytes() / nbytes)))
    weights = [torch.randn(op.shape, device=device).to(dtype) for _ in range(count)]
    gradients = [torch.empty_like(weight) for weight in weights]
    both = []
    for amount in op.amounts:
        input, output = (torch.randn(amount, *op.item_shape, device=device).to(dtype) for _ in range(2))
        both.append(op.products(weights, gradients, input, output))

    def took(call: Callable[[], object]) -> float:
        if barrier is not None:
            return probe_timing.in_step(call, device, barrier).quartile_s
        budget_s = effort.gemm_budget_s / ROUNDS
        return probe_timing.repeated(call, device, repeats=effort.repeats, budget_s=budget_s).quartile_s

    products = list(zip(*both, strict=True))
    rounds = [
        [stream_rate(float(nbytes), took(few), took(many), op.amounts) for few, many in products] for _ in range(ROUNDS)
    ]
    return [statistics.median(rates) for rates in zip(*rounds, strict=True)]


def _products(
    weights: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], input: torch.Tensor, output: torch.Tensor
) -> list[Callable[[], object]]:
    """Return the three products of a linear layer, with the next weights each time.

    Memory is allocated before, as in training.
    """
    result = torch.empty_like(output)
    forward_weights, back, into = (itertools.cycle(tensors) for tensors in (weights, weights, gradients))
    return [
        lambda: torch.mm(input, next(forward_weights).t(), out=result),
        lambda: torch.mm(output, next(back), out=result),
        lambda: torch.mm(output.t(), input, out=next(into)),
    ]


def _convolutions(
    weights: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], input: torch.Tensor, output: torch.Tensor
) -> list[Callable[[], object]]:
    """Return the three products of a convolution, with the next weights each time.

    The memory of `gradients` is not used: convolutions allocate their own.
    """
    forward_weights, back, into = (itertools.cycle(weights) for _ in range(3))

    def gradient(weight: torch.Tensor, *wanted: bool) -> object:
        ones = [1, 1]
        return torch.ops.aten.convolution_backward(
            output, input, weight, None, ones, ones, ones, False, [0, 0], 1, [*wanted, False]
        )

    return [
        lambda: torch.conv2d(input, next(forward_weights), padding=1),
        lambda: gradient(next(back), True, False),
        lambda: gradient(next(into), False, True),
    ]


Say = Callable[[str], None]

GRANTED = 0.8
"""A process that has a core for less than this fraction of its time measures only a part of the core's speed."""

DIP = 0.95
"""A rate below this fraction of the best rate of its dtype and threads is measured again. Products of all sizes run at
about the same rate.
"""

SCATTER = 0.5
"""A rate whose samples scatter by more than this fraction of their median was disturbed, and is measured again."""

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "tf32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmRates:
    """Measured rates, and notes on the sizes that were skipped."""

    rates: tuple[GemmRate, ...]
    notes: tuple[str, ...] = ()


def gemm_flops_per_s(n: int, seconds: float) -> float:
    """Return the rate of an N x N x N matrix product: 2 N^3 / t."""
    return 2 * n**3 / seconds


def thread_counts(cores: int, kind: str) -> tuple[int, ...]:
    """Return the numbers of threads to measure.

    Args:
        cores: number of cores.
        kind: "ends" for 1 and `cores`; "powers" for the powers of two between them too.
    """
    between = [2**k for k in range(1, cores.bit_length()) if 2**k < cores] if kind == "powers" else []
    return tuple(dict.fromkeys([1, *between, cores]))


def supported(dtype: str, device: torch.device) -> bool:
    """Return whether the device multiplies in `dtype`; only NVIDIA's and AMD's GPUs have tf32 and float8.

    Compute capabilities are NVIDIA's. AMD's GPUs have numbers of their own, of which those with matrix cores pass; a
    product that torch then refuses is left out.
    """
    if device.type != "cuda":
        return dtype in DTYPES and dtype != "tf32"
    capability = torch.cuda.get_device_capability(device)
    needed = {"tf32": (8, 0), "bfloat16": (8, 0), "float16": (5, 3), "float8": (8, 9)}.get(dtype, (0, 0))
    return capability >= needed and (dtype != "float8" or hasattr(torch, "_scaled_mm"))


def measure_gemm_rates(
    device: torch.device,
    effort: Effort,
    *,
    threads: tuple[int, ...],
    sizes: tuple[int, ...],
    dtypes: tuple[str, ...],
    concurrent: int = 1,
    say: Say = lambda text: None,
) -> GemmRates:
    """Measure all combinations of size, dtype and threads that fit the budget.

    Args:
        device: the device to measure.
        effort: how much to measure.
        threads: the numbers of threads to measure with; the present number is restored afterwards.
        sizes: sides of the matrices, in ascending order.
        dtypes: the dtypes to measure; those that the device lacks are skipped.
        concurrent: number of processes of the host that measure at once.
        say: receives what is being measured.
    """
    rates: list[GemmRate] = []
    notes: list[str] = []
    granted = 1.0
    for dtype in dtypes:
        if not supported(dtype, device):
            continue
        for count in threads:
            on = f" on {count} thread{'s' * (count > 1)}" if device.type == "cpu" else ""
            say(f"matrix products in {dtype}{on}")
            with on_threads(count):
                measured, skipped, least = _sizes(device, effort, dtype, count, sizes, concurrent)
            rates += measured
            granted = min(granted, least if count == 1 else 1.0)  # with several threads, some wait for others
            if skipped:
                notes.append(
                    f"{dtype} products of N = {', '.join(map(str, skipped))}{on} were skipped: predicted to take "
                    f"more than {effort.gemm_budget_s:g} s each"
                )
    if granted < GRANTED and concurrent == 1:
        notes.append(
            f"other work took cores while matrix products were timed (this process had a core for {granted:.0%} of its "
            "time), so rates are too low; measure again when the machine is quiet"
        )
    return GemmRates(rates=tuple(rates), notes=tuple(notes))


def remeasure_doubtful(rates: Sequence[GemmRate], device: torch.device, effort: Effort) -> tuple[GemmRate, ...]:
    """Measure rates again that dip or whose samples scatter, and keep the better one.

    Shared machines have slow phases, while a real loss shows up again. Call this some time after the first measurement.
    """
    kept: list[GemmRate] = []
    for rate in rates:
        comparable = [
            candidate.flops_per_s
            for candidate in rates
            if (candidate.dtype, candidate.threads) == (rate.dtype, rate.threads)
        ]
        if rate.spread > SCATTER or rate.flops_per_s < DIP * max(comparable):
            with on_threads(rate.threads):
                second, _, _ = _sizes(device, effort, rate.dtype, rate.threads, (rate.n,), rate.concurrent)
            rate = max(rate, *second, key=lambda candidate: candidate.flops_per_s)
        kept.append(rate)
    return tuple(kept)


def predicted_s(rates: list[GemmRate], n: int) -> float:
    """Return the expected seconds of the next size: 2 N^3 at the last rate, which keeps falling if it fell.

    Emulated dtypes get slower with every size (float16 on a CPU: 2.5 times per doubling).
    """
    if not rates:
        return 0.0
    last = rates[-1]
    fall = max(1.0, rates[-2].flops_per_s / last.flops_per_s) if len(rates) > 1 else 1.0
    return 2 * n**3 / last.flops_per_s * fall


def _sizes(
    device: torch.device, effort: Effort, dtype: str, threads: int, sizes: tuple[int, ...], concurrent: int
) -> tuple[list[GemmRate], list[int], float]:
    """Return the rates, the skipped sizes, and the smallest fraction of the time for which this process had a core."""
    rates: list[GemmRate] = []
    granted = 1.0
    for index, n in enumerate(sizes):
        if predicted_s(rates, n) > effort.gemm_budget_s:
            return rates, list(sizes[index:]), granted
        with _product(device, dtype, n) as call:
            if call is None:
                return rates, list(sizes[index:]), granted
            took = probe_timing.repeated(call, device, repeats=effort.repeats, budget_s=effort.gemm_budget_s)
        granted = min(granted, took.granted)
        rates.append(
            GemmRate(
                dtype=dtype,
                n=n,
                threads=threads,
                flops_per_s=gemm_flops_per_s(n, took.quartile_s),
                spread=took.spread,
                concurrent=concurrent,
            )
        )
    return rates, [], granted


@contextmanager
def _product(device: torch.device, dtype: str, n: int) -> Iterator[Callable[[], object] | None]:
    """Yield a call that multiplies two N x N matrices in `dtype`; None if the device refuses it."""
    if dtype == "float8":
        yield _float8_product(device, n)
        return
    left, right = (torch.randn(n, n, device=device).to(DTYPES[dtype]) for _ in range(2))
    out = torch.empty(n, n, dtype=DTYPES[dtype], device=device)
    allow_tf32(dtype == "tf32")
    try:
        yield lambda: torch.mm(left, right, out=out)
    finally:
        allow_tf32(False)


def _float8_product(device: torch.device, n: int) -> Callable[[], object] | None:
    left = torch.randn(n, n, device=device).to(torch.float8_e4m3fn)
    right = torch.randn(n, n, device=device).to(torch.float8_e4m3fn).t()  # the kernel requires column-major order
    unit_scale = torch.ones((), device=device)

    def call() -> object:
        return torch._scaled_mm(left, right, scale_a=unit_scale, scale_b=unit_scale, out_dtype=torch.bfloat16)

    try:
        call()
    except RuntimeError:  # this build of torch, or its kernels for this GPU, lack float8 products
        return None
    return call


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """While open, torch computes on this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)

"""How fast this CPU runs linear layers, convolutions and attention beside a square matrix product of as many FLOPs.

Each is timed in turns with that product, so that a machine that changes its pace does so for both.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F

from tutti.config.cluster import ConvolutionRate, ImageRate
from tutti.config.model import OpKind
from tutti.profile.probe import gemm, timing
from tutti.profile.probe.effort import Effort

PRODUCT_OF = 64
"""Sides of square products are multiples of this, as those whose rates predictions know: on one core of an AMD EPYC one
of 845 took 1.25 to 1.6 times as long a FLOP as one of 832."""

KEPT_NBYTES = 2**24
"""Blocks up to this size are kept when they are freed: those of any subject's tensors are smaller."""

LAYERS = 2
"""How many times as often as others layers are timed, which most models are made of: two turns gave 0.93 and 1.12 of
products within an hour."""

BACKWARD = 2
"""Products of a backward for each of its forward: a gradient for the input and one for the weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """An operator to be timed. `flops`: of its forward; `weight_nbytes`: of what it multiplies by; `pixels`: of each
    sample of what it makes."""

    forward: Callable[[], torch.Tensor]
    flops: float
    weight_nbytes: int = 0
    pixels: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kinds:
    """`efficiency`: by kind, the rate relative to square products; `convolutions`, `images`: how it differs by weights
    and by pixels."""

    efficiency: dict[OpKind, float] = field(default_factory=dict)
    convolutions: tuple[ConvolutionRate, ...] = ()
    images: tuple[ImageRate, ...] = ()


def measure(device: torch.device, effort: Effort, *, threads: int = 1) -> Kinds:
    """Rate of forward and backward together in float32, relative to square products, by kind; nothing where the effort
    has no room for it, or not on a CPU (GPUs choose other kernels in every dtype)."""
    if device.type != "cpu" or not effort.kinds:
        return Kinds()
    _keep_what_is_freed()
    with gemm.on_threads(threads):
        linear = _took(layers(), device, replace(effort, kinds=LAYERS * effort.kinds))
        attended = _took([attention()], device, effort)
        convolved = {one.weight_nbytes: _took([one], device, effort) for one in convolutions()}
        small = {one.pixels: _relative([_took([one], device, effort)]) for one in small_images()}
    alike = convolutions()[-1]
    larger = _relative([convolved[alike.weight_nbytes]])
    of_all = _relative(convolved.values())
    return Kinds(
        efficiency={"gemm": _relative([linear]), "conv": of_all, "attention": _relative([attended])},
        convolutions=tuple(
            ConvolutionRate(weight_nbytes=nbytes, relative=_relative([took]) / of_all)
            for nbytes, took in convolved.items()
        ),
        images=(
            ImageRate(pixels=alike.pixels, relative=1.0),
            *(ImageRate(pixels=pixels, relative=relative / larger) for pixels, relative in small.items()),
        ),
    )


def layers() -> list[Subject]:
    """Linear layers: wider, narrower and as wide: (rows, in, out). Of so many rows that going over the weights, which
    predictions count besides, is a hundredth of it; of 512 rows it was a twentieth."""
    return [_layer(2048, 256, 1024), _layer(2048, 1024, 256), _layer(1024, 1024, 1024)]


def convolutions() -> list[Subject]:
    """3 x 3, of few channels and many pixels to the other way round: (samples, channels, pixels of a side).

    On one core of an AMD EPYC these came to 0.6, 0.7, 0.75 to 0.78 and 0.84 to 0.88 of products, and with oneDNN's code
    for SSE 4.1 to 0.5, 0.7, 0.9 and 1.07 to 1.13.
    """
    return [_convolution(2, 16, 64), _convolution(4, 32, 32), _convolution(8, 64, 16), _convolution(4, 256, 16)]


def small_images() -> list[Subject]:
    """As the last of `convolutions`, of as many FLOPs in images of 4 x 4 and 2 x 2.

    Of 9 multiplications for a pixel 2.75 and 5 are with what lies outside, and are counted all the same. On one core of
    an AMD EPYC these came to 1.17 and 1.05 times its pace. Kernels of 1 x 1, which have no padding, are not told apart:
    1.08 and 0.87.
    """
    return [_convolution(64, 256, 4), _convolution(256, 256, 2)]


def attention() -> Subject:
    """4 samples, 4 heads of 64, 256 positions: two products of 2 s^2 d FLOPs a head."""
    batch, heads, positions, width = 4, 4, 256, 64
    query, key, value = (torch.randn(batch, heads, positions, width, requires_grad=True) for _ in range(3))
    return Subject(
        forward=lambda: F.scaled_dot_product_attention(query, key, value),
        flops=4.0 * batch * heads * positions**2 * width,
    )


def _layer(rows: int, inputs: int, outputs: int) -> Subject:
    weight, bias = torch.randn(outputs, inputs, requires_grad=True), torch.randn(outputs, requires_grad=True)
    values = torch.randn(rows, inputs, requires_grad=True)
    return Subject(forward=lambda: F.linear(values, weight, bias), flops=2.0 * rows * inputs * outputs)


def _convolution(samples: int, channels: int, side: int) -> Subject:
    weight = torch.randn(channels, channels, 3, 3, requires_grad=True)
    image = torch.randn(samples, channels, side, side, requires_grad=True)
    return Subject(
        forward=lambda: F.conv2d(image, weight, padding=1),
        flops=2.0 * weight.numel() * samples * side * side,
        weight_nbytes=weight.numel() * weight.itemsize,
        pixels=side * side,
    )


def _keep_what_is_freed() -> None:
    """As a training does. glibc gives blocks back to the system that are larger than any freed before, and each page of
    the next costs a fault: the first convolution of a process took nearly twice as long as later ones."""
    torch.empty(KEPT_NBYTES, dtype=torch.uint8)


def _relative(took: Iterable[tuple[float, float]]) -> float:
    """Seconds of products beside those of operators of as many FLOPs."""
    products_s, operators_s = zip(*took, strict=True)
    return float(sum(products_s) / sum(operators_s))


def _took(subjects: list[Subject], device: torch.device, effort: Effort) -> tuple[float, float]:
    """Seconds of square products and of the subjects, forward and backward, in turns: of each the least disturbed."""
    products_s, operators_s = 0.0, 0.0
    for one in subjects:
        turns = [
            ((1 + BACKWARD) * product_s(one.flops, device, effort), _there_and_back_s(one, device, effort))
            for _ in range(effort.kinds)
        ]
        products_s += min(took_s for took_s, _ in turns)
        operators_s += min(took_s for _, took_s in turns)
    return products_s, operators_s


def product_s(flops: float, device: torch.device, effort: Effort) -> float:
    """Seconds of so many FLOPs in a square product."""
    n = PRODUCT_OF * max(1, round((flops / 2) ** (1 / 3) / PRODUCT_OF))
    left, right, out = (torch.randn(n, n) for _ in range(3))
    took = timing.repeated(lambda: torch.mm(left, right, out=out), device, repeats=effort.repeats, budget_s=0.1)
    return float(took.quartile_s * flops / (2.0 * n**3))


def _there_and_back_s(subject: Subject, device: torch.device, effort: Effort) -> float:
    gradient = torch.ones_like(subject.forward())

    def call() -> None:
        torch.autograd.backward(subject.forward(), gradient)

    return timing.repeated(call, device, repeats=effort.repeats, budget_s=0.2).quartile_s

"""How fast this CPU runs linear layers, convolutions and attention beside a square matrix product of as many FLOPs.

Each is timed in turns with that product, so that a machine that changes its pace does so for both.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tutti.describe.probe import gemm, timing
from tutti.describe.probe.effort import Effort
from tutti.spec.model import OpKind

BACKWARD = 2
"""Products of a backward for each of its forward: a gradient for the input and one for the weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """An operator to be timed. `flops`: of its forward."""

    forward: Callable[[], torch.Tensor]
    flops: float


def measure(device: torch.device, effort: Effort, *, threads: int = 1) -> dict[OpKind, float]:
    """Rate of forward and backward together in float32, relative to square products, by kind; nothing where the effort
    has no room for it, or not on a CPU (GPUs choose other kernels in every dtype)."""
    if device.type != "cpu" or not effort.kinds:
        return {}
    with gemm.on_threads(threads):
        return {
            "gemm": _relative(layers(), device, effort),
            "conv": _relative(convolutions(), device, effort),
            "attention": _relative([attention()], device, effort),
        }


def layers() -> list[Subject]:
    """Linear layers: wider, narrower and as wide, of weights that stay in the caches: (rows, in, out)."""
    return [_layer(512, 256, 1024), _layer(512, 1024, 256), _layer(256, 1024, 1024)]


def convolutions() -> list[Subject]:
    """3 x 3, of few channels and many pixels and the other way round: (samples, channels, pixels of a side)."""
    return [_convolution(8, 32, 32), _convolution(8, 128, 8)]


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
    )


def _relative(subjects: list[Subject], device: torch.device, effort: Effort) -> float:
    products_s, operators_s = 0.0, 0.0
    for one in subjects:
        for _ in range(effort.kinds):
            products_s += (1 + BACKWARD) * _product_s(one.flops, device, effort)
            operators_s += _there_and_back_s(one, device, effort)
    return products_s / operators_s


def _product_s(flops: float, device: torch.device, effort: Effort) -> float:
    n = round((flops / 2) ** (1 / 3))
    left, right, out = (torch.randn(n, n) for _ in range(3))
    took = timing.repeated(lambda: torch.mm(left, right, out=out), device, repeats=effort.repeats, budget_s=0.1)
    return float(took.quartile_s * flops / (2.0 * n**3))


def _there_and_back_s(subject: Subject, device: torch.device, effort: Effort) -> float:
    gradient = torch.ones_like(subject.forward())

    def call() -> None:
        torch.autograd.backward(subject.forward(), gradient)

    return timing.repeated(call, device, repeats=effort.repeats, budget_s=0.2).quartile_s

"""How long this CPU takes for an element in the operators that its vector units are slow at.

Predictions count one FLOP an element in all of them. On one core of an AMD EPYC a sum took 0.2 ns an element (for its
memory traffic), GELU 1.2, a batch norm 2.2, tanh 4, a maximum of 2 x 2 pixels 6 and a random bit 7.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from tutti.config.cluster import VectorRate
from tutti.config.model import VectorKind
from tutti.profile.probe import gemm, kinds, timing
from tutti.profile.probe.effort import Effort

YARDSTICK_FLOPS = 2.0 * 768**3
"""Of the product timed beside: large enough that larger ones run no faster."""

BUDGET_S = 0.05

Call = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Vectors:
    """Operators of a kind, each on values of a shape."""

    kind: VectorKind
    shape: tuple[int, ...]
    calls: tuple[Call, ...]

    @property
    def numel(self) -> int:
        return int(torch.Size(self.shape).numel())


def subjects() -> list[Vectors]:
    """Some 0.5 million elements each: what a small model has in a layer, and more than a call costs."""
    rows, images = (2048, 256), (16, 32, 32, 32)
    weight, bias = torch.ones(256), torch.zeros(256)
    return [
        Vectors(kind="norm", shape=rows, calls=(lambda x: F.layer_norm(x, (256,), weight, bias),)),
        Vectors(kind="batch_norm", shape=images, calls=(lambda x: F.batch_norm(x, None, None, training=True),)),
        Vectors(kind="pool", shape=images, calls=(lambda x: F.max_pool2d(x, 2),)),
        Vectors(kind="exponential", shape=rows, calls=(F.gelu, F.silu, partial(F.softmax, dim=-1))),
        Vectors(kind="function", shape=rows, calls=(torch.tanh, partial(F.gelu, approximate="tanh"))),
        Vectors(kind="random", shape=rows, calls=(lambda x: torch.empty_like(x).bernoulli_(0.9),)),
    ]


def measure(device: torch.device, effort: Effort, *, threads: int = 1) -> tuple[VectorRate, ...]:
    """Elements in the time of one FLOP of products, forward and backward, by kind; nothing where the effort has no room
    for it, or not on a CPU (on a GPU their memory traffic takes longer)."""
    if device.type != "cpu" or not effort.kinds:
        return ()
    with gemm.on_threads(threads):
        return tuple(_rate(one, device, effort) for one in subjects())


def _rate(one: Vectors, device: torch.device, effort: Effort) -> VectorRate:
    """Of each, and of the product, the least disturbed turn."""
    turns = [
        (kinds.product_s(YARDSTICK_FLOPS, device, effort), *_there_and_back_s(one, device, effort))
        for _ in range(effort.kinds)
    ]
    product_s, forward_s, backward_s = (min(column) for column in zip(*turns, strict=True))
    a_flop_s, elements = product_s / YARDSTICK_FLOPS, one.numel * len(one.calls)
    return VectorRate(kind=one.kind, forward=a_flop_s * elements / forward_s, backward=a_flop_s * elements / backward_s)


def _there_and_back_s(one: Vectors, device: torch.device, effort: Effort) -> tuple[float, float]:
    """Seconds of all the calls of a kind, and of their backward; where there is none, of the calls again."""
    values, ahead_s, back_s = torch.randn(one.shape, requires_grad=True), 0.0, 0.0
    for call in one.calls:
        out = call(values)
        forward = partial(call, values.detach())
        ahead = _took(forward, device, effort)
        ahead_s += ahead
        if out.requires_grad:
            back_s += _took(partial(_gradient, out, values, torch.ones_like(out)), device, effort)
        else:
            back_s += ahead
    return ahead_s, back_s


def _gradient(out: torch.Tensor, values: torch.Tensor, of_out: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(out, values, of_out, retain_graph=True)[0]


def _took(call: Callable[[], object], device: torch.device, effort: Effort) -> float:
    return timing.repeated(call, device, repeats=effort.repeats, budget_s=BUDGET_S).quartile_s

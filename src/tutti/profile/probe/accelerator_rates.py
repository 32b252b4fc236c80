"""Rates of accelerators that CPUs do not have: convolutions by dtype and memory format, copies, kernel launches.

Each function takes a device. What makes no sense on a CPU is skipped there, and named.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import tutti.profile.probe.probe_timing as probe_timing
from tutti.config.cluster import ConvolutionRate, CopyRate
from tutti.float32_precision import allow_tf32
from tutti.profile.probe.probe_timing import Effort

BUDGET_S = 0.05
"""Bound on the samples of one convolution or product."""

LAUNCHES = 200
"""Tiny kernels that are launched in a row without waiting; a GPU's queue holds over a thousand."""

COPY_NBYTES = 2**26

BACKWARD = 2
"""Products in backward per product in forward: one for the input's gradient and one for the weight's."""

FORMATS: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "tf32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
"""Number formats in which torch has convolutions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionShape:
    """A 3 x 3 convolution of square images with as many channels out as in."""

    samples: int
    channels: int
    side: int

    @property
    def weight_nbytes(self) -> int:
        """Bytes of the weights in float32."""
        return 4 * 9 * self.channels**2

    @property
    def flops(self) -> float:
        """FLOPs of forward."""
        return 2.0 * 9 * self.channels**2 * self.samples * self.side**2


SHAPES = tuple(
    ConvolutionShape(samples=64, channels=channels, side=side)
    for channels, side in ((64, 56), (128, 28), (256, 14), (512, 7))
)
"""The 3 x 3 convolutions of a ResNet for images of 224 x 224 (He et al. 2015, table 1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorConvolutions:
    """Rates of convolutions.

    Attributes:
        efficiency: rate of float32 convolutions, or else those of the first dtype, relative to square products of as
            many FLOPs; None where none was measured.
        rates: relative to `efficiency`, by dtype, memory format and bytes of weights.
        skipped: what was not measured, and why.
    """

    efficiency: float | None = None
    rates: tuple[ConvolutionRate, ...] = ()
    skipped: tuple[str, ...] = ()


def measure_convolutions(
    device: torch.device, effort: Effort, *, dtypes: tuple[str, ...], shapes: tuple[ConvolutionShape, ...] = SHAPES
) -> AcceleratorConvolutions:
    """Measure forward and backward of convolutions in each dtype and memory format, beside square products.

    Args:
        device: the device to measure; a CPU has no TF32.
        effort: how much to measure.
        dtypes: number formats. Those without convolutions are skipped.
        shapes: the convolutions.
    """
    relative: dict[tuple[str, bool, int], float] = {}
    skipped = []
    for dtype in dtypes:
        if dtype not in FORMATS or (dtype == "tf32" and device.type == "cpu"):
            skipped.append(f"convolutions in {dtype}: torch has none on {device.type}")
            continue
        allow_tf32(dtype == "tf32")
        try:
            for shape in shapes:
                product = _product_s(shape.flops, FORMATS[dtype], device, effort) * (1 + BACKWARD)
                for channels_last in (False, True):
                    took = _convolution_s(shape, FORMATS[dtype], device, effort, channels_last=channels_last)
                    relative[dtype, channels_last, shape.weight_nbytes] = product / took
        except (RuntimeError, NotImplementedError) as error:
            skipped.append(f"convolutions in {dtype}: {str(error).splitlines()[0]}")
        finally:
            allow_tf32(False)
    if not relative:
        return AcceleratorConvolutions(skipped=tuple(skipped))
    first = "float32" if any(key[0] == "float32" for key in relative) else next(iter(relative))[0]
    plain = [value for (dtype, last, _), value in relative.items() if dtype == first and not last]
    efficiency = len(plain) / sum(1 / value for value in plain)
    return AcceleratorConvolutions(
        efficiency=efficiency,
        rates=tuple(
            ConvolutionRate(weight_nbytes=nbytes, relative=value / efficiency, dtype=dtype, channels_last=last)
            for (dtype, last, nbytes), value in relative.items()
        ),
        skipped=tuple(skipped),
    )


def _product_s(flops: float, dtype: torch.dtype, device: torch.device, effort: Effort) -> float:
    """Return the seconds that a square product takes for this many FLOPs."""
    n = 64 * max(1, round((flops / 2) ** (1 / 3) / 64))
    left, right, out = (torch.ones(n, n, dtype=dtype, device=device) for _ in range(3))
    took = probe_timing.repeated(
        lambda: torch.mm(left, right, out=out), device, repeats=effort.repeats, budget_s=BUDGET_S
    )
    return float(took.quartile_s * flops / (2.0 * n**3))


def _convolution_s(
    shape: ConvolutionShape, dtype: torch.dtype, device: torch.device, effort: Effort, *, channels_last: bool
) -> float:
    """Return the seconds of a convolution's forward and backward."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    sizes = (shape.channels, shape.channels, 3, 3), (shape.samples, shape.channels, shape.side, shape.side)
    weight, image = (torch.ones(size, dtype=dtype, device=device).to(memory_format=layout) for size in sizes)
    weight.requires_grad_()
    image.requires_grad_()
    gradient = torch.ones_like(image)

    def call() -> None:
        torch.autograd.grad(F.conv2d(image, weight, padding=1), (image, weight), gradient)

    return probe_timing.repeated(call, device, repeats=effort.repeats, budget_s=BUDGET_S).quartile_s


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRates:
    """Copies in one direction each.

    Attributes:
        rates: what was measured.
        skipped: what was not, and why.
    """

    rates: tuple[CopyRate, ...] = ()
    skipped: tuple[str, ...] = ()


def measure_copies(device: torch.device, effort: Effort, *, nbytes: int = COPY_NBYTES) -> CopyRates:
    """Measure copies of `nbytes` between the host and an accelerator; nothing on a CPU, which has no such link.

    Args:
        device: the device to measure.
        effort: how much to measure.
        nbytes: size of each copy.
    """
    if device.type == "cpu":
        return CopyRates(skipped=("copies to the device: a CPU computes in the host's own memory",))
    there, skipped = torch.zeros(nbytes, dtype=torch.uint8, device=device), []
    rates = list(_both_directions(torch.zeros(nbytes, dtype=torch.uint8), there, effort, pinned=False))
    try:
        pinned = torch.zeros(nbytes, dtype=torch.uint8).pin_memory()
    except (RuntimeError, NotImplementedError) as error:
        skipped.append(f"copies of pinned memory: {str(error).splitlines()[0]}")
    else:
        rates += _both_directions(pinned, there, effort, pinned=True)
    return CopyRates(rates=tuple(rates), skipped=tuple(skipped))


def _both_directions(here: torch.Tensor, there: torch.Tensor, effort: Effort, *, pinned: bool) -> Iterator[CopyRate]:
    """Yield the rates of copies to the device and back."""

    def rate(target: torch.Tensor, source: torch.Tensor) -> float:
        took = probe_timing.repeated(
            lambda: target.copy_(source, non_blocking=True), there.device, repeats=effort.repeats, budget_s=0.2
        )
        return here.nbytes / took.quartile_s

    yield CopyRate(direction="to_device", pinned=pinned, bytes_per_s=rate(there, here))
    yield CopyRate(direction="to_host", pinned=pinned, bytes_per_s=rate(here, there))


def launch_s(device: torch.device) -> float | None:
    """Return the host's seconds for each launch of a tiny kernel; None on a CPU, which computes the kernel meanwhile.

    Nothing waits for the device within a sample.
    """
    if device.type == "cpu":
        return None
    small, best = torch.ones(16, device=device), float("inf")
    for _ in range(4):  # the first one warms up
        probe_timing.synchronize(device)
        start = time.perf_counter()
        for _ in range(LAUNCHES):
            small.add_(1.0)
        best = min(best, (time.perf_counter() - start) / LAUNCHES)
    probe_timing.synchronize(device)
    return best

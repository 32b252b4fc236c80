"""The speed of a rank: how long a matrix product takes, how fast memory is, and what a call costs.

Measured rates come first: those of the rank's threads, beside as many neighbours as it has. Data sheets give less
certain ones.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

import tutti.cost_model.cost_constants as cost_constants
from tutti.config.cluster import DeviceSpec, GemmRate, WeightKind
from tutti.config.model import OpKind
from tutti.config.vocabulary import Evidence, Precision
from tutti.cost_model.rank_placement import HostGroup
from tutti.errors import PlanError

Array = NDArray[np.float64]

KINDS: tuple[OpKind, ...] = tuple(cost_constants.EFFICIENCY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Seconds of one matrix product against its FLOPs, through known points: straight lines in logarithms.

    Beyond the points the rate stays that of the nearest one; `ramp_s` is added to each product. More FLOPs never take
    less time.
    """

    flops: Array
    seconds: Array
    ramp_s: float = 0.0
    evidence: Evidence = "measured"

    @property
    def best_rate(self) -> float:
        return float(np.max(self.flops / self.seconds))

    def time(self, flops: Array) -> Array:
        """Seconds of products of `flops` FLOPs each; 0 for none."""
        inside = np.clip(flops, self.flops[0], self.flops[-1])
        at = np.exp(np.interp(np.log(inside), np.log(self.flops), np.log(self.seconds)))
        at = np.where(flops <= self.flops[0], self.seconds[0], at)
        at = np.where(flops >= self.flops[-1], self.seconds[-1], at)
        seconds: Array = np.where(flops > 0, at * flops / inside + self.ramp_s, 0.0)
        return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPassTime:
    """Seconds a byte of weights in which matrix products read them: in forward, and in each of backward's two."""

    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BySize:
    """A factor of a rate by the size of an operator.

    It is linear in the logarithm of the size between known points, and constant beyond them.
    """

    sizes: Array
    part: Array

    def at(self, sizes: Array) -> Array:
        return np.interp(np.log(np.maximum(sizes, 1.0)), np.log(self.sizes), self.part)

    @property
    def rising(self) -> "BySize":
        """At each size, the largest factor of any size up to it."""
        return replace(self, part=np.maximum.accumulate(self.part))


def best_of(some: Sequence[BySize]) -> BySize:
    """At each size, the largest of several factors."""
    sizes = np.unique(np.concatenate([one.sizes for one in some]))
    return BySize(sizes=sizes, part=np.max([one.at(sizes) for one in some], axis=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """(kinds,) each: the rate of a pass relative to a square product, for the kinds in `KINDS`."""

    forward: Array
    backward: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """The speed of one rank.

    Attributes: matrix: times of matrix operators in the plan's precision. weights: further time of matrix operators to
        read their weights; convolutions have their own rate. vector_rate: rate of other operators. kernel_overhead_s:
        of a bare operator call. call_s: of an operator call in a model, with the code around it. gap_s: None where
        calls take the worker's own time; else the time between two kernels while the host makes the calls. efficiency:
        relative rate of each operator kind. convolutions: the part of it that a convolution reaches, by the bytes of
        its weights. images: the part of it that a convolution reaches, by the pixels of its output. slowdown: factor of
        all its work (more ranks than cores). half: autocast in a 2-byte dtype.
    """

    matrix: Curve
    weights: WeightPassTime
    convolution_weights: WeightPassTime
    vector_rate: float
    bandwidth_bytes_per_s: float
    efficiency: Efficiency
    convolutions: BySize
    images: BySize
    kernel_overhead_s: float
    call_s: float
    gap_s: float | None
    slowdown: float
    half: bool
    assumptions: tuple[str, ...]
    evidence: Evidence


def matrix_dtype(model_dtype: str, precision: Precision) -> str:
    """The dtype of matrix operators under a plan's precision."""
    return model_dtype if precision == "full" else precision


def supports(device: DeviceSpec, dtype: str) -> bool:
    """Whether the device's description has a rate of products in `dtype`."""
    return dtype in device.peak_flops_per_s or any(rate.dtype == dtype for rate in device.gemm)


def best_rate(device: DeviceSpec, dtype: str) -> float:
    """The highest rate of products in `dtype`, measured before published; 0 for none."""
    measured = [rate.flops_per_s for rate in device.gemm if rate.dtype == dtype]
    return max(measured, default=device.peak_flops_per_s.get(dtype, 0.0))


def worker_at(host_group: HostGroup, model_dtype: str, precision: Precision) -> Worker:
    """The speed of one rank of `host_group`. Raises PlanError for a precision the device has no rate for."""
    device = host_group.device
    dtype = matrix_dtype(model_dtype, precision)
    if precision == "tf32" and model_dtype != "float32":
        raise PlanError(f"precision tf32 needs a float32 model, this one is {model_dtype}; use precision full")
    matrix, said = _curve(host_group, dtype)
    base, _ = _curve(host_group, model_dtype) if supports(device, model_dtype) else (matrix, ())
    assumptions = list(said)
    overhead = device.kernel_overhead_s
    if overhead <= 0 and not device.gemm:
        overhead = cost_constants.KERNEL_OVERHEAD_S[device.kind]
        assumptions.append(f"{overhead * 1e6:.0f} us for each operator call on {device.name}")
    weight_pass_time, assumed = _weight_pass_time(host_group, dtype)
    convolutions, _ = _weight_pass_time(host_group, dtype, "conv")
    assumptions += assumed
    return Worker(
        matrix=matrix,
        weights=weight_pass_time,
        convolution_weights=convolutions,
        vector_rate=base.best_rate,
        bandwidth_bytes_per_s=rank_bandwidth(host_group),
        efficiency=_efficiency(device, _of_one_thread(host_group, model_dtype)),
        convolutions=_by_size((float(rate.weight_nbytes), rate.relative) for rate in device.convolution_rates),
        images=_by_size((float(rate.pixels), rate.relative) for rate in device.image_rates),
        kernel_overhead_s=overhead,
        call_s=overhead * cost_constants.CALL_FACTOR,
        gap_s=cost_constants.KERNEL_GAP_S if device.kind == "cuda" else None,
        slowdown=host_group.slowdown,
        half=precision in ("bfloat16", "float16"),
        assumptions=tuple(assumptions),
        evidence=matrix.evidence,
    )


def _curve(host_group: HostGroup, dtype: str) -> tuple[Curve, tuple[str, ...]]:
    """The curve of `dtype` for one rank of `host_group`, and a sentence on what it assumes."""
    device = host_group.device
    rates = [rate for rate in device.gemm if rate.dtype == dtype]
    if rates:
        return _measured(host_group, rates), ()
    if dtype not in device.peak_flops_per_s:
        have = sorted(device.peak_flops_per_s.keys() | {rate.dtype for rate in device.gemm})
        raise PlanError(
            f"device {device.name!r} has no rate for {dtype} (it has {', '.join(have) or 'none'}); use another "
            "precision, or measure the device with tutti probe"
        )
    share = host_group.threads / max(1, device.cores) if device.kind == "cpu" else 1.0
    rate = device.peak_flops_per_s[dtype] * cost_constants.DATA_SHEET_EFFICIENCY * min(1.0, share)
    curve = Curve(
        flops=np.array([1.0]),
        seconds=np.array([1.0 / rate]),
        ramp_s=cost_constants.MATRIX_RAMP_S[device.kind],
        evidence="assumed" if device.evidence == "assumed" else "published",
    )
    return curve, (
        f"matrix products reach {cost_constants.DATA_SHEET_EFFICIENCY:.0%} of {device.name}'s published {dtype} peak",
    )


def _measured(host_group: HostGroup, rates: list[GemmRate]) -> Curve:
    """Rates of the rank's threads, lowered where its neighbours' products slow it down.

    The factor comes from products measured at once, as many as ranks compute at once, each on the rank's threads.
    Without those, the ranks together cannot beat one product on all their threads; this limit is read at the largest
    size, where a product has enough work for every thread. Without either, ranks do not disturb each other.
    """
    uncontended = _at_threads(rates, host_group.threads)
    cores = max(1, host_group.device.cores)
    at_once, all_threads = min(host_group.sharing, cores), min(host_group.threads * host_group.sharing, cores)
    if at_once == 1:
        return uncontended
    together = [
        rate
        for rate in host_group.device.gemm_concurrent
        if (rate.dtype, rate.concurrent, rate.threads) == (rates[0].dtype, at_once, host_group.threads)
    ]
    if together:
        shared = _points(together, 1.0)
        slower = np.maximum(1.0, shared.seconds / uncontended.time(shared.flops))
        factor = np.interp(np.log(uncontended.flops), np.log(shared.flops), slower)
        return Curve(flops=uncontended.flops, seconds=np.maximum.accumulate(uncontended.seconds * factor))
    if all_threads > max(rate.threads for rate in rates):
        return uncontended
    whole = _at_threads(rates, all_threads)
    largest = np.array([max(uncontended.flops[-1], whole.flops[-1])])
    gained = float(uncontended.time(largest)[0] / whole.time(largest)[0])
    return Curve(flops=uncontended.flops, seconds=uncontended.seconds * max(1.0, at_once / gained))


def _of_one_thread(host_group: HostGroup, dtype: str) -> float:
    """The fraction of the rank's rate of products that one of its threads has."""
    if host_group.device.kind != "cpu" or host_group.threads <= 1:
        return 1.0
    rates = [rate for rate in host_group.device.gemm if rate.dtype == dtype]
    if not rates:
        return 1.0 / min(host_group.threads, max(1, host_group.device.cores))
    return min(1.0, _at_threads(rates, 1).best_rate / _at_threads(rates, host_group.threads).best_rate)


def _efficiency(device: DeviceSpec, of_one_thread: float) -> Efficiency:
    """As measured by element count, else as `efficiency` says, else as assumed for this kind of device.

    It is relative to products on as many threads. What one thread does alone has that thread's fraction of the rate.
    """
    known = {kind: (one, one) for kind, one in cost_constants.EFFICIENCY.items()}
    if device.kind == "cpu":
        known |= cost_constants.CPU_VECTORS
    known |= {kind: (one, one) for kind, one in device.efficiency.items()}
    known |= {rate.kind: (rate.forward, rate.backward) for rate in device.vector_rates}
    for kind in cost_constants.ON_ONE_THREAD:
        known[kind] = (of_one_thread * known[kind][0], of_one_thread * known[kind][1])
    forward, backward = np.array([known[kind] for kind in KINDS]).T
    return Efficiency(forward=forward, backward=backward)


def _by_size(points: Iterable[tuple[float, float]]) -> BySize:
    """The factor through (size, factor) points; 1 without points."""
    sizes, parts = np.array(sorted(points) or [(1.0, 1.0)]).T
    return BySize(sizes=sizes, part=parts)


def _weight_pass_time(host_group: HostGroup, dtype: str, kind: WeightKind = "gemm") -> tuple[WeightPassTime, list[str]]:
    """How fast a rank of `host_group` reads weights in `dtype`, and a sentence on what that assumes.

    It is measured on the rank's threads, with its neighbours doing the same or alone; else it is the memory bandwidth.
    Convolutions without a measurement have the rate of other products.
    """
    device, passes = host_group.device, cost_constants.WEIGHT_PASSES[host_group.device.kind]
    at_once = min(host_group.sharing, max(1, device.cores))
    measured = {rate.kind for rate in device.weight_rates if rate.dtype == dtype}
    alike = [rate for rate in device.weight_rates if rate.kind == (kind if kind in measured else "gemm")]
    rates = {(rate.dtype, rate.threads, rate.concurrent): rate for rate in alike}
    found = rates.get((dtype, host_group.threads, at_once)) or rates.get((dtype, host_group.threads, 1))
    if found is not None:
        backward = (1 / found.input_gradient + 1 / found.weight_gradient) / 2
        return WeightPassTime(forward_s=1 / found.forward, backward_s=backward), []
    each = passes / rank_bandwidth(host_group)
    said = [f"each product goes over its weights {passes:.0f} times besides"] if passes and device.gemm else []
    return WeightPassTime(forward_s=each, backward_s=each), said


def rank_bandwidth(host_group: HostGroup) -> float:
    """Bytes a second that one rank of `host_group` moves while its neighbours do so too, with a core for each.

    It is measured with all ranks at once; else it is what one process moves, at most its part of the device's
    bandwidth.
    """
    device = host_group.device
    share = device.memory_bandwidth_bytes_per_s / min(host_group.sharing, max(1, device.cores))
    if device.evidence != "measured":
        return share * cost_constants.DATA_SHEET_BANDWIDTH_EFFICIENCY
    at_once = min(host_group.sharing, max(1, device.cores))
    rates = {(rate.concurrent, rate.threads): rate.bytes_per_s for rate in device.memory_rates}
    if (at_once, host_group.threads) in rates:
        return rates[at_once, host_group.threads]
    return min(share, rates.get((1, host_group.threads), share))


def _at_threads(rates: list[GemmRate], threads: int) -> Curve:
    """The curve for a number of threads.

    Between measured numbers the rate is interpolated; beyond the largest it is constant, below the smallest
    proportional.
    """
    known = sorted({rate.threads for rate in rates})
    if threads in known or threads > known[-1]:
        return _points([rate for rate in rates if rate.threads == min(threads, known[-1])], 1.0)
    if threads < known[0]:
        return _points([rate for rate in rates if rate.threads == known[0]], threads / known[0])
    low = max(count for count in known if count < threads)
    high = min(count for count in known if count > threads)
    slow, fast = (_points([rate for rate in rates if rate.threads == count], 1.0) for count in (low, high))
    flops = np.unique(np.concatenate([slow.flops, fast.flops]))
    weight = (threads - low) / (high - low)
    rate = (1 - weight) * flops / slow.time(flops) + weight * flops / fast.time(flops)
    return Curve(flops=flops, seconds=np.maximum.accumulate(flops / rate))


def _points(rates: list[GemmRate], factor: float) -> Curve:
    """A curve through measured rates, each times `factor`. A larger product never takes less time."""
    ordered = sorted(rates, key=lambda rate: rate.n)
    flops = np.array([2.0 * rate.n**3 for rate in ordered])
    seconds = np.array([2.0 * rate.n**3 / (rate.flops_per_s * factor) for rate in ordered])
    return Curve(flops=flops, seconds=np.maximum.accumulate(seconds))

"""The speed of a rank: how long a matrix product takes, how fast memory is, and what a call costs.

Measured rates are preferred: those of the rank's number of threads, beside as many neighbours as it has. Data
sheets give less certain rates.
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
    """Seconds of one matrix product against its FLOPs, through known points, linear in logarithms.

    Beyond the points the rate stays that of the nearest one. More FLOPs never take less time.

    Attributes:
        ramp_s: seconds added to each product.
    """

    flops: Array
    seconds: Array
    ramp_s: float = 0.0
    evidence: Evidence = "measured"

    @property
    def best_rate(self) -> float:
        """The highest rate of the known points, in FLOPs per second."""
        return float(np.max(self.flops / self.seconds))

    def time(self, flops: Array) -> Array:
        """Return the seconds of products of `flops` FLOPs each; 0 for none."""
        inside = np.clip(flops, self.flops[0], self.flops[-1])
        at = np.exp(np.interp(np.log(inside), np.log(self.flops), np.log(self.seconds)))
        at = np.where(flops <= self.flops[0], self.seconds[0], at)
        at = np.where(flops >= self.flops[-1], self.seconds[-1], at)
        seconds: Array = np.where(flops > 0, at * flops / inside + self.ramp_s, 0.0)
        return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPassTime:
    """Seconds per byte of weights in which matrix products read them.

    Attributes:
        forward_s: in forward.
        backward_s: in each of the two products of backward.
    """

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
        """Return the factor at each size."""
        return np.interp(np.log(np.maximum(sizes, 1.0)), np.log(self.sizes), self.part)

    @property
    def rising(self) -> "BySize":
        """The largest factor of any size up to each size."""
        return replace(self, part=np.maximum.accumulate(self.part))


def best_of(some: Sequence[BySize]) -> BySize:
    """Return the largest of several factors at each size."""
    sizes = np.unique(np.concatenate([factor.sizes for factor in some]))
    return BySize(sizes=sizes, part=np.max([factor.at(sizes) for factor in some], axis=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """(kinds,) each: the rate of a pass relative to a square product, for the kinds in `KINDS`."""

    forward: Array
    backward: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """The speed of one rank.

    Attributes:
        matrix: times of matrix operators in the plan's precision.
        weights: additional time in which matrix operators read their weights.
        convolution_weights: the same for convolutions.
        vector_rate: FLOPs per second to which the efficiency of all other operators refers.
        bandwidth_bytes_per_s: memory bandwidth of the rank.
        efficiency: relative rate of each operator kind.
        convolutions: factor of a convolution's efficiency, by the bytes of its weights.
        images: factor of a convolution's efficiency, by the pixels of its output.
        kernel_overhead_s: seconds of a bare operator call.
        call_s: seconds of an operator call in a model, with the code around it.
        gap_s: seconds between two kernels while the host makes the calls; None where calls take the worker's own
            time.
        launch_s: the host's seconds for each kernel, which it cannot fall below; 0 where it was not measured.
        slowdown: factor of all its work, where there are more ranks than cores.
        half: whether autocast uses a 2-byte dtype.
        assumptions: sentences on what is assumed, for the notes of a prediction.
        evidence: where the rates come from.
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
    launch_s: float
    slowdown: float
    half: bool
    assumptions: tuple[str, ...]
    evidence: Evidence


def matrix_dtype(model_dtype: str, precision: Precision) -> str:
    """Return the dtype of matrix operators under a plan's precision."""
    return model_dtype if precision == "full" else precision


def supports(device: DeviceSpec, dtype: str) -> bool:
    """Return whether the device's description has a rate of products in `dtype`, or tells it."""
    return _has_rate(device, dtype) or _as_float32(device, dtype)


FLOAT64_FACTOR = 2.0
"""A CPU's vector registers hold half as many numbers in float64 as in float32. GPUs differ: 2 to 64 by model."""


def _has_rate(device: DeviceSpec, dtype: str) -> bool:
    return dtype in device.peak_flops_per_s or any(rate.dtype == dtype for rate in device.gemm)


def _as_float32(device: DeviceSpec, dtype: str) -> bool:
    """Return whether the rate of `dtype` follows from that of float32."""
    unknown = dtype == "float64" and not _has_rate(device, dtype)
    return unknown and device.kind == "cpu" and _has_rate(device, "float32")


def best_rate(device: DeviceSpec, dtype: str) -> float:
    """Return the highest rate of products in `dtype`, measured rates before published ones; 0 if there is none."""
    if _as_float32(device, dtype):
        return best_rate(device, "float32") / FLOAT64_FACTOR
    measured = [rate.flops_per_s for rate in device.gemm if rate.dtype == dtype]
    return max(measured, default=device.peak_flops_per_s.get(dtype, 0.0))


def worker_at(host_group: HostGroup, model_dtype: str, precision: Precision, *, channels_last: bool = False) -> Worker:
    """Return the speed of one rank of `host_group`.

    Args:
        channels_last: whether the model's convolutions are in that memory format.

    Raises:
        PlanError: the device has no rate for the precision.
    """
    device = host_group.device
    dtype = matrix_dtype(model_dtype, precision)
    if precision == "tf32" and model_dtype != "float32":
        raise PlanError(f"precision tf32 needs a float32 model, this one is {model_dtype}; use precision full")
    matrix, curve_assumptions = _curve(host_group, dtype)
    base, _ = _curve(host_group, model_dtype) if supports(device, model_dtype) else (matrix, ())
    assumptions = list(curve_assumptions)
    overhead = device.kernel_overhead_s
    if overhead <= 0 and not device.gemm:
        overhead = cost_constants.KERNEL_OVERHEAD_S[device.kind]
        assumptions.append(f"{overhead * 1e6:.0f} us for each operator call on {device.name}")
    launch_s = (device.launch_s or 0.0) if device.kind == "cuda" else 0.0
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
        convolutions=_convolutions(device, dtype, channels_last=channels_last),
        images=_by_size((float(rate.pixels), rate.relative) for rate in device.image_rates),
        kernel_overhead_s=overhead,
        call_s=max(overhead * cost_constants.CALL_FACTOR, launch_s),
        gap_s=cost_constants.KERNEL_GAP_S if device.kind == "cuda" else None,
        launch_s=launch_s,
        slowdown=host_group.slowdown,
        half=precision in ("bfloat16", "float16"),
        assumptions=tuple(assumptions),
        evidence=matrix.evidence,
    )


def _curve(host_group: HostGroup, dtype: str) -> tuple[Curve, tuple[str, ...]]:
    """Return the curve of `dtype` for one rank of `host_group`, and sentences on what it assumes."""
    device = host_group.device
    rates = [rate for rate in device.gemm if rate.dtype == dtype]
    if rates:
        return _measured(host_group, rates), ()
    if _as_float32(device, dtype):
        curve, assumptions = _curve(host_group, "float32")
        told = f"products in float64 take {FLOAT64_FACTOR:.0f} times as long as in float32 on {device.name}: assumed"
        return replace(curve, seconds=FLOAT64_FACTOR * curve.seconds, evidence="assumed"), (*assumptions, told)
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
    """Return the curve of the rank's threads, slower where its neighbours' products slow it down.

    The factor comes from products that were measured together: as many as ranks compute at the same time, each
    on the rank's number of threads. Without such measurements, all ranks together cannot be faster than one
    product on all their threads. This limit is read at the largest size, where a product has enough work for
    every thread. Without either, ranks do not slow each other down.
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
    """Return the rate of products on one thread, as a fraction of the rank's rate."""
    if host_group.device.kind != "cpu" or host_group.threads <= 1:
        return 1.0
    rates = [rate for rate in host_group.device.gemm if rate.dtype == dtype]
    if not rates:
        return 1.0 / min(host_group.threads, max(1, host_group.device.cores))
    return min(1.0, _at_threads(rates, 1).best_rate / _at_threads(rates, host_group.threads).best_rate)


def _efficiency(device: DeviceSpec, of_one_thread: float) -> Efficiency:
    """Return the efficiency of operator kinds.

    Rates that were measured by element count are preferred, then those of the device's `efficiency`, then those
    assumed for this kind of device. All are relative to products on the rank's threads. A kind that uses only
    one thread has that thread's fraction of the rate.
    """
    known = {kind: (relative, relative) for kind, relative in cost_constants.EFFICIENCY.items()}
    if device.kind == "cpu":
        known |= cost_constants.CPU_VECTORS
    known |= {kind: (relative, relative) for kind, relative in device.efficiency.items()}
    known |= {rate.kind: (rate.forward, rate.backward) for rate in device.vector_rates}
    for kind in cost_constants.ON_ONE_THREAD:
        known[kind] = (of_one_thread * known[kind][0], of_one_thread * known[kind][1])
    forward, backward = np.array([known[kind] for kind in KINDS]).T
    return Efficiency(forward=forward, backward=backward)


def _convolutions(device: DeviceSpec, dtype: str, *, channels_last: bool) -> BySize:
    """Return the factor of convolutions by the bytes of their weights.

    Rates of the same dtype and memory format count; then those of the dtype; then those of float32.
    """
    rates = device.convolution_rates
    own = [rate for rate in rates if rate.dtype == dtype] or [rate for rate in rates if rate.dtype == "float32"]
    rates_here = [rate for rate in own if rate.channels_last == channels_last] or own
    return _by_size((float(rate.weight_nbytes), rate.relative) for rate in rates_here)


def _by_size(points: Iterable[tuple[float, float]]) -> BySize:
    """Return the factor through (size, factor) points; 1 without points."""
    sizes, parts = np.array(sorted(points) or [(1.0, 1.0)]).T
    return BySize(sizes=sizes, part=parts)


def _weight_pass_time(host_group: HostGroup, dtype: str, kind: WeightKind = "gemm") -> tuple[WeightPassTime, list[str]]:
    """Return how fast a rank of `host_group` reads weights in `dtype`, and sentences on what that assumes.

    It is measured on the rank's number of threads, with its neighbours doing the same or idle; otherwise it
    follows from the memory bandwidth. Convolutions without a measurement have the rate of other products.
    """
    device, passes = host_group.device, cost_constants.WEIGHT_PASSES[host_group.device.kind]
    at_once = min(host_group.sharing, max(1, device.cores))
    measured = {rate.kind for rate in device.weight_rates if rate.dtype == dtype}
    alike = [rate for rate in device.weight_rates if rate.kind == (kind if kind in measured else "gemm")]
    rates = {(rate.dtype, rate.threads, rate.concurrent): rate for rate in alike}
    measured_rate = rates.get((dtype, host_group.threads, at_once)) or rates.get((dtype, host_group.threads, 1))
    if measured_rate is not None:
        backward = (1 / measured_rate.input_gradient + 1 / measured_rate.weight_gradient) / 2
        return WeightPassTime(forward_s=1 / measured_rate.forward, backward_s=backward), []
    per_byte_s = passes / rank_bandwidth(host_group)
    assumptions = (
        [f"each matrix product also goes over its weights {passes:.0f} times"] if passes and device.gemm else []
    )
    return WeightPassTime(forward_s=per_byte_s, backward_s=per_byte_s), assumptions


def rank_bandwidth(host_group: HostGroup) -> float:
    """Return the bytes per second that one rank of `host_group` moves while its neighbours do so too, with a core
    for each.

    It is as measured with all ranks at the same time. Otherwise it is what one process moves, but at most its
    part of the device's bandwidth.
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
    """Return the curve for a number of threads.

    Between measured numbers the rate is interpolated. Beyond the largest it is constant, and below the smallest
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
    """Return a curve through measured rates, each times `factor`. A larger product never takes less time."""
    ordered = sorted(rates, key=lambda rate: rate.n)
    flops = np.array([2.0 * rate.n**3 for rate in ordered])
    seconds = np.array([2.0 * rate.n**3 / (rate.flops_per_s * factor) for rate in ordered])
    return Curve(flops=flops, seconds=np.maximum.accumulate(seconds))

"""Time of a rank's own work: a roofline for each operator, with measured rates where there are any.

time = max(FLOPs / rate, bytes / bandwidth) + calls * overhead (Williams, Waterman and Patterson 2009). The rate of a
matrix operator is that of a square product with as many FLOPs in each call, N = (FLOPs / 2)^(1/3). A GPU computes
while its host prepares the next calls, so that a module takes the longer of both there.
"""

from dataclasses import dataclass, fields, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from tutti.errors import PlanError
from tutti.predict import constants
from tutti.predict.placement import Seat
from tutti.spec.cluster import DeviceSpec, GemmRate
from tutti.spec.model import ModelSpec, OpCost, OpKind
from tutti.spec.words import Evidence, Precision

Array = NDArray[np.float64]

KINDS: tuple[OpKind, ...] = tuple(constants.EFFICIENCY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Seconds of one matrix product against its FLOPs, through known points: straight lines in logarithms.

    Beyond the points the rate stays that of the nearest one; `ramp_s` is added to each product. More FLOPs never
    take less time.
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
class Worker:
    """What one rank computes with: `matrix` for matrix operators in the plan's precision, `vector_rate` for others.

    `kernel_overhead_s`: of a bare operator call; `call_s`: of one in a model, with all that is around it; `gap_s`: None
    where that is the worker's own time, else what lies between two kernels while another, the host, makes the calls.
    `efficiency`: of each operator kind in `KINDS`, relative to a square product.
    `slowdown` multiplies all its work (more ranks than cores). `half`: autocast in a 2-byte type.
    """

    matrix: Curve
    vector_rate: float
    bandwidth_bytes_per_s: float
    efficiency: Array
    kernel_overhead_s: float
    call_s: float
    gap_s: float | None
    slowdown: float
    half: bool
    assumptions: tuple[str, ...]
    evidence: Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTable:
    """All operators of a model. `module[i]`: index of operator i's module; `row[i]`: where its costs stand in the
    columns, which hold each different operator once: models repeat their blocks.
    """

    module: NDArray[np.intp]
    row: NDArray[np.intp]
    matrix: NDArray[np.bool_]
    kind: NDArray[np.intp]
    flops_forward: Array
    flops_backward: Array
    nbytes_forward: Array
    nbytes_backward: Array
    weight_nbytes: Array
    calls: Array

    def divided(self, work: Array, weight: Array) -> "OpTable":
        """The same where module i does the part `work[i]` of its work with the part `weight[i]` of its weights."""
        first = np.zeros(len(self.calls), dtype=np.intp)
        first[self.row[::-1]] = self.module[::-1]
        table = self
        if not (
            np.array_equal(work[first][self.row], work[self.module])
            and np.array_equal(weight[first][self.row], weight[self.module])
        ):  # equal operators are divided in different ways
            table, first = self._spread(), self.module
        by, of = work[first], weight[first]
        return replace(
            table,
            flops_forward=table.flops_forward * by,
            flops_backward=table.flops_backward * by,
            nbytes_forward=table.nbytes_forward * by,
            nbytes_backward=table.nbytes_backward * by,
            weight_nbytes=table.weight_nbytes * of,
        )

    def _spread(self) -> "OpTable":
        """With a row for every operator."""
        columns = {
            one.name: getattr(self, one.name)[self.row] for one in fields(self) if one.name not in ("module", "row")
        }
        return OpTable(module=self.module, row=np.arange(len(self.row)), **columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Seconds by module of one pass; `limits`: (3, modules), what limits them: compute, memory traffic, calls."""

    seconds: Array
    limits: Array

    @property
    def compute_s(self) -> float:
        return float(self.limits[0].sum())

    @property
    def memory_s(self) -> float:
        return float(self.limits[1].sum())


def op_table(model: ModelSpec) -> OpTable:
    """The operators of `model`, in order of modules."""
    rows: dict[tuple[object, ...], int] = {}
    module, row = [], []
    for index, one in enumerate(model.modules):
        for op in one.ops:
            module.append(index)
            row.append(rows.setdefault((op.kind, *_costs(op)), len(rows)))
    kinds = [cast(OpKind, key[0]) for key in rows]
    columns = np.array([key[1:] for key in rows], dtype=np.float64).reshape(len(rows), 6)
    return OpTable(
        module=np.array(module, dtype=np.intp),
        row=np.array(row, dtype=np.intp),
        matrix=np.array([kind in constants.MATRIX_KINDS for kind in kinds], dtype=np.bool_),
        kind=np.array([KINDS.index(kind) for kind in kinds], dtype=np.intp),
        flops_forward=columns[:, 0],
        flops_backward=columns[:, 1],
        nbytes_forward=columns[:, 2],
        nbytes_backward=columns[:, 3],
        weight_nbytes=columns[:, 4],
        calls=columns[:, 5],
    )


def _costs(op: OpCost) -> tuple[float, ...]:
    return (
        op.flops_forward,
        op.flops_backward,
        op.nbytes_forward,
        op.nbytes_backward,
        op.weight_nbytes,
        float(op.calls),
    )


def forward(table: OpTable, worker: Worker, samples: int, modules: int) -> Work:
    """One forward pass of `samples` samples."""
    # Autocast reads the weights in full and writes them once more at half the size.
    weight = np.where(table.matrix & worker.half, 2.0, 1.0) * table.weight_nbytes
    calls = np.where(table.matrix & worker.half, 3.0, 1.0) * table.calls
    passed = _Pass(flops=table.flops_forward, nbytes=table.nbytes_forward, weight_nbytes=weight, calls=calls)
    return _work(table, worker, samples, modules, passed)


def backward(table: OpTable, worker: Worker, samples: int, modules: int) -> Work:
    """One backward pass of `samples` samples: reads each weight and writes its gradient."""
    active = (table.flops_backward > 0) | (table.nbytes_backward > 0)
    calls = np.where(active, constants.BACKWARD_CALLS * table.calls, 0.0)
    weight = np.where(active, 2.0 * table.weight_nbytes, 0.0)
    passed = _Pass(flops=table.flops_backward, nbytes=table.nbytes_backward, weight_nbytes=weight, calls=calls)
    return _work(table, worker, samples, modules, passed)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    flops: Array
    nbytes: Array
    weight_nbytes: Array
    calls: Array


def _work(table: OpTable, worker: Worker, samples: int, modules: int, passed: _Pass) -> Work:
    if samples == 0:
        return Work(seconds=np.zeros(modules), limits=np.zeros((3, modules)))
    products = np.maximum(passed.calls, 1.0)
    in_matrix = products * worker.matrix.time(samples * passed.flops / products)
    in_vector = samples * passed.flops / worker.vector_rate
    compute = np.where(table.matrix, in_matrix, in_vector) / worker.efficiency[table.kind]
    width = np.where(table.matrix & worker.half, 0.5, 1.0)
    memory = (samples * passed.nbytes * width + passed.weight_nbytes) / worker.bandwidth_bytes_per_s
    limited = compute >= memory
    parts = worker.slowdown * np.array(
        [np.where(limited, compute, 0.0), np.where(limited, 0.0, memory), passed.calls * worker.call_s]
    )

    def by_module(values: Array) -> Array:
        return np.bincount(table.module, weights=values[table.row], minlength=modules).astype(np.float64)

    limits = np.array([by_module(part) for part in parts])
    if worker.gap_s is not None:
        gaps = by_module(worker.slowdown * worker.gap_s * passed.calls)
        limits[2] = np.maximum(gaps, limits[2] - limits[0] - limits[1])
    return Work(seconds=limits.sum(axis=0), limits=limits)


def matrix_dtype(model_dtype: str, precision: Precision) -> str:
    """The dtype that matrix operators run in under a plan's precision."""
    return model_dtype if precision == "full" else precision


def supports(device: DeviceSpec, dtype: str) -> bool:
    """Whether the device's spec says how fast it multiplies in `dtype`."""
    return dtype in device.peak_flops_per_s or any(rate.dtype == dtype for rate in device.gemm)


def best_rate(device: DeviceSpec, dtype: str) -> float:
    """The highest rate the device's spec gives for products in `dtype`, measured before published; 0 for none."""
    measured = [rate.flops_per_s for rate in device.gemm if rate.dtype == dtype]
    return max(measured, default=device.peak_flops_per_s.get(dtype, 0.0))


def worker(seat: Seat, model_dtype: str, precision: Precision) -> Worker:
    """What one rank of `seat` computes with. Raises PlanError for a precision the device has no rate for."""
    device = seat.device
    dtype = matrix_dtype(model_dtype, precision)
    if precision == "tf32" and model_dtype != "float32":
        raise PlanError(f"precision tf32 needs a float32 model, this one is {model_dtype}; use precision full")
    matrix, said = _curve(seat, dtype)
    base, _ = _curve(seat, model_dtype) if supports(device, model_dtype) else (matrix, ())
    assumptions = list(said)
    overhead = device.kernel_overhead_s
    if overhead <= 0 and not device.gemm:
        overhead = constants.KERNEL_OVERHEAD_S[device.kind]
        assumptions.append(f"{overhead * 1e6:.0f} us for each operator call on {device.name}")
    slowdown = seat.oversubscribed * (constants.OVERSUBSCRIBED if seat.oversubscribed > 1 else 1.0)
    return Worker(
        matrix=matrix,
        vector_rate=base.best_rate,
        bandwidth_bytes_per_s=rank_bandwidth(seat),
        efficiency=np.array([device.efficiency.get(kind, constants.EFFICIENCY[kind]) for kind in KINDS]),
        kernel_overhead_s=overhead,
        call_s=overhead * constants.CALL_FACTOR,
        gap_s=constants.KERNEL_GAP_S if device.kind == "cuda" else None,
        slowdown=slowdown,
        half=precision in ("bfloat16", "float16"),
        assumptions=tuple(assumptions),
        evidence=matrix.evidence,
    )


def _curve(seat: Seat, dtype: str) -> tuple[Curve, tuple[str, ...]]:
    """The curve of `dtype` for one rank of `seat`, and in words what it assumes."""
    device = seat.device
    rates = [rate for rate in device.gemm if rate.dtype == dtype]
    if rates:
        return _measured(seat, rates), ()
    if dtype not in device.peak_flops_per_s:
        have = sorted(device.peak_flops_per_s.keys() | {rate.dtype for rate in device.gemm})
        raise PlanError(
            f"device {device.name!r} has no rate for {dtype} (it has {', '.join(have) or 'none'}); use another "
            "precision, or measure the device with tutti probe"
        )
    share = seat.threads / max(1, device.cores) if device.kind == "cpu" else 1.0
    rate = device.peak_flops_per_s[dtype] * constants.DATA_SHEET_EFFICIENCY * min(1.0, share)
    curve = Curve(
        flops=np.array([1.0]),
        seconds=np.array([1.0 / rate]),
        ramp_s=constants.MATRIX_RAMP_S[device.kind],
        evidence="assumed" if device.evidence == "assumed" else "published",
    )
    return curve, (
        f"matrix products reach {constants.DATA_SHEET_EFFICIENCY:.0%} of {device.name}'s published {dtype} peak",
    )


def _measured(seat: Seat, rates: list[GemmRate]) -> Curve:
    """Rates for the rank's threads, lowered where its neighbours' products slow it down.

    By how much is taken from products measured at once, as many as the ranks that compute at once, each on the
    rank's threads. Without those, ranks cannot together beat one product on all their threads: that limit is read
    off the largest size, where a product has enough to do for every thread. Without either, they do not disturb.
    """
    alone = _at_threads(rates, seat.threads)
    cores = max(1, seat.device.cores)
    at_once, all_threads = min(seat.sharing, cores), min(seat.threads * seat.sharing, cores)
    if at_once == 1:
        return alone
    together = [
        rate
        for rate in seat.device.gemm_concurrent
        if (rate.dtype, rate.concurrent, rate.threads) == (rates[0].dtype, at_once, seat.threads)
    ]
    if together:
        shared = _points(together, 1.0)
        slower = np.maximum(1.0, shared.seconds / alone.time(shared.flops))
        factor = np.interp(np.log(alone.flops), np.log(shared.flops), slower)
        return Curve(flops=alone.flops, seconds=np.maximum.accumulate(alone.seconds * factor))
    if all_threads > max(rate.threads for rate in rates):
        return alone
    whole = _at_threads(rates, all_threads)
    largest = np.array([max(alone.flops[-1], whole.flops[-1])])
    gained = float(alone.time(largest)[0] / whole.time(largest)[0])
    return Curve(flops=alone.flops, seconds=alone.seconds * max(1.0, at_once / gained))


def rank_bandwidth(seat: Seat) -> float:
    """Bytes a second that one rank of `seat` moves while its neighbours do so too, were there a core for each.

    Measured at once where it was; else what one process moves, at most its part of the device's bandwidth.
    """
    device = seat.device
    share = device.memory_bandwidth_bytes_per_s / min(seat.sharing, max(1, device.cores))
    if device.evidence != "measured":
        return share * constants.DATA_SHEET_BANDWIDTH_EFFICIENCY
    at_once = min(seat.sharing, max(1, device.cores))
    rates = {(rate.concurrent, rate.threads): rate.bytes_per_s for rate in device.memory_rates}
    if (at_once, seat.threads) in rates:
        return rates[at_once, seat.threads]
    return min(share, rates.get((1, seat.threads), share))


def _at_threads(rates: list[GemmRate], threads: int) -> Curve:
    """The curve for a number of threads: between measured numbers the rate is interpolated, beyond the most
    it does not rise, below the fewest it falls in proportion."""
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

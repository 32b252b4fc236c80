"""The fit of a cluster's constants to measured step times: damped least squares on logarithms, with a prior.

The prior draws every constant to its data sheet, so that what the rows do not say stays physical instead of running to
a bound. Levenberg (1944) and Marquardt (1963); the Jacobian by differences.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from tutti.config.cluster import ClusterSpec, DeviceSpec, GemmRate, LinkSpec, scale_bandwidth
from tutti.config.model import ModelSpec, OpKind
from tutti.config.plan import Plan
from tutti.cost_model import cost_constants, predict
from tutti.errors import PlanError

Array = NDArray[np.float64]


_STEP = 0.05


_ROUNDS = 12


_LARGEST = 0.3  # of an error's logarithm: beyond it a row counts in proportion only


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measured step: what ran, on which machines, and how long it took."""

    model: ModelSpec
    cluster: ClusterSpec
    plan: Plan
    measured_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Natural logarithms of the factors on a cluster's own constants; 0 changes nothing."""

    rate: float = 0.0
    half_size: float = 0.0
    bandwidth: float = 0.0
    call: float = 0.0
    attention: float = 0.0
    conv: float = 0.0
    node_bandwidth: float = 0.0
    node_latency: float = 0.0
    network_bandwidth: float = 0.0
    network_latency: float = 0.0

    @staticmethod
    def of(values: NDArray[np.float64]) -> "Constants":
        return Constants(**{field.name: float(value) for field, value in zip(fields(Constants), values, strict=True)})

    def array(self) -> NDArray[np.float64]:
        return np.array([getattr(self, field.name) for field in fields(Constants)])


UNFITTED = Constants()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Fitted constants. `scale`: a factor on the time, where there were too few rows for more; `before`, `after`: mean
    absolute error of the rows it was fitted to."""

    constants: Constants = UNFITTED
    scale: float = 1.0
    rows: int = 0
    before: float = 0.0
    after: float = 0.0


def fit_constants(samples: Sequence[Sample], start: Constants = UNFITTED, *, few: int = 16) -> Fit:
    """Constants for rows of one kind of machine; with fewer than `few` rows only a scale is fitted.

    `start`: constants already known for such devices, which are kept where there are few rows.
    """
    first = _logs(samples, start)
    before = _mean_error(first)
    if len(samples) < few:
        scale = float(np.exp(-np.median(first))) if len(first) else 1.0
        after = _mean_error(first + np.log(scale))
        return Fit(constants=start, scale=scale, rows=len(samples), before=before, after=after)
    free = _free(samples)
    best = _minimise(lambda values: _logs(samples, Constants.of(values)), start.array(), free)
    after = _mean_error(_logs(samples, Constants.of(best)))
    return Fit(constants=Constants.of(best), rows=len(samples), before=before, after=after)


def _free(samples: Sequence[Sample]) -> NDArray[np.bool_]:
    """The constants that the rows say anything about: those of links that the clusters have and of their operators."""
    kinds = {op.kind for sample in samples for module in sample.model.modules for op in module.ops}
    tiers = {link.tier for sample in samples for link in sample.cluster.every_link}
    probed = any(device.gemm for sample in samples for device in sample.cluster.devices.values())
    free = [
        not (name.startswith("node_") and "node" not in tiers)
        and not (name.startswith("network_") and "network" not in tiers)
        and not (name == "half_size" and probed)
        and not (name in ("attention", "conv") and name not in kinds)
        for name in NAMES
    ]
    return np.array(free)


def _minimise(errors: Callable[[Array], Array], start: Array, free: NDArray[np.bool_]) -> Array:
    """Levenberg-Marquardt over the free constants."""
    weight = NOISE / PRIOR

    def residual(values: Array) -> Array:
        return np.concatenate([_capped(errors(values)), weight * (values - start)])

    best, at = start.copy(), residual(start)
    damping = 1e-2
    for _ in range(_ROUNDS):
        slopes = np.stack([(residual(_moved(best, int(index))) - at) / _STEP for index in np.flatnonzero(free)], axis=1)
        normal = slopes.T @ slopes
        improved = False
        while damping < 1e4:
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -slopes.T @ at)
            trial = best.copy()
            trial[free] += np.clip(step, -1.0, 1.0)
            now = residual(trial)
            gained = 1 - float(now @ now) / max(float(at @ at), 1e-30)
            if gained > 0:
                best, at, damping = trial, now, damping / 5
                improved = gained > 1e-3
                break
            damping *= 5
        if not improved:
            break
    return best


def _moved(values: Array, index: int) -> Array:
    moved = values.copy()
    moved[index] += _STEP
    return moved


def _capped(logs: Array) -> Array:
    """Errors beyond `_LARGEST` count in proportion, not squared: a misprinted row bends no fit (Huber 1964)."""
    size = np.abs(logs)
    outer = np.sqrt(np.maximum(0.0, 2 * size * _LARGEST - _LARGEST**2))
    return np.sign(logs) * np.where(size > _LARGEST, outer, size)


def _logs(samples: Sequence[Sample], constants: Constants) -> Array:
    """log(predicted / measured); rows that cannot be costed say nothing."""
    logs = []
    for sample in samples:
        cluster = fitted_cluster(sample.cluster, constants, "fit")
        try:
            logs.append(np.log(predict(sample.model, cluster, sample.plan).step_time_s.value / sample.measured_s))
        except PlanError:
            continue
    return np.array(logs)


def _mean_error(logs: Array) -> float:
    return float(np.abs(np.expm1(logs)).mean()) if len(logs) else 0.0


def apply_fit(fit: Fit, cluster: ClusterSpec, source: str) -> ClusterSpec:
    """The cluster with a fit's constants and its scale on everything that takes time; as it is where none was made."""
    if not fit.rows and fit.constants == UNFITTED:
        return cluster
    log = -float(np.log(fit.scale))
    values = fit.constants
    slower = replace(
        values,
        rate=values.rate + log,
        bandwidth=values.bandwidth + log,
        call=values.call - log,
        node_bandwidth=values.node_bandwidth + log,
        node_latency=values.node_latency - log,
        network_bandwidth=values.network_bandwidth + log,
        network_latency=values.network_latency - log,
    )
    return fitted_cluster(cluster, slower, source)


_SIZES = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536)
"""Sizes at which a fitted curve is written down."""

HALF_SIZE = 256.0
"""Where a product reaches half of its best rate, before anything is fitted: about what a data-centre GPU needs."""

NAMES = tuple(field.name for field in fields(Constants))

PRIOR = Constants(
    rate=0.4,
    half_size=1.0,
    bandwidth=0.4,
    call=1.0,
    attention=0.7,
    conv=0.7,
    node_bandwidth=0.7,
    node_latency=1.0,
    network_bandwidth=0.7,
    network_latency=1.0,
).array()
"""How far each may lie from the data sheet before it costs as much as one row that is wrong by `NOISE`."""

NOISE = 0.1
"""Relative error of a row that counts as one."""


def fitted_cluster(cluster: ClusterSpec, fit: Constants, source: str) -> ClusterSpec:
    """The cluster with its constants times the factors; devices get a measured curve of matrix rates."""
    factors = {name: float(np.exp(value)) for name, value in zip(NAMES, fit.array(), strict=True)}
    devices = {name: _device(part, factors, source) for name, part in cluster.devices.items()}
    return replace(cluster, devices=devices).relinked(lambda link: _link(link, factors, source))


def _device(device: DeviceSpec, factors: dict[str, float], source: str) -> DeviceSpec:
    if device.gemm:  # measured by the probe: what was fitted is a factor on it
        gemm = _faster(device.gemm, factors["rate"])
    else:
        half = HALF_SIZE * factors["half_size"]
        best = cost_constants.DATA_SHEET_EFFICIENCY * factors["rate"]
        gemm = tuple(
            GemmRate(dtype=dtype, n=size, flops_per_s=peak * best * size / (size + half))
            for dtype, peak in device.peak_flops_per_s.items()
            for size in _SIZES
        )
    sheet = cost_constants.DATA_SHEET_BANDWIDTH_EFFICIENCY if device.evidence != "measured" else 1.0
    overhead = device.kernel_overhead_s or cost_constants.KERNEL_OVERHEAD_S[device.kind]
    kinds: tuple[OpKind, ...] = ("attention", "conv")
    efficiency = {kind: device.efficiency.get(kind, cost_constants.EFFICIENCY[kind]) * factors[kind] for kind in kinds}
    return replace(
        device,
        gemm=gemm,
        gemm_concurrent=_faster(device.gemm_concurrent, factors["rate"]),
        efficiency={**device.efficiency, **efficiency},
        memory_bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s * sheet * factors["bandwidth"],
        memory_rates=tuple(
            replace(each, bytes_per_s=each.bytes_per_s * factors["bandwidth"]) for each in device.memory_rates
        ),
        kernel_overhead_s=overhead * factors["call"],
        source=f"{source}; before: {device.source}",
        evidence="measured",
    )


def _faster(rates: tuple[GemmRate, ...], factor: float) -> tuple[GemmRate, ...]:
    return tuple(replace(each, flops_per_s=each.flops_per_s * factor) for each in rates)


def _link(link: LinkSpec, factors: dict[str, float], source: str) -> LinkSpec:
    if link.tier == "device":
        return link
    return replace(
        scale_bandwidth(link, factors[f"{link.tier}_bandwidth"]),
        latency_s=link.latency_s * factors[f"{link.tier}_latency"],
        points=(),
        source=f"{source}; before: {link.source}",
        evidence="measured",
    )

"""Fit a cluster's constants to measured step times: damped least squares on logarithms, with a prior.

The prior pulls every constant towards its data sheet, so that constants which the rows do not determine stay physical
instead of drifting to a bound. Levenberg (1944) and Marquardt (1963); the Jacobian is computed by finite differences.
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


_LARGEST = 0.3  # absolute log error beyond which the loss of a row grows linearly


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measured step: the model and plan, the cluster, and the seconds it took."""

    model: ModelSpec
    cluster: ClusterSpec
    plan: Plan
    measured_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Natural logarithms of the factors on a cluster's constants; 0 leaves a constant unchanged."""

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
        """Build constants from their array, in the order of the fields."""
        return Constants(**{field.name: float(value) for field, value in zip(fields(Constants), values, strict=True)})

    def array(self) -> NDArray[np.float64]:
        """Return the constants as an array, in the order of the fields."""
        return np.array([getattr(self, field.name) for field in fields(Constants)])


UNFITTED = Constants()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Fitted constants.

    Attributes:
        scale: factor on the time, which is fitted alone where there are too few rows for the constants.
        rows: number of rows that were fitted to.
        before, after: mean absolute relative error of these rows before and after the fit.
    """

    constants: Constants = UNFITTED
    scale: float = 1.0
    rows: int = 0
    before: float = 0.0
    after: float = 0.0


def fit_constants(samples: Sequence[Sample], start: Constants = UNFITTED, *, few: int = 16) -> Fit:
    """Fit the constants of one kind of machine.

    Args:
        samples: measured steps on this kind of machine.
        start: known constants of such devices; they remain unchanged where there are few rows.
        few: minimum number of rows for a fit of constants; with fewer, only a scale is fitted.
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
    """Return which constants the rows can determine: those of links that the clusters have and operators that run."""
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
    """Minimise the residuals over the free constants with the Levenberg-Marquardt algorithm."""
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
    """Return a copy of the values with one of them moved by a finite-difference step."""
    moved = values.copy()
    moved[index] += _STEP
    return moved


def _capped(logs: Array) -> Array:
    """Limit errors beyond `_LARGEST` to linear growth, so that a misprinted row cannot distort the fit (Huber 1964)."""
    size = np.abs(logs)
    outer = np.sqrt(np.maximum(0.0, 2 * size * _LARGEST - _LARGEST**2))
    return np.sign(logs) * np.where(size > _LARGEST, outer, size)


def _logs(samples: Sequence[Sample], constants: Constants) -> Array:
    """Return log(predicted / measured) of each row; rows that cannot be costed are left out."""
    logs = []
    for sample in samples:
        cluster = fitted_cluster(sample.cluster, constants, "fit")
        try:
            logs.append(np.log(predict(sample.model, cluster, sample.plan).step_time_s.value / sample.measured_s))
        except PlanError:
            continue
    return np.array(logs)


def _mean_error(logs: Array) -> float:
    """Return the mean absolute relative error; 0 without rows."""
    return float(np.abs(np.expm1(logs)).mean()) if len(logs) else 0.0


def apply_fit(fit: Fit, cluster: ClusterSpec, source: str) -> ClusterSpec:
    """Return the cluster with a fit's constants, and with its scale applied to everything that takes time.

    The cluster is unchanged if nothing was fitted.

    Args:
        fit: the fitted constants.
        cluster: the cluster to change.
        source: text that says where the fit comes from.
    """
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
"""Matrix sizes at which a fitted curve of rates is tabulated."""

HALF_SIZE = 256.0
"""Matrix size at which a product reaches half of its best rate before any fit; typical of a data-centre GPU."""

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
"""Deviation of each constant from the data sheet that costs as much as one row with an error of `NOISE`."""

NOISE = 0.1
"""Relative error of a row that has unit cost."""


def fitted_cluster(cluster: ClusterSpec, fit: Constants, source: str) -> ClusterSpec:
    """Return the cluster with its constants multiplied by fitted factors.

    Devices without a measured curve of matrix rates get a fitted one.

    Args:
        cluster: the cluster to change.
        fit: logarithms of the factors.
        source: text that says where the factors come from.
    """
    factors = {name: float(np.exp(value)) for name, value in zip(NAMES, fit.array(), strict=True)}
    devices = {name: _device(part, factors, source) for name, part in cluster.devices.items()}
    return replace(cluster, devices=devices).relinked(lambda link: _link(link, factors, source))


def _device(device: DeviceSpec, factors: dict[str, float], source: str) -> DeviceSpec:
    """Return the device with its rates, bandwidth, overhead and efficiencies multiplied by the factors."""
    if device.gemm:  # measured by the probe: the fit is a factor on it
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
            replace(rate, bytes_per_s=rate.bytes_per_s * factors["bandwidth"]) for rate in device.memory_rates
        ),
        kernel_overhead_s=overhead * factors["call"],
        source=f"{source}; before: {device.source}",
        evidence="measured",
    )


def _faster(rates: tuple[GemmRate, ...], factor: float) -> tuple[GemmRate, ...]:
    """Return the rates multiplied by a factor."""
    return tuple(replace(rate, flops_per_s=rate.flops_per_s * factor) for rate in rates)


def _link(link: LinkSpec, factors: dict[str, float], source: str) -> LinkSpec:
    """Return the link with its bandwidth and latency multiplied by the factors; links within a device are unchanged."""
    if link.tier == "device":
        return link
    return replace(
        scale_bandwidth(link, factors[f"{link.tier}_bandwidth"]),
        latency_s=link.latency_s * factors[f"{link.tier}_latency"],
        points=(),
        source=f"{source}; before: {link.source}",
        evidence="measured",
    )

"""The physical constants of a cluster that step times can be fitted to, and a ClusterSpec that holds them.

What is fitted, each as a factor on what the data sheet or the probe says: the rate of large matrix products; the size
at which a product reaches half of it; memory bandwidth; the cost of an operator call; the rate of attention and of
convolutions beside products; bandwidth and latency of the links of each tier. A product of size N runs at
N / (N + half) of the rate of the largest.
"""

from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from tutti.config.cluster import ClusterSpec, DeviceSpec, GemmRate, LinkSpec, faster
from tutti.config.model import OpKind
from tutti.cost_model import constants

_SIZES = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536)
"""Sizes at which a fitted curve is written down."""

HALF_SIZE = 256.0
"""Where a product reaches half of its best rate, before anything is fitted: about what a data-centre GPU needs."""


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
        best = constants.DATA_SHEET_EFFICIENCY * factors["rate"]
        gemm = tuple(
            GemmRate(dtype=dtype, n=size, flops_per_s=peak * best * size / (size + half))
            for dtype, peak in device.peak_flops_per_s.items()
            for size in _SIZES
        )
    sheet = constants.DATA_SHEET_BANDWIDTH_EFFICIENCY if device.evidence != "measured" else 1.0
    overhead = device.kernel_overhead_s or constants.KERNEL_OVERHEAD_S[device.kind]
    kinds: tuple[OpKind, ...] = ("attention", "conv")
    efficiency = {kind: device.efficiency.get(kind, constants.EFFICIENCY[kind]) * factors[kind] for kind in kinds}
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
        faster(link, factors[f"{link.tier}_bandwidth"]),
        latency_s=link.latency_s * factors[f"{link.tier}_latency"],
        points=(),
        source=f"{source}; before: {link.source}",
        evidence="measured",
    )

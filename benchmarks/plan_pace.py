"""What would have been predicted of a machine as fast as it was while a plan ran.

Virtual machines change their pace by a fifth from one minute to the next (measurements.md): what is predicted from the
probe's minute is then of another machine. Every step has the FLOP/s of a product beside it (plan_rank.pace); predicted
anew with all that the processor does as many times as fast or slow, links as they were, an error is the predictor's.
"""

from dataclasses import replace

from tutti.spec.cluster import ClusterSpec, DeviceSpec


def paced(cluster: ClusterSpec, part: float) -> ClusterSpec:
    """The cluster where devices compute and move memory at `part` of their speed."""
    return replace(cluster, devices={name: _slowed(device, part) for name, device in cluster.devices.items()})


def _slowed(device: DeviceSpec, part: float) -> DeviceSpec:
    return replace(
        device,
        memory_bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s * part,
        peak_flops_per_s={dtype: rate * part for dtype, rate in device.peak_flops_per_s.items()},
        gemm=tuple(replace(rate, flops_per_s=rate.flops_per_s * part) for rate in device.gemm),
        gemm_concurrent=tuple(replace(rate, flops_per_s=rate.flops_per_s * part) for rate in device.gemm_concurrent),
        memory_rates=tuple(replace(rate, bytes_per_s=rate.bytes_per_s * part) for rate in device.memory_rates),
        weight_rates=tuple(
            replace(
                rate,
                forward=rate.forward * part,
                input_gradient=rate.input_gradient * part,
                weight_gradient=rate.weight_gradient * part,
            )
            for rate in device.weight_rates
        ),
        compress_rates=tuple(
            replace(rate, encode_s=rate.encode_s / part, decode_s=rate.decode_s / part)
            for rate in device.compress_rates
        ),
        kernel_overhead_s=device.kernel_overhead_s / part,
    )

"""Small machines and models, with round numbers, for the tests of the cost model and the planner."""

from typing import Any

from tutti.config.cluster import ClusterSpec, DeviceSpec, GemmRate, LinkSpec, NodeSpec
from tutti.config.model import ModelSpec, ModuleSpec, OpCost
from tutti.config.plan import BatchPlan, Plan


def cpu(**changes: Any) -> DeviceSpec:
    """Return four cores: 10 GFLOP/s on one thread, 32 on four, 20 GB/s, operator calls that cost nothing."""
    values: dict[str, Any] = {
        "name": "four cores",
        "kind": "cpu",
        "memory_nbytes": 16 * 2**30,
        "memory_bandwidth_bytes_per_s": 20e9,
        "peak_flops_per_s": {},
        "gemm": (
            GemmRate(dtype="float32", n=1000, threads=1, flops_per_s=10e9),
            GemmRate(dtype="float32", n=1000, threads=2, flops_per_s=20e9),
            GemmRate(dtype="float32", n=1000, threads=4, flops_per_s=32e9),
        ),
        "cores": 4,
        "source": "made up",
        "evidence": "measured",
    }
    return DeviceSpec(**{**values, **changes})


def gpu(**changes: Any) -> DeviceSpec:
    """Return a card from a data sheet: 16 GiB, 100 TFLOP/s in bfloat16, 10 in float32."""
    values: dict[str, Any] = {
        "name": "card",
        "kind": "cuda",
        "memory_nbytes": 16 * 2**30,
        "memory_bandwidth_bytes_per_s": 1e12,
        "peak_flops_per_s": {"float32": 10e12, "tf32": 50e12, "bfloat16": 100e12, "float16": 100e12},
        "source": "made up",
        "evidence": "published",
    }
    return DeviceSpec(**{**values, **changes})


def link(tier: Any = "node", latency_s: float = 1e-4, bandwidth: float = 1e9, **changes: Any) -> LinkSpec:
    values: dict[str, Any] = {"ranks": 4, "source": "made up", "evidence": "measured", **changes}
    return LinkSpec(tier=tier, latency_s=latency_s, bandwidth_bytes_per_s=bandwidth, **values)


def cluster(device: DeviceSpec | None = None, links: Any = None, **node: Any) -> ClusterSpec:
    """Return a cluster with one kind of host, and one host of it unless `count` says otherwise."""
    device = device or cpu()
    values: dict[str, Any] = {"name": "host", "device": "d", "memory_nbytes": 16 * 2**30, **node}
    links = (link("node"), link("network", 1e-3, 1.25e8)) if links is None else links
    return ClusterSpec(name="here", devices={"d": device}, nodes=(NodeSpec(**values),), links=links)


def linear(name: str, inputs: int, outputs: int, **changes: Any) -> ModuleSpec:
    """Return a Linear layer without bias in float32, trained with Adam."""
    parameters = inputs * outputs
    products = OpCost(
        kind="gemm",
        flops_forward=2.0 * parameters,
        flops_backward=4.0 * parameters,
        nbytes_forward=4.0 * (inputs + outputs),
        nbytes_backward=8.0 * (inputs + outputs),
        weight_nbytes=4.0 * parameters,
        calls=1,
    )
    values: dict[str, Any] = {
        "kind": "Linear",
        "parameters": parameters,
        "trainable_parameters": parameters,
        "parameter_nbytes": 4 * parameters,
        "gradient_nbytes": 4 * parameters,
        "optimizer_nbytes": 8 * parameters,
        "activation_nbytes": 4.0 * inputs,
        "output_nbytes": 4.0 * outputs,
        "ops": (products,),
    }
    return ModuleSpec(name=name, **{**values, **changes})


def mlp(width: int = 512, layers: int = 3, **changes: Any) -> ModelSpec:
    modules = tuple(linear(f"layers.{index}", width, width) for index in range(layers))
    return ModelSpec(**{"name": "mlp", "modules": modules, "optimizer": "Adam", **changes})


def plan(batch: int = 64, ranks: int = 1, microbatches: int = 1, **changes: Any) -> Plan:
    return Plan(
        batch=BatchPlan(global_batch_size=batch, num_microbatches=microbatches),
        mesh={"replicate": ranks},
        **changes,
    )

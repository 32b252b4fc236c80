"""A transformer and machines for plans over meshes, with numbers that closed formulas can be checked against."""

from typing import Any

from cost_model.examples import cluster, gpu, link
from tutti.config.cluster import ClusterSpec
from tutti.config.model import ModelSpec, ModuleSpec, OpCost
from tutti.config.plan import BatchPlan, Plan


def part(name: str, *, flops: float = 0.0, parameters: int = 0, kept: float = 0.0, **fields: Any) -> ModuleSpec:
    """Return a module with mixed-precision Adam as in ZeRO: 2 bytes of parameter, 2 of gradient, 12 of state."""
    op = OpCost(
        kind="gemm", flops_forward=flops, flops_backward=2 * flops, nbytes_forward=0.0, nbytes_backward=0.0, calls=0
    )
    return ModuleSpec(
        name=name,
        kind="Part",
        parameters=parameters,
        trainable_parameters=parameters,
        parameter_nbytes=2 * parameters,
        gradient_nbytes=2 * parameters,
        optimizer_nbytes=12 * parameters,
        activation_nbytes=kept,
        ops=(op,) if flops else (),
        **fields,
    )


def transformer(
    layers: int = 4, *, s: int = 64, h: int = 32, a: int = 4, sequence: bool = False, ends: bool = False
) -> ModelSpec:
    """Return blocks as in Korthikanti et al. 2022 (arXiv 2205.05198), section 4, with 2 bytes per value.

    What a block saves for backward adds up to s h (34 + 5 a s / h) bytes.

    Args:
        layers: number of blocks.
        s: tokens per sequence.
        h: hidden size.
        a: attention heads.
        sequence: whether norms and dropouts are computed in parts of the sequence.
        ends: whether there are an embedding and an output layer tied to it.
    """
    sh, size = float(s * h), h * h
    modules = [ModuleSpec(name="", kind="Model")]
    if ends:
        modules.append(part("tokens", parameters=16 * h, output_nbytes=2 * sh, split="vocabulary"))
    for index in range(layers):
        name = f"blocks.{index}"
        modules += [
            part(name, kept=2 * sh, output_nbytes=2 * sh, block=index, sequence=sequence),  # masks of both dropouts
            part(f"{name}.norm1", kept=2 * sh, output_nbytes=2 * sh, block=index, sequence=sequence),
            part(f"{name}.qkv", flops=6.0 * s * size, parameters=3 * size, kept=2 * sh, output_nbytes=6 * sh,
                 split="column", split_limit=a, input_nbytes=2 * sh, block=index),
            part(f"{name}.attention", flops=4.0 * s * sh, kept=6 * sh + 5.0 * a * s * s, output_nbytes=2 * sh,
                 split="heads", split_limit=a, key_value_nbytes=4 * sh, block=index),
            part(f"{name}.merge", flops=2.0 * s * size, parameters=size, kept=2 * sh, output_nbytes=2 * sh,
                 split="row", split_limit=a, block=index),
            part(f"{name}.norm2", kept=2 * sh, output_nbytes=2 * sh, block=index, sequence=sequence),
            part(f"{name}.up", flops=8.0 * s * size, parameters=4 * size, kept=2 * sh, output_nbytes=8 * sh,
                 split="column", input_nbytes=2 * sh, block=index),
            part(f"{name}.gelu", kept=8 * sh, output_nbytes=8 * sh, split="column", block=index),
            part(f"{name}.down", flops=8.0 * s * size, parameters=4 * size, kept=8 * sh, output_nbytes=2 * sh,
                 split="row", block=index),
        ]  # fmt: skip
    if ends:
        modules.append(part("head", flops=32.0 * sh, kept=2 * sh, output_nbytes=32.0 * s, tied_to="tokens"))
    return ModelSpec(
        name="transformer", modules=tuple(modules), optimizer="Adam", tokens_per_sample=s, dtype="bfloat16"
    )


def machines(hosts: int = 4, per_host: int = 8, *, faster: float = 1.0, network: float = 1.0) -> ClusterSpec:
    """Return hosts of cards with bfloat16 rates: 100 TFLOP/s, 300 GB/s within a host, 25 GB/s between hosts."""
    links = (
        link("node", 1e-6, 3e11 * network, evidence="published"),
        link("network", 5e-6, 2.5e10 * network, evidence="published"),
    )
    card = gpu(peak_flops_per_s={"bfloat16": 100e12 * faster}, kernel_overhead_s=1e-9)
    return cluster(card, links, count=hosts, devices_per_node=per_host)


def meshed(batch: int = 32, microbatches: int = 1, mesh: Any = None, **fields: Any) -> Plan:
    return Plan(
        batch=BatchPlan(global_batch_size=batch, num_microbatches=microbatches), mesh=mesh or {"replicate": 1}, **fields
    )

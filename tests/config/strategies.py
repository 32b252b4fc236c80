"""Hypothesis strategies for specs that are valid: built from the fields' types, and by hand where fields agree."""

from dataclasses import fields
from typing import Any

from hypothesis import strategies as st

from tutti.config.cluster import (
    ClusterSpec,
    CompressRate,
    Conditions,
    ConvolutionRate,
    CopyRate,
    DeviceSpec,
    GemmRate,
    ImageRate,
    LinkPoint,
    LinkSpec,
    MemoryRate,
    NodeSpec,
    VectorRate,
    WeightRate,
)
from tutti.config.model import Loading, OpKind
from tutti.config.plan import BatchPlan, LayoutRule, Plan, SyncPlan
from tutti.config.run_folder import Recipe
from tutti.config.vocabulary import LastBatch, Precision, Unit

positive = st.integers(1, 2**40)
rates = st.floats(0, 1e30)
st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))

batches = st.builds(
    lambda size, microbatches, unit, last: BatchPlan(
        global_batch_size=size * microbatches, num_microbatches=microbatches, unit=unit, last_batch=last
    ),
    st.integers(1, 2**20),
    st.integers(1, 64),
    st.sampled_from(Unit.__args__),
    st.sampled_from(LastBatch.__args__),
)
layout_rules = st.builds(LayoutRule, modules=st.text(min_size=1), recompute=st.booleans())


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    degree = draw(st.integers(1, 8))
    shares = draw(st.one_of(st.just([]), st.lists(st.floats(0, 1e6), min_size=degree, max_size=degree)))
    parts = draw(st.one_of(st.just([]), st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=2)))
    return Plan(
        batch=draw(batches),
        mesh={"replicate": degree, "split": 2} if parts else {"replicate": degree},
        split_shares=tuple(parts),
        layout=tuple(draw(st.lists(layout_rules, max_size=3))),
        shares=tuple(shares) if sum(shares) > 0 else (),
        precision=draw(st.sampled_from(Precision.__args__)),
        sync=SyncPlan(bucket_nbytes=draw(positive)),
    )


above = st.floats(1e-9, 1e30)
not_below = st.floats(0, 1e30)
counts = st.integers(1, 4096)
rates_given: dict[type[Any], Any] = {
    GemmRate: {"n": counts, "threads": counts, "flops_per_s": above, "concurrent": counts},
    MemoryRate: {"threads": counts, "bytes_per_s": above, "concurrent": counts},
    WeightRate: {"threads": counts, "forward": above, "input_gradient": above, "weight_gradient": above},
    ConvolutionRate: {"weight_nbytes": positive, "relative": above},
    CopyRate: {"bytes_per_s": above},
    ImageRate: {"pixels": counts, "relative": above},
    VectorRate: {"forward": above, "backward": above},
    CompressRate: {"numel": positive, "encode_s": not_below, "decode_s": not_below},
    LinkPoint: {"nbytes": positive, "time_s": above, "median_s": not_below},
    Conditions: {"cores_granted": st.integers(0, 4096), "load_at_start": not_below, "load_at_end": not_below},
}
for kind, numbers in rates_given.items():
    st.register_type_strategy(kind, st.builds(kind, **numbers))
devices_given = st.builds(
    DeviceSpec,
    memory_nbytes=positive,
    memory_bandwidth_bytes_per_s=above,
    peak_flops_per_s=st.dictionaries(st.text(), above, max_size=3),
    kernel_overhead_s=not_below,
    launch_s=st.none() | above,
    power_w=st.none() | not_below,
    price_per_device_hour=st.none() | not_below,
    efficiency=st.dictionaries(st.sampled_from(OpKind.__args__), above, max_size=3),
    cores=st.integers(0, 4096),
    year=st.none() | st.integers(1970, 2100),
    convolution_rates=...,
    image_rates=...,
    vector_rates=...,
    **dict.fromkeys(("gemm", "gemm_concurrent", "memory_rates", "weight_rates", "compress_rates"), ...),
)
links_given = st.builds(LinkSpec, bandwidth_bytes_per_s=above, latency_s=not_below, points=...)
loading_given = st.builds(
    Loading,
    core_s=not_below,
    wait_s=not_below,
    stored_nbytes=not_below,
    workers=st.integers(0, 64),
    stream=...,
    parts=...,
)
st.register_type_strategy(Loading, loading_given)
st.register_type_strategy(DeviceSpec, devices_given)
st.register_type_strategy(LinkSpec, links_given)


@st.composite
def clusters(draw: st.DrawFn) -> ClusterSpec:
    devices = draw(st.dictionaries(st.text(min_size=1), devices_given, min_size=1, max_size=3))
    node = st.builds(
        NodeSpec,
        device=st.sampled_from(sorted(devices)),
        devices_per_node=positive,
        count=positive,
        memory_nbytes=positive,
        disk_read_bytes_per_s=st.none() | above,
        cores=st.integers(0, 1024),
    )
    return ClusterSpec(
        name=draw(st.text()),
        devices=devices,
        nodes=tuple(draw(st.lists(node, min_size=1, max_size=3, unique_by=lambda one: one.name))),
        links=tuple(draw(st.lists(links_given, max_size=3))),
        shared_read_bytes_per_s=draw(st.none() | above),
    )


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def of_version(cls: type[Any]) -> st.SearchStrategy[Any]:
    """A spec with every field drawn from its type, except its version, which is the one that is read."""
    return st.builds(cls, **{field.name: ... for field in fields(cls) if field.name != "version"})


recipes = st.builds(Recipe, learning_rate_rule=st.none() | st.dictionaries(st.text(), json_values, max_size=3))
st.register_type_strategy(Recipe, recipes)

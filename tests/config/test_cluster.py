"""A cluster file written by hand: quantities with units, what may be left out, what is refused."""

import math
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest

from tutti.config import serialization
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
from tutti.config.option_syntax import BYTES, BYTES_PER_S, SECONDS, parse_quantity
from tutti.errors import SpecError


def written(**changes: Any) -> dict[str, Any]:
    """A short file; `changes`: of the parts device, node and link."""
    device = {
        "name": "card", "kind": "cuda", "memory_nbytes": "80 GB", "memory_bandwidth_bytes_per_s": "2 TB/s",
        "peak_flops_per_s": {"float32": "19.5 TFLOP/s"}, "price_per_device_hour": 2, "power_w": 400,
    } | changes.get("device", {})  # fmt: skip
    node = {"name": "host", "device": "card", "devices_per_node": 4, "count": 2, "memory_nbytes": 512e9} | changes.get(
        "node", {}
    )
    link = {"tier": "network", "latency_s": "10 us", "bandwidth_bytes_per_s": "100 Gbit/s"} | changes.get("link", {})
    return {"name": "ours", "devices": {"card": device}, "nodes": [node], "links": [link]}


def test_quantities_have_units_and_what_is_not_said_is_assumed() -> None:
    cluster = serialization.from_data(ClusterSpec, written())
    card, (node,), (link,) = cluster.devices["card"], cluster.nodes, cluster.links
    assert (card.memory_nbytes, card.memory_bandwidth_bytes_per_s) == (80 * 10**9, 2e12)
    assert card.peak_flops_per_s == {"float32": 19.5e12}
    assert (node.memory_nbytes, type(node.memory_nbytes)) == (512 * 10**9, int)
    assert (link.latency_s, link.bandwidth_bytes_per_s) == (pytest.approx(1e-5), 12.5e9)
    assert card.evidence == link.evidence == "assumed"
    assert serialization.loads(ClusterSpec, serialization.dumps(cluster)) == cluster


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": {"memory_nbytes": "much"}}, r"devices.card.memory_nbytes: 'much' is not understood.*'80 GB'"),
        ({"device": {"memory_nbytes": 0}}, "memory_nbytes = 0; give a number above 0"),
        ({"device": {"memory_nbytes": 80.5}}, "memory_nbytes = 80.5 is not allowed"),
        ({"device": {"price_per_device_hour": -1}}, "price_per_device_hour = -1; give 0"),
        ({"node": {"count": 0}}, "count = 0"),
        ({"node": {"ranks": 5}}, "node 'host' has 5 ranks and 4 devices; give each rank one"),
        ({"link": {"bandwidth_bytes_per_s": "100 Gb"}}, "'100 Gb' is not understood.*'100 Gbit/s'"),
        ({"link": {"bandwidth_bytes_per_s": -1.0}}, "the network link: bandwidth_bytes_per_s = -1"),
    ],
)
def test_what_cannot_be_is_refused_with_its_field(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        serialization.from_data(ClusterSpec, written(**changes))


def test_kinds_of_nodes_have_names_of_their_own() -> None:
    data = written()
    data["nodes"] *= 2
    with pytest.raises(SpecError, match="2 kinds of nodes are named 'host'"):
        serialization.from_data(ClusterSpec, data)


def test_a_job_fixes_the_ranks_of_all_nodes_or_of_none() -> None:
    data = written(node={"ranks": 3})
    assert serialization.from_data(ClusterSpec, data).fixed_ranks == 6
    assert serialization.from_data(ClusterSpec, written()).fixed_ranks is None
    data["nodes"] += [{**written()["nodes"][0], "name": "other"}]
    with pytest.raises(SpecError, match="node 'other' has no ranks, and others have; give all of them ranks, or none"):
        serialization.from_data(ClusterSpec, data)


def test_a_job_gives_each_host_its_ranks() -> None:
    cluster = serialization.from_data(ClusterSpec, written())
    unequal = cluster.with_ranks([4, 2])
    assert [(node.name, node.count, node.ranks) for node in unequal.nodes] == [("host", 1, 4), ("host, host 1", 1, 2)]
    assert [(node.count, node.ranks) for node in cluster.with_ranks([3, 3]).nodes] == [(2, 3)]
    assert cluster.with_ranks([4, 5]) == cluster.with_ranks([4]) == cluster, "it has other hosts than the job"


def test_bits_are_told_from_bytes_by_more_than_a_capital() -> None:
    assert (
        parse_quantity("12.5 GB/s", BYTES_PER_S)
        == parse_quantity("100Gbit/s", BYTES_PER_S)
        == parse_quantity("1e11 bit/s", BYTES_PER_S)
    )
    assert parse_quantity("10 Gb/s", BYTES_PER_S) is None  # bits or bytes?
    assert parse_quantity("1 KiB", BYTES) == 1024
    assert parse_quantity("5 us", SECONDS) == pytest.approx(5e-6)
    assert parse_quantity("1.2.3", BYTES) is None


GEMM = GemmRate(dtype="float32", n=512, flops_per_s=1e9)
DEVICE = DeviceSpec(
    name="card", kind="cpu", memory_nbytes=2**34, memory_bandwidth_bytes_per_s=1e10, peak_flops_per_s={"float32": 1e12},
    gemm=(GEMM,), gemm_concurrent=(GEMM,), memory_rates=(MemoryRate(bytes_per_s=1e10),),
    weight_rates=(WeightRate(dtype="float32", forward=1e9, input_gradient=1e9, weight_gradient=1e9),),
    compress_rates=(CompressRate(method="top-k", numel=2**20, encode_s=1e-3, decode_s=1e-3),),
    convolution_rates=(ConvolutionRate(weight_nbytes=2**20, relative=1.5),),
    image_rates=(ImageRate(pixels=16, relative=1.2),),
    vector_rates=(VectorRate(kind="pool", forward=0.002, backward=0.03),),
    efficiency={"conv": 0.5}, launch_s=5e-6, power_w=100.0, price_per_device_hour=1.0, year=2024,
)  # fmt: skip
LINK = LinkSpec(
    tier="node", latency_s=1e-5, bandwidth_bytes_per_s=1e9, large_nbytes=2**20, large_bandwidth_bytes_per_s=1e8,
    points=(LinkPoint(nbytes=1024, time_s=1e-4),), core_s_per_nbyte=1e-9,
)  # fmt: skip
FULL = ClusterSpec(
    name="ours",
    devices={"card": DEVICE},
    nodes=(
        NodeSpec(
            name="host",
            device="card",
            memory_nbytes=2**34,
            disk_read_bytes_per_s=1e9,
            host_link_bytes_per_s=1e9,
            copy_rates=(CopyRate(direction="to_host", pinned=True, bytes_per_s=1e9),),
            memory_bandwidth_bytes_per_s=1e9,
            ranks=1,
        ),
    ),
    links=(LINK,),
    conditions=Conditions(measured_utc="", cores_granted=2, load_at_start=0.0, load_at_end=0.0, versions={}),
    shared_read_bytes_per_s=1e9,
)
MAY_BE_ZERO = {
    "spread", "encode_s", "decode_s", "kernel_overhead_s", "cores", "power_w", "price_per_device_hour", "median_s",
    "latency_s", "residual", "core_s_per_nbyte", "cores_granted", "load_at_start", "load_at_end",
}  # fmt: skip


def parts_of(spec: Any) -> Iterator[Any]:
    """A spec and every spec within it."""
    yield spec
    for field in fields(spec):
        value = getattr(spec, field.name)
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else (value,)
        for one in inner:
            if is_dataclass(one):
                yield from parts_of(one)


def numbers_of(spec: Any) -> list[str]:
    """Names of its fields that are numbers, or words with numbers."""
    hints = {field.name: str(field.type) for field in fields(spec)}
    named = [name for name, hint in hints.items() if "int" in hint or "float" in hint]
    values = {name: getattr(spec, name) for name in named}
    return [name for name, value in values.items() if isinstance(value, int | float | dict) or value is None]


EVERY = [(part, name) for part in parts_of(FULL) for name in numbers_of(part)]


@pytest.mark.parametrize(("part", "name"), EVERY, ids=[f"{type(part).__name__}.{name}" for part, name in EVERY])
def test_every_number_of_every_spec_is_one_that_a_machine_can_have(part: Any, name: str) -> None:
    """Goes over the fields themselves: a new one that takes what it likes fails here, and so does one that the full
    cluster above leaves out."""
    value = getattr(part, name)
    assert value is not None, f"give FULL a {type(part).__name__}.{name}, so that it is looked at"

    def given(number: float) -> Any:
        return replace(part, **{name: dict.fromkeys(value, number) if isinstance(value, dict) else number})

    for number in (-1, -1e-9, math.nan, math.inf, -math.inf, 10**400):
        with pytest.raises(SpecError, match=name):
            given(number)
    if name in MAY_BE_ZERO:
        given(0)
    else:
        with pytest.raises(SpecError, match=rf"{name}.* = 0; give a number above 0"):
            given(0)


def test_every_kind_of_spec_is_looked_at() -> None:
    rates = {GemmRate, MemoryRate, WeightRate, CompressRate, ConvolutionRate, CopyRate, ImageRate, VectorRate}
    kinds = {ClusterSpec, DeviceSpec, LinkPoint, LinkSpec, NodeSpec, Conditions}
    assert {type(part) for part in parts_of(FULL)} == kinds | rates
    assert len({(type(part), name) for part, name in EVERY}) >= 45


@pytest.mark.parametrize("number", ["Infinity", "-Infinity", "NaN", "1e999", '"1e999 GB/s"', "1" + "0" * 400])
@pytest.mark.parametrize("field", ["memory_nbytes", "memory_bandwidth_bytes_per_s"])
def test_a_file_with_a_number_that_is_none_is_refused_in_a_sentence(field: str, number: str) -> None:
    text = re.sub(rf'"{field}": [0-9.e+]+', f'"{field}": {number}', serialization.dumps(FULL), count=1)
    with pytest.raises(SpecError, match=field) as refused:
        serialization.loads(ClusterSpec, text, source="f")
    assert str(refused.value).startswith("f: devices.card")

"""ClusterSpec: the machines. Measured by `tutti probe`, or written down from data sheets."""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from tutti.config import quantities
from tutti.config.model import OpKind, VectorKind
from tutti.config.words import Evidence
from tutti.errors import SpecError

DeviceKind = Literal["cpu", "cuda"]
_CERTAINTY: tuple[Evidence, ...] = ("assumed", "predicted", "published", "measured")
LinkTier = Literal["device", "node", "network"]
"""device: within one device's memory; node: between ranks of one host; network: between hosts."""

# In a file these may be texts: "80 GB", "5 us", "100 Gbit/s", "312 TFLOP/s".
Bytes = Annotated[int, BeforeValidator(quantities.reader(quantities.BYTES, "80 GB", whole=True))]
Seconds = Annotated[float, BeforeValidator(quantities.reader(quantities.SECONDS, "5 us"))]
BytesPerSecond = Annotated[float, BeforeValidator(quantities.reader(quantities.BYTES_PER_S, "100 Gbit/s"))]
FlopsPerSecond = Annotated[float, BeforeValidator(quantities.reader(quantities.FLOPS_PER_S, "312 TFLOP/s"))]


def _check(spec: Any, what: str, zero: frozenset[str] = frozenset()) -> None:
    """Raises SpecError unless every number of a spec is finite and above 0, or 0 where its field's name is in `zero`.

    All fields are looked at, so that one which is new is checked before anybody thinks of it.
    """
    for field_ in fields(spec):
        value = getattr(spec, field_.name)
        named = {f"{field_.name}.{key}": one for key, one in value.items()} if isinstance(value, dict) else {}
        for name, number in (named or {field_.name: value}).items():
            if not isinstance(number, int | float) or isinstance(number, bool):
                continue
            if not -sys.float_info.max <= number <= sys.float_info.max:
                raise SpecError(f"{what}: {name} is not finite, or too large; give a number that a machine can have")
            if number < 0 or (number == 0 and field_.name not in zero):
                remedy = "0 or a number above it" if field_.name in zero else "a number above 0"
                raise SpecError(f"{what}: {name} = {number:g}; give {remedy}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmRate:
    """Rate of a square matrix product, N x N x N: 2 N^3 / time, of one process.

    `concurrent`: how many processes of the host multiplied at once, each with `threads`; 1 is a process alone.
    """

    dtype: str
    n: int
    threads: int = 1
    flops_per_s: float
    spread: float = 0.0  # (max - min) / median over the repeats
    concurrent: int = 1

    def __post_init__(self) -> None:
        _check(self, "a rate of products", frozenset({"spread"}))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRate:
    """Rate of copying a buffer larger than the caches, bytes read plus bytes written, of one process.

    `concurrent`: how many processes of the host copied at once, as in GemmRate.
    """

    threads: int = 1
    bytes_per_s: float
    spread: float = 0.0
    concurrent: int = 1

    def __post_init__(self) -> None:
        _check(self, "a rate of memory", frozenset({"spread"}))


WeightKind = Literal["gemm", "conv"]
"""Operators that go over weights: of linear layers, and convolutions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRate:
    """How fast matrix products go over their weights, of one process: bytes of weights a second, in each product.

    A product of few rows by a large matrix of weights takes longer than its FLOPs: the matrix is read, put in another
    order for the processor, and its gradient written, whatever the number of rows. `forward`, `input_gradient`,
    `weight_gradient`: the three products of a linear layer, or where `kind` says so of a convolution. `concurrent`: as
    in GemmRate.
    """

    dtype: str
    threads: int = 1
    forward: float
    input_gradient: float
    weight_gradient: float
    concurrent: int = 1
    kind: WeightKind = "gemm"

    def __post_init__(self) -> None:
        _check(self, "a rate of going over weights")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionRate:
    """How fast convolutions with so many bytes of weights are, in float32: `relative` to what `efficiency` says of all
    of them. Those of few channels have little to do with each value that they read."""

    weight_nbytes: Bytes
    relative: float

    def __post_init__(self) -> None:
        _check(self, "convolution rate")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRate:
    """How fast 3 x 3 convolutions of images of so many pixels are in float32, `relative` to those that other rates were
    measured of. Much of a small image is at its border, where a kernel has less to multiply."""

    pixels: int
    relative: float

    def __post_init__(self) -> None:
        _check(self, "image rate")


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorRate:
    """How many elements operators of a kind do in the time of one FLOP of large matrix products, in float32, `forward`
    and `backward` (of random numbers, which have none, the same)."""

    kind: VectorKind
    forward: float
    backward: float

    def __post_init__(self) -> None:
        _check(self, f"a rate of {self.kind}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressRate:
    """Seconds that one process takes to write a gradient of `numel` float32 values in fewer bytes (`encode_s`, with
    what is kept back) and to add what such a message says to a sum (`decode_s`).

    `method`: as after --compress (top-k; powersgd,rank=2); of powersgd, whose parts are no messages, all is in
    `encode_s`, for one square matrix.
    """

    method: str
    numel: int
    encode_s: float
    decode_s: float
    spread: float = 0.0  # of encoding: (max - min) / median over the repeats

    def __post_init__(self) -> None:
        _check(self, f"a rate of {self.method}", frozenset({"encode_s", "decode_s", "spread"}))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """One kind of device.

    `peak_flops_per_s`: dtype -> dense peak ("float32", "bfloat16", "float16", "tf32", "float64", "float8"), never a
    sparsity rate; the best rate seen where it was measured. `gemm`: measured rates of one process alone, empty for a
    data sheet; `gemm_concurrent`: of several at once, which is what data-parallel ranks sharing a CPU get.
    `memory_rates`: both kinds. `cores`: of a CPU device, shared by its ranks. `efficiency`: rates of operator kinds
    relative to a square product of as many FLOPs, where they are known better than what is assumed of all devices.
    `convolution_rates`, `image_rates`: how `efficiency["conv"]` differs by weights and by pixels; none: it does not.
    `vector_rates`: of kinds that take longer for an element than a sum does, before what `efficiency` says of them.
    `weight_rates`: of products and convolutions on a CPU; without any it is assumed how often weights are gone over.
    `compress_rates`: of writing gradients in fewer bytes, measured; where a method has none, its time is assumed.
    """

    name: str
    kind: DeviceKind
    memory_nbytes: Bytes
    memory_bandwidth_bytes_per_s: BytesPerSecond
    peak_flops_per_s: dict[str, FlopsPerSecond]
    gemm: tuple[GemmRate, ...] = ()
    gemm_concurrent: tuple[GemmRate, ...] = ()
    memory_rates: tuple[MemoryRate, ...] = ()
    weight_rates: tuple[WeightRate, ...] = ()
    convolution_rates: tuple[ConvolutionRate, ...] = ()
    image_rates: tuple[ImageRate, ...] = ()
    vector_rates: tuple[VectorRate, ...] = ()
    compress_rates: tuple[CompressRate, ...] = ()
    kernel_overhead_s: Seconds = 0.0
    efficiency: dict[OpKind, float] = field(default_factory=dict)
    cores: int = 0
    power_w: float | None = None
    price_per_device_hour: float | None = None  # in one currency throughout the cluster
    year: int | None = None
    source: str = "written by hand"
    evidence: Evidence = "assumed"

    def __post_init__(self) -> None:
        free = frozenset({"kernel_overhead_s", "cores", "power_w", "price_per_device_hour"})
        _check(self, f"device {self.name!r}", free)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPoint:
    """The time of `nbytes` in one collective or message: the lower quartile of its samples, and their median, 0 where
    nobody took it down. On a quiet machine they are about equal."""

    nbytes: int
    time_s: float
    median_s: float = 0.0

    def __post_init__(self) -> None:
        _check(self, "a point of a link", frozenset({"median_s"}))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """A tier of links between ranks: time of n bytes = latency_s + n / bandwidth_bytes_per_s (alpha-beta model).

    Both are of one hop of a ring: an all-reduce of n bytes among p ranks takes 2(p-1) latency_s + 2(p-1)/p n /
    bandwidth_bytes_per_s. `bandwidth_bytes_per_s`: one way; of a network, a host's whole connection, shared by its
    ranks. `fitted_to`: the transfers a measured link was fitted to ("" for a data sheet). `residual`: root mean square
    of the fit's relative error. `ranks`: how many ranks took part. `points`: the times that were fitted.
    `large_nbytes`: of a longer vector, what lies beyond goes at `large_bandwidth_bytes_per_s`, which is lower; both
    None where one line fits. `core_s_per_nbyte`: seconds of a core that a rank on a CPU spends on each byte it sends,
    and on one it receives meanwhile; None where nobody measured it.
    """

    tier: LinkTier
    latency_s: Seconds
    bandwidth_bytes_per_s: BytesPerSecond
    large_nbytes: Bytes | None = None
    large_bandwidth_bytes_per_s: BytesPerSecond | None = None
    backend: str = "gloo"
    residual: float = 0.0
    ranks: int = 2
    fitted_to: Literal["", "all_reduce", "send"] = ""
    points: tuple[LinkPoint, ...] = ()
    core_s_per_nbyte: float | None = None
    source: str = "written by hand"
    evidence: Evidence = "assumed"

    def __post_init__(self) -> None:
        _check(self, f"the {self.tier} link", frozenset({"latency_s", "residual", "core_s_per_nbyte"}))
        if (self.large_nbytes is None) != (self.large_bandwidth_bytes_per_s is None):
            raise SpecError(
                f"the {self.tier} link has one of large_nbytes and large_bandwidth_bytes_per_s; give both or neither"
            )


def faster(link: LinkSpec, times: float) -> LinkSpec:
    """The link with so many times its bandwidth, that of large vectors too."""
    large = link.large_bandwidth_bytes_per_s
    return replace(
        link,
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * times,
        large_bandwidth_bytes_per_s=None if large is None else large * times,
    )


def slowest(links: Iterable[LinkSpec]) -> LinkSpec:
    """What every one of `links` (one or more, of a tier) keeps: the longest latency, the lowest bandwidth of small and
    of large vectors, the most that was measured of cores, the least certain evidence."""
    some = tuple(dict.fromkeys(links))
    if len(some) == 1:
        return some[0]
    bandwidth = min(link.bandwidth_bytes_per_s for link in some)
    bent = [link.large_nbytes for link in some if link.large_nbytes is not None]
    large = [link.large_bandwidth_bytes_per_s for link in some if link.large_bandwidth_bytes_per_s is not None]
    cores = [link.core_s_per_nbyte for link in some if link.core_s_per_nbyte is not None]
    return replace(
        min(some, key=lambda link: link.bandwidth_bytes_per_s),
        latency_s=max(link.latency_s for link in some),
        bandwidth_bytes_per_s=bandwidth,
        large_nbytes=min(bent, default=None),
        large_bandwidth_bytes_per_s=min(bandwidth, *large) if large else None,
        residual=max(link.residual for link in some),
        ranks=min(link.ranks for link in some),
        points=(),
        core_s_per_nbyte=max(cores, default=None),
        source="the slowest in each respect of: " + "; ".join(dict.fromkeys(link.source for link in some)),
        evidence=min((link.evidence for link in some), key=_CERTAINTY.index),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """`count` equal hosts, each with `devices_per_node` devices of one kind (a key of ClusterSpec.devices).

    `links`: of these hosts, in place of the cluster's of the same tier; a host without any has the cluster's.

    `cores`: of a host whose devices are none, on which data is loaded; 0: unknown. CPU devices say their own.
    `turns`: hosts that take turns on one core, as those of a laboratory may; rates are then those of a turn's part.
    """

    name: str
    device: str
    devices_per_node: int = 1
    count: int = 1
    memory_nbytes: Bytes
    disk_read_bytes_per_s: BytesPerSecond | None = None
    cores: int = 0
    turns: float = 1.0
    links: tuple[LinkSpec, ...] = ()

    def __post_init__(self) -> None:
        _check(self, f"node {self.name!r}", frozenset({"cores"}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Under which conditions a cluster was measured; of several hosts, the fewest cores and the highest load.

    `notes`: what was skipped or may have disturbed the measurement, in words.
    """

    measured_utc: str
    cores_granted: int
    load_at_start: float
    load_at_end: float
    versions: dict[str, str]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check(self, "the conditions", frozenset({"cores_granted", "load_at_start", "load_at_end"}))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """Hosts, devices and the links between them. `conditions` is there when it was measured.

    A tier may have several links (fitted to all-reduces and to single messages); the first is the one to plan with.
    `shared_read_bytes_per_s`: of a file system that holds the data for all hosts, all of them together; None: there is
    none, each host reads from its own disk.
    """

    name: str
    devices: dict[str, DeviceSpec]
    nodes: tuple[NodeSpec, ...]
    links: tuple[LinkSpec, ...]
    conditions: Conditions | None = None
    shared_read_bytes_per_s: BytesPerSecond | None = None
    version: int = 1

    def __post_init__(self) -> None:
        _check(self, f"cluster {self.name!r}")
        if not self.nodes:
            raise SpecError("nodes is empty; a cluster has at least one node")
        names = [node.name for node in self.nodes]
        for name in names:
            if names.count(name) > 1:
                raise SpecError(f"{names.count(name)} kinds of nodes are named {name!r}; give each a name of its own")
        for node in self.nodes:
            if node.device not in self.devices:
                raise SpecError(
                    f"node {node.name!r} has device {node.device!r}, which is not in devices "
                    f"({', '.join(self.devices) or 'empty'}); add it there"
                )

    def link(self, tier: LinkTier) -> LinkSpec | None:
        """The first link of a tier for hosts that have none of their own, or None where the cluster has none."""
        return next((link for link in self.links if link.tier == tier), None)

    def link_at(self, node: NodeSpec, tier: LinkTier) -> LinkSpec | None:
        """A host's own link of a tier, else the cluster's, or None."""
        return next((link for link in node.links if link.tier == tier), None) or self.link(tier)

    @property
    def every_link(self) -> tuple[LinkSpec, ...]:
        """The cluster's links and those that hosts have of their own."""
        return (*self.links, *(link for node in self.nodes for link in node.links))

    def relinked(self, change: Callable[[LinkSpec], LinkSpec]) -> "ClusterSpec":
        """The cluster with every link changed, hosts' own too."""
        nodes = tuple(replace(node, links=tuple(map(change, node.links))) for node in self.nodes)
        return replace(self, nodes=nodes, links=tuple(map(change, self.links)))

    @property
    def device_count(self) -> int:
        return sum(node.count * node.devices_per_node for node in self.nodes)

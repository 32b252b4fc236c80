"""ClusterSpec: the machines, measured by `tutti probe` or written down from data sheets."""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from tutti.config import option_syntax
from tutti.config.model import OpKind, VectorKind
from tutti.config.vocabulary import Evidence
from tutti.errors import SpecError

DeviceKind = Literal["cpu", "cuda"]
_CERTAINTY: tuple[Evidence, ...] = ("assumed", "predicted", "published", "measured")
LinkTier = Literal["device", "node", "network"]
"""device: within the memory of one device; node: between ranks of one host; network: between hosts."""

# In a file, these may be written with units: "80 GB", "5 us", "100 Gbit/s", "312 TFLOP/s".
Bytes = Annotated[int, BeforeValidator(option_syntax.quantity_validator(option_syntax.BYTES, "80 GB", whole=True))]
Seconds = Annotated[float, BeforeValidator(option_syntax.quantity_validator(option_syntax.SECONDS, "5 us"))]
BytesPerSecond = Annotated[
    float, BeforeValidator(option_syntax.quantity_validator(option_syntax.BYTES_PER_S, "100 Gbit/s"))
]
FlopsPerSecond = Annotated[
    float, BeforeValidator(option_syntax.quantity_validator(option_syntax.FLOPS_PER_S, "312 TFLOP/s"))
]


def _check(spec: Any, what: str, zero: frozenset[str] = frozenset()) -> None:
    """Raise SpecError unless every number of a spec is finite and positive.

    All fields are checked, so a new field needs no further code.

    Args:
        spec: the dataclass to check.
        what: name of the spec in the error message.
        zero: names of the fields that may also be 0.
    """
    for field_ in fields(spec):
        value = getattr(spec, field_.name)
        named = {f"{field_.name}.{key}": entry for key, entry in value.items()} if isinstance(value, dict) else {}
        for name, number in (named or {field_.name: value}).items():
            if not isinstance(number, int | float) or isinstance(number, bool):
                continue
            if not -sys.float_info.max <= number <= sys.float_info.max:
                raise SpecError(f"{what}: {name} is not finite or is too large; give a realistic number")
            if number < 0 or (number == 0 and field_.name not in zero):
                remedy = "0 or a number above it" if field_.name in zero else "a number above 0"
                raise SpecError(f"{what}: {name} = {number:g}; give {remedy}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmRate:
    """Rate of a square matrix product N x N x N in one process: 2 N^3 / time.

    Attributes:
        dtype: number format of the product.
        n: N.
        threads: threads of each process.
        flops_per_s: the rate of one process.
        spread: (max - min) / median over the repeats.
        concurrent: processes of the host that multiplied at the same time; 1 for a process without competition.
    """

    dtype: str
    n: int
    threads: int = 1
    flops_per_s: float
    spread: float = 0.0
    concurrent: int = 1

    def __post_init__(self) -> None:
        _check(self, "matrix-product rate", frozenset({"spread"}))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRate:
    """Rate at which one process copies a buffer larger than the caches: bytes read plus bytes written per second.

    Attributes:
        threads: threads of each process.
        bytes_per_s: the rate of one process.
        spread: (max - min) / median over the repeats.
        concurrent: processes of the host that copied at the same time.
    """

    threads: int = 1
    bytes_per_s: float
    spread: float = 0.0
    concurrent: int = 1

    def __post_init__(self) -> None:
        _check(self, "memory rate", frozenset({"spread"}))


WeightKind = Literal["gemm", "conv"]
"""Operators that read their weights once per pass: linear layers and convolutions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRate:
    """Bytes of weights per second that a matrix product with few rows gets through, in one process.

    A product of few rows with a large weight matrix takes longer than its FLOPs suggest. Whatever the number of rows,
    the matrix is read, packed for the processor, and its gradient written.

    Attributes:
        dtype: number format of the weights.
        threads: threads of each process.
        forward, input_gradient, weight_gradient: rate of each of the three products of a linear layer or convolution.
        concurrent: processes of the host that measured at the same time.
        kind: whether the rates are those of linear layers or of convolutions.
    """

    dtype: str
    threads: int = 1
    forward: float
    input_gradient: float
    weight_gradient: float
    concurrent: int = 1
    kind: WeightKind = "gemm"

    def __post_init__(self) -> None:
        _check(self, "weight rate")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionRate:
    """Speed of convolutions with this many bytes of weights, relative to the device's `efficiency["conv"]`.

    Convolutions with few channels do little arithmetic per value that they read. Both rates are relative to square
    products in the same dtype.

    Attributes:
        weight_nbytes: bytes of the weights in float32, whatever the dtype.
        dtype: number format of the convolution.
        channels_last: whether images and weights were in that memory format.
    """

    weight_nbytes: Bytes
    relative: float
    dtype: str = "float32"
    channels_last: bool = False

    def __post_init__(self) -> None:
        _check(self, "convolution rate")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRate:
    """Speed of float32 3 x 3 convolutions on images of this many pixels, relative to the image size of the other rates.

    Much of a small image is border, where a kernel has less to multiply.
    """

    pixels: int
    relative: float

    def __post_init__(self) -> None:
        _check(self, "image rate")


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorRate:
    """Elements that one kind of operator processes in the time that large float32 matrix products take for one FLOP.

    Random numbers have no backward pass: for them both numbers are the same.
    """

    kind: VectorKind
    forward: float
    backward: float

    def __post_init__(self) -> None:
        _check(self, f"vector rate of {self.kind}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressRate:
    """Seconds that one process takes to encode a gradient of `numel` float32 values, and to decode and add one message.

    Attributes:
        method: the codec as `--compress` names it ("top-k", "powersgd,rank=2"). PowerSGD has no separate messages: all
            its time is in `encode_s`, for one square matrix.
        numel: number of values in the gradient.
        encode_s: includes the update of the residual.
        decode_s: for one message.
        spread: (max - min) / median of the encoding times over the repeats.
    """

    method: str
    numel: int
    encode_s: float
    decode_s: float
    spread: float = 0.0

    def __post_init__(self) -> None:
        _check(self, f"codec rate of {self.method}", frozenset({"encode_s", "decode_s", "spread"}))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """One kind of device.

    Attributes:
        peak_flops_per_s: dense peak by dtype ("float32", "bfloat16", "float16", "tf32", "float64", "float8"), never a
            sparsity rate; where it was measured, the best rate seen.
        gemm: matrix-product rates of one process without competition; empty for a data sheet.
        gemm_concurrent: matrix-product rates of several processes at once, as ranks that share a CPU get them.
        memory_rates: copy rates of one process, and of several at once.
        weight_rates: rates of weights on a CPU. Without any, the number of passes over the weights is assumed.
        convolution_rates, image_rates: how `efficiency["conv"]` depends on the weights and on the pixels.
        vector_rates: rates of operators that take longer per element than an addition.
        compress_rates: times of codecs; the time of a codec that is not listed is assumed.
        kernel_overhead_s: fixed cost of one kernel launch.
        launch_s: the host's time for each kernel that it launches on an accelerator without waiting; None where it was
            not measured. A step takes at least this for each of its kernels.
        efficiency: rate of each kind of operator, relative to a square matrix product with as many FLOPs.
        cores: cores of a CPU device, shared by its ranks.
        price_per_device_hour: in one currency throughout the cluster.
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
    launch_s: Seconds | None = None
    efficiency: dict[OpKind, float] = field(default_factory=dict)
    cores: int = 0
    power_w: float | None = None
    price_per_device_hour: float | None = None
    year: int | None = None
    source: str = "written by hand"
    evidence: Evidence = "assumed"

    def __post_init__(self) -> None:
        free = frozenset({"kernel_overhead_s", "cores", "power_w", "price_per_device_hour"})
        _check(self, f"device {self.name!r}", free)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPoint:
    """The time of one collective or message of `nbytes` bytes.

    On a quiet machine the two times are about equal.

    Attributes:
        nbytes: size of the message.
        time_s: lower quartile of the times.
        median_s: median of the times; 0 where it was not recorded.
    """

    nbytes: int
    time_s: float
    median_s: float = 0.0

    def __post_init__(self) -> None:
        _check(self, "link point", frozenset({"median_s"}))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """One tier of links between ranks. Time of n bytes = latency_s + n / bandwidth_bytes_per_s (alpha-beta model).

    Both numbers are those of one hop of a ring: an all-reduce of n bytes among p ranks takes
    2(p-1) latency_s + 2(p-1)/p n / bandwidth_bytes_per_s.

    Attributes:
        bandwidth_bytes_per_s: in one direction; for a network, the whole connection of a host, shared by its ranks.
        large_nbytes, large_bandwidth_bytes_per_s: the part of a vector beyond this size is sent at this lower
            bandwidth; both None where a single bandwidth fits.
        residual: root mean square of the relative error of the fit.
        ranks: number of ranks that took part in the measurement.
        fitted_to: the kind of transfer that was measured; "" for a data sheet.
        points: the times that were fitted.
        core_s_per_nbyte: core seconds that a rank spends for each byte that it sends while it receives one; None where
            this was not measured.
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


def scale_bandwidth(link: LinkSpec, times: float) -> LinkSpec:
    """Return the link with its bandwidths multiplied by `times`."""
    large = link.large_bandwidth_bytes_per_s
    return replace(
        link,
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * times,
        large_bandwidth_bytes_per_s=None if large is None else large * times,
    )


def slowest_link(links: Iterable[LinkSpec]) -> LinkSpec:
    """Combine several links of one tier into one with the worst latency, bandwidth, core time and evidence of them."""
    distinct = tuple(dict.fromkeys(links))
    if len(distinct) == 1:
        return distinct[0]
    bandwidth = min(link.bandwidth_bytes_per_s for link in distinct)
    bent = [link.large_nbytes for link in distinct if link.large_nbytes is not None]
    large = [link.large_bandwidth_bytes_per_s for link in distinct if link.large_bandwidth_bytes_per_s is not None]
    cores = [link.core_s_per_nbyte for link in distinct if link.core_s_per_nbyte is not None]
    return replace(
        min(distinct, key=lambda link: link.bandwidth_bytes_per_s),
        latency_s=max(link.latency_s for link in distinct),
        bandwidth_bytes_per_s=bandwidth,
        large_nbytes=min(bent, default=None),
        large_bandwidth_bytes_per_s=min(bandwidth, *large) if large else None,
        residual=max(link.residual for link in distinct),
        ranks=min(link.ranks for link in distinct),
        points=(),
        core_s_per_nbyte=max(cores, default=None),
        source="the slowest in each respect of: " + "; ".join(dict.fromkeys(link.source for link in distinct)),
        evidence=min((link.evidence for link in distinct), key=_CERTAINTY.index),
    )


CopyDirection = Literal["to_device", "to_host"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRate:
    """Bytes per second of large copies between a device and its host, in one direction at a time.

    Attributes:
        pinned: whether the host's memory is pinned; pageable otherwise.
    """

    direction: CopyDirection
    pinned: bool
    bytes_per_s: BytesPerSecond

    def __post_init__(self) -> None:
        _check(self, "copy rate")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSpec:
    """A folder of each host for files of offloaded state, on a disk that takes direct I/O.

    Attributes:
        path: the folder.
        nbytes: free bytes that a host's ranks may fill.
        read_bytes_per_s, write_bytes_per_s: rates of large direct reads and writes, all ranks of a host together.
    """

    path: str
    nbytes: Bytes
    read_bytes_per_s: BytesPerSecond
    write_bytes_per_s: BytesPerSecond

    def __post_init__(self) -> None:
        _check(self, f"nvme {self.path!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """A number of equal hosts, each with `devices_per_node` devices of one kind.

    Attributes:
        device: the kind of device, a key of ClusterSpec.devices.
        ranks: of each of these hosts, where a job fixes them; all nodes of a cluster have them, or none. Plans then use
            exactly these ranks, and keep the order of the nodes.
        cores: cores of a host with GPUs, which load data; 0 if unknown. CPU devices state their own.
        turns: number of hosts that take turns on one core, as in a lab; rates are those during a host's turn.
        links: replace the cluster's links of the same tier on these hosts.
        host_link_bytes_per_s: rate of copies between a device and its host's pinned memory, in one direction; None for
            what PCIe 4 x16 gives in practice. Where it was measured, the slower direction.
        copy_rates: what was measured of these copies, by direction and kind of host memory.
        memory_bandwidth_bytes_per_s: bytes read and written per second in a host's memory by all of its cores; None
            where a usual one is assumed.
        nvme: where optimizer state may lie that no memory holds; None where plans may not use a disk for it.
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
    host_link_bytes_per_s: BytesPerSecond | None = None
    copy_rates: tuple[CopyRate, ...] = ()
    memory_bandwidth_bytes_per_s: BytesPerSecond | None = None
    nvme: DiskSpec | None = None
    ranks: int | None = None

    def __post_init__(self) -> None:
        _check(self, f"node {self.name!r}", frozenset({"cores"}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The conditions under which a cluster was measured; for several hosts, the fewest cores and the highest load.

    Attributes:
        measured_utc: when it was measured.
        cores_granted: cores that the measurement was allowed to use.
        load_at_start, load_at_end: load of the host before and after.
        versions: versions of the libraries that were used.
        notes: what was skipped, or may have disturbed the measurement.
        hosts: names of the nodes that were measured together, as their cluster calls them, in the order of ranks.
    """

    measured_utc: str
    cores_granted: int
    load_at_start: float
    load_at_end: float
    versions: dict[str, str]
    notes: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check(self, "the conditions", frozenset({"cores_granted", "load_at_start", "load_at_end"}))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """Hosts, devices and the links between them.

    Attributes:
        devices: kinds of devices by name.
        nodes: groups of equal hosts.
        links: links between ranks. A tier may have several, fitted to all-reduces and to single messages; the planner
            uses the first.
        conditions: how it was measured; None for a data sheet.
        shared_read_bytes_per_s: total rate of a file system that all hosts read the data from; None where each host
            reads its own disk.

    Examples:
        A cluster from a file that `tutti probe` wrote, or by parts from data sheets:

        >>> from tutti.profile.catalog import cluster_from_parts
        >>> cluster = cluster_from_parts(
        ...     "two nodes", "A100-SXM4-80GB", devices_per_node=8, nodes=2,
        ...     node_link="NVLink3", network="InfiniBand-HDR-200",
        ... )
        >>> cluster.device_count
        16
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
        without = [node.name for node in self.nodes if node.ranks is None]
        if 0 < len(without) < len(self.nodes):
            raise SpecError(f"node {without[0]!r} has no ranks, and others have; give all of them ranks, or none")
        for node in self.nodes:
            if (node.ranks or 0) > node.devices_per_node and self.devices[node.device].kind != "cpu":
                raise SpecError(
                    f"node {node.name!r} has {node.ranks} ranks and {node.devices_per_node} devices; give each rank one"
                )

    def link(self, tier: LinkTier) -> LinkSpec | None:
        """Return the first link of a tier for hosts without links of their own; None where the cluster has none."""
        return next((link for link in self.links if link.tier == tier), None)

    def link_at(self, node: NodeSpec, tier: LinkTier) -> LinkSpec | None:
        """Return the host's own link of a tier, or else the cluster's; None where there is neither."""
        return next((link for link in node.links if link.tier == tier), None) or self.link(tier)

    @property
    def every_link(self) -> tuple[LinkSpec, ...]:
        """The cluster's links and those of single hosts."""
        return (*self.links, *(link for node in self.nodes for link in node.links))

    def relinked(self, change: Callable[[LinkSpec], LinkSpec]) -> "ClusterSpec":
        """Return the cluster with `change` applied to every link."""
        nodes = tuple(replace(node, links=tuple(map(change, node.links))) for node in self.nodes)
        return replace(self, nodes=nodes, links=tuple(map(change, self.links)))

    @property
    def device_count(self) -> int:
        return sum(node.count * node.devices_per_node for node in self.nodes)

    def with_ranks(self, ranks: Sequence[int]) -> "ClusterSpec":
        """Return the cluster with the ranks that a job gives to each host; unchanged where they do not fit its hosts.

        Args:
            ranks: of each host, in the order of the nodes.
        """
        hosts = [node for node in self.nodes for _ in range(node.count)]
        nodes = list[NodeSpec]()
        if len(hosts) != len(ranks):
            return self
        for number, (host, count) in enumerate(zip(hosts, ranks, strict=True)):
            if count > host.devices_per_node and self.devices[host.device].kind != "cpu":
                return self
            last = nodes[-1] if nodes else None
            if last is not None and number and host is hosts[number - 1] and last.ranks == count:
                nodes[-1] = replace(last, count=last.count + 1)
                continue
            name = host.name if all(node.name != host.name for node in nodes) else f"{host.name}, host {number}"
            nodes.append(replace(host, name=name, count=1, ranks=count))
        return replace(self, nodes=tuple(nodes))

    @property
    def fixed_ranks(self) -> int | None:
        """The number of ranks, where a job fixes those of every host; else None."""
        ranks = [node.count * node.ranks for node in self.nodes if node.ranks is not None]
        return sum(ranks) if ranks else None

"""Assemble the findings of all ranks into a ClusterSpec. Pure: the same findings give the same spec.

For exclusive matrix products take the slowest host; for other rates the median; for links and disks the slowest.
Synchronous steps wait for the slowest host, and matrix products, of which there are many samples, show which host that
is. Other rates have fewer samples and scatter more than hosts differ.

A host far behind the others has another kind of device, even if its device has the same name: virtual machines often
report one name for different processors, and others are throttled or shared.
"""

import statistics
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import tutti.profile.probe.host_facts as host_facts
from tutti.config.cluster import (
    ClusterSpec,
    CompressRate,
    Conditions,
    ConvolutionRate,
    CopyRate,
    DeviceKind,
    DeviceSpec,
    GemmRate,
    ImageRate,
    LinkSpec,
    MemoryRate,
    NodeSpec,
    VectorRate,
    WeightRate,
)
from tutti.config.model import OpKind
from tutti.profile.probe.host_facts import HostFacts

BUSY = 0.25
"""Load per core at the start above which a note warns of other work."""

EQUAL_MEMORY_TOLERANCE = 0.05
"""Hosts count as equal if their memories differ by at most this fraction."""

MEDIAN_TO_QUARTILE_LIMIT = 1.5
"""The times of a link are noisy if their median exceeds their lower quartile by more than this factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """One rank's host and device.

    Attributes:
        device: name of the device, equal for equal devices.
        visible: number of such devices that the rank sees on its host.
        versions: versions of the software that rates depend on.
        emulated: dtypes that the device multiplies far slower than float32.
    """

    host: HostFacts
    kind: DeviceKind
    device: str
    device_memory_nbytes: int
    visible: int
    versions: dict[str, str]
    emulated: tuple[str, ...] = ()


def oversubscription(facts: list[RankFacts], ranks: list[int]) -> float:
    """Return the cores that hosts claim per core of their machine, on the most oversubscribed machine; at least 1.

    Hosts of a lab are on one machine, and may claim more cores together than it has.

    Args:
        facts: facts of all ranks.
        ranks: one rank of each host.
    """
    cores: dict[str, int] = {}
    for host in (facts[rank].host for rank in ranks if facts[rank].kind == "cpu" and facts[rank].host.machine):
        cores[host.machine] = cores.get(host.machine, 0) + host.cores
    machines = {fact.host.machine: fact.host.machine_cores for fact in facts}
    return max([1.0, *(taken / machines[machine] for machine, taken in cores.items() if machines[machine])])


@dataclass(frozen=True, slots=True, kw_only=True)
class HostDevice:
    """The devices of one kind on one host."""

    host: str
    device: str
    devices: int
    memory_nbytes: int
    disk_read_bytes_per_s: float | None
    cores: int
    oversubscription: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRates:
    """Rates that one rank measured on its device while all other ranks of its host waited."""

    gemm: tuple[GemmRate, ...]
    memory: tuple[MemoryRate, ...]
    kernel_overhead_s: float
    notes: tuple[str, ...]
    weights: tuple[WeightRate, ...] = ()
    efficiency: dict[OpKind, float] = field(default_factory=dict)
    convolutions: tuple[ConvolutionRate, ...] = ()
    images: tuple[ImageRate, ...] = ()
    vectors: tuple[VectorRate, ...] = ()
    codes: tuple[CompressRate, ...] = ()
    copies: tuple[CopyRate, ...] = ()
    launch_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRates:
    """Rates that one rank measured while all ranks of its host measured the same."""

    gemm: tuple[GemmRate, ...] = ()
    memory: tuple[MemoryRate, ...] = ()
    weights: tuple[WeightRate, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What all ranks measured; lists are in order of rank.

    Attributes:
        facts: hosts and devices.
        exclusive: rates by device name, measured by one rank of each host while the others waited.
        shared: rates measured while all ranks of a host computed.
        node_links, network_links: the links that a rank measured; empty for ranks that took no part.
        disk_read_bytes_per_s: measured by the first rank of each host; None for the others.
        load_at_end: load of each rank's host.
    """

    facts: list[RankFacts]
    exclusive: dict[str, DeviceRates]
    shared: list[SharedRates]
    node_links: list[tuple[LinkSpec, ...]]
    network_links: list[tuple[LinkSpec, ...]]
    disk_read_bytes_per_s: list[float | None]
    load_at_end: list[float]


def assemble(findings: Findings, *, measured_utc: str | None = None) -> ClusterSpec:
    """Return the cluster that the ranks ran on, in the order of ranks. Equal neighbours become one node with a count.

    Args:
        findings: what the ranks measured.
        measured_utc: time of the measurement; now by default.
    """
    names = list(by_host(findings.facts))
    return ClusterSpec(
        name=names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more",
        devices={
            name: _device(findings, name, rank) for name, rank in first_rank_of_each_device(findings.facts).items()
        },
        nodes=_nodes(findings),
        links=(*_links_of_slowest_host(findings.node_links), *_links_of_slowest_host(findings.network_links)),
        conditions=_conditions(findings, measured_utc or host_facts.now_utc()),
    )


def _device(findings: Findings, name: str, rank: int) -> DeviceSpec:
    fact, exclusive = findings.facts[rank], findings.exclusive[name]
    neighbours = [findings.shared[other] for other in by_host(findings.facts)[fact.host.name]]
    shared_weights = merged([shared.weights for shared in neighbours], weights_key, median_weights)
    shared_memory = merged([shared.memory for shared in neighbours], lambda rate: rate.threads, median_memory)
    return DeviceSpec(
        name=name,
        kind=fact.kind,
        memory_nbytes=fact.device_memory_nbytes,
        memory_bandwidth_bytes_per_s=max(rate.bytes_per_s for rate in exclusive.memory),
        peak_flops_per_s=_peaks(exclusive),
        gemm=exclusive.gemm,
        gemm_concurrent=merged(
            [shared.gemm for shared in neighbours], lambda rate: (rate.dtype, rate.n, rate.threads), _median_gemm
        ),
        memory_rates=(*exclusive.memory, *shared_memory),
        weight_rates=(*exclusive.weights, *shared_weights),
        efficiency=exclusive.efficiency,
        convolution_rates=exclusive.convolutions,
        image_rates=exclusive.images,
        vector_rates=exclusive.vectors,
        compress_rates=exclusive.codes,
        kernel_overhead_s=exclusive.kernel_overhead_s,
        launch_s=exclusive.launch_s,
        cores=fact.host.cores if fact.kind == "cpu" else 0,
        source=f"tutti probe on host {fact.host.name}: peaks are the best measured matrix products",
        evidence="measured",
    )


def _peaks(exclusive: DeviceRates) -> dict[str, float]:
    peaks: dict[str, float] = {}
    for rate in exclusive.gemm:
        peaks[rate.dtype] = max(peaks.get(rate.dtype, 0.0), rate.flops_per_s)
    return peaks


def _median_gemm(rates: list[GemmRate]) -> GemmRate:
    middle = statistics.median(rate.flops_per_s for rate in rates)
    return replace(rates[0], flops_per_s=middle, spread=max(rate.spread for rate in rates))


def _links_of_slowest_host(of_ranks: Iterable[tuple[LinkSpec, ...]]) -> tuple[LinkSpec, ...]:
    """Return the links of the host whose largest all-reduce takes longest: synchronous ranks wait for it."""
    measured = [links for links in of_ranks if links]
    return max(measured, key=lambda links: links[0].points[-1].time_s, default=())


def _nodes(findings: Findings) -> tuple[NodeSpec, ...]:
    """Merge equal hosts that follow each other, so that ranks are placed as they were; the slowest disk counts."""
    groups: list[tuple[HostDevice, list[HostDevice]]] = []
    for entry in _host_devices(findings):
        if groups and _equal_hosts(groups[-1][0], entry):
            groups[-1][1].append(entry)
        else:
            groups.append((entry, [entry]))
    return tuple(
        NodeSpec(
            name=first.host,
            device=first.device,
            devices_per_node=first.devices,
            count=len(same),
            memory_nbytes=min(entry.memory_nbytes for entry in same),
            disk_read_bytes_per_s=min(
                (entry.disk_read_bytes_per_s for entry in same if entry.disk_read_bytes_per_s), default=None
            ),
            cores=min(entry.cores for entry in same),
            turns=max(entry.oversubscription for entry in same),
            host_link_bytes_per_s=min(
                (rate.bytes_per_s for rate in findings.exclusive[first.device].copies if rate.pinned), default=None
            ),
            copy_rates=findings.exclusive[first.device].copies,
        )
        for first, same in groups
    )


def _equal_hosts(a: HostDevice, b: HostDevice) -> bool:
    near = abs(a.memory_nbytes - b.memory_nbytes) <= EQUAL_MEMORY_TOLERANCE * a.memory_nbytes
    return (a.device, a.devices) == (b.device, b.devices) and near


def _host_devices(findings: Findings) -> list[HostDevice]:
    """Return one entry for each kind of device on each host. All cores of a host together are one device."""
    entries = []
    for name, ranks in by_host(findings.facts).items():
        read = next((value for rank in ranks if (value := findings.disk_read_bytes_per_s[rank])), None)
        facts = [findings.facts[rank] for rank in ranks]
        for device in dict.fromkeys(fact.device for fact in facts):
            same = [fact for fact in facts if fact.device == device]
            entries.append(
                HostDevice(
                    host=name,
                    device=device,
                    devices=1 if same[0].kind == "cpu" else max(same[0].visible, len(same)),
                    memory_nbytes=same[0].host.memory_nbytes,
                    disk_read_bytes_per_s=read,
                    cores=0 if same[0].kind == "cpu" else same[0].host.cores,
                    oversubscription=oversubscription(findings.facts, at_once(findings.facts, ranks[0])),
                )
            )
    return entries


def _conditions(findings: Findings, measured_utc: str) -> Conditions:
    facts = findings.facts
    return Conditions(
        measured_utc=measured_utc,
        cores_granted=min(fact.host.cores for fact in facts),
        load_at_start=max(fact.host.load for fact in facts),
        load_at_end=max(findings.load_at_end),
        versions=facts[0].versions,
        notes=(*_notes(findings.exclusive), *_warnings(findings)),
    )


def _notes(exclusive: dict[str, DeviceRates]) -> list[str]:
    """Return the notes on the devices' measurements, with the device's name if there are several devices."""
    return [
        f"{name}: {note}" if len(exclusive) > 1 else note for name, rates in exclusive.items() for note in rates.notes
    ]


def _warnings(findings: Findings) -> list[str]:
    warnings = []
    for name, ranks in by_host(findings.facts).items():
        fact: RankFacts = findings.facts[ranks[0]]
        if fact.host.load > BUSY * fact.host.cores:
            warnings.append(
                f"host {name} had a load of {fact.host.load:.1f} on {fact.host.cores} cores when the probe began: "
                "other work took part of the machine, so its rates may be too low"
            )
        if fact.versions != findings.facts[0].versions:
            warnings.append(
                f"host {name} has different versions from {findings.facts[0].host.name}: {fact.versions}; install the "
                "same ones"
            )
        if all(findings.disk_read_bytes_per_s[rank] is None for rank in ranks):
            warnings.append(
                f"the disk of host {name} was not read: no space, not writable, or its cache cannot be bypassed"
            )
    for link in (*_links_of_slowest_host(findings.node_links)[:1], *_links_of_slowest_host(findings.network_links)[:1]):
        warnings += _noisy_link_warning(link)
    return warnings


def _noisy_link_warning(link: LinkSpec) -> list[str]:
    """Return a warning if the times of a link differ so much that other work must have lengthened them."""
    worst = max(link.points, key=lambda point: point.median_s / point.time_s)
    if worst.median_s <= MEDIAN_TO_QUARTILE_LIMIT * worst.time_s:
        return []
    between = "ranks of a host" if link.tier == "node" else "hosts"
    return [
        f"times of all-reduces between {between} disagreed (of {worst.nbytes} bytes: lower quartile "
        f"{1e3 * worst.time_s:.3g} ms, median {1e3 * worst.median_s:.3g} ms): other work disturbed them, so this link "
        "may be faster than measured; measure again when the machine is quiet"
    ]


def by_host(facts: list[RankFacts]) -> dict[str, list[int]]:
    """Return the ranks of each host, in order of each host's first rank."""
    hosts: dict[str, list[int]] = {}
    for rank, fact in enumerate(facts):
        hosts.setdefault(fact.host.name, []).append(rank)
    return hosts


def first_rank_of_each_device(facts: list[RankFacts]) -> dict[str, int]:
    """Return the first rank on each device, by device name."""
    first: dict[str, int] = {}
    for rank, fact in enumerate(facts):
        first.setdefault(fact.device, rank)
    return first


def speed_ranked_name(name: str, position: int) -> str:
    """Return the name of a device that shares its reported name with devices of other speeds.

    Args:
        name: the reported name.
        position: 0 for the fastest devices, 1 for the next group, and so on.
    """
    return name if position == 0 else f"{name}, slower" if position == 1 else f"{name}, slower ({position})"


def rename_by_speed(facts: list[RankFacts], name: str, groups: Sequence[Collection[str]]) -> list[RankFacts]:
    """Return the facts with a separate device name for each group of hosts.

    Args:
        facts: facts of all ranks.
        name: the device name that the groups share.
        groups: hosts by group, the fastest group first.
    """
    positions = {host: position for position, hosts in enumerate(groups) for host in hosts}
    return [
        replace(fact, device=speed_ranked_name(name, positions.get(fact.host.name, 0))) if fact.device == name else fact
        for fact in facts
    ]


def at_once(facts: list[RankFacts], rank: int) -> list[int]:
    """Return the ranks that measure a device at the same time as `rank`, including `rank`.

    These are the first ranks of the other hosts that have such a device or compute on the same machine. Hosts of a lab
    share caches and memory, and in a run all hosts compute at once and wait for the slowest.
    """
    fact = facts[rank]
    others = [
        ranks[0]
        for name, ranks in by_host(facts).items()
        if name != fact.host.name and (facts[ranks[0]].device == fact.device or _one_machine(facts[ranks[0]], fact))
    ]
    return sorted([rank, *others])


def _one_machine(first: RankFacts, second: RankFacts) -> bool:
    """Return whether two ranks compute on cores of one machine, as hosts of a lab do."""
    return first.kind == second.kind == "cpu" and bool(first.host.machine) and first.host.machine == second.host.machine


def is_oversubscribed(facts: list[RankFacts], ranks: list[int]) -> bool:
    """Return whether the hosts of these ranks, one rank of each, claim more cores than their machine has."""
    return oversubscription(facts, ranks) > 1


SLOW_HOST_FRACTION = 0.85
"""A note names a host that runs matrix products below this fraction of the hosts' median speed."""

OTHER_DEVICE_FRACTION = 0.7
"""A host has another kind of device if all its float32 products run below this fraction of the fastest host's speed.
Other dtypes may be emulated, equally slowly on both.
"""

T = TypeVar("T")
R = TypeVar("R", ConvolutionRate, ImageRate)


def group_by_speed(rates_by_host: Mapping[str, DeviceRates]) -> list[dict[str, DeviceRates]]:
    """Group hosts by the speed of their float32 products, the fastest group first.

    Args:
        rates_by_host: rates that each host measured.
    """
    if len(rates_by_host) < 2:
        return [dict(rates_by_host)]
    plain = {host: replace(rates, gemm=tuple(rate for rate in rates.gemm if rate.dtype == "float32"))
             for host, rates in rates_by_host.items()}  # fmt: skip
    relative_speeds = {host: max(sizes, default=1.0) for host, sizes in _relative_speeds(plain, max).items()}
    groups: list[dict[str, DeviceRates]] = []
    least = 0.0
    for host in sorted(rates_by_host, key=lambda host: -relative_speeds[host]):
        if not groups or relative_speeds[host] < least:
            groups.append({})
            least = OTHER_DEVICE_FRACTION * relative_speeds[host]
        groups[-1][host] = rates_by_host[host]
    return [{host: group[host] for host in rates_by_host if host in group} for group in groups]


def merge_hosts(rates_by_host: Mapping[str, DeviceRates]) -> DeviceRates:
    """Merge the rates of hosts with equal devices: for matrix products the slowest host's, for other rates the median.

    Rates that some hosts lack (a skipped size) are left out.

    Args:
        rates_by_host: rates that each host measured.
    """
    all_rates = list(rates_by_host.values())
    if len(all_rates) == 1:
        return all_rates[0]
    efficiency = {kind: statistics.median(rates.efficiency.get(kind, value) for rates in all_rates)
                  for kind, value in all_rates[0].efficiency.items()}  # fmt: skip
    return DeviceRates(
        gemm=merged(
            [rates.gemm for rates in all_rates], lambda rate: (rate.dtype, rate.n, rate.threads), _slowest_host
        ),
        memory=merged([rates.memory for rates in all_rates], lambda rate: rate.threads, median_memory),
        weights=merged([rates.weights for rates in all_rates], weights_key, median_weights),
        copies=merged([rates.copies for rates in all_rates], lambda rate: (rate.direction, rate.pinned), _slowest_copy),
        launch_s=max((rates.launch_s for rates in all_rates if rates.launch_s is not None), default=None),
        codes=merged([rates.codes for rates in all_rates], lambda rate: (rate.method, rate.numel), _median_codec),
        kernel_overhead_s=statistics.median(rates.kernel_overhead_s for rates in all_rates),
        efficiency=efficiency,
        convolutions=merged([rates.convolutions for rates in all_rates], convolution_key, _median_relative),
        images=merged([rates.images for rates in all_rates], lambda rate: rate.pixels, _median_relative),
        vectors=merged([rates.vectors for rates in all_rates], lambda rate: rate.kind, _median_vector),
        notes=(*dict.fromkeys(note for rates in all_rates for note in rates.notes), *_slow_host_notes(rates_by_host)),
    )


def weights_key(rate: WeightRate) -> Hashable:
    """Return what tells the weight rates of one device from each other."""
    return rate.kind, rate.dtype, rate.threads


def convolution_key(rate: ConvolutionRate) -> Hashable:
    """Return what tells the convolution rates of one device from each other."""
    return rate.dtype, rate.channels_last, rate.weight_nbytes


def merged(of_ranks: list[tuple[T, ...]], key: Callable[[T], Hashable], of: Callable[[list[T]], T]) -> tuple[T, ...]:
    """Merge the rates that every rank has; the others are left out.

    Args:
        of_ranks: the rates of each rank.
        key: what tells the rates of one rank from each other.
        of: reduces the ranks' rates of one key to one rate.
    """
    tables = [{key(rate): rate for rate in rates} for rates in of_ranks]
    return tuple(of([table[name] for table in tables]) for name in tables[0] if all(name in table for table in tables))


def _slowest_host(rates: list[GemmRate]) -> GemmRate:
    return min(rates, key=lambda rate: rate.flops_per_s)


def _slowest_copy(rates: list[CopyRate]) -> CopyRate:
    return min(rates, key=lambda rate: rate.bytes_per_s)


def median_memory(rates: list[MemoryRate]) -> MemoryRate:
    middle = statistics.median(rate.bytes_per_s for rate in rates)
    return replace(rates[0], bytes_per_s=middle, spread=max(rate.spread for rate in rates))


def median_weights(rates: list[WeightRate]) -> WeightRate:
    return replace(
        rates[0],
        forward=statistics.median(rate.forward for rate in rates),
        input_gradient=statistics.median(rate.input_gradient for rate in rates),
        weight_gradient=statistics.median(rate.weight_gradient for rate in rates),
    )


def _median_relative(rates: list[R]) -> R:
    return replace(rates[0], relative=statistics.median(rate.relative for rate in rates))


def _median_vector(rates: list[VectorRate]) -> VectorRate:
    return replace(
        rates[0],
        forward=statistics.median(rate.forward for rate in rates),
        backward=statistics.median(rate.backward for rate in rates),
    )


def _median_codec(rates: list[CompressRate]) -> CompressRate:
    return replace(
        rates[0],
        encode_s=statistics.median(rate.encode_s for rate in rates),
        decode_s=statistics.median(rate.decode_s for rate in rates),
    )


def _slow_host_notes(rates_by_host: Mapping[str, DeviceRates]) -> list[str]:
    """Return a note on each host that runs matrix products slower than most."""
    if len(rates_by_host) < 3:  # with two hosts, either speed could be the usual one
        return []
    return [
        f"host {host} runs matrix products at {relative_speed:.0%} of the median speed of its kind of device, and "
        "synchronous ranks wait for it: check what else it runs, or leave it out"
        for host, sizes in _relative_speeds(rates_by_host, statistics.median).items()
        if sizes and (relative_speed := statistics.median(sizes)) < SLOW_HOST_FRACTION
    ]


def _relative_speeds(
    rates_by_host: Mapping[str, DeviceRates], common: Callable[[Iterable[float]], float]
) -> dict[str, list[float]]:
    """Return each host's rates of the matrix products that all hosts timed, relative to a common rate of each product.

    Args:
        rates_by_host: rates that each host measured.
        common: reduces all hosts' rates of one product to the common rate, for instance their median.
    """
    tables = {
        host: {(r.dtype, r.n, r.threads): r.flops_per_s for r in rates.gemm} for host, rates in rates_by_host.items()
    }
    shared = set.intersection(*(set(table) for table in tables.values()))
    common_rates = {product: common([table[product] for table in tables.values()]) for product in shared}
    return {host: [table[product] / common_rates[product] for product in shared] for host, table in tables.items()}

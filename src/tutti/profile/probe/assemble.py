"""Findings of the ranks put together into a ClusterSpec. Pure: the same findings give the same spec."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace

from tutti.config.cluster import (
    ClusterSpec,
    Conditions,
    DeviceSpec,
    GemmRate,
    LinkSpec,
    NodeSpec,
)
from tutti.profile.probe import host
from tutti.profile.probe.findings import (
    DeviceRates,
    Findings,
    RankFacts,
    at_once,
    by_host,
    first_of_each_device,
    turns,
)
from tutti.profile.probe.together import median_memory, median_weights, merged, weights_key

BUSY = 0.25
"""Load per core at the start above which a note warns of other work."""

ALIKE = 0.05
"""Hosts are counted as equal when their memories differ by less than this."""

DISAGREE = 1.5
"""A link's times disagree where their median is above so many lower quartiles of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Devices of one kind on one host."""

    host: str
    device: str
    devices: int
    memory_nbytes: int
    disk_read_bytes_per_s: float | None
    cores: int
    turns: float


def assemble(findings: Findings, *, measured_utc: str | None = None) -> ClusterSpec:
    """The cluster that the ranks ran on. Equal hosts become one node with a count."""
    names = list(by_host(findings.facts))
    return ClusterSpec(
        name=names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more",
        devices={name: _device(findings, name, rank) for name, rank in first_of_each_device(findings.facts).items()},
        nodes=_nodes(findings),
        links=(*_slowest(findings.node_links), *_slowest(findings.network_links)),
        conditions=_conditions(findings, measured_utc or host.now_utc()),
    )


def _device(findings: Findings, name: str, rank: int) -> DeviceSpec:
    fact, alone = findings.facts[rank], findings.alone[name]
    neighbours = [findings.shared[other] for other in by_host(findings.facts)[fact.host.name]]
    passed = merged([shared.weights for shared in neighbours], weights_key, median_weights)
    copied = merged([shared.memory for shared in neighbours], lambda rate: rate.threads, median_memory)
    return DeviceSpec(
        name=name,
        kind=fact.kind,
        memory_nbytes=fact.device_memory_nbytes,
        memory_bandwidth_bytes_per_s=max(rate.bytes_per_s for rate in alone.memory),
        peak_flops_per_s=_peaks(alone),
        gemm=alone.gemm,
        gemm_concurrent=merged(
            [shared.gemm for shared in neighbours], lambda rate: (rate.dtype, rate.n, rate.threads), _median_gemm
        ),
        memory_rates=(*alone.memory, *copied),
        weight_rates=(*alone.weights, *passed),
        efficiency=alone.efficiency,
        convolution_rates=alone.convolutions,
        image_rates=alone.images,
        vector_rates=alone.vectors,
        compress_rates=alone.codes,
        kernel_overhead_s=alone.kernel_overhead_s,
        cores=fact.host.cores if fact.kind == "cpu" else 0,
        source=f"tutti probe on host {fact.host.name}: peaks are the best measured matrix products",
        evidence="measured",
    )


def _peaks(alone: DeviceRates) -> dict[str, float]:
    peaks: dict[str, float] = {}
    for rate in alone.gemm:
        peaks[rate.dtype] = max(peaks.get(rate.dtype, 0.0), rate.flops_per_s)
    return peaks


def _median_gemm(rates: list[GemmRate]) -> GemmRate:
    middle = statistics.median(rate.flops_per_s for rate in rates)
    return replace(rates[0], flops_per_s=middle, spread=max(rate.spread for rate in rates))


def _slowest(of_ranks: Iterable[tuple[LinkSpec, ...]]) -> tuple[LinkSpec, ...]:
    """The links of the host whose largest all-reduce takes longest: ranks in step wait for it."""
    found = [links for links in of_ranks if links]
    return max(found, key=lambda links: links[0].points[-1].time_s, default=())


def _nodes(findings: Findings) -> tuple[NodeSpec, ...]:
    """Equal hosts are merged, and the slowest of their disks is kept."""
    merged: list[tuple[_Place, list[_Place]]] = []
    for place in _places(findings):
        for first, places in merged:
            if _alike(first, place):
                places.append(place)
                break
        else:
            merged.append((place, [place]))
    return tuple(
        NodeSpec(
            name=first.host,
            device=first.device,
            devices_per_node=first.devices,
            count=len(places),
            memory_nbytes=min(place.memory_nbytes for place in places),
            disk_read_bytes_per_s=min(
                (place.disk_read_bytes_per_s for place in places if place.disk_read_bytes_per_s), default=None
            ),
            cores=min(place.cores for place in places),
            turns=max(place.turns for place in places),
        )
        for first, places in merged
    )


def _alike(a: _Place, b: _Place) -> bool:
    near = abs(a.memory_nbytes - b.memory_nbytes) <= ALIKE * a.memory_nbytes
    return (a.device, a.devices) == (b.device, b.devices) and near


def _places(findings: Findings) -> list[_Place]:
    """One for each kind of device on each host. A CPU is one device, whatever the number of its ranks."""
    places = []
    for name, ranks in by_host(findings.facts).items():
        read = next((value for rank in ranks if (value := findings.disk_read_bytes_per_s[rank])), None)
        facts = [findings.facts[rank] for rank in ranks]
        for device in dict.fromkeys(fact.device for fact in facts):
            same = [fact for fact in facts if fact.device == device]
            places.append(
                _Place(
                    host=name,
                    device=device,
                    devices=1 if same[0].kind == "cpu" else max(same[0].visible, len(same)),
                    memory_nbytes=same[0].host.memory_nbytes,
                    disk_read_bytes_per_s=read,
                    cores=0 if same[0].kind == "cpu" else same[0].host.cores,
                    turns=turns(findings.facts, at_once(findings.facts, ranks[0])),
                )
            )
    return places


def _conditions(findings: Findings, measured_utc: str) -> Conditions:
    facts = findings.facts
    return Conditions(
        measured_utc=measured_utc,
        cores_granted=min(fact.host.cores for fact in facts),
        load_at_start=max(fact.host.load for fact in facts),
        load_at_end=max(findings.load_at_end),
        versions=facts[0].versions,
        notes=(*_notes(findings.alone), *_warnings(findings)),
    )


def _notes(alone: dict[str, DeviceRates]) -> list[str]:
    """What devices' measurements say, with the device's name where there are several."""
    return [f"{name}: {note}" if len(alone) > 1 else note for name, rates in alone.items() for note in rates.notes]


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
            warnings.append(f"host {name} has other versions than {findings.facts[0].host.name}: {fact.versions}")
        if all(findings.disk_read_bytes_per_s[rank] is None for rank in ranks):
            warnings.append(f"the disk of host {name} was not read: no space, not writable, or no way past its cache")
    for link in (*_slowest(findings.node_links)[:1], *_slowest(findings.network_links)[:1]):
        warnings += _disagreement(link)
    return warnings


def _disagreement(link: LinkSpec) -> list[str]:
    """A warning where the times of a link differed so much that something else must have lengthened them."""
    worst = max(link.points, key=lambda point: point.median_s / point.time_s)
    if worst.median_s <= DISAGREE * worst.time_s:
        return []
    between = "ranks of a host" if link.tier == "node" else "hosts"
    return [
        f"times of all-reduces between {between} disagreed: of {worst.nbytes} bytes a quarter took up to "
        f"{1e3 * worst.time_s:.3g} ms and half more than {1e3 * worst.median_s:.3g} ms; other work disturbed them, so "
        "this link may be faster than it says: measure again when the machine is quiet"
    ]

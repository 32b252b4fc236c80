"""What the ranks of a probe found, as plain data, before it is put together."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from tutti.config.cluster import (
    CompressRate,
    ConvolutionRate,
    DeviceKind,
    GemmRate,
    ImageRate,
    LinkSpec,
    MemoryRate,
    VectorRate,
    WeightRate,
)
from tutti.config.model import OpKind
from tutti.profile.probe.host import HostFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """One rank's host and device. `device`: its name, equal for equal devices. `visible`: how many such devices the
    rank sees on its host. `emulated`: dtypes that the device multiplies, far slower than float32."""

    host: HostFacts
    kind: DeviceKind
    device: str
    device_memory_nbytes: int
    visible: int
    versions: dict[str, str]
    emulated: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRates:
    """What one rank measured on its device while all others of its host waited."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRates:
    """What one rank measured while all ranks of its host measured the same."""

    gemm: tuple[GemmRate, ...] = ()
    memory: tuple[MemoryRate, ...] = ()
    weights: tuple[WeightRate, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """All findings; lists are in order of rank.

    `alone`: device name -> rates. `node_links`, `network_links`: of a rank that took part in such a measurement, else
    empty. `disk_read_bytes_per_s`: of the first rank of each host, else None. `load_at_end`: of each rank's host.
    """

    facts: list[RankFacts]
    alone: dict[str, DeviceRates]
    shared: list[SharedRates]
    node_links: list[tuple[LinkSpec, ...]]
    network_links: list[tuple[LinkSpec, ...]]
    disk_read_bytes_per_s: list[float | None]
    load_at_end: list[float]


def by_host(facts: list[RankFacts]) -> dict[str, list[int]]:
    """Ranks of each host, hosts in order of their first rank."""
    hosts: dict[str, list[int]] = {}
    for rank, fact in enumerate(facts):
        hosts.setdefault(fact.host.name, []).append(rank)
    return hosts


def first_of_each_device(facts: list[RankFacts]) -> dict[str, int]:
    """Device name -> the first rank on such a device."""
    first: dict[str, int] = {}
    for rank, fact in enumerate(facts):
        first.setdefault(fact.device, rank)
    return first


def slower(name: str, place: int) -> str:
    """What devices of one name are called, in order of their pace."""
    return name if place == 0 else f"{name}, slower" if place == 1 else f"{name}, slower ({place})"


def renamed(facts: list[RankFacts], name: str, groups: Sequence[Collection[str]]) -> list[RankFacts]:
    """The facts where devices called `name` have names by their host's group, the quickest group first."""
    places = {host: place for place, hosts in enumerate(groups) for host in hosts}
    return [
        replace(fact, device=slower(name, places.get(fact.host.name, 0))) if fact.device == name else fact
        for fact in facts
    ]


def at_once(facts: list[RankFacts], rank: int) -> list[int]:
    """The ranks that measure a device at once with `rank`, which is on it: on each other host the first rank, where it
    has such a device too, or computes on the same machine. Hosts of a laboratory share caches and memory, and in a run
    all hosts compute at once and wait for the slowest.
    """
    own = facts[rank]
    alike = [
        ranks[0]
        for name, ranks in by_host(facts).items()
        if name != own.host.name and (facts[ranks[0]].device == own.device or _one_machine(facts[ranks[0]], own))
    ]
    return sorted([rank, *alike])


def _one_machine(one: RankFacts, other: RankFacts) -> bool:
    """Whether two ranks compute on cores of one machine, as hosts of a laboratory do."""
    return one.kind == other.kind == "cpu" and bool(one.host.machine) and one.host.machine == other.host.machine


def crowded(facts: list[RankFacts], ranks: list[int]) -> bool:
    """Whether ranks that measure at once, one a host, have fewer cores of their machine than they think."""
    return turns(facts, ranks) > 1


def turns(facts: list[RankFacts], ranks: list[int]) -> float:
    """How many of these ranks' hosts, one rank each, take turns on a core of their machine, 1 where each has its own:
    hosts of a laboratory may be more than its cores."""
    cores: dict[str, int] = {}
    for one in (facts[rank].host for rank in ranks if facts[rank].kind == "cpu" and facts[rank].host.machine):
        cores[one.machine] = cores.get(one.machine, 0) + one.cores
    machines = {fact.host.machine: fact.host.machine_cores for fact in facts}
    return max([1.0, *(taken / machines[machine] for machine, taken in cores.items() if machines[machine])])

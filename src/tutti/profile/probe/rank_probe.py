"""Measure a cluster with all ranks; one host and many take the same code path."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

import tutti.profile.probe.codec_rates as codec_rates
import tutti.profile.probe.compute_rates as compute_rates
import tutti.profile.probe.host_facts as host_facts
import tutti.profile.probe.link_rates as link_rates
import tutti.profile.probe.memory_rates as memory_rates
import tutti.profile.probe.probe_timing as probe_timing
from tutti.comm.devices import backend_of, device_name
from tutti.comm.object_collectives import gather_values
from tutti.comm.world import deprioritise_gloo_threads
from tutti.config.cluster import ClusterSpec, LinkSpec
from tutti.config.model import OpKind
from tutti.float32_precision import allow_tf32
from tutti.profile.probe.accelerator_rates import (
    AcceleratorConvolutions,
    launch_s,
    measure_convolutions,
    measure_copies,
)
from tutti.profile.probe.cluster_assembly import (
    DeviceRates,
    Findings,
    RankFacts,
    SharedRates,
    assemble,
    at_once,
    by_host,
    first_rank_of_each_device,
    group_by_speed,
    is_oversubscribed,
    merge_hosts,
    rename_by_speed,
    speed_ranked_name,
)
from tutti.profile.probe.link_rates import ProbeGroup
from tutti.profile.probe.probe_timing import Barrier, Effort

Say = Callable[[str], None]
T = TypeVar("T")


def measure_ranks(device: torch.device, effort: Effort, *, folder: Path, say: Say, host: str = "") -> ClusterSpec:
    """Measure the machines of all ranks of the default process group; every rank returns the same spec. Collective.

    Args:
        device: the device that this rank computes on.
        effort: how much to measure.
        folder: a folder on the disk to time, on each host.
        say: receives a line of text before each measurement.
        host: what its cluster calls this rank's host; its own name if empty.
    """
    allow_tf32(False)  # torch computes convolutions in TF32 by default
    control = dist.new_group(backend="gloo")
    deprioritise_gloo_threads()
    facts = _gather(control, _facts(device, host))
    hosts = by_host(facts)
    neighbours = hosts[facts[dist.get_rank()].host.name]
    exclusive, facts = _measure_exclusive(control, facts, device, effort, say)
    say("rates while all ranks compute")
    native_dtypes = _native_dtypes(effort, [facts[rank] for rank in neighbours])
    barrier = _make_barrier(list(hosts.values()))
    shared = _gather(
        control, _measure_shared(facts[dist.get_rank()], len(neighbours), device, effort, native_dtypes, barrier)
    )
    say("links between ranks")
    share = max(1, facts[dist.get_rank()].host.cores // len(neighbours))
    with compute_rates.on_threads(share):  # as in training; if each used all cores, they would wait for each other
        node = _gather(control, _node_links(hosts, neighbours, device, effort))
        network = _gather(control, _network_links(hosts, device, effort))
    say("the disk")
    first = dist.get_rank() == neighbours[0]
    read = _gather(control, memory_rates.read_bytes_per_s(folder, effort.disk_nbytes) if first else None)
    return assemble(
        Findings(
            facts=facts,
            exclusive=exclusive,
            shared=shared,
            node_links=node,
            network_links=network,
            disk_read_bytes_per_s=read,
            load_at_end=_gather(control, host_facts.load()),
        )
    )


def _gather(group: dist.ProcessGroup, value: T) -> list[T]:
    """Return `value` of every rank, in order of rank. Ranks wait here without using the CPU."""
    return gather_values(value, group)


def _facts(device: torch.device, host_name: str = "") -> RankFacts:
    host = host_facts.facts(host_name)
    if device.type == "cpu":
        return RankFacts(
            host=host,
            kind="cpu",
            device=f"{host.cpu}, {host.cores} cores",
            device_memory_nbytes=host.memory_nbytes,
            visible=1,
            versions=host_facts.versions(),
            emulated=compute_rates.emulated(device),
        )
    name, count = device_name(device), torch.accelerator.device_count()
    names = [device_name(torch.device(device.type, index)) for index in range(count)]
    return RankFacts(
        host=host,
        kind="cuda",  # the word of cluster files for any accelerator
        device=name,
        device_memory_nbytes=_memory_nbytes(device, host.memory_nbytes),
        visible=names.count(name),
        versions=host_facts.versions() | {"cuda": torch.version.cuda or torch.version.hip or ""},
    )


def _memory_nbytes(device: torch.device, host_nbytes: int) -> int:
    """Return the memory of an accelerator; the host's where torch tells none, as for devices that share it (MPS)."""
    read = getattr(torch.get_device_module(device), "get_device_properties", None)
    return host_nbytes if read is None else int(read(device).total_memory)


def _measure_exclusive(
    control: dist.ProcessGroup, facts: list[RankFacts], device: torch.device, effort: Effort, say: Say
) -> tuple[dict[str, DeviceRates], list[RankFacts]]:
    """Measure each kind of device on one rank of each host while all other ranks wait.

    Returns:
        The rates by device name, and the facts, in which devices that share a name but differ in speed are renamed.
    """
    rates: dict[str, DeviceRates] = {}
    for name, rank in first_rank_of_each_device(facts).items():
        say(f"{name}, on rank {rank}")
        own_rates, measuring = None, at_once(facts, rank)
        same_device = [other for other in measuring if facts[other].device == name]
        # GPUs of several hosts share nothing, so they need not measure in step.
        barrier = _make_barrier([same_device] if facts[rank].kind == "cpu" else [])
        if dist.get_rank() in measuring:
            with probe_timing.in_turns(is_oversubscribed(facts, measuring)):
                native_dtypes = _native_dtypes(effort, [facts[other] for other in same_device])
                own_rates = _measure_device(facts[dist.get_rank()], device, effort, native_dtypes, say, barrier)
        all_rates = _gather(control, own_rates)
        measured = {facts[other].host.name: other_rates for other in same_device if (other_rates := all_rates[other])}
        # Speeds of hosts that take turns on cores depend on whose turn it was.
        groups = [measured] if is_oversubscribed(facts, measuring) else group_by_speed(measured)
        rates |= {speed_ranked_name(name, position): merge_hosts(group) for position, group in enumerate(groups)}
        facts = rename_by_speed(facts, name, groups)
    return rates, facts


def _make_barrier(groups: list[list[int]]) -> Barrier | None:
    """Return a barrier among the ranks of this rank's group, or None if it has no such group. Collective.

    Args:
        groups: ranks of each group; groups of one rank get no barrier.
    """
    barrier = None
    for ranks in groups:
        if len(ranks) > 1:
            group = dist.new_group(ranks, backend="gloo")
            if dist.get_rank() in ranks:
                barrier = partial(dist.barrier, group)
    return barrier


def _native_dtypes(effort: Effort, facts: list[RankFacts]) -> tuple[str, ...]:
    """Return the dtypes that none of these ranks emulates: ranks that measure in step must measure the same dtypes."""
    return tuple(dtype for dtype in effort.dtypes if not any(dtype in fact.emulated for fact in facts))


def _measure_device(
    fact: RankFacts,
    device: torch.device,
    effort: Effort,
    native_dtypes: tuple[str, ...],
    say: Say,
    barrier: Barrier | None,
) -> DeviceRates:
    """Measure all rates of this rank's device."""
    cpu = device.type == "cpu"
    threads = compute_rates.thread_counts(fact.host.cores, effort.threads) if cpu else (1,)
    sizes = effort.gemm_sizes if cpu else effort.cuda_gemm_sizes
    products = compute_rates.measure_gemm_rates(
        device, effort, threads=threads, sizes=sizes, dtypes=effort.dtypes, say=say
    )
    say("memory bandwidth")
    memory = memory_rates.measure(
        device, effort, threads=threads, memory_nbytes=fact.device_memory_nbytes, barrier=barrier
    )
    say("thin matrix products")
    weights = compute_rates.measure_weight_rates(device, effort, threads=threads, dtypes=native_dtypes, barrier=barrier)
    say("convolutions and attention")
    relative_rates = compute_rates.measure_operator_rates(device, effort)
    convolved = AcceleratorConvolutions() if cpu else measure_convolutions(device, effort, dtypes=effort.dtypes)
    of_accelerator: dict[OpKind, float] = {} if convolved.efficiency is None else {"conv": convolved.efficiency}
    copies = measure_copies(device, effort)
    say("operators on vectors")
    vector_rates = compute_rates.measure_vector_rates(device, effort)
    say("gradient codecs")
    codecs = codec_rates.measure(device, effort)
    return DeviceRates(
        gemm=compute_rates.remeasure_doubtful(products.rates, device, effort),
        memory=memory,
        kernel_overhead_s=memory_rates.kernel_overhead_s(device),
        notes=(*products.notes, *convolved.skipped, *(() if cpu else copies.skipped)),
        weights=weights,
        efficiency=relative_rates.efficiency | of_accelerator,
        convolutions=relative_rates.convolutions + convolved.rates,
        images=relative_rates.images,
        vectors=vector_rates,
        codes=codecs,
        copies=copies.rates,
        launch_s=launch_s(device),
    )


def _measure_shared(
    fact: RankFacts,
    ranks: int,
    device: torch.device,
    effort: Effort,
    native_dtypes: tuple[str, ...],
    barrier: Barrier | None,
) -> SharedRates:
    """Measure rates on an equal share of the cores while all ranks of the host do the same; GPUs share nothing."""
    if ranks == 1 or device.type != "cpu":
        return SharedRates()
    threads = (max(1, fact.host.cores // ranks),)
    brief = replace(effort, gemm_budget_s=effort.gemm_budget_s * max(1.0, ranks / fact.host.cores))
    products = compute_rates.measure_gemm_rates(
        device, brief, threads=threads, sizes=effort.concurrent_sizes, dtypes=effort.dtypes, concurrent=ranks
    )
    nbytes = fact.host.memory_nbytes
    memory = memory_rates.measure(
        device, effort, threads=threads, memory_nbytes=nbytes, concurrent=ranks, barrier=barrier
    )
    weights = compute_rates.measure_weight_rates(
        device, brief, threads=threads, dtypes=native_dtypes, concurrent=ranks, barrier=barrier
    )
    return SharedRates(gemm=products.rates, memory=memory, weights=weights)


def _node_links(
    hosts: dict[str, list[int]], own_ranks: list[int], device: torch.device, effort: Effort
) -> tuple[LinkSpec, ...]:
    """Measure links among the ranks of this rank's host. All ranks open groups in the same order, as torch requires."""
    links: tuple[LinkSpec, ...] = ()
    for name, ranks in hosts.items():
        if len(ranks) < 2:
            continue
        group = _probe_group(ranks, device)
        if ranks == own_ranks:
            links = link_rates.measure(group, "node", effort, f"of host {name}")
    return links


def _network_links(hosts: dict[str, list[int]], device: torch.device, effort: Effort) -> tuple[LinkSpec, ...]:
    """Measure links among hosts on the first rank of each, while the other ranks wait."""
    firsts = [ranks[0] for ranks in hosts.values()]
    if len(firsts) < 2:
        return ()
    group = _probe_group(firsts, device)
    if dist.get_rank() not in firsts:
        return ()
    return link_rates.measure(group, "network", effort, f"on {len(firsts)} hosts")


def _probe_group(ranks: list[int], device: torch.device) -> ProbeGroup:
    backend = backend_of(device, shared=False)
    group = dist.new_group(ranks, backend=backend)
    deprioritise_gloo_threads()
    return ProbeGroup(group=group, ranks=tuple(ranks), device=device, backend=backend)

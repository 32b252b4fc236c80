"""A probe by all ranks of a process group together: the same path for one host and for many."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import tutti.profile.probe.codec_rates as codec_rates
import tutti.profile.probe.compute_rates as compute_rates
import tutti.profile.probe.host_facts as host_facts
import tutti.profile.probe.link_rates as link_rates
import tutti.profile.probe.memory_rates as memory_rates
import tutti.profile.probe.probe_timing as probe_timing
from tutti.comm.world import deprioritise_gloo_threads
from tutti.config.cluster import ClusterSpec, LinkSpec
from tutti.profile.probe.cluster_assembly import (
    DeviceRates,
    Findings,
    RankFacts,
    SharedRates,
    assemble,
    at_once,
    by_host,
    crowded,
    first_of_each_device,
    in_kinds,
    renamed,
    slower,
    slowest,
)
from tutti.profile.probe.link_rates import ProbeGroup
from tutti.profile.probe.probe_timing import Effort, Meet

Say = Callable[[str], None]
T = TypeVar("T")


def measure_ranks(device: torch.device, effort: Effort, *, folder: Path, say: Say) -> ClusterSpec:
    """Measure the machines of all ranks of the default process group; every rank returns the same spec.

    Args:
        device: the device that this rank computes on.
        effort: how much to measure.
        folder: on the disk whose read speed is measured, on each host.
        say: receives what is being measured.
    """
    control = dist.new_group(backend="gloo")
    deprioritise_gloo_threads()
    facts = _gather(control, _facts(device))
    hosts = by_host(facts)
    neighbours = hosts[facts[dist.get_rank()].host.name]
    exclusive, facts = _measure_exclusive(control, facts, device, effort, say)
    say("rates while all ranks compute")
    natively = _natively(effort, [facts[rank] for rank in neighbours])
    meet = _rendezvous_of(list(hosts.values()))
    shared = _gather(control, _shared(facts[dist.get_rank()], len(neighbours), device, effort, natively, meet))
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
    """Return `value` of every rank, in order of rank; waits for all of them without computing."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def _facts(device: torch.device) -> RankFacts:
    here = host_facts.facts()
    if device.type != "cuda":
        return RankFacts(
            host=here,
            kind="cpu",
            device=f"{here.cpu}, {here.cores} cores",
            device_memory_nbytes=here.memory_nbytes,
            visible=1,
            versions=host_facts.versions(),
            emulated=compute_rates.emulated(device),
        )
    name = torch.cuda.get_device_name(device)
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return RankFacts(
        host=here,
        kind="cuda",
        device=name,
        device_memory_nbytes=torch.cuda.get_device_properties(device).total_memory,
        visible=names.count(name),
        versions=host_facts.versions() | {"cuda": torch.version.cuda or torch.version.hip or ""},
    )


def _measure_exclusive(
    control: dist.ProcessGroup, facts: list[RankFacts], device: torch.device, effort: Effort, say: Say
) -> tuple[dict[str, DeviceRates], list[RankFacts]]:
    """Measure each kind of device on one rank of each host while all other ranks wait.

    Returns:
        The rates, and the facts, in which devices of one name but different speeds have names of their own.
    """
    rates: dict[str, DeviceRates] = {}
    for name, rank in first_of_each_device(facts).items():
        say(f"{name}, on rank {rank}")
        own_rates, together = None, at_once(facts, rank)
        alike = [other for other in together if facts[other].device == name]
        # GPUs of several hosts share nothing, so they need not measure in step.
        meet = _rendezvous_of([alike] if facts[rank].kind == "cpu" else [])
        if dist.get_rank() in together:
            with probe_timing.in_turns(crowded(facts, together)):
                natively = _natively(effort, [facts[other] for other in alike])
                own_rates = _device_rates(facts[dist.get_rank()], device, effort, natively, say, meet)
        all_rates = _gather(control, own_rates)
        measured = {facts[other].host.name: other_rates for other in alike if (other_rates := all_rates[other])}
        # Speeds of hosts that take turns on cores depend on whose turn it was.
        groups = [measured] if crowded(facts, together) else in_kinds(measured)
        rates |= {slower(name, place): slowest(group) for place, group in enumerate(groups)}
        facts = renamed(facts, name, groups)
    return rates, facts


def _rendezvous_of(parties: list[list[int]]) -> Meet | None:
    """Return a function that waits for the other ranks of this rank's group, or None; every rank must call this."""
    rendezvous = None
    for ranks in parties:
        if len(ranks) > 1:
            group = dist.new_group(ranks, backend="gloo")
            if dist.get_rank() in ranks:
                rendezvous = partial(dist.barrier, group)
    return rendezvous


def _natively(effort: Effort, facts: list[RankFacts]) -> tuple[str, ...]:
    """Return the dtypes that none of these ranks emulates, because ranks that measure in step measure the same."""
    return tuple(name for name in effort.dtypes if not any(name in fact.emulated for fact in facts))


def _device_rates(
    fact: RankFacts, device: torch.device, effort: Effort, natively: tuple[str, ...], say: Say, meet: Meet | None
) -> DeviceRates:
    cpu = device.type == "cpu"
    threads = compute_rates.thread_counts(fact.host.cores, effort.threads) if cpu else (1,)
    sizes = effort.gemm_sizes if cpu else effort.cuda_gemm_sizes
    products = compute_rates.measure_gemm_rates(
        device, effort, threads=threads, sizes=sizes, dtypes=effort.dtypes, say=say
    )
    say("memory bandwidth")
    copied = memory_rates.measure(device, effort, threads=threads, memory_nbytes=fact.device_memory_nbytes, meet=meet)
    say("products of few rows")
    passed = compute_rates.measure_weight_rates(device, effort, threads=threads, dtypes=natively, meet=meet)
    say("convolutions and attention")
    relative_rates = compute_rates.measure_operator_rates(device, effort)
    say("operators on vectors")
    vector_rates = compute_rates.measure_vector_rates(device, effort)
    say("gradient codecs")
    coded = codec_rates.measure(device, effort)
    return DeviceRates(
        gemm=compute_rates.again(products.rates, device, effort),
        memory=copied,
        kernel_overhead_s=memory_rates.kernel_overhead_s(device),
        notes=products.notes,
        weights=passed,
        efficiency=relative_rates.efficiency,
        convolutions=relative_rates.convolutions,
        images=relative_rates.images,
        vectors=vector_rates,
        codes=coded,
    )


def _shared(
    fact: RankFacts, ranks: int, device: torch.device, effort: Effort, natively: tuple[str, ...], meet: Meet | None
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
    copied = memory_rates.measure(device, effort, threads=threads, memory_nbytes=nbytes, concurrent=ranks, meet=meet)
    passed = compute_rates.measure_weight_rates(
        device, brief, threads=threads, dtypes=natively, concurrent=ranks, meet=meet
    )
    return SharedRates(gemm=products.rates, memory=copied, weights=passed)


def _node_links(
    hosts: dict[str, list[int]], mine: list[int], device: torch.device, effort: Effort
) -> tuple[LinkSpec, ...]:
    """Measure links among the ranks of this rank's host. All ranks open groups in the same order, as torch requires."""
    links: tuple[LinkSpec, ...] = ()
    for name, ranks in hosts.items():
        if len(ranks) < 2:
            continue
        group = _probe_group(ranks, device)
        if ranks == mine:
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
    backend = "nccl" if device.type == "cuda" else "gloo"
    group = dist.new_group(ranks, backend=backend)
    deprioritise_gloo_threads()
    return ProbeGroup(group=group, ranks=tuple(ranks), device=device, backend=backend)

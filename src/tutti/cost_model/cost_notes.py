"""Formatting of numbers, and the notes of a prediction."""

import tutti.cost_model.cost_constants as cost_constants
from tutti.config.cluster import ClusterSpec
from tutti.config.plan import Plan
from tutti.config.prediction import AllocatorMemory, Estimate, RankMemory
from tutti.cost_model.offload_cost import (
    disk_bytes_per_s,
    host_limit_nbytes,
    load_s_per_nbyte,
    update_bytes_per_s,
)
from tutti.cost_model.overlap import CommCost
from tutti.cost_model.rank_placement import HostGroup, Link, ring_tier
from tutti.cost_model.worker_speed import Worker


def seconds(value: float) -> str:
    """Format a duration with three digits and a fitting unit: 1.23 s, 45.6 ms, 789 us."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(value) >= 0.9995 * size:
            return f"{_digits(value / size)} {unit}"
    return f"{_digits(value / 1e-9)} ns" if value else "0 s"


def nbytes(value: float) -> str:
    """Format a number of bytes in binary units: 31.0 GiB, 350 MiB."""
    for unit, size in (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10)):
        if abs(value) >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f} B"


def bits_per_s(bytes_per_s: float) -> str:
    """Format the bandwidth of a link in bits, as is usual for networks: 1 Gbit/s."""
    value = 8 * bytes_per_s
    for unit, size in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if value >= size:
            return f"{_digits(value / size)} {unit}"
    return f"{_digits(value / 1e3)} kbit/s"


def count(number: int, word: str) -> str:
    """Format a number with its noun: 1 rank, 2 ranks, 3 microbatches."""
    plural = f"{word}es" if word.endswith("ch") else f"{word}s"
    return f"{number} {word if number == 1 else plural}"


def _digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


STAGES = "waiting for other stages"
"""Name of a limit: the bubbles of a pipeline, and the messages between its stages."""


def time_notes(
    host_groups: tuple[HostGroup, ...],
    host_group: HostGroup,
    worker: Worker,
    limits: dict[str, float],
    exchanged: CommCost,
    margin: float,
    data_s: float,
    link: Link | None,
) -> tuple[str, ...]:
    """Describe what limits the step, where the ranks are placed, and which constants of the time are assumed.

    Args:
        host_groups: all hosts with ranks.
        host_group: the host group of the slowest rank.
        worker: the speed of the slowest rank.
        limits: seconds of the slowest rank's work, by what limits it.
        exchanged: the communication of its step.
        margin: relative half-width of the time's interval.
        data_s: seconds that it waits for data.
        link: the slowest link between the ranks; None for one rank.
    """
    ranks = sum(place.ranks for place in host_groups)
    stages_s = limits.get(STAGES, 0.0)  # counted as exposed, but mostly idle: a faster link would not end it
    exposed_s, total_s = max(0.0, exchanged.exposed_s - stages_s), max(0.0, exchanged.total_s - stages_s)
    notes = [_limit_note({**limits, "communication": exposed_s, "data loading": data_s})]
    if host_group.device.kind == "cpu" and host_group.sharing > host_group.device.cores:
        notes.append(
            f"{host_group.sharing} ranks share {count(max(1, host_group.device.cores), 'core')} of "
            f"{host_group.device.name}: "
            f"each is {worker.slowdown:.2g}x slower than with a core of its own"
        )
    elif host_group.device.kind == "cpu":
        notes.append(
            f"{count(host_group.sharing, 'rank')} on {host_group.device.name} with "
            f"{count(host_group.threads, 'thread')} each"
            + (", sharing its memory bandwidth" if host_group.sharing > 1 else "")
        )
    if host_group.node.turns > 1:
        notes.append(
            f"{host_group.node.turns:.2g} hosts take turns on each core of their machine, which their rates include; "
            f"assumed: switching between them makes work {cost_constants.OVERSUBSCRIBED:.2g}x slower"
        )
    if ranks > 1:
        notes.append(
            f"flat ring over {ranks} ranks, limited by the {ring_tier(host_groups)} links: "
            f"{seconds(total_s)} of communication, {seconds(exposed_s)} of it exposed"
            + (f", and {seconds(stages_s)} of {STAGES}" if stages_s else "")
        )
        if host_group.device.kind == "cpu":
            notes.append(_cores_note(link))
    notes += [f"assumed: {sentence}" for sentence in worker.assumptions]
    notes.append(f"time interval: a factor of {1 + margin:.2f} either way, from {worker.evidence} compute rates")
    return tuple(notes)


def _cores_note(link: Link | None) -> str:
    """Describe how much of the computing cores the exchanges over the slowest link take."""
    if link is None or link.core_s_per_nbyte is None:
        return "assumed: communication hidden behind backward takes core time from it"
    return (
        "communication hidden behind backward takes core time from it: "
        f"{link.core_s_per_nbyte * 1e9:.2g} ns a byte (measured)"
    )


def link_note(link: Link) -> str:
    """Describe the constants of the link that a ring uses, with their evidence."""
    return f"link: {seconds(link.latency_s)} latency, {bits_per_s(link.bandwidth_bytes_per_s)} ({link.evidence})"


def allocator_memory(memory: RankMemory, host_group: HostGroup) -> AllocatorMemory | None:
    """Return the memory that torch reports on a GPU; None on a CPU."""
    if host_group.device.kind == "cpu":
        return None
    context = cost_constants.RESERVE_NBYTES["cuda"] - cost_constants.WORKSPACE_NBYTES
    reserved = memory.total - context
    allocated = memory.total - memory.reserve + cost_constants.WORKSPACE_NBYTES

    def within(value: float, margin: float, least: float = 0.0) -> Estimate:
        return Estimate(value=value, low=max(least, value / (1 + margin)), high=value * (1 + margin))

    return AllocatorMemory(
        allocated=within(allocated, cost_constants.ALLOCATED_MARGIN),
        reserved=within(reserved, cost_constants.RESERVED_MARGIN, allocated / (1 + cost_constants.ALLOCATED_MARGIN)),
        context_nbytes=context,
    )


def torch_memory(found: AllocatorMemory) -> str:
    """Format what torch will report, and what it does not count."""
    parts = [
        f"{nbytes(one.value)} {name} ({nbytes(one.low)} to {nbytes(one.high)})"
        for name, one in (("allocated", found.allocated), ("reserved", found.reserved))
    ]
    return f"of it, torch reports {' and '.join(parts)}, and the CUDA context takes {nbytes(found.context_nbytes)}"


def memory_notes(memory: RankMemory, host_group: HostGroup, when: str) -> tuple[str, ...]:
    """Describe how much memory the fullest rank needs, how much it has, and when the peak is."""
    found = allocator_memory(memory, host_group)
    return (
        f"memory: {nbytes(memory.total)} of {nbytes(host_group.memory_nbytes)} for each rank on "
        f"{host_group.device.name}, "
        f"with its peak {when}; assumed: {nbytes(memory.reserve)} of it for the interpreter, libraries and allocator"
        + (f"; measured: {nbytes(memory.script)} for the script's own libraries and data" if memory.script else "")
        + (f"; {torch_memory(found)}" if found is not None else ""),
        *_host_notes(memory, host_group),
    )


def activation_notes(plan: Plan, host_group: HostGroup) -> tuple[str, ...]:
    """Say what is assumed of activations on the host; empty where there are none."""
    if not any(rule.offload for rule in plan.layout) or host_group.device.kind == "cpu":
        return ()
    return (
        f"offload: activations on the host move at {nbytes(1 / load_s_per_nbyte(host_group))}/s in each direction "
        f"while the device computes; those of {cost_constants.SAVED_CALLS} modules are on the device at once",
    )


def _host_notes(memory: RankMemory, host_group: HostGroup) -> tuple[str, ...]:
    """Describe how much of its host's memory and disk a rank's state takes, and what moves it."""
    node = host_group.node
    disk: tuple[str, ...] = ()
    if memory.disk:
        read, write = disk_bytes_per_s(host_group)
        source = "assumed" if node.nvme is None else f"stated for {node.nvme.path}"
        disk = (
            f"offload: {nbytes(memory.disk)} of optimizer state on the disk for each rank, read at {nbytes(read)}/s "
            f"and written at {nbytes(write)}/s ({source}) in each update",
        )
    if not memory.host:
        return disk
    link = "assumed" if node.host_link_bytes_per_s is None else "measured" if node.copy_rates else "stated"
    bandwidth = "assumed" if node.memory_bandwidth_bytes_per_s is None else "stated"
    return (
        *disk,
        f"offload: {nbytes(memory.host)} of the host's memory for each rank, which may fill "
        f"{nbytes(host_limit_nbytes(host_group))}; copies at {nbytes(1 / load_s_per_nbyte(host_group))}/s in each "
        f"direction ({link}), the update on the host at {nbytes(update_bytes_per_s(host_group))}/s ({bandwidth})",
    )


def disturbed(cluster: ClusterSpec) -> tuple[str, ...]:
    """Warn where the cluster was measured while other work ran on it, because rates and choices may then be far
    off.
    """
    conditions = cluster.conditions
    if conditions is None or conditions.load_at_start <= 0.5 * conditions.cores_granted:
        return ()
    return (
        f"{cluster.name} was measured under a load of {conditions.load_at_start:.1f} on "
        f"{count(conditions.cores_granted, 'core')}: its rates may be far too low; measure it again with tutti probe",
    )


def _limit_note(limits: dict[str, float]) -> str:
    """Name the largest cost of a step, and the parts of all costs."""
    total = sum(limits.values())
    if total <= 0:
        return "no predicted cost limits the step"
    ordered = sorted(limits.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{name} {value / total:.0%}" for name, value in ordered if value > 0)
    return f"limited by {ordered[0][0]} ({parts})"

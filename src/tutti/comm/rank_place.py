"""Where a rank is on its host: its device, the cores that it is bound to, and the network interface near it."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from tutti.environment import LaunchOptions, RankEnvironment, choose_interface, visible_entry
from tutti.host_topology import SYS, choose_cores, format_cores, near_cards, network_cards


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where a rank is on its host, in words.

    Attributes:
        device: which device of the host it computes on; empty for CPUs.
        granted: number of cores that it was started with.
        cores: the cores that it uses, such as "0-55,112-167".
        binding: why it uses these cores; empty if nobody asked for a binding.
        network: the network cards near it, and the interface that it uses for that; empty where nothing is known.
    """

    device: str = ""
    granted: int = os.cpu_count() or 1
    cores: str = ""
    binding: str = ""
    network: str = ""


def place_rank(
    environment: RankEnvironment, device: torch.device, options: LaunchOptions, root: Path = SYS
) -> RankPlace:
    """Bind this process to the cores near its device, if the launcher asks for it, and say where it is.

    All threads of the process are bound, and whatever it starts inherits the binding. Without an accelerator, ranks
    are spread over the NUMA nodes. A process that may not use all cores of its host was bound by its launcher, a
    container or the script, and stays as it is.

    Args:
        environment: this process's place among the ranks.
        device: the device on which it computes.
        options: what the launcher asks for.
        root: the folder /sys.
    """
    if not hasattr(os, "sched_setaffinity"):
        return RankPlace(
            device=describe_device(device), binding="not bound: this system cannot" if options.bind_cores else ""
        )
    count = 0 if device.type == "cpu" else torch.accelerator.device_count()
    ranks = environment.local_world_size
    local_rank = min(environment.local_rank, ranks - 1)
    addresses = [pci_address(torch.device(device.type, rank % count)) for rank in range(ranks)] if count else None
    allowed = frozenset(os.sched_getaffinity(0))
    choice = choose_cores(local_rank, ranks, allowed, addresses, root)
    binding = ""
    if options.bind_cores:
        refused = _bind(choice.cores) if choice.cores else ""
        binding = (
            f"bound: {choice.reason}" if choice.cores and not refused else f"not bound: {refused or choice.reason}"
        )
        if choice.cores and not refused and count >= ranks and not options.threads_stated:
            torch.set_num_threads(min(torch.get_num_threads(), max(1, len(choice.cores) // choice.ranks)))
    near, interface = near_cards(choice.node, root), choose_interface(network_cards(root), choice.node)
    return RankPlace(
        device=describe_device(device),
        granted=len(allowed),
        cores=format_cores(frozenset(os.sched_getaffinity(0))),
        binding=binding,
        network=", ".join(part for part in (near, f"Gloo uses {interface}" if interface else "") if part),
    )


def _bind(cores: frozenset[int]) -> str:
    """Bind all threads of this process; return why that was not possible, or an empty text."""
    try:
        os.sched_setaffinity(0, cores)
        for task in Path("/proc/self/task").glob("*"):
            try:
                os.sched_setaffinity(int(task.name), cores)
            except ProcessLookupError:  # the thread has ended
                continue
    except OSError as error:
        return f"the system refuses it ({error.strerror})"
    return ""


def pci_address(device: torch.device) -> str:
    """Return an accelerator's PCI address, such as "0000:07:00.0"; empty where torch does not tell."""
    bus = getattr(properties := _properties(device), "pci_bus_id", None)
    if bus is None:
        return ""
    return f"{getattr(properties, 'pci_domain_id', 0):04x}:{bus:02x}:{getattr(properties, 'pci_device_id', 0):02x}.0"


def _properties(device: torch.device) -> object:
    read = getattr(torch.get_device_module(device), "get_device_properties", None)
    return None if read is None else read(device)


def describe_device(device: torch.device) -> str:
    """Return which device of the host an accelerator is, by the variables that choose devices, UUID and PCI address."""
    if device.type == "cpu":
        return ""
    uuid = getattr(_properties(device), "uuid", None)
    address = pci_address(device)
    entry = visible_entry(device.type, device.index or 0, rocm=torch.version.hip is not None)
    words = [str(device), entry, f"UUID {uuid}" if uuid else "", f"PCI {address}" if address else ""]
    return ", ".join(word for word in words if word)

"""Where a host's cores, devices and network cards are, as Linux says it in /sys; which cores a rank should use."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

SYS = Path("/sys")


def parse_cores(text: str) -> frozenset[int]:
    """Return the cores of a list such as "0-3,8".

    Examples:
        >>> sorted(parse_cores("0-3,8"))
        [0, 1, 2, 3, 8]
    """
    cores: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.strip().isdigit():
            cores |= set(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def format_cores(cores: frozenset[int]) -> str:
    """Return cores as a list of ranges.

    Examples:
        >>> format_cores(frozenset({0, 1, 2, 3, 8}))
        '0-3,8'
    """
    ranges: list[list[int]] = []
    for core in sorted(cores):
        if ranges and core == ranges[-1][1] + 1:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def online_cores(root: Path = SYS) -> frozenset[int]:
    """Return the cores of the host that are switched on; empty if the system does not say."""
    return parse_cores(_text(root / "devices/system/cpu/online"))


def numa_nodes(root: Path = SYS) -> dict[int, frozenset[int]]:
    """Return the cores of each NUMA node that has any."""
    nodes: dict[int, frozenset[int]] = {}
    for folder in (root / "devices/system/node").glob("node*"):
        if folder.name[4:].isdigit() and (cores := parse_cores(_text(folder / "cpulist"))):
            nodes[int(folder.name[4:])] = cores
    return dict(sorted(nodes.items()))


def pci_node(address: str, root: Path = SYS) -> int | None:
    """Return the NUMA node that a PCI device hangs on; None if the system does not say.

    Args:
        address: such as "0000:07:00.0"; empty if it is not known.
        root: the folder /sys.
    """
    return _node(root / "bus/pci/devices" / address) if address else None


def network_cards(root: Path = SYS) -> dict[str, int | None]:
    """Return the NUMA node of each network card: RDMA devices and network interfaces that are devices of the host."""
    folders = [path for kind in ("infiniband", "net") for path in sorted((root / "class" / kind).glob("*"))]
    return {path.name: _node(path / "device") for path in folders if (path / "device").exists()}


def _node(folder: Path) -> int | None:
    number = _text(folder / "numa_node")
    return int(number) if number.isdigit() else None  # -1 where the firmware does not say


def _text(path: Path) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="ascii").strip()
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreChoice:
    """The cores that a rank should use.

    Attributes:
        cores: the cores; empty if the rank keeps those that it has.
        node: the NUMA node of its device, or of all these cores; None if it has none.
        ranks: ranks of the host whose devices hang on this node; 0 on CPUs.
        reason: why it should use these cores, or why it keeps those that it has.
    """

    cores: frozenset[int] = field(default_factory=frozenset)
    node: int | None = None
    ranks: int = 0
    reason: str


def choose_cores(
    local_rank: int, ranks: int, allowed: frozenset[int], addresses: Sequence[str] | None, root: Path = SYS
) -> CoreChoice:
    """Return the cores for a rank: those near its device, or on CPUs its part of the host's NUMA nodes.

    Ranks on CPUs take equal, consecutive parts of the cores in the order of nodes. Each is bound to the nodes that its
    part touches, so no node gets more ranks than its cores are for.

    Args:
        local_rank: the rank's number on its host.
        ranks: number of ranks on the host.
        allowed: the cores that the process may use.
        addresses: PCI address of the device of each local rank, empty where it is unknown; None on CPUs.
        root: the folder /sys.
    """
    devices = None if addresses is None else [pci_node(address, root) for address in addresses]
    near = None if devices is None else devices[local_rank]
    online, nodes = online_cores(root), numa_nodes(root)
    if len(nodes) < 2:
        return CoreChoice(node=near, reason="the host has one NUMA node" if nodes else "the system tells no NUMA nodes")
    if allowed != online:
        given = f"the launcher or the system gave it {len(allowed)} of {len(online)} cores"
        return CoreChoice(node=near, reason=f"{given}, which it keeps")
    if devices is None:
        return _part_of_nodes(local_rank, ranks, nodes)
    if near is None or near not in nodes:
        return CoreChoice(reason="the system does not tell which NUMA node its device hangs on")
    return CoreChoice(
        cores=nodes[near], node=near, ranks=devices.count(near), reason=f"NUMA node {near}, on which its device hangs"
    )


def _part_of_nodes(local_rank: int, ranks: int, nodes: dict[int, frozenset[int]]) -> CoreChoice:
    order = [node for node, cores in nodes.items() for _ in cores]
    first, end = local_rank * len(order) // ranks, (local_rank + 1) * len(order) // ranks
    touched = sorted(set(order[first : max(end, first + 1)]))
    if len(touched) == len(nodes):
        return CoreChoice(reason=f"its share of the cores reaches over all {len(nodes)} NUMA nodes")
    cores = frozenset().union(*(nodes[node] for node in touched))
    numbers = " and ".join(map(str, touched))
    reason = f"NUMA node{'s' if len(touched) > 1 else ''} {numbers}, its share of {len(nodes)}"
    return CoreChoice(cores=cores, node=touched[0] if len(touched) == 1 else None, reason=reason)


def near_cards(node: int | None, root: Path = SYS) -> str:
    """Return which network cards are on a NUMA node, or that none is, as a phrase; empty where nothing is known."""
    cards = network_cards(root)
    known = {name: place for name, place in cards.items() if place is not None}
    if node is None or not known:
        return ""
    near = [name for name, place in known.items() if place == node]
    if near:
        return f"near {', '.join(near)}"
    return f"no network card is on NUMA node {node} (" + ", ".join(f"{n} is on {p}" for n, p in known.items()) + ")"

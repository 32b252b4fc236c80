"""The cluster of a row: its device and links from the catalog, by what the row prints."""

import re
from dataclasses import replace
from functools import cache

from tutti.config.cluster import ClusterSpec, DeviceSpec, LinkSpec, NodeSpec
from tutti.profile.catalog import device, parts
from tutti.validate.rows import Row, Uncosted

_GPUS = (
    ("GB300", "GB300-278GB"),
    ("GB200", "GB200-186GB"),
    ("B300", "B300-SXM-270GB"),
    ("B200", "B200-SXM-180GB"),
    ("H200", "H200-SXM-141GB"),
    ("H100.*HBM2E", "H100-SXM5-96GB-HBM2e"),
    ("H100", "H100-SXM5-80GB"),
    ("A100.*40", "A100-SXM4-40GB"),
    ("A100", "A100-SXM4-80GB"),
    ("V100.*16|P3\\.8XLARGE|DGX-1 16G", "V100-SXM2-16GB"),
    ("V100|DGX-[12]", "V100-SXM2-32GB"),
    ("P100", "P100-SXM2-16GB"),
    ("K80", "K80"),
    ("T4|G4DN", "T4"),
)
"""Patterns of printed names, the first that fits, and the device of the catalog."""

_NODE_LINKS = {"K80": "PCIe3-x16", "P100": "NVLink1", "V100": "NVLink2", "T4": "PCIe3-x16", "A100": "NVLink3",
               "H100": "NVLink4", "H200": "NVLink4", "B": "NVLink5", "GB": "NVLink5"}  # fmt: skip
_NETWORKS = {"V100": 50e9, "A100": 200e9, "H100": 400e9, "H200": 400e9, "B": 400e9, "GB": 400e9}
"""A node's connection where a row prints none, bytes/s: of DGX-1 and DGX-2 4 and 8 EDR ports (the lower is taken), of
DGX A100 8 HDR, of DGX H100 and later 8 NDR."""

_RACK = 64
"""GPUs that one NVLink domain of a GB200 or GB300 rack gives to a job of a power of two."""

_JOINED = re.compile(r"\+|,|;|&|\band\b")
"""Between the nodes of different kinds that one job ran on."""

_RATE = re.compile(r"(?:(\d+)\s*x\s*)?(\d+)\s*Gb(?:ps|/s)\s*(per GPU)?", re.IGNORECASE)


def catalog_name(gpu: str) -> str:
    """The catalog's name of a printed device. Raises Uncosted for one that is not there."""
    for pattern, name in _GPUS:
        if re.search(pattern, gpu.upper()):
            return name
    raise Uncosted(f"device {gpu!r} is not in the catalog")


@cache
def _part(name: str) -> DeviceSpec:
    return device(name)


def cluster_of(row: Row) -> ClusterSpec:
    """The machines of a row, from data sheets. Raises Uncosted where they cannot be told."""
    gpus = row.gpus
    groups = _groups(row.text("gpu"))
    if groups:
        return _mixed(row, groups)
    name = catalog_name(row.text("gpu"))
    usual = _RACK if name.startswith("GB") else 8
    each = min(gpus, row.whole("gpus_per_node", usual))
    nodes = -(-gpus // each)
    part = _part(name)
    return ClusterSpec(
        name=f"{nodes} x {each} {part.name}",
        devices={part.name: part},
        nodes=(NodeSpec(name="node", device=part.name, devices_per_node=each, count=nodes,
                        memory_nbytes=each * part.memory_nbytes),),
        links=_links(row, name, each, nodes),
    )  # fmt: skip


def _groups(gpu: str) -> list[tuple[str, int]]:
    """(device, nodes) of each kind of nodes that a row joins, such as `1x p3.8xlarge(4xV100) + 3x g4dn.12xlarge(4xT4)`;
    empty where it names one kind. A kind without a number is one node.
    """
    found = []
    for part in _JOINED.split(gpu):
        try:
            name = catalog_name(part)
        except Uncosted:
            continue
        count = re.match(r"\s*(\d+)\s*x", part)
        found.append((name, int(count[1]) if count else 1))
    return found if len(found) > 1 else []


def _mixed(row: Row, groups: list[tuple[str, int]]) -> ClusterSpec:
    each = row.whole("gpus_per_node", 4)
    if each * sum(count for _, count in groups) != row.gpus:
        raise Uncosted("the nodes of mixed devices do not add up to n_gpus")
    links = [link for name, count in groups for link in _links(row, name, each, max(2, count))]
    links.sort(key=lambda link: (link.tier != "node", link.bandwidth_bytes_per_s))
    return ClusterSpec(
        name=row.text("gpu"),
        devices={_part(name).name: _part(name) for name, _ in groups},
        nodes=tuple(
            NodeSpec(name=f"node{index}", device=_part(name).name, devices_per_node=each, count=count,
                     memory_nbytes=each * _part(name).memory_nbytes)
            for index, (name, count) in enumerate(groups)
        ),
        links=tuple(links),
    )  # fmt: skip


def _links(row: Row, name: str, each: int, nodes: int) -> tuple[LinkSpec, ...]:
    links = []
    family = re.match(r"GB|B|[A-Z]+\d+", name)
    key = family[0] if family else name
    if each > 1:
        inner = parts().links[_NODE_LINKS[key]]
        printed = _printed(row.text("intra_net"), name)
        if printed and "NVLink" not in row.text("intra_net"):
            inner = replace(inner, bandwidth_bytes_per_s=printed, source=f"printed: {row.text('intra_net')}")
        links.append(inner)
    if nodes > 1:
        text = row.text("inter_net")
        rate = (_printed(text, name) or 0.0) * (each if "per GPU" in text else 1) or _NETWORKS.get(key)
        if not rate:
            raise Uncosted("the network between nodes is not printed")
        slow = rate < 12e9
        base = parts().links["Ethernet-25G" if slow else "InfiniBand-HDR-200"]
        links.append(
            replace(base, bandwidth_bytes_per_s=rate, evidence="published" if text else "assumed",
                    source=f"printed: {text}" if text else "usual of its kind; not printed")
        )  # fmt: skip
    return tuple(links)


def _printed(text: str, name: str) -> float | None:
    """Bytes/s of a printed rate in Gbit/s, all ports together; of several, the one marked with the device's cloud."""
    found = list(_RATE.finditer(text))
    if not found:
        return None
    mark = "(P3)" if name.startswith("V100") else "(G4)"
    match = next((each for each in found if text[each.end() :].lstrip().startswith(mark)), found[0])
    return int(match[1] or 1) * int(match[2]) * 1e9 / 8

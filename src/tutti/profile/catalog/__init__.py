"""Known devices and links from their data sheets, and clusters composed of them.

Each JSON file beside this one holds parts by name. To add a device, add an entry with its source; peaks are dense
rates, never those with sparsity.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources

from tutti.config import serialization
from tutti.config.cluster import ClusterSpec, DeviceSpec, LinkSpec, LinkTier, NodeSpec
from tutti.errors import SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogParts:
    """Devices and links by name."""

    devices: dict[str, DeviceSpec] = field(default_factory=dict)
    links: dict[str, LinkSpec] = field(default_factory=dict)


@cache
def parts() -> CatalogParts:
    """Return all parts that ship with tutti.

    Raises:
        SpecError: two files use one name.
    """
    devices: dict[str, DeviceSpec] = {}
    links: dict[str, LinkSpec] = {}
    for file in sorted(resources.files(__package__).iterdir(), key=lambda file: file.name):
        if not file.name.endswith(".json"):
            continue
        read = serialization.loads(CatalogParts, file.read_text(encoding="utf-8"), source=file.name)
        for name in (devices.keys() & read.devices.keys()) | (links.keys() & read.links.keys()):
            raise SpecError(f"{file.name}: {name!r} is in another catalog file too; keep one of them")
        devices |= read.devices
        links |= read.links
    return CatalogParts(devices=devices, links=links)


def device(name: str) -> DeviceSpec:
    """Return the device of that name, in upper or lower case.

    Raises:
        SpecError: there is none; the message has the nearest names.
    """
    return parts().devices[_find(name, parts().devices, "device")]


_VENDORS = frozenset({"nvidia", "amd", "tesla", "geforce", "instinct", "gpu"})


def devices_called(text: str) -> list[DeviceSpec]:
    """Return the devices that a cluster may mean by its name of a kind of GPU, the one of least memory and peak first.

    Args:
        text: such as "a100", "nvidia_h100_80gb" or "rtx_4090"; every part of it but the vendor's has to be one of the
            device's name.

    Examples:
        >>> [device.name for device in devices_called("tesla_v100-sxm2")]
        ['NVIDIA Tesla V100 SXM2 16 GB', 'NVIDIA Tesla V100 SXM2 32 GB']
    """
    asked = [re.sub(r"^(\d+)g$", r"\1gb", part) for part in re.split(r"[^a-z0-9]+", text.lower()) if part]
    asked = [part for part in asked if part not in _VENDORS]
    found = [
        spec
        for name, spec in parts().devices.items()
        if asked and set(asked) <= {*re.split(r"[^a-z0-9]+", name.lower()), name.lower()}
    ]
    return sorted(found, key=lambda spec: (spec.memory_nbytes, max(spec.peak_flops_per_s.values())))


def link(name: str, tier: LinkTier) -> LinkSpec:
    """Return the link of that name.

    Raises:
        SpecError: there is none; the message has the nearest names of that tier.
    """
    of_tier = {key: value for key, value in parts().links.items() if value.tier == tier}
    return of_tier[_find(name, of_tier, f"{tier} link")]


def cluster_from_parts(
    name: str,
    device_name: str,
    *,
    devices_per_node: int = 1,
    nodes: int = 1,
    node_link: str | None = None,
    network: str | None = None,
    network_ports: int = 1,
    node_memory_nbytes: int | None = None,
    host_link: str | None = None,
) -> ClusterSpec:
    """Compose a cluster of equal nodes.

    Args:
        name: name of the cluster.
        device_name: name of the device in the catalog.
        devices_per_node: devices in each node.
        nodes: number of nodes.
        node_link: joins the devices of a node.
        network: joins the nodes.
        network_ports: number of ports of the network on each node.
        node_memory_nbytes: memory of the host; by default as much as its devices have together.
        host_link: joins each device and its host, for offload; None where it is not known.

    Raises:
        SpecError: a name is unknown, or a link is missing.
    """
    part = device(device_name)
    if min(devices_per_node, nodes, network_ports) < 1:
        raise SpecError(
            f"devices per node = {devices_per_node}, nodes = {nodes}, network ports = {network_ports}; "
            "give a number of 1 or more for each"
        )
    links = []
    if devices_per_node > 1:
        links.append(_joined(node_link, "node", f"{devices_per_node} devices in a node"))
    if nodes > 1:
        links.append(with_ports(_joined(network, "network", f"{nodes} nodes"), network_ports))
    return ClusterSpec(
        name=name,
        devices={part.name: part},
        nodes=(
            NodeSpec(
                name="node",
                device=part.name,
                devices_per_node=devices_per_node,
                count=nodes,
                memory_nbytes=node_memory_nbytes or devices_per_node * part.memory_nbytes,
                host_link_bytes_per_s=None if host_link is None else _copy_bytes_per_s(host_link),
            ),
        ),
        links=tuple(links),
    )


HOST_LINK_PART = 0.8
"""The part of a host link's bandwidth that copies of pinned memory reach, after packet headers."""


def _copy_bytes_per_s(host_link: str) -> float:
    return HOST_LINK_PART * link(host_link, "node").bandwidth_bytes_per_s


def _joined(name: str | None, tier: LinkTier, what: str) -> LinkSpec:
    if name is None:
        known = ", ".join(key for key, value in parts().links.items() if value.tier == tier)
        raise SpecError(f"{what} need a {tier} link between them; name one of: {known}")
    return link(name, tier)


def with_ports(part: LinkSpec, ports: int) -> LinkSpec:
    """Return the connection of a node with several ports, whose bandwidths add up."""
    if ports == 1:
        return part
    bandwidth = ports * part.bandwidth_bytes_per_s
    return replace(part, bandwidth_bytes_per_s=bandwidth, source=f"{ports} ports of: {part.source}")


def _find(name: str, known: Mapping[str, object], what: str) -> str:
    """Return the key that equals `name` in upper or lower case; raise SpecError if there is none."""
    for key in known:
        if key.lower() == name.lower():
            return key
    lowered = {key.lower(): key for key in known}
    near = [key for key in known if name.lower() in key.lower()]
    near += [lowered[key] for key in difflib.get_close_matches(name.lower(), lowered, n=4, cutoff=0.4)]
    nearest = list(dict.fromkeys(near))[:6] or list(known)
    raise SpecError(f"there is no {what} {name!r} in the catalog; the nearest are {', '.join(nearest)}")


__all__ = ["CatalogParts", "cluster_from_parts", "device", "devices_called", "link", "parts", "with_ports"]

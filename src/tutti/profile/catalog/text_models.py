"""A cluster in one line: `4x8:a100-80gb,nvlink3,8*ib-hdr`, nodes x devices of the catalog and the links between them.

Groups of different nodes are joined by `+`, each with its own links:
`2x8:a100-80gb,nvlink3+4x4:v100-32gb,nvlink2,ib-edr`. A group without a link of a tier takes that of the next group. A
link may have a number of ports before it. Unambiguous parts of a name are enough: `a100-80gb` is A100-SXM4-80GB.
"""

import re
from dataclasses import replace

from tutti.config.cluster import ClusterSpec, DeviceSpec, LinkSpec, LinkTier, NodeSpec
from tutti.errors import SpecError
from tutti.profile.catalog import CatalogParts, parts, with_ports

_GROUP = re.compile(r"(\d+)x(\d+):(.+)", re.IGNORECASE)
_ALIASES = {"ib": "infiniband", "eth": "ethernet", "opa": "omni"}
_HELP = "write NODESxDEVICES:DEVICE,LINK,..., such as 4x8:a100-80gb,nvlink3,8*ib-hdr"


def is_cluster_text(text: str) -> bool:
    """Return whether a text looks like a description of a cluster rather than the name of a file."""
    return _GROUP.match(text) is not None


def cluster_from_text(text: str) -> ClusterSpec:
    """Return the cluster that a text describes.

    Raises:
        SpecError: the text cannot be parsed; the message says how to write it.
    """
    known = parts()
    nodes: list[NodeSpec] = []
    stated: list[list[LinkSpec]] = []
    devices: dict[str, DeviceSpec] = {}
    for index, group in enumerate(text.split("+")):
        match = _GROUP.fullmatch(group.strip())
        if match is None:
            raise SpecError(f"{group!r} is not a group of nodes; {_HELP}")
        count, per_node, rest = int(match[1]), int(match[2]), [part.strip() for part in match[3].split(",")]
        if min(count, per_node) < 1:
            raise SpecError(f"{group!r}: {count} nodes of {per_node} devices; give 1 or more of each")
        device = known.devices[_nearest(rest[0], [*known.devices], "device")]
        devices[device.name] = device
        stated.append([_link(known, part) for part in rest[1:]])
        nodes.append(
            NodeSpec(
                name=f"node{index}",
                device=device.name,
                devices_per_node=per_node,
                count=count,
                memory_nbytes=per_node * device.memory_nbytes,
            )
        )
    # A collective over all ranks waits for the slowest of several kinds of links.
    links = [link for group_links in stated for link in group_links]
    links.sort(key=lambda link: (link.tier != "node", link.bandwidth_bytes_per_s))
    _check(text, nodes, links, known)
    if len(nodes) > 1:
        nodes = [replace(node, links=node_links) for node, node_links in zip(nodes, _each(stated), strict=True)]
    return ClusterSpec(name=text, devices=devices, nodes=tuple(nodes), links=tuple(links))


def links_from_text(text: str) -> tuple[LinkSpec, ...]:
    """Return the links that a text names, such as "nvlink3,8*ib-hdr".

    Raises:
        SpecError: one is not in the catalogue.
    """
    known = parts()
    return tuple(_link(known, part.strip()) for part in text.split(",") if part.strip())


def _each(stated: list[list[LinkSpec]]) -> list[tuple[LinkSpec, ...]]:
    """Return the links of each group of nodes.

    A tier without a link takes that of the next group that has one, or else of the last one before. Appending a group
    thus changes nothing for complete groups.
    """
    tiers: tuple[LinkTier, ...] = ("node", "network")
    result: list[tuple[LinkSpec, ...]] = []
    for index in range(len(stated)):
        nearest = [*stated[index:], *stated[:index][::-1]]
        per_tier = [
            next((tier_links for group_links in nearest if (tier_links := _of(group_links, tier))), ())
            for tier in tiers
        ]
        result.append((*per_tier[0], *per_tier[1]))
    return result


def _of(links: list[LinkSpec], tier: LinkTier) -> tuple[LinkSpec, ...]:
    return tuple(sorted((link for link in links if link.tier == tier), key=lambda link: link.bandwidth_bytes_per_s))


def _check(text: str, nodes: list[NodeSpec], links: list[LinkSpec], known: CatalogParts) -> None:
    tiers = {link.tier for link in links}
    for tier, needed in (
        ("node", max(node.devices_per_node for node in nodes) > 1),
        ("network", sum(node.count for node in nodes) > 1),
    ):
        if needed and tier not in tiers:
            names = ", ".join(name for name, link in known.links.items() if link.tier == tier)
            raise SpecError(f"{text!r} has no {tier} link; add one of: {names}")


def _link(known: CatalogParts, text: str) -> LinkSpec:
    ports, star, name = text.partition("*")
    if not star:
        return known.links[_nearest(text, [*known.links], "link")]
    if not ports.strip().isdecimal() or int(ports) < 1:
        raise SpecError(f"{text!r} is not a number of ports and a link; write for example 8*ib-hdr")
    return with_ports(known.links[_nearest(name, [*known.links], "link")], int(ports))


def _nearest(text: str, names: list[str], what: str) -> str:
    """Return the first name that contains all parts of `text`; of several, one with SXM in it (usual in servers)."""
    asked = [_ALIASES.get(part, part) for part in _parts_of(text)]
    matching = [name for name in names if asked and all(_has(name, part) for part in asked)]
    exact = [name for name in matching if len(_parts_of(name)) == len(asked)]
    if not matching:
        near = [name for name in names if any(_has(name, part) for part in asked)]
        raise SpecError(f"there is no {what} {text!r} in the catalog; it has {', '.join(near or names)}")
    return (exact or sorted(matching, key=lambda name: "SXM" not in name))[0]


def _parts_of(text: str) -> list[str]:
    return [part for part in re.split(r"[^a-z0-9]+", text.strip().lower()) if part]


def _has(name: str, part: str) -> bool:
    return any(name_part == part or (len(part) > 2 and name_part.startswith(part)) for name_part in _parts_of(name))

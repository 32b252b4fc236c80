"""A cluster in one line: `4x8:a100-80gb,nvlink3,8*ib-hdr`, nodes x devices of the catalog and the links between them.

Groups of different nodes are joined by `+`, each with its own links or, for a tier without one, those of the next
group: `2x8:a100-80gb,nvlink3+4x4:v100-32gb,nvlink2,ib-edr`. A link may have a number of ports before it. Unambiguous
parts of a name are enough: `a100-80gb` is A100-SXM4-80GB.
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
    """Whether a text looks like a description of a cluster rather than the name of a file."""
    return _GROUP.match(text) is not None


def cluster_from_text(text: str) -> ClusterSpec:
    """The cluster that a text describes. Raises SpecError with the remedy where it cannot be parsed."""
    known = parts()
    nodes: list[NodeSpec] = []
    stated: list[list[LinkSpec]] = []
    devices: dict[str, DeviceSpec] = {}
    for index, group in enumerate(text.split("+")):
        match = _GROUP.fullmatch(group.strip())
        if match is None:
            raise SpecError(f"{group!r} is not a group of nodes; {_HELP}")
        count, each, rest = int(match[1]), int(match[2]), [part.strip() for part in match[3].split(",")]
        if min(count, each) < 1:
            raise SpecError(f"{group!r}: {count} nodes of {each} devices; give 1 or more of each")
        device = known.devices[_nearest(rest[0], [*known.devices], "device")]
        devices[device.name] = device
        stated.append([_link(known, part) for part in rest[1:]])
        nodes.append(
            NodeSpec(
                name=f"node{index}",
                device=device.name,
                devices_per_node=each,
                count=count,
                memory_nbytes=each * device.memory_nbytes,
            )
        )
    # Of several kinds of links the slowest is what a collective over all ranks waits for.
    links = [link for some in stated for link in some]
    links.sort(key=lambda link: (link.tier != "node", link.bandwidth_bytes_per_s))
    _check(text, nodes, links, known)
    if len(nodes) > 1:
        nodes = [replace(node, links=own) for node, own in zip(nodes, _each(stated), strict=True)]
    return ClusterSpec(name=text, devices=devices, nodes=tuple(nodes), links=tuple(links))


def _each(stated: list[list[LinkSpec]]) -> list[tuple[LinkSpec, ...]]:
    """The links of each group of nodes. A tier without one takes that of the next group that has one, or else of the
    last one before, so that appending a group changes nothing for complete groups.
    """
    tiers: tuple[LinkTier, ...] = ("node", "network")
    found: list[tuple[LinkSpec, ...]] = []
    for index in range(len(stated)):
        nearest = [*stated[index:], *stated[:index][::-1]]
        own = [next((some for one in nearest if (some := _of(one, tier))), ()) for tier in tiers]
        found.append((*own[0], *own[1]))
    return found


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
        raise SpecError(f"{text!r} is not a number of ports and a link; write such as 8*ib-hdr")
    return with_ports(known.links[_nearest(name, [*known.links], "link")], int(ports))


def _nearest(text: str, names: list[str], what: str) -> str:
    """The first name that contains all parts of `text`; of several, one with SXM in it (the usual form in servers)."""
    asked = [_ALIASES.get(part, part) for part in _parts_of(text)]
    found = [name for name in names if asked and all(_has(name, part) for part in asked)]
    exact = [name for name in found if len(_parts_of(name)) == len(asked)]
    if not found:
        near = [name for name in names if any(_has(name, part) for part in asked)]
        raise SpecError(f"there is no {what} {text!r} in the catalog; it has {', '.join(near or names)}")
    return (exact or sorted(found, key=lambda name: "SXM" not in name))[0]


def _parts_of(text: str) -> list[str]:
    return [part for part in re.split(r"[^a-z0-9]+", text.strip().lower()) if part]


def _has(name: str, part: str) -> bool:
    return any(own == part or (len(part) > 2 and own.startswith(part)) for own in _parts_of(name))

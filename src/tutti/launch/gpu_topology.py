"""How GPUs are linked, as `nvidia-smi` says it: NVLink, PCIe and NUMA distances, peer access, near network cards."""

import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

Ask = Callable[..., str | None]
"""Returns what `nvidia-smi` prints for its arguments; None where it is absent or fails."""


def ask_nvidia_smi(*arguments: str) -> str | None:
    """Return what `nvidia-smi` prints for its arguments; None where it is absent or fails."""
    try:
        run = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout


NEAR = ("PIX", "PXB")
"""Links over PCIe bridges alone, without the processor's host bridge."""

_LINK = re.compile(r"X|NV\d+|PIX|PXB|PHB|NODE|SYS|SOC")
_PEER = re.compile(r"X|OK|CNS|GNS|TNS|NS|DR|U")
PEER_REASONS = {
    "CNS": "the chipset does not support it",
    "GNS": "the GPU does not support it",
    "TNS": "the topology does not support it",
    "NS": "it is not supported",
    "DR": "a driver setting disables it",
    "U": "the reason is unknown",
}
"""Why peers have no access to each other's memory, by the word of `nvidia-smi topo -p2p`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTopology:
    """The table of `nvidia-smi topo -m`.

    Attributes:
        links: (GPU, GPU) -> kind of link, such as "NV18" or "PHB"; both orders.
        nics: (GPU, network card) -> kind of link. Cards have the names of RDMA devices where the table tells them.
        cores: GPU -> its near CPU cores, as a list such as "0-55,112-167".
    """

    links: dict[tuple[int, int], str]
    nics: dict[tuple[int, str], str]
    cores: dict[int, str]


def parse_topology(text: str) -> GpuTopology:
    """Read the output of `nvidia-smi topo -m`; of lines that are none of its table, nothing is taken.

    Args:
        text: the output, with columns apart by tabs or spaces.
    """
    names = dict(re.findall(r"^\s+(NIC\d+): (\S+)\s*$", text, re.MULTILINE))
    columns: list[str] = []
    links: dict[tuple[int, int], str] = {}
    nics: dict[tuple[int, str], str] = {}
    cores: dict[int, str] = {}
    for line in text.splitlines():
        words = line.split()
        if not columns and words[:1] == ["GPU0"] and "Affinity" in line:
            columns = words[: words.index("CPU")]
            continue
        kinds = words[1 : 1 + len(columns)]
        if not columns or not re.fullmatch(r"GPU\d+", words[0] if words else "") or len(kinds) < len(columns):
            continue
        gpu = int(words[0][3:])
        if not all(_LINK.fullmatch(kind) for kind in kinds):
            continue
        for column, kind in zip(columns, kinds, strict=True):
            if not column.startswith("GPU"):
                nics[gpu, names.get(column, column)] = kind
            elif kind != "X":
                links[gpu, int(column[3:])] = links[int(column[3:]), gpu] = kind
        rest = words[1 + len(columns) :]
        if rest and re.fullmatch(r"[\d,-]+", rest[0]):
            cores[gpu] = rest[0]
    return GpuTopology(links=links, nics=nics, cores=cores)


def parse_peers(text: str) -> dict[tuple[int, int], str]:
    """Read the output of `nvidia-smi topo -p2p r`: (GPU, GPU) -> "OK", or a word of `PEER_REASONS`."""
    peers: dict[tuple[int, int], str] = {}
    for line in text.splitlines():
        words = line.split()
        if words and re.fullmatch(r"GPU\d+", words[0]) and all(_PEER.fullmatch(word) for word in words[1:]):
            gpu = int(words[0][3:])
            peers |= {(gpu, other): word for other, word in enumerate(words[1:]) if word != "X"}
    return peers


def inactive_links(text: str) -> dict[int, list[int]]:
    """Read the output of `nvidia-smi nvlink -s`: GPU -> its links that are down, while others of it are up."""
    states: dict[int, dict[int, bool]] = {}
    gpu = -1
    for line in text.splitlines():
        if match := re.match(r"\s*GPU (\d+):", line):
            gpu = int(match[1])
        elif match := re.match(r"\s*Link (\d+): (.+)", line):
            states.setdefault(gpu, {})[int(match[1])] = "inactive" not in match[2]
    down = {gpu: [link for link, up in links.items() if not up] for gpu, links in states.items() if any(links.values())}
    return {gpu: links for gpu, links in down.items() if links}


def describe(topology: GpuTopology) -> str:
    """Return how the GPUs are linked, and which network cards are near which GPU, as a phrase."""
    pairs: dict[str, list[str]] = {}
    for (a, b), kind in sorted(topology.links.items()):
        if a < b:
            pairs.setdefault(kind, []).append(f"{a}-{b}")
    if not pairs:
        return "one GPU, linked to no other"
    words = [_link_words(kind) + (f" ({', '.join(which)})" if len(pairs) > 1 else "") for kind, which in pairs.items()]
    near: dict[str, list[int]] = {}
    for (gpu, nic), kind in sorted(topology.nics.items()):
        if kind in NEAR:
            near.setdefault(nic, []).append(gpu)
    cards = [f"{nic} near GPU {', '.join(map(str, gpus))}" for nic, gpus in near.items()]
    return "; ".join([*words, *cards])


def _link_words(kind: str) -> str:
    """Return what a kind of link means."""
    if kind.startswith("NV"):
        return f"{kind[2:]} NVLinks between GPUs"
    return {
        "PIX": "PIX: one PCIe bridge between GPUs",
        "PXB": "PXB: several PCIe bridges between GPUs",
        "PHB": "PHB: the processor's PCIe host bridge between GPUs",
        "NODE": "NODE: several PCIe host bridges of one NUMA node between GPUs",
    }.get(kind, "SYS: the link between NUMA nodes between GPUs")

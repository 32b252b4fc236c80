"""Checks that find what would stop a launch, without launching the user's script. A failed check names the fix."""

import json
import platform
import re
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

import tutti.network_interfaces as network_interfaces
from tutti.errors import TuttiError
from tutti.host_topology import SYS
from tutti.launch import gpu_topology, host_checks, network, visible_devices
from tutti.launch.doctor_finding import Finding, bad, good, refused
from tutti.launch.failure import sentence
from tutti.launch.gpu_topology import Ask, ask_nvidia_smi
from tutti.launch.launch_environment import (
    communication_variables,
    device_variables,
    granted_cores,
    library_path,
    threads_per_rank,
)
from tutti.launch.launcher import LaunchSpec
from tutti.launch.local_launcher import LocalLauncher
from tutti.launch.rank_watch import Silent
from tutti.launch.script_path import check_script
from tutti.launch.supervisor import interrupts, supervise
from tutti.network_interfaces import local_addresses, resolve

RENDEZVOUS_TIMEOUT_S = 20.0
NODES_TIMEOUT_S = 120.0
"""Seconds that the doctors of several nodes wait for each other."""
RANK_NBYTES = 350 * 2**20
"""Memory that a rank takes before it has a model: the interpreter and torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The results of all checks. `ok`: nothing would stop a launch."""

    ok: bool
    findings: tuple[Finding, ...]


def python() -> Finding:
    """Report which Python this is. With an unsupported version tutti would not have started."""
    return good("python", f"{platform.python_version()} at {sys.executable}")


def torch() -> Finding:
    """Check that PyTorch is installed and new enough, without importing it here."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return bad("torch", "not installed", "pip install torch")
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) < (2, 13):
        return bad("torch", version, "pip install --upgrade 'torch>=2.13'")
    return good("torch", version)


def host_name() -> Finding:
    """Check that this host's own name resolves to an address."""
    name = socket.gethostname()
    try:
        addresses = resolve(name)
    except TuttiError:
        return bad("host name", f"{name} has no address", f"add the line `127.0.1.1 {name}` to /etc/hosts")
    return good("host name", f"{name} is {', '.join(addresses)}")


def loopback() -> Finding:
    """Check that the interface over which ranks of one host communicate exists and is up."""
    name = network_interfaces.loopback()
    stats = psutil.net_if_stats()
    if name is None:
        return bad("loopback", "no interface has 127.0.0.1", "ip addr add 127.0.0.1/8 dev lo; ip link set lo up")
    if name in stats and not stats[name].isup:
        return bad("loopback", f"{name} is down", f"ip link set {name} up")
    return good("loopback", f"{name} is up")


def cores(nproc: int) -> Finding:
    """Report how many cores the ranks share. Too few make them slow but stop nothing."""
    granted = granted_cores()
    if nproc > granted:
        return good(
            "cores", f"{granted} for {nproc} ranks: results are the same as with {granted} ranks, but no sooner"
        )
    return good("cores", f"{granted} for {nproc} ranks; threads of each rank: {threads_per_rank(nproc)}")


def memory(nproc: int) -> Finding:
    """Check that the ranks themselves, without a model, fit in the memory that is available."""
    available = int(psutil.virtual_memory().available)
    if nproc * RANK_NBYTES > available:
        most = max(1, available // RANK_NBYTES)
        return bad(
            "memory",
            f"{_gib(available)} available; {nproc} ranks take {_gib(nproc * RANK_NBYTES)} before they have a model",
            f"start at most {most} ranks, or end other programs",
        )
    return good("memory", f"{_gib(available)} available")


def shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    """Check /dev/shm, through which data loader workers pass batches."""
    if not folder.is_dir():
        return bad("shared memory", f"{folder} does not exist", f"mount -t tmpfs tmpfs {folder}")
    free = shutil.disk_usage(folder).free
    if free < 64 * 2**20:
        return bad(
            "shared memory",
            f"{folder} has only {free / 2**20:.0f} MiB free; data loader workers would crash with a bus error",
            f"mount -o remount,size=2G {folder} (in Docker: --shm-size=2g), or use num_workers=0",
        )
    return good("shared memory", f"{folder} has {_gib(free)} free")


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    while not folder.exists():
        folder = folder.parent
    return folder


def run_folder(folder: Path) -> Finding:
    """Check that a run folder can be created where it is wanted, and that there is space."""
    existing = _existing(folder)
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        return bad("run folder", f"{existing} cannot be written ({error.strerror})", "give tutti run another --folder")
    free = shutil.disk_usage(existing).free
    if free < 2**30:
        return bad("run folder", f"{_gib(free)} free at {existing}", "free some space, or give another --folder")
    return good("run folder", f"{existing} can be written, {_gib(free)} free")


def script(path: Path) -> Finding:
    """Check that the script exists, is valid Python and mentions tutti."""
    try:
        check_script(path)
    except TuttiError as error:
        return refused("script", error)
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else "tutti"
    if "tutti" not in text:
        return bad(
            "script",
            f"{path} does not mention tutti",
            "make a tutti.Job in it (see the README), unless a module that it imports does",
        )
    return good("script", f"{path} is valid Python")


def visible_gpus(nproc: int, values: Mapping[str, str], ask: Ask = ask_nvidia_smi, root: Path = SYS) -> Finding:
    """Check the variables that choose devices, and tell which device each rank gets.

    Args:
        nproc: number of ranks.
        values: those of the variables that are set.
        ask: asks nvidia-smi.
        root: the folder /sys.
    """
    value = values.get(visible_devices.VARIABLE)
    try:
        devices = visible_devices.devices_here(values, ask)
        others = visible_devices.check_others(values, root)
    except TuttiError as error:
        return refused("visible devices", error)
    if devices is None:
        return good("visible devices", others or "no NVIDIA driver answers, and no variable hides devices")
    words = visible_devices.describe_devices(nproc, value, devices)
    if value is not None and "-" not in value and not visible_devices.order_is_known(values, ask):
        return bad(
            "visible devices",
            f"{words}; these numbers are nvidia-smi's, but CUDA numbers GPUs of several models by speed",
            "export CUDA_DEVICE_ORDER=PCI_BUS_ID, or name GPUs by UUID",
        )
    return good("visible devices", words)


def rendezvous(address: str, timeout_s: float = 3.0, *, first: bool | None = None) -> Finding:
    """Check the rendezvous of several nodes.

    On node 0 its port must be free. From another node the port must be reachable within `timeout_s` seconds.

    Args:
        address: "host:port".
        timeout_s: seconds to wait for node 0.
        first: whether this is node 0, if that is known.
    """
    try:
        host, port = network.split_address(address)
        addresses = resolve(host)
        local = local_addresses()
        if first is not False and any(ip in local or ip.startswith("127.") for ip in addresses):
            network.check_port_free(port, host)
            return good("rendezvous", f"port {port} is free on this host, over {network.interface_towards(address)}")
        network.wait_for_port(host, port, timeout_s)
    except TuttiError as error:
        return refused("rendezvous", error)
    return good("rendezvous", f"{address} answers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """The nodes that are checked together: their number, this one's, and where they meet ("host:port")."""

    count: int = 1
    rank: int = 0
    rendezvous: str | None = None


def check_rendezvous(
    nproc: int, nodes: Nodes = Nodes(), told: dict[str, Any] | None = None, problems: Sequence[str] = ()
) -> Finding:
    """Start ranks as a run would, and check that they meet and all-reduce a number correctly.

    Args:
        nproc: number of ranks on each node.
        nodes: the nodes that check this together.
        told: takes what the ranks tell of their places and hosts.
        problems: what is wrong with this host, for the other doctors.
    """
    known = {
        "variables": communication_variables(),
        "place": str(_existing(Path("runs").absolute())),
        "problems": list(problems),
    }
    with tempfile.TemporaryDirectory(prefix="tutti-doctor-") as folder:
        spec = LaunchSpec(
            target="tutti.commands.rank_check",
            is_module=True,
            folder=Path(folder),
            ranks_per_node=(nproc,) * nodes.count,
            node_rank=nodes.rank,
            rendezvous=nodes.rendezvous if nodes.count > 1 else None,
            timeout_s=RENDEZVOUS_TIMEOUT_S if nodes.count == 1 else NODES_TIMEOUT_S,
            environment={"TUTTI_BIND_CORES": "auto"},
        )
        (Path(folder) / "host.json").write_text(json.dumps(known), encoding="utf-8")
        try:
            with interrupts() as interrupted:
                outcome = supervise(LocalLauncher().start, spec, Silent(), interrupted)
        except TuttiError as error:
            return refused("ranks", error)
        facts = Path(folder) / "facts.json"
        if told is not None and facts.exists():
            told |= json.loads(facts.read_text(encoding="utf-8"))
    if outcome.status == "stopped":
        return bad("ranks", "interrupted before they met", "run tutti doctor again")
    if outcome.failure is not None:
        return bad("ranks", sentence(spec, outcome.failure), "see this reason; the other findings may explain it")
    return good("ranks", f"{spec.world_size} started, met and all-reduced a number")


def places(told: Mapping[str, Any]) -> Finding:
    """Report the cores and network cards of the ranks, as they told them."""
    if "places" not in told:
        return good("places of ranks", "not known, because they did not meet")
    ranks: dict[str, list[int]] = {}
    for rank, words in enumerate(told["places"]):
        ranks.setdefault(", ".join(word for word in words if word), []).append(rank)
    return good("places of ranks", "; ".join(f"rank {', '.join(map(str, n))}: {words}" for words, n in ranks.items()))


def hosts(told: Mapping[str, Any]) -> Finding:
    """Report which versions and devices differ between the hosts whose ranks met."""
    if len(told.get("hosts", ())) < 2:
        return good("hosts", "one host was checked; --nnodes checks several together")
    differing: dict[str, str] = told["differences"]
    if not differing:
        return good("hosts", f"the same versions and devices on {', '.join(told['hosts'])}")
    parts = [sentence.rpartition("; ") for sentence in differing.values()]
    found, fix = "; ".join(part[0] for part in parts), "; ".join(dict.fromkeys(part[2] for part in parts))
    return Finding(name="hosts", ok=set(differing) == {"device"}, found=found, fix=fix)


def between_hosts(told: Mapping[str, Any], node: int) -> list[Finding]:
    """Return what is found between several hosts, by what their ranks told.

    Args:
        told: contents of facts.json.
        node: number of this node.
    """
    if told.get("unreachable"):
        return [host_checks.unreachable(told["unreachable"])]
    nodes = told.get("nodes", ())
    if not nodes:
        return []
    findings = [
        host_checks.other_problems(nodes, node),
        host_checks.environments(nodes),
        host_checks.clocks(nodes),
        host_checks.shared_folder(nodes),
    ]
    if told.get("links"):
        pairs = [(int(a), int(b), float(rate), float(latency)) for a, b, rate, latency in told["links"]]
        findings.append(host_checks.links([each["label"] for each in nodes], pairs))
    return findings


def _open_files(ranks: int) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = [-1 if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard)]
    return host_checks.open_files(limits[0], limits[1], ranks)


def _variables(nproc: int) -> Finding:
    interfaces = list(psutil.net_if_stats())
    return host_checks.variables_here(communication_variables(), interfaces, nproc, granted_cores())


def built_for_cuda() -> str | None:
    """Return the CUDA version that torch was built for, without importing torch; None for another build."""
    spec = find_spec("torch")
    file = Path(spec.origin).parent / "version.py" if spec is not None and spec.origin else Path("absent")
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    match = re.search(r"^cuda\b[^=]*= '([\d.]+)'", text, re.MULTILINE)
    return match[1] if match else None


def gpu_driver(ask: Ask = ask_nvidia_smi, built: str | None = None) -> Finding:
    """Check that the driver runs the CUDA that torch was built for. Drivers run all minor versions of their major."""
    shown = re.search(r"CUDA Version:\s*(\d+)\.(\d+)", ask() or "")
    driver = re.search(r"Driver Version:\s*([\d.]+)", ask() or "")
    if shown is None:
        return good("GPU driver", "no NVIDIA driver answers")
    version, supported = driver[1] if driver else "?", f"{shown[1]}.{shown[2]}"
    if built is not None and int(built.split(".")[0]) > int(shown[1]):
        return bad(
            "GPU driver",
            f"driver {version} supports CUDA up to {supported}, but torch was built for CUDA {built}",
            f"update the driver, or install a torch for CUDA {shown[1]} (https://pytorch.org/get-started)",
        )
    words = f", torch was built for CUDA {built}" if built else ", torch was built without CUDA and will use the CPU"
    return good("GPU driver", f"driver {version} supports CUDA up to {supported}{words}")


def nccl_library(path: str, *, bundled: bool) -> Finding:
    """Check that no other NCCL is found before the one that came with torch.

    Args:
        path: the folders in which the system looks for libraries first (LD_LIBRARY_PATH).
        bundled: whether torch came with an NCCL.
    """
    others = [folder for folder in path.split(":") if folder and any(Path(folder).glob("libnccl.so*"))]
    if others and bundled:
        return bad(
            "NCCL",
            f"LD_LIBRARY_PATH has another NCCL in {others[0]}, which is used instead of torch's own",
            f"take {others[0]} out of LD_LIBRARY_PATH, unless every host has that version there",
        )
    return good("NCCL", f"the one in {others[0]}" if others else "torch's own" if bundled else "none")


def bundled_nccl() -> bool:
    """Return whether pip installed an NCCL for torch."""
    names = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
    return any(_installed(name) for name in names)


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def gpu_links(ask: Ask = ask_nvidia_smi) -> Finding:
    """Report how GPUs are linked, and find NVLinks that are down."""
    text = ask("topo", "-m")
    if text is None:
        return good("GPU links", "nvidia-smi tells none")
    topology = gpu_topology.parse_topology(text)
    words = gpu_topology.describe(topology)
    refused: dict[str, list[str]] = {}
    for (a, b), peer in gpu_topology.parse_peers(ask("topo", "-p2p", "r") or "").items():
        if peer != "OK" and a < b:
            refused.setdefault(peer, []).append(f"{a}-{b}")
    for peer, pairs in refused.items():
        words += f"; no peer access between GPUs {', '.join(pairs)}: {gpu_topology.PEER_REASONS[peer]}"
    down = gpu_topology.inactive_links(ask("nvlink", "-s") or "")
    if down and any(kind.startswith("NV") for kind in topology.links.values()):
        which = "; ".join(f"links {', '.join(map(str, links))} of GPU {gpu} are down" for gpu, links in down.items())
        return bad("GPU links", f"{which} ({words})", "reset the GPU or reboot; if it stays so, have the host repaired")
    return good("GPU links", words)


Check = Callable[[], Finding | list[Finding]]


def all_checks(path: Path | None, nproc: int, nodes: Nodes, found: Sequence[Finding] = ()) -> list[Check]:
    """Return the checks in the order in which a launch depends on them.

    Args:
        path: the user's script, if given.
        nproc: number of ranks.
        nodes: the nodes that are checked together.
        found: what has been found so far.
    """
    told: dict[str, Any] = {}
    variables = device_variables()

    def meet() -> Finding:
        problems = [f"{finding.name}: {finding.found}" for finding in found if not finding.ok]
        return check_rendezvous(nproc, nodes, told, problems)

    checks: list[Check] = [python, torch, host_name, loopback]
    checks += [lambda: cores(nproc), lambda: memory(nproc), shared_memory, lambda: run_folder(Path("runs"))]
    checks += [lambda: _open_files(nproc * nodes.count), lambda: _variables(nproc)]
    if ask_nvidia_smi("-L") is not None:
        libraries = library_path()
        checks += [lambda: gpu_driver(built=built_for_cuda()), lambda: nccl_library(libraries, bundled=bundled_nccl())]
        checks.append(gpu_links)
    checks.append(lambda: visible_gpus(nproc, variables))
    if path is not None:
        checks.append(lambda: script(path))
    if nodes.rendezvous is not None:
        address, timeout_s = nodes.rendezvous, 3.0 if nodes.count == 1 else NODES_TIMEOUT_S
        first = nodes.rank == 0 if nodes.count > 1 else None
        checks.append(lambda: rendezvous(address, timeout_s, first=first))
    checks += [meet, lambda: places(told), lambda: hosts(told), lambda: between_hosts(told, nodes.rank)]
    return checks


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"

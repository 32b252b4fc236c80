"""Checks that find what would stop a launch, without launching the user's script. A failed check names the fix."""

import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil

from tutti.errors import TuttiError
from tutti.launch import network
from tutti.launch.launch_environment import granted_cores, threads_per_rank
from tutti.launch.launcher import LaunchSpec
from tutti.launch.local_launcher import LocalLauncher
from tutti.launch.rank_watch import Silent
from tutti.launch.script_path import check_script
from tutti.launch.supervisor import interrupts, sentence, supervise

RENDEZVOUS_TIMEOUT_S = 20.0
RANK_NBYTES = 350 * 2**20
"""Memory that a rank takes before it has a model: the interpreter and torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check.

    Attributes:
        found: what the check found, as a phrase.
        fix: what to do if it is a problem.
    """

    name: str
    ok: bool
    found: str
    fix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The results of all checks. `ok`: nothing would stop a launch."""

    ok: bool
    findings: tuple[Finding, ...]


def good(name: str, found: str) -> Finding:
    return Finding(name=name, ok=True, found=found)


def bad(name: str, found: str, fix: str) -> Finding:
    return Finding(name=name, ok=False, found=found, fix=fix)


def refused(name: str, error: TuttiError) -> Finding:
    """Return a TuttiError as a finding. Its message has the remedy after the last semicolon."""
    found, _, fix = str(error).rpartition("; ")
    return bad(name, found or str(error), fix if found else "")


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
        addresses = network.resolve(name)
    except TuttiError:
        return bad("host name", f"{name} has no address", f"add the line `127.0.1.1 {name}` to /etc/hosts")
    return good("host name", f"{name} is {', '.join(addresses)}")


def loopback() -> Finding:
    """Check that the interface over which ranks of one host communicate exists and is up."""
    name = network.loopback()
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


def run_folder(folder: Path) -> Finding:
    """Check that a run folder can be created where it is wanted, and that there is space."""
    existing = folder
    while not existing.exists():
        existing = existing.parent
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


def rendezvous(address: str, timeout_s: float = 3.0) -> Finding:
    """Check the rendezvous of several nodes.

    On node 0 its port must be free. From another node the port must be reachable within `timeout_s` seconds.

    Args:
        address: "host:port".
        timeout_s: seconds to wait for node 0.
    """
    try:
        host, port = network.split_address(address)
        addresses = network.resolve(host)
        local = network.local_addresses()
        if any(ip in local or ip.startswith("127.") for ip in addresses):
            network.check_port_free(port)
            return good("rendezvous", f"port {port} is free on this host, over {network.interface_towards(address)}")
        network.wait_for_port(host, port, timeout_s)
    except TuttiError as error:
        return refused("rendezvous", error)
    return good("rendezvous", f"{address} answers")


def check_rendezvous(nproc: int) -> Finding:
    """Start ranks as a run would, and check that they meet and all-reduce a number correctly."""
    with tempfile.TemporaryDirectory(prefix="tutti-doctor-") as folder:
        spec = LaunchSpec(
            target="tutti.launch.selfcheck",
            is_module=True,
            folder=Path(folder),
            ranks_per_node=(nproc,),
            timeout_s=RENDEZVOUS_TIMEOUT_S,
        )
        try:
            with interrupts() as interrupted:
                outcome = supervise(lambda: LocalLauncher().start(spec), spec, Silent(), interrupted)
        except TuttiError as error:
            return refused("ranks", error)
    if outcome.status == "stopped":
        return bad("ranks", "interrupted before they met", "run tutti doctor again")
    if outcome.failure is not None:
        return bad("ranks", sentence(spec, outcome.failure), "see this reason; the other findings may explain it")
    return good("ranks", f"{nproc} started, met and all-reduced a number")


def all_checks(path: Path | None, nproc: int, address: str | None) -> list[Callable[[], Finding]]:
    """Return the checks in the order in which a launch depends on them.

    Args:
        path: the user's script, if given.
        nproc: number of ranks.
        address: "host:port" of the rendezvous, if given.
    """
    checks: list[Callable[[], Finding]] = [python, torch, host_name, loopback]
    checks += [lambda: cores(nproc), lambda: memory(nproc), shared_memory, lambda: run_folder(Path("runs"))]
    if path is not None:
        checks.append(lambda: script(path))
    if address is not None:
        checks.append(lambda: rendezvous(address))
    checks.append(lambda: check_rendezvous(nproc))
    return checks


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"

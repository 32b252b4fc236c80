"""What would stop a launch, found without launching: each check says what it found and, if it is bad, the fix."""

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
"""What a rank takes before it has a model: the interpreter and torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing looked at. `fix` says what to do where it is a problem."""

    name: str
    ok: bool
    found: str
    fix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All findings. `ok`: nothing would stop a launch."""

    ok: bool
    findings: tuple[Finding, ...]


def good(name: str, found: str) -> Finding:
    return Finding(name=name, ok=True, found=found)


def bad(name: str, found: str, fix: str) -> Finding:
    return Finding(name=name, ok=False, found=found, fix=fix)


def refused(name: str, error: TuttiError) -> Finding:
    """A TuttiError as a finding: its sentence ends with the remedy after the last semicolon."""
    found, _, fix = str(error).rpartition("; ")
    return bad(name, found or str(error), fix if found else "")


def python() -> Finding:
    """Which Python this is; a version that tutti cannot run with would not have come so far."""
    return good("python", f"{platform.python_version()} at {sys.executable}")


def torch() -> Finding:
    """A PyTorch that is new enough and can join ranks; found without importing it here."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return bad("torch", "not installed", "pip install torch")
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) < (2, 6):
        return bad("torch", version, "pip install --upgrade 'torch>=2.6'")
    return good("torch", version)


def host_name() -> Finding:
    """This host's own name leads to an address."""
    name = socket.gethostname()
    try:
        addresses = network.resolve(name)
    except TuttiError:
        return bad("host name", f"{name} has no address", f"add the line `127.0.1.1 {name}` to /etc/hosts")
    return good("host name", f"{name} is {', '.join(addresses)}")


def loopback() -> Finding:
    """The interface over which ranks of one host talk is there and up."""
    name = network.loopback()
    stats = psutil.net_if_stats()
    if name is None:
        return bad("loopback", "no interface has 127.0.0.1", "ip addr add 127.0.0.1/8 dev lo; ip link set lo up")
    if name in stats and not stats[name].isup:
        return bad("loopback", f"{name} is down", f"ip link set {name} up")
    return good("loopback", f"{name} is up")


def cores(nproc: int) -> Finding:
    """How many cores the ranks share; too few make them slow and stop nothing."""
    granted = granted_cores()
    if nproc > granted:
        return good("cores", f"{granted} for {nproc} ranks: the same results as with {granted} ranks, but not sooner")
    return good("cores", f"{granted} for {nproc} ranks, threads of each: {threads_per_rank(nproc)}")


def memory(nproc: int) -> Finding:
    """The ranks themselves, without a model, fit in what is free."""
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
    """Data loader workers hand batches over through /dev/shm."""
    if not folder.is_dir():
        return bad("shared memory", f"{folder} is not there", f"mount -t tmpfs tmpfs {folder}")
    free = shutil.disk_usage(folder).free
    if free < 64 * 2**20:
        return bad(
            "shared memory",
            f"{folder} has {free / 2**20:.0f} MiB free; data loader workers would die of a bus error",
            f"mount -o remount,size=2G {folder} (in Docker: --shm-size=2g), or use num_workers=0",
        )
    return good("shared memory", f"{folder} has {_gib(free)} free")


def run_folder(folder: Path) -> Finding:
    """Runs can be written where they will be, and there is room."""
    place = folder
    while not place.exists():
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        return bad("run folder", f"{place} cannot be written ({error.strerror})", "give tutti run another --folder")
    free = shutil.disk_usage(place).free
    if free < 2**30:
        return bad("run folder", f"{_gib(free)} free at {place}", "free some space, or give another --folder")
    return good("run folder", f"{place} can be written, {_gib(free)} free")


def script(path: Path) -> Finding:
    """The script is there, is Python, and says something of tutti."""
    try:
        check_script(path)
    except TuttiError as error:
        return refused("script", error)
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else "tutti"
    if "tutti" not in text:
        return bad(
            "script",
            f"{path} does not mention tutti",
            "make a tutti.Job in it (README), unless a module it imports does",
        )
    return good("script", f"{path} is valid Python")


def rendezvous(address: str, timeout_s: float = 3.0) -> Finding:
    """On node 0 the port is free; from another node it can be reached, or at least its host can be found."""
    try:
        host, port = network.split_address(address)
        addresses = network.resolve(host)
        mine = network.local_addresses()
        if any(ip in mine or ip.startswith("127.") for ip in addresses):
            network.check_port_free(port)
            return good("rendezvous", f"port {port} is free on this host, over {network.interface_towards(address)}")
        network.wait_for_port(host, port, timeout_s)
    except TuttiError as error:
        return refused("rendezvous", error)
    return good("rendezvous", f"{address} answers")


def check_rendezvous(nproc: int) -> Finding:
    """Ranks really start, meet and sum a number, as they would in a run."""
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
        return bad("ranks", "stopped before they met", "run it again")
    if outcome.failure is not None:
        return bad("ranks", sentence(spec, outcome.failure), "see the reason given; the other findings may explain it")
    return good("ranks", f"{nproc} started, met and summed a number")


def all_checks(path: Path | None, nproc: int, address: str | None) -> list[Callable[[], Finding]]:
    """The checks in the order in which a launch would meet what they look at."""
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

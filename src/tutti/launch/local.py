"""Ranks as processes of this machine, forked from a server that has imported torch once.

The server imports and does nothing else: no device is touched and no thread pool is started before the fork,
so each rank may use CUDA and OpenMP as a fresh interpreter would.
"""

import contextlib
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import forkserver
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from tutti.errors import LaunchError
from tutti.launch import rank_main
from tutti.launch.base import LaunchSpec
from tutti.launch.network import interface_towards, loopback

PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "numpy",
    "tutti.runtime.job",
    "tutti.launch.rank_main",
)

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def warm(threads: int = 1, preload: tuple[str, ...] = ()) -> None:
    """Start the fork server now, so that its import of torch overlaps with what the caller does next.

    `threads`: for libraries that read their thread count when loaded, unless the user's environment says.
    `preload`: further modules worth importing once. A second call does nothing.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOAD, *preload])
    defaults = {name: str(threads) for name in _THREAD_VARIABLES if name not in os.environ}
    with _environment(defaults), _interrupt_ignored():
        forkserver.ensure_running()


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables that are unset now, for as long as a process that inherits them is started."""
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)


@contextlib.contextmanager
def _interrupt_ignored() -> Iterator[None]:
    """The server starts with Ctrl-C ignored: it would otherwise die of it, noisily, while it imports."""
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # not the main thread: signals are someone else's business
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class LocalLauncher:
    """Starts ranks on this machine. See `tutti.launch.base.Launcher`."""

    def start(self, spec: LaunchSpec) -> "LocalHandle":
        """Fork the ranks of this node. Raises LaunchError when the system refuses."""
        warm(spec.threads)
        meeting = Path(tempfile.mkdtemp(prefix="tutti-"))
        environment = _shared_environment(spec, meeting)
        context = multiprocessing.get_context("forkserver")
        processes: dict[int, ForkServerProcess] = {}
        handle = LocalHandle(processes, meeting)
        try:
            for local_rank, rank in enumerate(spec.ranks):
                task = rank_main.RankTask(
                    rank=rank,
                    target=spec.target,
                    arguments=spec.arguments,
                    is_module=spec.is_module,
                    folder=spec.folder,
                    threads=spec.threads,
                    environment=environment | {"RANK": str(rank), "LOCAL_RANK": str(local_rank)},
                )
                process = context.Process(target=rank_main.main, args=(task,), name="MainProcess")
                process.start()
                processes[rank] = process
        except (OSError, EOFError) as error:
            handle.stop(0)
            raise LaunchError(
                f"rank {rank} could not be started ({error or 'the fork server died'}); free memory or "
                "processes, or start fewer ranks with --nproc"
            ) from error
        return handle


def _shared_environment(spec: LaunchSpec, meeting: Path) -> dict[str, str]:
    """What every rank of this node finds in its environment besides its own numbers."""
    if spec.rendezvous is None:
        rendezvous, interface = f"file://{meeting}/store", loopback()
    else:
        rendezvous, interface = f"tcp://{spec.rendezvous}", interface_towards(spec.rendezvous)
    environment = {
        "WORLD_SIZE": str(spec.world_size),
        "LOCAL_WORLD_SIZE": str(spec.local_world_size),
        "NODE_RANK": str(spec.node_rank),
        "TUTTI_RENDEZVOUS": rendezvous,
        "TUTTI_TIMEOUT_S": str(spec.timeout_s),
        "TUTTI_RUN_FOLDER": str(spec.folder),
        "TUTTI_SUPERVISED": "1",
        "OMP_NUM_THREADS": str(spec.threads),
    }
    if interface and "GLOO_SOCKET_IFNAME" not in os.environ:
        environment["GLOO_SOCKET_IFNAME"] = interface
    return environment | spec.environment


class LocalHandle:
    """Started ranks of this machine, each leader of its own process group. See `tutti.launch.base.Handle`."""

    def __init__(self, processes: dict[int, ForkServerProcess], meeting: Path) -> None:
        self._processes = processes
        self._meeting = meeting
        self._stopped = False

    def pids(self) -> dict[int, int]:
        """Process ids by rank."""
        return {rank: process.pid for rank, process in self._processes.items() if process.pid}

    def wait(self, timeout_s: float) -> dict[int, int]:
        """Exit codes by rank of those ended so far; returns when another one ends, or in time."""
        running = [process.sentinel for process in self._processes.values() if process.exitcode is None]
        if running:
            wait_for_any(running, timeout_s)
        codes = {rank: process.exitcode for rank, process in self._processes.items()}
        return {rank: code for rank, code in codes.items() if code is not None}

    def stop(self, grace_s: float, hurry: Callable[[], bool] = lambda: False) -> None:
        """End all ranks and what they started: asked first, by force after `grace_s` seconds or on `hurry`."""
        if self._stopped:
            return
        self._stopped = True
        if grace_s > 0:
            for process in self._processes.values():
                process.terminate()
            deadline = time.monotonic() + grace_s
            while len(self.wait(0.05)) < len(self._processes) and time.monotonic() < deadline and not hurry():
                pass
        for process in self._processes.values():
            _end_group(process)
        for process in self._processes.values():
            process.join(5)
        shutil.rmtree(self._meeting, ignore_errors=True)


def _end_group(process: ForkServerProcess) -> None:
    """Kill a rank, if it still runs, and all that stayed in its process group, such as data loaders."""
    if process.pid is None:
        return
    process.kill()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)

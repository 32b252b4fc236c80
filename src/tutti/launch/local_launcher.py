"""Ranks as processes of this machine, forked from a server that has imported torch once.

The server imports and does nothing else: no device is touched and no thread pool is started before the fork,
so each rank may use CUDA and OpenMP as a fresh interpreter would.
"""

import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import Any

from tutti.errors import LaunchError
from tutti.launch import launch_environment, rank_main
from tutti.launch.launcher import LaunchSpec

PRELOAD = "tutti.launch.preload"


def warm(threads: int = 1, preload: tuple[str, ...] = ()) -> None:
    """Start the fork server now, so that its import of torch overlaps with what the caller does next.

    `threads`: for libraries that read their thread count when loaded, unless the user's environment says.
    `preload`: further modules worth importing once. A second call does nothing.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload([PRELOAD, *preload])
    with launch_environment.loading_defaults(threads), _interrupt_ignored():
        forkserver.ensure_running()


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


def forked(function: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    """A started process of the fork server that calls `function(*arguments)`."""
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=function, args=arguments, name="MainProcess")
    main = sys.modules["__main__"]
    # Without a main module here, the process does not import this one's: it gets its own from the user's script.
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        process.start()
    finally:
        sys.modules["__main__"] = main
    return process


class LocalLauncher:
    """Starts ranks on this machine. See `tutti.launch.launcher.Launcher`."""

    def start(self, spec: LaunchSpec) -> "LocalHandle":
        """Fork the ranks of this node. Raises LaunchError when the system refuses."""
        warm(spec.threads)
        rendezvous_folder = Path(tempfile.mkdtemp(prefix="tutti-"))
        shared = launch_environment.of_node(spec, rendezvous_folder)
        processes: dict[int, ForkServerProcess] = {}
        handle = LocalHandle(processes, rendezvous_folder)
        try:
            for local_rank, rank in enumerate(spec.ranks):
                task = rank_main.RankTask(
                    rank=rank,
                    target=spec.target,
                    arguments=spec.arguments,
                    is_module=spec.is_module,
                    folder=spec.folder,
                    threads=spec.threads,
                    environment=shared | launch_environment.of_rank(rank, local_rank),
                )
                processes[rank] = forked(rank_main.main, task)
        except (OSError, EOFError) as error:
            handle.stop(0)
            raise LaunchError(
                f"rank {rank} could not be started ({error or 'the fork server died'}); free memory or "
                "processes, or start fewer ranks with --nproc"
            ) from error
        return handle


class LocalHandle:
    """Started ranks of this machine, each leader of its own process group. See `tutti.launch.launcher.Handle`."""

    def __init__(self, processes: dict[int, ForkServerProcess], rendezvous_folder: Path) -> None:
        self._processes = processes
        self._rendezvous_folder = rendezvous_folder
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
        shutil.rmtree(self._rendezvous_folder, ignore_errors=True)


def _end_group(process: ForkServerProcess) -> None:
    """Kill a rank, if it still runs, and all that stayed in its process group, such as data loaders."""
    if process.pid is None:
        return
    process.kill()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)

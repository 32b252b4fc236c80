"""Starts ranks as processes of this machine, forked from a server that has imported torch once.

The server only imports: it uses no device and starts no thread pool before a fork. So each rank may use CUDA and OpenMP
as a fresh interpreter would.
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

    A second call does nothing.

    Args:
        threads: thread count for libraries that read it when loaded; the user's environment takes precedence.
        preload: more modules to import once in the server.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload([PRELOAD, *preload])
    with launch_environment.loading_defaults(threads), _interrupt_ignored():
        forkserver.ensure_running()


@contextlib.contextmanager
def _interrupt_ignored() -> Iterator[None]:
    """Start the server with Ctrl-C ignored: otherwise Ctrl-C during its imports would end it with a traceback."""
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # not the main thread, which alone may set signal handlers
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def forked(function: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    """Start a process of the fork server that calls `function(*arguments)`, and return it."""
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=function, args=arguments, name="MainProcess")
    main = sys.modules["__main__"]
    # The new process would import this process' main module; with an empty one it does not, and runs the user's script.
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        process.start()
    finally:
        sys.modules["__main__"] = main
    return process


class LocalLauncher:
    """Starts ranks on this machine. See `tutti.launch.launcher.Launcher`."""

    def start(self, spec: LaunchSpec) -> "LocalHandle":
        """Fork the ranks of this node.

        Raises:
            LaunchError: the system cannot start a process.
        """
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
                f"rank {rank} could not be started ({error or 'the fork server died'}); free some memory, end other "
                "processes, or start fewer ranks with --nproc"
            ) from error
        return handle


class LocalHandle:
    """Ranks started on this machine, each the leader of its own process group. See `tutti.launch.launcher.Handle`."""

    def __init__(self, processes: dict[int, ForkServerProcess], rendezvous_folder: Path) -> None:
        self._processes = processes
        self._rendezvous_folder = rendezvous_folder
        self._stopped = False

    def pids(self) -> dict[int, int]:
        """Process ids by rank."""
        return {rank: process.pid for rank, process in self._processes.items() if process.pid}

    def wait(self, timeout_s: float) -> dict[int, int]:
        """Wait until another rank ends, or for `timeout_s` seconds; return the exit codes of all that have ended."""
        running = [process.sentinel for process in self._processes.values() if process.exitcode is None]
        if running:
            wait_for_any(running, timeout_s)
        codes = {rank: process.exitcode for rank, process in self._processes.items()}
        return {rank: code for rank, code in codes.items() if code is not None}

    def stop(self, grace_s: float, hurry: Callable[[], bool] = lambda: False) -> None:
        """End all ranks and everything they started; kill them after `grace_s` seconds, or once `hurry()` is true."""
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
    """Kill a rank, if it still runs, and everything left in its process group, such as data loader workers."""
    if process.pid is None:
        return
    process.kill()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)

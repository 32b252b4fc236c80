"""Starts ranks as processes of this machine, forked from a server that has imported torch once.

The server only imports: it uses no device and starts no thread pool before a fork. So each rank may use CUDA and OpenMP
as a fresh interpreter would.
"""

import contextlib
import fcntl
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing import forkserver, util
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import Any

from tutti.errors import LaunchError
from tutti.launch import launch_environment, process_tree, rank_main
from tutti.launch.launcher import LaunchSpec
from tutti.launch.survival import LOST, MEMORY, RECOVER, Survivors, Waiting, read_waiting
from tutti.launch.visible_devices import VisibleDevice, check_others, devices_here, variables_of_rank
from tutti.machine import use_short_socket_folder
from tutti.surviving_rank import LeftBehind, read_lasting

PRELOAD = "tutti.launch.preload"

_SERVER_END_S = 0.5

_PREFIX, _LOCK = "tutti-", "launcher.lock"
"""How the folder in which ranks meet is named, and the file in it that its launcher holds the lock of."""

_UNSEEN = 255
"""The exit code that multiprocessing gives a process whose fork server ended before it could tell."""


def warm(threads: int = 1, preload: tuple[str, ...] = ()) -> None:
    """Start the fork server now, so that its import of torch overlaps with what the caller does next.

    A second call does nothing.

    Args:
        threads: thread count for libraries that read it when loaded; the user's environment takes precedence.
        preload: more modules to import once in the server.

    Raises:
        LaunchError: there is no folder for sockets.
    """
    if not use_short_socket_folder():
        raise LaunchError(
            "TMPDIR has too long a path for sockets, and /tmp, /var/tmp and /dev/shm cannot be written; set TMPDIR to "
            "a folder whose path has at most 70 characters"
        )
    multiprocessing.get_context("forkserver").set_forkserver_preload([PRELOAD, *preload])
    with launch_environment.loading_defaults(threads), _interrupt_ignored():
        forkserver.ensure_running()


@contextlib.contextmanager
def warming(threads: int = 1, preload: tuple[str, ...] = ()) -> Iterator[None]:
    """Start the fork server as `warm` does; on an exception, end it if this call has started it.

    A refused command then leaves no process behind that goes on importing torch for seconds.

    Args:
        threads: see `warm`.
        preload: see `warm`.
    """
    server: Any = getattr(forkserver, "_forkserver", None)  # no public name says whether a server runs, or ends it
    was_running = getattr(server, "_forkserver_pid", None) is not None
    warm(threads, preload)
    try:
        yield
    except BaseException:
        pid = getattr(server, "_forkserver_pid", None)
        if not was_running and pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            server._stop()
        raise


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
            LaunchError: the system cannot start a process, or a variable names devices that the ranks would not get.
        """
        warm(spec.threads)
        variables = launch_environment.device_variables()
        check_others(variables)
        devices = devices_here(variables) or []
        handle = LocalHandle(spec, devices)
        handle.start(spec.ranks)
        return handle


class LocalHandle:
    """Ranks started on this machine, each the leader of its own process group. See `tutti.launch.launcher.Handle`.

    Args:
        spec: what is started.
        devices: the devices of this machine's ranks.
    """

    def __init__(self, spec: LaunchSpec, devices: Sequence[VisibleDevice]) -> None:
        self._spec, self._devices = spec, devices
        self._processes: dict[int, ForkServerProcess] = {}
        self._connections: dict[int, Connection] = {}
        self._waiting: dict[int, Waiting] = {}
        self._rendezvous_folder, self._token = LockedFolder(), process_tree.new_token()
        self._shared = launch_environment.of_node(spec, self._rendezvous_folder.path)
        self._shared |= {process_tree.TOKEN_VARIABLE: self._token}
        self._old_folders: list[LockedFolder] = []
        self._server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        self._stopped = False

    def start(self, ranks: Iterable[int], environments: Mapping[int, Mapping[str, str]] | None = None) -> None:
        """Fork ranks.

        Args:
            ranks: those to start.
            environments: further variables of some ranks.

        Raises:
            LaunchError: the system cannot start a process.
        """
        keeps = self._spec.environment.get(RECOVER) == MEMORY
        try:
            for rank in ranks:
                here, there = multiprocessing.Pipe() if keeps else (None, None)
                task = self._task(rank, (environments or {}).get(rank, {}))
                self._processes[rank] = forked(rank_main.main, replace(task, connection=there))
                if here is not None and there is not None:
                    self._connections[rank] = here
                    there.close()
        except (OSError, EOFError) as error:
            self.stop(0)
            raise LaunchError(
                f"rank {rank} could not be started ({error or 'the fork server died'}); free some memory, end other "
                "processes, or start fewer ranks with --nproc"
            ) from error

    def _task(self, rank: int, variables: Mapping[str, str]) -> rank_main.RankTask:
        spec, local_rank = self._spec, rank - self._spec.first_rank
        return rank_main.RankTask(
            rank=rank,
            target=spec.target,
            arguments=spec.arguments,
            is_module=spec.is_module,
            folder=spec.folder,
            threads=spec.threads,
            environment=self._shared
            | {"TUTTI_GENERATORS": str(self._generators(rank))}
            | launch_environment.of_rank(rank, local_rank)
            | variables_of_rank(local_rank, self._devices)
            | dict(variables),
        )

    def _generators(self, rank: int) -> Path:
        """The file of a rank's random generators, which outlives the rank."""
        return self._rendezvous_folder.path / f"generators-{rank}"

    def waiting(self) -> dict[int, Waiting]:
        """Ranks that have lost another one and wait for their next task, by rank."""
        for rank, connection in [*self._connections.items()]:
            if rank not in self._waiting and (said := read_waiting(connection)) is not None:
                self._waiting[rank] = replace(said, error=replace(said.error, rank=rank))
        running = {rank for rank, process in self._processes.items() if process.exitcode is None}
        return {rank: said for rank, said in self._waiting.items() if rank in running}

    def tell_lost(self) -> None:
        """Tell the ranks that another one is lost: those that wait for each other then stop waiting."""
        for rank, connection in self._connections.items():
            if rank not in self._waiting:
                with contextlib.suppress(OSError):
                    connection.send(LOST)

    def written(self, rank: int) -> LeftBehind | None:
        """The states of random generators that a rank has left behind; None if it has left none."""
        return read_lasting(self._generators(rank))

    def regroup(self, spec: LaunchSpec, survivors: Survivors) -> "LocalHandle":
        """Start the next generation: give waiting ranks a task in it, end all others, and fork those that it lacks.

        Raises:
            LaunchError: the system cannot start a process.
        """
        following = LocalHandle(spec, self._devices)
        following._old_folders = [*self._old_folders, self._rendezvous_folder]
        for rank, old_rank in survivors.ranks.items():
            following._processes[rank] = self._processes.pop(old_rank)
            following._connections[rank] = self._connections.pop(old_rank)
        kept = {process.pid for process in following._processes.values()}
        self._end(process_tree.descendants(self.pids().values()), kept)
        for connection in self._connections.values():
            connection.close()
        self._stopped = True
        source = {"TUTTI_RECOVER_FROM": f"{survivors.holder} {survivors.step}"}
        for rank in survivors.ranks:
            with contextlib.suppress(OSError):  # it has died meanwhile, which is noticed next
                following._connections[rank].send(following._task(rank, source))
        fresh = [rank for rank in spec.ranks if rank not in survivors.ranks]
        same_ranks = spec.world_size == self._spec.world_size
        variables = {
            rank: source | ({"TUTTI_LOST_GENERATORS": str(self._generators(rank))} if same_ranks else {})
            for rank in fresh
        }
        for rank in fresh if same_ranks else []:  # that it leaves behind if it dies before it trains
            with contextlib.suppress(OSError):
                shutil.copyfile(self._generators(rank), following._generators(rank))
        following.start(fresh, variables)
        return following

    def pids(self) -> dict[int, int]:
        """Process ids by rank."""
        return {rank: process.pid for rank, process in self._processes.items() if process.pid}

    def wait(self, timeout_s: float) -> dict[int, int]:
        """Wait until another rank ends, or for `timeout_s` seconds; return the exit codes of all that have ended."""
        running = {rank: process for rank, process in self._processes.items() if process.exitcode is None}
        sources: list[Any] = [process.sentinel for process in running.values()]
        sources += [one for rank, one in self._connections.items() if rank in running and rank not in self._waiting]
        if running:
            wait_for_any(sources, timeout_s)
        codes = {rank: process.exitcode for rank, process in self._processes.items()}
        return {rank: code for rank, code in codes.items() if code is not None}

    def explain(self, rank: int) -> str | None:
        """Return why a rank ended whose exit code nobody has seen: only the fork server could have."""
        if self._processes[rank].exitcode != _UNSEEN:
            return None
        until = time.monotonic() + _SERVER_END_S  # a killed server closes its pipes before it counts as ended
        while process_tree.is_alive(self._server):
            if time.monotonic() > until:
                return None
            time.sleep(0.02)
        return (
            "the fork server, from which this host's ranks are started, was killed, and the ranks with it: most likely "
            "the system ran out of memory; use a smaller batch, more microbatches or fewer ranks"
        )

    def stop(self, grace_s: float, hurry: Callable[[], bool] = lambda: False) -> None:
        """End all ranks and everything they started; kill them after `grace_s` seconds, or once `hurry()` is true."""
        if self._stopped:
            return
        self._stopped = True
        started = process_tree.descendants(self.pids().values())
        since = {pid: process_tree.started_at(pid) for pid in started}
        if grace_s > 0:
            for process in self._processes.values():
                process.terminate()
            deadline = time.monotonic() + grace_s
            while len(self.wait(0.05)) < len(self._processes) and time.monotonic() < deadline and not hurry():
                pass
            # The number of one that has ended meanwhile may be another program's.
            started = {pid for pid in started if process_tree.is_same(pid, since[pid])}
            started |= process_tree.descendants(self.pids().values())
        self._end(started, set())
        for connection in self._connections.values():
            connection.close()
        for folder in (*self._old_folders, self._rendezvous_folder):
            folder.remove()

    def _end(self, started: set[int], kept: set[int | None]) -> None:
        """Kill the ranks and what they have started, except for processes that are kept."""
        for process in self._processes.values():
            _end_group(process)
        process_tree.kill_all(started)  # those in sessions of their own, too
        process_tree.kill_all(process_tree.with_token(self._token) - {pid for pid in kept if pid is not None})
        for process in self._processes.values():
            process.join(5)


class LockedFolder:
    """A temporary folder of this launcher, in which its ranks meet. Making one removes those of killed launchers.

    Its lock file names the launcher's folder of sockets. The lock of a killed launcher is free, whatever its process
    number: hosts and containers may share the folder of temporary files.

    Args:
        parent: where it lies; None: in the folder of temporary files.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, parent: Path | None = None) -> None:
        for folder in {Path(tempfile.gettempdir()), launch_environment.memory_root()}:
            _remove_abandoned(folder)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        new = self.path / f"{_LOCK}.new"
        self._lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):  # a file system without locks: the folder is not taken for abandoned
            os.write(self._lock, os.fsencode(util.get_temp_dir()))
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            new.rename(self.path / _LOCK)  # only now, so that nobody finds it without its lock

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_abandoned(parent: Path) -> None:
    """Remove the folders of this user's launchers that were killed."""
    for lock in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError):
            file = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if os.fstat(file).st_uid == os.getuid():
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    sockets = Path(os.fsdecode(os.read(file, 4096)))
                    if sockets.name.startswith("pymp-"):  # of multiprocessing, for the fork server's socket
                        shutil.rmtree(sockets, ignore_errors=True)
                    shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(file)


def _end_group(process: ForkServerProcess) -> None:
    """Kill a rank, if it still runs, and everything left in its process group, such as data loader workers."""
    if process.pid is None:
        return
    process.kill()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)

"""The main function of a rank: sets up the process, runs the user's script as `python` would, records failures.

Runs only in the rank's process. Its output goes to files in the rank's folder, a failure to error.json there. The local
launcher forks `main`; other launchers start the command of `rank_command`, which reads the variables of
`tutti.launch.launch_environment`.
"""

import atexit
import contextlib
import functools
import io
import multiprocessing
import os
import re
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn

from tutti.config import serialization
from tutti.config.run_folder import RunFolder
from tutti.config.safe_text import hide_secrets
from tutti.errors import RESUMABLE, ScriptError, TuttiError
from tutti.event_record import open_record
from tutti.launch import process_tree
from tutti.launch.launch_environment import become, started_rank
from tutti.launch.launcher import ErrorKind, LaunchSpec, RankError
from tutti.launch.survival import Survivor, start_watch
from tutti.process_stacks import is_stopped
from tutti.stack_watch import watch_stacks

TERMINATED = 128 + signal.SIGTERM

_terminated = threading.Event()
"""Set once SIGTERM has come: a script may exit with the same code of its own."""

# Messages of Gloo, NCCL and the store when another rank is gone or does not answer.
_PEER = re.compile(
    r"Connection closed by peer|Connection reset|Broken pipe|connectFullMesh|Timed out waiting|pair closure"
    r"|Socket Timeout|wait timeout|NCCL communicator was aborted|remote process exited"
    r"|client socket has timed out|failed to recv|Connection was likely closed",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTask:
    """Everything that one rank needs to know; sent to its process with pickle.

    Attributes:
        connection: to the launcher, where this rank may outlive the loss of others.
    """

    rank: int
    target: str
    arguments: tuple[str, ...]
    is_module: bool
    folder: Path
    threads: int
    environment: dict[str, str]
    connection: Connection | None = None


def rank_command(spec: LaunchSpec) -> list[str]:
    """Return the command that runs a rank, for launchers that do not fork.

    It runs under the variables of `launch_environment.of_node` and `of_rank`, which say which rank it is. The run
    folder must exist for the rank under the same path.

    Args:
        spec: what is started.

    Examples:
        >>> spec = LaunchSpec(target="train.py", arguments=("--epochs", "3"), folder=Path("/runs/1"))
        >>> rank_command(spec)[1:]
        ['-m', 'tutti.launch.rank_main', 'train.py', '--epochs', '3']
    """
    module = ["-m"] if spec.is_module else []
    return [sys.executable, "-m", "tutti.launch.rank_main", *module, spec.target, *spec.arguments]


def _task_of_environment(arguments: list[str]) -> RankTask:
    """Return the task of a rank that was started as `rank_command` says."""
    is_module = arguments[:1] == ["-m"]
    target, *rest = arguments[is_module:]
    rank, folder, threads, environment = started_rank()
    return RankTask(
        rank=rank,
        target=target,
        arguments=tuple(rest),
        is_module=is_module,
        folder=folder,
        threads=threads,
        environment=environment,
    )


def main(task: RankTask) -> None:
    """Run a rank from start to end. Ends the process with SystemExit and raises nothing else."""
    supervisor = _end_with_parent()
    signal.signal(signal.SIGTERM, _terminate)
    multiprocessing.set_start_method(None, force=True)  # the script chooses, as in a fresh interpreter
    _limit_threads(task.threads)
    survivor = Survivor(task.connection, supervisor)
    if supervisor is not None:
        start_watch(survivor.watch)
    following: RankTask | None = task
    while following is not None:
        task = following
        folder = RunFolder(task.folder).rank(task.rank)
        folder.mkdir(parents=True, exist_ok=True)
        _redirect(folder)
        become(task.environment)
        _record_events(task, folder)
        threading.excepthook = functools.partial(_on_thread_error, task.rank, folder)
        try:
            following = _run(task, folder, survivor)
        except SystemExit:
            raise
        except BaseException as error:  # while it handled another: the handler of SIGCHLD, for one more worker
            _ignore_children()
            _write(folder, failure_of(task.rank, error))
            _leave(1)
    sys.exit(_finish(0))


def _record_events(task: RankTask, folder: Path) -> None:
    """Record what this rank does, and let a thread tell where it waits."""
    refused = open_record(folder, task.rank, int(task.environment.get("WORLD_SIZE", 1)))
    if refused:
        sys.stderr.write(f"tutti: {refused}\n")
    watch_stacks(folder)


def _run(task: RankTask, folder: Path, survivor: Survivor) -> RankTask | None:
    """Run the script; a failure is written to error.json before anything else happens.

    Returns:
        The task of this rank in the next generation, if it has lost another rank and goes on; None at the end.
    """
    try:
        try:
            _run_target(task)
        except SystemExit as ended:
            if _exit_code(ended):
                raise
        _await_threads(float(task.environment.get("TUTTI_TIMEOUT_S", _THREADS_TIMEOUT_S)))
    except SystemExit as ended:
        _ignore_children()
        code = _exit_code(ended)
        if code == RESUMABLE or (code == TERMINATED and _terminated.is_set()):
            (folder / "stopped").touch()
        else:
            _write(
                folder,
                _described(task.rank, "run", code, f"the script exited with {_said(ended)}{_last_words(folder)}"),
            )
        _leave(code)
    except BaseException as error:
        _ignore_children()
        failure = failure_of(task.rank, error)
        following: RankTask | None = None
        if failure.kind == "peer":
            try:
                following = survivor.next_task(error, failure)
            except SystemExit:
                pass  # the launcher ends this rank while it waits
            except Exception:  # of the script, whose state cannot be kept: a new process takes the place of this one
                traceback.print_exc()
        if following is None:
            _write(folder, failure)
            _leave(failure.exit_code)
        return following
    return None


def _run_target(task: RankTask) -> None:
    """Run the script or module as `python script.py` or `python -m module` would."""
    sys.argv = [task.target, *task.arguments]
    if task.is_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(task.target, run_name="__main__", alter_sys=True)
    else:
        script = Path(task.target).resolve()
        if not sys.flags.safe_path:
            sys.path[0] = str(script.parent)
        runpy.run_path(str(script), run_name="__main__")


def _on_thread_error(rank: int, folder: Path, arguments: threading.ExceptHookArgs) -> None:
    """End the process for an error of tutti's in a thread: the main thread may wait for other ranks for ever."""
    error = arguments.exc_value
    if not isinstance(error, TuttiError):
        threading.__excepthook__(arguments)
        return
    _write(folder, failure_of(rank, error))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(error.exit_code)


_THREADS_TIMEOUT_S = 600.0
"""Seconds that the script's threads have to end after the script, where the launcher states no time-out."""

_THREADS_NOTICE_S = 10.0

_LAST_LINES = 5


def _await_threads(timeout_s: float) -> None:
    """Wait for the script's own threads, as an interpreter does before it ends.

    The interpreter's own function does it: it first wakes the threads of libraries that wait for work, such as those of
    a ThreadPoolExecutor that nobody has shut down.

    Args:
        timeout_s: seconds after which threads count as hanging.

    Raises:
        ScriptError: a thread has not ended in time.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    began = time.monotonic()

    def on_alarm(signum: int, frame: FrameType | None) -> None:
        names = ", ".join(repr(thread.name) for thread in _own_threads())
        if time.monotonic() - began < timeout_s:
            sys.stderr.write(f"tutti: the script has ended; waiting up to {timeout_s:g} s for its threads: {names}\n")
            signal.setitimer(signal.ITIMER_REAL, max(timeout_s - (time.monotonic() - began), 1e-3))
            return
        raise ScriptError(
            f"the script ended, but after {timeout_s:g} s its threads had not: {names}; end them before the script "
            "ends, make them daemon threads, or raise --timeout"
        )

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, min(_THREADS_NOTICE_S, timeout_s))
    try:
        threading._shutdown()  # type: ignore[attr-defined]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _own_threads() -> list[threading.Thread]:
    """The script's threads that are still running, without daemon threads, which need not end."""
    return [thread for thread in threading.enumerate() if thread is not threading.main_thread() and not thread.daemon]


def _leave(code: int) -> NoReturn:
    """End the process at once: without joining threads, one that hangs cannot keep the other ranks waiting."""
    _finish(code)
    os._exit(code)


def _ignore_children() -> None:
    """Let torch raise nothing for workers of a loader that end: its handler would, also while an error is handled."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _finish(code: int) -> int:
    """Run exit functions and flush the output: an interpreter does so at its end, a forked process does not."""
    _ignore_children()
    for child in multiprocessing.active_children():  # Python waits for them, for ever if one is stopped
        if child.daemon and child.pid is not None and is_stopped(child.pid):
            child.kill()
    # A launcher may pass on a SIGTERM that a scheduler sent to this process too: it has stopped already.
    signal.signal(signal.SIGTERM, signal.SIG_IGN if code == RESUMABLE else signal.SIG_DFL)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    return code


def _exit_code(ended: SystemExit) -> int:
    if ended.code is None:
        return 0
    return ended.code & 0xFF if isinstance(ended.code, int) else 1


def _said(ended: SystemExit) -> str:
    return f"exit code {ended.code}" if isinstance(ended.code, int) else f"the message: {ended.code}"


def _last_words(folder: Path) -> str:
    """The last line on standard error, as argparse writes it before it ends a script."""
    sys.stderr.flush()
    with contextlib.suppress(OSError):
        lines = (folder / "stderr.log").read_text(encoding="utf-8", errors="replace").split("\n")[-_LAST_LINES:]
        words = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f" ({hide_secrets(words)})" if words else ""
    return ""


def _terminate(signum: int, frame: FrameType | None) -> None:
    """Handle the supervisor's request to end: leave through the script's `finally` blocks."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _terminated.set()
    raise SystemExit(TERMINATED)


def leave_with_supervisor() -> None:
    """Make this process the leader of a group that ends as a whole as soon as the process that started it is gone."""
    supervisor = _end_with_parent()
    if supervisor is not None:
        start_watch(Survivor(None, supervisor).watch)


def _end_with_parent() -> int | None:
    """Let the kernel end this process, the leader of a group, with its parent; return what tells that it is gone."""
    with contextlib.suppress(PermissionError):  # the leader of a session, as in a container, leads its group already
        os.setpgid(0, 0)  # so that whatever the script starts can be ended with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor handles Ctrl-C
    supervisor = multiprocessing.parent_process()
    if supervisor is not None:  # the thread below cannot end a rank that is stopped, or computes with the GIL held
        process_tree.end_with_pipe(supervisor.sentinel)
        process_tree.end_with_parent()
    return None if supervisor is None else supervisor.sentinel


def _redirect(folder: Path) -> None:
    """Send file descriptors 1 and 2, and so also what C++ prints, to this rank's files, line by line."""
    for descriptor, stream, name in ((1, sys.stdout, "stdout.log"), (2, sys.stderr, "stderr.log")):
        log = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, descriptor)
        os.close(log)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")


def _limit_threads(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)


def failure_of(rank: int, error: BaseException) -> RankError:
    """Return the record of an exception that left the script.

    Args:
        rank: the rank that failed.
        error: the exception.
    """
    if is_peer_error(error):
        return _described(rank, "peer", 1, _one_line(error), error)
    if isinstance(error, TuttiError):
        kind: ErrorKind = "user" if error.exit_code == 2 else "run"
        return _described(rank, kind, error.exit_code, str(error), error)
    return _described(rank, "exception", 1, _one_line(error), error)


def is_peer_error(error: BaseException) -> bool:
    """Return whether `error`, or one of its causes, is a collective that failed because another rank was gone.

    The script may use connections of its own, so a system error counts only where tutti or torch.distributed raised it.
    """
    return any(
        isinstance(link, RuntimeError | OSError)
        and _PEER.search(str(link)) is not None
        and not (isinstance(link, OSError) and _is_outside_collectives(link))
        for link in _chain(error)
    )


def _is_outside_collectives(error: BaseException) -> bool:
    """Return whether the innermost frame, without those of Python's library, is none that talks to other ranks."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    innermost = next((file for file in reversed(files) if not _is_of_python(file)), None)
    return innermost is not None and not innermost.startswith(_OURS) and _TORCH_DISTRIBUTED not in innermost


def _is_of_python(file: str) -> bool:
    return file.startswith(("<frozen ", f"{Path(os.__file__).parent}{os.sep}")) and "site-packages" not in file


_TORCH_DISTRIBUTED = f"{os.sep}torch{os.sep}distributed{os.sep}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _described(rank: int, kind: ErrorKind, code: int, message: str, error: BaseException | None = None) -> RankError:
    return RankError(
        rank=rank,
        host=socket.gethostname(),
        time_s=time.time(),
        kind=kind,
        exit_code=code,
        message=message,
        traceback=user_traceback(error) if error is not None else "",
        error=type(error).__name__ if error is not None else "",
    )


def _one_line(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]


def user_traceback(error: BaseException) -> str:
    """Return the traceback without the frames of tutti and runpy that ran the script, or call its code in between."""
    for link in _chain(error):
        link.__traceback__ = _without_callers(_from_user_frame(link.__traceback__))
    return _without_own_calls("".join(traceback.format_exception(error)))


def _without_own_calls(trace: str) -> str:
    """Leave out what the loader's machinery adds to the traceback that a worker has sent as a text."""
    begun, marker, of_worker = trace.partition("\nOriginal Traceback (most recent call last):\n")
    shown, leaves_out = [], False
    for line in of_worker.splitlines(keepends=True):
        if not line.startswith("    "):
            leaves_out = line.startswith("  File ") and (_OURS in line or _LOADER in line)
        if not leaves_out:
            shown.append(line)
    return f"{begun}{marker}{''.join(shown)}"


def _from_user_frame(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and _is_own(trace.tb_frame):
        trace = trace.tb_next
    return trace


def _without_callers(trace: TracebackType | None) -> TracebackType | None:
    """Leave out frames of tutti that have called the script's code, such as a callback; what failed in tutti stays."""
    links: list[TracebackType] = []
    while trace is not None:
        links.append(trace)
        trace = trace.tb_next
    scripts = (number for number, link in enumerate(links) if not _file(link).startswith((*_LIBRARIES, _OURS)))
    last = max(scripts, default=-1)
    if last >= 0 and _file(links[-1]).endswith(_RAISES_AGAIN):  # a worker's error, raised again: its text has the calls
        links = links[: last + 1]
    shown = [link for number, link in enumerate(links) if number > last or not _file(link).startswith(_OURS)]
    shown = [link for link in shown if not _file(link).endswith(_PASSES_ON)]
    for link in reversed(shown):
        trace = TracebackType(trace, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return trace


def _file(link: TracebackType) -> str:
    return link.tb_frame.f_code.co_filename


def _is_own(frame: FrameType) -> bool:
    """Return whether a frame runs the user's code, and is none of it; a script of tutti's says so in a variable."""
    return frame.f_code.co_filename.startswith(_OWN_FRAMES) or "__tutti_calls__" in frame.f_globals


_PACKAGE = Path(__file__).parent.parent
_OURS = f"{_PACKAGE}{os.sep}"
_LIBRARIES = (sys.prefix, sys.base_prefix, "<frozen ")
_LOADER = f"{os.sep}torch{os.sep}utils{os.sep}data{os.sep}_utils{os.sep}"
_PASSES_ON = f"{os.sep}comm{os.sep}noted_collectives.py"
_RAISES_AGAIN = f"{os.sep}torch{os.sep}_utils.py"
_OWN_FRAMES = (
    *(f"{_PACKAGE / name}{os.sep}" for name in ("launch", "commands", "cli")),
    runpy.__file__,
    "<frozen runpy>",
)


def _write(folder: Path, failure: RankError) -> None:
    """Write error.json. A full disk must not hide the failure itself."""
    try:
        serialization.save(failure, folder / "error.json")
    except OSError:
        raised = failure.kind in ("exception", "peer")
        sys.stderr.write((raised and failure.traceback) or f"tutti: {failure.message}\n")


if __name__ == "__main__":
    main(_task_of_environment(sys.argv[1:]))

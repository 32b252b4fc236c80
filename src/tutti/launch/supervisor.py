"""Supervises started ranks until all have ended: the one loop of `tutti run`, for every launcher."""

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from tutti.config import serialization
from tutti.config.run_folder import RunFolder
from tutti.errors import SpecError
from tutti.launch.launcher import Handle, LaunchSpec, RankError
from tutti.launch.rank_watch import Watcher

Status = Literal["completed", "failed", "stopped"]

POLL_S = 0.1


SETTLE_S = 1.0
"""Seconds that the other ranks have to report what happened to them, once one has failed."""


SETTLE_PEERS_S = 3.0
"""The same, in seconds, while only losses of peers are known and the cause is still to come."""


GRACE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The primary cause of a failed run: the same error on one or more ranks.

    Attributes:
        ranks: the ranks that failed with it.
        first: the rank that failed first.
        hosts: their hosts.
        traceback: empty unless user code raised.
        error: name of the exception's class; empty if there was none.
    """

    ranks: tuple[int, ...]
    first: int
    hosts: tuple[str, ...]
    message: str
    traceback: str
    exit_code: int
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of a run.

    Attributes:
        failure: set if a rank failed.
        signal: set if the run was stopped from outside.
    """

    status: Status
    exit_code: int
    failure: Failure | None = None
    signal: int | None = None


class Interrupts:
    """Signals that ask the supervisor to end.

    Attributes:
        number: the first signal received, or None.
        count: how many were received.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self.count = 0

    def take(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        self.number = self.number or number
        self.count += 1


@contextmanager
def interrupts() -> Iterator[Interrupts]:
    """Collect Ctrl-C, SIGTERM and SIGHUP while the context lasts, instead of ending the process."""
    received = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before: dict[signal.Signals, Any] = {
        number: signal.signal(number, received.take) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def supervise(
    start: Callable[[], Handle],
    spec: LaunchSpec,
    watcher: Watcher,
    interrupted: Interrupts,
    *,
    grace_s: float = GRACE_S,
    say: Callable[[str], None] = lambda words: None,
) -> Outcome:
    """Start the ranks and watch them until all have ended; leave none behind, whatever happens.

    Args:
        start: starts the ranks.
        spec: what is started on this node.
        watcher: shows their output.
        interrupted: the signals received so far.
        grace_s: seconds that ranks have to end by themselves when they are stopped.
        say: takes messages for the user while ranks still run.
    """
    clear_errors(spec)
    with watcher:
        handle = start()
        try:
            outcome = _watch(handle, spec, watcher, interrupted, grace_s, say)
        finally:
            handle.stop(0)
    if outcome.status == "failed":  # only now, because the watcher would have shown these lines too
        append_tracebacks(spec, read_errors(spec))
    return outcome


def _watch(
    handle: Handle,
    spec: LaunchSpec,
    watcher: Watcher,
    interrupted: Interrupts,
    grace_s: float,
    say: Callable[[str], None],
) -> Outcome:
    while True:
        exits = handle.wait(POLL_S)
        watcher.update()
        if interrupted.number is not None:
            say(f"stopping all ranks; they have {grace_s:g} s to end; press Ctrl-C again to kill them now")
            handle.stop(grace_s, hurry=lambda: interrupted.count > 1)
            return Outcome(status="stopped", exit_code=128 + interrupted.number, signal=interrupted.number)
        if any(exits.values()):
            return _failed(handle, spec, watcher, exits, grace_s)
        if len(exits) == spec.local_world_size:
            return Outcome(status="completed", exit_code=0)


def _failed(handle: Handle, spec: LaunchSpec, watcher: Watcher, exits: Mapping[int, int], grace_s: float) -> Outcome:
    """Collect the other ranks' errors, end the ranks and name the cause."""
    errors: dict[int, RankError] = {}
    waited_s = 0.0
    while True:
        for rank, code in exits.items():
            if code and rank not in errors:
                errors[rank] = read_errors(spec).get(rank) or killed(rank, code)
        errors |= read_errors(spec)
        known = any(error.kind != "peer" for error in errors.values())
        # With a shared folder, the errors of other nodes' ranks count too, so that all nodes name the same cause.
        heard = len(exits) == spec.local_world_size and (spec.nodes == 1 or len(errors) == spec.world_size)
        if heard or waited_s >= (SETTLE_S if known else SETTLE_PEERS_S):
            break
        if len(exits) == spec.local_world_size:
            time.sleep(POLL_S)
        else:
            exits = handle.wait(POLL_S)
        waited_s += POLL_S
        watcher.update()
    handle.stop(grace_s)
    watcher.update()
    cause = primary(spec, errors, exits)
    return Outcome(status="failed", exit_code=cause.exit_code or 1, failure=cause)


_SIGNAL_CAUSES = {
    signal.SIGKILL: "most likely the system ran out of memory; use a smaller batch, more microbatches or fewer ranks",
    signal.SIGSEGV: "a crash in native code; run the script with `python -X faulthandler` to see where",
    signal.SIGBUS: "most likely /dev/shm is full (use fewer data loader workers, or enlarge it), or a file was cut "
    "short while it was mapped into memory",
    signal.SIGABRT: "native code aborted; its last message is in the rank's stderr.log",
    signal.SIGILL: "this processor lacks an instruction that a library was built for; install a build for it",
    signal.SIGTERM: "another program ended this process; see the system's or the scheduler's log",
    signal.SIGXCPU: "it reached its limit of processor time; raise it with `ulimit -t`",
}


def clear_errors(spec: LaunchSpec) -> None:
    """Remove what this node's ranks recorded in an earlier run in the same folder."""
    for rank in spec.ranks:
        _error_file(spec.folder, rank).unlink(missing_ok=True)
        (RunFolder(spec.folder).rank(rank) / "stopped").unlink(missing_ok=True)


def read_errors(spec: LaunchSpec) -> dict[int, RankError]:
    """Return the errors that ranks have written so far, by rank; those of other nodes too if the folder is shared."""
    errors = {}
    for rank in range(spec.world_size):
        with contextlib.suppress(SpecError):
            errors[rank] = serialization.load(RankError, _error_file(spec.folder, rank))
    return errors


def _error_file(folder: Path, rank: int) -> Path:
    return RunFolder(folder).rank(rank) / "error.json"


def killed(rank: int, code: int) -> RankError:
    """Return the error of a rank that left no record: ended by a signal (`code` < 0 or 143), or by os._exit.

    Args:
        rank: the rank.
        code: its exit code; -N for signal N.
    """
    if (
        code < 0 or code == 128 + signal.SIGTERM
    ):  # on SIGTERM a rank leaves through its `finally` blocks, with this code
        number = signal.Signals(-code if code < 0 else code - 128)
        cause = _SIGNAL_CAUSES.get(number, "see its stderr.log")
        message = f"it was killed by signal {int(number)} ({number.name}): {cause}"
    else:
        message = f"it ended with exit code {code} and recorded no error; see its stderr.log"
    return RankError(
        rank=rank,
        host=socket.gethostname(),
        time_s=time.time(),
        kind="killed",
        exit_code=1 if code < 0 else code,
        message=message,
    )


def primary(spec: LaunchSpec, errors: Mapping[int, RankError], exits: Mapping[int, int]) -> Failure:
    """Return the cause among `errors`: the earliest that is not the loss of a peer, with all ranks that share it.

    If every rank only lost another one, the cause is the rank that ended early or never answered.

    Args:
        spec: what was started on this node.
        errors: errors by rank.
        exits: exit codes of this node's ranks that ended on their own.
    """
    causes = [error for error in errors.values() if error.kind != "peer"]
    if not causes:
        return _peers_only(spec, errors, exits)
    first = min(causes, key=lambda error: error.time_s)
    return _failure(error for error in causes if (error.kind, error.message) == (first.kind, first.message))


def _failure(errors: Iterable[RankError], message: str | None = None) -> Failure:
    same = sorted(errors, key=lambda error: error.rank)
    shown = min(same, key=lambda error: error.time_s)
    raised = shown.kind in ("exception", "peer")
    return Failure(
        ranks=tuple(error.rank for error in same),
        first=shown.rank,
        hosts=tuple(dict.fromkeys(error.host for error in same)),
        message=message or shown.message,
        traceback=shown.traceback if raised else "",
        exit_code=shown.exit_code,
        error=shown.error,
    )


def _peers_only(spec: LaunchSpec, errors: Mapping[int, RankError], exits: Mapping[int, int]) -> Failure:
    here = socket.gethostname()
    early = tuple(rank for rank in spec.ranks if exits.get(rank) == 0)
    silent = tuple(rank for rank in spec.ranks if rank not in exits and rank not in errors)
    if early:
        message = (
            "the script ended there while other ranks still waited for it in a collective; every rank must take "
            "the same number of steps"
        )
        return Failure(ranks=early, first=early[0], hosts=(here,), message=message, traceback="", exit_code=1)
    if silent:
        message = (
            "it did not answer the other ranks in time, but has not failed; it hangs, or is far slower than they are: "
            "see its stdout.log and stderr.log"
        )
        return Failure(ranks=silent, first=silent[0], hosts=(here,), message=message, traceback="", exit_code=1)
    if spec.nodes > 1:
        first = min(errors.values(), key=lambda error: error.time_s)
        lost = f"{first.message}; a rank of another node failed or was cut off: see that node's output"
        return _failure([first], lost)
    return _failure([min(errors.values(), key=lambda error: error.time_s)])


def sentence(spec: LaunchSpec, failure: Failure) -> str:
    """Return the message for the user: which ranks, where and why, with the traceback if user code raised.

    Args:
        spec: what was started on this node.
        failure: the cause.
    """
    if not failure.traceback:
        return f"{_who(spec, failure)} failed: {failure.message}"
    if failure.message in failure.traceback:
        return f"{_who(spec, failure)} failed:\n{failure.traceback.rstrip()}"
    return f"{_who(spec, failure)} failed: {failure.message}\n{failure.traceback.rstrip()}"


def _who(spec: LaunchSpec, failure: Failure) -> str:
    where = f"host{'s' if len(failure.hosts) > 1 else ''} {', '.join(failure.hosts)}"
    if len(failure.ranks) == spec.world_size > 1:
        return f"all {spec.world_size} ranks on {where}"
    if len(failure.ranks) == 1:
        return f"rank {failure.ranks[0]} on {where}"
    *head, last = map(str, failure.ranks)
    return f"ranks {', '.join(head)} and {last} on {where}"


def append_tracebacks(spec: LaunchSpec, errors: Mapping[int, RankError]) -> None:
    """Append the tracebacks to this node's stderr.log files. Ranks write them only to error files, to show them once.

    Args:
        spec: what was started on this node.
        errors: errors by rank.
    """
    for rank in set(spec.ranks) & set(errors):
        with contextlib.suppress(OSError), (RunFolder(spec.folder).rank(rank) / "stderr.log").open("a") as log:
            log.write(errors[rank].traceback or errors[rank].message + "\n")

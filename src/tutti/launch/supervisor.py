"""Watching over started ranks until all have ended: the one loop of `tutti run`, whatever the launcher."""

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
"""How long the other ranks may take to say what happened to them, once one has failed."""


SETTLE_PEERS_S = 3.0
"""The same while all that is known is that a peer was lost: the cause must still come."""


GRACE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The primary cause of a failed run: the same error on one or several ranks, of which `first` failed first."""

    ranks: tuple[int, ...]
    first: int
    hosts: tuple[str, ...]
    message: str
    traceback: str
    exit_code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended. `failure` when a rank failed, `signal` when it was stopped from outside."""

    status: Status
    exit_code: int
    failure: Failure | None = None
    signal: int | None = None


class Interrupts:
    """Signals that ask the supervisor to end. The first is kept here; `count` says whether they insist."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.count = 0

    def take(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        self.number = self.number or number
        self.count += 1


@contextmanager
def interrupts() -> Iterator[Interrupts]:
    """Collect Ctrl-C, SIGTERM and SIGHUP instead of dying of them, for as long as the context lasts."""
    found = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield found
        return
    before: dict[signal.Signals, Any] = {
        number: signal.signal(number, found.take) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield found
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
    """Start the ranks, watch until all have ended and leave none behind, whatever happens.

    `say`: takes a remark for the user while ranks still run.
    """
    clear_errors(spec)
    with watcher:
        handle = start()
        try:
            outcome = _watch(handle, spec, watcher, interrupted, grace_s, say)
        finally:
            handle.stop(0)
    if outcome.status == "failed":  # only now: what a log gains while it is watched is shown
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
            say(f"stopping all ranks; they have {grace_s:g} s, or press Ctrl-C again to end them now")
            handle.stop(grace_s, hurry=lambda: interrupted.count > 1)
            return Outcome(status="stopped", exit_code=128 + interrupted.number, signal=interrupted.number)
        if any(exits.values()):
            return _failed(handle, spec, watcher, exits, grace_s)
        if len(exits) == spec.local_world_size:
            return Outcome(status="completed", exit_code=0)


def _failed(handle: Handle, spec: LaunchSpec, watcher: Watcher, exits: Mapping[int, int], grace_s: float) -> Outcome:
    """Hear the other ranks, end them, and name the cause."""
    errors: dict[int, RankError] = {}
    waited_s = 0.0
    while True:
        for rank, code in exits.items():
            if code and rank not in errors:
                errors[rank] = read_errors(spec).get(rank) or killed(rank, code)
        errors |= read_errors(spec)
        known = any(error.kind != "peer" for error in errors.values())
        # Ranks of other nodes are heard where the folder is shared: all nodes then name the same cause.
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
    signal.SIGBUS: "most likely /dev/shm is full; use fewer data loader workers, or enlarge it",
    signal.SIGABRT: "native code gave up; its last words are in the rank's stderr.log",
    signal.SIGILL: "this processor lacks an instruction that a library was built for; install a build for it",
    signal.SIGTERM: "somebody ended this process; see the system's or the scheduler's log",
    signal.SIGXCPU: "its limit of processor time was reached; raise it with `ulimit -t`",
}


def clear_errors(spec: LaunchSpec) -> None:
    """Remove what an earlier run in the same folder said about this node's ranks."""
    for rank in spec.ranks:
        _error_file(spec.folder, rank).unlink(missing_ok=True)
        (RunFolder(spec.folder).rank(rank) / "stopped").unlink(missing_ok=True)


def read_errors(spec: LaunchSpec) -> dict[int, RankError]:
    """The errors that ranks have written so far, by rank; of other nodes' ranks where the folder is shared."""
    found = {}
    for rank in range(spec.world_size):
        with contextlib.suppress(SpecError):
            found[rank] = serialization.load(RankError, _error_file(spec.folder, rank))
    return found


def _error_file(folder: Path, rank: int) -> Path:
    return RunFolder(folder).rank(rank) / "error.json"


def killed(rank: int, code: int) -> RankError:
    """The error of a rank that left no word: ended by a signal (`code` < 0), or by os._exit."""
    if code < 0 or code == 128 + signal.SIGTERM:  # a rank leaves by its `finally` blocks on SIGTERM
        number = signal.Signals(-code if code < 0 else code - 128)
        cause = _SIGNAL_CAUSES.get(number, "see its stderr.log")
        message = f"it was killed by signal {int(number)} ({number.name}): {cause}"
    else:
        message = f"it ended with exit code {code} and said nothing; see its stderr.log"
    return RankError(
        rank=rank,
        host=socket.gethostname(),
        time_s=time.time(),
        kind="killed",
        exit_code=1 if code < 0 else code,
        message=message,
    )


def primary(spec: LaunchSpec, errors: Mapping[int, RankError], exits: Mapping[int, int]) -> Failure:
    """The cause among `errors`: the earliest that is not itself the loss of a peer; with it, equal ones.

    `exits`: exit codes of this node's ranks that ended on their own. Where every rank only lost another one, the
    rank that ended early or never answered is named.
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
            "it did not answer the others in time and had not failed; it hangs, or is far slower than they are: "
            "see its stdout.log and stderr.log"
        )
        return Failure(ranks=silent, first=silent[0], hosts=(here,), message=message, traceback="", exit_code=1)
    if spec.nodes > 1:
        first = min(errors.values(), key=lambda error: error.time_s)
        lost = f"{first.message}; a rank of another node failed or was cut off: its own output says why"
        return _failure([first], lost)
    return _failure([min(errors.values(), key=lambda error: error.time_s)])


def sentence(spec: LaunchSpec, failure: Failure) -> str:
    """What the user reads, once: who, where, why; the traceback where user code raised."""
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
    """Complete this node's stderr.log files: a rank leaves its traceback to its error file, to be shown once."""
    for rank in set(spec.ranks) & set(errors):
        with contextlib.suppress(OSError), (RunFolder(spec.folder).rank(rank) / "stderr.log").open("a") as log:
            log.write(errors[rank].traceback or errors[rank].message + "\n")

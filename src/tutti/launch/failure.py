"""What ranks left behind when they failed, and which of it is the primary cause, in words."""

import contextlib
import signal
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tutti.config import serialization
from tutti.config.run_folder import RunFolder
from tutti.errors import SpecError
from tutti.launch.hang_verdict import HangVerdict, caught_error, judge, last_operation, mismatch_of
from tutti.launch.launcher import ErrorKind, Explaining, Handle, LaunchSpec, RankError
from tutti.launch.rank_views import ranks_in, view_ranks
from tutti.process_stacks import describe_place, frames_of_traceback


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The primary cause of a failed run: the same error on one or more ranks.

    Attributes:
        ranks: the ranks that failed with it.
        first: the rank that failed first.
        hosts: their hosts.
        traceback: empty unless user code raised.
        error: name of the exception's class; empty if there was none.
        kind: kind of the failure.
        verdict: why ranks hang, as a sentence; empty if they do not.
    """

    ranks: tuple[int, ...]
    first: int
    hosts: tuple[str, ...]
    message: str
    traceback: str
    exit_code: int
    error: str = ""
    kind: ErrorKind = "run"
    verdict: str = ""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFailure:
    """Why a run has failed, as `tutti run` has said it, without a traceback."""

    message: str


def store_failure(spec: LaunchSpec, failure: Failure) -> None:
    """Write why the run has failed into its folder; a full disk hides nothing."""
    words = sentence(spec, replace(failure, traceback=""))
    with contextlib.suppress(OSError):
        serialization.save(StoredFailure(message=words), RunFolder(spec.folder).failure)


def stored_failure(folder: RunFolder) -> str:
    """Return why the run in a folder has failed; empty if it has not, or if that was not written."""
    with contextlib.suppress(SpecError):
        return serialization.load(StoredFailure, folder.failure).message
    return ""


def clear_errors(spec: LaunchSpec) -> None:
    """Remove what this node's ranks recorded in an earlier run in the same folder."""
    if spec.node_rank == 0:
        RunFolder(spec.folder).failure.unlink(missing_ok=True)
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


def exit_error(spec: LaunchSpec, rank: int, code: int, handle: Handle) -> RankError:
    """Return the error of a rank that left no record: ended by a signal, or by os._exit.

    Args:
        spec: what was started on this node.
        rank: the rank.
        code: its exit code; -N for signal N.
        handle: the ranks; a launcher may know the cause.
    """
    known = handle.explain(rank) if isinstance(handle, Explaining) else None
    # On SIGTERM a rank leaves through its `finally` blocks and says so with a file; scripts may use the same exit code.
    terminated = code == -signal.SIGTERM or (RunFolder(spec.folder).rank(rank) / "stopped").exists()
    return killed(rank, -int(signal.SIGTERM) if terminated else code, known)


def killed(rank: int, code: int, known: str | None = None) -> RankError:
    """Return the error of a rank that left no record.

    Args:
        rank: the rank.
        code: its exit code; -N for signal N.
        known: what the launcher knows about it, in words.
    """
    if known is not None:
        message = known
    elif code < 0:
        number = signal.Signals(-code)
        cause = _SIGNAL_CAUSES.get(number, "see its stderr.log")
        message = f"it was killed by signal {int(number)} ({number.name}): {cause}"
    else:
        message = f"it ended with exit code {code} and recorded no error; see its stderr.log"
    ended = 128 + signal.SIGTERM if code == -signal.SIGTERM else 1 if code < 0 else code
    return RankError(
        rank=rank,
        host=socket.gethostname(),
        time_s=time.time(),
        kind="killed",
        exit_code=ended,
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
        kind=shown.kind,
    )


def _peers_only(spec: LaunchSpec, errors: Mapping[int, RankError], exits: Mapping[int, int]) -> Failure:
    here = socket.gethostname()
    early = tuple(rank for rank in spec.ranks if exits.get(rank) == 0)
    silent = tuple(rank for rank in spec.ranks if rank not in exits and rank not in errors)
    if early:
        waited = (frames_of_traceback(error.traceback) for error in errors.values())
        place = next((describe_place(frames[:1]) for frames in waited if frames), " in a collective")
        view = view_ranks(RunFolder(spec.folder), early[:1], ask=False)[0]
        last = f" after {last_operation(view)}" if last_operation(view) else ""
        message = (
            f"the script ended there{last}, while other ranks still waited for it{place}; every rank must take the "
            "same number of steps: end the loop by job.should_stop(condition)"
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


HANGS = "Hang"
"""The name in the place of an error's, of ranks that hang."""


def hang(verdict: HangVerdict) -> Failure:
    """Return the failure of ranks that hang: those that others wait for, or all that wait.

    Args:
        verdict: why they hang.
    """
    ranks = verdict.missing or verdict.waiting
    return Failure(
        ranks=ranks,
        first=ranks[0],
        hosts=tuple(dict.fromkeys(verdict.hosts[r] for r in ranks if r in verdict.hosts)) or (socket.gethostname(),),
        message=f"ranks hang ({verdict.kind})",  # the same if it happens again
        traceback="",
        exit_code=1,
        error=HANGS,
        verdict=verdict.message,
    )


LOST_NODE = "LostNode"
"""The same, of ranks that are gone with their node."""

_MOST_LETTERS = 20_000


def shortened(failure: Failure) -> Failure:
    """Return a failure with texts that a message between nodes has room for: their beginnings and ends.

    Args:
        failure: the cause.
    """

    def short(text: str) -> str:
        half = _MOST_LETTERS // 2
        return text if len(text) <= _MOST_LETTERS else f"{text[:half]} [...] {text[-half:]}"

    return replace(
        failure,
        message=short(failure.message),
        traceback=short(failure.traceback),
        verdict=short(failure.verdict),
    )


def explain_timeout(spec: LaunchSpec, errors: Mapping[int, RankError]) -> HangVerdict | None:
    """Return why ranks hang if all that has failed is that some waited too long; ask the ranks that live.

    Args:
        spec: what was started on this node.
        errors: errors by rank.
    """
    if not errors or not all(has_waited(error) for error in errors.values()):
        return None
    folder = RunFolder(spec.folder)
    ranks = [rank for rank in ranks_in(folder) if rank < spec.world_size]  # of other nodes, too, in a shared folder
    traces = {rank: frames_of_traceback(error.traceback) for rank, error in errors.items()}
    views = [replace(view, failed=tuple(traces.get(view.rank, ()))) for view in view_ranks(folder, ranks)]
    verdict = judge(views, time.time())
    if verdict.kind != "missing" and any(map(is_of_rendezvous, errors.values())):  # a node never came
        return None
    return verdict if verdict.kind != "none" else None


def is_of_rendezvous(error: RankError | Failure) -> bool:
    """Return whether a rank has failed because others did not come to the rendezvous."""
    words = ("did not come to the rendezvous within", "could not meet rank 0 within")
    return error.error == "LaunchError" and any(each in error.message for each in words)


def with_mismatch(spec: LaunchSpec, failure: Failure) -> Failure:
    """Return the failure of a rank that native code has aborted, with the collectives that did not fit, if it is that.

    Gloo ends a process whose peer sends a tensor of another size.

    Args:
        spec: what was started on this node.
        failure: the primary cause.
    """
    if failure.kind != "killed" or signal.SIGABRT.name not in failure.message:
        return failure
    views = view_ranks(RunFolder(spec.folder), spec.ranks, ask=False)
    verdict = judge(views, time.time())
    found = verdict.message if verdict.kind == "mismatch" else mismatch_of(views, failure.first)
    return replace(failure, verdict=found) if found else failure


def with_caught(spec: LaunchSpec, failure: Failure) -> Failure:
    """Return the failure of a rank whose script has caught the error of a collective, if all that is known is a loss.

    Args:
        spec: what was started on this node.
        failure: the primary cause.
    """
    if failure.kind != "peer":
        return failure
    words = caught_error(view_ranks(RunFolder(spec.folder), spec.ranks, ask=False))
    return replace(failure, traceback="", kind="run", message=f"it lost another rank; {words}") if words else failure


def has_waited(error: RankError | Failure) -> bool:
    """Return whether a rank has failed because it waited too long for another."""
    if error.error == "RankMismatchError":
        return "which did not come after" in error.message
    if is_of_rendezvous(error):
        return True
    return error.kind == "peer" and any(words in error.message.lower() for words in ("timed out", "timeout"))


def sentence(spec: LaunchSpec, failure: Failure) -> str:
    """Return the message for the user: which ranks, where and why, with the traceback if user code raised.

    Args:
        spec: what was started on this node.
        failure: the cause.
    """
    if failure.error == LOST_NODE:
        return failure.message
    if failure.error == HANGS:
        return f"{_who(spec, failure)} {'hangs' if len(failure.ranks) == 1 else 'hang'}: {failure.verdict}"
    if failure.verdict:
        return f"{sentence(spec, replace(failure, verdict=''))}\nwhere the ranks were: {failure.verdict}"
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

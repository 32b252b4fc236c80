"""Supervises started ranks until all have ended: the one loop of `tutti run`, for every launcher.

A generation is one start of all ranks. Where restarts are allowed, a rank that dies ends its generation, and the next
one continues from the newest checkpoint of the run.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType
from typing import Any, Literal, Protocol, cast

from tutti.config.run_folder import RunFolder
from tutti.errors import RESUMABLE, LaunchError
from tutti.launch.failure import (
    Failure,
    append_tracebacks,
    clear_errors,
    exit_error,
    explain_timeout,
    hang,
    has_waited,
    primary,
    read_errors,
    with_caught,
    with_mismatch,
)
from tutti.launch.hang_watch import HangWatch
from tutti.launch.launcher import Handle, LaunchSpec, RankError
from tutti.launch.rank_watch import Watcher
from tutti.launch.survival import MEMORY, RECOVER, Surviving, Survivors, Waiting
from tutti.surviving_rank import LeftBehind

Status = Literal["completed", "failed", "stopped"]

POLL_S = 0.1


SETTLE_S = 1.0
"""Seconds that the other ranks have to report what happened to them, once one has failed."""


SETTLE_PEERS_S = 3.0
"""The same, in seconds, while only losses of peers are known and the cause is still to come."""


RESTART_SETTLE_S = 0.2
"""Seconds that they have once a cause is known, if the ranks are to be started again."""


RESTART_GRACE_S = 0.5
"""Seconds that ranks of a generation that is over have to write their last rows."""


SURVIVORS_S = 5.0
"""Seconds that ranks which outlive the failure of another one have to leave their step, once the first has."""


FIRST_SURVIVOR_S = 20.0
"""The same for the first of them, in seconds: it may have a long step to compute before it notices the failure."""


GRACE_S = 5.0

TIME_LIMIT_CODE = 124
"""The exit code where a time limit ended ranks that wrote no checkpoint, as that of timeout(1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of a run.

    Attributes:
        failure: set if a rank failed.
        signal: set if the run was stopped from outside.
        resumable: whether the ranks wrote a checkpoint when they were stopped, and ended with exit code 75.
        spec: what was started last; None for what was asked for.
        restarts: how often the ranks were started again.
        waiting: ranks that outlive the failure, and wait for their task in the next generation.
        given_up: why they were not started again, as a sentence; empty if nobody asked for restarts.
        called_off: whether they ended because another node asked for it.
        left: whether other nodes go on without this one.
    """

    status: Status
    exit_code: int
    failure: Failure | None = None
    signal: int | None = None
    resumable: bool = False
    spec: LaunchSpec | None = None
    restarts: int = 0
    given_up: str = ""
    waiting: Mapping[int, Waiting] = field(default_factory=dict)
    called_off: bool = False
    left: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """The next generation.

    Attributes:
        spec: what to start.
        delay_s: seconds to wait before.
        message: what happened and what comes next, in words.
        survivors: the ranks of it that go on from memory; None if all of them are started anew.
        grown: whether it follows no failure, but has the ranks of a node that has come; it is no restart.
    """

    spec: LaunchSpec
    delay_s: float
    message: str
    survivors: Survivors | None = None
    grown: bool = False


class Recovery(Protocol):
    """Decides what follows the end of a generation."""

    def begin(self, spec: LaunchSpec) -> LaunchSpec | Outcome:
        """Return the first generation, or the end of a run that does not begin."""
        ...

    def may_restart(self, error: RankError) -> bool:
        """Return whether a restart may follow this failure of a rank, so that there is no need to hear all others."""
        ...

    def called_off(self) -> Literal["", "end", "pause"]:
        """Return whether the ranks of this node are to end, or to pause with a checkpoint, because of other nodes."""
        ...

    def leaves(self) -> bool:
        """Return whether a signal ends this node's part only, and the others go on."""
        ...

    def after(
        self, spec: LaunchSpec, outcome: Outcome, written: Callable[[int], LeftBehind | None]
    ) -> Restart | Outcome:
        """Return the next generation, or how the run ends: where it failed, with the sentence why it is given up.

        Args:
            spec: what has ended.
            outcome: how it ended on this node.
            written: the states of random generators that a rank has left behind.
        """
        ...


class Interrupts:
    """Signals that ask the supervisor to end.

    Attributes:
        number: the first signal received, or None.
        count: how many were received; of repeated ones only Ctrl-C counts.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self.count = 0

    def take(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if self.number is None or number == signal.SIGINT:  # a terminal that closes sends SIGHUP twice
            self.count += 1
        self.number = self.number or number


@contextmanager
def interrupts() -> Iterator[Interrupts]:
    """Collect Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP while the context lasts, instead of ending the process.

    A SIGHUP that is ignored, as under nohup, stays ignored. Schedulers send SIGUSR1 ahead of a pre-emption.
    """
    received = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before: dict[signal.Signals, Any] = {number: signal.signal(number, received.take) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _only_waited(errors: Iterable[RankError]) -> bool:
    """Return whether no rank has failed by itself: others only waited for it."""
    return all(error.kind in ("peer", "user", "killed") for error in errors)


def supervise(
    start: Callable[[LaunchSpec], Handle],
    spec: LaunchSpec,
    watcher: Watcher,
    interrupted: Interrupts,
    *,
    grace_s: float = GRACE_S,
    stop_at_s: float | None = None,
    say: Callable[[str], None] = lambda words: None,
    recovery: Recovery | None = None,
) -> Outcome:
    """Start the ranks and watch them until all have ended; leave none behind, whatever happens.

    Args:
        start: starts the ranks.
        spec: what is started on this node.
        watcher: shows their output.
        interrupted: the signals received so far.
        grace_s: seconds that ranks have to end by themselves when they are stopped.
        stop_at_s: Unix time at which ranks stop by themselves; those that have not `grace_s` seconds later are ended.
        say: takes messages for the user while ranks still run.
        recovery: decides whether the ranks are started again after a failure; None never does.
    """
    restarts, start_next = 0, start
    generation: _Generation | None = None
    begun = spec if recovery is None else recovery.begin(spec)
    if isinstance(begun, Outcome):
        return begun
    spec = begun
    outcome: Outcome | None = None
    with watcher:
        try:
            while True:
                clear_errors(spec)
                watcher.follow(spec)
                generation = _Generation(spec, watcher, interrupted, grace_s, stop_at_s, say, recovery)
                try:
                    generation.start(start_next)
                except LaunchError as error:
                    if outcome is None or outcome.failure is None:
                        raise
                    outcome = replace(outcome, given_up=f"the ranks could not be started again: {error}")
                    break
                outcome = replace(generation.watch(), spec=spec, restarts=restarts)
                following = generation.following(outcome)
                if isinstance(following, Outcome):
                    outcome = replace(following, spec=spec, restarts=restarts)
                    break
                if stop_at_s is not None and time.time() + following.delay_s >= stop_at_s:
                    outcome = replace(outcome, given_up="the time limit is over, so the ranks were not started again")
                    break
                start_next = generation.succeeded_by(following, start)
                told = read_errors(spec).items()
                causes = {rank: error for rank, error in told if error.kind != "peer" and not has_waited(error)}
                append_tracebacks(spec, causes)
                if following.message:
                    say(following.message)
                _pause(following.delay_s, interrupted)
                if interrupted.number is not None:
                    return _stopped_between(interrupted.number, outcome)
                clear_errors(spec)  # a smaller generation would leave those of its missing ranks
                spec, restarts = following.spec, restarts + (not following.grown)
        finally:
            if generation is not None:
                generation.end()
    if outcome.failure is not None:
        append_tracebacks(spec, read_errors(spec))  # only now, because the watcher would have shown these lines too
    return outcome


def _pause(seconds: float, interrupted: Interrupts) -> None:
    deadline = time.monotonic() + seconds
    while interrupted.number is None and (left := deadline - time.monotonic()) > 0:
        time.sleep(min(left, POLL_S))


def _stopped_between(number: int, outcome: Outcome) -> Outcome:
    return Outcome(
        status="stopped", exit_code=128 + number, signal=number, spec=outcome.spec, restarts=outcome.restarts
    )


class _Generation:
    """One start of all ranks, from `start` to its outcome; see `supervise` for the arguments."""

    def __init__(
        self,
        spec: LaunchSpec,
        watcher: Watcher,
        interrupted: Interrupts,
        grace_s: float,
        stop_at_s: float | None,
        say: Callable[[str], None],
        recovery: Recovery | None,
    ) -> None:
        self._spec, self._watcher, self._interrupted = spec, watcher, interrupted
        self._grace_s, self._stop_at_s, self._say, self._recovery = grace_s, stop_at_s, say, recovery
        self._handle: Handle | None = None
        self._surviving: Surviving | None = None

    def start(self, start: Callable[[LaunchSpec], Handle]) -> None:
        """Start the ranks.

        Raises:
            LaunchError: they cannot be started.
        """
        self._handle, self._hangs = start(self._spec), HangWatch(self._spec)
        surviving = self._recovery is not None and self._spec.environment.get(RECOVER) == MEMORY
        self._surviving = cast(Surviving, self._handle) if surviving else None

    def end(self) -> None:
        """End the ranks."""
        if self._handle is not None:
            self._handle.stop(0)
            self._hangs.close()

    def following(self, outcome: Outcome) -> Restart | Outcome:
        """Return what follows; see `Recovery.after`."""
        if self._recovery is None:
            return outcome
        written = self._surviving.written if self._surviving is not None else lambda rank: None
        return self._recovery.after(self._spec, outcome, written)

    def succeeded_by(self, following: Restart, start: Callable[[LaunchSpec], Handle]) -> Callable[[LaunchSpec], Handle]:
        """Return what starts the next generation; ranks that have no part in it are ended."""
        if following.survivors is None or self._surviving is None:
            self.end()
            return start
        return partial(self._surviving.regroup, survivors=following.survivors)

    def _called_off(self) -> Literal["", "end", "pause"]:
        return self._recovery.called_off() if self._recovery is not None else ""

    def _leave(self, *, pausing: bool) -> Outcome:
        """End the ranks because of other nodes. Ranks that fail or complete in a pause have done so by themselves."""
        assert self._handle is not None
        with self._paused(pausing):
            self._handle.stop(self._grace_s if pausing else RESTART_GRACE_S, hurry=lambda: self._interrupted.count > 1)
        self._watcher.update()
        exits = self._handle.wait(0)
        own = [error for rank, error in read_errors(self._spec).items() if rank in self._spec.ranks]
        if pausing and len(exits) == self._spec.local_world_size and not any(exits.values()):
            return self._ended(exits)
        if pausing and any(error.kind != "peer" for error in own):
            return self._failed(exits)
        return Outcome(status="stopped", exit_code=1, called_off=True)

    @contextmanager
    def _paused(self, pausing: bool) -> Iterator[None]:
        """Let ranks that stop with a checkpoint meanwhile say that the run goes on."""
        mark = RunFolder(self._spec.folder).pause(self._spec.node_rank)
        with contextlib.suppress(OSError):
            if pausing:
                mark.touch()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                mark.unlink(missing_ok=True)

    def _waiting(self) -> dict[int, Waiting]:
        return self._surviving.waiting() if self._surviving is not None else {}

    def watch(self) -> Outcome:
        """Watch the ranks, and return how they ended."""
        assert self._handle is not None
        handle, stopping_since = self._handle, 0.0
        while True:
            exits = handle.wait(POLL_S)
            self._watcher.update()
            if self._interrupted.number is not None:
                return self._stop(self._interrupted.number)
            if called_off := self._called_off():
                return self._leave(pausing=called_off == "pause")
            verdict = self._hangs.look() if not exits else None
            if verdict is not None and not (exits := handle.wait(0)):  # one that ended meanwhile is the cause
                handle.stop(RESTART_GRACE_S)
                self._watcher.update()
                return Outcome(status="failed", exit_code=1, failure=hang(verdict))
            if self._stop_at_s is not None and time.time() > self._stop_at_s + self._grace_s:
                return self._stop(None)
            if any(code not in (0, RESUMABLE) for code in exits.values()) or self._waiting():
                return self._failed(exits)
            if len(exits) == self._spec.local_world_size:
                return self._ended(exits)
            if RESUMABLE in exits.values():  # the checkpoint is whole, so the others have no more to do
                stopping_since = stopping_since or time.monotonic()
                if time.monotonic() - stopping_since > self._grace_s:
                    handle.stop(0)
                    return Outcome(status="stopped", exit_code=RESUMABLE, resumable=True)

    def _ended(self, exits: Mapping[int, int]) -> Outcome:
        if RESUMABLE in exits.values():
            return Outcome(status="stopped", exit_code=RESUMABLE, resumable=True)
        return Outcome(status="completed", exit_code=0)

    def _stop(self, number: int | None) -> Outcome:
        """Let the ranks end, because of a signal, or of the time limit if there was none."""
        reason = "stopping all ranks" if number is not None else "the time limit is over: stopping all ranks"
        self._say(f"{reason}; they have {self._grace_s:g} s to end; press Ctrl-C again to kill them now")

        def hurry() -> bool:
            self._watcher.update()
            return self._interrupted.count > (number is not None)

        assert self._handle is not None
        with self._paused(self._recovery is not None and self._recovery.leaves()):
            self._handle.stop(self._grace_s, hurry=hurry)
        self._watcher.update()
        codes = set(self._handle.wait(0).values())
        if RESUMABLE in codes and codes <= {0, RESUMABLE}:
            return Outcome(status="stopped", exit_code=RESUMABLE, signal=number, resumable=True)
        code = TIME_LIMIT_CODE if number is None else 128 + number
        return Outcome(status="stopped", exit_code=code, signal=number)

    def _failed(self, exits: Mapping[int, int]) -> Outcome:
        """Collect the other ranks' errors, end the ranks and name the cause."""
        assert self._handle is not None
        spec, handle = self._spec, self._handle
        errors: dict[int, RankError] = {}
        waiting = self._waiting()
        told = read_errors(spec) | {rank: said.error for rank, said in waiting.items()}
        was_killed = any(code < 0 and code != -signal.SIGABRT for code in exits.values())  # not by its own library
        verdict = self._hangs.told() or (None if was_killed else explain_timeout(spec, told))  # as long as they live
        causes: list[RankError] = []
        restarts = False
        began, first_s = time.monotonic(), 0.0
        if self._surviving is not None:
            self._surviving.tell_lost()
        while self._interrupted.number is None:
            for rank, code in exits.items():
                if code not in (0, RESUMABLE) and rank not in errors:
                    errors[rank] = read_errors(spec).get(rank) or exit_error(spec, rank, code, handle)
            waiting = self._waiting()
            errors |= read_errors(spec) | {rank: said.error for rank, said in waiting.items()}
            causes = [error for error in errors.values() if error.kind != "peer"]
            restarts = bool(causes) and self._recovery is not None and all(map(self._recovery.may_restart, causes))
            # With a shared folder, errors of other nodes' ranks count too, so that all nodes name the same cause.
            ended = len(exits) + len(waiting) == spec.local_world_size
            heard = ended and (spec.nodes == 1 or len(errors) == spec.world_size)
            waited_s = time.monotonic() - began
            first_s = first_s or (waited_s if waiting else 0.0)
            settle_s = RESTART_SETTLE_S if restarts else SETTLE_S if causes or verdict else SETTLE_PEERS_S
            if self._surviving is not None and (restarts or not causes):
                settle_s = first_s + SURVIVORS_S if waiting else FIRST_SURVIVOR_S
            if heard or waited_s >= settle_s:
                break
            if not causes and self._called_off():
                return self._leave(pausing=False)  # these ranks have only lost those of another node
            if ended:
                time.sleep(POLL_S)
            else:
                exits = handle.wait(POLL_S)
            self._watcher.update()
        if not waiting or (causes and not restarts):
            waiting = {}
            handle.stop(min(self._grace_s, RESTART_GRACE_S if restarts or verdict else GRACE_S))
        self._watcher.update()
        if RESUMABLE in exits.values() and all(error.kind == "peer" for error in errors.values()):
            return Outcome(status="stopped", exit_code=RESUMABLE, resumable=True)  # the others only lost a rank
        cause = with_caught(spec, with_mismatch(spec, primary(spec, errors, exits)))
        if verdict is not None and _only_waited(errors.values()):
            named = cause.kind == "user" and not has_waited(cause)
            cause = replace(cause, verdict=verdict.message) if named else hang(verdict)
        return Outcome(status="failed", exit_code=cause.exit_code or 1, failure=cause, waiting=waiting)

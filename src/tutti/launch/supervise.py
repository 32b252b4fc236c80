"""Watching over started ranks until all have ended: the one loop of `tutti run`, whatever the launcher."""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

from tutti.launch import failure as failures
from tutti.launch.base import Handle, LaunchSpec, RankError
from tutti.launch.failure import Failure
from tutti.launch.watch import Watcher

Status = Literal["completed", "failed", "stopped"]

POLL_S = 0.1
SETTLE_S = 1.0
"""How long the other ranks may take to say what happened to them, once one has failed."""
SETTLE_PEERS_S = 3.0
"""The same while all that is known is that a peer was lost: the cause must still come."""
GRACE_S = 5.0


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
    failures.clear_errors(spec)
    with watcher:
        handle = start()
        try:
            outcome = _watch(handle, spec, watcher, interrupted, grace_s, say)
        finally:
            handle.stop(0)
    if outcome.status == "failed":  # only now: what a log gains while it is watched is shown
        failures.append_tracebacks(spec, failures.read_errors(spec))
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
                errors[rank] = failures.read_errors(spec).get(rank) or failures.killed(rank, code)
        errors |= failures.read_errors(spec)
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
    cause = failures.primary(spec, errors, exits)
    return Outcome(status="failed", exit_code=cause.exit_code or 1, failure=cause)

"""Notices ranks that hang before their time-out is over, from the records of this host's ranks.

Nobody waits ten minutes for a hang of a step that takes 50 ms: the limit is ten times the slowest step, at least 30 s.
A rank that works is never taken for one that hangs: it uses its processor, reads, writes, or waits again and again.
"""

import time
from collections.abc import Collection, Mapping

from tutti.config.run_folder import RunFolder
from tutti.errors import EventRecordError
from tutti.event_record import FILE_NAME, STEP_NAMES, RecordState, read_state
from tutti.launch.hang_verdict import HangVerdict, judge, operation_of, wait_of
from tutti.launch.launcher import LaunchSpec
from tutti.launch.rank_views import ProcessState, process_of, view_ranks

LEAST_S = 30.0
"""Shortest limit in seconds."""

STEPS = 10.0
"""The limit, in slowest steps."""

PERIOD_S = 0.5
"""Seconds between two looks."""

_BEFORE_S = 2.0
"""Seconds without an event after which the ranks' processes are first looked at."""

_IDLE_CORES = 0.03
"""Processor time per second of a process that does nothing, with the threads that only watch."""

_IDLE_NBYTES_PER_S = 4096
"""Bytes per second that such a process reads and writes at most: its threads look at the store of the rendezvous."""

_IDLE_SWITCHES = 2.0
"""How often per second its main thread begins to wait at most, if it does not wait for other ranks."""


class HangWatch:
    """Looks at the records of the ranks of one generation, all on this host.

    Args:
        spec: what was started; with several nodes, nothing is looked at.
    """

    def __init__(self, spec: LaunchSpec) -> None:
        self._spec, self._folder = spec, RunFolder(spec.folder)
        self._active = spec.nodes == 1 and spec.world_size > 1
        self._looked = self._moved = time.monotonic()
        self._seen: tuple[int, ...] = ()
        self._before: tuple[float, Mapping[int, ProcessState]] | None = None

    def look(self) -> HangVerdict | None:
        """Return the verdict if the ranks hang; look at most once in `PERIOD_S`."""
        now = time.monotonic()
        if not self._active or now - self._looked < PERIOD_S:
            return None
        self._looked = now
        states = self._states()
        seen = tuple(state.newest for state in states.values())
        if seen != self._seen or len(states) < self._spec.world_size:
            self._seen, self._moved, self._before = seen, now, None
            return None
        limit_s = self._spec.timeout_s
        if self._spec.adaptive_timeout:
            limit_s = limit(states.values(), limit_s)
        if self._before is None and now - self._moved > _BEFORE_S:
            self._before = now, _processes(states)
        if self._before is None or now - self._moved <= limit_s:
            return None
        return self._judged(states, now, shortened=limit_s < self._spec.timeout_s)

    def _states(self) -> dict[int, RecordState]:
        states = {}
        for rank in self._spec.ranks:
            try:
                state = read_state(self._folder.rank(rank) / FILE_NAME)
            except EventRecordError:  # not begun, or no space
                continue
            if not state.ended:
                states[rank] = state
        return states

    def _judged(self, states: Mapping[int, RecordState], now: float, *, shortened: bool) -> HangVerdict | None:
        """Return the verdict if no rank has done anything since the first look at the processes; else look anew.

        Args:
            states: of all ranks.
            now: monotonic seconds.
            shortened: whether the limit is below the run's time-out, so that it is for steps only.
        """
        assert self._before is not None
        since, before = self._before
        after = _processes(states)
        waits = self._waiting(in_steps=shortened)
        idle = waits is not None and all(
            rank in before and rank in after and is_idle(before[rank], after[rank], now - since, waits=rank in waits)
            for rank in states
        )
        if not idle:
            self._before = now, after
            self._moved = now - _BEFORE_S  # it is judged again after another limit
            return None
        verdict = judge(view_ranks(self._folder, self._spec.ranks), time.time())
        return verdict if verdict.kind != "none" else None

    def _waiting(self, *, in_steps: bool) -> set[int] | None:
        """Return the ranks that wait for others; None if none does.

        Args:
            in_steps: None, too, unless a rank that waits is in a step, and none is in another operation.
        """
        views = view_ranks(self._folder, self._spec.ranks, ask=False)
        operations = {view.rank: operation_of(view) for view in views}
        if in_steps and any(operation not in ("", *STEP_NAMES) for operation in operations.values()):
            return None
        waits = {view.rank for view in views if wait_of(view) is not None}
        return waits if any(operations[rank] in STEP_NAMES or not in_steps for rank in waits) else None


def limit(states: Collection[RecordState], timeout_s: float) -> float:
    """Return the seconds after which ranks hang that do nothing.

    Args:
        states: of all ranks.
        timeout_s: the time-out of the run, which is never exceeded.

    Returns:
        The time-out of the run as long as a rank has not made two steps.
    """
    if not states or any(state.steps < 1 for state in states):
        return timeout_s
    return min(timeout_s, max(LEAST_S, STEPS * max(state.slowest_s for state in states)))


def _processes(states: Mapping[int, RecordState]) -> dict[int, ProcessState]:
    found = {rank: process_of(state) for rank, state in states.items()}
    return {rank: process for rank, process in found.items() if process is not None}


def is_idle(before: ProcessState, after: ProcessState, seconds: float, *, waits: bool) -> bool:
    """Return whether a process has done nothing in between.

    Args:
        before, after: the process at two times.
        seconds: between them.
        waits: whether it waits for other ranks, which it may do by looking again and again.
    """
    if after.cpu_s - before.cpu_s > _IDLE_CORES * seconds:
        return False
    if after.nbytes - before.nbytes > _IDLE_NBYTES_PER_S * seconds:
        return False
    return waits or after.switches - before.switches <= _IDLE_SWITCHES * seconds

"""Notices ranks that hang before their time-out is over, from the records of this host's ranks.

Nobody waits ten minutes for a hang of a step that takes 50 ms: the limit is ten times the slowest step, at least 30 s.
A rank that works is never taken for one that hangs: it uses its processor, reads, writes, or waits again and again.

With several nodes, each one looks at its own ranks. Once they have done nothing for the limit, it says so in a file of
the run folder; when all nodes say so, node 0 judges, and the others take its verdict. Without a shared run folder no
node hears of the others, and ranks wait for the time-out of the run.
"""

import contextlib
import secrets
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tutti.config import serialization
from tutti.config.run_folder import RunFolder
from tutti.errors import EventRecordError, SpecError
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


_FRESH_S = 5.0
"""Seconds after which what a node has said last counts no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleRanks:
    """What a node says of its ranks, which have done nothing for the limit.

    Attributes:
        token: of this generation on this node.
        count: how often it has said so.
        shortened: whether its limit is below the run's time-out, so that it is for steps only.
        waits: whether one of them waits for other ranks.
        waits_in_step: whether one does so in a step.
        elsewhere: whether one is in another operation than a step.
        processes: of each rank.
    """

    token: str
    count: int
    shortened: bool
    waits: bool
    waits_in_step: bool
    elsewhere: bool
    processes: Mapping[int, ProcessState]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesVerdict:
    """Node 0's verdict, for the nodes whose tokens it has."""

    tokens: tuple[str, ...]
    verdict: HangVerdict


class HangWatch:
    """Looks at the records of this node's ranks of one generation.

    Args:
        spec: what was started on this node.
    """

    def __init__(self, spec: LaunchSpec) -> None:
        self._spec, self._folder = spec, RunFolder(spec.folder)
        self._looked = self._moved = time.monotonic()
        self._seen: tuple[int, ...] = ()
        self._before: tuple[float, Mapping[int, ProcessState]] | None = None
        self._token, self._count = secrets.token_hex(8), 0
        self._has_said = spec.nodes > 1  # perhaps a launcher before this one, which was killed
        self._heard: dict[int, tuple[IdleRanks, float]] = {}  # what other nodes have said last, and when that was new
        self.close()
        if spec.nodes > 1 and spec.node_rank == 0:
            self._verdict_file.unlink(missing_ok=True)

    def look(self) -> HangVerdict | None:
        """Return the verdict if the ranks hang; look at most once in `PERIOD_S`."""
        now = time.monotonic()
        if self._spec.world_size == 1 or now - self._looked < PERIOD_S:
            return None
        self._looked = now
        states = self._states()
        seen = tuple(state.newest for state in states.values())
        if seen != self._seen or len(states) < self._spec.local_world_size:
            self._seen, self._moved, self._before = seen, now, None
            self.close()
            return None
        limit_s = self._spec.timeout_s
        if self._spec.adaptive_timeout:
            limit_s = limit(states.values(), limit_s)
        if self._before is None and now - self._moved > _BEFORE_S:
            self._before = now, _processes(states)
        if self._before is None or now - self._moved <= limit_s:
            return None
        idle = self._idle(states, now, shortened=limit_s < self._spec.timeout_s)
        if idle is None or (self._spec.nodes == 1 and not _hang([idle])):
            self._before = now, _processes(states)
            self._moved = now - _BEFORE_S  # it is judged again after another limit
            self.close()
            return None
        if self._spec.nodes > 1:
            return self._with_other_nodes(idle, now)
        verdict = judge(view_ranks(self._folder, self._spec.ranks), time.time())
        return verdict if verdict.kind != "none" else None

    def told(self) -> HangVerdict | None:
        """Return node 0's verdict on this generation, if it has one."""
        with contextlib.suppress(SpecError):
            told = serialization.load(NodesVerdict, self._verdict_file)
            return told.verdict if self._spec.nodes > 1 and self._token in told.tokens else None
        return None

    def close(self) -> None:
        """Take back what was said of this node's ranks."""
        if self._has_said:
            self._has_said = False
            with contextlib.suppress(OSError):
                self._idle_file(self._spec.node_rank).unlink(missing_ok=True)

    @property
    def _verdict_file(self) -> Path:
        return self._spec.folder / ".hang.json"

    def _idle_file(self, node: int) -> Path:
        return self._spec.folder / f".idle-{node}.json"

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

    def _idle(self, states: Mapping[int, RecordState], now: float, *, shortened: bool) -> IdleRanks | None:
        """Return what is to say of the ranks; None if one has done something since the first look at the processes.

        Args:
            states: of all ranks of this node.
            now: monotonic seconds.
            shortened: see `IdleRanks`.
        """
        assert self._before is not None
        since, before = self._before
        after = _processes(states)
        views = view_ranks(self._folder, self._spec.ranks, ask=False)
        operations = {view.rank: operation_of(view) for view in views}
        waits = {view.rank for view in views if wait_of(view) is not None}
        for rank in states:
            if rank not in before or rank not in after:
                return None
            if not is_idle(before[rank], after[rank], now - since, waits=rank in waits):
                return None
        return IdleRanks(
            token=self._token,
            count=self._count,
            shortened=shortened,
            waits=bool(waits),
            waits_in_step=any(operations[rank] in STEP_NAMES for rank in waits),
            elsewhere=any(operation not in ("", *STEP_NAMES) for operation in operations.values()),
            processes=after,
        )

    def _with_other_nodes(self, idle: IdleRanks, now: float) -> HangVerdict | None:
        """Tell the other nodes that these ranks are idle. Return the verdict: on node 0 its own, elsewhere node 0's."""
        self._count, self._has_said = self._count + 1, True
        try:
            serialization.save(replace(idle, count=self._count), self._idle_file(self._spec.node_rank))
            if self._spec.node_rank:
                return self.told()
            others = [self._hear(node, now) for node in range(1, self._spec.nodes)]
            nodes = [idle, *(other for other in others if other is not None)]
            if len(nodes) < self._spec.nodes or not _hang(nodes):
                return None
            processes = {rank: process for node in nodes for rank, process in node.processes.items()}
            views = view_ranks(self._folder, range(self._spec.world_size), told=processes)
            verdict = judge(views, time.time())
            if verdict.kind == "none":
                return None
            told = NodesVerdict(tokens=tuple(node.token for node in nodes), verdict=verdict)
            serialization.save(told, self._verdict_file)
        except OSError:  # the disk is full: the ranks' own time-out remains
            return None
        return verdict

    def _hear(self, node: int, now: float) -> IdleRanks | None:
        """Return what another node says of its ranks; None if nothing, or if it has not said it again lately."""
        try:
            said = serialization.load(IdleRanks, self._idle_file(node))
        except SpecError:
            self._heard.pop(node, None)
            return None
        before = self._heard.get(node)
        if before is None:  # it may be left over from an earlier generation
            self._heard[node] = said, now - 2 * _FRESH_S
        elif (said.token, said.count) != (before[0].token, before[0].count):
            self._heard[node] = said, now
        return said if now - self._heard[node][1] < _FRESH_S else None


def _hang(nodes: Collection[IdleRanks]) -> bool:
    """Return whether idle ranks hang: some wait for others, and not in vain for one that may take longer."""
    if any(node.shortened for node in nodes):
        return any(node.waits_in_step for node in nodes) and not any(node.elsewhere for node in nodes)
    return any(node.waits for node in nodes)


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

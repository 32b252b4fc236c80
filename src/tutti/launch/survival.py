"""How a rank outlives the loss of another one: it leaves its run, tells the launcher, and runs the script again.

The launcher and each of its ranks have a pipe of their own. The rank says that it waits, and for what reason; the
launcher answers with the rank's task in the next generation, or ends the process.
"""

import contextlib
import json
import os
import queue
import signal
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from tutti.launch.launcher import Handle, LaunchSpec, RankError
from tutti.launch.script_process import ScriptProcess
from tutti.surviving_rank import SURVIVING_RANK, LeftBehind

RECOVER, MEMORY = "TUTTI_RECOVER", "memory"
"""The variable that lets ranks outlive each other, and its value."""

LOST = "lost"
"""What the launcher sends when a rank is lost; anything else is a task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A rank that has lost another one, and waits for a new task.

    Attributes:
        error: how it noticed.
        step: updates in the state that it has in memory; None where it has none.
        drawn: whether its script draws from global generators between steps.
        refusal: why it has no state, as a clause.
        again: why it cannot run the script again, as a clause; empty if it can.
    """

    error: RankError
    step: int | None
    drawn: bool = False
    refusal: str = ""
    again: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survivors:
    """The ranks of the next generation that go on from memory.

    Attributes:
        ranks: their numbers in the next generation -> those in this one.
        holder: the rank of the next generation that has the state in memory.
        step: updates that are in it.
    """

    ranks: dict[int, int]
    holder: int
    step: int


class Surviving(Protocol):
    """A handle whose ranks outlive the loss of others."""

    def waiting(self) -> dict[int, Waiting]:
        """Ranks that have lost another one and wait for their next task, by rank."""
        ...

    def tell_lost(self) -> None:
        """Tell the ranks that another one is lost."""
        ...

    def written(self, rank: int) -> LeftBehind | None:
        """The states of random generators that a rank has left behind; None if it has left none."""
        ...

    def regroup(self, spec: LaunchSpec, survivors: Survivors) -> Handle:
        """Start the next generation, in which some ranks go on."""
        ...


class Survivor:
    """The rank's side.

    Args:
        connection: to the launcher; None where its ranks do not outlive each other.
        supervisor: becomes readable when the launcher is gone; None if there is none to watch.
    """

    def __init__(self, connection: Connection | None, supervisor: int | None) -> None:
        self._connection, self._supervisor = connection, supervisor
        self._tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._before = ScriptProcess() if connection is not None else None
        SURVIVING_RANK.enabled = connection is not None

    def watch(self) -> None:
        """End this process once the launcher is gone, and take in what it sends. Runs in a thread of its own."""
        while True:
            sources: list[Any] = [source for source in (self._connection, self._supervisor) if source is not None]
            ready = wait(sources)
            if self._supervisor in ready:
                os.killpg(0, signal.SIGKILL)
            try:
                message = self._connection.recv() if self._connection is not None else None
            except (EOFError, OSError):
                self._connection = None
                if self._supervisor is None:
                    return
                continue
            SURVIVING_RANK.peer_lost = message == LOST  # here, so that none of the next generation is forgotten
            if message != LOST:
                self._tasks.put(message)

    def next_task(self, error: BaseException, described: RankError) -> Any:
        """Leave the run that `error` has ended, and return the task in the next generation; None if there is none.

        Args:
            error: the failed exchange.
            described: the same, as the launcher reads it.
        """
        if self._before is None or self._connection is None:
            return None
        kept = SURVIVING_RANK.leave()
        again = self._before.restore(error)
        step = None if kept.state is None else kept.step
        waiting = Waiting(error=described, step=step, drawn=kept.drawn, refusal=kept.refusal, again=again)
        try:
            self._connection.send_bytes(json.dumps(asdict(waiting)).encode())
        except OSError:
            return None
        return self._tasks.get()


def start_watch(watch: Callable[[], None]) -> None:
    """Start the thread that watches the launcher."""
    threading.Thread(target=watch, name="tutti-supervisor-watch", daemon=True).start()


def read_waiting(connection: Connection) -> Waiting | None:
    """Return what a rank has said, on the launcher's side; None if it has not, or has ended."""
    with contextlib.suppress(EOFError, OSError, ValueError, TypeError):
        if connection.poll():
            data = json.loads(connection.recv_bytes())
            return Waiting(**{**data, "error": RankError(**data["error"])})
    return None

"""Threads that live as long as the process, so that none of them starts or ends while the process forks.

Workers of a data loader are forked. A child has only the thread that forked it: a lock that another thread held at that
moment stays locked in it for ever, and a thread that was just ending made the child hang in the interpreter's own
clean-up. So work in the background goes to threads that never end, and a fork waits for their short tasks.
"""

import heapq
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress

FORK_WAIT_S = 1.0
"""A fork waits at most this long for a short task, so that a disk that hangs does not hold it up."""


class BackgroundTask:
    """A task that a `BackgroundThread` was given.

    Attributes:
        error: what it raised, once it is done.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        self._run: Callable[[], None] | None = run
        self._done = threading.Event()
        self.error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self._done.is_set()

    def join(self) -> None:
        """Wait until it has ended."""
        self._done.wait()

    def perform(self) -> None:
        """Run it; what it raises is kept in `error`."""
        assert self._run is not None
        try:
            self._run()
        except BaseException as error:
            self.error = error
        finally:
            self._run = None  # frees what it holds
            self._done.set()


class BackgroundThread:
    """One thread that runs what it is given, in the order in which it is due, until the process ends.

    Args:
        name: of the thread.
        short: whether its tasks are short and never fork: a fork then waits for the one that runs.
    """

    def __init__(self, name: str, *, short: bool = False) -> None:
        self._name, self._short = name, short
        _THREADS.add(self)
        self._reset()

    def _reset(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._waiting: list[tuple[float, int, BackgroundTask]] = []
        self._given = 0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread if it has not started. Call it where no other thread can fork."""
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                with _FORKS.held:
                    self._thread.start()

    def submit(self, run: Callable[[], None], delay_s: float = 0.0) -> BackgroundTask:
        """Run something in the thread, in `delay_s` seconds; the thread starts if it has not.

        An exception is kept in the task and printed on standard error; the thread goes on.
        """
        self.start()
        task = BackgroundTask(run)
        with self._changed:
            self._given += 1
            heapq.heappush(self._waiting, (time.monotonic() + delay_s, self._given, task))
            self._changed.notify()
        return task

    def _work(self) -> None:
        while True:
            task = self._next()
            if self._short:
                with _FORKS.held:
                    task.perform()
            else:
                task.perform()
            if task.error is not None:
                _print_error(self._name, task.error)
            del task

    def _next(self) -> BackgroundTask:
        with self._changed:
            while True:
                wait_s = self._waiting[0][0] - time.monotonic() if self._waiting else None
                if wait_s is not None and wait_s <= 0:
                    return heapq.heappop(self._waiting)[2]
                self._changed.wait(wait_s)


class _Forks:
    """The lock that keeps forks and short tasks apart."""

    def __init__(self) -> None:
        self.held = threading.Lock()
        self._fork = threading.local()  # several threads may fork at a time

    def before(self) -> None:
        self._fork.holds = self.held.acquire(timeout=FORK_WAIT_S)

    def in_parent(self) -> None:
        if getattr(self._fork, "holds", False):
            self._fork.holds = False
            self.held.release()

    def in_child(self) -> None:
        self.held, self._fork = threading.Lock(), threading.local()
        for thread in list(_THREADS):
            thread._reset()


_THREADS: "weakref.WeakSet[BackgroundThread]" = weakref.WeakSet()
_FORKS = _Forks()
os.register_at_fork(before=_FORKS.before, after_in_parent=_FORKS.in_parent, after_in_child=_FORKS.in_child)


def _print_error(name: str, error: BaseException) -> None:
    with suppress(OSError, ValueError):  # standard error is gone
        print(f"tutti: a task of the thread {name} failed:", file=sys.stderr)
        traceback.print_exception(error, file=sys.stderr)

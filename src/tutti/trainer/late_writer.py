"""Writing that steps do not wait for: what they hand over is encoded and written by a thread, a little later."""

import math
import os
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from tutti.background_thread import BackgroundThread

T = TypeVar("T")

_THREAD = BackgroundThread("tutti-writer", short=True)
"""Writes for every `LateWriter` of the process."""


class LateWriter(Generic[T]):
    """Keeps items for at most `every_s` and writes them together, in order, also while the rank hangs.

    An item that comes so long after the last ones were written, as of slow steps, does not wait. A forked child writes
    nothing: what waited at the fork is its parent's.

    Args:
        write: writes items; it is called by one thread at a time. What it raises in the thread goes to standard error.
        every_s: how long items wait, in seconds.
    """

    def __init__(self, write: Callable[[list[T]], None], every_s: float) -> None:
        self._write, self._every_s = write, every_s
        self._waiting: list[T] = []
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._scheduled = False
        self._written_s = -math.inf
        self._closed = False
        self._process = os.getpid()
        _THREAD.start()

    def add(self, item: T, *, now: bool = False) -> None:
        """Keep an item; with `now` it is written when this returns, with all items before it."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._waiting.append(item)
        if now or time.monotonic() - self._written_s >= self._every_s:
            self.flush()
        elif not self._scheduled:
            self._scheduled = True
            _THREAD.submit(self._write_by_time, self._every_s)

    def flush(self) -> None:
        """Write what waits."""
        if os.getpid() != self._process:  # the locks may be held for ever
            return
        with self._writing:  # a slow disk holds up no step
            with self._lock:
                items, self._waiting = self._waiting, []
            self._written_s = time.monotonic()
            if items and not self._closed:
                self._write(items)

    def close(self) -> None:
        """Write what waits; drop later items."""
        try:
            self.flush()
        finally:
            self._closed = True

    def _write_by_time(self) -> None:
        self._scheduled = False  # before writing: an item that comes meanwhile is written after the next pause
        self.flush()

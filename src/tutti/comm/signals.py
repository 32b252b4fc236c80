"""Signals between processes of one host: semaphores to post and to wait for, and a watch on who is still there."""

import os
import select
import time
import weakref
from collections.abc import Iterable, Sequence

from tutti.comm.rooms import Memory
from tutti.comm.semaphores import Semaphores

_PATIENCE_S = 0.05
"""Between looks at whether those we wait for are still there."""


class Signals:
    """`count` semaphores at the start of `memory`. `processes`: of all ranks; `timeout_s`: the longest wait."""

    def __init__(self, memory: Memory, count: int, processes: Sequence[int], timeout_s: float, *, create: bool) -> None:
        self._semaphores = Semaphores(memory, count, create=create)
        self.post, self.take = self._semaphores.post, self._semaphores.take
        self._timeout_s = timeout_s
        self._handles = [os.pidfd_open(process) for process in processes]
        weakref.finalize(self, _close, self._handles).atexit = False  # the system closes what is open then

    def wait(self, index: int, ranks: Iterable[int]) -> None:
        """Take one of semaphore `index`, which one of `ranks` posts.

        Raises RuntimeError when one of them has ended, or nobody posts in time.
        """
        if self.take(index):
            return
        end = time.monotonic() + self._timeout_s
        while not self._semaphores.wait(index, _PATIENCE_S):
            gone = self._gone(ranks)
            if gone and self.take(index):  # its last deed
                return
            if gone:
                raise RuntimeError(f"Connection closed by peer: the process of rank {gone[0]} here has ended")
            if time.monotonic() > end:
                raise RuntimeError(f"Timed out waiting {self._timeout_s:g} s for other ranks of this host")

    def _gone(self, ranks: Iterable[int]) -> list[int]:
        """Those whose process has ended."""
        poll = select.poll()
        rank_of = {self._handles[rank]: rank for rank in ranks}
        for handle in rank_of:
            poll.register(handle, select.POLLIN)
        return [rank_of[handle] for handle, _ in poll.poll(0)]


def _close(handles: list[int]) -> None:
    for handle in handles:
        os.close(handle)

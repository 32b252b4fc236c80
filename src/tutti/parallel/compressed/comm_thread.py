"""A thread that advances compressed reductions through their rounds while backward continues.

Backward must not wait in its hooks: another rank may have skipped a parameter, and then starts that bucket only when
its own backward is over. So this thread drives the rounds. The order in which it issues collectives depends only on the
order in which reductions were started within their group, which is the same on all ranks. No other thread uses these
groups.
"""

import queue
import threading

import torch

from tutti.compression.reducer import Rounds, RoundScheduler


class RoundsWork:
    """Handle of one reduction in flight."""

    __slots__ = ("_comm_thread", "_over", "error")

    def __init__(self, comm_thread: "ReductionThread") -> None:
        self._comm_thread, self._over = comm_thread, threading.Event()
        self.error: BaseException | None = None

    def wait(self) -> None:
        """Wait until the reduction is complete; raise the error that stopped it.

        All reductions of this step must have been started.
        """
        if not self._over.is_set():
            self._comm_thread.finish()
            self._over.wait()
        if self.error is not None:
            raise self.error

    def is_completed(self) -> bool:
        """Return whether the reduction is complete, without waiting."""
        return self._over.is_set()

    def over(self, error: BaseException | None = None) -> None:
        """Mark the reduction as complete or failed. Called by the communication thread."""
        self.error = error
        self._over.set()


class ReductionThread:
    """Runs the reductions of one rank over any number of groups.

    If one reduction fails, all reductions in flight fail with it.
    """

    def __init__(self) -> None:
        self._todo: queue.SimpleQueue[tuple[int, Rounds, RoundsWork] | None] = queue.SimpleQueue()
        self._open: list[RoundsWork] = []
        self._orders: dict[int, RoundScheduler] = {}
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self, group: int, rounds: Rounds) -> RoundsWork:
        """Start a reduction over the group with this number.

        Args:
            group: number of the group; reductions of one group run in the order in which they were started.
            rounds: the reduction.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="tutti-comm-thread", daemon=True)
            self._thread.start()
        rounds_work = RoundsWork(self)
        self._todo.put((group, rounds, rounds_work))
        return rounds_work

    def finish(self) -> None:
        """Complete the reductions in flight. No further reduction may be started in this step."""
        self._todo.put(None)

    def _work(self) -> None:
        with torch.no_grad():
            while True:
                task = self._todo.get()
                if task is not None:
                    self._open.append(task[2])
                try:
                    self._do(task)
                except BaseException as error:  # pass any error on to the threads that wait
                    self._failure = error
                    while self._open:
                        self._open.pop().over(error)

    def _do(self, task: tuple[int, Rounds, RoundsWork] | None) -> None:
        if self._failure is not None:
            raise self._failure
        if task is None:
            for order in self._orders.values():
                order.finish()
        else:
            group, rounds, rounds_work = task
            self._orders.setdefault(group, RoundScheduler()).start(self._told(rounds, rounds_work))

    def _told(self, rounds: Rounds, rounds_work: RoundsWork) -> Rounds:
        """Run the reduction's rounds, then mark its handle as complete."""
        yield from rounds
        self._open.remove(rounds_work)
        rounds_work.over()

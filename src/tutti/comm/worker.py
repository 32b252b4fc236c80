"""A thread that does what its rank asks for, one thing after another, while the rank computes or waits."""

import queue
import threading
from collections.abc import Callable


class Worker:
    """A thread that makes calls in the order in which they are asked for."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="tutti-exchanges", daemon=True).start()

    def ask(self, call: Callable[[], None]) -> None:
        self._asked.put(call)

    def end(self) -> None:
        """No more will be asked."""
        self._asked.put(None)

    def _run(self) -> None:
        while (call := self._asked.get()) is not None:
            call()
            del call  # or whoever asked would live on while nobody asks


class Errand:
    """A call that a worker makes in its turn."""

    def __init__(self, worker: Worker, call: Callable[[], None]) -> None:
        self._call = call
        self._ended = threading.Event()
        self._problem: BaseException | None = None
        worker.ask(self._make)

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Return when it has ended. Raises what it raised."""
        self._ended.wait()
        if self._problem is not None:
            raise self._problem

    def _make(self) -> None:
        try:
            self._call()
        except BaseException as problem:  # told where it is waited for
            self._problem = problem
        finally:
            self._ended.set()

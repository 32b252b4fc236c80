"""The courier: a thread that carries compressed sums through their rounds while backward goes on.

Backward may not wait in its hooks: another rank may have left out a parameter, and sends its bucket only when its own
backward is over. So rounds are driven here. When a collective is issued depends on the order in which sums were begun
within their group, and on nothing that differs between the ranks of it; no other thread uses these groups.
"""

import queue
import threading

import torch

from tutti.compression.exchange import InOrder, Rounds


class Parcel:
    """One sum under way, as something to wait for."""

    __slots__ = ("_courier", "_over", "error")

    def __init__(self, courier: "Courier") -> None:
        self._courier, self._over = courier, threading.Event()
        self.error: BaseException | None = None

    def wait(self) -> None:
        """Until it is over; raises what made it fail. All sums of this step must have been begun."""
        if not self._over.is_set():
            self._courier.finish()
            self._over.wait()
        if self.error is not None:
            raise self.error

    def is_completed(self) -> bool:
        """Whether it is over, without waiting."""
        return self._over.is_set()

    def over(self, error: BaseException | None = None) -> None:
        """Said by the courier."""
        self.error = error
        self._over.set()


class Courier:
    """Sums of one rank over any number of groups. After one has failed, all that are under way fail with it."""

    def __init__(self) -> None:
        self._todo: queue.SimpleQueue[tuple[int, Rounds, Parcel] | None] = queue.SimpleQueue()
        self._open: list[Parcel] = []
        self._orders: dict[int, InOrder] = {}
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self, group: int, rounds: Rounds) -> Parcel:
        """Begin a sum over the group of this number."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="tutti-courier", daemon=True)
            self._thread.start()
        parcel = Parcel(self)
        self._todo.put((group, rounds, parcel))
        return parcel

    def finish(self) -> None:
        """No further sum is begun in this step: bring those under way to their end."""
        self._todo.put(None)

    def _work(self) -> None:
        with torch.no_grad():
            while True:
                task = self._todo.get()
                if task is not None:
                    self._open.append(task[2])
                try:
                    self._do(task)
                except BaseException as error:  # whatever it is, whoever waits must hear of it
                    self._failure = error
                    while self._open:
                        self._open.pop().over(error)

    def _do(self, task: tuple[int, Rounds, Parcel] | None) -> None:
        if self._failure is not None:
            raise self._failure
        if task is None:
            for order in self._orders.values():
                order.finish()
        else:
            group, rounds, parcel = task
            self._orders.setdefault(group, InOrder()).start(self._told(rounds, parcel))

    def _told(self, rounds: Rounds, parcel: Parcel) -> Rounds:
        yield from rounds
        self._open.remove(parcel)
        parcel.over()

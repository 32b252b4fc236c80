"""A server's part of the parameters, and who may go on: the rules of stale-synchronous and asynchronous servers.

Stale-synchronous parallel: Ho et al. 2013 (NIPS, "More effective distributed ML via a stale synchronous parallel
parameter server"): workers add their updates; one that has made c of them waits until all have made c - s. Asynchronous
and staleness-aware: Zhang et al. 2016 (arXiv 1511.05950, equation 6): an update counts 1 / t where t others were
applied since its worker had read the parameters.
"""

import threading
import time
from dataclasses import dataclass

import torch

from tutti.local_sgd.vectors import Flats


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a worker gets for an update. `staleness`: of this worker; `most`: of all workers' last updates; `drift`: the
    farthest that a worker was last from the parameters, `mean_drift`: on average. `ended`, `late`: the rank that has
    ended, or that did not come in time, for which the worker cannot go on; `values` then mean nothing.
    """

    values: Flats
    staleness: int = 0
    most: int = 0
    drift: float = 0.0
    mean_drift: float = 0.0
    ended: int | None = None
    late: int | None = None


class Served:
    """The parameters that one rank serves to `workers` ranks; its methods may be called by any thread.

    `bound`: how many updates a worker may be ahead of the slowest when it goes on; None: of no concern, and updates
    count the less the staler they are. With 0 the updates of a round are added in the order of the ranks, so that the
    result depends on nothing else. `away`: workers that nobody waits for. `held_back`: answers that had to wait.
    """

    def __init__(self, workers: int, bound: int | None, timeout_s: float) -> None:
        self.bound, self.timeout_s = bound, timeout_s
        self.values: Flats = []
        self.accepted = [0] * workers
        self.held_back = [0] * workers
        self.away: set[int] = set()
        self._changed = threading.Condition()
        self._ended: int | None = None
        self.clocks = [0] * workers
        self._version = 0
        self._read = [0] * workers
        self._stale = [0] * workers
        self._drift = [0.0] * workers
        self._waiting: dict[int, Flats] = {}
        self._answers: dict[int, Answer] = {}

    def restart(self, values: Flats | None = None) -> None:
        """All workers have read the parameters and nobody is at work; `values`: new ones."""
        with self._changed:
            if values is not None:
                self.values = values
            workers = len(self.clocks)
            self.clocks, self._read, self._version = [0] * workers, [0] * workers, 0
            self.away.clear()

    def push(self, worker: int, change: Flats, drift: float) -> None:
        """A worker's update. `answer` must follow. `drift`: how far it was from the parameters."""
        with self._changed:
            self.away.discard(worker)
            self.clocks[worker] += 1
            self.accepted[worker] += 1
            self._drift[worker] = drift
            self._waiting[worker] = change
            if self.bound != 0:
                self._add(worker)
            self._go_on()
            self.held_back[worker] += worker in self._waiting

    def answer(self, worker: int) -> Answer:
        """The parameters, once this worker may go on."""
        deadline = time.monotonic() + self.timeout_s
        with self._changed:
            while worker not in self._answers:
                if self._ended is not None:
                    return Answer(values=self.values, ended=self._ended)
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    late = min(self._present(), key=lambda one: self.clocks[one])
                    return Answer(values=self.values, late=late)
            return self._answers.pop(worker)

    def leave(self, worker: int) -> None:
        """Nobody waits for this worker until it comes again."""
        with self._changed:
            self.away.add(worker)
            self._go_on()

    def end(self, worker: int) -> None:
        """The worker's process has ended, or cannot be reached: nobody can go on."""
        with self._changed:
            if self._ended is None:
                self._ended = worker
            self._changed.notify_all()

    def _present(self) -> list[int]:
        return [worker for worker in range(len(self.clocks)) if worker not in self.away]

    def _add(self, worker: int) -> None:
        scale = 1.0
        if self.bound is None:
            self._stale[worker] = self._version - self._read[worker]
            scale = 1 / max(1, self._stale[worker])
        torch._foreach_add_(self.values, self._waiting[worker], alpha=scale)
        self._waiting[worker] = []
        self._version += 1

    def _go_on(self) -> None:
        """Answer all workers that may go on, with the parameters as they are at this moment."""
        present = self._present()
        if self.bound == 0 and all(worker in self._waiting for worker in present):
            for worker in sorted(self._waiting):
                if self._waiting[worker]:
                    self._add(worker)
        slowest = min((self.clocks[worker] for worker in present), default=0)
        ready = [one for one in self._waiting if self.bound is None or self.clocks[one] - slowest <= self.bound]
        for worker in ready:
            del self._waiting[worker]
            if self.bound is not None:
                self._stale[worker] = max(0, self.clocks[worker] - slowest)
            self._read[worker] = self._version
            self._answers[worker] = Answer(
                values=[flat.clone() for flat in self.values],
                staleness=self._stale[worker],
                most=max(self._stale),
                drift=max(self._drift),
                mean_drift=sum(self._drift) / len(self._drift),
            )
        if ready:
            self._changed.notify_all()

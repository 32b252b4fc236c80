"""Parameter servers on the training ranks: stale-synchronous and asynchronous.

Every rank serves the same part of every vector. A thread for each other rank takes its updates and answers, whatever
the rank's own training does. A replica sends every server its part of the change that its optimizer made, and goes on
from the parameters that come back.

Stale-synchronous parallel: Ho et al. 2013 (NIPS, "More effective distributed ML via a stale synchronous parallel
parameter server"): workers add their updates; one that has made c of them waits until all have made c - s. Asynchronous
and staleness-aware: Zhang et al. 2016 (arXiv 1511.05950, equation 6): an update counts 1 / t where t others were
applied since its worker had read the parameters.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tutti.async_sgd.asynchronous_replicas import (
    AsynchronousReplicas,
    Transport,
    Unreachable,
    peer_ended_error,
    peer_late_error,
)
from tutti.config.partitioning import cut
from tutti.local_sgd.consistency import ModeArguments
from tutti.local_sgd.replica_group import MEASURED_EVERY, FlatVectors, ReplicaGroup, distance_from_mean
from tutti.parallel.parallel_model import ParallelModel

UPDATE, AWAY, LEAVE = range(3)
"""Requests of a worker: add an update; do not wait for me; never wait for me again."""


_ASK, _CHANGE, _SAY, _VALUES = 1000, 2000, 3000, 4000
"""Tags of a request and of its update, of a reply and of its parameters."""


_NOBODY = -1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerReply:
    """Reply to a worker's update.

    Attributes:
        values: the parameters.
        staleness: of this worker.
        most: largest staleness of all workers' last updates.
        drift: largest distance of a worker from the parameters, at its last update.
        mean_drift: mean of these distances.
        ended: rank that has ended, so that the worker cannot go on; `values` then mean nothing.
        late: rank that did not come in time, likewise.
    """

    values: FlatVectors
    staleness: int = 0
    most: int = 0
    drift: float = 0.0
    mean_drift: float = 0.0
    ended: int | None = None
    late: int | None = None


class ParameterShard:
    """The parameters that one rank serves to `workers` ranks; any thread may call its methods.

    With a bound of 0, the updates of a round are added in the order of ranks, so that the result depends on nothing
    else.

    Args:
        workers: number of ranks. bound: updates that a worker may be ahead of the slowest when it goes on; None: no
        bound, and stale updates count
            less.
        timeout_s: how long a worker waits.

    Attributes:
        away: workers that nobody waits for.
        held_back: replies that had to wait, by worker.
    """

    def __init__(self, workers: int, bound: int | None, timeout_s: float) -> None:
        self.bound, self.timeout_s = bound, timeout_s
        self.values: FlatVectors = []
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
        self._waiting: dict[int, FlatVectors] = {}
        self._answers: dict[int, ServerReply] = {}

    def restart(self, values: FlatVectors | None = None) -> None:
        """All workers have read the parameters and none is at work; `values`: new ones."""
        with self._changed:
            if values is not None:
                self.values = values
            workers = len(self.clocks)
            self.clocks, self._read, self._version = [0] * workers, [0] * workers, 0
            self.away.clear()

    def push(self, worker: int, change: FlatVectors, drift: float) -> None:
        """A worker's update, to be followed by `answer`. `drift`: its distance from the parameters."""
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

    def answer(self, worker: int) -> ServerReply:
        """The reply, once this worker may go on."""
        deadline = time.monotonic() + self.timeout_s
        with self._changed:
            while worker not in self._answers:
                if self._ended is not None:
                    return ServerReply(values=self.values, ended=self._ended)
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    late = min(self._present(), key=lambda one: self.clocks[one])
                    return ServerReply(values=self.values, late=late)
            return self._answers.pop(worker)

    def leave(self, worker: int) -> None:
        """Do not wait for this worker until it comes again."""
        with self._changed:
            self.away.add(worker)
            self._go_on()

    def end(self, worker: int) -> None:
        """The worker's process has ended or cannot be reached: nobody can go on."""
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
        """Answer all workers that may go on, with the present parameters."""
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
            self._answers[worker] = ServerReply(
                values=[flat.clone() for flat in self.values],
                staleness=self._stale[worker],
                most=max(self._stale),
                drift=max(self._drift),
                mean_drift=sum(self._drift) / len(self._drift),
            )
        if ready:
            self._changed.notify_all()


class ParameterServers(AsynchronousReplicas):
    """x <- x + the replicas' changes, applied when they come. `bound`: see ParameterShard."""

    def __init__(self, replicas: ReplicaGroup, transport: Transport, mode: str, bound: int | None) -> None:
        super().__init__(replicas)
        self.mode, self.transport = mode, transport
        self.learning_rate_scale = 1.0 if bound is None else 1 / replicas.size
        self.served = ParameterShard(replicas.size, bound, transport.timeout_s)
        self.others = [peer for peer in range(replicas.size) if peer != replicas.index]
        self._found: FlatVectors = []
        self._drift = 0.0
        self._counted = 0
        self.counts["rounds"] = 0
        self.own_staleness = 0
        self._threads: list[threading.Thread] = []
        self._gone = False

    def begin(self, parallel: ParallelModel, step: int) -> None:
        super().begin(parallel, step)
        for worker in self.others:
            thread = threading.Thread(target=self._serve, args=(worker,), name=f"tutti-server-{worker}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def restart(self) -> None:
        self._found = self.vectors.read()
        self.served.restart([flat.cpu().clone() for flat in self._part(self._found, self.replicas.index)])

    def exchange(self, parallel: ParallelModel) -> None:
        if not self.others:
            self.staleness = 0
            return
        after = self.vectors.read()
        change = [flat.cpu() for flat in torch._foreach_sub(after, self._found)]
        own_nbytes = sum(flat.numel() * flat.element_size() for flat in self._part(change, self.replicas.index))
        pushed = sum(flat.numel() * flat.element_size() for flat in change) - own_nbytes
        with self.replicas.channel.waiting(pushed):
            values, answers = self._exchanged(change)
        with self.replicas.channel.waiting(self._answered() * own_nbytes):
            pass  # bytes that this rank's server sends beside
        self.vectors.write(values)
        self._found = self.vectors.read()
        if self.counts["rounds"] % MEASURED_EVERY == 0:
            self._drift = _distance(after, self._found)
        self.counts["rounds"] += 1
        self.own_staleness = max(one.staleness for one in answers)
        self.staleness = max(one.most for one in answers)
        largest, usual = max(one.drift for one in answers), max(one.mean_drift for one in answers)
        self.disagreement = {"max": largest, "mean": usual, "parameters": sum(flat.numel() for flat in after)}

    def final_parameters(self) -> FlatVectors:
        return self.vectors.read()

    @contextmanager
    def quiesced(self, parallel: ParallelModel) -> Iterator[None]:
        """Inside, replicas have the parameters that are served."""
        self._ask_all(AWAY)
        self.barrier()
        if not self.equal and self.others:
            own, served = self.vectors.read(), self._all_parts()
            self.last_disagreement = distance_from_mean(own, served, self.replicas)
            self.vectors.write(served)
            self._found = self.vectors.read()
            self.buffers.agree()
        self.equal, self.staleness, self.counts["since"] = True, 0, 0
        yield
        self.served.restart()
        self.barrier()

    def on_exit(self, parallel: ParallelModel) -> None:
        """Serve this rank's part until the last of the others has left."""
        if self._gone:
            return
        self._gone = True
        try:
            self._ask_all(LEAVE)
        except Exception:  # another has ended badly, and says so itself
            return
        for thread in self._threads:
            thread.join()

    def _part(self, flats: FlatVectors, server: int) -> FlatVectors:
        """A server's part of every vector, as views."""
        bounds = [cut(flat.numel(), self.replicas.size)[server : server + 2] for flat in flats]
        return [flat[begin:end] for flat, (begin, end) in zip(flats, bounds, strict=True)]

    def _exchanged(self, change: FlatVectors) -> tuple[FlatVectors, list[ServerReply]]:
        """The parameters after all servers have taken the change and let this replica go on."""
        values = [torch.empty_like(flat) for flat in change]
        asked = torch.tensor([UPDATE, self._drift], dtype=torch.float64)
        says = {peer: torch.zeros(6, dtype=torch.float64) for peer in self.others}
        going, coming = [], []
        try:
            for peer in self.others:
                going.append(self.transport.start_send(peer, [asked], _ASK))
                going.append(self.transport.start_send(peer, self._part(change, peer), _CHANGE))
                coming.append(self.transport.start_receive(peer, [says[peer]], _SAY))
                coming.append(self.transport.start_receive(peer, self._part(values, peer), _VALUES))
            own = self.replicas.index
            self.served.push(own, self._part(change, own), self._drift)
            answers = [self.served.answer(own)]
            self._check(answers[0])
            for finish in [*coming, *going]:
                finish()
        except Unreachable as problem:
            error = self._sentence(problem.peer, problem.late)
            raise error from error.__cause__
        torch._foreach_copy_(self._part(values, own), answers[0].values)
        answers += [_heard(fields_received, []) for fields_received in says.values()]
        for answer in answers:
            self._check(answer)
        return [flat.to(self.device) for flat in values], answers

    def _check(self, answer: ServerReply) -> None:
        if answer.ended is not None:
            raise self._sentence(answer.ended, False)
        if answer.late is not None:
            raise self._sentence(answer.late, True)

    def _sentence(self, peer: int, is_late: bool) -> Exception:
        rank = self.replicas.ranks[peer]
        return (
            peer_late_error(self.mode, rank, self.transport.timeout_s) if is_late else peer_ended_error(self.mode, rank)
        )

    def _ask_all(self, what: int) -> None:
        """Send a request to all servers; AWAY is known everywhere when it returns."""
        asked, says = torch.tensor([what, 0.0], dtype=torch.float64), torch.zeros(6, dtype=torch.float64)
        self.served.leave(self.replicas.index)
        try:
            going = [self.transport.start_send(peer, [asked], _ASK) for peer in self.others]
            for peer in self.others if what == AWAY else ():
                self.transport.start_receive(peer, [says], _SAY)()
            for finish in going:
                finish()
        except Unreachable as problem:
            error = self._sentence(problem.peer, problem.late)
            raise error from error.__cause__

    def _all_parts(self) -> FlatVectors:
        """The parameters as they are served, from all servers. Collective."""
        whole = [torch.zeros_like(flat) for flat in self._found]
        for part, values in zip(self._part(whole, self.replicas.index), self.served.values, strict=True):
            part.copy_(values)
        self.replicas.start_sum(whole).wait()
        return whole

    def _answered(self) -> int:
        """Updates taken from other ranks since the last call."""
        before, self._counted = self._counted, sum(self.served.accepted[peer] for peer in self.others)
        return self._counted - before

    def _serve(self, worker: int) -> None:
        """A thread's work: the requests of `worker`, until it leaves."""
        asked = torch.zeros(2, dtype=torch.float64)
        going: list[Callable[[], None]] = []
        try:
            while True:
                self.transport.receive(worker, [asked], _ASK)
                while going:  # the worker asks again: it has its answer
                    going.pop()()
                what, drift = asked.tolist()
                if what == UPDATE:
                    change = [torch.empty_like(flat) for flat in self.served.values]
                    self.transport.receive(worker, change, _CHANGE)
                    self.served.push(worker, change, drift)
                    answer = self.served.answer(worker)
                    going.append(self.transport.start_send(worker, [_said(answer)], _SAY))
                    going.append(self.transport.start_send(worker, answer.values, _VALUES))
                    continue
                self.served.leave(worker)
                if what == LEAVE or self._gone:  # who has left can no more come together with others
                    return
                going.append(self.transport.start_send(worker, [torch.zeros(6, dtype=torch.float64)], _SAY))
        except Unreachable as problem:
            self.served.end(problem.peer)


def _said(answer: ServerReply) -> torch.Tensor:
    numbers = [answer.staleness, answer.most, answer.drift, answer.mean_drift]
    for rank in (answer.ended, answer.late):
        numbers.append(_NOBODY if rank is None else rank)
    return torch.tensor(numbers, dtype=torch.float64)


def _heard(fields_received: torch.Tensor, values: FlatVectors) -> ServerReply:
    staleness, most, drift, mean_drift, *ranks = fields_received.tolist()
    ended_rank, late_rank = (None if rank == _NOBODY else int(rank) for rank in ranks)
    return ServerReply(
        values=values,
        staleness=int(staleness),
        most=int(most),
        drift=drift,
        mean_drift=mean_drift,
        ended=ended_rank,
        late=late_rank,
    )


def _distance(one: FlatVectors, other: FlatVectors) -> float:
    """|one - other| / |other|."""
    squares = sum(float((a - b).double().square().sum()) for a, b in zip(one, other, strict=True))
    length = sum(float(b.double().square().sum()) for b in other)
    return float((squares / max(length, 1e-300)) ** 0.5)


def make_stale(replicas: ReplicaGroup, arguments: ModeArguments) -> ParameterServers:
    """Stale-synchronous servers with the plan's bound."""
    return ParameterServers(replicas, Transport(replicas), "stale", arguments.relaxed.bound)


def make_asynchronous(replicas: ReplicaGroup, arguments: ModeArguments) -> ParameterServers:
    """Asynchronous, staleness-aware servers."""
    return ParameterServers(replicas, Transport(replicas), "asynchronous", None)

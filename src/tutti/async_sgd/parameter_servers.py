"""Parameter servers on the training ranks: stale-synchronous and asynchronous.

Every rank serves the same part of every vector. For each other rank, a thread takes that rank's updates and replies to
them, independently of the rank's own training. A replica sends every server its part of the change that its optimizer
made, and continues from the parameters that come back.

Stale-synchronous parallel: Ho et al. 2013 (NIPS, "More effective distributed ML via a stale synchronous parallel
parameter server"). Workers add their updates; a worker that has made c of them waits until all have made c - s.
Asynchronous and staleness-aware: Zhang et al. 2016 (arXiv 1511.05950, equation 6). An update has weight 1 / t if t
others were applied since its worker had read the parameters.
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
"""Requests of a worker: add an update; do not wait for me until the next update; never wait for me again."""

_ASK, _CHANGE, _SAY, _VALUES = 1000, 2000, 3000, 4000
"""Message tags of a request and of its update, of a reply and of its parameters."""

_NOBODY = -1.0
"""Number that encodes "no rank" in a reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerReply:
    """Reply to a worker's update.

    Attributes:
        values: the served part of the parameters.
        staleness: staleness of this worker.
        most: largest staleness among the last updates of all workers.
        drift: largest relative distance of a worker from the served parameters, each at its last update.
        mean_drift: mean of these distances.
        ended: rank that has ended, so that the worker cannot continue; `values` are then meaningless.
        late: rank that did not make its update in time; `values` are then meaningless.
    """

    values: FlatVectors
    staleness: int = 0
    most: int = 0
    drift: float = 0.0
    mean_drift: float = 0.0
    ended: int | None = None
    late: int | None = None


class ParameterShard:
    """The part of the parameters that one rank serves to all ranks. Any thread may call its methods.

    With a bound of 0, the updates of a round are added in rank order, so that the result does not depend on timing.

    Args:
        workers: number of ranks.
        bound: number of updates by which a worker may be ahead of the slowest one when it continues; None: no bound,
            and stale updates have less weight.
        timeout_s: the longest time a worker waits, in seconds.

    Attributes:
        values: the served values.
        accepted: number of updates accepted, by worker.
        held_back: number of replies that had to wait, by worker.
        away: workers for which no other worker waits.
        clocks: number of updates since the last restart, by worker.
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
        """Start over after all workers have read the parameters and none is sending updates.

        Args:
            values: new parameters; None: keep the present ones.
        """
        with self._changed:
            if values is not None:
                self.values = values
            workers = len(self.clocks)
            self.clocks, self._read, self._version = [0] * workers, [0] * workers, 0
            self.away.clear()

    def push(self, worker: int, change: FlatVectors, drift: float) -> None:
        """Accept a worker's update. The worker calls `answer` next.

        Args:
            worker: the worker's index.
            change: its update of the served values.
            drift: the worker's relative distance from the served parameters.
        """
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
        """Wait until this worker may continue, and return the reply to its last update."""
        deadline = time.monotonic() + self.timeout_s
        with self._changed:
            while worker not in self._answers:
                if self._ended is not None:
                    return ServerReply(values=self.values, ended=self._ended)
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    late = min(self._present(), key=lambda index: self.clocks[index])
                    return ServerReply(values=self.values, late=late)
            return self._answers.pop(worker)

    def leave(self, worker: int) -> None:
        """Let nobody wait for this worker until its next update."""
        with self._changed:
            self.away.add(worker)
            self._go_on()

    def end(self, worker: int) -> None:
        """Record that the worker's process has ended or is unreachable, so that no worker can continue."""
        with self._changed:
            if self._ended is None:
                self._ended = worker
            self._changed.notify_all()

    def _present(self) -> list[int]:
        """Return the workers that are not away."""
        return [worker for worker in range(len(self.clocks)) if worker not in self.away]

    def _add(self, worker: int) -> None:
        """Add a worker's waiting update to the values, with less weight if it is stale and there is no bound."""
        scale = 1.0
        if self.bound is None:
            self._stale[worker] = self._version - self._read[worker]
            scale = 1 / max(1, self._stale[worker])
        torch._foreach_add_(self.values, self._waiting[worker], alpha=scale)
        self._waiting[worker] = []
        self._version += 1

    def _go_on(self) -> None:
        """Reply with the present parameters to all workers that may continue."""
        present = self._present()
        if self.bound == 0 and all(worker in self._waiting for worker in present):
            for worker in sorted(self._waiting):
                if self._waiting[worker]:
                    self._add(worker)
        slowest = min((self.clocks[worker] for worker in present), default=0)
        ready = [
            waiting for waiting in self._waiting if self.bound is None or self.clocks[waiting] - slowest <= self.bound
        ]
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
    """Replicas that add their changes to the served parameters as they arrive: x <- x + change.

    Args:
        replicas: the group.
        transport: this replica's messages with the others.
        mode: the mode's name in plans, for messages.
        bound: see `ParameterShard`.

    Attributes:
        served: the part of the parameters that this rank serves.
        others: indices of the other replicas.
        own_staleness: largest staleness of this replica's last update on any server.
    """

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
            pass  # count the bytes that this rank's server has sent
        self.vectors.write(values)
        self._found = self.vectors.read()
        if self.counts["rounds"] % MEASURED_EVERY == 0:
            self._drift = _distance(after, self._found)
        self.counts["rounds"] += 1
        self.own_staleness = max(answer.staleness for answer in answers)
        self.staleness = max(answer.most for answer in answers)
        largest, mean = max(answer.drift for answer in answers), max(answer.mean_drift for answer in answers)
        self.disagreement = {"max": largest, "mean": mean, "parameters": sum(flat.numel() for flat in after)}

    def final_parameters(self) -> FlatVectors:
        return self.vectors.read()

    @contextmanager
    def quiesced(self, parallel: ParallelModel) -> Iterator[None]:
        """Load the served parameters on all replicas; inside, no replica sends updates. Collective."""
        self._ask_all(AWAY)
        self.barrier()
        if not self.equal and self.others:
            local, served = self.vectors.read(), self._all_parts()
            self.last_disagreement = distance_from_mean(local, served, self.replicas)
            self.vectors.write(served)
            self._found = self.vectors.read()
            self.buffers.agree()
        self.equal, self.staleness, self.counts["updates_since"] = True, 0, 0
        yield
        self.served.restart()
        self.barrier()

    def on_exit(self, parallel: ParallelModel) -> None:
        """Serve this rank's part until all other ranks have left."""
        if self._gone:
            return
        self._gone = True
        try:
            self._ask_all(LEAVE)
        except Exception:  # another rank has failed, and reports that itself
            return
        for thread in self._threads:
            thread.join()

    def _part(self, flats: FlatVectors, server: int) -> FlatVectors:
        """Return a server's part of every vector, as views."""
        bounds = [cut(flat.numel(), self.replicas.size)[server : server + 2] for flat in flats]
        return [flat[begin:end] for flat, (begin, end) in zip(flats, bounds, strict=True)]

    def _exchanged(self, change: FlatVectors) -> tuple[FlatVectors, list[ServerReply]]:
        """Send the change to all servers, and wait until each lets this replica continue.

        Returns:
            (whole parameters, replies of all servers, this rank's own first).
        """
        values = [torch.empty_like(flat) for flat in change]
        request = torch.tensor([UPDATE, self._drift], dtype=torch.float64)
        replies = {peer: torch.zeros(6, dtype=torch.float64) for peer in self.others}
        sends, receives = [], []
        try:
            for peer in self.others:
                sends.append(self.transport.start_send(peer, [request], _ASK))
                sends.append(self.transport.start_send(peer, self._part(change, peer), _CHANGE))
                receives.append(self.transport.start_receive(peer, [replies[peer]], _SAY))
                receives.append(self.transport.start_receive(peer, self._part(values, peer), _VALUES))
            index = self.replicas.index
            self.served.push(index, self._part(change, index), self._drift)
            answers = [self.served.answer(index)]
            self._check(answers[0])
            for finish in [*receives, *sends]:  # receives first: they notice a rank that has ended
                finish()
        except Unreachable as problem:
            error = self._sentence(problem.peer, problem.late)
            raise error from error.__cause__
        torch._foreach_copy_(self._part(values, index), answers[0].values)
        answers += [_heard(fields_received, []) for fields_received in replies.values()]
        for answer in answers:
            self._check(answer)
        return [flat.to(self.device) for flat in values], answers

    def _check(self, answer: ServerReply) -> None:
        """Raise TrainingError if a reply says that another rank has ended or is late."""
        if answer.ended is not None:
            raise self._sentence(answer.ended, False)
        if answer.late is not None:
            raise self._sentence(answer.late, True)

    def _sentence(self, peer: int, is_late: bool) -> Exception:
        """Return the error of a rank that cannot continue because `peer` has ended or is late."""
        rank = self.replicas.ranks[peer]
        return (
            peer_late_error(self.mode, rank, self.transport.timeout_s) if is_late else peer_ended_error(self.mode, rank)
        )

    def _ask_all(self, what: int) -> None:
        """Send request `what` to all servers. For AWAY, return once all servers know it."""
        request, reply = torch.tensor([what, 0.0], dtype=torch.float64), torch.zeros(6, dtype=torch.float64)
        self.served.leave(self.replicas.index)
        try:
            sends = [self.transport.start_send(peer, [request], _ASK) for peer in self.others]
            for peer in self.others if what == AWAY else ():
                self.transport.start_receive(peer, [reply], _SAY)()
            for finish in sends:
                finish()
        except Unreachable as problem:
            error = self._sentence(problem.peer, problem.late)
            raise error from error.__cause__

    def _all_parts(self) -> FlatVectors:
        """Gather the served parameters from all servers. Collective."""
        whole = [torch.zeros_like(flat) for flat in self._found]
        for part, values in zip(self._part(whole, self.replicas.index), self.served.values, strict=True):
            part.copy_(values)
        self.replicas.start_sum(whole).wait()
        return whole

    def _answered(self) -> int:
        """Return the number of updates accepted from other ranks since the last call."""
        before, self._counted = self._counted, sum(self.served.accepted[peer] for peer in self.others)
        return self._counted - before

    def _serve(self, worker: int) -> None:
        """Serve the requests of `worker` until it leaves; runs in a thread."""
        request = torch.zeros(2, dtype=torch.float64)
        sends: list[Callable[[], None]] = []
        try:
            while True:
                self.transport.receive(worker, [request], _ASK)
                while sends:  # these end at once: the worker has its reply, or it would not ask again
                    sends.pop()()
                what, drift = request.tolist()
                if what == UPDATE:
                    change = [torch.empty_like(flat) for flat in self.served.values]
                    self.transport.receive(worker, change, _CHANGE)
                    self.served.push(worker, change, drift)
                    answer = self.served.answer(worker)
                    sends.append(self.transport.start_send(worker, [_said(answer)], _SAY))
                    sends.append(self.transport.start_send(worker, answer.values, _VALUES))
                    continue
                self.served.leave(worker)
                if what == LEAVE or self._gone:  # a rank that has left meets no others any more
                    return
                sends.append(self.transport.start_send(worker, [torch.zeros(6, dtype=torch.float64)], _SAY))
        except Unreachable as problem:
            self.served.end(problem.peer)


def _said(answer: ServerReply) -> torch.Tensor:
    """Encode a reply, without its values, as six numbers."""
    numbers = [answer.staleness, answer.most, answer.drift, answer.mean_drift]
    for rank in (answer.ended, answer.late):
        numbers.append(_NOBODY if rank is None else rank)
    return torch.tensor(numbers, dtype=torch.float64)


def _heard(fields_received: torch.Tensor, values: FlatVectors) -> ServerReply:
    """Decode a reply from six numbers, and add `values`."""
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
    """Return |one - other| / |other|."""
    squares = sum(float((a - b).double().square().sum()) for a, b in zip(one, other, strict=True))
    length = sum(float(b.double().square().sum()) for b in other)
    return float((squares / max(length, 1e-300)) ** 0.5)


def make_stale(replicas: ReplicaGroup, arguments: ModeArguments) -> ParameterServers:
    """Make stale-synchronous parameter servers with the plan's bound."""
    return ParameterServers(replicas, Transport(replicas), "stale", arguments.relaxed.bound)


def make_asynchronous(replicas: ReplicaGroup, arguments: ModeArguments) -> ParameterServers:
    """Make asynchronous, staleness-aware parameter servers."""
    return ParameterServers(replicas, Transport(replicas), "asynchronous", None)

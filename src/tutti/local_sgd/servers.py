"""Parameters served by the ranks beside training: stale-synchronous and asynchronous.

Every rank serves the same part of every vector; a thread for each other rank takes its updates and answers, whatever
the rank's own training does. A replica sends every server its part of the change that its optimizer made, and goes on
from the parameters that come back.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from tutti.config.partitioning import cut
from tutti.local_sgd.alone import Alone
from tutti.local_sgd.measure import MEASURED, from_mean
from tutti.local_sgd.served import Answer, Served
from tutti.local_sgd.vectors import Flats, Replicas
from tutti.local_sgd.wire import Unreachable, Wire, ended, late
from tutti.trainer.run_state import Run

UPDATE, AWAY, LEAVE = range(3)
"""What a worker asks: to add an update, not to be waited for, never to be waited for again."""

_ASK, _CHANGE, _SAY, _VALUES = 1000, 2000, 3000, 4000
"""Tags of a question and of the update that goes with it, of an answer and of its parameters."""

_NOBODY = -1.0


class Servers(Alone):
    """x <- x + the replicas' changes, applied when they come. `bound`: see Served."""

    def __init__(self, replicas: Replicas, wire: Wire, mode: str, bound: int | None) -> None:
        super().__init__(replicas)
        self.mode, self.wire = mode, wire
        self.pace = 1.0 if bound is None else 1 / replicas.size
        self.served = Served(replicas.size, bound, wire.timeout_s)
        self.others = [peer for peer in range(replicas.size) if peer != replicas.index]
        self._found: Flats = []
        self._drift = 0.0
        self._counted = 0
        self.counts["rounds"] = 0
        self.own_staleness = 0
        self._threads: list[threading.Thread] = []
        self._gone = False

    def begin(self, run: Run) -> None:
        super().begin(run)
        for worker in self.others:
            thread = threading.Thread(target=self._serve, args=(worker,), name=f"tutti-server-{worker}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def restart(self) -> None:
        self._found = self.vectors.read()
        self.served.restart([flat.cpu().clone() for flat in self._part(self._found, self.replicas.index)])

    def exchange(self, run: Run) -> None:
        if not self.others:
            self.staleness = 0
            return
        after = self.vectors.read()
        change = [flat.cpu() for flat in torch._foreach_sub(after, self._found)]
        mine = sum(flat.numel() * flat.element_size() for flat in self._part(change, self.replicas.index))
        pushed = sum(flat.numel() * flat.element_size() for flat in change) - mine
        with self.replicas.channel.waiting(pushed):
            values, answers = self._exchanged(change)
        with self.replicas.channel.waiting(self._answered() * mine):
            pass  # bytes that this rank's server sends beside
        self.vectors.write(values)
        self._found = self.vectors.read()
        if self.counts["rounds"] % MEASURED == 0:
            self._drift = _distance(after, self._found)
        self.counts["rounds"] += 1
        self.own_staleness = max(one.staleness for one in answers)
        self.staleness = max(one.most for one in answers)
        largest, usual = max(one.drift for one in answers), max(one.mean_drift for one in answers)
        self.disagreement = {"max": largest, "mean": usual, "parameters": sum(flat.numel() for flat in after)}

    def ending(self) -> Flats:
        return self.vectors.read()

    @contextmanager
    def still(self, run: Run) -> Iterator[None]:
        """Replicas go on from the parameters that are served then."""
        self._ask_all(AWAY)
        self.meet()
        if not self.equal and self.others:
            own, served = self.vectors.read(), self._all_parts()
            self.rested = from_mean(own, served, self.replicas)
            self.vectors.write(served)
            self._found = self.vectors.read()
            self.buffers.agree()
        self.equal, self.staleness, self.counts["since"] = True, 0, 0
        yield
        self.served.restart()
        self.meet()

    def left(self, run: Run) -> None:
        """This rank's part is served until the last of the others has left."""
        if self._gone:
            return
        self._gone = True
        try:
            self._ask_all(LEAVE)
        except Exception:  # another has ended badly, and says so itself
            return
        for thread in self._threads:
            thread.join()

    def _part(self, flats: Flats, server: int) -> Flats:
        """What a server has of every vector, as views."""
        bounds = [cut(flat.numel(), self.replicas.size)[server : server + 2] for flat in flats]
        return [flat[begin:end] for flat, (begin, end) in zip(flats, bounds, strict=True)]

    def _exchanged(self, change: Flats) -> tuple[Flats, list[Answer]]:
        """The parameters after all servers have taken the change in and let this replica go on."""
        values = [torch.empty_like(flat) for flat in change]
        asked = torch.tensor([UPDATE, self._drift], dtype=torch.float64)
        says = {peer: torch.zeros(6, dtype=torch.float64) for peer in self.others}
        going, coming = [], []
        try:
            for peer in self.others:
                going.append(self.wire.start_send(peer, [asked], _ASK))
                going.append(self.wire.start_send(peer, self._part(change, peer), _CHANGE))
                coming.append(self.wire.start_receive(peer, [says[peer]], _SAY))
                coming.append(self.wire.start_receive(peer, self._part(values, peer), _VALUES))
            own = self.replicas.index
            self.served.push(own, self._part(change, own), self._drift)
            answers = [self.served.answer(own)]
            self._check(answers[0])
            for flight in [*coming, *going]:
                flight()
        except Unreachable as problem:
            error = self._sentence(problem.peer, problem.late)
            raise error from error.__cause__
        torch._foreach_copy_(self._part(values, own), answers[0].values)
        answers += [_heard(said, []) for said in says.values()]
        for answer in answers:
            self._check(answer)
        return [flat.to(self.device) for flat in values], answers

    def _check(self, answer: Answer) -> None:
        if answer.ended is not None:
            raise self._sentence(answer.ended, False)
        if answer.late is not None:
            raise self._sentence(answer.late, True)

    def _sentence(self, peer: int, is_late: bool) -> Exception:
        rank = self.replicas.ranks[peer]
        return late(self.mode, rank, self.wire.timeout_s) if is_late else ended(self.mode, rank)

    def _ask_all(self, what: int) -> None:
        """Tell all servers; AWAY is known everywhere when it returns."""
        asked, says = torch.tensor([what, 0.0], dtype=torch.float64), torch.zeros(6, dtype=torch.float64)
        self.served.leave(self.replicas.index)
        try:
            going = [self.wire.start_send(peer, [asked], _ASK) for peer in self.others]
            for peer in self.others if what == AWAY else ():
                self.wire.start_receive(peer, [says], _SAY)()
            for flight in going:
                flight()
        except Unreachable as problem:
            error = self._sentence(problem.peer, problem.late)
            raise error from error.__cause__

    def _all_parts(self) -> Flats:
        """The parameters as they are served, from all servers. Collective."""
        whole = [torch.zeros_like(flat) for flat in self._found]
        for part, values in zip(self._part(whole, self.replicas.index), self.served.values, strict=True):
            part.copy_(values)
        self.replicas.start_sum(whole).wait()
        return whole

    def _answered(self) -> int:
        """Updates taken from other ranks since this was last asked."""
        before, self._counted = self._counted, sum(self.served.accepted[peer] for peer in self.others)
        return self._counted - before

    def _serve(self, worker: int) -> None:
        """A thread's work: what `worker` asks, until it leaves."""
        asked = torch.zeros(2, dtype=torch.float64)
        going: list[Callable[[], None]] = []
        try:
            while True:
                self.wire.receive(worker, [asked], _ASK)
                while going:  # the worker asks again: it has its answer
                    going.pop()()
                what, drift = asked.tolist()
                if what == UPDATE:
                    change = [torch.empty_like(flat) for flat in self.served.values]
                    self.wire.receive(worker, change, _CHANGE)
                    self.served.push(worker, change, drift)
                    answer = self.served.answer(worker)
                    going.append(self.wire.start_send(worker, [_said(answer)], _SAY))
                    going.append(self.wire.start_send(worker, answer.values, _VALUES))
                    continue
                self.served.leave(worker)
                if what == LEAVE or self._gone:  # who has left can no more come together with others
                    return
                going.append(self.wire.start_send(worker, [torch.zeros(6, dtype=torch.float64)], _SAY))
        except Unreachable as problem:
            self.served.end(problem.peer)


def _said(answer: Answer) -> torch.Tensor:
    numbers = [answer.staleness, answer.most, answer.drift, answer.mean_drift]
    for rank in (answer.ended, answer.late):
        numbers.append(_NOBODY if rank is None else rank)
    return torch.tensor(numbers, dtype=torch.float64)


def _heard(said: torch.Tensor, values: Flats) -> Answer:
    staleness, most, drift, mean_drift, *ranks = said.tolist()
    ended_rank, late_rank = (None if rank == _NOBODY else int(rank) for rank in ranks)
    return Answer(
        values=values,
        staleness=int(staleness),
        most=int(most),
        drift=drift,
        mean_drift=mean_drift,
        ended=ended_rank,
        late=late_rank,
    )


def _distance(one: Flats, other: Flats) -> float:
    """|one - other| over |other|."""
    apart = sum(float((a - b).double().square().sum()) for a, b in zip(one, other, strict=True))
    length = sum(float(b.double().square().sum()) for b in other)
    return float((apart / max(length, 1e-300)) ** 0.5)

"""AD-PSGD: pairs of replicas are averaged while replicas compute (Lian et al. 2018, arXiv 1710.06952).

A replica stores parameters x separately from those of the model that computes. An update is added to x, and the model
is then set to x. Replicas with an even index are active: while a step computes, a thread sends x to a passive replica,
drawn at random, which answers with the mean of both. Passive replicas send no requests, so no cycle of ranks can wait
for each other (the paper's bipartite graph). Averaging does not change the sum of all x.
"""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from tutti.async_sgd.asynchronous_replicas import (
    AsynchronousReplicas,
    Transport,
    Unreachable,
    peer_ended_error,
    peer_late_error,
)
from tutti.data.seeds import derive_seed
from tutti.local_sgd.consistency import ModeArguments
from tutti.local_sgd.replica_group import FlatVectors, ReplicaGroup, distance_from_mean
from tutti.parallel.parallel_model import ParallelModel

MEAN, LEAVE = range(2)
"""Requests of an active replica: average with the parameters that follow; expect no more requests."""

_ASK, _VALUES, _ANSWER = 1000, 2000, 3000
"""Message tags of a request, of the parameters that follow it, and of the mean that comes back."""


class AdPsgd(AsynchronousReplicas):
    """Replicas that are averaged in pairs, x <- (x + x of another) / 2, at any moment between two updates.

    Args:
        replicas: the group.
        transport: this replica's messages with the others.
        seed: seed of the random draws of partners.

    Attributes:
        active: whether this replica asks others to average.
        others: indices of the replicas that this one may be averaged with.
        exchanges: number of exchanges in which this replica took part.
    """

    def __init__(self, replicas: ReplicaGroup, transport: Transport, seed: int) -> None:
        super().__init__(replicas)
        self.transport = transport
        self.active = replicas.index % 2 == 0
        self.others = list(range(1 - replicas.index % 2, replicas.size, 2))
        self.exchanges = 0
        self._random = random.Random(derive_seed(seed, "pairs", replicas.index))
        self._changed = threading.Condition()
        self._x: FlatVectors = []
        self._found: FlatVectors = []
        self._mixed = False
        self._sent_nbytes = 0
        self._wanted, self._resting, self._over = False, True, False
        self._problem: Unreachable | None = None
        self._distance = 0.0
        self._threads: list[threading.Thread] = []

    def begin(self, parallel: ParallelModel, step: int) -> None:
        super().begin(parallel, step)
        if self.active and self.others:
            self._threads = [threading.Thread(target=self._ask, name="tutti-pairs", daemon=True)]
        elif not self.active:
            self._threads = [
                threading.Thread(target=self._serve, args=(peer,), name=f"tutti-pairs-{peer}", daemon=True)
                for peer in self.others
            ]
        for thread in self._threads:
            thread.start()

    def restart(self) -> None:
        with self._changed:
            self._found = self.vectors.read()
            self._x = [flat.cpu().clone() for flat in self._found]
            self._mixed = False

    def exchange(self, parallel: ParallelModel) -> None:
        """Add the update to x, set the model to x, and allow the next exchange."""
        after = self.vectors.read()
        with self._changed:
            self._check()
            nbytes, self._sent_nbytes = self._sent_nbytes, 0
            if self._mixed:
                change = [flat.cpu() for flat in torch._foreach_sub(after, self._found)]
                torch._foreach_add_(self._x, change)
                self._take_x()
                self.staleness = 1
                self.disagreement = {"max": self._distance, "mean": self._distance, "parameters": _numel(self._x)}
            else:
                for stored, new in zip(self._x, after, strict=True):
                    stored.copy_(new)
                self._found = after
            if not self.others:
                self.staleness = 0
            self._wanted = True
            self._changed.notify_all()
        if nbytes:
            with self.replicas.channel.waiting(nbytes):
                pass  # count the bytes that a thread has sent meanwhile

    def final_parameters(self) -> FlatVectors:
        return self.replicas.mean(self.vectors.read())

    @contextmanager
    def quiesced(self, parallel: ParallelModel) -> Iterator[None]:
        with self._changed:
            self._wanted = False
            while not self._resting and self._problem is None:
                self._changed.wait()
            self._check()
        self.barrier()
        with self._changed:
            if self._mixed:
                self._take_x()
        if not self.equal:
            local = self.vectors.read()
            self.last_disagreement = distance_from_mean(
                local, self.replicas.mean([flat.clone() for flat in local]), self.replicas
            )
        yield
        self.barrier()

    def on_exit(self, parallel: ParallelModel) -> None:
        """Leave; a passive replica answers until all active replicas have left."""
        with self._changed:
            if self._over:
                return
            self._over = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _take_x(self) -> None:
        """Set the model's parameters to x."""
        self.vectors.write(self._x)
        self._found, self._mixed = self.vectors.read(), False

    def _check(self) -> None:
        """Raise TrainingError if a thread found that another rank has ended or is late."""
        if self._problem is not None:
            rank = self.replicas.ranks[self._problem.peer]
            raise (
                peer_late_error("ad-psgd", rank, self.transport.timeout_s)
                if self._problem.late
                else peer_ended_error("ad-psgd", rank)
            )

    def _ask(self) -> None:
        """Make at most one exchange per step; the thread of an active replica."""
        try:
            while True:
                with self._changed:
                    while not self._wanted and not self._over:
                        self._changed.wait()
                    if self._over:
                        break
                    self._wanted, self._resting = False, False
                    sent = [flat.clone() for flat in self._x]
                self._average(self._random.choice(self.others), sent)
                with self._changed:
                    self._resting = True
                    self._changed.notify_all()
            for peer in self.others:
                self.transport.send(peer, [torch.tensor([LEAVE])], _ASK)
        except Unreachable as problem:
            self._failed(problem)

    def _average(self, peer: int, sent: FlatVectors) -> None:
        """Send x to a passive replica, and add to x what the mean of both changes."""
        mean = [torch.empty_like(flat) for flat in sent]
        receive_mean = self.transport.start_receive(peer, mean, _ANSWER)
        send_request = self.transport.start_send(peer, [torch.tensor([MEAN])], _ASK)
        send_values = self.transport.start_send(peer, sent, _VALUES)
        for finish in (receive_mean, send_request, send_values):
            finish()
        moved = torch._foreach_sub(mean, sent)
        with self._changed:
            torch._foreach_add_(self._x, moved)
            self._note(sent, mean)

    def _serve(self, peer: int) -> None:
        """Answer one active replica until it leaves; a thread of a passive replica."""
        request = torch.zeros(1, dtype=torch.int64)
        sends: list[Callable[[], None]] = []
        try:
            while True:
                self.transport.receive(peer, [request], _ASK)
                while sends:  # these end at once: the peer has its answer, or it would not ask again
                    sends.pop()()
                if int(request) == LEAVE:
                    return
                theirs = [torch.empty_like(flat) for flat in self._x]
                self.transport.receive(peer, theirs, _VALUES)
                with self._changed:
                    torch._foreach_add_(theirs, self._x)
                    torch._foreach_mul_(theirs, 0.5)
                    before = self._x
                    self._x = [flat.clone() for flat in theirs]
                    self._note(before, theirs)
                sends.append(self.transport.start_send(peer, theirs, _ANSWER))
        except Unreachable as problem:
            self._failed(problem)

    def _note(self, before: FlatVectors, mean: FlatVectors) -> None:
        """Record a completed exchange: x was `before`, and both replicas now have `mean`."""
        self._mixed = True
        self.exchanges += 1
        self._sent_nbytes += sum(flat.numel() * flat.element_size() for flat in mean)
        squares = sum(float((a - b).double().square().sum()) for a, b in zip(before, mean, strict=True))
        length = sum(float(b.double().square().sum()) for b in mean)
        self._distance = float((squares / max(length, 1e-300)) ** 0.5)

    def _failed(self, problem: Unreachable) -> None:
        """Record why a thread failed, for the training thread to raise."""
        with self._changed:
            self._problem = problem
            self._resting = True
            self._changed.notify_all()


def _numel(flats: FlatVectors) -> int:
    return sum(flat.numel() for flat in flats)


def make_ad_psgd(replicas: ReplicaGroup, arguments: ModeArguments) -> AdPsgd:
    """Make the AD-PSGD mode; a plan has no parameters for it."""
    return AdPsgd(replicas, Transport(replicas), arguments.seed)

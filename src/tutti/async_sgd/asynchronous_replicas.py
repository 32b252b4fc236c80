"""The base of modes in which ranks do not wait for each other in steps, and the messages between such ranks.

Ranks meet only to evaluate, to save, when the set of trained parameters changes, and at the end. Between these moments
their messages bypass the process groups of training and use a Gloo group of their own, on host memory. Any thread may
send and receive there, and no message is confused with the exchanges of training, evaluation or checkpoints.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tutti.comm.devices import message_backend
from tutti.comm.rendezvous import open_group
from tutti.comm.traffic import CommHandle
from tutti.data.batches import BatchShare
from tutti.environment import read_launch_options
from tutti.errors import TrainingError
from tutti.local_sgd.consistency import ReplicaState
from tutti.local_sgd.diverged_replicas import DivergedReplicas
from tutti.local_sgd.replica_group import FlatVectors, ReplicaGroup
from tutti.parallel.parallel_model import ParallelModel


class AsynchronousReplicas(DivergedReplicas):
    """Replicas that step asynchronously.

    Args:
        replicas: the group.

    Attributes:
        last_disagreement: distances of the replicas from their mean when they last met.
    """

    asynchronous = True

    def __init__(self, replicas: ReplicaGroup) -> None:
        super().__init__(replicas, 1)
        self.last_disagreement: dict[str, float | int] | None = None
        self._last = torch.full((2,), torch.nan, dtype=torch.float64)

    @abstractmethod
    def quiesced(self, parallel: ParallelModel) -> AbstractContextManager[None]:
        """Bring all ranks together; inside, nothing is in flight and no exchange begins. Collective."""

    def start_losses(self, parallel: ParallelModel, totals: torch.Tensor, share: BatchShare) -> CommHandle | None:
        """Scale this rank's own loss to the global batch, without any communication.

        A rank knows only the loss of its own samples, which stand for the whole global batch. A rank without samples
        reports its last loss again.
        """
        samples = sum(part.count for part in share.parts)
        totals[:2] *= share.batch_size / max(samples, 1)
        if samples == 0:
            totals[0], totals[1] = float(self._last[0] / self._last[1]) * share.batch_size, share.batch_size
        else:
            self._last = totals[:2].clone()
        return None

    def updated(self, parallel: ParallelModel, step: int) -> None:
        self.disagreement = None
        self.counts["updates_since"] += 1
        self.staleness += 1
        self.equal = False
        self.exchange(parallel)
        if parallel.replica.parameters is not self._trained:
            with self.quiesced(parallel):
                self._change_trained(parallel)

    def finish(self, parallel: ParallelModel) -> None:
        with self.quiesced(parallel):
            super().finish(parallel)

    @contextmanager
    def averaged_model(self, parallel: ParallelModel, *, saving: bool = False) -> Iterator[ReplicaState]:
        with self.quiesced(parallel), super().averaged_model(parallel, saving=saving) as state:
            yield state

    def on_resumed(self, parallel: ParallelModel, tensors: dict[str, torch.Tensor]) -> None:
        super().on_resumed(parallel, tensors)
        self.restart()
        self.barrier()

    def evaluation_row(self) -> dict[str, Any]:
        return {} if self.last_disagreement is None else {"replicas": {"disagreement": self.last_disagreement}}

    def barrier(self) -> None:
        """Wait until all replicas have called this."""
        self.replicas.gather(torch.zeros(1, device=self.device))

    @property
    def device(self) -> torch.device:
        return self._trained[0].device


_PATIENCE = timedelta(days=365)
"""Timeout of messages that the other rank sends at any time. A rank that has ended is noticed at once all the same."""


class Transport:
    """This replica's messages with the others, by their indices. Making one is collective.

    Args:
        replicas: the group.

    Attributes:
        timeout_s: the launch option's timeout, in seconds.
    """

    def __init__(self, replicas: ReplicaGroup) -> None:
        self._ranks = replicas.ranks
        self.timeout_s = read_launch_options().timeout_s
        self._group: Any = None
        if replicas.size > 1:
            timeout = timedelta(seconds=self.timeout_s)
            self._group = open_group(replicas.ranks, timeout, connect=False, backend=message_backend())

    def start_send(self, peer: int, tensors: FlatVectors, tag: int) -> Callable[[], None]:
        """Start to send tensors.

        Wait for the answer to a message before waiting for the message itself. If the other rank ends, Gloo reports it
        at once to a rank that receives from it. It does not always report it to a rank that sends to it, which then
        waits for the timeout (gloo/transport/tcp/pair.cc, `signalException` skips unbound buffers in `tx_`).

        Args:
            peer: index of the replica that receives.
            tensors: what to send.
            tag: message tag of the first tensor; the others use the tags that follow.

        Returns:
            A function that waits until `tensors` may be changed. It raises `Unreachable`.
        """
        works = self._start(dist.isend, peer, tensors, tag)
        return lambda: _wait(peer, works)

    def start_receive(self, peer: int, tensors: FlatVectors, tag: int, *, patient: bool = False) -> Callable[[], None]:
        """Start to receive into tensors.

        Args:
            peer: index of the replica that sends.
            tensors: the tensors to fill.
            tag: message tag of the first tensor; the others use the tags that follow.
            patient: whether to wait without the timeout.

        Returns:
            A function that waits until the tensors are filled. It raises `Unreachable`.
        """
        works = self._start(dist.irecv, peer, tensors, tag)
        return lambda: _wait(peer, works, _PATIENCE if patient else None)

    def send(self, peer: int, tensors: FlatVectors, tag: int) -> None:
        """Send tensors, and wait until they may be changed."""
        self.start_send(peer, tensors, tag)()

    def receive(self, peer: int, tensors: FlatVectors, tag: int) -> None:
        """Wait, without the timeout, for tensors that the other rank sends at any time."""
        self.start_receive(peer, tensors, tag, patient=True)()

    def _start(self, begin: Callable[..., Any], peer: int, tensors: FlatVectors, tag: int) -> list[Any]:
        try:
            return [
                begin(tensor, self._ranks[peer], group=self._group, tag=tag + place)
                for place, tensor in enumerate(tensors)
                if tensor.numel()
            ]
        except (RuntimeError, ValueError):  # the peer's connection is closed, or this rank has left the world
            raise Unreachable(peer, late=False) from None


class Unreachable(Exception):
    """A message could not be sent or received.

    Args:
        peer: index of the other replica.
        late: whether the other rank exists, but did not send or receive in time.
    """

    def __init__(self, peer: int, late: bool) -> None:
        super().__init__(peer)
        self.peer, self.late = peer, late


def peer_ended_error(mode: str, rank: int) -> TrainingError:
    """Return the error of a rank that cannot continue because another rank has ended."""
    return _because(
        f"Connection closed by peer: rank {rank}",
        f'rank {rank} has ended while other ranks still train (sync.mode = "{mode}"); read its output for the cause, '
        "and resume from the last checkpoint",
    )


def peer_late_error(mode: str, rank: int, timeout_s: float) -> TrainingError:
    """Return the error of a rank that has waited too long for another rank."""
    return _because(
        f"Timed out waiting for rank {rank}",
        f'rank {rank} did not respond within {timeout_s:g} s (sync.mode = "{mode}"); find out what delays it, or raise '
        "the timeout (--timeout, TUTTI_TIMEOUT_S)",
    )


def _because(cause: str, words: str) -> TrainingError:
    """Return the error with its cause, from which a launcher sees that another rank failed."""
    error = TrainingError(words)
    error.__cause__ = RuntimeError(cause)
    return error


def _wait(peer: int, works: list[Any], patience: timedelta | None = None) -> None:
    """Wait for all works; raise Unreachable if one fails."""
    try:
        while works:
            work = works.pop(0)
            work.wait() if patience is None else work.wait(patience)
    except RuntimeError as error:
        raise Unreachable(peer, late="Timed out" in str(error)) from None

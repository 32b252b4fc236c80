"""All-reduces in flight while updates are made: in chunks and rounds, in the same order on all ranks, compressed or
not.

They go in chunks because what is sent at once fills the queues on its way: small messages of the steps between wait
behind it, and may be dropped where a queue is full.

Where all rounds are messages of pairs of ranks, a thread of their own goes from one to the next as soon as it can.
Collectives must be started in one order on all ranks, which only the thread knows that starts all others, and what is
on a GPU is in order there. These advance at fixed updates, so that a network carries about as much between any two.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from tutti.comm.traffic import CommChannel, CommHandle, untracked_channel
from tutti.compression.codecs import make_reducer, round_count, uses_pair_messages
from tutti.compression.reducer import CountedCollectives, GradientReducer, Rounds, all_finite
from tutti.config.compression import Compression, message_nbytes
from tutti.local_sgd.replica_group import FlatTensors, FlatVectors, ReplicaGroup

MIN_CHUNK_NUMEL, CHUNK_MULTIPLE = 1 << 16, 1 << 12
"""Values of a chunk at least, unless there are fewer, and the multiple of a chunk's values, so that blocks of a code
end where chunks do."""


BLOCKING_CHUNKS = 8
"""Chunks of a compressed sum that is waited for: one is encoded or decoded while another is sent."""

THREADED_NUMEL, THREADED_NBYTES, MOST_THREADED = (1 << 19, 1 << 20), 1 << 18, 64
"""For a sum in a thread of its own: least and most values of a chunk, the bytes of a code between them, and the most
chunks.

Between four hosts at 100 Mbit/s, 8 M values in 4 bits every 8 updates: in 8 chunks, which fill queues of 50 ms, small
messages of the steps between took a tenth of a step; in 16 and 32 chunks nothing. A chunk takes about a millisecond of
a core besides its values."""


def threaded_chunks(numel: int, value_nbytes: float) -> int:
    """Number of chunks of so many values, each of `value_nbytes` in its code, that go in a thread of their own."""
    least, most = THREADED_NUMEL
    own = min(most, max(least, int(THREADED_NBYTES / value_nbytes)))
    return max(1, min(MOST_THREADED, -(-numel // own)))


def chunks_for_updates(updates: int, turns: int) -> int:
    """How many chunks fit into `updates` updates if each takes `turns` rounds.

    A round begins with every update but the last, so that the last round has an update's time, too.
    """
    return max(1, updates - turns)


def split_into_chunks(numel: int, most: int) -> list[slice]:
    """About equal chunks of a vector, at most `most`."""
    count = max(1, min(most, numel // MIN_CHUNK_NUMEL))
    length = max(1, CHUNK_MULTIPLE * -(-numel // (count * CHUNK_MULTIPLE)))
    return [slice(start, min(start + length, numel)) for start in range(0, numel, length)]


class ChunkReduction:
    """One chunk's reduction, round after round. `rounds`: over `collectives`, not begun."""

    def __init__(self, channel: CommChannel, collectives: CountedCollectives, rounds: Rounds) -> None:
        self._channel, self._group, self._rounds = channel, collectives, rounds
        self._work = CommHandle(channel, [])

    def next(self) -> bool:
        """Wait for the round in flight and start the next; False if that was the last."""
        self._work.wait()
        since, before = self._channel.traffic.clock.moment(), self._group.sent_nbytes
        works = next(self._rounds, None)
        self._channel.add_exposed(since)
        if works is not None:
            there = [work for work in works if work is not None]
            self._work = self._channel.start(there, self._group.sent_nbytes - before) if there else self._work
        return works is not None

    def end(self) -> None:
        """Start no round after the one in flight."""
        self._work.wait()
        self._rounds.close()


class DelayedReduction(ABC):
    """Reductions in flight."""

    @abstractmethod
    def advance(self, update: int, after: CommHandle | None = None) -> None:
        """`update` updates were made since it began, counting the one that computes now; `after`: work that goes
        first."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until all sums are there."""

    @abstractmethod
    def cancel(self) -> None:
        """Nobody wants the sums any more."""


class ReductionInRounds(DelayedReduction):
    """Advances over `updates` updates. Each chunk takes `turns` rounds and a new chunk begins with every turn.

    So each turn has one round of several chunks, and turns are at even distances of updates.
    """

    def __init__(self, chunks: Sequence[ChunkReduction], turns: int, updates: int) -> None:
        self._waiting, self._flying = list(chunks), list[ChunkReduction]()
        self._slots, self._updates = max(1, len(chunks) + turns - 1), updates
        self._turns = 0

    def advance(self, update: int, after: CommHandle | None = None) -> None:
        if after is not None:  # Gloo's threads begin it when they come to it, perhaps behind what goes on here
            after.wait()
        while self._left and self._turns * self._updates < update * self._slots:
            self._turn()

    def finish(self) -> None:
        while self._left:
            self._turn()

    def cancel(self) -> None:
        for leg in (*self._flying, *self._waiting):
            leg.end()
        self._waiting, self._flying = [], []

    @property
    def _left(self) -> bool:
        return bool(self._waiting or self._flying)

    def _turn(self) -> None:
        """The first round of one more chunk, then the next round of those that have begun: one chunk's data travel
        while others are decoded.
        """
        self._turns += 1
        begun = [leg for leg in self._waiting[:1] if leg.next()]
        self._flying = [*(leg for leg in self._flying if leg.next()), *begun]
        self._waiting = self._waiting[1:]


class ReductionInThread(DelayedReduction):
    """Runs in a thread of its own from now on. Bytes are counted when the sums are there.

    `parts`: each chunk's rounds over its collectives, `turns` of them, all messages of pairs, which are in order
    whatever else a group is used for.
    """

    def __init__(self, parts: Sequence[tuple[CountedCollectives, Rounds]], turns: int, channel: CommChannel) -> None:
        own = untracked_channel()  # that of the steps is not for two threads
        self._turns = ReductionInRounds([ChunkReduction(own, *part) for part in parts], turns, 1)
        self._collectives = {collectives for collectives, _ in parts}
        self._before = self._sent_nbytes
        self._problem: Exception | None = None
        self._channel, self._work = channel, channel.start([self])
        self._thread = threading.Thread(target=self._run, name="tutti-travel", daemon=True)
        self._thread.start()

    def advance(self, update: int, after: CommHandle | None = None) -> None:
        """It advances by itself."""

    def finish(self) -> None:
        self._work.wait()
        self._channel.correct_nbytes(self._sent_nbytes - self._before)

    def cancel(self) -> None:
        """All ranks send and receive everything: none knows how far another has come."""
        self.finish()

    def wait(self) -> None:
        """As a work that was started."""
        self._thread.join()
        if self._problem is not None:
            raise self._problem

    def is_completed(self) -> bool:
        return not self._thread.is_alive()

    @property
    def _sent_nbytes(self) -> int:
        return sum(collectives.sent_nbytes for collectives in self._collectives)

    def _run(self) -> None:
        try:
            self._turns.finish()
        except Exception as problem:  # raised where it is waited for
            self._problem = problem


def mean_chunks(replicas: ReplicaGroup, then: FlatVectors, means: FlatVectors, parts: int) -> list[ChunkReduction]:
    """Chunks that make `means` the mean over the replicas of `then`, uncompressed; at most `parts` for each vector."""
    collectives = CountedCollectives(replicas.group, lone=replicas.size == 1)
    own = (
        (one[part], mean[part])
        for one, mean in zip(then, means, strict=True)
        for part in split_into_chunks(len(one), parts)
    )
    return [ChunkReduction(replicas.channel, collectives, _whole(collectives, *part)) for part in own]


def _whole(collectives: CountedCollectives, then: torch.Tensor, mean: torch.Tensor) -> Rounds:
    torch.mul(then, 1.0 / collectives.size, out=mean)
    yield [collectives.all_reduce(mean)]


class CompressedReplicaSum:
    """Sums of replicas' flat vectors by a codec; what it leaves out is kept and goes with the next sum.

    Each vector is cut into chunks with a reducer each, or stays whole where the codec must see it whole.

    Args:
        replicas: the group.
        compression: the codec.
        vectors: what is summed.
        updates: updates for which a sum is in flight; 0: sums are waited for; None: do not cut vectors.

    Attributes:
        count: number of sums that counted.
    """

    def __init__(
        self, replicas: ReplicaGroup, compression: Compression, vectors: FlatTensors, updates: int | None = None
    ) -> None:
        self.vectors, self.turns, self._channel = vectors, round_count(compression, replicas.size), replicas.channel
        whole = updates is None or compression.entry.whole_vectors(compression.settings)
        parts = 1 if whole else chunks_for_updates(updates, self.turns) if updates else BLOCKING_CHUNKS
        self._threaded = bool(updates) and uses_pair_messages(
            compression, replicas.group, [device for _, device in vectors.kinds]
        )
        self.exchanges: list[GradientReducer] = []
        self._places: list[tuple[int, slice]] = []
        for place, (shapes, (dtype, device)) in enumerate(zip(vectors.shapes, vectors.kinds, strict=True)):
            numel = sum(shape.numel() for shape in shapes)
            own = split_into_chunks(
                numel, _threaded_chunks_of(compression, numel) if self._threaded and not whole else parts
            )
            for part in own:
                of = shapes if len(own) == 1 else [torch.Size((part.stop - part.start,))]
                exchange = make_reducer(
                    compression.code, of, group=replicas.group, dtype=dtype, device=device, seed=len(self.exchanges)
                )
                self.exchanges.append(exchange)
                self._places.append((place, part))
        self._finite = [False] * len(self.exchanges)

    def sum(self, flats: FlatVectors) -> None:
        """Leave the sums over the replicas in `flats`, the same bits on each."""
        parts = [self._sum(number, own) for number, own in enumerate(self._of(flats))]
        self._reduction(parts, 1, threaded=False).finish()
        self.commit()

    def start(self, then: FlatVectors, equal: FlatVectors, means: FlatVectors, updates: int) -> DelayedReduction:
        """Start to compute `means`: the common point plus the mean of how far replicas had moved from it.

        They arrive `updates` updates later. `then` and `equal` must not change until `commit` or `forget` is called.
        """
        tensors_of_chunks = zip(*(self._of(flats) for flats in (then, equal, means)), strict=True)
        parts = [self._mean(number, *tensors) for number, tensors in enumerate(tensors_of_chunks)]
        return self._reduction(parts, updates, threaded=self._threaded)

    def commit(self) -> None:
        """The sums are there: keep what was left out, unless a sum is not finite."""
        for one, finite in zip(self.exchanges, self._finite, strict=True):
            one.finish_step(finite)

    def forget(self) -> None:
        """What began counts for nothing."""
        for one in self.exchanges:
            one.finish_step(False)

    def _reduction(self, parts: list[Rounds], updates: int, *, threaded: bool) -> DelayedReduction:
        own = [(one.collectives, rounds) for one, rounds in zip(self.exchanges, parts, strict=True)]
        if threaded:
            return ReductionInThread(own, self.turns, self._channel)
        return ReductionInRounds([ChunkReduction(self._channel, *part) for part in own], self.turns, updates)

    def _sum(self, number: int, part: torch.Tensor) -> Rounds:
        yield from self.exchanges[number].rounds(part)
        self._finite[number] = all_finite(part)

    def _mean(self, number: int, then: torch.Tensor, equal: torch.Tensor, mean: torch.Tensor) -> Rounds:
        torch.sub(then, equal, out=mean)
        yield from self._sum(number, mean)
        torch.add(equal, mean, alpha=1.0 / self.exchanges[number].collectives.size, out=mean)

    def _of(self, flats: FlatVectors) -> list[torch.Tensor]:
        """Each exchange's part of `flats`."""
        return [flats[place][part] for place, part in self._places]

    @property
    def count(self) -> int:
        return max((state.count for one in self.exchanges for state in one.states.values()), default=0)

    @count.setter
    def count(self, count: int) -> None:
        for one in self.exchanges:
            for state in one.states.values():
                state.count = count

    def saved_tensors(self) -> dict[str, FlatVectors]:
        """The residuals by name, for checkpoints; not copied."""
        kept = {
            f"{who}-{name}-{place}": [tensor]
            for place, one in enumerate(self.exchanges)
            for who, state in one.states.items()
            for name, tensor in state.old.items()
        }
        shared = {
            f"shared-{name}-{place}": [tensor]
            for place, one in enumerate(self.exchanges)
            for name, tensor in one.shared.items()
        }
        return {**kept, **shared}


def _threaded_chunks_of(compression: Compression, numel: int) -> int:
    return threaded_chunks(numel, message_nbytes(compression.code, MIN_CHUNK_NUMEL) / MIN_CHUNK_NUMEL)

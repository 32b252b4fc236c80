"""All-reduces that run while updates are made, in chunks and rounds, compressed or not.

They are cut into chunks because data sent at once fills the queues of the network. Small messages of the steps would
then wait behind it, and might be dropped where a queue is full.

If all rounds are messages between pairs of ranks, a separate thread runs one round after another as soon as it can.
Collectives, in contrast, must be started in the same order on all ranks, and only the training thread knows that order.
Work on a GPU keeps the order of its stream. In these two cases the training thread starts rounds at fixed updates, so
that the network carries about equally much between any two updates.
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
"""Sizes of chunks.

A vector's chunks have at least MIN_CHUNK_NUMEL values on average, unless the vector has fewer. All but the last have a
multiple of CHUNK_MULTIPLE values, so that the blocks of a codec end where chunks end.
"""

BLOCKING_CHUNKS = 8
"""Number of chunks of a compressed all-reduce that is waited for: one is encoded or decoded while another is sent."""

THREADED_NUMEL, THREADED_NBYTES, MAX_THREADED_CHUNKS = (1 << 19, 1 << 20), 1 << 18, 64
"""Chunks of an all-reduce in a separate thread.

Smallest and largest number of values of a chunk, the encoded bytes to aim at between these bounds, and the largest
number of chunks.

Measured between four hosts at 100 Mbit/s, with 8 M values in 4 bits every 8 updates. In 8 chunks, which fill queues of
50 ms, small messages of the steps meanwhile took a tenth of a step; in 16 or 32 chunks they took no extra time. A chunk
costs about a millisecond of a core in addition to its values."""


def threaded_chunks(numel: int, value_nbytes: float) -> int:
    """Return the number of chunks into which a separate thread cuts its all-reduce.

    Args:
        numel: number of values.
        value_nbytes: encoded size of one value in bytes.
    """
    smallest, largest = THREADED_NUMEL
    chunk_numel = min(largest, max(smallest, int(THREADED_NBYTES / value_nbytes)))
    return max(1, min(MAX_THREADED_CHUNKS, -(-numel // chunk_numel)))


def chunks_for_updates(updates: int, turns: int) -> int:
    """Return how many chunks fit into `updates` updates if each takes `turns` rounds.

    A round begins with every update except the last, so that the last round also has the time of an update.
    """
    return max(1, updates - turns)


def split_into_chunks(numel: int, max_chunks: int) -> list[slice]:
    """Cut a vector of `numel` values into at most `max_chunks` chunks of about equal size."""
    count = max(1, min(max_chunks, numel // MIN_CHUNK_NUMEL))
    length = max(1, CHUNK_MULTIPLE * -(-numel // (count * CHUNK_MULTIPLE)))
    return [slice(start, min(start + length, numel)) for start in range(0, numel, length)]


class ChunkReduction:
    """The all-reduce of one chunk, round after round.

    Args:
        channel: accounting of what is sent.
        collectives: the collectives of the rounds.
        rounds: the rounds, not begun.
    """

    def __init__(self, channel: CommChannel, collectives: CountedCollectives, rounds: Rounds) -> None:
        self._channel, self._collectives, self._rounds = channel, collectives, rounds
        self._work = CommHandle(channel, [])

    def next(self) -> bool:
        """Wait for the round in progress and start the next one; return False if that was the last."""
        self._work.wait()
        since, sent_before = self._channel.traffic.clock.stream_time(), self._collectives.sent_nbytes
        works = next(self._rounds, None)
        self._channel.add_exposed(since)
        if works is not None:
            started = [work for work in works if work is not None]
            self._work = (
                self._channel.start(started, self._collectives.sent_nbytes - sent_before) if started else self._work
            )
        return works is not None

    def end(self) -> None:
        """Wait for the round in progress, and start no other."""
        self._work.wait()
        self._rounds.close()


class DelayedReduction(ABC):
    """All-reduces in progress, whose results are needed some updates later."""

    @abstractmethod
    def advance(self, update: int, after: CommHandle | None = None) -> None:
        """Start the rounds that are due.

        Args:
            update: number of updates since the reduction began, counting the one that is being computed.
            after: an operation that must go first.
        """

    @abstractmethod
    def finish(self) -> None:
        """Wait until all results have arrived."""

    @abstractmethod
    def cancel(self) -> None:
        """Abandon the results."""


class ReductionInRounds(DelayedReduction):
    """All-reduces that advance over `updates` updates.

    Each chunk takes `turns` rounds, and in every turn one more chunk begins. So a turn runs one round of several
    chunks, and turns are spread evenly over the updates.

    Args:
        chunks: the chunks.
        turns: number of rounds of each chunk.
        updates: number of updates until the results are needed.
    """

    def __init__(self, chunks: Sequence[ChunkReduction], turns: int, updates: int) -> None:
        self._waiting, self._begun = list(chunks), list[ChunkReduction]()
        self._num_turns, self._updates = max(1, len(chunks) + turns - 1), updates
        self._turns_done = 0

    def advance(self, update: int, after: CommHandle | None = None) -> None:
        if after is not None:  # Gloo's threads may begin it later than the rounds started here
            after.wait()
        while self._left and self._turns_done * self._updates < update * self._num_turns:
            self._turn()

    def finish(self) -> None:
        while self._left:
            self._turn()

    def cancel(self) -> None:
        for chunk in (*self._begun, *self._waiting):
            chunk.end()
        self._waiting, self._begun = [], []

    @property
    def _left(self) -> bool:
        return bool(self._waiting or self._begun)

    def _turn(self) -> None:
        """Start the first round of one more chunk, then the next round of those that have begun.

        One chunk's data is sent while others are decoded.
        """
        self._turns_done += 1
        new = [chunk for chunk in self._waiting[:1] if chunk.next()]
        self._begun = [*(chunk for chunk in self._begun if chunk.next()), *new]
        self._waiting = self._waiting[1:]


class ReductionInThread(DelayedReduction):
    """All-reduces that begin now and run in a separate thread. Bytes are counted once the results have arrived.

    All rounds must be messages between pairs of ranks, which stay in order whatever else uses the group.

    Args:
        chunks: each chunk's collectives, and its rounds over them.
        turns: number of rounds of each chunk.
        channel: accounting of what is sent.
    """

    def __init__(self, chunks: Sequence[tuple[CountedCollectives, Rounds]], turns: int, channel: CommChannel) -> None:
        untracked = untracked_channel()  # the channel of the steps is not thread-safe
        self._reduction = ReductionInRounds([ChunkReduction(untracked, *chunk) for chunk in chunks], turns, 1)
        self._collectives = {collectives for collectives, _ in chunks}
        self._sent_before = self._sent_nbytes
        self._problem: Exception | None = None
        self._channel, self._work = channel, channel.start([self])
        self._thread = threading.Thread(target=self._run, name="tutti-reduction", daemon=True)
        self._thread.start()

    def advance(self, update: int, after: CommHandle | None = None) -> None:
        """Do nothing: the thread advances by itself."""

    def finish(self) -> None:
        self._work.wait()
        self._channel.correct_nbytes(self._sent_nbytes - self._sent_before)

    def cancel(self) -> None:
        """Wait for the results: no rank knows how far the others are, so all must send and receive everything."""
        self.finish()

    def wait(self) -> None:
        """Wait for the thread, as a work handle does."""
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
            self._reduction.finish()
        except Exception as problem:  # raised again in `wait`
            self._problem = problem


def mean_chunks(
    replicas: ReplicaGroup, snapshot: FlatVectors, means: FlatVectors, max_chunks: int
) -> list[ChunkReduction]:
    """Return chunks that compute the mean of `snapshot` over the replicas, uncompressed.

    Args:
        replicas: the group.
        snapshot: this replica's vectors.
        means: vectors for the result.
        max_chunks: largest number of chunks of a vector.
    """
    collectives = CountedCollectives(replicas.group, lone=replicas.size == 1)
    chunks = (
        (flat[chunk], mean[chunk])
        for flat, mean in zip(snapshot, means, strict=True)
        for chunk in split_into_chunks(len(flat), max_chunks)
    )
    return [ChunkReduction(replicas.channel, collectives, _mean_rounds(collectives, *chunk)) for chunk in chunks]


def _mean_rounds(collectives: CountedCollectives, snapshot: torch.Tensor, mean: torch.Tensor) -> Rounds:
    torch.mul(snapshot, 1.0 / collectives.size, out=mean)
    yield [collectives.all_reduce(mean)]


class CompressedReplicaSum:
    """All-reduces of the replicas' flat vectors with a codec and error feedback.

    Each vector is cut into chunks, each with a reducer. It stays whole if the codec must see it whole.

    Args:
        replicas: the group.
        compression: the codec.
        vectors: the tensors whose vectors are reduced.
        updates: number of updates that a reduction takes; 0: replicas wait for it; None: vectors are not cut.

    Attributes:
        turns: number of rounds of each chunk.
        reducers: the reducer of each chunk.
        count: number of committed reductions.
    """

    def __init__(
        self, replicas: ReplicaGroup, compression: Compression, vectors: FlatTensors, updates: int | None = None
    ) -> None:
        self.vectors, self.turns, self._channel = vectors, round_count(compression, replicas.size), replicas.channel
        whole = updates is None or compression.entry.whole_vectors(compression.settings)
        max_chunks = 1 if whole else chunks_for_updates(updates, self.turns) if updates else BLOCKING_CHUNKS
        self._threaded = bool(updates) and uses_pair_messages(
            compression, replicas.group, [device for _, device in vectors.kinds]
        )
        self.reducers: list[GradientReducer] = []
        self._chunks: list[tuple[int, slice]] = []
        for index, (shapes, (dtype, device)) in enumerate(zip(vectors.shapes, vectors.kinds, strict=True)):
            numel = sum(shape.numel() for shape in shapes)
            chunks = split_into_chunks(
                numel, _threaded_chunks_of(compression, numel) if self._threaded and not whole else max_chunks
            )
            for chunk in chunks:
                chunk_shapes = shapes if len(chunks) == 1 else [torch.Size((chunk.stop - chunk.start,))]
                reducer = make_reducer(
                    compression.code,
                    chunk_shapes,
                    group=replicas.group,
                    dtype=dtype,
                    device=device,
                    seed=len(self.reducers),
                )
                self.reducers.append(reducer)
                self._chunks.append((index, chunk))
        self._finite = [False] * len(self.reducers)

    def sum(self, flats: FlatVectors) -> None:
        """All-reduce `flats` in place, bit-identical on all replicas."""
        rounds = [self._sum_rounds(index, chunk) for index, chunk in enumerate(self._chunks_of(flats))]
        self._reduction(rounds, 1, threaded=False).finish()
        self.commit()

    def start(
        self, snapshot: FlatVectors, reference: FlatVectors, means: FlatVectors, updates: int
    ) -> DelayedReduction:
        """Start to compute reference + mean(snapshot - reference) over the replicas.

        `snapshot` and `reference` must not change until `commit` or `discard` is called.

        Args:
            snapshot: this replica's vectors.
            reference: the vectors that all replicas have.
            means: vectors for the result.
            updates: number of updates until the result is needed.
        """
        tensors_of_chunks = zip(*(self._chunks_of(flats) for flats in (snapshot, reference, means)), strict=True)
        rounds = [self._mean_rounds(index, *tensors) for index, tensors in enumerate(tensors_of_chunks)]
        return self._reduction(rounds, updates, threaded=self._threaded)

    def commit(self) -> None:
        """Accept the results and the new residuals, except where a result is not finite."""
        for reducer, finite in zip(self.reducers, self._finite, strict=True):
            reducer.finish_step(finite)

    def discard(self) -> None:
        """Discard the reduction that was started, with its residuals."""
        for reducer in self.reducers:
            reducer.finish_step(False)

    def _reduction(self, rounds: list[Rounds], updates: int, *, threaded: bool) -> DelayedReduction:
        chunks = [(reducer.collectives, its_rounds) for reducer, its_rounds in zip(self.reducers, rounds, strict=True)]
        if threaded:
            return ReductionInThread(chunks, self.turns, self._channel)
        return ReductionInRounds([ChunkReduction(self._channel, *chunk) for chunk in chunks], self.turns, updates)

    def _sum_rounds(self, index: int, chunk: torch.Tensor) -> Rounds:
        yield from self.reducers[index].rounds(chunk)
        self._finite[index] = all_finite(chunk)

    def _mean_rounds(self, index: int, snapshot: torch.Tensor, reference: torch.Tensor, mean: torch.Tensor) -> Rounds:
        torch.sub(snapshot, reference, out=mean)
        yield from self._sum_rounds(index, mean)
        torch.add(reference, mean, alpha=1.0 / self.reducers[index].collectives.size, out=mean)

    def _chunks_of(self, flats: FlatVectors) -> list[torch.Tensor]:
        """Return each reducer's chunk of `flats`."""
        return [flats[index][chunk] for index, chunk in self._chunks]

    @property
    def count(self) -> int:
        return max((state.count for reducer in self.reducers for state in reducer.states.values()), default=0)

    @count.setter
    def count(self, count: int) -> None:
        for reducer in self.reducers:
            for state in reducer.states.values():
                state.count = count

    def saved_tensors(self) -> dict[str, FlatVectors]:
        """Return the residuals and the tensors that ranks share, by name, for checkpoints; not copied."""
        residuals = {
            f"{owner}-{name}-{index}": [tensor]
            for index, reducer in enumerate(self.reducers)
            for owner, state in reducer.states.items()
            for name, tensor in state.old.items()
        }
        shared = {
            f"shared-{name}-{index}": [tensor]
            for index, reducer in enumerate(self.reducers)
            for name, tensor in reducer.shared.items()
        }
        return {**residuals, **shared}


def _threaded_chunks_of(compression: Compression, numel: int) -> int:
    return threaded_chunks(numel, message_nbytes(compression.code, MIN_CHUNK_NUMEL) / MIN_CHUNK_NUMEL)

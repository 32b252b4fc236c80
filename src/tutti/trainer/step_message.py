"""What rides with the losses: where each rank is in the data, and what it asks of the others.

The losses' message is a float64 vector that all ranks add up. It has the loss and its count; then a flag of each rank;
then a mark of each rank, which says where the rank is; then each rank's own time of the step before; then what other
mechanisms add. Each rank writes its own numbers only, so the sum has all of them, and ranks that are out of step or
slow are noticed without a message more.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from tutti.config.plan import Plan
from tutti.data.batches import BatchShare, Indices, share_of
from tutti.data.share_loader import ShareLoader
from tutti.parallel.data.replicate import LossFunction
from tutti.parallel.mesh import Mesh

MOST_WORD = 1 << 12
"""Words are below this number. A mark has a digest of 40 bits and a word of 12, which a float64 holds exactly."""

_MOST_NAMED = 4
"""Samples, and ranks of one place, that a sentence names."""

_U64 = (1 << 64) - 1

_REMEDY = (
    "every rank must take every batch, so let `continue`, `break` and `except` around a batch depend only on what is "
    "the same on all ranks, such as the loss that job.step returns, or end the loop by job.should_stop(condition)"
)


_REMEDY_OF_STREAM = (
    "yield the whole stream, with the same samples in the same order, on every rank (tutti divides it), and let every "
    "rank take every batch"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlace:
    """Where a rank is in the training and in the data when it computes a loss.

    Attributes:
        step: number of the update that the gradients are for, from 1.
        call: earlier calls of forward_backward for this update.
        epoch: number of the epoch, from 1.
        batch: number of the global batch in the epoch, from 1.
        samples: number of samples of the global batch, over all ranks.
        first: the first of them; empty for a stream, whose samples have no names.
        shares: how the plan divides it among the data-parallel ranks; empty for equal shares.
        digest: 40 bits of all of these, and of all samples.
    """

    step: int
    call: int
    epoch: int
    batch: int
    samples: int
    first: tuple[int, ...]
    digest: int
    shares: tuple[float, ...] = ()


def place_in(loader: ShareLoader, step: int, call: int) -> StepPlace:
    """Return the place of the batch that a loader has yielded last.

    Args:
        loader: the loader; its `indices` are the same on all ranks that are in step.
        step: number of updates so far.
        call: calls of forward_backward since the last update.
    """
    indices, stream = loader.indices, loader.source.is_stream
    return StepPlace(
        step=step + 1,
        call=call,
        epoch=loader.epoch + 1,
        batch=loader.position,
        samples=len(indices),
        first=() if stream else tuple(indices[:_MOST_NAMED].tolist()),
        shares=loader.plan.shares,
        digest=samples_digest(indices, (step, call, loader.epoch, loader.position, *_bits(loader.plan.shares))),
    )


def samples_digest(indices: Indices, numbers: Iterable[int] = ()) -> int:
    """Return 40 bits of the order of samples and of some numbers; the same in every process.

    A sum of products with pseudo-random weights (multilinear hashing, Lemire and Kaser 2014, arXiv 1202.4961), because
    it is one pass of NumPy: 8,192 samples take 22 microseconds, few take 11.

    Args:
        indices: numbers of samples, (n,).
        numbers: what else must be equal.

    Examples:
        >>> samples_digest(np.array([3, 4])) == samples_digest(np.array([3, 4]))
        True
        >>> samples_digest(np.array([3, 4])) == samples_digest(np.array([4, 3]))
        False
    """
    total = int((_weights(len(indices)) * indices.astype(np.uint64)).sum(dtype=np.uint64)) if len(indices) else 0
    for number in (len(indices), *numbers):
        total = _mixed(total + number)
    return _mixed(total) >> 24


@lru_cache(maxsize=8)
def _bits(shares: tuple[float, ...]) -> tuple[int, ...]:
    """Return the shares as whole numbers, for a digest."""
    return tuple(np.asarray(shares, dtype=np.float64).view(np.uint64).tolist())


@lru_cache(maxsize=8)
def _weights(count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    return np.random.Generator(np.random.Philox(1)).integers(0, _U64, size=count, dtype=np.uint64, endpoint=True)


def _mixed(value: int) -> int:
    """Mix 64 bits (SplitMix64, Steele et al. 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _U64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _U64
    return value ^ (value >> 31)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ComputedBatch:
    """What one call of forward_backward computes on this rank.

    Attributes:
        loss: (model, batch) -> loss.
        pieces: this rank's microbatches.
        share: this rank's share of the global batch.
    """

    loss: LossFunction
    pieces: Sequence[Any]
    share: BatchShare


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepMessage:
    """One rank's part in the losses' message of a step, and where each part is in it.

    Attributes:
        world_size: number of ranks.
        rank: this rank.
        place: where this rank is.
        indices: samples of the global batch; empty for a stream.
        plan: how ranks share them.
        computed: what this rank computes, to compute it again if the loss or a gradient is not finite.
    """

    world_size: int
    rank: int
    place: StepPlace
    indices: Indices = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    plan: Plan | None = None
    computed: ComputedBatch | None = None

    @property
    def flag(self) -> int:
        """Position of this rank's flag."""
        return 2 + self.rank

    @property
    def width(self) -> int:
        """How many numbers come before those of other mechanisms."""
        return 2 + 3 * self.world_size

    def put(self, totals: torch.Tensor, word: int, own_times: float = 0.0) -> None:
        """Write this rank's mark and own time, without a wait for the device.

        Args:
            totals: the message, float64.
            word: what this rank asks of the others, below `MOST_WORD`; 0 for nothing.
            own_times: this rank's own time of the step before, as `OwnTimes` writes it.
        """
        position, mark = 2 + self.world_size + self.rank, float(self.place.digest * MOST_WORD + word)
        if totals.is_cpu:
            numbers = totals.numpy()
            numbers[position], numbers[position + self.world_size] = mark, own_times
        else:
            totals[position].fill_(mark)
            totals[position + self.world_size].fill_(own_times)

    def flags(self, totals: Sequence[float]) -> Sequence[float]:
        """Return the flag of each rank."""
        return totals[2 : 2 + self.world_size]

    def words(self, totals: Sequence[float]) -> list[int]:
        """Return the word of each rank."""
        return [int(mark) % MOST_WORD for mark in totals[2 + self.world_size : 2 + 2 * self.world_size]]

    def own_times(self, totals: Sequence[float]) -> Sequence[float]:
        """Return the own time of each rank, as `OwnTimes` writes it."""
        return totals[2 + 2 * self.world_size : self.width]

    def samples_of(self, rank: int) -> list[int]:
        """Return the samples that a rank computes in this step; empty where they have no numbers."""
        if self.plan is None or not len(self.indices):
            return []
        data_index = Mesh(self.plan.mesh, rank).data_index
        share = share_of(len(self.indices), data_index, self.plan)
        positions = [part.start + offset for part in share.parts for offset in range(part.count)]
        return [int(number) for number in self.indices[positions]]

    def in_step(self, totals: Sequence[float]) -> bool:
        """Return whether all ranks are in one place."""
        marks = totals[2 + self.world_size : 2 + 2 * self.world_size]
        return all(mark // MOST_WORD == self.place.digest for mark in marks)


def describe_places(places: Sequence[StepPlace]) -> str:
    """Say which ranks are where, and what to do; for ranks that are out of step.

    Args:
        places: of each rank.

    Examples:
        >>> here = StepPlace(step=2, call=0, epoch=1, batch=2, samples=2, first=(5, 0), digest=1)
        >>> there = StepPlace(step=2, call=0, epoch=1, batch=3, samples=2, first=(1, 2), digest=2)
        >>> print(describe_places([here, there]).partition(", rank 1 ")[0])
        ranks are out of step: rank 0 is in batch 2 of epoch 1 (samples 5, 0)
    """
    ranks_at: dict[StepPlace, list[int]] = {}
    for rank, place in enumerate(places):
        ranks_at.setdefault(place, []).append(rank)
    steps = len({(place.step, place.call) for place in places}) > 1
    numbers = len({(place.epoch, place.batch) for place in places}) > 1
    groups = [
        f"{describe_ranks(ranks)} {'' if number else 'is ' if len(ranks) == 1 else 'are '}{_where(place, steps=steps)}"
        for number, (place, ranks) in enumerate(ranks_at.items())
    ]
    if not (steps or numbers) and len({place.shares for place in places}) > 1:
        stated = [f"{describe_ranks(ranks)} {_shares(place)}" for place, ranks in ranks_at.items()]
        return f"ranks divide the batch by different shares: {', '.join(stated)}; give all ranks one plan"
    other_order = "the order of samples differs, so give Job and sampler one seed and one order on all ranks"
    remedy = _REMEDY if steps or numbers else other_order
    if not any(place.first for place in places):
        remedy = _REMEDY_OF_STREAM
    return f"ranks are out of step: {', '.join(groups)}; {remedy}"


def _shares(place: StepPlace) -> str:
    return f"by {':'.join(f'{share:g}' for share in place.shares)}" if place.shares else "equally"


def _where(place: StepPlace, *, steps: bool) -> str:
    call = f", call {place.call + 1} of forward_backward" if place.call else ""
    step = f"at step {place.step}{call}, " if steps else ""
    named = ", ".join(map(str, place.first))
    more = ", ..." if place.samples > len(place.first) else ""
    samples = f"samples {named}{more}" if place.first else f"{place.samples} samples"
    return f"{step}in batch {place.batch} of epoch {place.epoch} ({samples})"


def describe_ranks(ranks: Sequence[int]) -> str:
    """Return how sentences name ranks.

    Examples:
        >>> describe_ranks([2]), describe_ranks([0, 1]), describe_ranks(range(9))
        ('rank 2', 'ranks 0 and 1', 'ranks 0, 1, 2, 3 and 5 more')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    *some, last = map(str, ranks[:_MOST_NAMED])
    rest = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return f"ranks {', '.join([*some, last])}{rest}" if rest else f"ranks {', '.join(some)} and {last}"

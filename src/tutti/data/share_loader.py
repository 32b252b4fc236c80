"""The loader that `prepare` returns: this rank's share of one global batch after another."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset

from tutti.config.plan import Plan
from tutti.data.batches import BatchShare, Indices, batch_bounds, epoch_order, sampler_order, share_of
from tutti.data.samples import Collate, DataSource, SeededSamples
from tutti.data.seeds import derive_seed, preserved_generators, seed_everything
from tutti.errors import DataError


class ShareLoader:
    """Iterates over one epoch's global batches and yields this rank's share of each, collated.

    `epoch`, `position` and `before` are the whole state of the data order, for any number of ranks.

    Attributes:
        epoch: number of the current epoch.
        position: batches taken of the current epoch.
        before: batches of all earlier epochs.
        share: this rank's share of the batch that was yielded last.
        indices: samples of that global batch.
    """

    def __init__(self, source: DataSource, plan: Plan, seed: int, rank: int) -> None:
        self.source = source
        self.plan = plan
        self.seed = seed
        self.rank = rank
        self.epoch = 0
        self.position = 0
        self.before = 0
        self.share: BatchShare | None = None
        self.indices: Indices = np.empty(0, dtype=np.int64)
        self._loader: DataLoader[Any] | None = None
        self._cached: tuple[tuple[int, int], Indices, Indices] | None = None

    def __len__(self) -> int:
        """Return the number of global batches in the current epoch.

        Raises:
            TypeError: the data is a stream, whose length is unknown.
        """
        if self.source.is_stream:
            raise TypeError("an IterableDataset has no length")
        return len(self.epoch_batches(self.epoch)[1]) - 1

    def __iter__(self) -> Iterator[Any]:
        shares = self._stream() if self.source.is_stream else self._indexed()
        for self.share, self.indices, batch in shares:
            self.position += 1
            yield batch
        self.next_epoch()

    def next_epoch(self) -> None:
        """Go to the beginning of the next epoch, even if this one has batches left."""
        self.before += self.position
        self.epoch, self.position = self.epoch + 1, 0

    @property
    def stated_size(self) -> int:
        """The global batch size that the plan states for the batch yielded last (before any, for the first)."""
        return self.plan.batch.size_at(max(self.before + self.position - 1, 0))

    @property
    def tokens(self) -> int | None:
        """Tokens of the global batch that was yielded last; None where the batch counts samples."""
        tokens = self.source.tokens
        if self.plan.batch.unit != "tokens" or tokens is None:
            return None
        return tokens * len(self.indices) if isinstance(tokens, int) else sum(tokens[int(i)] for i in self.indices)

    def epoch_batches(self, epoch: int) -> tuple[Indices, Indices]:
        """Return the order of an epoch's samples and the boundaries of its global batches."""
        if self._cached is None or self._cached[0] != (epoch, self.before):
            if self.source.sampler is not None:
                order = sampler_order(self.source.sampler, self.seed, epoch)
            else:
                order = epoch_order(len(self.source.dataset), self.seed, epoch, shuffle=self.source.shuffle)
            bounds = batch_bounds(order, self.plan.batch, self.source.tokens, self.before)
            if len(bounds) < 2:
                raise DataError(
                    f"an epoch of {len(order)} samples has no whole batch of {self.plan.batch.global_batch_size} "
                    f"{self.plan.batch.unit} and last_batch='drop'; lower global_batch_size or set last_batch='keep'"
                )
            self._cached = ((epoch, self.before), order, bounds)
        return self._cached[1:]

    def _shares(self) -> Iterator[tuple[BatchShare, Indices]]:
        """Yield (share, sample indices of the global batch) from the current position to the end of the epoch."""
        order, bounds = self.epoch_batches(self.epoch)
        for begin, end in zip(bounds[self.position : -1], bounds[self.position + 1 :], strict=True):
            yield share_of(int(end - begin), self.rank, self.plan), order[begin:end]

    def _indexed(self) -> Iterator[tuple[BatchShare, Indices, Any]]:
        if self._loader is None:
            gather = self.source.collate is Collate().function
            samples = SeededSamples(self.source.dataset, self.seed, "sample", gather=gather)
            collate = Collate(self.source.collate)
            self._loader = DataLoader(samples, batch_sampler=_Keys(self), collate_fn=collate, **self.source.options)
        for (share, indices), batch in zip(self._shares(), self._loader, strict=False):
            yield share, indices, batch

    def _stream(self) -> Iterator[tuple[BatchShare, Indices, Any]]:
        place = (self.epoch, self.position, self.before)
        stream = _StreamShares(self.source, self.plan, self.seed, self.rank, place)
        options = {k: v for k, v in self.source.options.items() if k != "persistent_workers"}
        for size, start, batch in DataLoader(stream, batch_size=None, **options):
            share = share_of(size, self.rank, self.plan)
            yield share, np.arange(start, start + size), batch


class _Keys:
    """The batch sampler: yields the keys (epoch, index) of this rank's samples, batch by batch."""

    def __init__(self, loader: ShareLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch = self.loader.epoch
        for share, indices in self.loader._shares():
            yield [(epoch, int(index)) for index in indices[share.positions]]


class _StreamShares(IterableDataset[Any]):
    """A user's stream cut into global batches; yields (size, start, this rank's collated share).

    Every rank reads the whole stream and keeps its share, so the order does not depend on the number of ranks. A
    resumed run reads the batches that it has already taken once more, and drops them.
    """

    def __init__(self, source: DataSource, plan: Plan, seed: int, rank: int, place: tuple[int, int, int]) -> None:
        super().__init__()
        self.source = source
        self.plan = plan
        self.seed = seed
        self.rank = rank
        self.epoch, self.position, self.before = place

    def __iter__(self) -> Iterator[tuple[int, int, Any]]:
        samples = self._seeded()
        start = 0
        for number, batch in enumerate(self._batches(samples)):
            if number >= self.position:
                positions = share_of(len(batch), self.rank, self.plan).positions
                yield len(batch), start, self.source.collate([batch[position] for position in positions])
            start += len(batch)
        if start == 0:
            raise DataError(f"the stream {type(self.source.dataset).__name__} gave no sample; give at least one")

    def _seeded(self) -> Iterator[Any]:
        """Yield the samples, each drawn under its own seed of (seed, epoch, position)."""
        with preserved_generators():
            seed_everything(derive_seed(self.seed, "stream", self.epoch))
            stream = iter(self.source.dataset)
        for number in range(1 << 62):
            with preserved_generators():
                seed_everything(derive_seed(self.seed, "sample", self.epoch, number))
                try:
                    sample = next(stream)
                except StopIteration:
                    return
            yield sample

    def _batches(self, samples: Iterator[Any]) -> Iterator[list[Any]]:
        batch, units_per_sample = self.plan.batch, 1
        if batch.unit == "tokens":
            if not isinstance(self.source.tokens, int):
                raise DataError(
                    "a global batch of tokens from an IterableDataset needs samples of one length; pass prepare(..., "
                    "tokens=N), or give a dataset with __len__ and tokens=[...]"
                )
            units_per_sample = self.source.tokens
        number = self.before
        while taken := list(islice(samples, size := max(batch.size_at(number) // units_per_sample, 1))):
            if len(taken) < size and batch.last_batch == "drop":
                return
            yield taken
            number += 1


def first_samples(source: DataSource, seed: int, count: int) -> Any:
    """Return the collated batch of the first `count` samples of epoch 0 in data order, or of all if there are fewer."""
    if source.is_stream:
        return source.collate(list(islice(iter(source.dataset), count)))
    samples = SeededSamples(source.dataset, seed, "sample", gather=False)
    indices: Sequence[int] = range(min(count, len(source.dataset)))
    return Collate(source.collate)(samples.__getitems__([(0, index) for index in indices]))

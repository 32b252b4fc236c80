"""The loader that `prepare` returns: this rank's share of one global batch after another."""

import math
import signal
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from tutti.config.plan import Plan
from tutti.data.batches import BatchShare, Indices, batch_bounds, epoch_order, sampler_order, share_of
from tutti.data.collate_record import CollateRecord, record_samples
from tutti.data.device_copies import DeviceCopies
from tutti.data.fingerprint import values_digest
from tutti.data.microbatches import LoadedBatch, ShareBatch, collate_share
from tutti.data.samples import Collate, CollatedBatch, DataSource, EpochKeys, SampleKey, SeededSamples
from tutti.data.seeds import derive_seed, generator_states, preserved_generators, seed_everything
from tutti.errors import DataError, TrainingError
from tutti.process_stacks import describe_place, frames_of_worker, is_stopped
from tutti.stack_watch import watched_folder


class ShareLoader:
    """Iterates over one epoch's global batches and yields this rank's share of each, collated.

    `epoch`, `position` and `before` are the whole state of the data order, for any number of ranks.

    Attributes:
        plan: divides the global batches among ranks; another one counts from the next batch on.
        epoch: number of the current epoch.
        position: batches taken of the current epoch.
        before: batches of all earlier epochs.
        share: this rank's share of the batch that was yielded last.
        indices: samples of that global batch.
        stream_digest: digest of the values of the first global batch of a stream's pass, before ranks divide it; None
            for other data, and where a data set reads parts of samples.
        recorded: whether batches say what they were collated from; set it before the first one.
        copies: copies batches to an accelerator ahead; None: a step moves its batch itself.
        timeout_s: longest wait for a batch from a worker process.
        announce: called with a share and the samples of its global batch before this batch is waited for.
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
        self.stream_digest: str | None = None
        self.recorded = False
        self.copies: DeviceCopies | None = None
        self.timeout_s = math.inf
        self.announce: Callable[[BatchShare, Indices], None] | None = None
        self._loaded: LoadedBatch | None = None
        self._states: dict[str, object] = {}
        self._began: tuple[int, int] | None = None
        self._used = False
        self._loader: DataLoader[Any] | None = None
        self._order = SamplerOrder(source.sampler, seed) if source.sampler is not None else None
        self._cached: tuple[tuple[int, int], Indices, Indices] | None = None

    def __len__(self) -> int:
        """Return the number of global batches in the current epoch.

        Raises:
            TypeError: the data is a stream, whose length is unknown.
        """
        if self.source.is_stream:
            raise TypeError("an IterableDataset has no length")
        return len(self._bounds_ahead()) - 1

    def __iter__(self) -> Iterator[Any]:
        if self._began is not None and self._began[0] == self.epoch and not self._used:
            self.position = self._began[1]  # the script has only looked at batches
        self._began, self._used = (self.epoch, self.position), False
        if self._order is not None and self.position == 0:
            self._cached = None  # the sampler is asked anew at the beginning of every epoch
        plan = None
        while plan is not self.plan:  # it may get another, from the next batch on
            plan = self.plan
            shares = self._stream() if self.source.is_stream else self._indexed()
            for self.share, self.indices, batch in shares:
                self.position += 1
                self._loaded = LoadedBatch(batch)
                self._states = generator_states() if self.recorded else {}
                if self.copies is not None:
                    self.copies.start(batch)
                yield batch.whole
                if self.source.is_stream:
                    plan = self.plan  # `_stream` follows it, as the samples cannot be asked for again
                elif plan is not self.plan:
                    break
        self.next_epoch()

    def pieces(self, batch: Any) -> list[Any]:
        """Return the microbatches of the batch that was yielded last, as a step was given it.

        Raises:
            DataError: the script changed the batch, and it cannot be cut; or it has other samples than the share.
        """
        assert self._loaded is not None
        assert self.share is not None
        self._used = True
        return self._loaded.pieces(batch, self.share.sizes)

    @property
    def collated(self) -> CollateRecord | None:
        """What the batch that was yielded last was collated from; None where that is not recorded."""
        return self._loaded.batch.record if self._loaded is not None else None

    @property
    def draws(self) -> tuple[str, ...]:
        """The generators that the script has drawn from since the last batch was yielded, where that is recorded."""
        now = generator_states() if self._states else {}
        return tuple(source for source, state in now.items() if state != self._states[source])

    def can_divide_again(self, batch: Any) -> bool:
        """Return whether `divide_again` gives what the script passes to a step: the batch as it was yielded."""
        return self._loaded is not None and not self.source.is_stream and self._loaded.is_unchanged(batch)

    def divide_again(self, plan: Plan) -> Any:
        """Divide the batch that was yielded last, and all later ones, by another plan of the same global batches.

        Returns:
            This rank's share of that batch, as a run with that plan would have yielded it.
        """
        again = self.another(plan, self.rank)
        again.source = replace(again.source, options={})
        again.position = self.position - 1
        batch = next(iter(again))
        self.plan, self.share, self._loaded = plan, again.share, again._loaded
        return batch

    def another(self, plan: Plan, rank: int) -> "ShareLoader":
        """Return a loader of the whole current epoch, for a pass beside training.

        A sampler of the user is not asked again: the pass has the samples of the latest order.

        Args:
            plan: divides the batches; its global batches are this loader's.
            rank: the rank whose shares are yielded.
        """
        source = self.source
        if source.sampler is not None:
            order = self._cached[1] if self._cached is not None else self.epoch_batches(self.epoch)[0]
            source = replace(source, sampler=order.tolist())
        loader = ShareLoader(source, plan, self.seed, rank)
        loader.go_to(self.epoch, 0, self.before)
        return loader

    def next_epoch(self) -> None:
        """Go to the beginning of the next epoch, even if this one has batches left."""
        self.go_to(self.epoch + 1, 0, self.before + self.position)

    def go_to(self, epoch: int, position: int, before: int) -> None:
        """Go to a place in the data, and tell the user's sampler its epoch, before the script may tell it another."""
        self.epoch, self.position, self.before = epoch, position, before
        self._began = None
        if self._order is not None:
            self._order.begin(epoch)

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
            if self._order is not None:
                order = self._order.of(epoch)
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

    def _bounds_ahead(self) -> Indices:
        """Return the current epoch's boundaries. A sampler that says its length is not asked for its order."""
        tokens: Any = self.source.tokens
        sampler: Any = self.source.sampler
        known = self._cached is not None and self._cached[0] == (self.epoch, self.before) and self.position > 0
        if known or sampler is None or not hasattr(sampler, "__len__") or (tokens and not isinstance(tokens, int)):
            return self.epoch_batches(self.epoch)[1]
        return batch_bounds(np.arange(len(sampler)), self.plan.batch, tokens, self.before)

    def _shares(self) -> Iterator[tuple[BatchShare, Indices]]:
        """Yield (share, sample indices of the global batch) from the current position to the end of the epoch."""
        order, bounds = self.epoch_batches(self.epoch)
        plan, share = self.plan, None
        for begin, end in pairwise(bounds[self.position :].tolist()):
            if share is None or share.batch_size != end - begin or self.plan is not plan:
                plan = self.plan
                share = share_of(end - begin, self.rank, plan)
            yield share, order[begin:end]

    def _indexed(self) -> Iterator[tuple[BatchShare, Indices, Any]]:
        if self._loader is None:
            gather = self.source.collate is Collate().function
            samples = _ShareSamples(SeededSamples(self.source.dataset, self.seed, "sample", gather=gather))
            collate: Any = _CollateShare(Collate(self.source.collate), self.seed, self.recorded)
            keys: Any = _Keys(self)
            self._loader = DataLoader(samples, batch_sampler=keys, collate_fn=collate, **self.source.options)
        batches = worker_batches(self._loader, self.timeout_s)
        for share, indices in self._announced():
            try:
                batch = next(batches)
            except StopIteration:
                raise DataError(
                    f"the data ended before batch {self.position + 1} of epoch {self.epoch + 1}, which has more: the "
                    "data set, collate_fn or the sampler has raised StopIteration, which is for iterable data sets only"
                ) from None
            yield share, indices, batch

    def _announced(self) -> Iterator[tuple[BatchShare, Indices]]:
        for share, indices in self._shares():
            if self.announce is not None:
                self.announce(share, indices)
            yield share, indices

    def _stream(self) -> Iterator[tuple[BatchShare, Indices, Any]]:
        place = (self.epoch, self.position, self.before)
        stream = _StreamShares(self.source, self.plan, self.seed, self.rank, place, recorded=self.recorded)
        options = {k: v for k, v in self.source.options.items() if k != "persistent_workers"}
        loader: DataLoader[Any] = DataLoader(stream, batch_size=None, **options)
        for size, start, batch, digest in worker_batches(loader, self.timeout_s):
            self.stream_digest = digest or self.stream_digest
            share = share_of(size, self.rank, stream.plan)
            yield share, np.arange(start, start + size), batch
            if not loader.num_workers:  # a worker has its own copy of the stream
                stream.plan = self.plan


_LOOK_EVERY_S = 1.0
"""A worker that has ended is noticed so soon."""

_END_S = 1.0
"""Seconds after which a worker whose connection was closed is known to have ended."""

_LIKELY = {
    signal.SIGKILL: "most often the system, as memory ran out: see dmesg, and use fewer workers or smaller samples",
    signal.SIGSEGV: "a library that it calls crashed: try num_workers=0",
    signal.SIGBUS: "shared memory ran out: enlarge /dev/shm, or use fewer workers",
}


def worker_batches(loader: DataLoader[Any], timeout_s: float) -> Iterator[Any]:
    """Yield the batches of a loader; a wait for its workers has a limit, and a worker that has ended is named.

    Args:
        loader: with or without workers; its own `timeout` comes first.
        timeout_s: longest wait for one batch.

    Raises:
        TrainingError: a worker has ended, or gave nothing for so long.
    """
    # torch's handler of SIGCHLD would raise its error anywhere in the step, whose cause nobody sees.
    quiet, signal_handling._SIGCHLD_handler_set = signal_handling._SIGCHLD_handler_set, True
    drawn_from = torch.get_rng_state()  # torch draws a seed here, which a resumed run would draw once more
    try:
        batches: Any = iter(loader)
    finally:
        torch.set_rng_state(drawn_from)
        signal_handling._SIGCHLD_handler_set = quiet
    if isinstance(batches, _MultiProcessingDataLoaderIter) and "_try_get_data" not in vars(batches):
        vars(batches)["_try_get_data"] = _WorkerWait(batches, loader.timeout or timeout_s)
    yield from batches


class _WorkerWait:
    """Waits for what the workers of a loader send next. Takes the place of the iterator's own method."""

    def __init__(self, batches: Any, timeout_s: float) -> None:
        self._batches, self._timeout_s = weakref.ref(batches), timeout_s
        self._get = type(batches)._try_get_data

    def __call__(self, _: float = 0.0) -> tuple[bool, Any]:
        batches, began = self._batches(), time.monotonic()
        assert batches is not None
        while True:
            left_s = self._timeout_s - (time.monotonic() - began)
            try:
                got, data = self._get(batches, max(0.0, min(_LOOK_EVERY_S, left_s)))
            except (RuntimeError, OSError, EOFError) as error:  # an OSError: it was to hand over a batch's memory
                ended = _ends(batches._workers, 0.0 if isinstance(error, RuntimeError) else _END_S)
                if not ended:
                    raise
                raise TrainingError(f"{'; '.join(ended)}") from error
            if got:
                return True, data
            if left_s <= 0:
                number = batches._task_info.get(batches._rcvd_idx, (0,))[0]
                sentence = self._waited_for(number, batches._workers[number])
                batches._workers[number].kill()  # Python waits for a worker at its end, for ever if that is stopped
                raise TrainingError(sentence)

    def _waited_for(self, number: int, worker: Any) -> str:
        begun = f"worker {number} of the data loader (pid {worker.pid}) gave no batch for {self._timeout_s:g} s"
        if not worker.is_alive():
            return f"{begun}; it has ended: see its output"
        if is_stopped(worker.pid):
            return f"{begun}; it is stopped by a signal (SIGSTOP): let it go on with `kill -CONT {worker.pid}`"
        folder = watched_folder()
        frames = frames_of_worker(folder, worker.pid) if folder is not None else []
        if not frames:
            return f"{begun}; it is alive: see what it waits for (py-spy dump --pid {worker.pid}), or raise --timeout"
        return f"{begun}; it is{describe_place(frames)}: correct what it waits for there, or raise --timeout"


def _ends(workers: Sequence[Any], within_s: float) -> list[str]:
    """Return sentences on how workers ended; wait so long for the first to be seen."""
    until = time.monotonic() + within_s
    while True:
        try:
            ended = [sentence for worker in enumerate(workers) if (sentence := _end_of(*worker))]
            if ended or time.monotonic() >= until:
                return ended
            time.sleep(0.01)
        except RuntimeError:  # torch raises it when a worker ends, in whatever line runs then
            continue


def _end_of(number: int, worker: Any) -> str | None:
    """Return a sentence on how a worker ended; None where it is alive."""
    code = worker.exitcode
    if code is None:
        return None
    name = f"worker {number} of the data loader (pid {worker.pid})"
    if code >= 0:
        return f"{name} ended with exit code {code} while a batch was expected of it; see its output, or num_workers=0"
    known = [other for other in signal.Signals if other == -code]
    by = known[0].name if known else f"signal {-code}"
    likely = _LIKELY.get(known[0]) if known else None
    return f"{name} was killed by {by}: " + (likely or "end no process of a run, or resume it")


class _Keys:
    """The batch sampler: yields the keys (epoch, index) of this rank's samples and the microbatches' sizes."""

    def __init__(self, loader: ShareLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[tuple[EpochKeys, list[int]]]:
        epoch = self.loader.epoch
        share, positions, sizes = None, np.empty(0, dtype=np.int64), list[int]()
        for now, indices in self.loader._shares():
            if now is not share:
                share, positions, sizes = now, np.asarray(now.positions, dtype=np.int64), now.sizes
            yield EpochKeys(epoch, indices[positions]), sizes


class _ShareSamples(Dataset[Any]):
    """Reads the samples of a share, and passes on its key and the sizes of its microbatches."""

    def __init__(self, samples: SeededSamples) -> None:
        self.samples = samples

    def __getitem__(self, index: SampleKey) -> Any:
        return self.samples[index]

    def __getitems__(self, share: tuple[EpochKeys, list[int]]) -> tuple[Any, list[int], SampleKey]:
        keys, sizes = share
        return self.samples.__getitems__(keys), sizes, keys[0]


@dataclass(frozen=True, slots=True)
class _CollateShare:
    """Collates a share and its microbatches. A user's function draws from a seed of (seed, epoch, first sample).

    Ranks that compute the same samples then get the same batch.
    """

    collate: Collate
    seed: int
    recorded: bool = False

    def __call__(self, share: tuple[Any, list[int], SampleKey]) -> ShareBatch:
        samples, sizes, key = share
        if self.collate.function is Collate().function:
            batch = self.collate(samples)
            record = None
            if self.recorded:
                record = record_samples(zip(*batch, strict=True) if isinstance(samples, CollatedBatch) else samples)
            return ShareBatch(batch, None, sum(sizes), record)
        with preserved_generators():
            seed_everything(derive_seed(self.seed, "collate", *key))
            return collate_share(self.collate.function, samples, sizes, recorded=self.recorded)


class SamplerOrder:
    """The orders of a user's sampler, epoch by epoch, also after a resume.

    A sampler with `set_epoch` is told the epoch when it begins; a call of the script comes later and counts. One that
    draws from a generator of its own gives its next order each time, so a resumed run asks for the earlier ones first.
    """

    def __init__(self, sampler: Iterable[int], seed: int) -> None:
        self.sampler = sampler
        self.seed = seed
        self.asked = 0

    def begin(self, epoch: int) -> None:
        """Draw the orders of earlier epochs that nobody asked for; then tell the sampler which epoch begins."""
        tell = getattr(self.sampler, "set_epoch", None)
        for earlier in range(self.asked, epoch):
            if callable(tell):
                tell(earlier)
            self.of(earlier)
        if callable(tell):
            tell(epoch)

    def of(self, epoch: int) -> Indices:
        """Return the order of an epoch that has begun."""
        self.asked = max(self.asked, epoch + 1)
        return sampler_order(self.sampler, self.seed, epoch)


class _StreamShares(IterableDataset[Any]):
    """A user's stream cut into global batches; yields (size, start, this rank's collated share, digest).

    The digest is that of the first global batch's values, for all ranks to compare; later ones have none.

    Every rank reads the whole stream and keeps its share, so the order does not depend on the number of ranks. A
    resumed run reads the batches that it has already taken once more, and drops them.
    """

    def __init__(
        self,
        source: DataSource,
        plan: Plan,
        seed: int,
        rank: int,
        place: tuple[int, int, int],
        *,
        recorded: bool = False,
    ) -> None:
        super().__init__()
        self.source = source
        self.plan = plan
        self.seed = seed
        self.rank = rank
        self.epoch, self.position, self.before = place
        self.recorded = recorded

    def __iter__(self) -> Iterator[tuple[int, int, ShareBatch, str | None]]:
        samples = self._seeded()
        start = 0
        whole = all(self.plan.mesh.get(axis, 1) == 1 for axis in ("space", "context"))
        for number, batch in enumerate(self._batches(samples)):
            if number >= self.position:
                share = share_of(len(batch), self.rank, self.plan)
                mine = [batch[position] for position in share.positions]
                digest = values_digest(batch) if whole and number == self.position else None
                shared = collate_share(self.source.collate, mine, share.sizes, recorded=self.recorded)
                yield len(batch), start, shared, digest
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

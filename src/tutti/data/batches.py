"""Global batches: the order of an epoch, its batches, and each rank's share of them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tutti.config.partitioning import cut
from tutti.config.plan import BatchPlan, Plan
from tutti.data.seeds import derive_seed, preserved_generators, seed_everything
from tutti.errors import DataError

Indices = npt.NDArray[np.int64]

Unpack = Callable[[Any], tuple[tuple[Any, ...], dict[str, Any], Any]]
"""batch -> (positional arguments, keyword arguments, target)."""


def epoch_order(samples: int, seed: int, epoch: int, *, shuffle: bool) -> Indices:
    """Return the order of one epoch's samples; with `shuffle`, a permutation that depends only on (seed, epoch)."""
    if not shuffle:
        return np.arange(samples, dtype=np.int64)
    generator = torch.Generator().manual_seed(derive_seed(seed, "order", epoch))
    return torch.randperm(samples, generator=generator).numpy()


def sampler_order(sampler: Iterable[int], seed: int, epoch: int) -> Indices:
    """Return the order of a user's sampler, with the global generators seeded from (seed, epoch).

    A generator of the sampler's own goes on from where it is, as in a loop without tutti.

    Raises:
        DataError: the sampler yields something else than indices, such as whole batches.
    """
    with preserved_generators():
        seed_everything(derive_seed(seed, "sampler", epoch))
        indices = list(sampler)
    if indices and isinstance(indices[0], list | tuple):
        raise DataError(
            f"the sampler {type(sampler).__name__} yields batches, but tutti cuts the batches itself; pass a sampler "
            "that yields one index after another"
        )
    return np.fromiter((int(index) for index in indices), dtype=np.int64)


def batch_bounds(order: Indices, batch: BatchPlan, tokens: int | Sequence[int] | None, before: int = 0) -> Indices:
    """Return the boundaries of an epoch's global batches: batch b is order[bounds[b]:bounds[b + 1]].

    A batch that counts tokens takes consecutive samples while their sum is at most the global batch size.

    Args:
        order: sample indices of the epoch.
        batch: the global batch.
        tokens: tokens of each sample, needed for a batch that counts tokens.
        before: global batches of earlier epochs, where the batch size grows.

    Raises:
        DataError: a single sample exceeds the batch, or its tokens are unknown.
    """
    units_per_sample = 1
    if batch.unit == "tokens":
        if tokens is None:
            raise DataError(
                "the global batch counts tokens, but the tokens of a sample are unknown; pass prepare(..., tokens=N) "
                "for samples of N tokens, or tokens=[...] with one number per sample"
            )
        if isinstance(tokens, int):
            _check_fits(tokens, batch.smallest, "every sample")
            units_per_sample = tokens
        else:
            return _token_bounds(order, batch, np.asarray(tokens, dtype=np.int64), before)
    starts: list[int] = []
    position = 0
    while (
        position < len(order) and batch.size_at(before + len(starts)) < batch.global_batch_size
    ):  # while the batch grows
        starts.append(position)
        position += batch.size_at(before + len(starts) - 1) // units_per_sample
    rest = np.arange(position, len(order), batch.global_batch_size // units_per_sample, dtype=np.int64)
    bounds = np.concatenate([np.asarray(starts, dtype=np.int64), rest, [len(order)]])
    last = batch.size_at(before + len(bounds) - 2) // units_per_sample
    if batch.last_batch == "drop" and len(bounds) > 1 and bounds[-1] - bounds[-2] < last:
        bounds = bounds[:-1]
    return bounds


def _token_bounds(order: Indices, batch: BatchPlan, tokens: Indices, before: int) -> Indices:
    lengths = tokens[order]
    if len(lengths):
        longest = int(lengths.argmax())
        _check_fits(int(lengths[longest]), batch.smallest, f"sample {int(order[longest])}")
    ends, bounds = np.cumsum(lengths), [0]
    while bounds[-1] < len(order):
        taken = int(ends[bounds[-1] - 1]) if bounds[-1] else 0
        size = batch.size_at(before + len(bounds) - 1)
        bounds.append(int(np.searchsorted(ends, taken + size, side="right")))
    if batch.last_batch == "drop" and len(bounds) > 1:
        bounds.pop()  # the last batch ended with the epoch, not because it was full
    return np.asarray(bounds, dtype=np.int64)


def _check_fits(tokens: int, limit: int, what: str) -> None:
    if tokens > limit:
        raise DataError(
            f"{what} has {tokens} tokens, more than the global batch of {limit} tokens; raise global_batch_size to "
            f"at least {tokens} or shorten the samples"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchShare:
    """One rank's share of one microbatch slice: samples start .. start + count - 1 of the global batch.

    A rank whose count is 0 still loads one sample of the slice and computes with weight 0, because it must take part in
    the collectives.
    """

    start: int
    count: int
    slice_start: int
    slice_size: int

    @property
    def loaded(self) -> int:
        return max(self.count, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShare:
    """One rank's share of a global batch.

    Attributes:
        batch_size: samples of the global batch.
        parts: the share of each slice that is not empty.
    """

    batch_size: int
    parts: tuple[MicrobatchShare, ...]

    @property
    def positions(self) -> list[int]:
        """Positions, within the global batch, of the samples to load, in order."""
        return [part.start + offset for part in self.parts for offset in range(part.loaded)]

    @property
    def sizes(self) -> list[int]:
        """Number of samples loaded for each part."""
        return [part.loaded for part in self.parts]


def share_of(batch_size: int, rank: int, plan: Plan) -> BatchShare:
    """Return the share of data-parallel rank `rank` in a global batch of `batch_size` samples."""
    degree = plan.data_parallel_degree
    slices = cut(batch_size, plan.batch.num_microbatches)
    parts = []
    for begin, end in pairwise(slices):
        if begin == end:
            continue
        bounds = cut(end - begin, degree, plan.shares)
        count = bounds[rank + 1] - bounds[rank]
        start = begin + min(bounds[rank], end - begin - 1)
        parts.append(MicrobatchShare(start=start, count=count, slice_start=begin, slice_size=end - begin))
    return BatchShare(batch_size=batch_size, parts=tuple(parts))

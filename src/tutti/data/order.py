"""The order of an epoch: one global permutation from the seed, cut into global batches."""

import random
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from tutti.config.plan import BatchPlan
from tutti.data.seeds import derive_seed, preserved_generators, seed_everything
from tutti.errors import DataError

Indices = npt.NDArray[np.int64]


def epoch_order(samples: int, seed: int, epoch: int, *, shuffle: bool) -> Indices:
    """Sample indices of one epoch in order; a permutation that depends on (seed, epoch) only."""
    if not shuffle:
        return np.arange(samples, dtype=np.int64)
    generator = torch.Generator().manual_seed(derive_seed(seed, "order", epoch))
    return torch.randperm(samples, generator=generator).numpy()


def sampler_order(sampler: Iterable[int], seed: int, epoch: int) -> Indices:
    """The order a user's sampler gives when every generator is seeded from (seed, epoch): equal on every rank."""
    with preserved_generators():
        seed_everything(derive_seed(seed, "sampler", epoch))
        generator = getattr(sampler, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(derive_seed(seed, "sampler", epoch))
        elif isinstance(generator, random.Random):
            generator.seed(derive_seed(seed, "sampler", epoch))
        return np.fromiter((int(index) for index in sampler), dtype=np.int64)


def batch_bounds(order: Indices, batch: BatchPlan, tokens: int | Sequence[int] | None, before: int = 0) -> Indices:
    """Boundaries of an epoch's global batches within its order: batch b is order[bounds[b]:bounds[b + 1]].

    `tokens`: tokens of each sample, for a batch that counts tokens: consecutive samples are taken while their sum
    is at most the global batch size. `before`: global batches of the epochs before, where the batch grows. Raises
    DataError for a sample that alone exceeds the batch.
    """
    each = 1
    if batch.unit == "tokens":
        if tokens is None:
            raise DataError(
                "the global batch counts tokens, but the tokens of a sample are unknown; pass prepare(..., tokens=N) "
                "for samples of N tokens, or tokens=[...] with one number a sample"
            )
        if isinstance(tokens, int):
            _check_fits(tokens, batch.smallest, "every sample")
            each = tokens
        else:
            return _token_bounds(order, batch, np.asarray(tokens, dtype=np.int64), before)
    starts: list[int] = []
    position = 0
    while position < len(order) and batch.size_at(before + len(starts)) < batch.global_batch_size:  # it grows
        starts.append(position)
        position += batch.size_at(before + len(starts) - 1) // each
    rest = np.arange(position, len(order), batch.global_batch_size // each, dtype=np.int64)
    bounds = np.concatenate([np.asarray(starts, dtype=np.int64), rest, [len(order)]])
    last = batch.size_at(before + len(bounds) - 2) // each
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
        bounds.pop()  # the batch that the end of the epoch closed, not the token count
    return np.asarray(bounds, dtype=np.int64)


def _check_fits(tokens: int, limit: int, what: str) -> None:
    if tokens > limit:
        raise DataError(
            f"{what} has {tokens} tokens, more than the global batch of {limit} tokens; raise global_batch_size to "
            f"at least {tokens} or shorten the samples"
        )

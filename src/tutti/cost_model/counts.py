"""Exact counts: iterations of an epoch, shares of a batch, messages and additions of a ring all-reduce."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tutti.config.partitioning import cut
from tutti.config.vocabulary import LastBatch
from tutti.errors import PlanError


def iterations_per_epoch(samples: int, global_batch_size: int, last_batch: LastBatch = "keep") -> int:
    """Steps of an epoch over `samples`: the short last batch counts as a step when it is kept."""
    full, rest = divmod(samples, global_batch_size)
    return full + (1 if rest and last_batch == "keep" else 0)


def global_batch_of(local_batch_size: int, ranks: int, num_microbatches: int = 1) -> int:
    """Samples of a step when every one of `ranks` takes `local_batch_size` in each microbatch."""
    return local_batch_size * ranks * num_microbatches


def cut_sizes(total: int, parts: int, weights: Sequence[float] = ()) -> tuple[int, ...]:
    """Sizes of `parts` contiguous runs of `total` items in proportion to `weights` (none: equal ones).

    They add up to `total`; equal runs differ by at most one.
    """
    return tuple(end - start for start, end in pairwise(cut(total, parts, weights)))


def rank_samples(
    samples: int, num_microbatches: int, ranks: int, shares: Sequence[float] = ()
) -> list[tuple[tuple[int, int], ...]]:
    """What each rank computes, as (samples, in how many microbatches); the last entry holds the last microbatch.

    Slices have at most two sizes, the larger ones last among equals. A rank without a share still computes one
    sample, with weight 0: it takes part in the collectives.
    """
    base, larger = divmod(samples, num_microbatches)
    slices = [(size, times) for size, times in ((base, num_microbatches - larger), (base + 1, larger)) if times]
    cuts = [(cut_sizes(size, ranks, shares), times) for size, times in slices]
    return [tuple((max(1, sizes[rank]), times) for sizes, times in cuts) for rank in range(ranks)]


def samples_of(size: int, unit: str, tokens_per_sample: int) -> int:
    """The samples that a global batch of `size` units means, at least one. Raises PlanError for unknown tokens."""
    if unit == "samples":
        return size
    if tokens_per_sample < 1:
        raise PlanError(
            f"global_batch_size = {size} tokens, but the model's tokens_per_sample is unknown; give the batch in "
            "samples, or set tokens_per_sample in the model file"
        )
    return max(1, size // tokens_per_sample)


@dataclass(frozen=True, slots=True, kw_only=True)
class RingCounts:
    """What one all-reduce of N elements over a ring of P ranks takes, rank by rank.

    `chunks`: elements of each chunk; `sent`: elements each rank sends; `additions`: elements each rank adds;
    `messages`: messages each rank sends.
    """

    chunks: tuple[int, ...]
    sent: tuple[int, ...]
    additions: tuple[int, ...]
    messages: int

    @property
    def total_sent(self) -> int:
        return sum(self.sent)


def ring_counts(elements: int, ranks: int) -> RingCounts:
    """Counts of the ring all-reduce: P - 1 steps of reduce-scatter, then P - 1 of all-gather.

    In reduce-scatter, rank r sends chunks r, r - 1, ..., r - P + 2 and adds into chunks r - 1, ..., r - P + 1; in
    all-gather it sends the chunk it completed, r + 1, and passes on r, ..., r - P + 3 (all modulo P). So it sends
    every chunk but one in each half: 2 (P - 1) / P N elements when P divides N (Patarasuk and Yuan 2009).
    """
    chunks = cut_sizes(elements, ranks)
    if ranks == 1:
        return RingCounts(chunks=chunks, sent=(0,), additions=(0,), messages=0)
    sent = tuple(2 * elements - chunks[(rank + 1) % ranks] - chunks[(rank + 2) % ranks] for rank in range(ranks))
    additions = tuple(elements - chunks[rank] for rank in range(ranks))
    return RingCounts(chunks=chunks, sent=sent, additions=additions, messages=2 * (ranks - 1))


def naive_all_reduce_sent(elements: int, ranks: int) -> int:
    """Elements that cross links, over all ranks, when a root gathers, adds and sends back: 2 N (P - 1)."""
    return 2 * elements * (ranks - 1)


def ring_sent_nbytes(nbytes: float, ranks: int) -> float:
    """Bytes each rank sends in a ring all-reduce of `nbytes`: 2 (n - 1) / n S."""
    return 2 * (ranks - 1) / ranks * nbytes

"""Communication behind backward: buckets leave as they become ready, one at a time."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Gradients fused for one collective. `last`: index, in order of backward, of the module that completes it."""

    nbytes: float
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """How the communication of a step went: seconds in all, and after the end of backward."""

    total_s: float
    exposed_s: float


def buckets(gradient_nbytes: Sequence[float], cap_nbytes: float) -> tuple[Bucket, ...]:
    """Fuse gradients, given in order of forward, into buckets, returned in the order in which backward fills them.

    A bucket closes once it has reached its cap, counted from the first module on, so that the smaller rest is the
    one that leaves first (PyTorch DDP's rule for a given cap). Modules without gradients are in no bucket.
    """
    result: list[Bucket] = []
    size, first = 0.0, -1
    for index, nbytes in enumerate(gradient_nbytes):
        if nbytes <= 0:
            continue
        first = index if size == 0.0 else first
        size += nbytes
        if size >= cap_nbytes:
            result.append(Bucket(nbytes=size, last=len(gradient_nbytes) - 1 - first))
            size = 0.0
    if size > 0:
        result.append(Bucket(nbytes=size, last=len(gradient_nbytes) - 1 - first))
    return tuple(reversed(result))


def exchange(
    backward_s: Sequence[float],
    fused: Sequence[Bucket],
    bucket_s: Sequence[float],
    *,
    compute_share: float = 0.0,
) -> Exchange:
    """Run the recurrence: bucket k starts when it is ready and the link is free.

    `backward_s`: seconds of each module's backward, in order; `bucket_s`: seconds of each bucket's collective.
    Exposed is the end of the last collective minus the end of backward. `compute_share`: the part of hidden
    communication that delays backward all the same, because it needs the same cores.
    """
    finished = np.cumsum(np.asarray(backward_s, dtype=float))
    end_of_backward = float(finished[-1]) if len(finished) else 0.0
    free = 0.0
    for bucket, seconds in zip(fused, bucket_s, strict=True):
        free = max(free, float(finished[bucket.last])) + seconds
    total = float(sum(bucket_s))
    # Rounding alone can make a difference of sums exceed its parts.
    waiting = min(max(0.0, free - end_of_backward), total)
    return Exchange(total_s=total, exposed_s=waiting + compute_share * (total - waiting))

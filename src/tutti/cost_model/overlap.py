"""Communication hidden behind backward: buckets are sent as they become ready, one at a time.

A link carries one exchange at a time. Exchanges that a rank waits for within its passes go first (reductions
over split, all-to-alls of experts and tables, parts of sequences, halos). Buckets have the link for the rest of
the time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tutti.config.cluster import LinkTier

Array = NDArray[np.float64]

TIERS: tuple[LinkTier, ...] = ("node", "network")


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketCost:
    """Gradients that are fused for one collective.

    Attributes:
        last: index, in the order of backward, of the module that completes the bucket.
        kept_nbytes: residuals of a codec for this bucket.
    """

    nbytes: float
    last: int
    kept_nbytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CommCost:
    """The communication of a step.

    Attributes:
        total_s: seconds of all of it.
        exposed_s: seconds of it that computation does not hide.
    """

    total_s: float
    exposed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """Seconds in which links carry the exchanges of a rank's passes, by tier as in `TIERS`.

    Attributes:
        forward: (tiers, modules), in the last microbatch's forward.
        backward: (tiers, modules), in the last microbatch's backward.
        after: (tiers,), of a message that leaves at the end of backward.
    """

    forward: Array
    backward: Array
    after: Array

    def in_turns(self, forward_s: Array, backward_s: Array, turns: float) -> "Taken":
        """Return the same where `turns` hosts take turns on each core.

        An exchange beside a module's work then advances only while all ranks that take part have their turn.
        """
        away = 1 - 1 / turns
        return replace(
            self,
            forward=self.forward + away * np.maximum(0.0, forward_s - self.forward),
            backward=self.backward + away * np.maximum(0.0, backward_s - self.backward),
        )


def buckets(gradient_nbytes: Sequence[float], cap_nbytes: float) -> tuple[BucketCost, ...]:
    """Fuse gradients into buckets.

    A bucket closes once it has reached its cap, counted from the first module on, so that the smaller rest is
    sent first (PyTorch DDP's rule for a given cap). Modules without gradients are in no bucket.

    Args:
        gradient_nbytes: bytes of each module's gradients, in the order of forward.
        cap_nbytes: bytes at which a bucket is closed.

    Returns:
        The buckets, in the order in which backward fills them.
    """
    result: list[BucketCost] = []
    size, first = 0.0, -1
    for index, nbytes in enumerate(gradient_nbytes):
        if nbytes <= 0:
            continue
        first = index if size == 0.0 else first
        size += nbytes
        if size >= cap_nbytes:
            result.append(BucketCost(nbytes=size, last=len(gradient_nbytes) - 1 - first))
            size = 0.0
    if size > 0:
        result.append(BucketCost(nbytes=size, last=len(gradient_nbytes) - 1 - first))
    return tuple(reversed(result))


def exchange(
    backward_s: Sequence[float],
    fused: Sequence[BucketCost],
    bucket_s: Sequence[float],
    *,
    cores_s: Sequence[float] = (),
    taken: Sequence[Array] = (),
    after: Sequence[float] = (),
) -> CommCost:
    """Return the cost of the buckets' collectives: bucket k starts when it is ready and the link is free.

    Args:
        backward_s: seconds of each module's backward, in order.
        fused: the buckets.
        bucket_s: seconds of each bucket's collective.
        cores_s: for each bucket, seconds by which it delays backward even where it is hidden, because it needs
            the same cores.
        taken: for each bucket, the seconds of each module's backward in which the bucket's link carries another
            exchange, spread evenly over the module's time.
        after: for each bucket, the seconds of the message that leaves on its link at the end of backward;
            buckets get half of the link beside it.

    Returns:
        Total seconds, and the exposed seconds, from the end of backward to the end of the last collective.
    """
    finished = np.cumsum(np.asarray(backward_s, dtype=float))
    end_of_backward = float(finished[-1]) if len(finished) else 0.0
    free = 0.0
    for index, (bucket, seconds) in enumerate(zip(fused, bucket_s, strict=True)):
        start = max(free, float(finished[bucket.last]))
        if len(taken) and start < end_of_backward and taken[index].any():
            open_s = np.cumsum(np.maximum(0.0, np.asarray(backward_s) - taken[index]))
            free = _carried(finished, open_s, start, seconds)
        else:
            free = start + seconds
    # What leaves at the end of backward has half of the link beside the last bucket.
    beside = min(after[-1], free - end_of_backward) if len(after) and free > end_of_backward else 0.0
    sums_s = float(sum(bucket_s))
    free, total = free + beside, sums_s + beside
    # Rounding alone can make a difference of sums exceed its parts.
    waiting = min(max(0.0, free - end_of_backward), total)
    hidden = (total - waiting) / sums_s if sums_s > 0 else 0.0
    return CommCost(total_s=total, exposed_s=waiting + float(sum(cores_s)) * hidden)


def _carried(finished: Array, open_s: Array, start: float, seconds: float) -> float:
    """Return when a link has carried an exchange of `seconds` that starts at `start`.

    The link has been free for `open_s` seconds by the time each module has `finished`, and is free after the
    last one.
    """
    if seconds <= 0:
        return start
    at = np.interp(start, np.concatenate([[0.0], finished]), np.concatenate([[0.0], open_s]))
    until = float(at) + seconds
    module = int(np.searchsorted(open_s, until))
    if module == len(open_s):
        return float(finished[-1] + until - open_s[-1])
    before, began = (open_s[module - 1], finished[module - 1]) if module else (0.0, 0.0)
    return float(began + (until - before) / (open_s[module] - before) * (finished[module] - began))

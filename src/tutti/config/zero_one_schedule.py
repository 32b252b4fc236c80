"""The schedule of 0/1 Adam (Lu et al. 2022, arXiv 2202.06009), shared by ranks, plans and predictions."""

from functools import lru_cache


@lru_cache(maxsize=64)
def _learning(kappa: int, until: int) -> frozenset[int]:
    """The updates, among the first `until`, in which the second moment learns."""
    updates, interval, learned = set(), 1, 0
    for count in range(until):
        if count % interval == 0:
            updates.add(count)
            learned += 1
            if learned == kappa:
                interval, learned = 2 * interval, 0
    return frozenset(updates)


def learns(count: int, kappa: int) -> bool:
    """Return whether the second moment learns, from an exact gradient sum, in update `count` (counted from 0).

    It learns in all of the first `kappa` updates, then in every second one `kappa` times, then in every fourth, and so
    on.
    """
    until = 1 << max(count + 1, 1024).bit_length()
    return count in _learning(kappa, until)


def local_updates(agreed: int, local_steps: int, longest: int) -> int:
    """Return how many local updates ranks make until they agree again.

    The number doubles after every `local_steps` agreements, up to `longest`.

    Args:
        agreed: how often ranks have agreed so far.
        local_steps: agreements after which the number doubles.
        longest: the largest number.
    """
    doubled = agreed // local_steps
    return longest if doubled >= longest.bit_length() else min(1 << doubled, longest)

"""Bucket sizes by measurement: the first steps try a few sizes, and all ranks keep the fastest.

Whole steps are timed, from forward to update, without data loading, evaluation and checkpoints. Sizes are tried in
turn, each twice, so that a machine that is slow for a while slows all of them.
"""

import time
from dataclasses import dataclass
from statistics import median

import torch

from tutti.parallel.parallel_model import ParallelModel

MIB = 2**20
TRIED = (2 * MIB, 8 * MIB, 25 * MIB, 100 * MIB)
"""Sizes that are tried besides the plan's, up to the first that holds all gradients."""

WARM_UP = 3
"""Steps before any is timed: they settle the order of buckets, and touch memory for the first time."""

ROUNDS, TIMED = 2, 4
"""Turns of each size, and timed steps per turn, which follow one untimed step."""

PAYS = 0.02
"""Share of a step that another size has to save to replace the plan's."""


@dataclass(frozen=True, slots=True)
class ChosenBucketSize:
    """The bucket size that all ranks keep.

    Attributes:
        nbytes: the size.
        step_s: by size in bytes, the median step in seconds on the slowest rank.
    """

    nbytes: int
    step_s: dict[int, float]


class BucketSizeTuner:
    """Tries bucket sizes while a run trains, and keeps the size whose median step is shortest on its slowest rank.

    All ranks call the same methods in the same steps.
    """

    def __init__(self, parallel: ParallelModel) -> None:
        self._parallel, plan = parallel, parallel.plan
        self._stated = plan.sync.bucket_nbytes
        self._trying = plan.sync.bucket_sizes == "measured" and plan.world_size > 1
        self._turns: list[int] = []
        self._times: dict[int, list[float]] = {}
        self._steps = 0
        self._began: float | None = None

    @property
    def measuring(self) -> bool:
        """Whether sizes are still tried."""
        return self._trying

    def begin(self) -> None:
        """Start the timer of a step."""
        self._began = _now(self._parallel.world.device) if self._trying else None

    def end(self, *, full_batch: bool) -> ChosenBucketSize | None:
        """Stop the timer, after the update. Collective where ranks agree on a size.

        Args:
            full_batch: whether the batch had its full size; other steps are not timed.

        Returns:
            The chosen size once it is decided, else None.
        """
        if self._began is None or not full_batch:
            return None
        seconds, self._began = _now(self._parallel.world.device) - self._began, None
        self._steps += 1
        if not self._turns:
            if self._steps == WARM_UP:
                self._start()
            return None
        turn, step = divmod(self._steps - 1, TIMED + 1)
        if step:
            self._times[self._turns[turn]].append(seconds)
        return self._next(turn + 1) if step == TIMED else None

    def _start(self) -> None:
        """Agree on the sizes that divide some rank's gradients differently. Collective."""
        local_nbytes = sum(parameter.numel() * parameter.element_size() for parameter in self._parallel.replica.order)
        largest = max(self._parallel.world.gather(local_nbytes))
        sizes = sizes_to_try(self._stated, largest)
        self._trying = len(sizes) > 1
        if self._trying:
            self._turns, self._steps = sizes * ROUNDS, 0
            self._times = {size: [] for size in sizes}
            self._use(sizes[0])

    def _next(self, turn: int) -> ChosenBucketSize | None:
        """Begin a turn; after the last one, choose a size. Collective then."""
        if turn < len(self._turns):
            self._use(self._turns[turn])
            return None
        self._trying = False
        everyone = self._parallel.world.gather([median(times) for times in self._times.values()])
        slowest = dict(zip(self._times, map(max, zip(*everyone, strict=True)), strict=True))
        chosen = fastest_size(slowest, self._stated)
        self._use(chosen)
        return ChosenBucketSize(chosen, slowest)

    def _use(self, size: int) -> None:
        self._parallel.replica.rebuild_buckets(self._parallel.replica.order, None, size)


def sizes_to_try(stated: int, largest: int) -> list[int]:
    """Return the sizes, the plan's first, that divide `largest` bytes of gradients differently."""
    sizes = [stated]
    for size in TRIED:
        if min(size, largest) not in [min(other, largest) for other in sizes]:
            sizes.append(size)
    return sizes if largest else []


def fastest_size(seconds: dict[int, float], stated: int) -> int:
    """Return the size with the shortest step; the plan's if no other saves at least PAYS.

    Args:
        seconds: step time by size.
        stated: the plan's size.
    """
    best = min(seconds, key=lambda size: seconds[size])
    return best if seconds[best] < (1 - PAYS) * seconds[stated] else stated


def _now(device: torch.device) -> float:
    """Return the time in seconds, once everything that was queued on the device has run."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()

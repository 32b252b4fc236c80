"""Bucket sizes by measurement: the first steps try a few sizes, and all ranks keep the fastest.

Whole steps are timed, from forward to update, without data loading, evaluation and checkpoints. Each size is tried
twice, in turn with the others, so that a machine that is slow for a while slows all of them.
"""

import time
from dataclasses import dataclass
from statistics import median

import torch

from tutti.parallel.parallel_model import ParallelModel

MIB = 2**20
TRIED = (2 * MIB, 8 * MIB, 25 * MIB, 100 * MIB)
"""Sizes that are tried beside the plan's, up to the first that holds all gradients."""

WARM_UP = 3
"""Steps before any is timed: buckets take the order in which gradients come, and memory is touched first."""

ROUNDS, TIMED = 2, 4
"""Turns of each size, and timed steps in a turn, after one that is not timed."""

PAYS = 0.02
"""The plan's size stays unless another saves this share of a step."""


@dataclass(frozen=True, slots=True)
class ChosenBucketSize:
    """The bucket size that all ranks keep, in bytes, and by size the median step in seconds on the slowest rank."""

    nbytes: int
    step_s: dict[int, float]


class BucketSizeTuner:
    """Tries sizes while a run trains. Ranks decide by each size's median step on the rank that was slowest with it."""

    def __init__(self, parallel: ParallelModel) -> None:
        self._parallel, plan = parallel, parallel.plan
        self._stated = plan.sync.bucket_nbytes
        self._trying = plan.sync.bucket_sizes == "measured" and plan.world_size > 1
        self._turns: list[int] = []
        self._times: dict[int, list[float]] = {}
        self._steps = 0
        self._began: float | None = None

    def begin(self) -> None:
        """A step begins."""
        self._began = _now(self._parallel.world.device) if self._trying else None

    def end(self, *, full_batch: bool) -> ChosenBucketSize | None:
        """The update of a step is made; returns the size once it is decided. Collective then.

        Steps of a short batch are not timed.
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
        """Ranks agree which sizes differ at all."""
        local_nbytes = sum(parameter.numel() * parameter.element_size() for parameter in self._parallel.replica.order)
        largest = max(self._parallel.world.gather(local_nbytes))
        sizes = sizes_to_try(self._stated, largest)
        self._trying = len(sizes) > 1
        if self._trying:
            self._turns, self._steps = sizes * ROUNDS, 0
            self._times = {size: [] for size in sizes}
            self._use(sizes[0])

    def _next(self, turn: int) -> ChosenBucketSize | None:
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
    """Sizes, the plan's first, that cut `largest` bytes of gradients differently."""
    found = [stated]
    for size in TRIED:
        if min(size, largest) not in [min(other, largest) for other in found]:
            found.append(size)
    return found if largest else []


def fastest_size(seconds: dict[int, float], stated: int) -> int:
    """The size with the shortest step; the stated one if it is as fast within noise."""
    best = min(seconds, key=lambda size: seconds[size])
    return best if seconds[best] < (1 - PAYS) * seconds[stated] else stated


def _now(device: torch.device) -> float:
    """Seconds, once everything that was queued on the device has run."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()

"""Bucket sizes by measurement: the first steps try a few sizes, and all ranks keep the fastest.

Whole steps are timed, from forward to update, without data loading, evaluation and checkpoints. Each size is tried
twice, in turn with the others, so that a machine that is slow for a while slows all of them.
"""

import time
from statistics import median
from typing import TYPE_CHECKING

import torch

from tutti.config.plan import Plan

if TYPE_CHECKING:
    from tutti.trainer.run_state import Run

MIB = 2**20
TRIED = (2 * MIB, 8 * MIB, 25 * MIB, 100 * MIB)
"""Sizes that are tried beside the plan's, up to the first that holds all gradients."""

WARM_UP = 3
"""Steps before any is timed: buckets take the order in which gradients come, and memory is touched first."""

ROUNDS, TIMED = 2, 4
"""Turns of each size, and timed steps in a turn, after one that is not timed."""

PAYS = 0.02
"""The plan's size stays unless another saves this share of a step."""


class BucketSizeTuner:
    """Tries sizes while a run trains. Ranks decide by each size's median step on the rank that was slowest with it."""

    def __init__(self, plan: Plan) -> None:
        self._stated = plan.sync.bucket_nbytes
        self._trying = plan.sync.bucket_sizes == "measured" and plan.world_size > 1
        self._turns: list[int] = []
        self._times: dict[int, list[float]] = {}
        self._steps = 0
        self._began: float | None = None

    def begin(self, run: "Run") -> None:
        """A step begins."""
        self._began = _now(run) if self._trying else None

    def end(self, run: "Run", samples: int) -> None:
        """The update of a step of `samples` is made; steps of a short batch are not timed. Collective when sizes are
        decided."""
        if self._began is None or samples != run.loader.stated_size:
            return
        seconds, self._began = _now(run) - self._began, None
        self._steps += 1
        if not self._turns:
            if self._steps == WARM_UP:
                self._start(run)
            return
        turn, step = divmod(self._steps - 1, TIMED + 1)
        if step:
            self._times[self._turns[turn]].append(seconds)
        if step == TIMED:
            self._next(run, turn + 1)

    def _start(self, run: "Run") -> None:
        """Ranks agree which sizes differ at all."""
        local_nbytes = sum(parameter.numel() * parameter.element_size() for parameter in run.replica.order)
        largest = max(run.world.gather(local_nbytes))
        sizes = sizes_to_try(self._stated, largest)
        self._trying = len(sizes) > 1
        if self._trying:
            self._turns, self._steps = sizes * ROUNDS, 0
            self._times = {size: [] for size in sizes}
            self._use(run, sizes[0])

    def _next(self, run: "Run", turn: int) -> None:
        if turn < len(self._turns):
            self._use(run, self._turns[turn])
            return
        self._trying = False
        everyone = run.world.gather([median(times) for times in self._times.values()])
        slowest = dict(zip(self._times, map(max, zip(*everyone, strict=True)), strict=True))
        chosen = fastest_size(slowest, self._stated)
        self._use(run, chosen)
        tried = {f"{size / MIB:g}": seconds for size, seconds in slowest.items()}
        run.log.row("buckets", run.clock.elapsed_s(), step=run.progress.step, chosen_mib=chosen / MIB, step_s=tried)
        timings = ", ".join(f"{size} MiB {1e3 * seconds:.3g} ms" for size, seconds in tried.items())
        run.screen.say(f"gradients are summed in buckets of {chosen / MIB:g} MiB; a step took with {timings}")

    def _use(self, run: "Run", size: int) -> None:
        run.replica.rebuild_buckets(run.replica.order, None, size)


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


def _now(run: "Run") -> float:
    if run.world.device.type == "cuda":
        torch.cuda.synchronize(run.world.device)
    return time.perf_counter()

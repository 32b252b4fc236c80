"""A batch that grows (BatchPlan.ramp): how many steps of each size a training has, and what they take."""

import math
from collections.abc import Callable

from tutti.config.plan import BatchPlan
from tutti.config.prediction import Prediction
from tutti.planner.choice import NoiseScale


def sizes_of(batch: BatchPlan, samples: float) -> list[tuple[int, int]]:
    """(size, steps) in order, of a training over so many samples in the batch's unit."""
    return _walk(batch, samples, float)


def sizes_to_quality(batch: BatchPlan, noise: NoiseScale) -> list[tuple[int, int]]:
    """The same of a training to a quality: a step of the batch B counts B / (1 + B / critical batch) of the least
    samples (plan.quality, for a batch that does not stay)."""
    return _walk(batch, noise.least_samples, lambda size: size / (1.0 + size / noise.critical_batch))


def _walk(batch: BatchPlan, needed: float, worth: Callable[[int], float]) -> list[tuple[int, int]]:
    found, left, done = list[tuple[int, int]](), needed, 0
    for until, size in (*batch.ramp, (None, batch.global_batch_size)):
        steps = math.ceil(left / worth(size))
        if until is not None:
            steps = min(steps, until - done)
            done = until
        if steps > 0:
            found.append((size, steps))
        left -= steps * worth(size)
        if left <= 0:
            break
    return found


def step_s(prediction: Prediction, size: int, whole: int) -> float:
    """Seconds of a step of `size`, where one of `whole` was predicted: work on samples and their loading in proportion,
    the rest, which is of parameters and calls, as it is. Exchanges that were hidden are taken to stay hidden."""
    passes = prediction.phases["data"] + prediction.phases["forward"] + prediction.phases["backward"]
    return prediction.step_time_s.value - passes * (1.0 - size / whole)

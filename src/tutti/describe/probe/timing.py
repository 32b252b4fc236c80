"""The one clock of the probe: medians of repeated calls, with the device waited for before and after each.

A launch on a GPU returns before the work is done. Nothing else in the probe reads a clock around device work, so no
launch can be timed without waiting for its end.
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

SAMPLE_S = 1e-3
"""Calls shorter than this are timed several in a row, so that the clock and the waiting do not show."""

CHEAP_S, MOST_SAMPLES = 0.05, 50
"""Short calls get more samples than asked for, as many as fit this time: a disturbance then moves the median less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of one call. `spread`: (max - min) / median over the repeats."""

    median_s: float
    spread: float
    repeats: int


def synchronize(device: torch.device) -> None:
    """Wait until all work given to the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def once(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, from an idle device to an idle device."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def repeated(call: Callable[[], object], device: torch.device, *, repeats: int, budget_s: float) -> Timing:
    """Median of `repeats` timed samples after a warm-up: fewer where they would take longer than `budget_s`, more
    where they are cheap."""
    once(call, device)  # first touch of memory, choice of an algorithm
    first = once(call, device)
    inner = max(1, math.ceil(SAMPLE_S / max(first, 1e-9))) if first < SAMPLE_S else 1
    sample = max(first * inner, 1e-9)
    count = max(1, min(repeats, int(budget_s / sample)), cheap_samples(sample))
    if inner == 1:
        samples = [first, *(once(call, device) for _ in range(count - 1))]
    else:
        samples = [once(lambda: _several(call, inner), device) / inner for _ in range(count)]
    return summary(samples)


def cheap_samples(sample_s: float) -> int:
    """How many samples of that length cost next to nothing."""
    return min(MOST_SAMPLES, int(CHEAP_S / sample_s))


def summary(samples: list[float]) -> Timing:
    """Median and spread of samples in seconds."""
    median = statistics.median(samples)
    return Timing(median_s=median, spread=(max(samples) - min(samples)) / median, repeats=len(samples))


def _several(call: Callable[[], object], count: int) -> None:
    for _ in range(count):
        call()

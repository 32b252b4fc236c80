"""The one clock of the probe: what repeated calls take, with the device waited for before and after each.

A launch on a GPU returns before the work is done. Nothing else in the probe reads a clock around device work, so no
launch can be timed without waiting for its end.

Other work on the machine only lengthens a call, so what counts is the lower quartile of the samples; not the least of
them, which may be a burst that a limited link let through. Where the middle one is much longer, more are taken; those
taken while a virtual machine's cores were given to others are set aside.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from tutti.machine import Stolen

SAMPLE_S, SLICES_S = 1e-3, 12e-3
"""Calls shorter than this are timed several in a row, so that the clock and the waiting do not show; and on cores that
processes take in turns, those shorter than a few turns, for within one there seems to be a whole core."""

_LEAST_S = ContextVar("_LEAST_S", default=SAMPLE_S)

CHEAP_S, MOST_SAMPLES = 0.05, 50
"""Short calls get more samples than asked for, as many as fit this time: a disturbance then moves the quartile less."""

MOST_STOLEN, MOST_ROUNDS = 0.05, 4
"""Samples of which a hypervisor took a larger part for other machines are taken again, so many times."""

STEADY = 1.25
"""Samples whose median is within this factor of their lower quartile agree."""


Meet = Callable[[], None]
"""Waits for the ranks that measure the same at the same time."""

IN_STEP = 9
"""Samples of ranks that begin each of them together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of one call: the lower `quartile_s` of the samples, and their median. `spread`: (max - min) / median over
    the repeats. `granted`: for which part of the time the calling thread had a core, 1 on other devices."""

    quartile_s: float
    median_s: float
    spread: float
    repeats: int
    granted: float = 1.0


class Rounds:
    """Samples, taken some at a time. Those that were disturbed count only where patience is used up."""

    def __init__(self) -> None:
        self.samples: list[float] = []
        self._set_aside = 0

    def take(self, samples: list[float], stolen: float) -> None:
        """`stolen`: which part of the cores' time was, while these were taken."""
        if stolen > MOST_STOLEN and self._set_aside < MOST_ROUNDS:
            self._set_aside += 1
        else:
            self.samples += samples


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
    """`repeats` timed samples after a warm-up: fewer where they would take longer than `budget_s`, more where they are
    cheap, and as many again, within twice the budget, as long as they disagree."""
    once(call, device)  # first touch of memory, choice of an algorithm
    first, inner = _in_a_row(call, device)
    sample = max(first * inner, 1e-9)
    count = max(1, min(repeats, int(budget_s / sample)), cheap_samples(sample))
    began, busy = time.perf_counter(), time.thread_time()
    rounds = Rounds()
    while not rounds.samples or again(rounds.samples, time.perf_counter() - began, budget_s):
        stolen = Stolen()
        rounds.take([once(lambda: _several(call, inner), device) / inner for _ in range(count)], stolen.share())
    samples = rounds.samples
    took = max(time.perf_counter() - began, 1e-9)
    return summary(samples, (time.thread_time() - busy) / took if device.type == "cpu" else 1.0)


def in_step(call: Callable[[], object], device: torch.device, meet: Meet) -> Timing:
    """Samples that several ranks begin together, as many on each: one that went on alone would end what the others
    are measured beside."""
    _, inner = _in_a_row(call, device) if _LEAST_S.get() > SAMPLE_S else (once(call, device), 1)
    samples = []
    for _ in range(IN_STEP):
        meet()
        samples.append(once(lambda: _several(call, inner), device) / inner)
    return summary(samples)


@contextmanager
def in_turns(turns: bool) -> Iterator[None]:
    """Where processes take turns on cores, samples inside last several of them."""
    before = _LEAST_S.set(SLICES_S if turns else SAMPLE_S)
    try:
        yield
    finally:
        _LEAST_S.reset(before)


def _in_a_row(call: Callable[[], object], device: torch.device) -> tuple[float, int]:
    """Seconds of a call, and how many of them a sample has."""
    first, least = min(once(call, device) for _ in range(2)), _LEAST_S.get()
    return first, max(1, math.ceil(least / max(first, 1e-9))) if first < least else 1


def again(samples: list[float], spent_s: float, budget_s: float) -> bool:
    """Whether more samples are worth their time: these disagree, and neither time nor patience is used up."""
    return not steady(samples) and spent_s < budget_s and len(samples) < MOST_SAMPLES


def quartile(samples: list[float]) -> float:
    """The lower quartile; the least of four or fewer."""
    return sorted(samples)[(len(samples) - 1) // 4]


def steady(samples: list[float]) -> bool:
    return statistics.median(samples) <= STEADY * quartile(samples)


def cheap_samples(sample_s: float) -> int:
    """How many samples of that length cost next to nothing."""
    return min(MOST_SAMPLES, int(CHEAP_S / sample_s))


def summary(samples: list[float], granted: float = 1.0) -> Timing:
    """Of samples in seconds."""
    median = statistics.median(samples)
    return Timing(
        quartile_s=quartile(samples),
        median_s=median,
        spread=(max(samples) - min(samples)) / median,
        repeats=len(samples),
        granted=granted,
    )


def _several(call: Callable[[], object], count: int) -> None:
    for _ in range(count):
        call()

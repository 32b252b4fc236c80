"""Time repeated calls, waiting for the device before and after each; define how much a probe measures.

A launch on a GPU returns before the work is done. Nothing else in the probe reads a clock around device work, so no
launch is timed without waiting for its end.

Other work on the machine only lengthens a call, so the lower quartile of the samples counts. The smallest one does not,
because it may be a burst that a rate-limited link let through. More samples are taken if the median is much longer.
Samples during which a hypervisor gave a virtual machine's cores to others are discarded.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from tutti.machine import StolenTime

SAMPLE_S, SLICES_S = 1e-3, 12e-3
"""Shortest sample normally, and if processes take turns on cores. Shorter calls are timed several in a row, so that the
clock and the waiting do not matter. Within one turn a process seems to have a whole core, so samples last several.
"""

_LEAST_S = ContextVar("_LEAST_S", default=SAMPLE_S)

CHEAP_S, MOST_SAMPLES = 0.05, 50
"""Short calls get more samples than asked for: as many as fit into the first, seconds, but at most the second. A
disturbance then moves the quartile less.
"""

MOST_STOLEN, MOST_ROUNDS = 0.05, 4
"""Samples are taken again if a hypervisor gave more than this fraction of their time to other machines, at most this
many times.
"""

STEADY = 1.25
"""Samples agree if their median is within this factor of their lower quartile."""


Barrier = Callable[[], None]
"""Waits for the ranks that measure the same at the same time."""

IN_STEP = 9
"""Number of samples that ranks take if they start each sample together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of one call.

    Attributes:
        quartile_s: the lower quartile of the samples.
        median_s: the median of the samples.
        spread: (max - min) / median over the samples.
        repeats: number of samples.
        granted: fraction of the time for which the calling thread had a core; 1 on other devices than CPUs.
    """

    quartile_s: float
    median_s: float
    spread: float
    repeats: int
    granted: float = 1.0


class Rounds:
    """Samples, taken several at a time. Disturbed samples are discarded, but at most `MOST_ROUNDS` times."""

    def __init__(self) -> None:
        self.samples: list[float] = []
        self._discarded = 0

    def take(self, samples: list[float], stolen: float) -> None:
        """Add samples.

        Args:
            samples: seconds of each.
            stolen: fraction of core time that a hypervisor took meanwhile.
        """
        if stolen > MOST_STOLEN and self._discarded < MOST_ROUNDS:
            self._discarded += 1
        else:
            self.samples += samples


def synchronize(device: torch.device) -> None:
    """Wait until all work given to the device is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def once(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call, from an idle device to an idle device."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def repeated(call: Callable[[], object], device: torch.device, *, repeats: int, budget_s: float) -> Timing:
    """Time samples of a call after a warm-up.

    There are fewer samples if they would take longer than the budget, and more if they are cheap. As many again are
    taken, within twice the budget, while they disagree.

    Args:
        call: what is timed.
        device: the device to wait for.
        repeats: number of samples.
        budget_s: bound on the seconds of a round of samples.
    """
    once(call, device)  # warm-up: touches memory, chooses an algorithm
    first, inner = _in_a_row(call, device)
    sample = max(first * inner, 1e-9)
    count = max(1, min(repeats, int(budget_s / sample)), cheap_samples(sample))
    began, busy = time.perf_counter(), time.thread_time()
    rounds = Rounds()
    while not rounds.samples or worth_more_samples(rounds.samples, time.perf_counter() - began, budget_s):
        stolen = StolenTime()
        rounds.take([once(lambda: _several(call, inner), device) / inner for _ in range(count)], stolen.share())
    samples = rounds.samples
    took = max(time.perf_counter() - began, 1e-9)
    return summary(samples, (time.thread_time() - busy) / took if device.type == "cpu" else 1.0)


def in_step(call: Callable[[], object], device: torch.device, barrier: Barrier) -> Timing:
    """Time samples that several ranks start together, as many on each.

    A rank that continued alone would no longer be measured beside the others.

    Args:
        call: what is timed.
        device: the device to wait for.
        barrier: waits for the other ranks before each sample.
    """
    _, inner = _in_a_row(call, device) if _LEAST_S.get() > SAMPLE_S else (once(call, device), 1)
    samples = []
    for _ in range(IN_STEP):
        barrier()
        samples.append(once(lambda: _several(call, inner), device) / inner)
    return summary(samples)


@contextmanager
def in_turns(turns: bool) -> Iterator[None]:
    """While open, samples last several turns of the scheduler if `turns` is true."""
    before = _LEAST_S.set(SLICES_S if turns else SAMPLE_S)
    try:
        yield
    finally:
        _LEAST_S.reset(before)


def _in_a_row(call: Callable[[], object], device: torch.device) -> tuple[float, int]:
    """Return the seconds of a call, and the number of calls per sample."""
    first, least = min(once(call, device) for _ in range(2)), _LEAST_S.get()
    return first, max(1, math.ceil(least / max(first, 1e-9))) if first < least else 1


def worth_more_samples(samples: list[float], spent_s: float, budget_s: float) -> bool:
    """Return whether to take more samples: these disagree, and neither time nor samples are used up."""
    return not steady(samples) and spent_s < budget_s and len(samples) < MOST_SAMPLES


def quartile(samples: list[float]) -> float:
    """Return the lower quartile; the smallest of four samples or fewer."""
    return sorted(samples)[(len(samples) - 1) // 4]


def steady(samples: list[float]) -> bool:
    """Return whether the samples agree."""
    return statistics.median(samples) <= STEADY * quartile(samples)


def cheap_samples(sample_s: float) -> int:
    """Return the number of samples of this length that fit into `CHEAP_S`."""
    return min(MOST_SAMPLES, int(CHEAP_S / sample_s))


def summary(samples: list[float], granted: float = 1.0) -> Timing:
    """Return the timing of samples in seconds."""
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


KIB, MIB = 2**10, 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much a probe measures: sizes, repeats and bounds on time.

    Attributes:
        gemm_sizes, cuda_gemm_sizes: sides of square matrix products on CPUs and on GPUs.
        concurrent_sizes: sizes measured again while all ranks of a host compute.
        threads: "ends": one and all cores; "powers": powers of two between them too.
        repeats: number of samples of each measurement.
        gemm_budget_s: bound on the repeats of one matrix product; a size predicted to take longer is skipped.
        link_nbytes, link_repeats: message sizes, and number of samples of each.
        link_budget_s: bound on the repeats of one message size.
        copy_nbytes: smallest size of the copied buffer; larger if the caches are larger.
        disk_nbytes: size of the file that is read.
        weight_size: side of the square weights that products of few rows stream, larger than a core's caches.
        weight_caches: how many times the caches' size all these weights have together.
        kinds: number of timings of convolutions and attention; linear layers get twice as many.
        codes_numel: sizes of gradients that are encoded.
        codes_budget_s: bound on all timings of codecs, after compilation.
    """

    gemm_sizes: tuple[int, ...]
    cuda_gemm_sizes: tuple[int, ...]
    concurrent_sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    threads: str
    repeats: int
    gemm_budget_s: float
    link_nbytes: tuple[int, ...]
    link_repeats: int
    link_budget_s: float
    copy_nbytes: int
    disk_nbytes: int
    weight_size: int = 0
    weight_caches: float = 0.0
    kinds: int = 0
    codes_numel: tuple[int, ...] = ()
    codes_budget_s: float = 0.0


QUICK = Effort(
    gemm_sizes=(256, 512, 1024, 2048),
    cuda_gemm_sizes=(512, 1024, 2048, 4096),
    concurrent_sizes=(256, 1024),
    dtypes=("float32", "bfloat16", "float16", "tf32", "float8"),
    threads="ends",
    repeats=3,
    gemm_budget_s=0.25,
    link_nbytes=(KIB, 16 * KIB, 256 * KIB, 2 * MIB, 16 * MIB),
    link_repeats=7,
    link_budget_s=0.5,
    copy_nbytes=64 * MIB,
    disk_nbytes=64 * MIB,
    weight_size=2048,
    weight_caches=4.0,
    kinds=2,
    codes_numel=(2**20,),
    codes_budget_s=1.5,
)
"""About 33 seconds on 2 cores for 2 ranks of one host (32.6 and 33.1, timed by hand), and 15 to 20 for 2 hosts of one
core each. The first time takes about 10 more, to compile the compression kernels.
"""

FULL = Effort(
    gemm_sizes=(128, 256, 512, 1024, 2048, 4000),
    cuda_gemm_sizes=(256, 512, 1024, 2048, 4096, 8192),
    concurrent_sizes=(256, 512, 1024, 2048),
    dtypes=("float64", "float32", "bfloat16", "float16", "tf32", "float8"),
    threads="powers",
    repeats=7,
    gemm_budget_s=3.0,
    link_nbytes=(KIB, 8 * KIB, 64 * KIB, 512 * KIB, 4 * MIB, 25 * MIB, 64 * MIB),
    link_repeats=15,
    link_budget_s=3.0,
    copy_nbytes=256 * MIB,
    disk_nbytes=512 * MIB,
    weight_size=2048,
    weight_caches=4.0,
    kinds=3,
    codes_numel=(2**14, 2**18, 2**22),
    codes_budget_s=6.0,
)
"""At most 90 seconds on 2 cores, and about 10 more the first time."""

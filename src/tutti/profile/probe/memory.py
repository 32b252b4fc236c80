"""Memory bandwidth by copying, and what a tiny operator costs."""

from collections.abc import Callable

import torch

from tutti.config.cluster import MemoryRate
from tutti.profile.probe import host, timing
from tutti.profile.probe.effort import Effort


def copy_nbytes(effort: Effort, cache_nbytes: int, memory_nbytes: int) -> int:
    """Size of the copied buffer: several times the caches, but at most a sixteenth of the memory."""
    return max(2**20, min(max(effort.copy_nbytes, 4 * cache_nbytes), memory_nbytes // 16))


def measure(
    device: torch.device,
    effort: Effort,
    *,
    threads: tuple[int, ...],
    memory_nbytes: int,
    concurrent: int = 1,
    meet: timing.Meet | None = None,
) -> tuple[MemoryRate, ...]:
    """Bytes read plus bytes written a second, for each number of threads. `meet`: of those that copy at the same time
    in the same memory, before each sample: two that copied each when it came to it saw 22 GB/s where both got 15.
    """
    nbytes = copy_nbytes(effort, host.cache_nbytes(), memory_nbytes // concurrent)
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    rates = []
    before = torch.get_num_threads()
    for count in threads:
        torch.set_num_threads(count)
        call = _copy(source, target)
        if meet is None:
            took = timing.repeated(call, device, repeats=effort.repeats, budget_s=effort.gemm_budget_s)
        else:
            took = timing.in_step(call, device, meet)
        rates.append(
            MemoryRate(
                threads=count, bytes_per_s=2 * nbytes / took.quartile_s, spread=took.spread, concurrent=concurrent
            )
        )
    torch.set_num_threads(before)
    return tuple(rates)


def kernel_overhead_s(device: torch.device) -> float:
    """Seconds of adding two vectors of 16 numbers: almost nothing but the call."""
    small = torch.ones(16, device=device)
    return timing.repeated(lambda: small + small, device, repeats=7, budget_s=0.1).quartile_s


def _copy(source: torch.Tensor, target: torch.Tensor) -> Callable[[], object]:
    return lambda: target.copy_(source)

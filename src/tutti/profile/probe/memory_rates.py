"""Memory bandwidth by copying, the cost of a tiny operator, and the speed of reading a file from disk."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import tutti.profile.probe.host_facts as host_facts
import tutti.profile.probe.probe_timing as probe_timing
from tutti.config.cluster import DiskSpec, MemoryRate
from tutti.direct_io import ALIGNMENT, GROUP_NBYTES, DirectFile, aligned, aligned_part, is_in_memory
from tutti.errors import SpecError
from tutti.profile.probe.probe_timing import Effort


def copy_nbytes(effort: Effort, cache_nbytes: int, memory_nbytes: int) -> int:
    """Return the size of the copied buffer: several times the caches, but at most a sixteenth of the memory.

    Args:
        effort: gives the smallest size.
        cache_nbytes: size of the caches.
        memory_nbytes: size of the memory.
    """
    return max(2**20, min(max(effort.copy_nbytes, 4 * cache_nbytes), memory_nbytes // 16))


def measure(
    device: torch.device,
    effort: Effort,
    *,
    threads: tuple[int, ...],
    memory_nbytes: int,
    concurrent: int = 1,
    barrier: probe_timing.Barrier | None = None,
) -> tuple[MemoryRate, ...]:
    """Measure the bytes read plus bytes written per second, for each number of threads.

    Args:
        device: the device to measure.
        effort: how much to measure.
        threads: the numbers of threads to measure with.
        memory_nbytes: memory of the device.
        concurrent: number of processes of the host that copy at once.
        barrier: waits, before each sample, for ranks that copy at the same time in the same memory. Two ranks that did
            not wait for each other saw 22 GB/s where both really got 15.
    """
    nbytes = copy_nbytes(effort, host_facts.cache_nbytes(), memory_nbytes // concurrent)
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    rates = []
    before = torch.get_num_threads()
    for count in threads:
        torch.set_num_threads(count)
        call = _copy(source, target)
        if barrier is None:
            took = probe_timing.repeated(call, device, repeats=effort.repeats, budget_s=effort.gemm_budget_s)
        else:
            took = probe_timing.in_step(call, device, barrier)
        rates.append(
            MemoryRate(
                threads=count, bytes_per_s=2 * nbytes / took.quartile_s, spread=took.spread, concurrent=concurrent
            )
        )
    torch.set_num_threads(before)
    return tuple(rates)


def kernel_overhead_s(device: torch.device) -> float:
    """Return the seconds of adding two vectors of 16 numbers, almost all of them for the call itself."""
    small = torch.ones(16, device=device)
    return probe_timing.repeated(lambda: small + small, device, repeats=7, budget_s=0.1).quartile_s


def _copy(source: torch.Tensor, target: torch.Tensor) -> Callable[[], object]:
    return lambda: target.copy_(source)


BLOCK = 2**22


def measure_disk(folder: Path, nbytes: int) -> DiskSpec:
    """Write a file of `nbytes` bytes past the page cache and read it, in groups as offloaded state is.

    Args:
        folder: an existing folder.
        nbytes: size of the file.

    Raises:
        SpecError: the folder does not exist, is not writable, is full, or is in memory.
    """
    if is_in_memory(folder):
        raise SpecError(f"nvme_path: {folder} is a file system in memory; name a folder on a disk")
    group = min(GROUP_NBYTES, aligned(nbytes))
    count = max(1, nbytes // group)
    buffer = aligned_part(torch.ones(group + ALIGNMENT, dtype=torch.uint8), group)
    try:
        free = shutil.disk_usage(folder).free
        file = DirectFile(folder, "the file of the probe")
        file.reserve(count * group)
    except OSError as error:
        raise SpecError(
            f"nvme_path: {folder} cannot hold {nbytes / 2**20:.0f} MiB ({error.strerror}); name an existing, writable "
            "folder with more free space"
        ) from None
    for number in range(count):  # the first write of a block costs more than the later ones, which state makes
        file.write(buffer, number * group)
    rates = []
    for call in (file.read, file.write):
        start = time.perf_counter()
        for number in range(count):
            call(buffer, number * group)
        rates.append(count * group / (time.perf_counter() - start))
    return DiskSpec(path=str(folder.resolve()), nbytes=free, read_bytes_per_s=rates[0], write_bytes_per_s=rates[1])


def read_bytes_per_s(folder: Path, nbytes: int) -> float | None:
    """Write a file of `nbytes` random bytes, drop it from the page cache and read it once.

    Args:
        folder: where to write the file.
        nbytes: size of the file.

    Returns:
        Bytes per second. None if the folder cannot hold the file (no space, read-only), or if the system cannot drop it
        from the cache.
    """
    if not hasattr(os, "posix_fadvise"):
        return None
    try:
        if shutil.disk_usage(folder).free < 4 * nbytes:
            return None
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".tutti-probe-") as file:
            return _read(file.fileno(), nbytes)
    except OSError:
        return None


def _read(descriptor: int, nbytes: int) -> float:
    block = os.urandom(min(BLOCK, nbytes))
    for _ in range(max(1, nbytes // len(block))):
        os.write(descriptor, block)
    os.fsync(descriptor)  # only clean pages can be dropped
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.lseek(descriptor, 0, os.SEEK_SET)
    total, buffer = 0, bytearray(len(block))
    start = time.perf_counter()
    while count := os.readv(descriptor, [buffer]):
        total += count
    return total / (time.perf_counter() - start)

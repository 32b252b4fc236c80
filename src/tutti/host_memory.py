"""Host memory in a training loop: how the C library's allocator is kept from returning pages between steps.

glibc returns large blocks to the system when they are freed. A training loop frees and requests the same gradients and
activations in every step, so it pays a page fault for each of their pages in every step. A heap that keeps freed blocks
pays none. But it fragments where long-lived blocks (parameters, buckets, optimizer state) lie between short-lived ones.

A run therefore starts with a separate mapping for each large block. Once all long-lived memory is allocated, it keeps
freed memory. The heap is then larger than the blocks in it. A run keeps the separate mappings, which are slower but
need no such margin, if it was started with `--frugal` or if the host has little free memory.

A heap that keeps growing goes back to separate mappings, too. It grows when small objects lie in the gaps beside large
blocks, so that the next block of the same size no longer fits. `tutti run` starts ranks with a setting of the C library
that prevents this (launch/launch_environment.py); other launchers do not.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # <malloc.h>
_MALLOPT_MAX = 2**31 - 1  # mallopt takes an int

LARGE_NBYTES = 2**17
"""Blocks of at least this size may get separate mappings: glibc's own threshold, before it adapts."""

WARMUP_UPDATES = 2
"""Updates after which all long-lived memory is allocated.

The first update creates the optimizer state; the second runs with the final buckets.
"""


HEAP_GROWTH = 0.5
"""Margin by which a heap that keeps freed memory may exceed the process' peak, as a fraction of that peak.

The measured growth was a third.
"""

INITIAL_PAUSE = 32
"""Updates for which freed memory is not kept after the heap grew beyond its margin for the first time."""


def map_large_blocks() -> bool:
    """Give each large block a separate mapping, which ends when the block is freed; return whether that works."""
    _state.keeps = False
    return _mallopt(_TRIM_THRESHOLD, _MALLOPT_MAX) and _mallopt(_MMAP_THRESHOLD, LARGE_NBYTES)


def keep_memory_when_steady(ranks_here: int, *, frugal: bool) -> bool:
    """Keep freed memory from now on, now that all long-lived memory is allocated.

    Args:
        ranks_here: processes of this host that do the same.
        frugal: whether the user asked for freed memory to be given back.

    Returns:
        Whether freed memory is kept; False if `frugal`, or if the host has too little free memory.
    """
    _state.pause, _state.patience = 0, INITIAL_PAUSE
    return not frugal and _has_free_memory(ranks_here) and _start_keeping()


def _start_keeping() -> bool:
    _state.most = int(_end_of_heap() + (1 + HEAP_GROWTH) * _peak_nbytes())
    return keep_freed_memory()


def _has_free_memory(ranks_here: int) -> bool:
    resident = psutil.Process().memory_info().rss
    return psutil.virtual_memory().available > HEAP_GROWTH * resident * ranks_here


def keep_freed_memory() -> bool:
    """Let the C library's allocator keep freed memory; return whether it does (never outside glibc)."""
    _state.keeps = _mallopt(_TRIM_THRESHOLD, _MALLOPT_MAX) and _mallopt(_MMAP_THRESHOLD, _MALLOPT_MAX)
    return _state.keeps


def limit_heap_growth() -> None:
    """After an update: stop keeping freed memory if the heap has grown beyond its margin.

    Keeping starts again after a pause, which is twice as long each time.
    """
    heap = _state
    if heap.pause:
        heap.pause -= 1
        if not heap.pause:
            _start_keeping()
    elif heap.keeps and _end_of_heap() > heap.most:
        map_large_blocks()
        ctypes.CDLL(None).malloc_trim(0)
        heap.pause, heap.patience = heap.patience, 2 * heap.patience
        with suppress(OSError):  # resets the peak, so that the next limit does not count the fragmented heap
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


@contextmanager
def long_lived_blocks() -> Iterator[None]:
    """Inside, large blocks get separate mappings; afterwards the allocator's setting is as before.

    For blocks that outlive the step, or that should return to the system when they are freed. glibc first looks for
    room in the memory that it kept before, and a block that fits there gets no mapping.
    """
    kept = _state.keeps
    map_large_blocks()
    try:
        yield
    finally:
        if kept:
            keep_freed_memory()


@dataclass(slots=True)
class _AllocatorState:
    """The allocator's last setting, which the C library cannot report.

    Attributes:
        keeps: whether freed memory is kept.
        most: highest address that the heap may end at while it is kept.
        pause: updates until it is kept again; 0 if no pause is running.
        patience: length of the next pause, in updates.
    """

    keeps: bool = False
    most: int = 0
    pause: int = 0
    patience: int = INITIAL_PAUSE


_state = _AllocatorState()


def _peak_nbytes() -> int:
    """Return the process' peak resident memory; 0 if the system does not report it."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


@cache
def _sbrk() -> Callable[[int], int | None]:
    """The C library's sbrk; to look it up takes 25 microseconds."""
    sbrk = ctypes.CDLL(None).sbrk
    sbrk.restype = ctypes.c_void_p
    return sbrk


def _end_of_heap() -> int:
    return int(_sbrk()(0) or 0)


def _mallopt(parameter: int, value: int) -> bool:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(parameter, value))

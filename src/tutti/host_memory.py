"""Memory of the host: what lasts lies by itself, and what a step frees the next step gets back without asking.

glibc returns large blocks to the system when they are freed, so a training loop, which frees and asks for the same
gradients and activations in every step, pays a page fault for each of their pages in every step. A heap that keeps
them pays none, but is cut to pieces where what lasts (parameters, buckets, optimizer state) lies between what comes
and goes. So a run begins with a mapping of its own for each large block, and keeps freed memory once all that lasts
is there. Such a heap is larger than what it holds; so a run that is asked to be frugal, or has little room left, goes
on as it began: slower, and with the memory that arithmetic says. So does one whose heap grows on and on: small objects
in the slivers beside large blocks can make each too small for the next like it. `tutti run` starts ranks with a setting
of the C library that prevents it (launch/environment.py); other launchers do not.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # <malloc.h>
_MALLOPT_MAX = 2**31 - 1  # mallopt takes an int

LARGE_NBYTES = 2**17
"""Blocks from this size on may have mappings of their own: glibc's own threshold, before it adapts."""

WARMUP_UPDATES = 2
"""Updates after which all that lasts is there: the first makes optimizer state, the second has the final buckets."""


HEAP_GROWTH = 0.5
"""Of what a process has, what it may come to have besides when it keeps what is freed; a third was measured."""

INITIAL_PAUSE = 32
"""Updates without a heap that is kept, after one went on to grow for the first time."""


def map_large_blocks() -> bool:
    """Give each large block a mapping of its own, which ends when the block is freed; returns whether it did."""
    _state.keeps = False
    return _mallopt(_TRIM_THRESHOLD, _MALLOPT_MAX) and _mallopt(_MMAP_THRESHOLD, LARGE_NBYTES)


def keep_memory_when_steady(ranks_here: int, *, frugal: bool) -> bool:
    """All that lasts is there: keep what is freed from now on, unless that is not wished or the host has no room for
    it. `ranks_here`: processes of this host that do the same. Returns whether it is kept.
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
    """Let the C library's allocator keep what is freed; returns whether it did (it does nothing outside glibc)."""
    _state.keeps = _mallopt(_TRIM_THRESHOLD, _MALLOPT_MAX) and _mallopt(_MMAP_THRESHOLD, _MALLOPT_MAX)
    return _state.keeps


def limit_heap_growth() -> None:
    """After an update: give up a heap that goes on growing, as one does whose freed blocks no longer fit what is asked
    for; and keep one again after a while, each time a longer one."""
    heap = _state
    if heap.pause:
        heap.pause -= 1
        if not heap.pause:
            _start_keeping()
    elif heap.keeps and _end_of_heap() > heap.most:
        map_large_blocks()
        ctypes.CDLL(None).malloc_trim(0)
        heap.pause, heap.patience = heap.patience, 2 * heap.patience
        with suppress(OSError):  # what is needed without it is found anew
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


@contextmanager
def long_lived_blocks() -> Iterator[None]:
    """Inside, large blocks are made that last, or that shall go back to the system; afterwards all is as it was.

    What has room in memory that was kept before is put there all the same: glibc looks there first.
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
    """How the process' allocator was set last: the C library does not say. `keeps`: freed memory, in a heap that ends
    at `most` there. `pause`: updates until it keeps it again, `patience`: how many the next time."""

    keeps: bool = False
    most: int = 0
    pause: int = 0
    patience: int = INITIAL_PAUSE


_state = _AllocatorState()


def _peak_nbytes() -> int:
    """The most that this process has had of the host's memory; 0 where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def _end_of_heap() -> int:
    sbrk = ctypes.CDLL(None).sbrk
    sbrk.restype = ctypes.c_void_p
    return int(sbrk(0) or 0)


def _mallopt(parameter: int, value: int) -> bool:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(parameter, value))

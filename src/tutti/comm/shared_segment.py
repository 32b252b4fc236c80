"""Shared memory segments of one host, and the POSIX semaphores and liveness checks built on them.

A segment is an anonymous file in memory. It has no name, no mount limits its size, and it disappears with the last
process that has it open. Other processes of the same user open it as /proc/PID/fd/N.

Semaphores come from the C library, so that a waiting rank sleeps instead of spinning: ranks share cores with compute.
Posting and waiting order memory: values written before a post are visible after the matching wait.
"""

import ctypes
import errno
import mmap
import os
import re
import select
import time
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from tutti.surviving_rank import SURVIVING_RANK

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAME = "tutti-segment"

Memory = ctypes.Array[ctypes.c_char]


class SharedSegment:
    """Shared memory that this rank owns.

    Args:
        nbytes: size in bytes; at least one byte is allocated.

    Raises:
        OSError: the system provides no shared memory of this size.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = max(nbytes, 1)
        self.file = os.memfd_create(_segment_name())
        try:
            os.ftruncate(self.file, self.nbytes)
            self.memory = _map_file(self.file, self.nbytes)
        except OSError:
            os.close(self.file)
            raise
        weakref.finalize(self, os.close, self.file).atexit = False  # at exit, other ranks may still open it

    def tensor(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """Return the first `numel` values as a tensor, initially zero. The memory lives as long as any such tensor."""
        return first_values(self.memory, dtype, numel)


def attach_segment(process: int, file: int, nbytes: int) -> Memory:
    """Map a segment of another process of this host.

    Args:
        process: id of the process that owns the segment.
        file: its file descriptor of the segment.
        nbytes: size of the segment.

    Raises:
        OSError: the process has ended, or this process may not open its files.
    """
    handle = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR)
    try:
        return _map_file(handle, nbytes)
    finally:
        os.close(handle)


def _map_file(file: int, nbytes: int) -> Memory:
    """Map a file into memory until nothing refers to it. Python's mmap would keep one more file open per mapping."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    address = library.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "shared memory could not be mapped")
    memory = (ctypes.c_char * nbytes).from_address(address)
    weakref.finalize(memory, library.munmap, address, nbytes).atexit = False  # tensors may be used during exit
    return memory


def first_values(memory: Memory, dtype: torch.dtype, numel: int) -> torch.Tensor:
    """Return the first `numel` values of a segment's memory, flat; `numel` may be 0."""
    return torch.frombuffer(memory, dtype=dtype, count=numel) if numel else torch.empty(0, dtype=dtype)


def host_identity() -> str:
    """Return a text that is equal for processes that share memory and count as one host; "" where it is unknown.

    It consists of the boot's id and the namespaces of process ids and network. The hosts that `tutti lab` makes on one
    machine have separate namespaces, so they count as separate hosts.
    """
    try:
        namespaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "net")]
        return " ".join([_BOOT.read_text().strip(), *namespaces])
    except OSError:
        return ""


def attached_resident_nbytes() -> int:
    """Return the bytes resident in this process that belong to segments of other ranks.

    Their owners count these bytes too, so a sum over ranks must leave them out here.
    """
    try:
        text = Path("/proc/self/smaps").read_text()
    except OSError:
        return 0
    # The first line of a mapping ends with its name; the lines after it give its sizes.
    segments = re.findall(rf"/memfd:({_NAME}-\d+)\b.*?^Rss:\s+(\d+)", text, re.MULTILINE | re.DOTALL)
    return sum(1024 * int(kib) for name, kib in segments if name != _segment_name())


def _segment_name() -> str:
    return f"{_NAME}-{os.getpid()}"


SPACING = 64
"""Bytes from one semaphore to the next: a cache line. The C library's semaphores need 32 bytes or fewer."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def semaphores_available() -> bool:
    """Return whether the C library has process-shared semaphores and anonymous shared memory."""
    try:
        library = ctypes.CDLL(None)
        return all(hasattr(library, name) for name in ("sem_init", "sem_post", "sem_timedwait", "memfd_create"))
    except (OSError, TypeError):
        return False


class Semaphores:
    """POSIX semaphores at the start of a shared memory segment.

    Args:
        memory: the shared memory.
        count: number of semaphores.
        create: whether this rank initialises them; exactly one rank must.
    """

    def __init__(self, memory: Memory, count: int, *, create: bool) -> None:
        self._memory = memory
        self._first = ctypes.addressof(memory)
        self._library = ctypes.CDLL(None, use_errno=True)
        self._post, self._try = self._library.sem_post, self._library.sem_trywait
        for function in (self._post, self._try):
            function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_int
        if create:
            initialise = self._library.sem_init
            initialise.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
            for index in range(count):
                self._checked(initialise(self._address(index), 1, 0))

    def post(self, index: int) -> None:
        """Increment a semaphore, which wakes a rank that waits for it."""
        self._checked(self._post(self._first + SPACING * index))

    def take(self, index: int) -> bool:
        """Decrement a semaphore if it is positive; return whether it was."""
        return bool(self._try(self._first + SPACING * index) == 0)

    def wait(self, index: int, seconds: float) -> bool:
        """Decrement a semaphore, asleep for at most `seconds` until it is positive; return whether it was."""
        end = time.time() + seconds  # sem_timedwait takes this clock only; callers keep their own deadline
        until = _Timespec(int(end), int(end % 1 * 1e9))
        timed = self._library.sem_timedwait
        timed.argtypes, timed.restype = [ctypes.c_void_p, ctypes.POINTER(_Timespec)], ctypes.c_int
        while timed(self._address(index), ctypes.byref(until)) != 0:
            problem = ctypes.get_errno()
            if problem == errno.ETIMEDOUT:
                return False
            if problem != errno.EINTR:
                raise OSError(problem, "waiting for a semaphore in shared memory failed (sem_timedwait)")
        return True

    def _address(self, index: int) -> int:
        return self._first + SPACING * index

    def _checked(self, result: int) -> None:
        if result != 0:
            raise OSError(ctypes.get_errno(), "an operation on a semaphore in shared memory failed")


_LIVENESS_INTERVAL_S = 0.05
"""Seconds between checks that the ranks waited for are still alive."""


class Signals:
    """Semaphores whose waits notice that another rank has ended.

    Args:
        memory: shared memory that begins with the semaphores.
        count: number of semaphores.
        processes: process ids of all ranks.
        timeout_s: the longest wait in seconds.
        create: whether this rank initialises the semaphores.
    """

    def __init__(self, memory: Memory, count: int, processes: Sequence[int], timeout_s: float, *, create: bool) -> None:
        self._semaphores = Semaphores(memory, count, create=create)
        self.post, self.take = self._semaphores.post, self._semaphores.take
        self._timeout_s = timeout_s
        self._handles = [os.pidfd_open(process) for process in processes]
        weakref.finalize(self, _close_pidfds, self._handles).atexit = False  # at exit, the system closes them

    def wait(self, index: int, ranks: Iterable[int]) -> None:
        """Wait for semaphore `index`, which one of `ranks` posts, and decrement it.

        Raises:
            RuntimeError: one of the ranks has ended, or nobody posted in time.
        """
        if self.take(index):
            return
        end = time.monotonic() + self._timeout_s
        while not self._semaphores.wait(index, _LIVENESS_INTERVAL_S):
            SURVIVING_RANK.check()
            gone = self._gone(ranks)
            if gone and self.take(index):  # it posted just before it ended
                return
            if gone:
                raise RuntimeError(
                    f"Connection closed by peer: the process of rank {gone[0]} in this host's local group has ended"
                )
            if time.monotonic() > end:
                raise RuntimeError(f"Timed out waiting {self._timeout_s:g} s for other ranks of this host")

    def _gone(self, ranks: Iterable[int]) -> list[int]:
        """Return the ranks whose processes have ended."""
        poll = select.poll()
        rank_of = {self._handles[rank]: rank for rank in ranks}
        for handle in rank_of:
            poll.register(handle, select.POLLIN)
        return [rank_of[handle] for handle, _ in poll.poll(0)]


def _close_pidfds(handles: list[int]) -> None:
    for handle in handles:
        os.close(handle)

"""POSIX semaphores in shared memory. Posting and waiting order memory: what was written before is seen after.

They come from the C library, which also lets a rank sleep instead of spinning: ranks share cores with compute.
"""

import ctypes
import errno
import time

from tutti.comm.rooms import Memory

SPACING = 64
"""Bytes from one semaphore to the next: a cache line; the C library's needs 32 or fewer."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def available() -> bool:
    """Whether the C library has process-shared semaphores and anonymous shared memory."""
    try:
        library = ctypes.CDLL(None)
        return all(hasattr(library, name) for name in ("sem_init", "sem_post", "sem_timedwait", "memfd_create"))
    except (OSError, TypeError):
        return False


class Semaphores:
    """`count` semaphores at the start of `memory`. One rank makes them with `create`; the others only use them."""

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
        """Add one, and wake a rank that waits for it."""
        self._checked(self._post(self._first + SPACING * index))

    def take(self, index: int) -> bool:
        """Take one if there is one."""
        return bool(self._try(self._first + SPACING * index) == 0)

    def wait(self, index: int, seconds: float) -> bool:
        """Take one, asleep for at most `seconds`; returns whether there was one."""
        end = time.time() + seconds  # sem_timedwait knows this clock only; callers watch their own time
        until = _Timespec(int(end), int(end % 1 * 1e9))
        timed = self._library.sem_timedwait
        timed.argtypes, timed.restype = [ctypes.c_void_p, ctypes.POINTER(_Timespec)], ctypes.c_int
        while timed(self._address(index), ctypes.byref(until)) != 0:
            problem = ctypes.get_errno()
            if problem == errno.ETIMEDOUT:
                return False
            if problem != errno.EINTR:
                raise OSError(problem, "sem_timedwait")
        return True

    def _address(self, index: int) -> int:
        return self._first + SPACING * index

    def _checked(self, result: int) -> None:
        if result != 0:
            raise OSError(ctypes.get_errno(), "a semaphore in shared memory")

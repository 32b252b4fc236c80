"""Rooms: memory of one rank that the other ranks of its host can read and write.

A room is an anonymous file in memory: it has no name, no mount limits its size, and it ends with the processes that
have it open, however they end. Others of the same user find it as /proc/PID/fd/N.
"""

import ctypes
import mmap
import os
import re
import weakref
from pathlib import Path

import torch

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAME = "tutti-room"

Memory = ctypes.Array[ctypes.c_char]


class Room:
    """`nbytes` of shared memory that this rank owns. Raises OSError where the system gives none."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = max(nbytes, 1)
        self.file = os.memfd_create(_own_name())
        try:
            os.ftruncate(self.file, self.nbytes)
            self.memory = _map(self.file, self.nbytes)
        except OSError:
            os.close(self.file)
            raise
        weakref.finalize(self, os.close, self.file).atexit = False  # others may still ask for it then

    def tensor(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """The first `numel` values, zeros at first, which live as long as any tensor of them does."""
        return first_values(self.memory, dtype, numel)


def attach(process: int, file: int, nbytes: int) -> Memory:
    """A room of another process of this host. Raises OSError where this one may not see it."""
    handle = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR)
    try:
        return _map(handle, nbytes)
    finally:
        os.close(handle)


def _map(file: int, nbytes: int) -> Memory:
    """A file's bytes, until nothing refers to them. Python's own mmap would keep one more file open for each."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    place = library.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file, 0)
    if place in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "shared memory could not be mapped")
    memory = (ctypes.c_char * nbytes).from_address(place)
    weakref.finalize(memory, library.munmap, place, nbytes).atexit = False  # tensors may outlive the interpreter's end
    return memory


def first_values(memory: Memory, dtype: torch.dtype, numel: int) -> torch.Tensor:
    """The first `numel` values, which may be none, of a room's memory."""
    return torch.frombuffer(memory, dtype=dtype, count=numel) if numel else torch.empty(0, dtype=dtype)


def host_identity() -> str:
    """What processes share that can share memory, and that count as one host: a boot, and the namespaces in which
    processes see each other and have their network (hosts of a laboratory on one machine are hosts of their own).
    """
    try:
        namespaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "net")]
        return " ".join([_BOOT.read_text().strip(), *namespaces])
    except OSError:
        return ""


def borrowed_nbytes() -> int:
    """Bytes resident in this process that belong to rooms of other ranks: their owners count them, too."""
    try:
        text = Path("/proc/self/smaps").read_text()
    except OSError:
        return 0
    # A mapping's first line ends with its name; lines of its figures follow.
    rooms = re.findall(rf"/memfd:({_NAME}-\d+)\b.*?^Rss:\s+(\d+)", text, re.MULTILINE | re.DOTALL)
    return sum(1024 * int(kib) for name, kib in rooms if name != _own_name())


def _own_name() -> str:
    return f"{_NAME}-{os.getpid()}"

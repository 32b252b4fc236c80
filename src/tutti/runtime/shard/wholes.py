"""Memory of a unit's whole parameters, which comes and goes many times in a step, always at one place.

On a GPU, and for small units, it is a storage that is resized: torch's allocator has it in between. Large ones on the
host have pages of their own. In the heap, activations would take the place of one that has gone, so that the next does
not fit there: the heap of a GPT at level 3 on 4 ranks grew by half of all that a rank held. Huge pages make asking the
system for memory again and again cheap: without them it takes several times as long (see docs/measurements.md).
"""

import ctypes
import mmap
import weakref
from pathlib import Path
from typing import Protocol

import torch

from tutti.runtime.shard.rooms import rounded

HUGE_NBYTES = 2**21
LEAST_NBYTES = 2 * HUGE_NBYTES
"""Units from this size on have pages of their own."""

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_NONE, _READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE


class Memory(Protocol):
    """`tensor`: flat; it may be used between `have` and `free`, and views of it come back with it."""

    tensor: torch.Tensor

    def have(self) -> None:
        """Have memory, with anything in it."""

    def free(self) -> None:
        """Give it back; who reaches for it ends the process, rather than compute with what is not there."""


def memory_of(numel: int, dtype: torch.dtype, device: torch.device) -> Memory:
    """Memory for `numel` values, none of it there yet."""
    nbytes = numel * dtype.itemsize
    if device.type == "cpu" and nbytes >= LEAST_NBYTES and huge_pages():
        try:
            return Pages(nbytes, dtype)
        except OSError:
            pass  # a system that does not give such memory
    return Resized(nbytes, dtype, device)


class Resized:
    """A storage that is empty in between."""

    def __init__(self, nbytes: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.empty(0, dtype=dtype, device=device)
        self._nbytes = rounded(nbytes)  # so that equal units ask for equal amounts

    def have(self) -> None:
        self.tensor.untyped_storage().resize_(self._nbytes)

    def free(self) -> None:
        self.tensor.untyped_storage().resize_(0)


class Pages:
    """A range of addresses, huge pages in it as far as they fit, and no pages in between. Raises OSError where the
    system does not give that.
    """

    def __init__(self, nbytes: int, dtype: torch.dtype) -> None:
        self._library = _library()
        self._nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        start = self._library.mmap(None, self._nbytes + HUGE_NBYTES, _NONE, flags, -1, 0)
        if start in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), "no memory could be mapped")
        self._start = -(-start // HUGE_NBYTES) * HUGE_NBYTES
        memory = (ctypes.c_char * self._nbytes).from_address(self._start)
        weakref.finalize(memory, self._library.munmap, start, self._nbytes + HUGE_NBYTES).atexit = False
        self._checked("madvise", mmap.MADV_HUGEPAGE)
        self.tensor = torch.frombuffer(memory, dtype=dtype)

    def have(self) -> None:
        self._checked("mprotect", _READ_WRITE)

    def free(self) -> None:
        self._checked("madvise", mmap.MADV_DONTNEED)
        self._checked("mprotect", _NONE)

    def _checked(self, name: str, argument: int) -> None:
        if getattr(self._library, name)(self._start, self._nbytes, argument):
            raise OSError(ctypes.get_errno(), f"{name} refused")


def huge_pages() -> bool:
    """Whether the system gives huge pages to who asks for them."""
    try:
        return "[never]" not in _HUGE_PAGES.read_text()
    except OSError:
        return False


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    for name in ("madvise", "mprotect"):
        getattr(library, name).argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library

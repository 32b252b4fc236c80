"""Buffers for gathered parameters: allocated and freed many times a step, always at the same address.

On a GPU, and for small units, the buffer is a storage that is resized; torch's allocator keeps the memory in between.
Large buffers on the host are mapped pages of their own. In the heap, activations would take the place of a freed
buffer, and the next one would not fit there: a GPT at level 3 on 4 ranks held a third more memory. Huge pages make
repeated allocation cheap; without them it takes several times as long (docs/traps.md, "Memory of a process").
"""

import ctypes
import mmap
from pathlib import Path
from typing import Protocol

import torch

HUGE_NBYTES = 2**21
LEAST_NBYTES = 2 * HUGE_NBYTES
"""Buffers of this size or more have pages of their own."""

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class Memory(Protocol):
    """A flat buffer whose memory is there between `have` and `free`.

    Views of `tensor` stay valid: they see the memory again after the next `have`.
    """

    tensor: torch.Tensor

    def have(self) -> None:
        """Allocate the memory; its contents are undefined."""

    def free(self) -> None:
        """Free the memory. A later access ends the process instead of computing with wrong values."""


def memory_of(numel: int, dtype: torch.dtype, device: torch.device) -> Memory:
    """A buffer for `numel` values, without memory yet."""
    nbytes = numel * dtype.itemsize
    if device.type == "cpu" and nbytes >= LEAST_NBYTES and huge_pages():
        try:
            return Pages(nbytes, dtype)
        except OSError:
            pass  # this system does not provide such memory
    return Resized(nbytes, dtype, device)


class Resized:
    """A storage that is resized to 0 while it is not in use."""

    def __init__(self, nbytes: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.empty(0, dtype=dtype, device=device)
        self._nbytes = rounded(nbytes)  # so that equal units allocate equal amounts

    def have(self) -> None:
        self.tensor.untyped_storage().resize_(self._nbytes)

    def free(self) -> None:
        self.tensor.untyped_storage().resize_(0)


class Pages:
    """A range of addresses with huge pages where they fit, and without pages while it is not in use.

    Raises:
        OSError: the system does not support this.
    """

    def __init__(self, nbytes: int, dtype: torch.dtype) -> None:
        self._nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = mmap.mmap(-1, self._nbytes + HUGE_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._offset = -start % HUGE_NBYTES
        self._start = start + self._offset
        self._memory.madvise(mmap.MADV_HUGEPAGE, self._offset, self._nbytes)
        self.tensor = torch.frombuffer(
            self._memory, dtype=dtype, count=self._nbytes // dtype.itemsize, offset=self._offset
        )

    def have(self) -> None:
        self._protect(mmap.PROT_READ | mmap.PROT_WRITE)

    def free(self) -> None:
        self._memory.madvise(mmap.MADV_DONTNEED, self._offset, self._nbytes)
        self._protect(0)

    def _protect(self, what: int) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        if library.mprotect(ctypes.c_void_p(self._start), ctypes.c_size_t(self._nbytes), what):
            raise OSError(ctypes.get_errno(), "memory could not be protected")


def huge_pages() -> bool:
    """Whether the system gives transparent huge pages on request."""
    try:
        return "[never]" not in _HUGE_PAGES.read_text()
    except OSError:
        return False


class Rooms:
    """A pool of flat buffers; a returned buffer serves the next request of about its size."""

    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer with undefined contents."""
        if device.type != "cpu":
            return torch.empty(numel, dtype=dtype, device=device)
        nbytes = rounded(numel * dtype.itemsize)
        free = self._free.get(nbytes)
        memory = free.pop() if free else torch.empty(nbytes, dtype=torch.uint8)
        return memory.view(dtype)[:numel]

    def give(self, buffer: torch.Tensor) -> None:
        """Return a buffer from `take`, or a view of all of it."""
        if buffer.device.type == "cpu":
            storage = buffer.untyped_storage()
            memory = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
            self._free.setdefault(storage.nbytes(), []).append(memory)


def rounded(nbytes: int) -> int:
    """Round up to a 32nd of a power of two, so that equal blocks ask for equal sizes."""
    step = max(1 << max(max(nbytes - 1, 1).bit_length() - 5, 6), 64)
    return -(-nbytes // step) * step

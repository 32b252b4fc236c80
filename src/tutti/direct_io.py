"""Files without a name that are read and written past the page cache, and that also appear as memory.

Linux frees such a file when the last process that has it open ends, however it ends. So no run can leave one behind.
Where the file system does not take direct I/O, the same calls go through the page cache.
"""

import errno
import fcntl
import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from tutti.errors import TrainingError

ALIGNMENT = 4096
"""Offsets, sizes and addresses of direct I/O are multiples of it: a multiple of the blocks of usual disks."""

PIECE_NBYTES = 4 * 2**20
"""A transfer is cut into pieces of this size, of which `THREADS` are on their way at once."""

THREADS = 4

GROUP_NBYTES = 64 * 2**20
"""Optimizer state is read and written in groups of at most this size, or of one parameter where its state is larger."""

_NO_TEMPORARY_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)
"""What an open with O_TMPFILE says on a file system or kernel that lacks it."""


def aligned(nbytes: int, multiple: int = ALIGNMENT) -> int:
    """Return the next multiple.

    >>> aligned(1), aligned(4096), aligned(65, 64)
    (4096, 4096, 128)
    """
    return -(-nbytes // multiple) * multiple


def aligned_part(memory: torch.Tensor, nbytes: int) -> torch.Tensor:
    """Return `nbytes` bytes of a flat uint8 tensor from its first aligned address on.

    Args:
        memory: at least `nbytes` + `ALIGNMENT` bytes.
        nbytes: size of the part.
    """
    start = -memory.data_ptr() % ALIGNMENT
    return memory[start : start + nbytes]


class DirectFile:
    """A file without a name.

    Attributes:
        folder: the folder on whose file system it lies.
        direct: whether reads and writes pass by the page cache.
        nbytes: bytes that the file system has reserved for it.
    """

    def __init__(self, folder: Path, what: str) -> None:
        """Open a file.

        Args:
            folder: an existing folder.
            what: what the file holds, for messages.

        Raises:
            OSError: the folder does not exist, or is not writable.
        """
        self.folder, self.what, self.nbytes = folder, what, 0
        self._descriptor = _open(folder)
        self._memory = torch.empty(0, dtype=torch.uint8)
        weakref.finalize(self, os.close, self._descriptor)
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="tutti-disk")
        self.direct = self._takes_direct()

    def reserve(self, nbytes: int) -> None:
        """Let the file system set `nbytes` bytes aside.

        Raises:
            OSError: it has too little space.
        """
        nbytes = aligned(nbytes)
        if nbytes <= self.nbytes:
            return
        free = shutil.disk_usage(self.folder).free
        if free < nbytes - self.nbytes:  # where space is set aside by writing zeros, that would be slow to find out
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        try:
            os.posix_fallocate(self._descriptor, 0, nbytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            os.ftruncate(self._descriptor, nbytes)  # a file system that cannot set space aside
        self.nbytes = nbytes

    def read(self, buffer: torch.Tensor, offset: int) -> None:
        """Fill an aligned buffer from the file.

        Raises:
            TrainingError: the disk fails, or the file is shorter.
        """
        self._transfer(os.preadv, buffer, offset, "read")

    def write(self, buffer: torch.Tensor, offset: int) -> None:
        """Write an aligned buffer to the file.

        Raises:
            TrainingError: the disk fails or is full.
        """
        self._transfer(os.pwritev, buffer, offset, "written")

    def mapped(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return part of the file as memory, (nbytes,) uint8; the system reads its pages when they are used.

        Maps of one file share their pages, so a part that was returned before stays valid as the file grows.
        """
        end = offset + nbytes
        if end > len(self._memory):
            size = aligned(max(end, self.nbytes, 2 * len(self._memory)))
            if os.fstat(self._descriptor).st_size < size:
                os.ftruncate(self._descriptor, size)
            self._memory = torch.frombuffer(mmap.mmap(self._descriptor, size), dtype=torch.uint8)
        return self._memory[offset:end]

    def _takes_direct(self) -> bool:
        """Try direct I/O with one block; fall back to the page cache where it is refused."""
        flags = _get_flags(self._descriptor)
        if flags is None:
            return False
        block = aligned_part(torch.zeros(2 * ALIGNMENT, dtype=torch.uint8), ALIGNMENT)
        view = _bytes(block)
        try:
            if os.pwritev(self._descriptor, [view], 0) == os.preadv(self._descriptor, [view], 0) == ALIGNMENT:
                return True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        _drop_direct(self._descriptor, flags)
        return False

    def _transfer(self, call: Callable[..., int], buffer: torch.Tensor, offset: int, done: str) -> None:
        whole = _bytes(buffer)
        starts = range(0, len(whole), PIECE_NBYTES)
        pieces = [
            self._pool.submit(self._piece, call, whole[start : start + PIECE_NBYTES], offset + start)
            for start in starts
        ]
        failures = [error for piece in pieces if (error := piece.exception()) is not None]
        if failures:
            cause = failures[0]
            reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
            raise TrainingError(
                f"{self.what} in {self.folder} could not be {done}: {len(whole)} bytes at {offset}: {reason}; check "
                "the disk and its free space, then resume from the last checkpoint"
            ) from cause

    def _piece(self, call: Callable[..., int], view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            count = call(self._descriptor, [view[done:]], offset + done)
            if count <= 0:
                raise OSError(f"it ends after {done} of {len(view)} bytes at {offset}")
            done += count


def _bytes(memory: torch.Tensor) -> memoryview:
    return memoryview(memory.numpy())  # type: ignore[arg-type]


def is_in_memory(folder: Path) -> bool:
    """Return whether a folder lies on a file system that is itself in memory (tmpfs)."""
    best, kind = "", ""
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    place = str(folder.resolve())
    for line in mounts:
        _, mount, of_mount, *_ = line.split()
        inside = place == mount or place.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, of_mount
    return kind in ("tmpfs", "ramfs")


def _open(folder: Path) -> int:
    """Open a file without a name, for direct I/O where the file system takes it."""
    direct = getattr(os, "O_DIRECT", 0)
    for flags in (direct, 0):
        try:
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | flags, 0o600)
        except (OSError, AttributeError) as error:
            if isinstance(error, OSError) and error.errno not in _NO_TEMPORARY_FILES:
                raise
    for flags in (direct, 0):
        descriptor, name = tempfile.mkstemp(dir=folder, prefix=".tutti-state-")
        try:
            again = os.open(name, os.O_RDWR | flags)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        else:
            return again
        finally:
            os.close(descriptor)
            Path(name).unlink()
    raise AssertionError("a file that was made can be opened")


def _get_flags(descriptor: int) -> int | None:
    """Return the flags of an open file; None where it was not opened for direct I/O."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    return flags if flags & getattr(os, "O_DIRECT", 0) else None


def _drop_direct(descriptor: int, flags: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)

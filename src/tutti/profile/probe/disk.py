"""How fast a file is read from the disk under a folder, past the page cache."""

import os
import shutil
import tempfile
import time
from pathlib import Path

BLOCK = 2**22


def read_bytes_per_s(folder: Path, nbytes: int) -> float | None:
    """Write a file of `nbytes` random bytes, drop it from the cache and read it once.

    None where the folder cannot hold it (no space, read-only) or the system cannot drop it from the cache.
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

"""Rooms: memory of one rank that the other ranks of its host can read and write.

A room is an anonymous file in memory: it has no name, no mount limits its size, and it ends with the processes that
have it open, however they end. Others of the same user find it as /proc/PID/fd/N.
"""

import mmap
import os
from pathlib import Path

import torch

_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Room:
    """`nbytes` of shared memory that this rank owns. Raises OSError where the system gives none."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = max(nbytes, 1)
        self.file = os.memfd_create("tutti")
        try:
            os.ftruncate(self.file, self.nbytes)
            self.memory = mmap.mmap(self.file, self.nbytes)
        except OSError:
            os.close(self.file)
            raise

    def tensor(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """The first `numel` values, zeros at first, which live as long as any tensor of them does."""
        return torch.frombuffer(self.memory, dtype=dtype, count=numel)

    def __del__(self) -> None:
        if getattr(self, "memory", None) is not None:
            os.close(self.file)


def attach(process: int, file: int, nbytes: int) -> mmap.mmap:
    """A room of another process of this host. Raises OSError where this one may not see it."""
    handle = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR)
    try:
        return mmap.mmap(handle, nbytes)
    finally:
        os.close(handle)


def host_identity() -> str:
    """What processes share that can share memory, and that count as one host: a boot, and the namespaces in which
    processes see each other and have their network (hosts of a laboratory on one machine are hosts of their own).
    """
    try:
        namespaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "net")]
        return " ".join([_BOOT.read_text().strip(), *namespaces])
    except OSError:
        return ""

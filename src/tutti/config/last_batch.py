"""The batch that a rank had when it failed: a small file in memory, which outlives a rank that is killed."""

import mmap
import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MOST_SAMPLES = 64
"""Samples that the file names."""

_HEAD = 4
_NBYTES = 8 * (_HEAD + MOST_SAMPLES)


@dataclass(frozen=True, slots=True, kw_only=True)
class LastBatch:
    """The batch that a rank asked for last.

    Attributes:
        epoch, batch: numbers of the epoch and of the global batch in it, from 1.
        samples: the first samples of the rank's share.
        more: how many more samples it had.
    """

    epoch: int
    batch: int
    samples: tuple[int, ...]
    more: int

    @property
    def words(self) -> str:
        """The batch and its samples, in words."""
        more = f" and {self.more} more" if self.more else ""
        named = f"sample{'s' if self.more or len(self.samples) > 1 else ''} {', '.join(map(str, self.samples))}{more}"
        return f"{named} (batch {self.batch} of epoch {self.epoch})"


class LastBatchFile:
    """Writes the file, without a system call for a batch.

    Args:
        folder: the rank's folder.

    Raises:
        OSError: the disk is full or read-only.
    """

    def __init__(self, folder: Path) -> None:
        file = os.open(_path(folder), os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            os.posix_fallocate(file, 0, _NBYTES)  # memory of a file for which there is no room kills who writes it
            self._values = memoryview(mmap.mmap(file, _NBYTES)).cast("q")
        finally:
            os.close(file)

    def note(self, epoch: int, batch: int, samples: Sequence[int], total: int) -> None:
        """Note a batch.

        Args:
            epoch: number of the epoch, from 1.
            batch: number of the global batch in the epoch, from 1.
            samples: the first samples of this rank's share, at most `MOST_SAMPLES`.
            total: the number of samples in its share.
        """
        values = self._values
        values[0] = 0  # not valid while it is written
        values[_HEAD : _HEAD + len(samples)] = memoryview(array("q", samples))
        values[1], values[2], values[3] = epoch, batch, total
        values[0] = len(samples)


def read_last_batch(folder: Path) -> LastBatch | None:
    """Return the batch that the rank of a folder had last; None where that is not known."""
    try:
        values = array("q", _path(folder).read_bytes())
    except (OSError, ValueError):
        return None
    if len(values) != _HEAD + MOST_SAMPLES or not 0 < values[0] <= MOST_SAMPLES:
        return None
    count, epoch, batch, total = values[:_HEAD]
    return LastBatch(epoch=epoch, batch=batch, samples=tuple(values[_HEAD : _HEAD + count]), more=max(total - count, 0))


def _path(folder: Path) -> Path:
    return folder / "last-batch"

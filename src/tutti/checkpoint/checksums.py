"""Checksums of a checkpoint's bytes: 128 bits of XXH3, which is faster than copying the bytes."""

import stat
from pathlib import Path

import xxhash

from tutti.config.safe_text import plain_text
from tutti.errors import DamagedCheckpointError

UNREADABLE = "cannot be read"
"""In a finding: the file system failed, so that nobody knows what the file holds."""


def checksum(data: bytes | memoryview) -> str:
    """Return the checksum of some bytes, 32 hexadecimal digits.

    Examples:
        >>> checksum(b"") == checksum(b"\\0")
        False
    """
    return xxhash.xxh3_128_hexdigest(data)


def damaged(path: Path, finding: str) -> DamagedCheckpointError:
    """Return the refusal of a checkpoint.

    Args:
        path: the checkpoint's folder.
        finding: what is wrong with which of its files.
    """
    run = path.parent.parent if path.parent.name == "checkpoints" else path
    return DamagedCheckpointError(
        f"{path} is damaged: {finding}; name an earlier checkpoint, `tutti checkpoint verify {run}` finds a good one",
        finding,
    )


def check_inside(folder: Path, name: str, holds: str = "") -> None:
    """Refuse a file that is not a plain file of the checkpoint's own folder.

    Args:
        folder: the checkpoint's folder.
        name: name of the file.
        holds: what it holds, for the message.

    Raises:
        DamagedCheckpointError: it is missing, a link, or something else than a file.
    """
    try:
        mode = (folder / name).lstat().st_mode
    except OSError as error:
        missing = "is missing" if isinstance(error, FileNotFoundError) else f"{UNREADABLE} ({error.strerror})"
        raise damaged(folder, f"{name} {missing}{holds}") from None
    if stat.S_ISLNK(mode):
        raise damaged(folder, f"{name} is a link, and nothing is read outside the checkpoint's folder")
    if not stat.S_ISREG(mode):
        raise damaged(folder, f"{name} is not a plain file")


def printable(text: object, limit: int = 160) -> str:
    """Return the first line of a text, without control characters and not longer than `limit`."""
    line = next(iter(plain_text(str(text)).strip().splitlines()), "")
    return line if len(line) <= limit else line[: limit - 3] + "..."

"""The folder of checkpoints on disk: what is half written is hidden, and takes its name in one step."""

import os
import shutil
from contextlib import suppress
from pathlib import Path
from uuid import uuid4


def make_temporary(path: Path) -> str:
    """Make a hidden folder beside the checkpoint's and return its name; what earlier runs left half done goes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for stale in path.parent.glob(".step-*"):
        shutil.rmtree(stale, ignore_errors=True)
    for replaced in path.parent.glob("step-*.replaced"):
        if replaced.with_suffix("").exists():
            remove(replaced)
    temporary = path.with_name(f".{path.name}.{uuid4().hex[:12]}")
    temporary.mkdir()
    return temporary.name


def write_file(path: Path, data: bytes) -> int:
    """Write a small file and wait until it is on disk; returns its size in bytes."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return len(data)


def publish(temporary: Path, path: Path, keep: int) -> None:
    """A whole checkpoint takes its name; one of the same step leaves, and of the others all but the newest go."""
    sync_folder(temporary)
    replaced = path.with_name(f"{path.name}.replaced")
    if path.exists():
        if replaced.exists():
            remove(replaced)
        path.rename(replaced)  # still found, should this be the last thing that happens
    try:
        temporary.rename(path)
    except OSError:
        if replaced.exists():
            replaced.rename(path)
        raise
    sync_folder(path.parent)
    with suppress(OSError):  # what cannot be removed does not make the new one worse
        if replaced.exists():
            remove(replaced)
        others = sorted(one for one in path.parent.glob("step-*") if one != path)
        for old in others[: len(others) - max(keep, 1) + 1]:
            remove(old)


def remove(folder: Path) -> None:
    """Remove a checkpoint: first its name, in one step, then its files."""
    hidden = folder.with_name(f".{folder.name.lstrip('.')}.removed")
    shutil.rmtree(hidden, ignore_errors=True)
    folder.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

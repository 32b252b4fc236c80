"""A run folder in an object store: `--folder s3://bucket/run` keeps a run there whose files are staged on this machine.

run/run.json, run/metrics.jsonl, run/ranks/0/stdout.log ...    the files of the run folder, as they were last
step-00000120.3f2a90b1c4d5/...                                 its checkpoints; see `tutti.checkpoint.store`
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tutti.checkpoint.store import CheckpointStore, is_plain
from tutti.config.run_folder import RunFolder
from tutti.errors import StoreError

EVERY_S = 10.0
"""Seconds between two looks for changed files; more where uploads take long."""

_SHARE = 0.1
"""Most part of the time that uploads take."""

_RUN = "run"
_HEADER = "run.json"


class StoredRun:
    """The files of a run at an address, besides its checkpoints.

    Args:
        address: a URL of fsspec.

    Raises:
        StoreError: it is no such address, or a package is missing.
    """

    def __init__(self, address: str) -> None:
        self._store = CheckpointStore(address)
        self.address = self._store.address
        self._uploaded: dict[str, tuple[int, int]] = {}
        self._failed = ""

    def exists(self) -> bool:
        """Return whether a run was begun there.

        Raises:
            StoreError: the store cannot be read.
        """
        return self._store.only is None and _HEADER in self._store.names_below(_RUN)

    def has_checkpoint(self) -> bool:
        """Return whether the run can go on from a checkpoint there.

        Raises:
            StoreError: the store cannot be read.
        """
        return bool(self._store.complete())

    def check(self) -> None:
        """Check that the store can be written.

        Raises:
            StoreError: it cannot.
        """
        self._store.put(f"{_RUN}/.begun", b"")

    def fetch(self, folder: Path) -> None:
        """Bring the files into a folder; those that are there already, with the same name, are replaced.

        Raises:
            StoreError: the store cannot be read, or the folder not written.
        """
        self._store.fetch(_RUN, self._store.names_below(_RUN), folder)

    @contextmanager
    def mirrored(self, folder: Path, say: Callable[[str], None], *, only: str = "") -> Iterator[None]:
        """Upload what is new in a run folder while the context lasts, and at its end.

        Args:
            folder: the run folder.
            say: takes a warning where that fails; the run goes on.
            only: upload nothing but what is below this folder of it.
        """
        ended = threading.Event()

        def repeat() -> None:
            wait_s = EVERY_S
            while not ended.wait(wait_s):
                began = time.monotonic()
                self._upload(folder, only, say)
                wait_s = max(EVERY_S, (time.monotonic() - began) / _SHARE)

        thread = threading.Thread(target=repeat, name="tutti run mirror", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self._upload(folder, only, say)
            if self._failed:
                say(f"{self._failed}\nfiles of this run are missing there; they are in {folder}")

    def _upload(self, folder: Path, only: str, say: Callable[[str], None]) -> None:
        for path, name in _files(folder, only):
            try:
                about = path.stat()
                if self._uploaded.get(name) == (about.st_mtime_ns, about.st_size):
                    continue
                self._store.put(f"{_RUN}/{name}", path)
                self._uploaded[name] = (about.st_mtime_ns, about.st_size)
            except FileNotFoundError:
                continue
            except (StoreError, OSError) as error:
                if not self._failed:
                    say(f"{error}; the run goes on, and its files are tried again")
                self._failed = str(error)
                return
        self._failed = ""


def _files(folder: Path, only: str) -> Iterator[tuple[Path, str]]:
    """Yield the files of a run folder and their names in it, the header last: a run that has one has the others."""
    checkpoints = RunFolder(folder).checkpoints
    found = []
    for path in sorted(folder.glob(f"{only}/**/*" if only else "**/*")):
        parts = path.relative_to(folder).parts
        hidden = not all(map(is_plain, parts)) or path.suffix in (".partial", ".fetched")
        if not hidden and path.is_file() and not path.is_relative_to(checkpoints):
            found.append((path, "/".join(parts)))
    yield from sorted(found, key=lambda one: one[1] == _HEADER)

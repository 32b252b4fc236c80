"""Checkpoints in an object store: one address (`s3://bucket/prefix`, or any URL of fsspec) holds those of one run.

    step-00000120.3f2a90b1c4d5/rank-00000.safetensors, run.pt, index.json      the index is uploaded last
    evaluations.json                                                           results of evaluations, by step
    run/                                                                       see `tutti.checkpoint.stored_run`

The number after the step is the checkpoint's id, so that no object is ever written twice. A folder without an index is
an upload that did not end. Only objects with these names are read.
"""

import errno
import json
import os
import random
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tutti.checkpoint.checksums import checksum, printable
from tutti.checkpoint.index import INDEX, RUN_STATE, CheckpointIndex, StoredFile, parse_index
from tutti.checkpoint.integrity import find_damage
from tutti.checkpoint.sources import open_checkpoint
from tutti.checkpoint.tensor_files import make_temporary_folder, publish_folder, write_file
from tutti.config.run_folder import is_store_address
from tutti.config.safe_text import hide_secrets
from tutti.errors import CheckpointError, DamagedCheckpointError, StoreError

EVALUATIONS = "evaluations.json"

_NAME = re.compile(r"step-([0-9]{1,15})\.[0-9a-f]{1,32}")
_FILE = re.compile(r"rank-[0-9]{5,9}\.safetensors|run\.pt|index\.json")

_PLAIN = re.compile(r"(?!\.)[^/\\\x00-\x1f]{1,250}")
"""A name that leads nowhere else, and that is not hidden."""

_ATTEMPTS = 4
"""How often a transfer is tried; the waits between are 1, 2 and 4 seconds, give or take a quarter."""

_BLOCK_NBYTES = 16 * 2**20
"""Bytes that one request reads."""

_INDEX_NBYTES = 2**30
"""No index is longer."""

_FLAT = ("s3", "s3a", "gs", "gcs", "az", "abfs", "adl", "oss", "memory")
"""Protocols of stores that have no folders to make."""

_REFUSED = ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "TokenRetrievalError")
_FULL = re.compile(r"quota|storage ?full|insufficient ?storage|no space", re.IGNORECASE)
_BUSY = re.compile(r"slow ?down|throttl|too ?many ?requests|reduce your request rate|\b429\b|\b503\b", re.IGNORECASE)

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCheckpoint:
    """A checkpoint in a store.

    Attributes:
        name: its folder.
        files: sizes of its files in bytes, by name.
        written_s: when its index was written, in seconds of Unix time; 0 if it has none.
    """

    name: str
    step: int
    files: dict[str, int]
    written_s: float

    @property
    def complete(self) -> bool:
        return INDEX in self.files

    @property
    def nbytes(self) -> int:
        return sum(self.files.values())


class CheckpointStore:
    """The checkpoints at one address.

    Args:
        address: a URL of fsspec; of one checkpoint, too.

    Attributes:
        only: the one checkpoint that the address names; None: all of them.

    Raises:
        StoreError: it is no such address, or a package is missing.
    """

    def __init__(self, address: str) -> None:
        self.address, self.only = address if address.endswith("://") else address.rstrip("/"), None
        head, _, last = self.address.rpartition("/")
        if _NAME.fullmatch(last):
            self.address, self.only = head, last
        user, at, _ = self.address.partition("://")[2].partition("/")[0].rpartition("@")
        if not is_store_address(self.address) or (at and ":" in user):
            raise StoreError(
                f"{hide_secrets(self.address)} is no address of a store, or has a password in it; write "
                "PROTOCOL://BUCKET/PREFIX, and give credentials in the environment"
            )
        self._files, self._root = self._connect()

    def _connect(self) -> tuple[Any, str]:
        import fsspec

        try:
            options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
            if self.address.startswith(("s3://", "s3a://")):
                options |= {"config_kwargs": {"retries": {"total_max_attempts": 2}}}
            files, root = fsspec.core.url_to_fs(self.address, **options)
        except (ImportError, ValueError) as error:
            remedy = "pip install 'tutti[stores]' has S3's package" if isinstance(error, ImportError) else "correct it"
            raise StoreError(f"{self.address} cannot be opened: {printable(error)}; {remedy}") from None
        if isinstance(getattr(files, "retries", None), int):
            files.retries = 2  # the attempts here come on top
        if not root.strip("/"):
            raise StoreError(f"{self.address} names no bucket or folder; write PROTOCOL://BUCKET/PREFIX")
        return files, root.rstrip("/")

    @property
    def makes_folders(self) -> bool:
        protocol = self._files.protocol
        return (protocol if isinstance(protocol, str) else protocol[0]) not in _FLAT

    def checkpoints(self) -> list[StoredCheckpoint]:
        """Return the checkpoints, also those whose upload did not end, that of the last step last.

        Raises:
            StoreError: the store cannot be read.
        """
        listing = self._tried(lambda: self._files.find(self._root, maxdepth=2, detail=True))
        found: dict[str, dict[str, Any]] = {}
        for path, about in listing.items():
            name, _, file = str(path).rstrip("/").removeprefix(self._root).strip("/").partition("/")
            if _NAME.fullmatch(name) and _FILE.fullmatch(file) and self.only in (None, name):
                found.setdefault(name, {})[file] = about
        checkpoints = [
            StoredCheckpoint(
                name=name,
                step=int(name[5:].partition(".")[0]),
                files={file: int(about["size"] or 0) for file, about in files.items()},
                written_s=_written_s(files[INDEX]) if INDEX in files else 0.0,
            )
            for name, files in found.items()
        ]
        return sorted(checkpoints, key=lambda checkpoint: (checkpoint.step, checkpoint.written_s))

    def complete(self) -> list[StoredCheckpoint]:
        """Return the complete checkpoints, that of the last step last."""
        return [checkpoint for checkpoint in self.checkpoints() if checkpoint.complete]

    def put(self, name: str, data: bytes | Path) -> None:
        """Upload some bytes, or a file of this machine, under a name below the address.

        Raises:
            StoreError: they cannot be uploaded, after all attempts.
        """
        place = f"{self._root}/{name}"
        if self.makes_folders:
            self._tried(lambda: self._files.makedirs(place.rpartition("/")[0], exist_ok=True))
        if isinstance(data, Path):
            self._tried(lambda: self._files.put_file(str(data), place))
        else:
            self._tried(lambda: self._files.pipe_file(place, data))

    def names_below(self, folder: str) -> list[str]:
        """Return the names of the objects below a folder of the address, relative to it.

        What is hidden, or would lead out of a folder, is left out.

        Raises:
            StoreError: the store cannot be read.
        """
        root = f"{self._root}/{folder}"
        found = self._tried(lambda: self._files.find(root), missing=True) or []
        names = [str(path).rstrip("/").removeprefix(root).strip("/") for path in found]
        return [name for name in names if all(map(is_plain, name.split("/")))]

    def fetch(self, folder: str, names: Sequence[str], to: Path) -> None:
        """Bring objects below a folder of the address into a folder here.

        Raises:
            StoreError: one cannot be read or written.
        """
        for name in names:
            data = self._tried(partial(self._files.cat_file, f"{self._root}/{folder}/{name}"), missing=True)
            try:
                (to / name).parent.mkdir(parents=True, exist_ok=True)
                (to / name).write_bytes(data or b"")
            except OSError as error:
                raise StoreError(f"{to / name} cannot be written ({error.strerror or error}); free space") from None

    def remove(self, checkpoint: StoredCheckpoint) -> None:
        """Remove a checkpoint, its index first, so that what is left is never taken for whole.

        Raises:
            StoreError: the store cannot be written.
        """
        for file in sorted(checkpoint.files, key=lambda file: file != INDEX):
            self._tried(partial(self._files.rm_file, f"{self._root}/{checkpoint.name}/{file}"), missing=True)
        if self.makes_folders:
            with suppress(OSError):  # an empty folder is no checkpoint
                self._files.rmdir(f"{self._root}/{checkpoint.name}")

    def evaluations(self) -> dict[int, dict[str, float]]:
        """Return the results of evaluations, "name/metric" -> value by step, as far as they are known."""
        text = self._tried(lambda: self._files.cat_file(f"{self._root}/{EVALUATIONS}"), missing=True)
        with suppress(ValueError, TypeError, AttributeError, RecursionError):
            values = json.loads(text or b"{}")
            return {int(step): {str(k): float(v) for k, v in row.items()} for step, row in values.items()}
        return {}

    def put_evaluations(self, values: Mapping[int, Mapping[str, float]]) -> None:
        """Replace the results of evaluations.

        Raises:
            StoreError: they cannot be uploaded.
        """
        self.put(EVALUATIONS, json.dumps({str(step): dict(row) for step, row in values.items()}).encode())

    def read_index(self, checkpoint: StoredCheckpoint) -> tuple[CheckpointIndex, bytes]:
        """Return the index of a checkpoint, and its bytes, after a look at which files there are.

        Raises:
            DamagedCheckpointError: it is not the one that was saved, or files are missing or have other sizes.
            StoreError: the store cannot be read.
        """
        if checkpoint.files.get(INDEX, 0) > _INDEX_NBYTES:
            raise self._damaged(checkpoint, f"{INDEX} has {checkpoint.files[INDEX]:,} bytes")
        data = self._read(checkpoint, INDEX)
        try:
            index = parse_index(data, Path(checkpoint.name))
        except DamagedCheckpointError as error:
            raise self._damaged(checkpoint, error.finding) from None
        for name, file in index.files.items():
            size = checkpoint.files.get(name)
            if size is None:
                raise self._damaged(checkpoint, f"{name} is missing")
            if size != file.nbytes:
                raise self._damaged(checkpoint, f"{name} has {size:,} bytes, {file.nbytes:,} were saved")
        return index, data

    def verify(self, checkpoint: StoredCheckpoint) -> None:
        """Read every byte of a checkpoint and compare the checksums.

        Raises:
            DamagedCheckpointError: it is not what was saved.
            StoreError: the store cannot be read.
        """
        with tempfile.TemporaryDirectory(prefix="tutti-") as folder:
            self._take(checkpoint, Path(folder), keep=False)

    def download(self, checkpoint: StoredCheckpoint, checkpoints: Path) -> Path:
        """Bring a checkpoint into a run folder; its checksums are compared as its bytes arrive.

        Args:
            checkpoint: the checkpoint.
            checkpoints: the folder of the run's checkpoints.

        Returns:
            The checkpoint's folder.

        Raises:
            DamagedCheckpointError: it is not what was saved.
            CheckpointError: the store cannot be read, or the folder not written.
        """
        path = checkpoints / f"step-{checkpoint.step:08d}"
        try:
            temporary = path.with_name(make_temporary_folder(path))
            self._take(checkpoint, temporary, keep=True)
            publish_folder(temporary, path)
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be written ({error.strerror or error}); free space or name another --folder"
            ) from None
        return path

    def _take(self, checkpoint: StoredCheckpoint, folder: Path, *, keep: bool) -> None:
        """Read all of a checkpoint; write its index, its run state and, to `keep`, its tensors into a folder."""
        index, data = self.read_index(checkpoint)
        state = self._read(checkpoint, RUN_STATE)
        if checksum(state) != index.files[RUN_STATE].checksum:
            raise self._damaged(checkpoint, f"{RUN_STATE} is not the one that was saved")
        write_file(folder / RUN_STATE, state)
        write_file(folder / INDEX, data)
        try:
            source = open_checkpoint(folder)

            @contextmanager
            def opened(_: Path, name: str, expected: StoredFile) -> Iterator[tuple[Any, int]]:
                with self._reading(f"{checkpoint.name}/{name}", folder / name if keep else None) as file:
                    yield file, expected.nbytes

            damage = self._tried(lambda: find_damage(source, opened=opened))
        except DamagedCheckpointError as error:
            raise self._damaged(checkpoint, error.finding) from None
        if damage is not None:
            raise self._damaged(checkpoint, damage)

    @contextmanager
    def _reading(self, name: str, copy: Path | None) -> Iterator["_Incoming"]:
        with self._files.open(f"{self._root}/{name}", "rb", block_size=_BLOCK_NBYTES, cache_type="readahead") as file:
            if copy is None:
                yield _Incoming(file)
                return
            with copy.open("wb") as written:
                yield _Incoming(file, written)
                written.flush()
                os.fsync(written.fileno())

    def _read(self, checkpoint: StoredCheckpoint, file: str) -> bytes:
        data = self._tried(lambda: self._files.cat_file(f"{self._root}/{checkpoint.name}/{file}"), missing=True)
        if data is None:
            raise self._damaged(checkpoint, f"{file} is missing")
        return bytes(data)

    def _damaged(self, checkpoint: StoredCheckpoint, finding: str) -> DamagedCheckpointError:
        return DamagedCheckpointError(
            f"{self.address}/{checkpoint.name} is damaged: {finding}; name an earlier checkpoint, "
            f"`tutti checkpoint verify {self.address}` finds a good one",
            finding,
        )

    def _tried(self, call: Callable[[], Result], *, missing: bool = False) -> Result | Any:
        """Call something, again after a wait where that may help.

        Args:
            call: reads or writes the store.
            missing: whether None is returned for an object that is not there.

        Raises:
            StoreError: it failed in every attempt, or in a way that no attempt would mend.
        """
        for attempt in range(_ATTEMPTS):
            try:
                return call()
            except CheckpointError:
                raise
            except Exception as error:  # each file system has errors of its own
                if missing and isinstance(error, FileNotFoundError) and "bucket does not exist" not in str(error):
                    return None
                reason, again = explain(error)
                if isinstance(error, PermissionError):
                    self._files, _ = self._connect()  # the next call reads the credentials again
                if not again or attempt == _ATTEMPTS - 1:
                    raise StoreError(f"{self.address}: {reason}") from None
                time.sleep(2**attempt * random.uniform(0.75, 1.25))
        raise AssertionError


class _Incoming:
    """A file that is read once from its beginning to its end, and written to a local one on the way."""

    def __init__(self, file: Any, copy: Any = None) -> None:
        self._file, self._copy = file, copy

    def read(self, nbytes: int) -> bytes:
        data = bytes(self._file.read(nbytes))
        self._write(data)
        return data

    def readinto(self, buffer: memoryview) -> int:
        count = int(self._file.readinto(buffer))
        self._write(buffer[:count])
        return count

    def seek(self, position: int) -> None:
        if self._file.tell() != position:
            raise ValueError("its tensors do not follow each other")

    def _write(self, data: bytes | memoryview) -> None:
        if self._copy is not None:
            try:
                self._copy.write(data)
            except OSError as error:
                raise CheckpointError(
                    f"{self._copy.name} cannot be written ({error.strerror or error}); free space, or name another "
                    "--folder"
                ) from None


def is_plain(part: str) -> bool:
    """Return whether a part of a name is one that is neither hidden nor leads out of its folder."""
    return _PLAIN.fullmatch(part) is not None


def explain(error: BaseException) -> tuple[str, bool]:
    """Return what a store's error means, with the remedy, and whether another attempt may succeed.

    Examples:
        >>> explain(PermissionError("Access Denied"))[1]
        False
        >>> explain(OSError(16, "Please reduce your request rate."))
        ('the store asks for fewer requests ([Errno 16] Please reduce your request rate.)', True)
    """
    kind, text = type(error).__name__, printable(hide_secrets(str(error))) or type(error).__name__
    code = getattr(error, "errno", None)
    if isinstance(error, PermissionError) or kind in _REFUSED:
        return (
            f"access is refused ({text}); give every host credentials that may list, read, write and delete there",
            False,
        )
    if isinstance(error, FileNotFoundError):
        return f"it does not exist ({text}); create the bucket or folder, or correct the address", False
    if code in (errno.ENOSPC, errno.EDQUOT) or _FULL.search(text):
        return f"the store is full ({text}); free space there", False
    if code in (errno.EBUSY, errno.EAGAIN) or _BUSY.search(text):
        return f"the store asks for fewer requests ({text})", True
    return f"it cannot be reached or used ({text}); check the network and the address", True


def _written_s(about: Mapping[str, Any]) -> float:
    """Return when an object was written, in seconds of Unix time, from what its file system says."""
    for name in ("LastModified", "last_modified", "mtime", "updated", "created"):
        value: Any = about.get(name)
        if isinstance(value, int | float):
            return float(value)
        if hasattr(value, "timestamp"):
            return float(value.timestamp())
    return 0.0

"""The run folder: the header that is written when training starts, and the path of each file."""

import errno
import fcntl
import json
import os
import re
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tutti.config.vocabulary import LastBatch, Precision, StartState, Unit
from tutti.errors import LaunchError


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """Where one rank runs.

    Attributes:
        device: "cpu" or "cuda:0".
        threads: threads that it computes with.
        sums: what its gradient reductions go through, as text; empty where it makes none.
        place: which device of the host it computes on: entry of CUDA_VISIBLE_DEVICES, UUID, PCI address.
        cores: the cores that it may use, such as "0-55,112-167".
        binding: why it may use these cores; empty where no binding was asked for.
        network: the network cards near it; empty where nothing is known.
    """

    rank: int
    local_rank: int
    host: str
    device: str
    device_model: str
    pid: int
    threads: int
    sums: str = ""
    place: str = ""
    cores: str = ""
    binding: str = ""
    network: str = ""


LIKE_RANDOM = "cannot be told from"
"""Words of a reason for generated data, which transformed rows of a table may give, too."""

FRAMED = "the border is equal in all samples"
"""Reason for a smaller native shape that real data may also have: scans and microscopes show a round field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOrigin:
    """Where samples come from and how large they really are, as found by looking at some; None where it is not known.

    Attributes:
        start_state: where the samples were when the run began.
        native_shape: shape of an input before it was enlarged or padded; its own shape where it was not.
        state_reason, native_reason: how it was seen, as a clause.
        majority: share of the most frequent label; None if labels are not classes.
        distinct: share of the samples looked at that differ from the others; None for small ones.
        ragged: whether inputs have different shapes.
        chosen_from: number of samples of the data set that a Subset was chosen from; None for others.
    """

    start_state: StartState | None = None
    state_reason: str = ""
    native_shape: tuple[int, ...] | None = None
    native_reason: str = ""
    majority: float | None = None
    distinct: float | None = None
    ragged: bool = False
    chosen_from: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetInfo:
    """A data set as the run saw it.

    Attributes:
        kind: class name.
        samples: number of samples; None for a stream.
        hash_covers: what `sha256` was computed over.
    """

    name: str
    kind: str
    samples: int | None
    sha256: str
    hash_covers: str
    input_shapes: tuple[tuple[int, ...], ...] = ()
    origin: DataOrigin = DataOrigin()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How the optimizer is driven: the settings that determine the result.

    They do not depend on the number of ranks, except `compress`: the codec of gradient reductions, None where they were
    exact.
    """

    optimizer: str
    learning_rate: float
    global_batch_size: int
    unit: Unit
    num_microbatches: int
    last_batch: LastBatch
    precision: Precision
    seed: int
    clip_norm: float | None = None
    learning_rate_rule: dict[str, Any] | None = None
    scheduler: str | None = None
    batch_ramp: tuple[tuple[int, int], ...] = ()
    compress: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHeader:
    """run.json: everything about a run that is known when its first step starts."""

    name: str
    script: str
    arguments: tuple[str, ...]
    command: str
    started_utc: str
    world_size: int
    backend: str
    ranks: tuple[RankInfo, ...]
    versions: dict[str, str]
    platform: str
    git_commit: str | None
    git_dirty: bool | None
    environment_sha256: str  # of the sorted list of installed distributions
    model: str
    parameters: int
    recipe: Recipe
    data: DatasetInfo
    resumed_from: str | None = None
    resumed_at_step: int = 0
    checkpoint_store: str | None = None
    extra: dict[str, str] = field(default_factory=dict)
    version: int = 1


def is_store_address(place: object) -> bool:
    """Return whether a text is the address of an object store ("s3://bucket/prefix"), not a path."""
    return isinstance(place, str) and bool(re.match(r"[a-z][a-z0-9+.-]+://", place))


def checkpoint_place(place: str | Path) -> Path | str:
    """Return a path, or the address of an object store as it is.

    Examples:
        >>> checkpoint_place("s3://bucket/prefix")
        's3://bucket/prefix'
        >>> checkpoint_place("runs/first").name
        'first'
    """
    return str(place) if is_store_address(place) else Path(place)


TAIL_NBYTES = 1 << 18
"""Bytes of a file of rows that `last_rows` reads."""


def last_rows(file: Path, begin: int = 0, end: int | None = None) -> list[dict[str, Any]]:
    """Return the last rows of a file of JSON lines; what is no row, such as one that is being written, is left out.

    Args:
        file: the file; it may be missing.
        begin: position of the first byte that counts.
        end: that after the last one; None: the file's end.
    """
    try:
        with file.open("rb") as data:
            end = os.fstat(data.fileno()).st_size if end is None else end
            data.seek(max(begin, end - TAIL_NBYTES))
            lines = data.read(max(0, end - data.tell())).split(b"\n")
    except OSError:
        return []
    rows = []
    for line in lines:
        with suppress(ValueError, RecursionError):
            row = json.loads(line)
            if isinstance(row, dict):
                rows.append(row)
    return rows


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths inside a run folder. Text files are UTF-8; metrics are JSON lines."""

    path: Path

    @property
    def header(self) -> Path:
        return self.path / "run.json"

    @property
    def lock(self) -> Path:
        """Names the process that writes into the folder, and is locked by it."""
        return self.path / ".lock"

    def pause(self, node: int) -> Path:
        """Is there while the ranks of a node stop only to go on with those of another node."""
        return self.path / f".pause-{node}"

    @property
    def pauses(self) -> bool:
        """Whether ranks that stop now go on by themselves."""
        return any(self.path.glob(".pause-*"))

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def cluster(self) -> Path:
        return self.path / "cluster.json"

    @property
    def model(self) -> Path:
        return self.path / "model.json"

    @property
    def prediction(self) -> Path:
        return self.path / "prediction.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def failure(self) -> Path:
        return self.path / "failure.json"

    @property
    def verdict(self) -> Path:
        return self.path / "verify.json"

    def checkpoint_times(self) -> dict[str, int]:
        """Return when each complete checkpoint was written, by its folder's name, in nanoseconds of Unix time."""
        found = {}
        for index in self.checkpoints.glob("step-*/index.json"):
            with suppress(OSError):  # removed meanwhile, as it was too old to keep
                found[index.parent.name] = index.stat().st_mtime_ns
        return {name: written for name, written in found.items() if "." not in name}

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def profile(self) -> Path:
        return self.path / "profile"

    @property
    def report(self) -> Path:
        return self.path / "report"

    def rank(self, rank: int) -> Path:
        """The folder of one rank: stdout.log, stderr.log, metrics.jsonl (timings), and error.json if it failed."""
        return self.path / "ranks" / str(rank)


_LOCKS: dict[Path, int] = {}
"""Files that this process holds the lock of, by folder; -1: its parent held the lock when it was forked."""


def _close_in_child() -> None:
    # A lock lasts until the last copy of its file is closed: a worker that outlives its rank must not hold it.
    for folder, file in _LOCKS.items():
        if file >= 0:
            os.close(file)
        _LOCKS[folder] = -1


os.register_at_fork(after_in_child=_close_in_child)


def lock_folder(folder: RunFolder) -> str:
    """Lock a run folder for this process, until it ends: no other process may write into the folder.

    Returns:
        Why there is no lock, as a sentence, where the file system has none; else the empty text.

    Raises:
        LaunchError: another process, which lives, has the lock.
    """
    path = folder.path.resolve()
    if path in _LOCKS:
        return ""
    try:
        file = os.open(folder.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        return _unlocked(folder, error)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise LaunchError(_in_use(folder)) from None
        return _unlocked(folder, error)
    with suppress(OSError):  # a full disk: the lock holds, but cannot say whose it is
        os.ftruncate(file, 0)
        os.pwrite(file, f"{socket.gethostname()} {os.getpid()}\n".encode(), 0)
    _LOCKS[path] = file
    return ""


def refuse_used_folder(folder: RunFolder) -> None:
    """Refuse a run folder into which another process writes.

    Raises:
        LaunchError: there is one; the message names its host and process.
    """
    if folder.path.resolve() in _LOCKS:
        return
    try:
        file = os.open(folder.lock, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise LaunchError(_in_use(folder)) from None
    finally:
        os.close(file)


def _in_use(folder: RunFolder) -> str:
    try:
        host, _, pid = folder.lock.read_text(encoding="utf-8", errors="replace")[:300].strip().partition(" ")
    except OSError:
        host, pid = "", ""
    holder = f"process {pid} on host {host}" if host and pid else "another process"
    return (
        f"{holder} writes into the run folder {folder.path}; wait until that run has ended, end it, or name another "
        "folder"
    )


def _unlocked(folder: RunFolder, error: OSError) -> str:
    return f"warning: the run folder {folder.path} cannot be locked ({error.strerror}); let no other run write into it"

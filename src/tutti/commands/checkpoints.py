"""What the checkpoints of a run are, whether they are sound, and removing those that are not needed."""

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tutti.commands.values import StrPath
from tutti.config.run_folder import is_store_address
from tutti.errors import CheckpointError, DamagedCheckpointError, NoCheckpointError, SpecError

if TYPE_CHECKING:
    from tutti.checkpoint.retention import Retention
    from tutti.checkpoint.store import CheckpointStore, StoredCheckpoint

_UPLOADING = "its upload has not ended: it has no index"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointEntry:
    """One checkpoint of a run.

    Attributes:
        nbytes: size of its files.
        written_utc: when it was completed.
        world_size: number of ranks that wrote it; None if its index cannot be read.
        mesh: their mesh.
        values: results of the evaluations at its step, by "name/metric".
        damage: what is wrong with it; None if nothing was found. A list looks at the index only.
    """

    path: str
    step: int
    nbytes: int
    written_utc: str
    world_size: int | None
    mesh: dict[str, int]
    values: dict[str, float]
    damage: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedCheckpoint:
    """A checkpoint of which every byte was read, in `seconds`; `damage` is None if it is sound."""

    path: str
    nbytes: int
    seconds: float
    damage: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointList:
    """The checkpoints of a run, oldest first."""

    run: str
    checkpoints: tuple[CheckpointEntry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedCheckpoints:
    """What was found in the checkpoints of a run, oldest first."""

    run: str
    checkpoints: tuple[VerifiedCheckpoint, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunedCheckpoints:
    """The checkpoints that were removed, and those that stay."""

    removed: tuple[str, ...]
    kept: tuple[str, ...]


def list_checkpoints(run: StrPath) -> CheckpointList:
    """Return the checkpoints of a run folder or a store, oldest first.

    Raises:
        NoCheckpointError: there is none.
    """
    if is_store_address(run):
        return _list_stored(str(run))
    from tutti.checkpoint.retention import values_by_step

    values, entries = values_by_step(Path(run)), []
    for path in _checkpoints(Path(run)):
        with suppress(FileNotFoundError):  # a running training removed it meanwhile
            entries.append(_entry(path, values))
    return CheckpointList(run=str(run), checkpoints=tuple(entries))


def verify_checkpoints(run: StrPath) -> VerifiedCheckpoints:
    """Read every byte of the checkpoints of a run folder or a store, or of one checkpoint, and compare the checksums.

    Raises:
        NoCheckpointError: there is none.
    """
    if is_store_address(run):
        return _verify_stored(str(run))
    from tutti.checkpoint.integrity import damage_of

    verified = []
    for path in _checkpoints(Path(run)):
        before = time.perf_counter()
        damage = damage_of(path)
        seconds = time.perf_counter() - before
        with suppress(FileNotFoundError):  # a running training removed it meanwhile
            verified.append(VerifiedCheckpoint(path=str(path), nbytes=_nbytes(path), seconds=seconds, damage=damage))
    return VerifiedCheckpoints(run=str(run), checkpoints=tuple(verified))


def prune_checkpoints(run: StrPath, *, keep: int, best: str | None = None) -> PrunedCheckpoints:
    """Remove all checkpoints of a run folder but the newest sound ones, and the best one.

    Damaged checkpoints do not count as newest ones, and are removed only if a sound one stays. What cannot be judged
    stays: checkpoints of other formats, and files that cannot be read.

    Args:
        run: the run folder, or the address of a store.
        keep: how many of the newest checkpoints stay, at least 1.
        best: "METRIC:min" or "METRIC:max"; the checkpoint with the best value of it stays, too.

    Raises:
        NoCheckpointError: there is none.
        CheckpointError: none is sound, so none is removed.
        SpecError: `keep` is below 1, or no checkpoint has a value of the metric.
    """
    from tutti.checkpoint.retention import Retention, parse_best, prune, values_of_checkpoints
    from tutti.checkpoint.tensor_files import remove_folder

    folder = Path(run)
    if keep < 1:
        raise SpecError(f"--keep {keep}; keep 1 checkpoint or more")
    metric = None if best is None else parse_best(best, "--best")
    if is_store_address(run):
        return _prune_stored(str(run), Retention(keep=keep, best=metric))
    paths = _checkpoints(folder)
    values = {} if metric is None else values_of_checkpoints(folder, metric)
    if metric is not None and not values:
        raise SpecError(f"--best {best}: no checkpoint of {folder} was evaluated at its step; leave it out")
    states = {path: _is_damaged(path) for path in paths}
    if False not in states.values():
        raise CheckpointError(f"no checkpoint of {folder} is sound, so none is removed; run tutti checkpoint verify")
    unsound = {path for path, damaged in states.items() if damaged is not False}
    removed = prune(Retention(keep=keep, best=metric, values=values, passed_over=unsound), folder)
    for path in (path for path, damaged in states.items() if damaged):
        with suppress(OSError):  # the others are valid even if it cannot be removed
            remove_folder(path)
            removed.append(path)
    kept = [path for path in paths if path not in removed]
    return PrunedCheckpoints(removed=tuple(map(str, removed)), kept=tuple(map(str, kept)))


def _stored(store: "CheckpointStore") -> "list[StoredCheckpoint]":
    checkpoints = store.checkpoints()
    if not checkpoints:
        raise NoCheckpointError(f"{store.address} holds no checkpoint; name the prefix that a run stored them at")
    return checkpoints


def _list_stored(address: str) -> CheckpointList:
    from tutti.checkpoint.store import CheckpointStore

    store = CheckpointStore(address)
    entries, values = [], store.evaluations()
    for stored in _stored(store):
        index: Any = None
        damage = None if stored.complete else _UPLOADING
        if stored.complete:
            try:
                index, _ = store.read_index(stored)
            except DamagedCheckpointError as error:
                damage = error.finding
        entry = CheckpointEntry(
            path=f"{store.address}/{stored.name}",
            step=stored.step,
            nbytes=stored.nbytes,
            written_utc=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(stored.written_s)) if stored.complete else "",
            world_size=None if index is None else index.world_size,
            mesh={} if index is None else index.mesh,
            values=values.get(stored.step, {}),
            damage=damage,
        )
        entries.append(entry)
    return CheckpointList(run=address, checkpoints=tuple(entries))


def _verify_stored(address: str) -> VerifiedCheckpoints:
    from tutti.checkpoint.store import CheckpointStore

    store, verified = CheckpointStore(address), []
    for stored in _stored(store):
        before = time.perf_counter()
        damage = _stored_damage(store, stored)
        entry = VerifiedCheckpoint(
            path=f"{store.address}/{stored.name}",
            nbytes=stored.nbytes,
            seconds=time.perf_counter() - before,
            damage=damage,
        )
        verified.append(entry)
    return VerifiedCheckpoints(run=address, checkpoints=tuple(verified))


def _stored_damage(store: "CheckpointStore", stored: "StoredCheckpoint") -> str | None:
    if not stored.complete:
        return _UPLOADING
    try:
        store.verify(stored)
    except DamagedCheckpointError as error:
        return error.finding
    return None


def _prune_stored(address: str, retention: "Retention") -> PrunedCheckpoints:
    """Remove all checkpoints of a store but the newest sound ones; every byte of them is read."""
    from tutti.checkpoint.store import CheckpointStore
    from tutti.checkpoint.uploads import prune_store

    store = CheckpointStore(address)
    if store.only is not None:
        raise SpecError(f"{address} is one checkpoint; name the prefix above it")
    if retention.best is not None:
        by_step = ((step, retention.best.value_in(values)) for step, values in store.evaluations().items())
        retention.values = {step: value for step, value in by_step if value is not None}
        if not retention.values:
            raise SpecError(f"--best: no checkpoint of {address} was evaluated for it at its step; leave it out")
    there = _stored(store)
    damaged = [stored for stored in there if stored.complete and _stored_damage(store, stored) is not None]
    if not [stored for stored in there if stored.complete and stored not in damaged]:
        raise CheckpointError(f"no checkpoint of {address} is sound, so none is removed; run tutti checkpoint verify")
    removed, kept = prune_store(store, retention, passed_over={stored.name for stored in damaged})
    for stored in damaged:
        store.remove(stored)
    return PrunedCheckpoints(
        removed=tuple(f"{store.address}/{stored.name}" for stored in [*removed, *damaged]),
        kept=tuple(f"{store.address}/{stored.name}" for stored in kept if stored not in damaged),
    )


def _is_damaged(path: Path) -> bool | None:
    """Whether a checkpoint is not what was saved; None if that cannot be known."""
    from tutti.checkpoint.checksums import UNREADABLE
    from tutti.checkpoint.integrity import open_sound_checkpoint

    try:
        open_sound_checkpoint(path)
    except DamagedCheckpointError as error:
        return None if UNREADABLE in error.finding else True
    except CheckpointError:
        return None
    return False


def _checkpoints(folder: Path) -> list[Path]:
    from tutti.checkpoint.index import checkpoint_folders, checkpoint_step, is_checkpoint

    paths = [folder] if is_checkpoint(folder) or checkpoint_step(folder) >= 0 else checkpoint_folders(folder)
    if not paths or not folder.is_dir():
        raise NoCheckpointError(f"{folder} holds no checkpoint; name a run folder, or a checkpoint in one")
    return paths


def _entry(path: Path, values: dict[int, dict[str, float]]) -> CheckpointEntry:
    from tutti.checkpoint.index import INDEX, checkpoint_step
    from tutti.checkpoint.sources import read_index

    index: Any = None
    damage = None
    try:
        index = read_index(path)
    except CheckpointError as error:
        damage = getattr(error, "finding", str(error))
    step = checkpoint_step(path) if index is None else index.step
    written = (path / INDEX if (path / INDEX).exists() else path).stat().st_mtime
    return CheckpointEntry(
        path=str(path),
        step=step,
        nbytes=_nbytes(path),
        written_utc=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(written)),
        world_size=None if index is None else index.world_size,
        mesh={} if index is None else index.mesh,
        values=values.get(step, {}),
        damage=damage,
    )


def _nbytes(path: Path) -> int:
    return sum(file.lstat().st_size for file in path.iterdir() if file.is_file())

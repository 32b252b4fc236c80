"""Sources: stored tensors of any format, and how each rank reads the parts that it needs."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tutti.checkpoint.checksums import UNREADABLE, check_inside, damaged
from tutti.checkpoint.index import (
    INDEX,
    MODEL,
    RUN_STATE,
    CheckpointIndex,
    Key,
    Slices,
    StoredFile,
    StoredPart,
    StoredTensor,
    checkpoint_step,
    latest_checkpoint,
    overlaps,
    parse_index,
    read_run_state,
    stored_tensors,
)
from tutti.checkpoint.tensor_files import TensorFiles
from tutti.comm.world import World
from tutti.errors import CheckpointError, NoCheckpointError
from tutti.parallel.layout import Cut, TensorShard
from tutti.parallel.saved_values import parse_dtype

ReadPart = Callable[[StoredPart, torch.dtype, Slices], torch.Tensor]
"""(part, dtype, index) -> the values of a stored part at an index into it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Stored tensors, and the run state beside them.

    Attributes:
        path: the file or folder, for messages.
        id: the checkpoint's; empty if it is none.
        tensors: global tensors and where their parts are stored.
        tied: further names of the model's tensors -> the name in `tensors`.
        files: the checkpoint's files with their checksums, by name.
        run_state: contents of run.pt; empty if only a model is stored.
        read: reads values; None on a rank that cannot see the files.
        holders: files that some ranks cannot see -> the rank that reads them for all.
    """

    path: Path
    id: str = ""
    tensors: dict[Key, StoredTensor]
    tied: dict[str, str] = field(default_factory=dict)
    files: dict[str, StoredFile] = field(default_factory=dict)
    run_state: dict[str, Any] = field(default_factory=dict)
    read: ReadPart | None = None
    holders: dict[str, int] = field(default_factory=dict)
    _by_owner: dict[tuple[int, str], list[Key]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for key in self.tensors:
            self._by_owner.setdefault(key[:2], []).append(key)

    def model_key(self, name: str) -> Key | None:
        """Return the key of the model's tensor `name`; None if it is not stored."""
        key = (MODEL, self.tied.get(name, name), "")
        return key if key in self.tensors else None

    def state_keys(self, number: int, name: str) -> list[Key]:
        """Return the keys of the stored state tensors of one parameter of an optimizer.

        Args:
            number: the optimizer's number, or RANK_STATE.
            name: the parameter's name, or "rank/bucket".
        """
        return self._by_owner.get((number, name), [])


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTarget:
    """A part of a stored tensor that a rank needs.

    Attributes:
        key: the stored tensor.
        out: the tensor to fill.
        cuts: which part of the global tensor `out` is.
    """

    key: Key
    out: torch.Tensor
    cuts: tuple[Cut, ...] = ()


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint that a path names: the path itself, or the newest of a run folder.

    Raises:
        CheckpointError: there is none.
    """
    checkpoint = latest_checkpoint(path)
    if checkpoint is None:
        raise NoCheckpointError(f"{path} holds no checkpoint; name a run folder, or a checkpoint in one")
    return checkpoint


def open_checkpoint(path: Path) -> Source:
    """Open a checkpoint's folder as a source.

    Raises:
        CheckpointError: the folder is no checkpoint, or cannot be read.
    """
    if checkpoint_step(path) >= 0 and path.is_dir():
        check_inside(path, INDEX)
    if not (path / INDEX).is_file():
        raise NoCheckpointError(
            f"{path} holds no checkpoint (no {INDEX}); name a run folder or a checkpoint in it"
            + (f"; pass a file of weights alone as job.prepare(..., weights={path.name!r})" if path.is_file() else "")
        )
    index = read_index(path)
    try:
        run_state = read_run_state(path, index)
    except OSError as error:
        raise damaged(path, f"{RUN_STATE} {UNREADABLE} ({error.strerror})") from None
    return Source(
        path=path,
        id=index.id,
        tensors=stored_tensors(index),
        tied=index.tied,
        files=index.files,
        run_state=run_state,
        read=reader_of(path),
    )


def read_index(path: Path) -> CheckpointIndex:
    """Read the index of a checkpoint's folder.

    Raises:
        DamagedCheckpointError: it is missing, or not the one that was saved.
    """
    check_inside(path, INDEX)
    try:
        data = (path / INDEX).read_bytes()
    except OSError as error:
        raise damaged(path, f"{INDEX} {UNREADABLE} ({error.strerror})") from None
    return parse_index(data, path)


def reader_of(folder: Path) -> ReadPart:
    """Return a function that reads parts from the tensor files of a folder."""
    files = TensorFiles(folder)

    def read(part: StoredPart, dtype: torch.dtype, index: Slices) -> torch.Tensor:
        return files.read(part.file, part.key, dtype, index)

    return read


def in_memory(path: Path, tensors: Mapping[Key, torch.Tensor], run_state: dict[str, Any] | None = None) -> Source:
    """Wrap global tensors in memory as a source.

    Args:
        path: names the source in messages.
        tensors: the tensors by key.
        run_state: contents of a run.pt, if any.
    """
    stored = {}
    for key, tensor in tensors.items():
        part = StoredPart(file="", key=repr(key))
        dtype = str(tensor.dtype).removeprefix("torch.")
        stored[key] = StoredTensor(shape=tuple(tensor.shape), dtype=dtype, parts=(part,))
    by_text = {repr(key): tensor for key, tensor in tensors.items()}

    def read(part: StoredPart, dtype: torch.dtype, index: Slices) -> torch.Tensor:
        return by_text[part.key][index]

    return Source(path=path, tensors=stored, run_state=run_state or {}, read=read)


def shared_source(world: World, path: Path, open_source: Callable[[Path], Source]) -> Source:
    """Open a source on rank 0 and give it to every rank, readable where a rank sees the same files. Collective.

    Args:
        world: the ranks.
        path: the file or folder.
        open_source: opens it on one rank.

    Raises:
        CheckpointError: on all ranks, if rank 0 cannot open the source.
    """
    source: Source | None = None
    failure: CheckpointError | None = None
    try:
        source = open_source(path)
    except CheckpointError as error:
        failure = error
    fingerprints = world.gather(None if source is None else fingerprint(path))
    failure = world.broadcast(failure)
    if failure is not None:
        raise failure
    if all(other == fingerprints[0] for other in fingerprints):
        assert source is not None
        return source
    first = world.broadcast(None if source is None else replace(source, read=None))
    assert first is not None
    return replace(first, read=source.read if source is not None and world.is_main else None)


def fingerprint(path: Path) -> str:
    """Return size and hash of the first MiB of a checkpoint's index or of a file.

    It tells equal paths on two disks apart.
    """
    file = path / INDEX if (path / INDEX).is_file() else path
    if file.is_dir():
        file = next((entry for entry in sorted(file.iterdir()) if entry.is_file()), file)
    with file.open("rb") as opened:
        return f"{file.stat().st_size} {hashlib.sha256(opened.read(2**20)).hexdigest()}"


def transfer(world: World, source: Source, targets: list[LoadTarget]) -> None:
    """Fill every rank's targets from the source. Collective.

    What some rank cannot read, the file's holder reads and broadcasts. If the source has no holders, that is rank 0.

    Args:
        world: the ranks.
        source: the source, as `shared_source` returned it.
        targets: what this rank needs.

    Raises:
        CheckpointError: on all ranks, if any rank's target cannot be filled.
    """
    filled = dict.fromkeys(range(len(targets)), 0)
    readable = all(world.gather(source.read is not None))
    failure: str | None = None
    try:
        if readable and source.read is not None:
            for number, target in enumerate(targets):
                stored = source.tensors[target.key]
                for part in stored.parts:
                    if part.file not in source.holders:
                        filled[number] += _fill(target, stored, part, source.read)
    except CheckpointError as error:
        failure = str(error)
    except (RuntimeError, ValueError) as error:
        failure = f"{source.path} does not fit: {error}"
    if not readable or source.holders:
        failure = _broadcast_parts(world, source, targets, filled, None if readable else 0) or failure
    failure = failure or _find_incomplete(source, targets, filled)
    failures = [message for message in world.gather(failure) if message is not None]
    if failures:
        raise CheckpointError(failures[0])


def read_whole(source: Source, key: Key) -> torch.Tensor:
    """Read one global tensor from a source that this process can read.

    Raises:
        CheckpointError: the tensor cannot be read, or was not written completely.
    """
    stored = source.tensors[key]
    target = LoadTarget(key=key, out=torch.empty(stored.shape, dtype=parse_dtype(stored.dtype)))
    assert source.read is not None
    count = sum(_fill(target, stored, part, source.read) for part in stored.parts)
    failure = _find_incomplete(source, [target], {0: count})
    if failure is not None:
        raise CheckpointError(failure)
    return target.out


def _fill(target: LoadTarget, stored: StoredTensor, part: StoredPart, read: ReadPart) -> int:
    """Copy the intersection of a stored part and a target; return its number of elements."""
    count = 0
    with torch.no_grad():
        for there, here in overlaps(stored.shape, part.cuts, target.cuts):
            values = read(part, parse_dtype(stored.dtype), there)
            target.out[here].copy_(values.reshape(target.out[here].shape))
            count += values.numel()
    return count


def _broadcast_parts(
    world: World, source: Source, targets: list[LoadTarget], filled: dict[int, int], reader: int | None
) -> str | None:
    """Read parts that any rank wants on one rank and broadcast them; return what went wrong, if anything.

    Args:
        world: the ranks, on hosts that share no disk.
        source: the source.
        targets: what this rank needs.
        filled: elements of each target that are filled; changed in place.
        reader: the rank that reads all parts; None: the holder of each part's file, where it has one.
    """
    wanted: dict[Key, list[int]] = {}
    for number, target in enumerate(targets):
        wanted.setdefault(target.key, []).append(number)
    anywhere = set().union(*world.gather(set(wanted)))
    for key, stored in source.tensors.items():
        dtype = parse_dtype(stored.dtype)
        for part in stored.parts if key in anywhere else ():
            holder = source.holders.get(part.file) if reader is None else reader
            if holder is None:
                continue
            shape = TensorShard(shape=stored.shape, cuts=part.cuts).local_shape
            values, failure = None, None
            try:
                if source.read is not None and world.rank == holder:
                    values = source.read(part, dtype, tuple(slice(0, size) for size in shape))
            except CheckpointError as error:
                failure = str(error)
            failure = world.broadcast(failure, holder)
            if failure is not None:
                return failure
            received = broadcast_tensor(world, values, shape, dtype, holder)
            for number in wanted.get(key, ()):
                filled[number] += _fill(targets[number], stored, part, _reader_of_values(received))
    return None


def _reader_of_values(values: torch.Tensor) -> ReadPart:
    def read(part: StoredPart, dtype: torch.dtype, index: Slices) -> torch.Tensor:
        return values[index]

    return read


def broadcast_tensor(
    world: World, tensor: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, holder: int = 0
) -> torch.Tensor:
    """Broadcast one rank's tensor to every rank's CPU. Collective.

    Args:
        world: the ranks.
        tensor: the holder's tensor; None on other ranks.
        shape: its shape.
        dtype: its dtype.
        holder: the rank that has it.
    """
    if tensor is None:
        data = torch.empty(torch.Size(shape).numel() * dtype.itemsize, dtype=torch.uint8)
    else:
        data = tensor.contiguous().reshape(-1).view(torch.uint8)
    if data.numel():
        on_device = data.to(world.device)
        dist.broadcast(on_device, src=holder)
        data = on_device.cpu()
    return data.view(dtype).reshape(shape)


def _find_incomplete(source: Source, targets: list[LoadTarget], filled: dict[int, int]) -> str | None:
    """Return a sentence about a target with elements that no part holds; None if all are complete.

    Parts may overlap, so more elements may have been copied than a target has.
    """
    for number, target in enumerate(targets):
        if filled[number] < target.out.numel() or not _covered(source.tensors[target.key], target):
            name = " ".join(filter(None, target.key[1:]))
            return f"{source.path} holds only parts of {name}: it is incomplete; name an earlier checkpoint"
    return None


def _covered(stored: StoredTensor, target: LoadTarget) -> bool:
    """Whether the parts hold every element of a target that got at least as many values as it has elements."""
    blocks = [here for part in stored.parts for _, here in overlaps(stored.shape, part.cuts, target.cuts)]
    if len(blocks) < 2:
        return True
    mask = torch.zeros(target.out.shape, dtype=torch.bool)
    for here in blocks:
        mask[here] = True
    return bool(mask.all())

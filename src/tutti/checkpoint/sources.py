"""Sources: stored tensors to read from, whatever wrote them, and how ranks get the parts that they want."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tutti.checkpoint.index import (
    INDEX,
    MODEL,
    RANK_STATE,
    RUN_STATE,
    CheckpointIndex,
    Key,
    Slices,
    StoredPart,
    StoredTensor,
    latest_checkpoint,
    overlaps,
    parse_index,
    read_run_state,
)
from tutti.checkpoint.tensor_files import TensorFiles
from tutti.comm.world import World
from tutti.errors import CheckpointError
from tutti.parallel.layout import Cut, TensorShard
from tutti.parallel.saved_values import parse_dtype

ReadPart = Callable[[StoredPart, torch.dtype, Slices], torch.Tensor]
"""Returns the values of a stored part at an index into it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Stored tensors, and the run state beside them.

    Attributes:
        tied: further names of the model's tensors -> the name in `tensors`.
        run_state: what run.pt holds; empty where only a model is stored.
        read: None on a rank that cannot see the files.
    """

    path: Path
    tensors: dict[Key, StoredTensor]
    tied: dict[str, str] = field(default_factory=dict)
    run_state: dict[str, Any] = field(default_factory=dict)
    read: ReadPart | None = None
    _by_owner: dict[tuple[int, str], list[Key]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for key in self.tensors:
            self._by_owner.setdefault(key[:2], []).append(key)

    def model_key(self, name: str) -> Key | None:
        """Key of the model's tensor `name`; None if it is not stored."""
        key = (MODEL, self.tied.get(name, name), "")
        return key if key in self.tensors else None

    def state_keys(self, number: int, name: str) -> list[Key]:
        """Keys of the stored state tensors of one parameter of an optimizer."""
        return self._by_owner.get((number, name), [])


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTarget:
    """A part that a rank wants: `out` gets the values."""

    key: Key
    out: torch.Tensor
    cuts: tuple[Cut, ...] = ()


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a path names: itself, or the newest of a run folder. Raises CheckpointError."""
    checkpoint = latest_checkpoint(path)
    if checkpoint is None:
        raise CheckpointError(f"{path} holds no checkpoint; name a run folder, or a checkpoint in one")
    return checkpoint


def open_checkpoint(path: Path) -> Source:
    """A checkpoint's folder as a source. Raises CheckpointError."""
    if not (path / INDEX).is_file():
        raise CheckpointError(
            f"{path} holds no checkpoint (no {INDEX}); name a run folder or a checkpoint in it"
            + (f"; a file of weights alone goes to job.prepare(..., weights={path.name!r})" if path.is_file() else "")
        )
    try:
        text = (path / INDEX).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path / INDEX} cannot be read: {error}; name an earlier checkpoint") from None
    index = parse_index(text, path / INDEX)
    return Source(
        path=path,
        tensors=_by_key(index),
        tied=index.tied,
        run_state=read_run_state(path / RUN_STATE),
        read=reader_of(path),
    )


def _by_key(index: CheckpointIndex) -> dict[Key, StoredTensor]:
    tensors: dict[Key, StoredTensor] = {(MODEL, name, ""): tensor for name, tensor in index.model.items()}
    for number, states in [*enumerate(index.optimizers), (RANK_STATE, index.rank_state)]:
        for name, by_state in states.items():
            tensors.update({(number, name, state): tensor for state, tensor in by_state.items()})
    return tensors


def reader_of(folder: Path) -> ReadPart:
    """Reads parts from the tensor files of a folder."""
    files = TensorFiles(folder)

    def read(part: StoredPart, dtype: torch.dtype, index: Slices) -> torch.Tensor:
        return files.read(part.file, part.key, dtype, index)

    return read


def in_memory(path: Path, tensors: Mapping[Key, torch.Tensor], run_state: dict[str, Any] | None = None) -> Source:
    """Global tensors that are in memory, as a source; `path` names it in messages."""
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
    """Rank 0's source on every rank, readable where a rank sees the same files. Collective; raises on all ranks."""
    source: Source | None = None
    failure: str | None = None
    try:
        source = open_source(path)
    except CheckpointError as error:
        failure = str(error)
    fingerprints = world.gather(None if source is None else fingerprint(path))
    failure = world.broadcast(failure)
    if failure is not None:
        raise CheckpointError(failure)
    if all(one == fingerprints[0] for one in fingerprints):
        assert source is not None
        return source
    first = world.broadcast(None if source is None else replace(source, read=None))
    assert first is not None
    return replace(first, read=source.read if source is not None and world.is_main else None)


def fingerprint(path: Path) -> str:
    """Size and hash of the first MiB of a checkpoint's index or of a file: tells equal paths on two disks apart."""
    file = path / INDEX if (path / INDEX).is_file() else path
    if file.is_dir():
        file = next((entry for entry in sorted(file.iterdir()) if entry.is_file()), file)
    with file.open("rb") as opened:
        return f"{file.stat().st_size} {hashlib.sha256(opened.read(2**20)).hexdigest()}"


def transfer(world: World, source: Source, targets: list[LoadTarget]) -> None:
    """Fill every rank's targets from the source. Collective; raises CheckpointError on all ranks."""
    filled = dict.fromkeys(range(len(targets)), 0)
    readable = all(world.gather(source.read is not None))
    failure: str | None = None
    try:
        if readable and source.read is not None:
            for number, target in enumerate(targets):
                stored = source.tensors[target.key]
                for part in stored.parts:
                    filled[number] += _fill(target, stored, part, source.read)
    except CheckpointError as error:
        failure = str(error)
    except (RuntimeError, ValueError) as error:
        failure = f"{source.path} does not fit: {error}"
    if not readable:
        failure = _broadcast_parts(world, source, targets, filled)
    failure = failure or _find_incomplete(source, targets, filled)
    failures = [message for message in world.gather(failure) if message is not None]
    if failures:
        raise CheckpointError(failures[0])


def read_whole(source: Source, key: Key) -> torch.Tensor:
    """One global tensor of a source that this process can read. Raises CheckpointError."""
    stored = source.tensors[key]
    target = LoadTarget(key=key, out=torch.empty(stored.shape, dtype=parse_dtype(stored.dtype)))
    assert source.read is not None
    count = sum(_fill(target, stored, part, source.read) for part in stored.parts)
    failure = _find_incomplete(source, [target], {0: count})
    if failure is not None:
        raise CheckpointError(failure)
    return target.out


def _fill(target: LoadTarget, stored: StoredTensor, part: StoredPart, read: ReadPart) -> int:
    """Copy the intersection of a stored part and a target; returns its number of elements."""
    count = 0
    with torch.no_grad():
        for there, here in overlaps(stored.shape, part.cuts, target.cuts):
            values = read(part, parse_dtype(stored.dtype), there)
            target.out[here].copy_(values.reshape(target.out[here].shape))
            count += values.numel()
    return count


def _broadcast_parts(world: World, source: Source, targets: list[LoadTarget], filled: dict[int, int]) -> str | None:
    """Rank 0 reads every part and broadcasts it, for hosts that share no disk. Returns what went wrong."""
    wanted: dict[Key, list[int]] = {}
    for number, target in enumerate(targets):
        wanted.setdefault(target.key, []).append(number)
    for key, stored in source.tensors.items():
        dtype = parse_dtype(stored.dtype)
        for part in stored.parts:
            shape = TensorShard(shape=stored.shape, cuts=part.cuts).local_shape
            values, failure = None, None
            try:
                if source.read is not None:
                    values = source.read(part, dtype, tuple(slice(0, size) for size in shape))
            except CheckpointError as error:
                failure = str(error)
            failure = world.broadcast(failure)
            if failure is not None:
                return failure
            received = broadcast_tensor(world, values, shape, dtype)
            for number in wanted.get(key, ()):
                filled[number] += _fill(targets[number], stored, part, _reader_of_values(received))
    return None


def _reader_of_values(values: torch.Tensor) -> ReadPart:
    def read(part: StoredPart, dtype: torch.dtype, index: Slices) -> torch.Tensor:
        return values[index]

    return read


def broadcast_tensor(
    world: World, tensor: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Rank 0's tensor on every rank's CPU; other ranks give None."""
    if tensor is None:
        data = torch.empty(torch.Size(shape).numel() * dtype.itemsize, dtype=torch.uint8)
    else:
        data = tensor.contiguous().reshape(-1).view(torch.uint8)
    if data.numel():
        on_device = data.to(world.device)
        dist.broadcast(on_device, src=0)
        data = on_device.cpu()
    return data.view(dtype).reshape(shape)


def _find_incomplete(source: Source, targets: list[LoadTarget], filled: dict[int, int]) -> str | None:
    """Name a target with elements that no part holds. Parts may overlap, so that more is filled than wanted."""
    for number, target in enumerate(targets):
        if filled[number] < target.out.numel() or not _covered(source.tensors[target.key], target):
            name = " ".join(filter(None, target.key[1:]))
            return f"{source.path} holds only parts of {name}: it was not written whole; name an earlier checkpoint"
    return None


def _covered(stored: StoredTensor, target: LoadTarget) -> bool:
    """Whether the parts hold every element of a target that got as many values as it has elements."""
    blocks = [here for part in stored.parts for _, here in overlaps(stored.shape, part.cuts, target.cuts)]
    if len(blocks) < 2:
        return True
    mask = torch.zeros(target.out.shape, dtype=torch.bool)
    for here in blocks:
        mask[here] = True
    return bool(mask.all())

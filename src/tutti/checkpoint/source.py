"""Sources: stored state to read from, whatever wrote it, and how it reaches the ranks that want parts of it."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tutti.checkpoint.collect import KEPT, MODEL, Key
from tutti.checkpoint.index import INDEX, OLD, SMALL, Entry, Index, Part, index_of_text
from tutti.checkpoint.merge import read_small
from tutti.checkpoint.ranges import Index as Place
from tutti.checkpoint.ranges import overlaps
from tutti.checkpoint.send import broadcast_tensor
from tutti.checkpoint.tensors import Files, dtype_of
from tutti.comm.world import World
from tutti.errors import CheckpointError
from tutti.parallel.layout import Cut, Held

Read = Callable[[Part, torch.dtype, Place], torch.Tensor]
"""The values of a stored part at an index in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Stored tensors, and what is beside them (`small`: empty where only a model is stored). `tied`: other names of the
    model's tensors; `read`: None on a rank that cannot see the disk.
    """

    path: Path
    entries: dict[Key, Entry]
    tied: dict[str, str] = field(default_factory=dict)
    small: dict[str, Any] = field(default_factory=dict)
    read: Read | None = None
    states: dict[tuple[int, str], list[Key]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for key in self.entries:
            self.states.setdefault(key[:2], []).append(key)

    def key_of(self, name: str) -> Key | None:
        """Where the model's tensor `name` is stored; None if it is not."""
        key = (MODEL, self.tied.get(name, name), "")
        return key if key in self.entries else None

    def state_keys(self, number: int, name: str) -> list[Key]:
        """The stored state tensors of one parameter of an optimizer."""
        return self.states.get((number, name), [])


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A part that is wanted: `out` gets the values."""

    key: Key
    out: torch.Tensor
    cuts: tuple[Cut, ...] = ()


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
    index = index_of_text(text, path / INDEX)
    files = Files(path)

    def read(part: Part, dtype: torch.dtype, place: Place) -> torch.Tensor:
        return files.read(part.file, part.key, dtype, place)

    return Source(path=path, entries=_entries(index), tied=index.tied, small=read_small(path / SMALL), read=read)


def _entries(index: Index) -> dict[Key, Entry]:
    entries: dict[Key, Entry] = {(MODEL, name, ""): entry for name, entry in index.model.items()}
    for number, states in enumerate(index.optimizers):
        for name, keys in states.items():
            entries.update({(number, name, key): entry for key, entry in keys.items()})
    for name, keys in index.kept.items():
        entries.update({(KEPT, name, key): entry for key, entry in keys.items()})
    return entries


def in_memory(path: Path, tensors: Mapping[Key, torch.Tensor], small: dict[str, Any]) -> Source:
    """Whole tensors that are in memory already, as a source."""
    entries = {}
    for key, tensor in tensors.items():
        part = Part(file="", key=repr(key))
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries[key] = Entry(shape=tuple(tensor.shape), dtype=dtype, parts=(part,))
    by_text = {repr(key): tensor for key, tensor in tensors.items()}

    def read(part: Part, dtype: torch.dtype, place: Place) -> torch.Tensor:
        return by_text[part.key][place]

    return Source(path=path, entries=entries, small=small, read=read)


def shared_source(world: World, path: Path, open_it: Callable[[Path], Source]) -> Source:
    """The source as rank 0 sees it, on every rank; readable where the same is seen. Collective, raises alike."""
    mine: Source | None = None
    failure: str | None = None
    try:
        mine = open_it(path)
    except CheckpointError as error:
        failure = str(error)
    prints = world.gather(None if mine is None else fingerprint(path))
    failure = world.broadcast(failure)
    if failure is not None:
        raise CheckpointError(failure)
    if all(one == prints[0] for one in prints):
        assert mine is not None
        return mine
    said = world.broadcast(None if mine is None else replace(mine, read=None))
    assert said is not None
    return replace(said, read=mine.read if mine is not None and world.is_main else None)


def fingerprint(path: Path) -> str:
    """Tells two sources of one path on two disks apart: of an index, or of a file's size and first MiB."""
    file = next((one for one in (path / INDEX, path / OLD) if one.is_file()), path)
    with file.open("rb") as opened:
        return f"{file.stat().st_size} {hashlib.sha256(opened.read(2**20)).hexdigest()}"


def transfer(world: World, source: Source, targets: list[Target]) -> None:
    """Fill every target from the source, on all ranks. Raises CheckpointError, on every rank, for what is not there."""
    done = dict.fromkeys(range(len(targets)), 0)
    readable = all(world.gather(source.read is not None))
    failure: str | None = None
    try:
        if readable and source.read is not None:
            for number, target in enumerate(targets):
                entry = source.entries[target.key]
                for part in entry.parts:
                    done[number] += _fill(target, entry, part, source.read)
    except CheckpointError as error:
        failure = str(error)
    except (RuntimeError, ValueError) as error:
        failure = f"{source.path} does not fit: {error}"
    if not readable:
        failure = _send_all(world, source, targets, done)
    failure = failure or _incomplete(source, targets, done)
    failures = [words for words in world.gather(failure) if words is not None]
    if failures:
        raise CheckpointError(failures[0])


def read_whole(source: Source, key: Key) -> torch.Tensor:
    """One whole tensor of a source that this process can read. Raises CheckpointError."""
    entry = source.entries[key]
    target = Target(key=key, out=torch.empty(entry.shape, dtype=dtype_of(entry.dtype)))
    assert source.read is not None
    count = sum(_fill(target, entry, part, source.read) for part in entry.parts)
    failure = _incomplete(source, [target], {0: count})
    if failure is not None:
        raise CheckpointError(failure)
    return target.out


def _fill(target: Target, entry: Entry, part: Part, read: Read) -> int:
    """Copy what a stored part and a target have in common; returns the number of elements."""
    count = 0
    with torch.no_grad():
        for there, here in overlaps(entry.shape, part.cuts, target.cuts):
            values = read(part, dtype_of(entry.dtype), there)
            target.out[here].copy_(values.reshape(target.out[here].shape))
            count += values.numel()
    return count


def _send_all(world: World, source: Source, targets: list[Target], done: dict[int, int]) -> str | None:
    """Rank 0 reads every part and sends it to all: hosts that share no disk. Returns what went wrong."""
    wanted: dict[Key, list[int]] = {}
    for number, target in enumerate(targets):
        wanted.setdefault(target.key, []).append(number)
    for key, entry in source.entries.items():
        dtype = dtype_of(entry.dtype)
        for part in entry.parts:
            shape = Held(shape=entry.shape, cuts=part.cuts).local_shape
            values, failure = None, None
            try:
                if source.read is not None:
                    values = source.read(part, dtype, tuple(slice(0, size) for size in shape))
            except CheckpointError as error:
                failure = str(error)
            failure = world.broadcast(failure)
            if failure is not None:
                return failure
            sent = broadcast_tensor(world, values, shape, dtype)
            for number in wanted.get(key, ()):
                done[number] += _fill(targets[number], entry, part, _reader(sent))
    return None


def _reader(values: torch.Tensor) -> Read:
    """Reads from the values of a part that are in memory."""

    def read(part: Part, dtype: torch.dtype, place: Place) -> torch.Tensor:
        return values[place]

    return read


def _incomplete(source: Source, targets: list[Target], done: dict[int, int]) -> str | None:
    """Parts may overlap (then more is filled than wanted), but nothing may be left out."""
    for number, target in enumerate(targets):
        if done[number] < target.out.numel() or not _covered(source.entries[target.key], target):
            name = " ".join(filter(None, target.key[1:]))
            return f"{source.path} holds only parts of {name}: it was not written whole; name an earlier checkpoint"
    return None


def _covered(entry: Entry, target: Target) -> bool:
    """Whether the parts hold every element of a target that got as many values as it has elements."""
    places = [here for part in entry.parts for _, here in overlaps(entry.shape, part.cuts, target.cuts)]
    if len(places) < 2:
        return True
    mask = torch.zeros(target.out.shape, dtype=torch.bool)
    for here in places:
        mask[here] = True
    return bool(mask.all())
